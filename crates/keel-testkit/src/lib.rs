//! Naive oracles, shared case lists and tolerances (test use only).

//! Naive oracles, shared case lists and tolerances (test use only).

pub mod cases;
pub mod checks;
pub mod compare;
pub mod naive;
pub mod random;
pub mod tolerance;

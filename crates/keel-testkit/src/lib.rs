//! Naive oracles, shared case lists, tolerances and fixtures (test use only).

pub mod cases;
pub mod checks;
pub mod compare;
pub mod fixtures;
pub mod naive;
pub mod random;
pub mod tolerance;

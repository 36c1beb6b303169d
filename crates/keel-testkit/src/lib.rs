//! Naive oracles, shared case lists, tolerances, fixtures and disturbances (test use only).

pub mod cases;
pub mod checks;
pub mod compare;
pub mod fixtures;
pub mod fixtures_plain;
pub mod intercepted;
pub mod naive;
pub mod random;
pub mod reference;
mod remembered;
pub mod skipped;
pub mod tolerance;

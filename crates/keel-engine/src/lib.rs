//! Samplers, token iterators and the memory planner.

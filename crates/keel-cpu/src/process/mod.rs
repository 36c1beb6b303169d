//! The process itself: its heap, and the pages of its code. These calls need `unsafe`, which the crates that use them
//! do not allow.

pub mod code;
pub mod heap;

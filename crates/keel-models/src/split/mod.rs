//! A model on several devices: the part that a device holds, and what of a checkpoint it reads.

pub(crate) mod columns;
pub(crate) mod part;
pub(crate) mod share;
pub(crate) mod share_parameters;
pub(crate) mod sums;

//! A model on several devices: the part that a device holds, and the rows and columns of a checkpoint that it reads.

pub(crate) mod columns;
pub(crate) mod part;
pub(crate) mod share;
pub(crate) mod share_parameters;
pub(crate) mod sums;

//! Stage 3: everything that makes one launch of several operations.
//!
//! | kind | effect on the kernels | who decides |
//! |---|---|---|
//! | [`chains`] | element-wise f32 kernels become one kernel | this crate |
//! | [`absorb`] | a producer runs within its readers, and its value is never in memory | [`Programs::absorbs`] |
//! | [`narrow`] | a value that one kernel reads takes 16 bits an element | [`Programs::narrows`] |
//! | [`groups`] | consecutive kernels run together, and their values stay in memory | [`Programs::group_of`] |
//!
//! The first three come before the memory plan, because they remove values or make them smaller. Groups come after it,
//! because kernels that run together must not write memory that one of them still reads, and the plan decides where
//! values lie. A backend runs the groups of the program and forms no others.
//!
//! [`Programs::absorbs`]: crate::Programs::absorbs
//! [`Programs::narrows`]: crate::Programs::narrows
//! [`Programs::group_of`]: crate::Programs::group_of

mod absorb;
mod chains;
mod groups;
mod narrow;

pub(super) use groups::group;
pub use groups::{KernelGroup, ProgramGroup};

use super::lower::LoweredProgram;
use crate::backend::Backend;
use crate::ops::Regime;

/// Forms chains, and lets the backend absorb producers and narrow values.
pub(super) fn fuse(lowered: &mut LoweredProgram, regime: Option<Regime>, backend: &dyn Backend) {
    chains::chain(lowered);
    lowered.kernels.iter_mut().for_each(|kernel| kernel.regime = regime);
    absorb::absorb(lowered, backend);
    narrow::narrow(lowered, backend);
}

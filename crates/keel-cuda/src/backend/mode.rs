//! The options that decide which kernels run: the arithmetic, and the changes that must leave bits as they are.

/// Arithmetic where the operations themselves leave it open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Tensor cores with 8-bit or 16-bit operands where that is faster. Sums are exact integers or f32.
    #[default]
    Fast,
    /// f32 throughout.
    F32,
}

/// The changes under which a row keeps its bits. Each value includes those before it.
///
/// ```
/// use keel_cuda::{CudaOptions, Determinism};
/// let options = CudaOptions { determinism: Determinism::Steps, ..CudaOptions::default() };
/// assert!(options.determinism > Determinism::Off && options.determinism < Determinism::Devices);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Determinism {
    /// The fastest kernels: the other rows of a step may change bits.
    #[default]
    Off,
    /// Within a regime: the size of a prefill step (a multiple of 64), the other sequences and drafts of a step, saving
    /// and loading.
    Steps,
    /// Also whether 1, 2 or 4 devices share a layer, if the model adds its columns in the fixed order.
    Devices,
}

/// The options that decide which kernels run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mode {
    pub precision: Precision,
    pub determinism: Determinism,
}

impl Mode {
    /// Whether bits do not depend on how work is cut into steps.
    pub fn is_deterministic(self) -> bool {
        self.determinism >= Determinism::Steps
    }

    /// Whether they do not depend on how many devices share a layer, either.
    pub fn spans_devices(self) -> bool {
        self.determinism >= Determinism::Devices
    }
}

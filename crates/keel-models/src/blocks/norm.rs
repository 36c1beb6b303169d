//! RMS norm with its effective scale.

use keel_array::{AddedNorm, Array, Result};

/// `x / sqrt(mean(x^2) + eps) * scale`.
#[derive(Debug)]
pub struct RmsNorm {
    /// `[D]`; one plus the stored weight if a checkpoint stores offsets from one.
    pub scale: Array,
    /// Added to the mean square.
    pub eps: f32,
}

impl RmsNorm {
    /// The norm of each row.
    ///
    /// # Errors
    /// If x does not fit.
    pub fn apply(&self, x: &Array) -> Result<Array> {
        x.rms_norm(&self.scale, self.eps)
    }

    /// `x + residual`, and its norm.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn add_and_apply(&self, x: &Array, residual: &Array) -> Result<AddedNorm> {
        x.add_rms_norm(residual, &self.scale, self.eps)
    }
}

//! Rotations of layers' inputs (ParoQuant).

use keel_array::{Array, Category, DType, PairRotation};
use keel_weights::RotationValues;

use super::{Loader, SourceRows};
use crate::{ModelError, Result};

impl Loader<'_> {
    /// The rotation of the input of this layer alone.
    pub(super) fn own_rotation(&self, module: &str) -> Result<Option<RotationValues>> {
        self.parameters.rotation(&format!("{module}."), module)
    }

    /// Returns an error if the input of a layer is rotated, for layers that do not rotate it.
    pub(super) fn refuse_rotation(&self, module: &str) -> Result<()> {
        if self.own_rotation(module)?.is_none() {
            return Ok(());
        }
        let reason = format!(
            "{module}: its input is rotated (ParoQuant), which is not supported for this layer: take a checkpoint in which \
             it is not quantised"
        );
        Err(ModelError::Config(reason))
    }

    /// The rotation of the input of a layer's experts. Any of the modules may be one of theirs.
    ///
    /// # Errors
    /// If it is misshapen, an expert has a separate rotation, or memory runs out.
    pub fn experts_rotation(
        &self,
        prefix: &str,
        experts: &[Vec<SourceRows>],
    ) -> Result<Option<PairRotation>> {
        let Some(first) = experts.first().and_then(|sources| sources.first()) else { return Ok(None) };
        for source in experts.iter().flatten() {
            if self.own_rotation(&source.module)?.is_some() {
                let reason = format!("{}: an expert with a rotation of its own is not read", source.module);
                return Err(ModelError::Config(reason));
            }
        }
        let values = self.parameters.rotation(prefix, &first.module)?;
        values.map(|values| self.rotation(&values)).transpose()
    }

    pub(super) fn rotation(&self, values: &RotationValues) -> Result<PairRotation> {
        let cols = values.scales.len();
        let shape = [values.pairs.len() / cols.max(1), cols];
        let persistent =
            |shape: &[usize], dtype| Array::persistent(self.runtime, Category::Weights, shape, dtype);
        let pairs = persistent(&shape, DType::U32)?;
        let cos_sin = persistent(&shape, DType::F32)?;
        if !self.runtime.backend().is_planning() {
            let angles = values.angles.iter().map(|angle| f64::from(*angle));
            let elements: Vec<f32> = angles.flat_map(|a| [a.cos() as f32, a.sin() as f32]).collect();
            pairs.write(&values.pairs)?;
            cos_sin.write(&elements)?;
        }
        (self.progress)((pairs.bytes() + cos_sin.bytes()) as u64);
        Ok(PairRotation { scales: self.constant(&values.scales)?, pairs, cos_sin })
    }
}

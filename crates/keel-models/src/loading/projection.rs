//! Linear layers that read the same input, as one product where they can be.

use keel_array::{Array, PairRotation, Weight};

/// Layers that read the same input.
#[derive(Debug)]
pub struct Projection {
    /// One weight for all layers, or one for each.
    pub(super) weights: Vec<Weight>,
    /// The rotation of each weight's input.
    pub(super) rotations: Vec<Option<PairRotation>>,
    /// Outputs of each layer.
    pub(super) widths: Vec<usize>,
    /// Bias of all outputs together, f32 `[sum of widths]`.
    pub bias: Option<Array>,
}

impl Projection {
    /// All outputs next to each other, `[.., sum of widths]`.
    ///
    /// # Errors
    /// If x does not fit.
    pub fn apply_wide(&self, x: &Array) -> keel_array::Result<Array> {
        let products = self.products(x)?;
        let wide = match &products[..] {
            [product] => product.clone(),
            parts => Array::concatenate(&parts.iter().collect::<Vec<_>>(), -1)?,
        };
        self.bias.as_ref().map_or(Ok(wide.clone()), |bias| wide.add(bias))
    }

    /// The outputs of each layer, `[.., width]`.
    ///
    /// # Errors
    /// If x does not fit.
    pub fn apply(&self, x: &Array) -> keel_array::Result<Vec<Array>> {
        if self.weights.len() > 1 && self.bias.is_none() {
            return self.products(x);
        }
        let wide = self.apply_wide(x)?;
        let mut start = 0;
        let part = |width: &usize| {
            start += width;
            wide.slice_axis(-1, start - width, start)
        };
        self.widths.iter().map(part).collect()
    }

    /// As [`Projection::apply`], for the layers from number `first` on. The other layers are not computed if the device
    /// can leave them out.
    ///
    /// # Errors
    /// If x does not fit.
    pub fn apply_from(&self, first: usize, x: &Array) -> keel_array::Result<Vec<Array>> {
        if let (Some(weights), None) = (self.weights_from(first), &self.bias) {
            let widths = self.widths[first..].to_vec();
            let rotations = self.rotations[self.rotations.len() - weights.len()..].to_vec();
            return Projection { weights, rotations, widths, bias: None }.apply(x);
        }
        Ok(self.apply(x)?.split_off(first))
    }

    /// The weights of the layers from number `first` on, if they can be separated from the others.
    fn weights_from(&self, first: usize) -> Option<Vec<Weight>> {
        match &self.weights[..] {
            [whole] if self.widths.len() > 1 => {
                let start = self.widths[..first].iter().sum();
                whole.rows(start..whole.spec().rows).map(|rest| vec![rest])
            }
            each => Some(each[first..].to_vec()),
        }
    }

    /// `residual + W x` for a projection of one layer.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn apply_onto(&self, x: &Array, residual: &Array) -> keel_array::Result<Array> {
        match (&self.weights[..], &self.rotations[..], &self.bias) {
            ([weight], [rotation], None) => input(x, rotation)?.linear_add(weight, residual),
            _ => residual.add(&self.apply_wide(x)?),
        }
    }

    fn products(&self, x: &Array) -> keel_array::Result<Vec<Array>> {
        self.weights.iter().zip(&self.rotations).map(|(w, rotation)| input(x, rotation)?.linear(w)).collect()
    }
}

/// The input of a layer: x, rotated if the layer has a rotation.
pub fn input(x: &Array, rotation: &Option<PairRotation>) -> keel_array::Result<Array> {
    rotation.as_ref().map_or(Ok(x.clone()), |rotation| x.rotate_pairs(rotation))
}

//! A layer whose columns several devices may share.

use keel_array::{Array, PairRotation, Result, Weight};

use super::input;
use crate::split::sums::{SumOrder, Sums};

/// A layer that reads the output of heads or columns: `W x [+ bias]`, summed over the devices that share its columns.
#[derive(Debug)]
pub struct RowParallel {
    /// This device's columns, in the parts whose products are added.
    pub(super) parts: Vec<Weight>,
    /// Tiles of the columns, see [`Parameters::column_tiles`](super::Parameters::column_tiles).
    pub(super) tiles: usize,
    /// The rotation of the input.
    pub(super) rotation: Option<PairRotation>,
    /// How the products are added.
    pub(super) sums: Sums,
    /// f32 `[N]`. In the order by device, 0 on all devices but the first.
    pub bias: Option<Array>,
}

impl RowParallel {
    /// Whether the columns have tiles, so that x must have them.
    pub fn is_tiled(&self) -> bool {
        self.tiles > 1
    }

    /// `[residual +] W x` of the whole layer, on every device.
    ///
    /// # Errors
    /// If the operands do not fit.
    pub fn apply(&self, x: &Array, residual: Option<&Array>) -> Result<Array> {
        match self.sums.order {
            SumOrder::ByDevice => {
                let start = residual.and_then(|residual| self.sums.start(residual));
                self.sums.by_device(self.share(x, start)?)
            }
            SumOrder::Fixed => {
                let sum = self.sums.in_order(&self.products(x)?)?;
                let terms = [self.bias.as_ref(), residual].into_iter().flatten();
                terms.into_iter().try_fold(sum, |sum, term| sum.add(term))
            }
        }
    }

    /// `[start +] W x` of this device's columns alone, where they are one part.
    pub(crate) fn share(&self, x: &Array, start: Option<&Array>) -> Result<Array> {
        let [weight] = &self.parts[..] else { unreachable!("columns have parts in the fixed order alone") };
        let x = input(x, &self.rotation)?;
        match (&self.bias, start) {
            (None, Some(start)) => x.linear_add(weight, start),
            (None, None) => x.linear(weight),
            (Some(bias), None) => x.linear(weight)?.add(bias),
            (Some(bias), Some(start)) => start.add(&x.linear(weight)?.add(bias)?),
        }
    }

    /// The product of each of this device's parts.
    fn products(&self, x: &Array) -> Result<Vec<Array>> {
        let columns = columns_of(&input(x, &self.rotation)?, &self.parts, self.tiles)?;
        columns.iter().zip(&self.parts).map(|(x, weight)| x.linear(weight)).collect()
    }

    /// The sum of all parts on all devices, without a residual, in the fixed order.
    pub(crate) fn in_order(&self, x: &Array) -> Result<Array> {
        self.sums.in_order(&self.products(x)?)
    }
}

/// The columns of x that each of the parts reads: an even share of each tile.
pub(crate) fn columns_of(x: &Array, parts: &[Weight], tiles: usize) -> Result<Vec<Array>> {
    if parts.len() == 1 {
        return Ok(vec![x.clone()]);
    }
    let (rows, cols) =
        (x.shape().iter().rev().skip(1).product::<usize>(), x.shape().last().copied().unwrap_or(0));
    let share = cols / tiles / parts.len();
    let columns = |i: usize| match tiles {
        1 => x.slice_axis(-1, i * share, (i + 1) * share),
        _ => {
            let of_tiles =
                x.reshape([rows, tiles, cols / tiles])?.slice_axis(-1, i * share, (i + 1) * share)?;
            of_tiles.reshape([rows, tiles * share])
        }
    };
    (0..parts.len()).map(columns).collect()
}

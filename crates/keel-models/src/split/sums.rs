//! Sums over columns that several devices share.
//!
//! A layer that reads the output of heads, columns or experts is a sum over its columns. One device adds all of them in
//! the order of its kernel. Devices that share the columns add up their sums, which is another order, so other bits.
//!
//! With [`SumOrder::Fixed`] the columns are cut into the same parts whatever the number of devices. Each part is a
//! product by itself. A device computes the parts that it holds, gets those of its peers, and adds all in their order:
//!
//! ```text
//!                     part 0     part 1     part 2     part 3
//! 1 device            ──────────────── 0 ────────────────
//! 2 devices           ─────── 0 ───────     ─────── 1 ───────       y = ((p0 + p1) + p2) + p3
//! 4 devices           ── 0 ──    ── 1 ──    ── 2 ──    ── 3 ──
//! ```

use keel_array::{Array, DType, Peers, Result};

use crate::Share;

/// The order in which the columns of a sum are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SumOrder {
    /// Each device adds its columns in one product; then the sums of the devices are added.
    #[default]
    ByDevice,
    /// An order that is the same on 1, 2 and 4 devices, to the bit.
    Fixed,
}

/// Parts of a sum in the fixed order. Columns that do not divide into this number of parts have half of it, or one.
const PARTS: usize = 4;

/// How a layer's sums over columns are made.
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    /// The order.
    pub order: SumOrder,
    /// This device's share of the columns.
    pub share: Share,
}

impl Sums {
    /// The same sums of columns that this device has whole.
    pub(crate) fn whole(self) -> Sums {
        Sums { share: Share::default(), ..self }
    }

    /// Into how many parts this device's `cols` columns are cut. `together` columns are coded together and stay in one
    /// part.
    pub(crate) fn parts(self, cols: usize, together: usize) -> usize {
        if self.order == SumOrder::ByDevice {
            return 1;
        }
        let (count, whole) = (self.share.count, cols * self.share.count);
        let divides = |parts: &usize| whole.is_multiple_of(parts * together);
        let parts = [PARTS, PARTS / 2].into_iter().find(divides).unwrap_or(1);
        if parts.is_multiple_of(count) { parts / count } else { 1 }
    }

    /// The array to which this device adds its share: the residual on the first device that shares the layer, nothing
    /// on the others.
    pub(crate) fn start(self, residual: &Array) -> Option<&Array> {
        (self.share.index == 0).then_some(residual)
    }

    /// The sum of the shares of all devices, in the order of the devices.
    pub(crate) fn by_device(self, share: Array) -> Result<Array> {
        self.share.peers().map_or(Ok(share.clone()), |peers| share.all_reduce(peers))
    }

    /// The sum of the parts of all devices, in the order of the columns. `own` are this device's.
    pub(crate) fn in_order(self, own: &[Array]) -> Result<Array> {
        match self.share.peers() {
            Some(peers) => add_up(&gathered(own, peers)?),
            None => add_up(own),
        }
    }
}

/// `((x0 + x1) + x2) + ...`
pub(crate) fn add_up(terms: &[Array]) -> Result<Array> {
    let Some((first, rest)) = terms.split_first() else { unreachable!("a sum has a part") };
    rest.iter().try_fold(first.clone(), |sum, term| sum.add(term))
}

/// The parts of all devices, f32 `[T, N]` each. Those of the first device come first.
fn gathered(own: &[Array], peers: Peers) -> Result<Vec<Array>> {
    let Some(shape) = own.first().map(Array::shape) else { unreachable!("a device has a part") };
    let stacked = |count: usize| [&[count], &shape[..]].concat();
    let each: Vec<Array> = own.iter().map(|part| part.reshape(stacked(1))).collect::<Result<_>>()?;
    let own = match &each[..] {
        [only] => only.clone(),
        each => Array::concatenate(&each.iter().collect::<Vec<_>>(), 0)?,
    };
    let count = each.len() * peers.count;
    let all = own.all_gather(peers)?.reshape(stacked(count))?;
    (0..count).map(|i| all.slice_axis(0, i, i + 1)?.reshape(shape.clone())).collect()
}

/// Gives every device the values of the device that has them. `is_own` (bool, broadcasts) is true where this device has
/// the value. Each value belongs to one device. The others add -0, which changes no bit, not even of zeros.
pub(crate) fn of_their_device(is_own: &Array, values: &Array, peers: Peers) -> Result<Array> {
    is_own.select(values, &nothing(values)?)?.all_reduce(peers)
}

/// A summand that does not change a sum: -0, f32 `[1]`.
pub(crate) fn nothing(like: &Array) -> Result<Array> {
    Array::full(like.runtime(), [1], DType::F32, -0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(count: usize, whole: usize, together: usize) -> usize {
        let share = Share { count, ..Share::default() };
        Sums { order: SumOrder::Fixed, share }.parts(whole / count, together) * count
    }

    #[test]
    fn the_parts_of_a_sum_do_not_depend_on_the_number_of_devices() {
        for (whole, together, expected) in
            [(512usize, 64usize, 4), (256, 64, 4), (128, 64, 2), (192, 64, 1), (96, 1, 4)]
        {
            let divides = |count: &usize| whole.is_multiple_of(count * together);
            for count in [1, 2, 4].into_iter().filter(divides) {
                assert_eq!(parts(count, whole, together), expected, "{whole} columns on {count} devices");
            }
        }
    }

    #[test]
    fn other_numbers_of_devices_have_a_part_each() {
        assert_eq!([3, 6, 8].map(|count| parts(count, 768, 32)), [3, 6, 8]);
        let any = Sums { order: SumOrder::ByDevice, share: Share::default() };
        assert_eq!(any.parts(512, 64), 1);
    }
}

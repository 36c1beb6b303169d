//! How quantised weights are coded: bits of a code, and the bytes that scale a group of columns.

use super::{Rows, TILE_COLS, TILE_ROWS};
use keel_array::{BlockFormat, WeightFormat};

/// Columns that share a superscale.
const SUPER_COLS: usize = 256;

/// Sizes of a coding, as in `weight_tiles.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::backend) struct Coding {
    /// Bits of a code.
    pub bits: usize,
    /// Columns that share a scale.
    pub group: usize,
    /// Bytes of a group's scale, for one row.
    pub sub_bytes: usize,
    /// Bytes that the groups of 256 columns of a row share.
    pub super_bytes: usize,
}

impl Coding {
    /// The coding of a quantised weight; `None` for a dense one.
    pub fn of(format: WeightFormat) -> Option<Coding> {
        let coding =
            |bits, group, sub_bytes, super_bytes| Some(Coding { bits, group, sub_bytes, super_bytes });
        match format {
            WeightFormat::Dense(_) => None,
            WeightFormat::Affine { bits, group_size, scale_dtype } => {
                coding(bits.into(), group_size.into(), 2 * scale_dtype.size(), 0)
            }
            WeightFormat::Blocks(format) => match format {
                BlockFormat::Q4_0 | BlockFormat::IQ4NL => coding(4, 32, 2, 0),
                BlockFormat::Q4_1 => coding(4, 32, 4, 0),
                BlockFormat::Q5_0 => coding(5, 32, 2, 0),
                BlockFormat::Q5_1 => coding(5, 32, 4, 0),
                BlockFormat::Q8_0 => coding(8, 32, 2, 0),
                BlockFormat::MXFP4 => coding(4, 32, 1, 0),
                BlockFormat::Q2K => coding(2, 16, 1, 4),
                BlockFormat::Q3K => coding(3, 16, 1, 2),
                BlockFormat::Q4K => coding(4, 32, 2, 4),
                BlockFormat::Q5K => coding(5, 32, 2, 4),
                BlockFormat::Q6K => coding(6, 16, 1, 2),
                BlockFormat::IQ4XS => coding(4, 32, 1, 2),
            },
        }
    }

    /// Scale groups of a tile.
    pub fn parts(&self) -> usize {
        (TILE_COLS / self.group).max(1)
    }

    /// Tiles that share a scale group.
    pub fn share(&self) -> usize {
        self.group.div_ceil(TILE_COLS)
    }

    /// Bytes of the codes of a tile.
    pub fn code_bytes(&self) -> usize {
        TILE_ROWS * TILE_COLS / 8 * self.bits
    }

    /// Bytes of the scale groups of a tile, or of all tiles that share one.
    fn sub_tile(&self) -> usize {
        TILE_ROWS * self.parts() * self.sub_bytes
    }

    /// Bytes of the scales of a row tile with `tiles` column tiles.
    pub fn pair_bytes(&self, tiles: usize) -> usize {
        let supers = tiles / (SUPER_COLS / TILE_COLS) * TILE_ROWS * self.super_bytes;
        tiles.div_ceil(self.share()).saturating_mul(self.sub_tile()).saturating_add(supers)
    }

    /// `COPY_BYTES` of the kernels: room for `tiles` column tiles of a row tile in shared memory.
    pub fn copy_bytes(&self, tiles: usize) -> usize {
        let subs = tiles.div_ceil(self.share()) * self.sub_tile();
        tiles * self.code_bytes() + subs + TILE_ROWS * self.super_bytes
    }

    /// The scales of the rows:
    /// `[row tiles][column tiles, or those that share a group][row % 8][group of the tile][half]`.
    /// The superscales that four tiles share come before those four tiles, `[row % 8][half]`.
    pub(super) fn pack_pairs(&self, rows: &Rows<'_>, count: usize, row_tile_bytes: usize) -> Vec<u8> {
        let groups = rows.subs.len() / self.sub_bytes / count;
        let supers = rows.supers.len().checked_div(self.super_bytes * count).unwrap_or(0);
        let mut packed = vec![0; count.div_ceil(TILE_ROWS) * row_tile_bytes];
        // Bytes of the shared parts before a tile's subs: there is one before each four tiles.
        let gap = |tile: usize| match self.super_bytes {
            0 => 0,
            bytes => (tile / (SUPER_COLS / TILE_COLS) + 1) * TILE_ROWS * bytes,
        };
        for row in 0..count {
            let base = row / TILE_ROWS * row_tile_bytes;
            let (g, half) = (row % 8, row % TILE_ROWS / 8);
            let mut copy = |at: usize, from: &[u8]| packed[base + at..][..from.len()].copy_from_slice(from);
            for group in 0..groups {
                let (tile, part) = (group / self.parts(), group % self.parts());
                let place = ((g * self.parts() + part) * 2 + half) * self.sub_bytes;
                let from = (row * groups + group) * self.sub_bytes;
                copy(tile * self.sub_tile() + gap(tile) + place, &rows.subs[from..from + self.sub_bytes]);
            }
            for i in 0..supers {
                let tile = i * (SUPER_COLS / TILE_COLS);
                let at = tile * self.sub_tile() + i * TILE_ROWS * self.super_bytes;
                let from = (row * supers + i) * self.super_bytes;
                let place = (g * 2 + half) * self.super_bytes;
                copy(at + place, &rows.supers[from..from + self.super_bytes]);
            }
        }
        packed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads them back as `tiles_at` and `load_pairs` of `weight_tiles.cuh` do.
    #[test]
    fn what_scales_a_group_is_found_again() {
        for format in
            [BlockFormat::Q4K, BlockFormat::Q6K, BlockFormat::Q2K, BlockFormat::Q4_1, BlockFormat::MXFP4]
        {
            let coding = Coding::of(WeightFormat::Blocks(format)).expect("blocks have codes");
            let (count, cols) = (19, 3 * SUPER_COLS);
            let (groups, shared) = (cols / coding.group, if coding.super_bytes > 0 { 3 } else { 0 });
            let numbered =
                |len: usize, step: usize| -> Vec<u8> { (0..len).map(|i| (i * step % 251) as u8).collect() };
            let subs = numbered(count * groups * coding.sub_bytes, 7);
            let supers = numbered(count * shared * coding.super_bytes, 11);
            let row_tile_bytes = coding.pair_bytes(cols / TILE_COLS);
            let rows = Rows { codes: &[], subs: &subs, supers: &supers };
            let packed = coding.pack_pairs(&rows, count, row_tile_bytes);
            let super_tile = TILE_ROWS * coding.super_bytes;
            for row in 0..count {
                let (rt, g, half) = (row / 16, row % 8, row % 16 / 8);
                for group in 0..groups {
                    let (kt, part) = (group / coding.parts(), group % coding.parts());
                    let supers_at = rt * row_tile_bytes + kt / 4 * (super_tile + 4 * coding.sub_tile());
                    let subs_at = match coding.super_bytes {
                        0 => rt * row_tile_bytes + kt * coding.sub_tile(),
                        _ => supers_at + super_tile + kt % 4 * coding.sub_tile(),
                    };
                    let at = subs_at + ((g * coding.parts() + part) * 2 + half) * coding.sub_bytes;
                    let i = (row * groups + group) * coding.sub_bytes;
                    let each = coding.sub_bytes;
                    assert_eq!(
                        packed[at..at + each],
                        subs[i..i + each],
                        "{format}: row {row}, group {group}"
                    );
                    let (at, each) = (supers_at + (g * 2 + half) * coding.super_bytes, coding.super_bytes);
                    let i = (row * shared + kt / 4) * each;
                    assert!(
                        each == 0 || packed[at..at + each] == supers[i..i + each],
                        "{format}: row {row}, tile {kt}"
                    );
                }
            }
        }
    }
}

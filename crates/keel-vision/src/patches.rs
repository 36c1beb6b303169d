//! The order in which a tower reads a picture: patches of pixels, grouped in blocks. Each block becomes one token.

use rayon::prelude::*;

use crate::{Picture, PixelScale};

/// Number of patches along time, height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Groups of frames.
    pub t: usize,
    /// Rows of patches.
    pub h: usize,
    /// Patches per row.
    pub w: usize,
}

impl Grid {
    /// Total number of patches.
    pub fn patches(&self) -> usize {
        self.t * self.h * self.w
    }
}

/// Sizes of patches and blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchShape {
    /// Pixels along a side of a patch.
    pub side: usize,
    /// Patches along a side of a block.
    pub merge: usize,
    /// Frames per patch.
    pub frames: usize,
}

impl PatchShape {
    /// Number of values per patch.
    pub fn values(&self) -> usize {
        3 * self.frames * self.side * self.side
    }
}

/// Returns one row per patch, in the order `(t, block row, block column, row in block, column in block)`. Columns are
/// in the order `(channel, frame, y, x)`. All frames have the same size, a multiple of the block's. The last frame is
/// repeated until the number of frames is a multiple of the patch's.
pub(crate) fn patches(frames: &[&Picture], shape: PatchShape, scale: &PixelScale) -> (Vec<f32>, Grid) {
    let PatchShape { side, merge, frames: depth } = shape;
    let (Some(first), Some(last)) = (frames.first(), frames.len().checked_sub(1)) else {
        return (Vec::new(), Grid { t: 0, h: 0, w: 0 });
    };
    let grid = Grid { t: frames.len().div_ceil(depth), h: first.height / side, w: first.width / side };
    let (width, values) = (first.width, shape.values());
    let mut rows = vec![0.0; grid.patches() * values];
    // A band is one row of blocks.
    let band = merge * grid.w * values;
    rows.par_chunks_mut(band.max(1)).enumerate().for_each(|(band, rows)| {
        let (t, block_row) = (band / (grid.h / merge), band % (grid.h / merge));
        for (i, row) in rows.chunks_exact_mut(values).enumerate() {
            let (block, within) = (i / (merge * merge), i % (merge * merge));
            let top = (block_row * merge + within / merge) * side;
            let left = (block * merge + within % merge) * side;
            for (line, row) in row.chunks_exact_mut(side).enumerate() {
                let (channel, frame, y) = (line / (depth * side), line / side % depth, line % side);
                let picture = frames[(t * depth + frame).min(last)];
                let start = ((top + y) * width + left) * 3 + channel;
                for (x, number) in row.iter_mut().enumerate() {
                    *number = scale.number(channel, picture.rgb[start + 3 * x]);
                }
            }
        }
    });
    (rows, grid)
}

/// A picture as `[channel, height, width]`.
pub(crate) fn planes(picture: &Picture, scale: &PixelScale) -> Vec<f32> {
    let pixels = picture.rgb.as_chunks::<3>().0;
    // With its capacity from the start, because a vector that grows takes twice the room.
    let mut values = Vec::with_capacity(3 * pixels.len());
    for channel in 0..3 {
        values.extend(pixels.iter().map(|pixel| scale.number(channel, pixel[channel])));
    }
    values
}

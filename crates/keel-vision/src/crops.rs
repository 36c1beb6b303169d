//! Pan and scan (Gemma 3): a long picture is shown whole, and also in pieces along its long side.
//!
//! Reference: `pan_and_scan` of transformers' `image_processing_gemma3.py`.

use crate::{Picture, Size};

/// Decides whether a picture is cut, and into how many pieces.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PanAndScan {
    /// Shortest side of a piece.
    pub min_crop: usize,
    /// Largest number of pieces.
    pub max_crops: usize,
    /// Smallest ratio of long side to short side at which a picture is cut.
    pub min_ratio: f64,
}

/// Returns the pieces. There are none if the picture is not long enough or the pieces would be too small.
pub fn crops(picture: &Picture, how: PanAndScan) -> Vec<Picture> {
    let (width, height) = (picture.width, picture.height);
    let Some(Cut { count, piece }) = cut(Size { height, width }, how) else { return Vec::new() };
    let pieces = (0..count).map(|i| match width >= height {
        true => picture.crop(piece * i, 0, piece, height),
        false => picture.crop(0, piece * i, width, piece),
    });
    pieces.filter(|crop| crop.width > 0 && crop.height > 0).collect()
}

/// The size of each piece of a picture of this size.
pub(crate) fn crop_sizes(own: Size, how: PanAndScan) -> Vec<Size> {
    let Some(Cut { count, piece }) = cut(own, how) else { return Vec::new() };
    let Size { height, width } = own;
    let long = width.max(height);
    let lengths = (0..count).map(|i| piece.min(long.saturating_sub(piece * i))).filter(|&length| length > 0);
    let sized = |length| match width >= height {
        true => Size { height, width: length },
        false => Size { height: length, width },
    };
    lengths.map(sized).collect()
}

/// How a picture is cut along its long side.
struct Cut {
    /// Number of pieces.
    count: usize,
    /// Their length.
    piece: usize,
}

fn cut(Size { height, width }: Size, how: PanAndScan) -> Option<Cut> {
    let wide = width >= height;
    let (long, short) = if wide { (width, height) } else { (height, width) };
    let ratio = long as f64 / short.max(1) as f64;
    if ratio < how.min_ratio || short == 0 {
        return None;
    }
    let count = (long / how.min_crop.max(1)).min((ratio + 0.5).floor() as usize).max(2).min(how.max_crops);
    if count == 0 {
        return None;
    }
    let piece = long.div_ceil(count);
    if piece.min(short) < how.min_crop {
        return None;
    }
    Some(Cut { count, piece })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_picture_is_cut_along_its_long_side() {
        let picture = |width, height| Picture { width, height, rgb: vec![0; width * height * 3] };
        let how = PanAndScan { min_crop: 48, max_crops: 4, min_ratio: 1.2 };
        let sizes = |w, h| {
            let sizes: Vec<_> = crops(&picture(w, h), how).iter().map(|c| (c.width, c.height)).collect();
            let foretold: Vec<_> = crop_sizes(Size { height: h, width: w }, how)
                .into_iter()
                .map(|size| (size.width, size.height))
                .collect();
            assert_eq!(sizes, foretold);
            sizes
        };
        assert_eq!(sizes(112, 80), [(56, 80), (56, 80)]);
        assert_eq!(sizes(80, 201), [(80, 67), (80, 67), (80, 67)]);
        assert_eq!(sizes(100, 90), [], "nearly square");
        assert_eq!(sizes(80, 60), [], "pieces of 40 are too small");
        assert_eq!(sizes(99, 50), [(50, 50), (49, 50)]);
    }
}

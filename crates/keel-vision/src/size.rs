//! Computes the size for resizing a picture. Its sides are multiples of a factor, and its number of pixels is within
//! bounds.
//!
//! Reference: `smart_resize` of transformers' `image_processing_qwen2_vl.py` and `video_processing_qwen3_vl.py`.
//! Rounding is as in Python: a tie goes to the even multiple.

use crate::{Result, VisionError};

/// Largest ratio of one side to the other.
const ASPECT_MAX: usize = 200;

/// The sides of a picture, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Rows.
    pub height: usize,
    /// Pixels per row.
    pub width: usize,
}

impl Size {
    /// Number of pixels.
    pub fn pixels(self) -> usize {
        self.height * self.width
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {}", self.width, self.height)
    }
}

/// Bounds on the number of pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PixelBounds {
    /// The smallest number.
    pub least: usize,
    /// The largest number.
    pub most: usize,
}

/// The size for resizing a picture.
///
/// # Errors
/// One side is more than 200 times the other, or a side is 0.
pub fn image_size(own: Size, factor: usize, bounds: PixelBounds) -> Result<Size> {
    check_aspect(own)?;
    Ok(within(own, factor, 1, 1, bounds))
}

/// As [`image_size`], but with no more than `bounds.most` pixels if that is room for one `factor` by `factor`. A strip
/// is cut at its long side, because its short side cannot shrink.
///
/// # Errors
/// As [`image_size`].
pub(crate) fn size_at_most(own: Size, factor: usize, bounds: PixelBounds) -> Result<Size> {
    let Size { height, width } = image_size(own, factor, bounds)?;
    // Without a smallest number of pixels, a side may be rounded to 0.
    let (height, width) = (height.max(factor), width.max(factor));
    let longest = |other: usize| (bounds.most / other / factor * factor).max(factor);
    Ok(match height > width {
        true => Size { height: height.min(longest(width)), width },
        false => Size { height, width: width.min(longest(height)) },
    })
}

/// As [`image_size`], but the bounds count the pixels of all `frames`.
///
/// # Errors
/// As [`image_size`].
pub fn video_size(
    frames: usize,
    own: Size,
    factor: usize,
    frames_per_patch: usize,
    bounds: PixelBounds,
) -> Result<Size> {
    check_aspect(own)?;
    let Size { mut height, mut width } = own;
    if height < factor || width < factor {
        let scale = (factor as f64 / height as f64).max(factor as f64 / width as f64);
        (height, width) = ((height as f64 * scale) as usize, (width as f64 * scale) as usize);
    }
    // The number of frames rounded to whole patches is compared with the bounds. The real number gives the scale.
    let counted = rounded(frames, frames_per_patch);
    Ok(within(Size { height, width }, factor, counted, frames, bounds))
}

fn check_aspect(Size { height, width }: Size) -> Result<()> {
    let (long, short) = (height.max(width), height.min(width));
    if short == 0 {
        return Err(VisionError::Empty { width, height });
    }
    if long > ASPECT_MAX * short {
        return Err(VisionError::Aspect { width, height, limit: ASPECT_MAX });
    }
    Ok(())
}

/// The multiple of `factor` nearest to `side`. A tie goes to the even multiple.
fn rounded(side: usize, factor: usize) -> usize {
    (side as f64 / factor as f64).round_ties_even() as usize * factor
}

/// The size within bounds on the pixels of `frames` frames, which count as `counted`.
fn within(own: Size, factor: usize, counted: usize, frames: usize, bounds: PixelBounds) -> Size {
    let (Size { height, width }, PixelBounds { least, most }) = (own, bounds);
    let (h, w) = (rounded(height, factor), rounded(width, factor));
    let total = counted.saturating_mul(h).saturating_mul(w);
    let area = frames as f64 * height as f64 * width as f64;
    let f = factor as f64;
    if total > most {
        let shrink = (area / most as f64).sqrt();
        let side = |n: usize| ((n as f64 / shrink / f).floor() as usize * factor).max(factor);
        Size { height: side(height), width: side(width) }
    } else if total < least {
        let grow = (least as f64 / area).sqrt();
        let side = |n: usize| (n as f64 * grow / f).ceil() as usize * factor;
        Size { height: side(height), width: side(width) }
    } else {
        Size { height: h, width: w }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sized(height: usize, width: usize) -> Size {
        Size { height, width }
    }

    fn bounds(least: usize, most: usize) -> PixelBounds {
        PixelBounds { least, most }
    }

    /// A strip keeps its short side, and one that is thinner than half a factor gets a side of one.
    #[test]
    fn a_bound_is_kept_wherever_there_is_room_for_a_factor() {
        for (factor, least, most) in
            [(32, 65536, 65536), (32, 65536, 131_072), (32, 0, 190_650), (28, 0, 784), (32, 0, 1 << 20)]
        {
            for short in [1, 12, 15, 16, 17, 24, 31, 32, 90, 100, 257] {
                for long in [short, short + 10, 7 * short, 200 * short] {
                    for own in [sized(short, long), sized(long, short)] {
                        let size = size_at_most(own, factor, bounds(least, most)).expect("near enough");
                        assert!(size.height >= factor && size.width >= factor, "{own} becomes {size}");
                        assert!(size.pixels() <= most, "{own} becomes {size}, at most {most} pixels");
                        assert!(
                            [size.height, size.width].iter().all(|side| side.is_multiple_of(factor)),
                            "{own}: {size}"
                        );
                    }
                }
            }
        }
    }

    /// Expected sizes are the reference's.
    #[test]
    fn sizes_are_those_of_the_reference() {
        let image = |height, width| image_size(sized(height, width), 32, bounds(8192, 24576)).expect("sound");
        // 112 / 32 and 80 / 32 are ties.
        assert_eq!(image(80, 112), sized(64, 128));
        assert_eq!(image(47, 99), sized(64, 160));
        assert_eq!(image(333, 700), sized(96, 224));
        let video = video_size(5, sized(60, 80), 32, 2, bounds(4096, 60000)).expect("sound");
        assert_eq!(video, sized(64, 64));
    }

    #[test]
    fn long_strips_and_empty_pictures_are_refused() {
        let image = |h, w| image_size(sized(h, w), 32, bounds(3136, 1 << 20));
        let refused = |h, w| image(h, w).expect_err("refused").to_string();
        assert!(refused(3, 20000).contains("20000 x 3"), "{}", refused(3, 20000));
        assert!(refused(0, 5).contains("5 x 0"));
        image(1, 200).expect("200 times is the limit");
    }
}

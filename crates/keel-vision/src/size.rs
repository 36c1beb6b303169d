//! Computes the size for resizing a picture. Its sides are multiples of a factor, and its number of pixels is within
//! bounds.
//!
//! Reference: `smart_resize` of transformers' `image_processing_qwen2_vl.py` and `video_processing_qwen3_vl.py`.
//! Rounding is as in Python: a tie goes to the even multiple.

use crate::{Result, VisionError};

/// Largest ratio of one side to the other.
const ASPECT_MAX: usize = 200;

/// Height and width for resizing a picture of `height` by `width` pixels. `pixels` are the least and the most pixels.
///
/// # Errors
/// One side is more than 200 times the other, or a side is 0.
pub fn image_size(
    (height, width): (usize, usize),
    factor: usize,
    pixels: (usize, usize),
) -> Result<(usize, usize)> {
    check_aspect(height, width)?;
    Ok(within((height, width), factor, (1, 1), pixels))
}

/// The most pixels that [`image_size`] gives. It can be more than `pixels.1`, because a side has at least `factor` pixels,
/// and because a picture that is too small is rounded up.
pub(crate) fn pixels_max(factor: usize, (least, most): (usize, usize)) -> usize {
    let (f, aspect) = (factor as f64, ASPECT_MAX as f64);
    let clamped = f * f.max((aspect * most as f64).sqrt());
    let sides = (aspect.sqrt() + aspect.sqrt().recip()) * (least as f64).sqrt();
    let grown = least as f64 + f * sides + f * f;
    // A conversion to an integer saturates.
    most.max(clamped.max(grown).ceil() as usize)
}

/// As [`image_size`], but the bounds count the pixels of all `frames`.
///
/// # Errors
/// As [`image_size`].
pub fn video_size(
    frames: usize,
    (mut height, mut width): (usize, usize),
    factor: usize,
    frames_per_patch: usize,
    pixels: (usize, usize),
) -> Result<(usize, usize)> {
    check_aspect(height, width)?;
    if height < factor || width < factor {
        let scale = (factor as f64 / height as f64).max(factor as f64 / width as f64);
        (height, width) = ((height as f64 * scale) as usize, (width as f64 * scale) as usize);
    }
    // The number of frames rounded to whole patches is compared with the bounds. The real number gives the scale.
    let counted = rounded(frames, frames_per_patch);
    Ok(within((height, width), factor, (counted, frames), pixels))
}

fn check_aspect(height: usize, width: usize) -> Result<()> {
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

fn within(
    (height, width): (usize, usize),
    factor: usize,
    (counted, frames): (usize, usize),
    (least, most): (usize, usize),
) -> (usize, usize) {
    let (h, w) = (rounded(height, factor), rounded(width, factor));
    let total = counted.saturating_mul(h).saturating_mul(w);
    let area = frames as f64 * height as f64 * width as f64;
    let f = factor as f64;
    if total > most {
        let shrink = (area / most as f64).sqrt();
        let side = |n: usize| ((n as f64 / shrink / f).floor() as usize * factor).max(factor);
        (side(height), side(width))
    } else if total < least {
        let grow = (least as f64 / area).sqrt();
        let side = |n: usize| (n as f64 * grow / f).ceil() as usize * factor;
        (side(height), side(width))
    } else {
        (h, w)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_size_has_more_pixels_than_the_most() {
        let cases =
            [(32, (1024, 65536)), (7688, (8192, 24476)), (248, (0, 1)), (28, (100, 200)), (1, (9, 9))];
        for (factor, pixels) in cases {
            let most = pixels_max(factor, pixels);
            for (height, width) in [(1, 1), (5, 3), (1, 200), (600, 3), (47, 99), (4000, 3000), (9999, 50)] {
                let (h, w) = image_size((height, width), factor, pixels).expect("its sides are near enough");
                assert!(
                    h * w <= most,
                    "{height} x {width} becomes {h} x {w}, {most} pixels at most, {factor} {pixels:?}"
                );
            }
        }
        assert_eq!(pixels_max(32, (65536, 16_777_216)), 16_777_216, "a published processor");
    }

    /// Expected sizes are the reference's.
    #[test]
    fn sizes_are_those_of_the_reference() {
        let bounds = (8192, 24576);
        // 112 / 32 and 80 / 32 are ties.
        assert_eq!(image_size((80, 112), 32, bounds).expect("sound"), (64, 128));
        assert_eq!(image_size((47, 99), 32, bounds).expect("sound"), (64, 160));
        assert_eq!(image_size((333, 700), 32, bounds).expect("sound"), (96, 224));
        assert_eq!(video_size(5, (60, 80), 32, 2, (4096, 60000)).expect("sound"), (64, 64));
    }

    #[test]
    fn long_strips_and_empty_pictures_are_refused() {
        let refused = |h, w| image_size((h, w), 32, (3136, 1 << 20)).expect_err("refused").to_string();
        assert!(refused(3, 20000).contains("20000 x 3"), "{}", refused(3, 20000));
        assert!(refused(0, 5).contains("5 x 0"));
        image_size((1, 200), 32, (3136, 1 << 20)).expect("200 times is the limit");
    }
}

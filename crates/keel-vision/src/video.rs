//! Prepares videos, which are lists of frames: chooses frames, resizes them, and computes their times.
//!
//! Reference: `video_processing_qwen3_vl.py` and `processing_qwen3_vl.py` of transformers.

use serde_json::Value;

use crate::fields::Fields;
use crate::patches::{PatchShape, patches};
use crate::pixels::ScaleDefaults;
use crate::processor::{filter_of, patch_shape, pixel_bounds, unresized};
use crate::size::video_size;
use crate::{Filter, Grid, Picture, PixelScale, Result, VisionError, resize};

/// Frames per second of a video that does not state it.
pub const FPS_DEFAULT: f64 = 24.0;

/// Prepares videos.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoProcessor {
    shape: PatchShape,
    pixels: (usize, usize),
    filter: Filter,
    resizes: bool,
    scale: PixelScale,
    samples: bool,
    fps: Option<f64>,
    frames: Option<usize>,
    frames_min: usize,
    frames_max: usize,
    settings: String,
}

/// A video as a tower reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessedVideo {
    /// Rows of patches.
    pub values: Vec<f32>,
    /// The patches.
    pub grid: Grid,
    /// The resized frames. The last frame is repeated until the frames fill whole patches.
    pub resized: Vec<Picture>,
}

impl VideoProcessor {
    /// Reads a processor from a file's JSON.
    ///
    /// # Errors
    /// A value is not supported.
    pub fn from_json(file: &str, json: &Value) -> Result<VideoProcessor> {
        let fields = Fields { file, json };
        let frames = fields.size("num_frames")?;
        let fps = fields.number("fps")?;
        Ok(VideoProcessor {
            shape: patch_shape(&fields, 16)?,
            pixels: pixel_bounds(&fields, (128 * 32 * 32, 32 * 32 * 768))?,
            filter: filter_of(&fields, Filter::Bicubic)?,
            resizes: fields.flag_or("do_resize", true)?,
            scale: PixelScale::from_fields(&fields, &ScaleDefaults::HALF)?,
            samples: fields.flag_or("do_sample_frames", true)?,
            fps: fps.or(if frames.is_none() { Some(2.0) } else { None }),
            frames,
            frames_min: fields.size_or("min_frames", 4)?,
            frames_max: fields.size_or("max_frames", 768)?,
            settings: json.to_string(),
        })
    }

    /// The settings in one line. They serve to compare processors.
    pub fn settings(&self) -> &str {
        &self.settings
    }

    /// Patches along a side of a block, which becomes one token.
    pub fn merge(&self) -> usize {
        self.shape.merge
    }

    /// Chooses frames of a video with `total` frames at `fps` frames per second. Returns their indices.
    ///
    /// # Errors
    /// There are no frames, or `fps` is not a number above 0.
    pub fn sample(&self, total: usize, fps: f64) -> Result<Vec<usize>> {
        if total == 0 {
            return Err(VisionError::Video("it has no frames".into()));
        }
        if !fps.is_finite() || fps <= 0.0 {
            return Err(VisionError::Video(format!("{fps} frames a second are no rate above 0")));
        }
        if !self.samples {
            return Ok((0..total).collect());
        }
        let count = match (self.fps, self.frames) {
            (Some(wanted), None) => {
                let count = (total as f64 / fps * wanted) as usize;
                count.max(self.frames_min).min(self.frames_max).min(total)
            }
            (_, Some(frames)) => frames.min(total),
            (None, None) => total.max(self.frames_min).min(self.frames_max).min(total),
        };
        // numpy.linspace(0, total - 1, count).round()
        let step = if count > 1 { (total - 1) as f64 / (count - 1) as f64 } else { 0.0 };
        let at = |i: usize| match i + 1 == count && count > 1 {
            true => total - 1,
            false => (i as f64 * step).round_ties_even() as usize,
        };
        Ok((0..count).map(at).collect())
    }

    /// Frames per patch.
    pub fn frames_per_patch(&self) -> usize {
        self.shape.frames
    }

    /// Prepares the chosen frames.
    ///
    /// # Errors
    /// There is no frame, the frames differ in size, or they cannot be resized to a size that the tower supports.
    pub fn process(&self, frames: &[Picture]) -> Result<ProcessedVideo> {
        let Some(first) = frames.first() else {
            return Err(VisionError::Video("it has no frames".into()));
        };
        let size = |p: &Picture| format!("{} x {}", p.width, p.height);
        if let Some(frame) = frames.iter().position(|p| (p.width, p.height) != (first.width, first.height)) {
            return Err(VisionError::Frame { frame, expected: size(first), got: size(&frames[frame]) });
        }
        let (own, factor) = ((first.height, first.width), self.shape.side * self.shape.merge);
        let (height, width) = match self.resizes {
            true => video_size(frames.len(), own, factor, self.shape.frames, self.pixels)?,
            false => unresized(own, factor)?,
        };
        let mut resized: Vec<Picture> =
            frames.iter().map(|f| resize(f, width, height, self.filter)).collect();
        let (values, grid) = patches(&resized.iter().collect::<Vec<_>>(), self.shape, &self.scale);
        while let Some(last) = resized.last().filter(|_| !resized.len().is_multiple_of(self.shape.frames)) {
            resized.push(last.clone());
        }
        Ok(ProcessedVideo { values, grid, resized })
    }
}

/// Time of each group of `frames_per_patch` frames in seconds: the mean of its first and its last frame. An incomplete
/// last group counts as filled with its last frame.
pub fn timestamps(frames: &[usize], fps: f64, frames_per_patch: usize) -> Vec<f64> {
    let groups = frames.chunks(frames_per_patch.max(1));
    groups
        .filter_map(|group| {
            let (first, last) = (*group.first()?, *group.last()?);
            Some((first as f64 / fps + last as f64 / fps) / 2.0)
        })
        .collect()
}

/// Formats a time with one decimal as Python does: the exact binary value is rounded, and a tie goes to the even digit.
pub fn seconds(time: f64) -> String {
    format!("{time:.1}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn times_are_rounded_as_python_does() {
        let cases = [(0.25, "0.2"), (0.75, "0.8"), (0.35, "0.3"), (0.05, "0.1"), (1.25, "1.2"), (2.0, "2.0")];
        for (time, text) in cases {
            assert_eq!(seconds(time), text);
        }
    }

    #[test]
    fn frames_are_taken_evenly() {
        let sample = |json, total, fps| {
            VideoProcessor::from_json("v.json", &json).expect("sound").sample(total, fps).expect("frames")
        };
        assert_eq!(sample(json!({"fps": 2}), 5, 10.0), [0, 1, 3, 4]);
        assert_eq!(sample(json!({"do_sample_frames": false}), 3, 10.0), [0, 1, 2]);
        assert_eq!(sample(json!({"num_frames": 3}), 10, 10.0), [0, 4, 9]);
        assert_eq!(sample(json!({"max_frames": 6}), 100, 1.0), [0, 20, 40, 59, 79, 99]);
        assert_eq!(sample(json!({}), 1, 24.0), [0]);
        assert_eq!(timestamps(&[0, 1, 2, 3, 4], 2.0, 2), [0.25, 1.25, 2.0]);
    }

    #[test]
    fn what_cannot_be_sampled_is_said() {
        let processor = VideoProcessor::from_json("v.json", &json!({})).expect("sound");
        for (total, fps, part) in [(0, 1.0, "no frames"), (3, 0.0, "frames a second"), (3, f64::NAN, "NaN")] {
            let message = processor.sample(total, fps).expect_err("refused").to_string();
            assert!(message.contains(part), "{message}");
        }
        let frame = |width| Picture { width, height: 40, rgb: vec![0; width * 120] };
        let message = processor.process(&[frame(40), frame(41)]).expect_err("sizes").to_string();
        assert!(message.contains("frame 1 of the video is 41 x 40"), "{message}");
    }
}

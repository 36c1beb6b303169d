//! Prepares videos, which are lists of frames: chooses frames, resizes them, and computes their times.
//!
//! Reference: `video_processing_qwen3_vl.py` and `processing_qwen3_vl.py` of transformers.

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::fields::Fields;
use crate::patches::{PatchShape, patches};
use crate::pixels::ScaleDefaults;
use crate::processor::{SMALL_BYTES, filter_of, patch_shape, pixel_bounds, unresized};
use crate::resample::resize_bytes;
use crate::size::{size_at_most, video_size};
use crate::{Filter, Grid, Picture, PixelBounds, PixelScale, Result, Size, VisionError, resize, work_limit};

/// Frames per second of a video that does not state it.
pub const FPS_DEFAULT: f64 = 24.0;

/// Prepares videos.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoProcessor {
    shape: PatchShape,
    pixels: PixelBounds,
    filter: Filter,
    resizes: bool,
    scale: PixelScale,
    samples: bool,
    fps: Option<f64>,
    frames: Option<usize>,
    frames_min: usize,
    frames_max: usize,
    bounds: Option<VideoBounds>,
    settings: String,
}

/// Bounds that a server sets on a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoBounds {
    /// Most pixels of a frame that the tower reads.
    pub frame_pixels: usize,
    /// Most pixels of all groups of frames together. A group is read like one picture.
    pub pixels: usize,
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
            pixels: pixel_bounds(&fields, PixelBounds { least: 128 * 32 * 32, most: 32 * 32 * 768 })?,
            filter: filter_of(&fields, Filter::Bicubic)?,
            resizes: fields.flag_or("do_resize", true)?,
            scale: PixelScale::from_fields(&fields, &ScaleDefaults::HALF)?,
            samples: fields.flag_or("do_sample_frames", true)?,
            fps: fps.or(if frames.is_none() { Some(2.0) } else { None }),
            frames,
            frames_min: fields.size_or("min_frames", 4)?,
            frames_max: fields.size_or("max_frames", 768)?,
            bounds: None,
            settings: json.to_string(),
        })
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

    /// The same processor for videos within these bounds: larger ones are read at a smaller size.
    #[must_use]
    pub fn limited_to(mut self, bounds: VideoBounds) -> VideoProcessor {
        self.settings.push_str(&format!(" at most {bounds:?}"));
        self.bounds = Some(bounds);
        self
    }

    /// The size of the resized frames of a video of `frames` chosen frames of this size.
    ///
    /// # Errors
    /// They cannot be resized to a size that the tower supports, or too few pixels are left for each.
    pub fn frame_size(&self, frames: usize, own: Size) -> Result<Size> {
        let (factor, depth) = (self.shape.side * self.shape.merge, self.shape.frames);
        let size = match self.resizes {
            true => video_size(frames, own, factor, depth, self.pixels)?,
            false => unresized(own, factor)?,
        };
        let Some(bounds) = self.bounds else { return Ok(size) };
        let each = bounds.frame_pixels.min(bounds.pixels / frames.div_ceil(depth).max(1));
        if size.pixels() <= each {
            return Ok(size);
        }
        // Each frame is bounded like a picture.
        let smaller = size_at_most(own, factor, PixelBounds { least: 0, most: each })?;
        if !self.resizes || smaller.pixels() > each {
            let reason = format!(
                "{frames} frames have room for {each} pixels each, less than the {} that they need: sample fewer",
                smaller.pixels().min(size.pixels())
            );
            return Err(VisionError::Video(reason));
        }
        Ok(smaller)
    }

    /// The most bytes of heap while `frames` chosen frames of `width` by `height` are prepared, in addition to the
    /// frames themselves. The prepared frames are included. A frame may come turned.
    ///
    /// # Errors
    /// As [`VideoProcessor::frame_size`].
    pub fn work_bytes(&self, frames: usize, width: usize, height: usize) -> Result<u64> {
        let (own, turned) = (Size { height, width }, Size { height: width, width: height });
        let sizes = [own, turned].map(|own| (own, self.frame_size(frames, own)));
        let padded = frames.next_multiple_of(self.shape.frames.max(1)) as u64;
        let of = |own, size: Size| {
            let pixels = size.pixels() as u64;
            let resized = 3 * pixels * frames as u64 + resize_bytes(own, size);
            resized.max(3 * pixels * padded * (1 + size_of::<f32>() as u64)) + SMALL_BYTES
        };
        let most = sizes.iter().filter_map(|(own, size)| Some(of(*own, *size.as_ref().ok()?))).max();
        // If neither fits, the error says why.
        most.map_or_else(|| Ok(of(own, self.frame_size(frames, own)?)), Ok)
    }

    /// Prepares the chosen frames.
    ///
    /// # Errors
    /// There is no frame, the frames differ in size, or they cannot be resized to a size that the tower supports.
    pub fn process(&self, frames: &[Picture]) -> Result<ProcessedVideo> {
        let mut builder = VideoBuilder::new(self, frames.len());
        frames.iter().try_for_each(|frame| builder.add(frame))?;
        builder.finish()
    }
}

/// Prepares a video frame by frame, so that only resized frames are in memory.
pub struct VideoBuilder<'a> {
    processor: &'a VideoProcessor,
    count: usize,
    /// The size of the first frame, and the one after resizing.
    sizes: Option<[Size; 2]>,
    resized: Vec<Picture>,
}

impl VideoBuilder<'_> {
    /// For a video of `count` chosen frames.
    pub fn new(processor: &VideoProcessor, count: usize) -> VideoBuilder<'_> {
        VideoBuilder { processor, count, sizes: None, resized: Vec::new() }
    }

    /// Resizes the next frame.
    ///
    /// # Errors
    /// It differs in size from the first, or it cannot be resized to a size that the tower supports.
    pub fn add(&mut self, frame: &Picture) -> Result<()> {
        work_limit::check()?;
        let own = frame.size();
        let [first, Size { height, width }] = match self.sizes {
            Some(sizes) => sizes,
            None => *self.sizes.insert([own, self.processor.frame_size(self.count, own)?]),
        };
        if own != first {
            let (expected, got) = (first.to_string(), own.to_string());
            return Err(VisionError::Frame { frame: self.resized.len(), expected, got });
        }
        self.resized.push(resize(frame, width, height, self.processor.filter));
        Ok(())
    }

    /// The prepared video.
    ///
    /// # Errors
    /// It has no frames.
    pub fn finish(self) -> Result<ProcessedVideo> {
        let VideoBuilder { processor, mut resized, .. } = self;
        if resized.is_empty() {
            return Err(VisionError::Video("it has no frames".into()));
        }
        let (shape, frames) = (processor.shape, resized.iter().collect::<Vec<_>>());
        let (values, grid) = patches(&frames, shape, &processor.scale);
        while let Some(last) = resized.last().filter(|_| !resized.len().is_multiple_of(shape.frames)) {
            resized.push(last.clone());
        }
        Ok(ProcessedVideo { values, grid, resized })
    }
}

impl ProcessedVideo {
    /// Tells the video from all others: a SHA-256 of its frames, their size and the settings that it was prepared with.
    pub fn key(&self, processor: &VideoProcessor) -> [u8; 32] {
        let mut hasher = Sha256::new();
        hasher.update(b"keel video 1");
        let (width, height) = self.resized.first().map_or((0, 0), |frame| (frame.width, frame.height));
        for number in [processor.settings.len(), self.resized.len(), width, height] {
            hasher.update((number as u64).to_le_bytes());
        }
        hasher.update(&processor.settings);
        self.resized.iter().for_each(|frame| hasher.update(&frame.rgb));
        hasher.finalize().into()
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
    fn a_server_makes_large_videos_smaller() {
        let plain = VideoProcessor::from_json("v.json", &json!({"patch_size": 16})).expect("sound");
        let sized = |(height, width)| Size { height, width };
        let sizes = [(40, 900), (480, 640), (1080, 1920), (2000, 64)].map(sized);
        for (frame_pixels, pixels) in [(65536, 1 << 20), (1 << 20, 65536), (16384, 16384), (1 << 24, 1 << 30)]
        {
            let limited = plain.clone().limited_to(VideoBounds { frame_pixels, pixels });
            assert_ne!(plain.settings, limited.settings);
            for frames in 1..=9 {
                for own in sizes {
                    let size = limited.frame_size(frames, own).expect("it has room");
                    assert!(
                        size.pixels() <= frame_pixels && size.pixels() * frames.div_ceil(2) <= pixels,
                        "{frames} of {own}: {size}"
                    );
                    if pixels == 1 << 30 {
                        assert_eq!(size, plain.frame_size(frames, own).expect("sound"));
                    }
                }
            }
        }
        let limited = plain.clone().limited_to(VideoBounds { frame_pixels: 16384, pixels: 16384 });
        // Strips that are thinner than half a patch.
        let strips = plain.limited_to(VideoBounds { frame_pixels: 1 << 20, pixels: 4 << 20 });
        for (frames, own) in [(44, (16, 3200)), (160, (12, 800)), (160, (1000, 16))] {
            let size = strips.frame_size(frames, sized(own)).expect("it has room");
            assert!(size.pixels() * frames.div_ceil(2) <= 4 << 20, "{frames} frames of {size}");
        }
        let message = limited.frame_size(40, sized((480, 640))).expect_err("no room").to_string();
        assert!(message.contains("40 frames") && message.contains("sample fewer"), "{message}");
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

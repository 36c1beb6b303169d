//! Videos as files: how many frames they have, and the frames that are asked for.
//!
//! A GIF is read here. MP4, WebM, Matroska and AVI are read by the program `ffmpeg`, where it is installed
//! (`ffmpeg.rs`). Files are untrusted: size, number of frames and work are known and compared with the limits before a
//! frame is decoded.

mod ffmpeg;
mod gif;

pub(crate) use gif::{first_frame_pixels as gif_frame_pixels, needed_parts as gif_parts};

use std::path::Path;
use std::time::Duration;

use crate::{Picture, Result, VisionError};
use ffmpeg::FfmpegVideo;

/// Bounds on a video and its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoFileLimits {
    /// Largest size of the file.
    pub file_bytes: usize,
    /// Largest number of pixels of a frame.
    pub pixels: u64,
    /// Largest number of frames.
    pub frames: usize,
    /// Largest number of pixels of all frames of a GIF. A frame is drawn over the one before, so none can be skipped.
    pub drawn_pixels: u64,
    /// Time for `ffmpeg`.
    pub time: Duration,
}

impl Default for VideoFileLimits {
    fn default() -> VideoFileLimits {
        VideoFileLimits {
            file_bytes: 1 << 30,
            pixels: 16 << 20,
            frames: 1 << 18,
            drawn_pixels: 1 << 30,
            time: Duration::from_secs(60),
        }
    }
}

/// The name of the program that reads coded videos.
const FFMPEG: &str = "ffmpeg";

/// A video's file whose frames were counted.
pub struct VideoFile<'a> {
    frames: usize,
    fps: f64,
    width: usize,
    height: usize,
    kind: Kind<'a>,
    limits: VideoFileLimits,
}

enum Kind<'a> {
    Gif(&'a [u8]),
    Coded(FfmpegVideo),
}

/// A function that takes the frames one after the other.
pub type FrameSink<'a> = dyn FnMut(Picture) -> Result<()> + 'a;

impl<'a> VideoFile<'a> {
    /// Counts the frames of a file. They are decoded only where a codec's packets need not be frames, and within the
    /// limits.
    ///
    /// # Errors
    /// - The file exceeds the limits, is of no known kind, or is broken.
    /// - It needs `ffmpeg`, which is not installed or refuses it.
    pub fn open(bytes: &'a [u8], limits: VideoFileLimits) -> Result<VideoFile<'a>> {
        VideoFile::open_with(bytes, limits, Path::new(FFMPEG))
    }

    fn open_with(bytes: &'a [u8], limits: VideoFileLimits, ffmpeg: &Path) -> Result<VideoFile<'a>> {
        if bytes.len() > limits.file_bytes {
            return Err(failed(format!(
                "its file has {} bytes, at most {} are read",
                bytes.len(),
                limits.file_bytes
            )));
        }
        let (count, kind) = if bytes.starts_with(b"GIF8") {
            (gif::count(bytes, limits)?, Kind::Gif(bytes))
        } else {
            let (coded, count) = FfmpegVideo::open(bytes, limits, ffmpeg)?;
            (count, Kind::Coded(coded))
        };
        let Count { frames, seconds, width, height } = count;
        if frames == 0 || width == 0 || height == 0 || seconds <= 0.0 {
            return Err(failed("it has no frames".into()));
        }
        if (width as u64).saturating_mul(height as u64) > limits.pixels {
            return Err(failed(format!(
                "its frames are {width} x {height}, at most {} pixels are decoded",
                limits.pixels
            )));
        }
        if matches!(kind, Kind::Gif(_)) && (frames * width * height) as u64 > limits.drawn_pixels {
            return Err(failed(format!(
                "it is {frames} frames of {width} x {height}, at most {} pixels are drawn in all",
                limits.drawn_pixels
            )));
        }
        Ok(VideoFile { frames, fps: frames as f64 / seconds, width, height, kind, limits })
    }

    /// Number of frames.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Frames per second, on average.
    pub fn fps(&self) -> f64 {
        self.fps
    }

    /// Width and height of a frame. A video that says it is turned may come with the two exchanged.
    pub fn size(&self) -> (usize, usize) {
        (self.width, self.height)
    }

    /// The most bytes of heap for one frame while it is decoded, the frame included.
    pub fn frame_bytes(&self) -> u64 {
        let pixels = self.width as u64 * self.height as u64;
        match self.kind {
            // The canvas, the frame as it is stored, the frame as it is shown.
            Kind::Gif(_) => 12 * pixels,
            Kind::Coded(_) => 3 * pixels,
        }
    }

    /// Decodes the frames with these numbers, which ascend, and gives them to `sink` one by one.
    ///
    /// # Errors
    /// The file is broken, or ends early; `ffmpeg` takes too long; an error of `sink`.
    pub fn take(&self, numbers: &[usize], sink: &mut FrameSink<'_>) -> Result<()> {
        match &self.kind {
            Kind::Gif(bytes) => gif::take(bytes, numbers, self.limits, sink),
            Kind::Coded(coded) => coded.take(numbers, sink),
        }
    }
}

/// The numbers in a file's header.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Count {
    frames: usize,
    seconds: f64,
    width: usize,
    height: usize,
}

fn failed(reason: String) -> VisionError {
    VisionError::VideoFile(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_video_is_said() {
        let limits = VideoFileLimits { file_bytes: 30, ..VideoFileLimits::default() };
        for (bytes, part) in [
            (&b"GIF89a"[..], "ends before"),
            (b"not a video at all", "no video"),
            (b"", "no video"),
            (&[0; 31], "at most 30"),
            (b"GIF89a\x01\x00\x01\x00\x00\x00\x00;", "no frames"),
        ] {
            let message = VideoFile::open(bytes, limits).err().expect("refused").to_string();
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn a_missing_ffmpeg_is_said() {
        let bytes = b"\x00\x00\x00\x18ftypisom";
        let opened = VideoFile::open_with(bytes, VideoFileLimits::default(), Path::new("no such program"));
        let message = opened.err().expect("refused").to_string();
        assert!(
            message.contains("not installed") && message.contains("install ffmpeg 5.1 or later"),
            "{message}"
        );
    }
}

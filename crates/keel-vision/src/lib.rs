//! Converts pictures and videos to the input of a vision tower.
//!
//! * [`decode()`] decodes a file to 8-bit RGB, within [`DecodeLimits`] that are checked before allocation.
//! * [`VideoFile`] gives the frames of a GIF, and with the program `ffmpeg` those of MP4, WebM, Matroska and AVI files.
//! * [`resize`] equals the antialiased resampler of the reference implementation to the bit.
//! * [`ImageProcessor`] and [`VideoProcessor`] follow the processor files of a checkpoint: sizes, normalisation,
//!   patches.
//! * [`expand`] repeats the placeholders of a rendered prompt, once for each row that the tower outputs.
//!
//! Files are untrusted. A defect is reported as a [`VisionError`] and never makes this crate panic.

#![forbid(unsafe_code)]

mod crops;
mod decode;
mod error;
mod fields;
mod jpeg;
mod metadata;
mod patches;
mod picture;
mod pixels;
mod processor;
mod prompt;
mod resample;
mod size;
mod video;
mod video_file;
mod webp;
mod work_limit;

pub use crops::{PanAndScan, crops};
pub use decode::{DecodeLimits, Measured, decode, measure};
pub use error::{Result, VisionError};
pub use patches::Grid;
pub use picture::Picture;
pub use pixels::PixelScale;
pub use processor::{ImageProcessor, Layout, ProcessedImage, ProcessorFiles};
pub use prompt::{ImageSpan, Placeholders, VideoSpan, expand};
pub use resample::{Filter, resize};
pub use size::{PixelBounds, Size, image_size, video_size};
pub use video::{
    FPS_DEFAULT, ProcessedVideo, VideoBounds, VideoBuilder, VideoProcessor, seconds, timestamps,
};
pub use video_file::{FrameSink, VideoFile, VideoFileLimits};
pub use work_limit::WorkLimit;

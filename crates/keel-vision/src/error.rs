//! Errors in a picture, a video or a processor file.

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VisionError {
    /// The file is larger than the limit.
    #[error("the picture's file has {bytes} bytes, at most {limit} are read")]
    FileBytes {
        /// Size of the file.
        bytes: usize,
        /// Largest size accepted.
        limit: usize,
    },
    /// The picture has more pixels than the limit.
    #[error("the picture is {width} x {height}, at most {pixels_max} pixels are decoded; make it smaller")]
    Pixels {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Largest number of pixels accepted.
        pixels_max: u64,
    },
    /// The file is not a picture, or its format is not supported.
    #[error("the file is not a picture in a supported format: PNG, JPEG, WebP or GIF")]
    Format,
    /// The file is broken.
    #[error("the picture cannot be decoded: {0}")]
    Decode(String),
    /// The picture has one pixel or none, so it shows nothing.
    #[error("the picture is {width} x {height}: it needs more than one pixel")]
    Empty {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
    },
    /// One side is too long compared with the other.
    #[error("the picture is {width} x {height}: one side may be at most {limit} times the other")]
    Aspect {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Largest ratio accepted.
        limit: usize,
    },
    /// The frames of a video have different sizes.
    #[error("frame {frame} of the video is {got}, but the first frame is {expected}")]
    Frame {
        /// Index of the frame.
        frame: usize,
        /// Size of the first frame.
        expected: String,
        /// Size of this frame.
        got: String,
    },
    /// A video that cannot be sampled.
    #[error("the video cannot be sampled: {0}")]
    Video(String),
    /// A video's file that cannot be read.
    #[error("the video cannot be read: {0}")]
    VideoFile(String),
    /// The request that needed the result has ended.
    #[error("the work was ended, because its result is no longer needed")]
    Unwanted,
    /// The time for the work is over.
    #[error("reading the pictures and videos took longer than {seconds} s; send fewer or smaller ones")]
    Time {
        /// The time that was allowed.
        seconds: f64,
    },
    /// A processor file is not valid.
    #[error("{file}: {reason}")]
    Processor {
        /// The file's name.
        file: String,
        /// The defect, and the accepted values.
        reason: String,
    },
    /// The placeholders of the prompt do not match the pictures and videos.
    #[error("{0}")]
    Prompt(String),
}

/// Result of this crate.
pub type Result<T, E = VisionError> = std::result::Result<T, E>;

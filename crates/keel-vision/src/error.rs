//! What can be wrong with a picture, a video or a processor file.

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VisionError {
    /// The file is larger than a picture may be.
    #[error("the picture's file has {bytes} bytes, at most {limit} are read")]
    FileBytes {
        /// Size of the file.
        bytes: usize,
        /// Most bytes.
        limit: usize,
    },
    /// The picture is larger than may be decoded.
    #[error("the picture is {width} x {height}, at most {pixels_max} pixels are decoded; make it smaller")]
    Pixels {
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
        /// Most pixels.
        pixels_max: u64,
    },
    /// Not a picture, or of a kind that is not read.
    #[error("the file is no picture that can be read; PNG, JPEG, WebP and GIF can")]
    Format,
    /// The file is broken.
    #[error("the picture cannot be decoded: {0}")]
    Decode(String),
    /// There is nothing to see.
    #[error("the picture is {width} x {height}: a picture of one pixel, or of none, shows nothing")]
    Empty {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
    },
    /// One side is far longer than the other.
    #[error("the picture is {width} x {height}: one side may be at most {limit} times the other")]
    Aspect {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
        /// Longest ratio.
        limit: usize,
    },
    /// Frames of different sizes.
    #[error("frame {frame} of the video is {got}, the first is {expected}")]
    Frame {
        /// Number of the frame.
        frame: usize,
        /// Size of the first frame.
        expected: String,
        /// Size of this frame.
        got: String,
    },
    /// A video that cannot be sampled.
    #[error("the video cannot be sampled: {0}")]
    Video(String),
    /// A processor file.
    #[error("{file}: {reason}")]
    Processor {
        /// Its name.
        file: String,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// The prompt and the pictures do not fit together.
    #[error("{0}")]
    Prompt(String),
}

/// Result of this crate.
pub type Result<T, E = VisionError> = std::result::Result<T, E>;

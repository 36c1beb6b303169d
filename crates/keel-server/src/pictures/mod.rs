//! Pictures of requests: from a URL in a message to the tower's input, apart from the network's threads.
//!
//! ```text
//! source.rs   where a picture comes from: the request itself, an allowed folder, an allowed host
//! video.rs    a video's file, or its frames
//! mod.rs      decoded and prepared as the model's processor says; placeholders repeated
//! ```
//!
//! Memory is charged before it is taken: a picture's size is read from its first bytes. The work ends when the client
//! leaves or its time is over ([`WorkLimit`]).

mod source;
mod video;

use std::sync::Arc;

use keel_engine::batch::{PictureInput, RequestVision};
use keel_engine::{EngineError, PatchGrid};
use keel_models::vision::{TowerKind, VisionConfig};
use keel_text::{Cancel, Tokenizer};
use keel_vision::{
    DecodeLimits, ImageProcessor, ImageSpan, Measured, Placeholders, ProcessorFiles, VideoBounds, VideoSpan,
    WorkLimit, decode, expand, measure,
};
use serde_json::Map;

use crate::error::{Result, setting, wrong};
use crate::text::Bounds;

pub use source::{Fetch, FetchLimits, PictureSources};
use video::{PreparedVideo, VideoPreprocessor};
pub(crate) use video::{VideoInput, VideoSource};

/// Pictures of one request at most.
const PICTURES_MAX: usize = 256;

/// Prepares the pictures of requests for the model that is served.
pub struct ImagePreprocessor {
    config: VisionConfig,
    processor: ImageProcessor,
    placeholders: Placeholders,
    /// Prepares videos, if the model takes any.
    videos: Option<VideoPreprocessor>,
}

/// The pictures of a conversation, ready for the tower.
#[derive(Default)]
pub(crate) struct PromptMedia {
    pub inputs: Vec<PictureInput>,
    /// Their placeholders in the prompt.
    pub spans: Spans,
}

/// The placeholders of each picture and each video of a conversation in the prompt.
#[derive(Default)]
pub(crate) struct Spans {
    pub images: Vec<ImageSpan>,
    pub videos: Vec<VideoSpan>,
}

impl Spans {
    pub fn are_none(&self) -> bool {
        self.images.is_empty() && self.videos.is_empty()
    }
}

/// A picture or a video of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MediaSource {
    /// The URL of a picture.
    Picture(String),
    Video(VideoInput),
}

impl ImagePreprocessor {
    /// For a model with this tower. Pictures larger than `pixels_max` are read at that size. Videos are read at a size
    /// at which their features take no more room than those of `pictures` such pictures.
    ///
    /// # Errors
    /// Processor files that cannot be followed; a tokenizer without the tokens of pictures.
    pub fn new(
        config: VisionConfig,
        files: &ProcessorFiles,
        tokenizer: &Tokenizer,
        pixels_max: usize,
        pictures: usize,
    ) -> Result<ImagePreprocessor> {
        let failed = |error: keel_vision::VisionError| setting("pictures", error.to_string());
        let processor = files.image(&Map::new()).map_err(failed)?.limited_to(pixels_max).map_err(failed)?;
        let placeholders = placeholders(&config, tokenizer)?;
        let of_videos =
            VideoBounds { frame_pixels: pixels_max, pixels: pixels_max.saturating_mul(pictures.max(1)) };
        let videos = config.tokens.video.and_then(|_| VideoPreprocessor::new(files, of_videos));
        Ok(ImagePreprocessor { config, processor, placeholders, videos })
    }

    /// Whether the model takes videos, too.
    pub fn takes_videos(&self) -> bool {
        self.videos.is_some()
    }

    /// Reads, decodes and prepares pictures and videos.
    ///
    /// # Errors
    /// One that cannot be had, decoded or prepared; memory that others use.
    pub(crate) fn prepare(&self, sources: &[MediaSource], bounds: &Bounds<'_>) -> Result<PromptMedia> {
        let (time, cancel) = (bounds.sources.map(|sources| sources.request_time), Cancel::current());
        let time = time.unwrap_or(PictureSources::default().request_time);
        WorkLimit::new(time, move || !cancel.is_cancelled()).scope(|| self.prepare_all(sources, bounds))
    }

    fn prepare_all(&self, sources: &[MediaSource], bounds: &Bounds<'_>) -> Result<PromptMedia> {
        if sources.len() > PICTURES_MAX {
            return Err(wrong(
                "messages",
                format!("{} pictures, at most {PICTURES_MAX} are shown", sources.len()),
            ));
        }
        let mut media = PromptMedia::default();
        let mut rows = 0;
        for (i, source) in sources.iter().enumerate() {
            rows += match source {
                MediaSource::Picture(url) => {
                    let crops = self.prepare_picture(url, bounds, &mut media.inputs);
                    let crops = crops.map_err(|error| error.of("picture", i))?;
                    let PatchGrid { h, w, .. } = media.inputs[media.inputs.len() - 1 - crops].grid;
                    let tokens = self.config.rows_of(h, w);
                    media.spans.images.push(ImageSpan { tokens, crops });
                    tokens * (1 + crops)
                }
                MediaSource::Video(video) => {
                    let PreparedVideo { input, span } =
                        self.prepare_video(video, bounds).map_err(|error| error.of("video", i))?;
                    let tokens = span.tokens * span.seconds.len();
                    media.inputs.push(input);
                    media.spans.videos.push(span);
                    tokens
                }
            };
            if rows >= bounds.context {
                return Err(EngineError::Context { needed: rows + 1, context: bounds.context }.into());
            }
        }
        Ok(media)
    }

    /// Returns how many crops follow the picture.
    fn prepare_picture(
        &self,
        url: &str,
        bounds: &Bounds<'_>,
        inputs: &mut Vec<PictureInput>,
    ) -> Result<usize, MediaError> {
        let file = source::read(url, bounds)?;
        let limits = DecodeLimits { file_bytes: source::FILE_BYTES_MAX, pixels: source::PIXELS_MAX };
        let Measured { width, height, decode_bytes } = measure(&file.bytes, limits)?;
        let preparing = 3 * width as u64 * height as u64 + self.processor.work_bytes(width, height)?;
        let work = bounds.hold(decode_bytes.max(preparing))?;
        let prepared = self.processor.process(&decode(&file.bytes, limits)?)?;
        let crops = prepared.len() - 1;
        if let Some(work) = work {
            work.keep(prepared.iter().map(|one| size_of_val(&one.values[..]) as u64).sum());
        }
        for one in prepared {
            let grid = PatchGrid { t: one.grid.t, h: one.grid.h, w: one.grid.w };
            let key = one.key(&self.processor);
            inputs.push(PictureInput { key, values: Arc::new(one.values), grid, is_video: false });
        }
        Ok(crops)
    }

    /// A rendered prompt with its placeholders repeated.
    pub(crate) fn expand(&self, prompt: &str, spans: &Spans) -> Result<String> {
        let Spans { images, videos } = spans;
        expand(prompt, &self.placeholders, images, videos)
            .map_err(|error| wrong("messages", error.to_string()))
    }

    /// The pictures with the prompt that shows them.
    pub(crate) fn vision(&self, prompt: &[u32], media: PromptMedia) -> Result<Option<RequestVision>> {
        if media.inputs.is_empty() {
            return Ok(None);
        }
        let vision = RequestVision::new(&self.config, prompt, media.inputs);
        vision.map(Some).map_err(|error| wrong("messages", error.to_string()))
    }
}

/// The special tokens of pictures and videos, as the tokenizer writes them.
///
/// # Errors
/// The tokenizer does not have them.
pub fn placeholders(config: &VisionConfig, tokenizer: &Tokenizer) -> Result<Placeholders> {
    let written = |id: u32| {
        let missing = || format!("config.json names token {id}, which the tokenizer does not have");
        tokenizer.id_to_token(id).ok_or_else(|| setting("pictures", missing()))
    };
    let tokens = config.tokens;
    let (image, start, end) = (written(tokens.image)?, written(tokens.start)?, written(tokens.end)?);
    Ok(match config.kind {
        TowerKind::Qwen { .. } => {
            let video = tokens.video.map_or(Ok("<|video_pad|>".to_string()), written)?;
            Placeholders::Qwen { image, video, start, end }
        }
        TowerKind::Siglip { .. } => Placeholders::Gemma { image, start, end },
    })
}

/// A problem with a picture.
#[derive(Debug)]
pub(crate) enum MediaError {
    /// It cannot be had or decoded.
    Picture(String),
    /// Memory.
    Request(crate::ServerError),
}

impl MediaError {
    /// `i` counts pictures and videos together.
    fn of(self, what: &str, i: usize) -> crate::ServerError {
        match self {
            MediaError::Picture(problem) => wrong("messages", format!("{what} {}: {problem}", i + 1)),
            MediaError::Request(error) => error,
        }
    }
}

impl From<keel_vision::VisionError> for MediaError {
    fn from(error: keel_vision::VisionError) -> MediaError {
        MediaError::Picture(error.to_string())
    }
}

impl From<crate::ServerError> for MediaError {
    fn from(error: crate::ServerError) -> MediaError {
        MediaError::Request(error)
    }
}

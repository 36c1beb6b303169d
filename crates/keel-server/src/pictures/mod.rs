//! Pictures of requests: from a URL in a message to what the tower reads, apart from the network's threads.
//!
//! ```text
//! source.rs   where a picture comes from: the request itself, an allowed folder, an allowed host
//! mod.rs      decoded and prepared as the model's processor says; placeholders repeated
//! ```
//!
//! Memory is charged before it is taken: a picture's size is read from its first bytes.

mod source;

use std::sync::Arc;

use keel_engine::batch::{PictureInput, RequestSight};
use keel_engine::{EngineError, PatchGrid};
use keel_models::vision::{TowerKind, VisionConfig};
use keel_text::Tokenizer;
use keel_vision::{
    DecodeLimits, ImageProcessor, ImageSpan, Placeholders, ProcessorFiles, decode, expand, measure,
};
use serde_json::Map;

use crate::error::{Result, setting, wrong};
use crate::text::Bounds;

pub use source::{Fetch, FetchLimits, PictureSources};

/// Bytes of heap for each pixel of a file while it is decoded, and for each pixel of the size that the tower reads while it is
/// prepared.
const PER_FILE_PIXEL: u64 = 20;
const PER_READ_PIXEL: u64 = 40;

/// Pictures of one request at most.
const PICTURES_MAX: usize = 256;

/// How the model that is served is shown pictures.
pub struct Viewer {
    config: VisionConfig,
    processor: ImageProcessor,
    placeholders: Placeholders,
    /// Pixels that the tower reads at most.
    pixels_max: usize,
}

/// The pictures of a conversation, ready for the tower.
#[derive(Default)]
pub(crate) struct Shown {
    pub inputs: Vec<PictureInput>,
    /// What each picture of the conversation takes in the prompt.
    pub spans: Vec<ImageSpan>,
}

impl Viewer {
    /// For a model with this tower. Pictures larger than `pixels_max` are read at that size.
    ///
    /// # Errors
    /// Processor files that cannot be followed; a tokenizer without the tokens of pictures.
    pub fn new(
        config: VisionConfig,
        files: &ProcessorFiles,
        tokenizer: &Tokenizer,
        pixels_max: usize,
    ) -> Result<Viewer> {
        let failed = |error: keel_vision::VisionError| setting("pictures", error.to_string());
        let processor = files.image(&Map::new()).map_err(failed)?.limited_to(pixels_max).map_err(failed)?;
        let written = |id: u32| {
            let text = tokenizer.id_to_token(id);
            text.ok_or_else(|| {
                setting(
                    "pictures",
                    format!("config.json names token {id}, which the tokenizer does not have"),
                )
            })
        };
        let tokens = config.tokens;
        let (image, start, end) = (written(tokens.image)?, written(tokens.start)?, written(tokens.end)?);
        let placeholders = match config.kind {
            TowerKind::Qwen { .. } => {
                let video = tokens.video.map_or(Ok("<|video_pad|>".to_string()), written)?;
                Placeholders::Qwen { image, video, start, end }
            }
            TowerKind::Siglip { .. } => Placeholders::Gemma { image, start, end },
        };
        Ok(Viewer { config, processor, placeholders, pixels_max })
    }

    /// Reads, decodes and prepares the pictures of these URLs.
    ///
    /// # Errors
    /// A picture that cannot be had, decoded or shown; memory that others use.
    pub(crate) fn show(&self, urls: &[String], bounds: &Bounds<'_>) -> Result<Shown> {
        if urls.len() > PICTURES_MAX {
            return Err(wrong(
                "messages",
                format!("{} pictures, at most {PICTURES_MAX} are shown", urls.len()),
            ));
        }
        let mut shown = Shown::default();
        let mut rows = 0;
        for (i, url) in urls.iter().enumerate() {
            let crops = self.show_one(url, bounds, &mut shown.inputs).map_err(|error| error.of_picture(i))?;
            let PatchGrid { h, w, .. } = shown.inputs[shown.inputs.len() - 1 - crops].grid;
            let tokens = self.config.rows_of(h, w);
            rows += tokens * (1 + crops);
            if rows >= bounds.context {
                return Err(EngineError::Context { needed: rows + 1, context: bounds.context }.into());
            }
            shown.spans.push(ImageSpan { tokens, crops });
        }
        Ok(shown)
    }

    /// Returns how many crops follow the picture.
    fn show_one(
        &self,
        url: &str,
        bounds: &Bounds<'_>,
        inputs: &mut Vec<PictureInput>,
    ) -> Result<usize, Trouble> {
        let hold = |bytes: u64| bounds.meter.map(|meter| meter.hold(bytes)).transpose();
        let bytes = source::read(url, bounds)?;
        let _file = hold(bytes.len() as u64)?;
        let limits = DecodeLimits { file_bytes: source::FILE_BYTES_MAX, pixels: source::PIXELS_MAX };
        let (width, height) = measure(&bytes, limits)?;
        let read = self.processor.values_max().unwrap_or(3 * self.pixels_max) as u64;
        let _work = hold(u64::from(width) * u64::from(height) * PER_FILE_PIXEL + read * PER_READ_PIXEL / 3)?;
        let prepared = self.processor.process(&decode(&bytes, limits)?)?;
        let crops = prepared.len() - 1;
        for one in prepared {
            if let Some(meter) = bounds.meter {
                meter.take(size_of_val(&one.values[..]) as u64)?;
            }
            let grid = PatchGrid { t: one.grid.t, h: one.grid.h, w: one.grid.w };
            let key = one.key(&self.processor);
            inputs.push(PictureInput { key, values: Arc::new(one.values), grid, is_video: false });
        }
        Ok(crops)
    }

    /// A rendered prompt with its placeholders repeated.
    pub(crate) fn expand(&self, prompt: &str, spans: &[ImageSpan]) -> Result<String> {
        expand(prompt, &self.placeholders, spans, &[]).map_err(|error| wrong("messages", error.to_string()))
    }

    /// The pictures with the prompt that shows them.
    pub(crate) fn sight(&self, prompt: &[u32], shown: Shown) -> Result<Option<RequestSight>> {
        if shown.inputs.is_empty() {
            return Ok(None);
        }
        let sight = RequestSight::new(&self.config, prompt, shown.inputs);
        sight.map(Some).map_err(|error| wrong("messages", error.to_string()))
    }
}

/// What is wrong with a picture.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// It cannot be had or decoded.
    Picture(String),
    /// Memory.
    Request(crate::ServerError),
}

impl Trouble {
    fn of_picture(self, i: usize) -> crate::ServerError {
        match self {
            Trouble::Picture(problem) => wrong("messages", format!("picture {}: {problem}", i + 1)),
            Trouble::Request(error) => error,
        }
    }
}

impl From<keel_vision::VisionError> for Trouble {
    fn from(error: keel_vision::VisionError) -> Trouble {
        Trouble::Picture(error.to_string())
    }
}

impl From<crate::ServerError> for Trouble {
    fn from(error: crate::ServerError) -> Trouble {
        Trouble::Request(error)
    }
}

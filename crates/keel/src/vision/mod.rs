//! Turns a conversation with pictures into a prompt, and into the pictures' features for a sequence.
//!
//! ```text
//! messages.rs   the JSON of a conversation; its pictures and videos are taken out
//! load.rs       files and data URIs, decoded
//! mod.rs        processed, the template rendered, placeholders repeated, positions found; then the tower
//! ```

mod chat_images;
mod load;
mod messages;

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use keel_cache::{SeenPicture, VisionInputs};
use keel_engine::{Engine, Features, PatchGrid, VisionOptions};
use keel_models::vision::{self, VisionConfig, prompt_layout, run_ends};
use keel_server::{ImagePreprocessor, placeholders};
use keel_text::{ChatRequest, Tokenizer};
use keel_vision::{
    Grid, ImageSpan, ProcessedImage, ProcessedVideo, ProcessorFiles, VideoBuilder, VideoFile,
    VideoFileLimits, VideoSpan, expand, timestamps,
};
use serde_json::{Map, Value};

use evenkeel::ModelText;
use evenkeel::{ModelFiles, WeightFiles};

pub use chat_images::{ChatImages, EncodedImage, PromptWithImages};
pub use load::Origin;
pub use messages::{Conversation, VideoFrames, VideoPart};

/// A prepared conversation: its tokens, and its pictures in the tower's form.
pub struct Prepared {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// The tower's config, if the model has a tower.
    pub vision: Option<VisionConfig>,
    /// Pictures in order. Crops follow their picture.
    pub images: Vec<ProcessedImage>,
    /// Videos in order.
    pub videos: Vec<ProcessedVideo>,
}

/// Features of all pictures and of all videos, level by level. Each row has the text model's width.
#[derive(Default)]
pub struct EncodedMedia {
    /// Features of pictures.
    pub images: Arc<Features>,
    /// Features of videos.
    pub videos: Arc<Features>,
}

/// Renders and encodes a conversation, and prepares its pictures.
///
/// # Errors
/// - The model reads only text, and there are pictures.
/// - A file cannot be read.
/// - The processor, the template or the tokenizer fails.
pub fn prepare(model: &ModelFiles, text: &ModelText, conversation: &Conversation) -> Result<Prepared> {
    // A vision config that contradicts itself does not matter without pictures.
    let vision = vision::read_vision(&model.json);
    let vision = if conversation.has_pictures() { vision? } else { vision.ok().flatten() };
    let has_tower = vision.as_ref().is_some_and(|config| vision::has_tower(config, &*model.parameters()));
    if conversation.has_pictures() && !has_tower {
        match (&model.weights, &model.tower) {
            (WeightFiles::Gguf(_), None) => {
                bail!(
                    "this model reads only text: its vision tower would be in a file of its own, see --mmproj"
                )
            }
            _ => bail!("this model reads only text: it has no vision tower"),
        }
    }
    let (mut images, mut videos) = (Vec::new(), Vec::new());
    let (mut image_spans, mut video_spans) = (Vec::new(), Vec::new());
    if let Some(config) = vision.as_ref().filter(|_| conversation.has_pictures()) {
        let files = processor_files(model)?;
        for part in &conversation.images {
            let processor = files.image(&conversation.settings)?;
            let picture = load::picture(part, load::room(), |w, h| processor.work_bytes(w, h))?;
            let mut processed = processor.process(&picture)?;
            let tokens = processed.first().map_or(0, |one| config.rows_of(one.grid.h, one.grid.w));
            image_spans.push(ImageSpan { tokens, crops: processed.len() - 1 });
            images.append(&mut processed);
        }
        for part in &conversation.videos {
            let (video, span) = prepare_video(config, &files, part, &conversation.settings)?;
            video_spans.push(span);
            videos.push(video);
        }
    }
    let request =
        ChatRequest { variables: Some(&conversation.variables), ..ChatRequest::new(&conversation.messages) };
    let mut prompt = text.template()?.render(&request)?;
    if let Some(config) = &vision {
        prompt = expand(&prompt, &placeholders(config, &text.tokenizer)?, &image_spans, &video_spans)?;
    }
    let tokens = text.tokenizer.encode(&prompt, false)?;
    Ok(Prepared { tokens, vision, images, videos })
}

/// Whether a model has all that pictures need: a tower, and files that say how they are prepared.
pub fn takes_pictures(model: &ModelFiles) -> bool {
    let config = vision::read_vision(&model.json).ok().flatten();
    config.is_some_and(|config| vision::has_tower(&config, &*model.parameters()))
        && processor_files(model).is_ok_and(|files| files.image(&Map::new()).is_ok())
}

/// Prepares pictures of at most `pixels_max` pixels for the model of a server. The server keeps the features of
/// `pictures` of them.
///
/// # Errors
/// A model without a vision tower; processor files that cannot be followed.
pub fn image_preprocessor(
    model: &ModelFiles,
    tokenizer: &Tokenizer,
    pixels_max: usize,
    pictures: usize,
) -> Result<ImagePreprocessor> {
    let config = vision::read_vision(&model.json)?.context("this model reads only text")?;
    Ok(ImagePreprocessor::new(config, &processor_files(model)?, tokenizer, pixels_max, pictures)?)
}

fn processor_files(model: &ModelFiles) -> Result<ProcessorFiles> {
    match &model.weights {
        WeightFiles::Checkpoint(checkpoint) => Ok(ProcessorFiles::read(checkpoint.folder())?),
        WeightFiles::Gguf(text) => {
            let Some(tower) = &model.tower else {
                bail!(
                    "this model reads only text: a GGUF model has its vision tower in a file of its own, see --mmproj"
                )
            };
            Ok(ProcessorFiles::new(Some(keel_models::gguf::processor(text, &tower.file)?), None, None))
        }
    }
}

fn prepare_video(
    config: &VisionConfig,
    files: &ProcessorFiles,
    part: &VideoPart,
    settings: &Map<String, Value>,
) -> Result<(ProcessedVideo, VideoSpan)> {
    let mut settings = settings.clone();
    settings.extend(part.settings.clone());
    let processor = files.video(&settings)?;
    let (video, taken, fps) = match &part.frames {
        VideoFrames::Listed(frames, fps) => {
            let taken = processor.sample(frames.len(), *fps)?;
            let mut builder = VideoBuilder::new(&processor, taken.len());
            for (number, &i) in taken.iter().enumerate() {
                // The resized frames and the values prepared from them are counted once.
                let work = |width, height| match number {
                    0 => processor.work_bytes(taken.len(), width, height),
                    _ => Ok(0),
                };
                builder.add(&load::picture(&frames[i], load::room(), work)?)?;
            }
            (builder.finish()?, taken, *fps)
        }
        VideoFrames::File(origin) => {
            let limits = VideoFileLimits::default();
            load::with_bytes(origin, limits.file_bytes, |bytes| {
                let video = VideoFile::open(bytes, limits)?;
                let taken = processor.sample(video.frames(), video.fps())?;
                let (width, height) = video.size();
                let work = video.frame_bytes() + processor.work_bytes(taken.len(), width, height)?;
                let what = format!("a video of {} chosen frames of {width} x {height}", taken.len());
                load::expect_room(&what, work, load::room())?;
                let mut builder = VideoBuilder::new(&processor, taken.len());
                video.take(&taken, &mut |frame| builder.add(&frame))?;
                Ok((builder.finish()?, taken, video.fps()))
            })?
        }
    };
    let seconds = timestamps(&taken, fps, processor.frames_per_patch());
    let span = VideoSpan { tokens: config.rows_of(video.grid.h, video.grid.w), seconds };
    Ok((video, span))
}

impl Prepared {
    /// The options to plan an engine for these pictures. `None` if there are none.
    pub fn vision_options(&self) -> Option<VisionOptions> {
        let grids = self.images.iter().map(|one| one.grid).chain(self.videos.iter().map(|one| one.grid));
        let patches = grids.map(|grid| grid.h * grid.w).max()?;
        let groups = self.videos.iter().map(|one| one.grid.t).sum::<usize>();
        Some(VisionOptions {
            patches,
            pictures: self.images.len() + groups,
            piece_tokens: VisionOptions::WHOLE,
        })
    }

    /// Runs the tower on all pictures and videos.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn encode(&self, engine: &mut Engine) -> Result<EncodedMedia> {
        let (mut images, mut videos) = (Features::default(), Features::default());
        for image in &self.images {
            append(&mut images, engine.encode_picture(&image.values, grid_of(image.grid))?);
        }
        for video in &self.videos {
            append(&mut videos, engine.encode_picture(&video.values, grid_of(video.grid))?);
        }
        Ok(EncodedMedia { images: Arc::new(images), videos: Arc::new(videos) })
    }

    /// The pictures for a sequence that runs the prompt. `None` for a model that reads only text.
    ///
    /// # Errors
    /// The prompt's tokens do not match the pictures.
    pub fn vision_inputs(&self, encoded: &EncodedMedia) -> Result<Option<Arc<VisionInputs>>> {
        let Some(config) = &self.vision else { return Ok(None) };
        let width = config.text_hidden;
        let (mut first, mut images, mut videos) = (0, Vec::new(), Vec::new());
        for image in &self.images {
            images.extend(config.runs_of(image.grid.t, image.grid.h, image.grid.w, &mut first));
        }
        for video in &self.videos {
            videos.extend(config.runs_of(video.grid.t, video.grid.h, video.grid.w, &mut first));
        }
        let layout = prompt_layout(config, &self.tokens, &images, &videos)?;
        let ends = if config.is_bidirectional() { run_ends(config, &layout) } else { Vec::new() };
        let rows_of_images: usize = images.iter().map(|run| run.height * run.width).sum();
        let kinds = [(0, &encoded.images), (rows_of_images, &encoded.videos)];
        let there = kinds.into_iter().filter(|(_, features)| !features.levels.is_empty());
        let pictures =
            there.map(|(first, features)| SeenPicture { first, features: Arc::clone(features) }).collect();
        Ok(Some(Arc::new(VisionInputs {
            positions: layout.positions,
            delta: layout.delta,
            rows: layout.features,
            ends,
            pictures,
            width,
        })))
    }
}

fn grid_of(grid: Grid) -> PatchGrid {
    PatchGrid { t: grid.t, h: grid.h, w: grid.w }
}

fn append(all: &mut Features, more: Features) {
    all.levels.resize(more.levels.len(), Vec::new());
    all.levels.iter_mut().zip(more.levels).for_each(|(all, more)| all.extend(more));
}

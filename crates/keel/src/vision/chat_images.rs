//! Pictures of a conversation in the terminal, encoded one after the other.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use keel_cache::{Features, SeenPicture, VisionInputs};
use keel_engine::{Engine, VisionOptions};
use keel_models::vision::{self, VisionConfig, prompt_layout, run_ends};
use keel_server::placeholders;
use keel_text::{ChatRequest, ChatTemplate, Message};
use keel_vision::{Grid, ImageProcessor, ImageSpan, Placeholders, expand};
use serde_json::Map;

use super::{Origin, append, grid_of, load, processor_files, takes_pictures};
use evenkeel::ModelFiles;
use evenkeel::ModelText;

/// Pixels of a picture at most; a larger one is read at this size.
const PIXELS_MAX: usize = 1 << 20;
/// Pictures of a conversation.
const PICTURES_MAX: usize = 8;

/// Prepares the pictures of a conversation, and has the tower encode them.
pub struct ChatImages {
    config: VisionConfig,
    processor: ImageProcessor,
    placeholders: Placeholders,
    /// Pictures encoded so far, also those of turns that were taken back.
    count: u32,
}

/// A picture that the tower has encoded.
pub struct EncodedImage {
    /// Tells it from the others of the conversation.
    number: u32,
    span: ImageSpan,
    /// Of the picture and its crops.
    grids: Vec<Grid>,
    features: Arc<Features>,
}

/// A conversation as the engine takes it.
pub struct PromptWithImages {
    pub tokens: Vec<u32>,
    /// The tokens, with each token of a picture replaced by a value that stands for the picture. The cache's contents
    /// are compared by these keys.
    pub key: Vec<u32>,
    pub vision_inputs: Option<Arc<VisionInputs>>,
}

impl ChatImages {
    /// # Errors
    /// A model without a vision tower; processor files that cannot be followed.
    pub fn open(model: &ModelFiles, text: &ModelText) -> Result<ChatImages> {
        if !takes_pictures(model) {
            bail!("this model reads only text: it has no vision tower, or no processor files");
        }
        let config = vision::read_vision(&model.json)?.context("this model reads only text")?;
        let processor = processor_files(model)?.image(&Map::new())?.limited_to(PIXELS_MAX)?;
        Ok(ChatImages { placeholders: placeholders(&config, &text.tokenizer)?, config, processor, count: 0 })
    }

    /// The pictures for which an engine must plan.
    pub fn options(&self) -> VisionOptions {
        VisionOptions {
            patches: PIXELS_MAX / self.config.patch.pow(2),
            pictures: PICTURES_MAX,
            piece_tokens: VisionOptions::WHOLE,
        }
    }

    /// Has the tower encode the picture of a file. The conversation has `before` pictures already.
    ///
    /// # Errors
    /// More pictures than planned for; a file that cannot be read or encoded.
    pub fn encode_picture(&mut self, engine: &mut Engine, file: &str, before: usize) -> Result<EncodedImage> {
        if before == PICTURES_MAX {
            bail!("the conversation already has {PICTURES_MAX} pictures; /reset begins a new one");
        }
        let origin = Origin::File(Path::new(file).to_path_buf());
        let picture = load::picture(&origin, load::room(), |w, h| self.processor.work_bytes(w, h))?;
        let processed = self.processor.process(&picture)?;
        let mut features = Features::default();
        for one in &processed {
            append(&mut features, engine.encode_picture(&one.values, grid_of(one.grid))?);
        }
        let grids: Vec<Grid> = processed.iter().map(|one| one.grid).collect();
        let tokens = grids.first().map_or(0, |grid| self.config.rows_of(grid.h, grid.w));
        self.count += 1;
        let span = ImageSpan { tokens, crops: grids.len().saturating_sub(1) };
        Ok(EncodedImage { number: self.count, span, grids, features: Arc::new(features) })
    }

    /// Renders and encodes a conversation, whose pictures are `images` in order.
    ///
    /// # Errors
    /// Errors of the template, the tokenizer or the placeholders.
    pub fn encode(
        &self,
        text: &ModelText,
        template: &ChatTemplate,
        messages: &[Message],
        images: &[EncodedImage],
    ) -> Result<PromptWithImages> {
        if images.is_empty() {
            let tokens = text.encode_chat(template, messages)?;
            return Ok(PromptWithImages { key: tokens.clone(), tokens, vision_inputs: None });
        }
        let spans: Vec<ImageSpan> = images.iter().map(|image| image.span).collect();
        let prompt = expand(&template.render(&ChatRequest::new(messages))?, &self.placeholders, &spans, &[])?;
        let tokens = text.tokenizer.encode(&prompt, false)?;
        let (mut rows, mut runs, mut pictures, mut numbers) = (0, Vec::new(), Vec::new(), Vec::new());
        for image in images {
            pictures.push(SeenPicture { first: rows, features: Arc::clone(&image.features) });
            for grid in &image.grids {
                runs.extend(self.config.runs_of(grid.t, grid.h, grid.w, &mut rows));
            }
            numbers.resize(rows, image.number);
        }
        let layout = prompt_layout(&self.config, &tokens, &runs, &[])?;
        let ends = if self.config.is_bidirectional() { run_ends(&self.config, &layout) } else { Vec::new() };
        let number = |(token, row): (&u32, &Option<u32>)| row.map_or(*token, |row| !numbers[row as usize]);
        let key = tokens.iter().zip(&layout.features).map(number).collect();
        let vision_inputs = VisionInputs {
            positions: layout.positions,
            delta: layout.delta,
            rows: layout.features,
            ends,
            pictures,
            width: self.config.text_hidden,
        };
        Ok(PromptWithImages { tokens, key, vision_inputs: Some(Arc::new(vision_inputs)) })
    }
}

//! The text side of the served model.

use keel_engine::batch::RequestVision;
use keel_text::{ChatRequest, ChatTemplate, GenerationDefaults, Message, TextError, TextFiles, Tokenizer};
use serde_json::{Map, Value};

use crate::engine::grammar::GrammarFactory;
use crate::error::{Result, ServerError, wrong};
use crate::memory::charge::Hold;
use crate::memory::requests::{Meter, bytes_of_encoding};
use crate::model_manager::Modalities;
use crate::pictures::{ImagePreprocessor, PictureSources, Spans};

/// Tokenizer, chat template and recommended sampling settings of a model.
pub struct ServedText {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Recommended sampling settings.
    pub defaults: GenerationDefaults,
    template: Option<ChatTemplate>,
    /// Prepares pictures, if the model takes any.
    pub(crate) preprocessor: Option<ImagePreprocessor>,
    pub(crate) grammars: GrammarFactory,
}

/// A conversation in the model's form.
#[derive(Debug)]
pub(crate) struct ChatPrompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The end of the prompt's text. It determines how the answer begins.
    pub tail: String,
    /// Number of tokens of the system prompt and the tools. Later conversations are likely to share them.
    pub shared_len: usize,
}

/// Bounds on a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds<'a> {
    /// All ids are below this.
    pub vocab: usize,
    /// Largest number of tokens of a sequence. The model's own limit may be larger.
    pub context: usize,
    pub context_max: usize,
    /// The fewest tokens after a prompt: 1 for an answer, 0 where the prompt alone is read.
    pub answer_min: usize,
    /// Largest number of answers per request.
    pub choices_max: usize,
    /// Where pictures may come from, other than the request.
    pub sources: Option<&'a PictureSources>,
    /// The request's memory; `None` if it is not counted.
    pub meter: Option<&'a Meter>,
}

impl Bounds<'_> {
    /// Encodes a text that fits in the context. A text that is surely too long is refused by its bytes alone.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let tokens = tokenizer.tokens_at_least(text);
        let prompt_max = self.context.saturating_sub(self.answer_min);
        if tokens > prompt_max {
            let (context, context_max) = (self.context, self.context_max);
            let bytes_most = tokenizer.bytes_at_most(text, prompt_max).unwrap_or(0);
            let bytes = text.len();
            return Err(ServerError::TextTooLong { bytes, bytes_most, tokens, context, context_max });
        }
        let _held = self.hold(bytes_of_encoding(text))?;
        Ok(tokenizer.encode(text, add_special)?)
    }

    /// Charges bytes to the request until the result is dropped.
    pub fn hold(&self, bytes: u64) -> Result<Option<Hold<'_>>> {
        Ok(self.meter.map(|meter| meter.hold(bytes)).transpose()?)
    }

    /// Charges bytes to the request until it ends.
    pub fn keep(&self, bytes: u64) -> Result<()> {
        Ok(self.meter.map_or(Ok(()), |meter| meter.take(bytes))?)
    }

    /// Reduces the request's charge to its prompts: `tokens` ids for each answer, and once more.
    pub fn settle(&self, tokens: usize, choices: usize) {
        self.settle_with(tokens, choices, None);
    }

    /// The same with pictures. They are shared by the answers; where tokens stand is not.
    pub fn settle_with(&self, tokens: usize, choices: usize, vision: Option<&RequestVision>) {
        if let Some(meter) = self.meter {
            let of_pictures =
                vision.map_or(0, |vision| vision.input_bytes() + tokens * PLACE_BYTES * (choices + 1));
            meter.settle((tokens * size_of::<u32>() * (choices + 1) + of_pictures) as u64);
        }
    }
}

/// Bytes that say where a token stands, and which row of a picture it is.
const PLACE_BYTES: usize = 3 * size_of::<i32>() + size_of::<Option<u32>>() + size_of::<u32>();

/// Number of characters at the prompt's end that are kept, to determine how the answer begins.
const TAIL_CHARS: usize = 64;

impl ServedText {
    /// Reads the text side from a checkpoint's files.
    ///
    /// # Errors
    /// A file is missing or broken.
    pub fn new(files: &TextFiles<'_>) -> Result<ServedText, TextError> {
        let tokenizer = Tokenizer::new(files)?;
        Ok(ServedText {
            grammars: GrammarFactory::new(files, &tokenizer),
            tokenizer,
            defaults: GenerationDefaults::new(files)?,
            template: ChatTemplate::new(files)?,
            preprocessor: None,
        })
    }

    /// The same for a model that takes pictures.
    pub fn with_preprocessor(self, preprocessor: ImagePreprocessor) -> ServedText {
        ServedText { preprocessor: Some(preprocessor), ..self }
    }

    /// The inputs that the model takes in addition to text.
    pub fn takes(&self) -> Modalities {
        let videos = self.preprocessor.as_ref().is_some_and(ImagePreprocessor::takes_videos);
        Modalities { pictures: self.preprocessor.is_some(), videos }
    }

    /// Renders and encodes a conversation.
    ///
    /// # Errors
    /// There is no chat template, or it refuses the conversation.
    pub(crate) fn encode_chat(
        &self,
        messages: &[Message],
        tools: Option<&[Value]>,
        variables: Option<&Map<String, Value>>,
        spans: &Spans,
        bounds: &Bounds<'_>,
    ) -> Result<ChatPrompt> {
        let Some(template) = &self.template else {
            return Err(wrong("messages", "this model has no chat template; use /v1/completions"));
        };
        if messages.is_empty() {
            return Err(wrong("messages", "there are none"));
        }
        let request = ChatRequest { tools, variables, ..ChatRequest::new(messages) };
        let mut text = template.render(&request)?;
        if let Some(preprocessor) = self.preprocessor.as_ref().filter(|_| !spans.are_none()) {
            text = preprocessor.expand(&text, spans)?;
        }
        let ids = bounds.encode(&self.tokenizer, &text, false)?;
        let mut shared_len = 0;
        if messages.len() > 1 && messages[0].role == "system" {
            let head = ChatRequest { messages: &messages[..1], add_generation_prompt: false, ..request };
            // Some templates refuse a conversation without a user's message. Then the shared length stays 0.
            if let Ok(head) = template.render(&head) {
                let head = bounds.encode(&self.tokenizer, &head, false)?;
                shared_len = head.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            }
        }
        let tail: Vec<char> = text.chars().rev().take(TAIL_CHARS).collect();
        Ok(ChatPrompt { ids, tail: tail.into_iter().rev().collect(), shared_len })
    }
}

//! Encodes prompts, and decodes ids while they are drawn.

use anyhow::{Context, Result, bail};
use keel_text::{
    ChatRequest, ChatTemplate, GenerationDefaults, GrammarFactory, GrammarSource, Message, StopMatcher,
    StreamDetokenizer, TextFiles, Tokenizer,
};

use crate::constrained::Form;
use crate::source::Model;

/// Number of tokens at a prompt's end that are checked for the beginning of reasoning.
const TAIL_TOKENS: usize = 4;

/// The text side of a checkpoint.
pub struct ModelText {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Recommended sampling settings.
    pub defaults: GenerationDefaults,
    files: TextFiles<'static>,
}

impl ModelText {
    /// Reads the tokenizer and its settings.
    ///
    /// # Errors
    /// A file is missing or broken.
    pub fn open(model: &Model) -> Result<ModelText> {
        let mut files = model.text_files()?;
        let tokenizer = Tokenizer::new(&files)?;
        files.forget_tokenizer();
        Ok(ModelText { tokenizer, defaults: GenerationDefaults::new(&files)?, files })
    }

    /// The chat template.
    ///
    /// # Errors
    /// There is none, or it is broken.
    pub fn template(&self) -> Result<ChatTemplate> {
        match self.find_template()? {
            Some(template) => Ok(template),
            None => bail!(
                "this model has no chat template: it continues texts and answers nobody; use keel generate --raw"
            ),
        }
    }

    /// The chat template, if the checkpoint has one.
    ///
    /// # Errors
    /// It is broken.
    pub fn find_template(&self) -> Result<Option<ChatTemplate>> {
        Ok(ChatTemplate::new(&self.files)?)
    }

    /// Encodes a text that the model continues.
    ///
    /// # Errors
    /// The vocabulary cannot express it.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, true)?)
    }

    /// Encodes a conversation that the model answers.
    ///
    /// # Errors
    /// The template refuses it.
    pub fn encode_chat(&self, template: &ChatTemplate, messages: &[Message]) -> Result<Vec<u32>> {
        let prompt = template.render(&ChatRequest::new(messages))?;
        Ok(self.tokenizer.encode(&prompt, false)?)
    }

    /// Compiles a schema or grammar for the answer to `prompt`.
    ///
    /// # Errors
    /// The grammar is refused, or no grammar can be used with the vocabulary.
    pub fn form(&self, model: &Model, source: &GrammarSource, prompt: &[u32]) -> Result<Form> {
        let state = GrammarFactory::new(&model.text_files()?, &self.tokenizer)?.start(source)?;
        let end = &prompt[prompt.len().saturating_sub(TAIL_TOKENS)..];
        let reasons = self.tokenizer.decode(end, false)?.trim_end().ends_with("<think>");
        let begins_after = self.tokenizer.token_to_id("</think>").filter(|_| reasons);
        Ok(Form { state, begins_after })
    }

    /// Ids that end a text.
    pub fn end_tokens(&self) -> Vec<u32> {
        self.tokenizer.eos_ids().to_vec()
    }
}

/// Decodes ids while they are drawn, up to a stop string.
pub struct TextStream {
    detokenizer: StreamDetokenizer,
    stops: StopMatcher,
    text: String,
    stopped: bool,
}

impl TextStream {
    /// A stream that ends before any of `stops`.
    ///
    /// # Errors
    /// A stop string is empty or too long.
    pub fn new(tokenizer: &Tokenizer, stops: &[String]) -> Result<TextStream> {
        let stops = StopMatcher::new(stops).context("--stop")?;
        Ok(TextStream { detokenizer: tokenizer.stream(true), stops, text: String::new(), stopped: false })
    }

    /// Takes an id. Returns the text that is now certain, which may be empty.
    ///
    /// # Errors
    /// The decoder refuses the id.
    pub fn push(&mut self, id: u32) -> Result<&str> {
        let piece = self.detokenizer.push(id)?;
        let step = self.stops.push(piece);
        let start = self.text.len();
        self.text.push_str(step.emit);
        self.stopped = step.stopped;
        Ok(&self.text[start..])
    }

    /// Ends the stream. Returns the text that was held back.
    ///
    /// # Errors
    /// The decoder refuses the last ids.
    pub fn finish(&mut self) -> Result<&str> {
        let start = self.text.len();
        if !self.stopped {
            let step = self.stops.push(self.detokenizer.finish()?);
            self.stopped = step.stopped;
            self.text.push_str(step.emit);
            if !self.stopped {
                self.text.push_str(self.stops.finish());
            }
        }
        Ok(&self.text[start..])
    }

    /// Whether a stop string was reached.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// All text so far.
    pub fn text(&self) -> &str {
        &self.text
    }
}

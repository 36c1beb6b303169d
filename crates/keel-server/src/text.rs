//! The text side of the model that is served.

use keel_engine::EngineError;
use keel_text::{
    AnswerForm, ChatRequest, ChatTemplate, GenerationDefaults, Message, TextError, TextFiles, Tokenizer,
};
use serde_json::{Map, Value};

use crate::error::{Result, wrong};
use crate::grammar::GrammarFactory;
use crate::memory::{Meter, bytes_of_encoding};

/// Tokenizer, chat template and recommended sampling of a model.
pub struct ModelText {
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// Recommended sampling.
    pub defaults: GenerationDefaults,
    template: Option<ChatTemplate>,
    pub(crate) grammars: GrammarFactory,
}

/// A conversation as the model reads it.
#[derive(Debug)]
pub(crate) struct ChatPrompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// The end of the text, from which the beginning of the answer follows.
    pub tail: String,
    /// Tokens of the system prompt and the tools, which later conversations are likely to share.
    pub shared_len: usize,
}

/// Bounds of what a request may become.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds<'a> {
    /// Ids are below this.
    pub vocab: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// Answers of one request.
    pub choices_max: usize,
    /// What the request takes; `None` where nobody counts.
    pub meter: Option<&'a Meter>,
}

impl Bounds<'_> {
    /// Encodes a text that has room in the context. One that must be longer is refused by its bytes.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let needed = tokenizer.tokens_at_least(text).saturating_add(1);
        if needed > self.context {
            return Err(EngineError::Context { needed, context: self.context }.into());
        }
        let _held = self.meter.map(|meter| meter.hold(bytes_of_encoding(text))).transpose()?;
        Ok(tokenizer.encode(text, add_special)?)
    }

    /// From here on the request is its prompts, of so many tokens in all, for each answer one and one more.
    pub fn settle(&self, tokens: usize, choices: usize) {
        if let Some(meter) = self.meter {
            meter.settle((tokens * size_of::<u32>() * (choices + 1)) as u64);
        }
    }
}

/// Characters of the prompt's end that are kept to see how the answer begins.
const TAIL_CHARS: usize = 64;

impl ModelText {
    /// Reads it from a checkpoint's files.
    ///
    /// # Errors
    /// If one is missing or broken.
    pub fn new(files: &TextFiles<'_>) -> Result<ModelText, TextError> {
        let tokenizer = Tokenizer::new(files)?;
        Ok(ModelText {
            grammars: GrammarFactory::new(files, &tokenizer),
            tokenizer,
            defaults: GenerationDefaults::new(files)?,
            template: ChatTemplate::new(files)?,
        })
    }

    /// Whether the model marks where its reasoning ends.
    pub fn reasons(&self) -> bool {
        AnswerForm::reasoning_end(&self.tokenizer).is_some()
    }

    /// Renders and encodes a conversation.
    ///
    /// # Errors
    /// If there is no chat template, or it refuses the conversation.
    pub(crate) fn encode_chat(
        &self,
        messages: &[Message],
        tools: Option<&[Value]>,
        variables: Option<&Map<String, Value>>,
        bounds: &Bounds<'_>,
    ) -> Result<ChatPrompt> {
        let Some(template) = &self.template else {
            return Err(wrong("messages", "this model has no chat template; use /v1/completions"));
        };
        if messages.is_empty() {
            return Err(wrong("messages", "there are none"));
        }
        let request = ChatRequest { tools, variables, ..ChatRequest::new(messages) };
        let text = template.render(&request)?;
        let ids = bounds.encode(&self.tokenizer, &text, false)?;
        let mut shared_len = 0;
        if messages.len() > 1 && messages[0].role == "system" {
            let head = ChatRequest { messages: &messages[..1], add_generation_prompt: false, ..request };
            // Some templates refuse a conversation without a user; then nothing is known to be shared.
            if let Ok(head) = template.render(&head) {
                let head = bounds.encode(&self.tokenizer, &head, false)?;
                shared_len = head.iter().zip(&ids).take_while(|(a, b)| a == b).count();
            }
        }
        let tail: Vec<char> = text.chars().rev().take(TAIL_CHARS).collect();
        Ok(ChatPrompt { ids, tail: tail.into_iter().rev().collect(), shared_len })
    }
}

//! Everything between text and token ids.
//!
//! * [`Tokenizer`] turns text into ids and back, and knows the special tokens of a checkpoint.
//! * [`ChatTemplate`] turns a conversation into the text a model was trained on.
//! * [`StreamDetokenizer`] turns ids into text one by one, and never shows half a character.
//! * [`StopMatcher`] ends a stream at a stop string, also at one that spans several pieces.
//! * [`AnswerParser`] splits an answer into reasoning, text and tool calls.
//! * [`GrammarFactory`] computes which tokens may come next where the output must follow a schema or a grammar.
//! * [`GenerationDefaults`] are the sampling settings that a checkpoint recommends.
//!
//! All of them are made from [`TextFiles`]: the text files of a checkpoint folder, or the same files in memory. These
//! files are untrusted. Each is bounded in size and checked. A defect is reported as a [`TextError`] and never makes
//! this crate panic.
//!
//! ```no_run
//! use keel_text::{ChatRequest, ChatTemplate, Message, TextFiles, Tokenizer};
//! # fn main() -> Result<(), keel_text::TextError> {
//! let files = TextFiles::read("models/demo".as_ref())?;
//! let tokenizer = Tokenizer::new(&files)?;
//! let messages = [Message::new("user", "Tell me a story.")];
//! let prompt = match ChatTemplate::new(&files)? {
//!     Some(template) => template.render(&ChatRequest::new(&messages))?,
//!     None => "Once upon a time".to_string(),
//! };
//! let ids = tokenizer.encode(&prompt, false)?;
//! # let _ = ids;
//! # Ok(())
//! # }
//! ```

mod answer;
mod cancel;
mod defaults;
mod error;
mod files;
mod grammar;
mod json;
mod panics;
mod special;
mod stop;
mod stream;
mod template;
mod tokenizer;
mod vocabulary;

pub use answer::{AnswerForm, AnswerParser, AnswerPart, ReasoningMarkers};
pub use cancel::Cancel;
pub use defaults::{GenerationDefaults, Recommended};
pub use error::TextError;
pub use files::{TextFile, TextFiles};
pub use grammar::{GrammarFactory, GrammarMask, GrammarSource, GrammarState, MaskCanceller, ToolSignature};
pub use special::SpecialTokens;
pub use stop::{StopMatcher, StopOutcome};
pub use stream::StreamDetokenizer;
pub use template::{
    ChatRequest, ChatTemplate, Message, TEMPLATE_MEMORY_BYTES, date_and_time, render_for_parent,
    render_in_process,
};
pub use tokenizer::Tokenizer;
pub use vocabulary::{ExportedVocabulary, TokenKind, Vocabulary};

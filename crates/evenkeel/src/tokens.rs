//! The tokens of one sequence, with or without drafts.

use std::time::Duration;

use keel_cache::SequenceCache;
use keel_engine::{
    Engine, FinishReason, GenerateOptions, MtpTokenIterator, Result, SpeculationCounters, SpeculationOptions,
    TokenIterator,
};

use crate::constrained::{ConstrainedTokens, Form};

/// How tokens are drawn.
///
/// ```
/// use evenkeel::{How, engine::GenerateOptions};
/// let options = GenerateOptions { max_tokens: 8, ..GenerateOptions::default() };
/// let how = How { options, speculation: None, form: None };
/// ```
pub struct How {
    /// Number of tokens, sampling, and end tokens.
    pub options: GenerateOptions,
    /// Speculation, if there is any. It is ignored for constrained text.
    pub speculation: Option<SpeculationOptions>,
    /// The schema or grammar of the text, if there is one.
    pub form: Option<Form>,
}

/// The tokens of one sequence on an engine. [`crate::Answer`] gives text.
///
/// ```
/// use evenkeel::{How, LoadOptions, Model, Tokens, engine::GenerateOptions};
/// let mut model = Model::built_in(&LoadOptions::default())?;
/// let sequence = model.engine_mut().open()?;
/// let options = GenerateOptions { max_tokens: 3, ..GenerateOptions::default() };
/// let how = How { options, speculation: None, form: None };
/// let mut tokens = Tokens::start(model.engine_mut(), sequence, &[509, 496], how, &mut |_| ())?;
/// assert_eq!(tokens.by_ref().count(), 3);
/// drop(tokens); // its memory is free again
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct Tokens<'e>(Kind<'e>);

enum Kind<'e> {
    /// One token per step.
    Plain(Box<TokenIterator<'e>>),
    /// One or more tokens per step.
    Speculative(Box<MtpTokenIterator<'e>>),
    /// One token per step, restricted by a grammar.
    Constrained(Box<ConstrainedTokens<'e>>),
}

macro_rules! either {
    ($self:expr, $tokens:ident => $value:expr) => {
        match $self {
            Kind::Plain($tokens) => $value,
            Kind::Speculative($tokens) => $value,
            Kind::Constrained($tokens) => $value,
        }
    };
}

impl<'e> Tokens<'e> {
    /// Runs the prompt.
    ///
    /// # Errors
    /// As [`TokenIterator::new`].
    pub fn start(
        engine: &'e mut Engine,
        sequence: SequenceCache,
        prompt: &[u32],
        how: How,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Tokens<'e>> {
        let How { options, speculation, form } = how;
        Ok(match (form, speculation) {
            (Some(form), _) => {
                let tokens = ConstrainedTokens::new(engine, sequence, prompt, options, form, progress)?;
                Tokens(Kind::Constrained(Box::new(tokens)))
            }
            (None, None) => {
                let tokens = TokenIterator::new(engine, sequence, prompt, options, progress)?;
                Tokens(Kind::Plain(Box::new(tokens)))
            }
            (None, Some(how)) => {
                let tokens = MtpTokenIterator::new(engine, sequence, prompt, options, how, progress)?;
                Tokens(Kind::Speculative(Box::new(tokens)))
            }
        })
    }

    /// Duration of the prompt.
    pub fn prefill_time(&self) -> Duration {
        either!(&self.0, tokens => tokens.prefill_time())
    }

    /// Why the sequence ended, if it has ended.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        either!(&self.0, tokens => tokens.finish_reason())
    }

    /// The counters of speculation.
    pub fn counters(&self) -> Option<&SpeculationCounters> {
        match &self.0 {
            Kind::Plain(_) | Kind::Constrained(_) => None,
            Kind::Speculative(tokens) => Some(tokens.counters()),
        }
    }

    /// Ends the iteration; see [`TokenIterator::into_sequence`].
    pub fn into_sequence(self) -> SequenceCache {
        either!(self.0, tokens => tokens.into_sequence())
    }
}

impl Iterator for Tokens<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        either!(&mut self.0, tokens => tokens.next())
    }
}

//! The tokens of one sequence, with or without drafts.

use std::time::Duration;

use keel_cache::SequenceCache;
use keel_engine::{
    Engine, FinishReason, GenerateOptions, MtpTokenIterator, Result, SpeculationCounters, SpeculationOptions,
    TokenIterator,
};

use crate::constrained::{ConstrainedTokens, Form};
use crate::session;

/// How tokens are drawn.
pub struct How {
    /// Number of tokens, sampling, and end tokens.
    pub options: GenerateOptions,
    /// Speculation, if there is any. It is ignored for constrained text.
    pub speculation: Option<SpeculationOptions>,
    /// The schema or grammar of the text, if there is one.
    pub form: Option<Form>,
}

/// One of the three iterators.
pub enum Tokens<'e> {
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
            Tokens::Plain($tokens) => $value,
            Tokens::Speculative($tokens) => $value,
            Tokens::Constrained($tokens) => $value,
        }
    };
}

impl<'e> Tokens<'e> {
    /// Runs the prompt. Then releases memory that further tokens do not need.
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
        let runtime = engine.runtime().clone();
        let How { options, speculation, form } = how;
        let tokens = match (form, speculation) {
            (Some(form), _) => {
                let tokens = ConstrainedTokens::new(engine, sequence, prompt, options, form, progress)?;
                Tokens::Constrained(Box::new(tokens))
            }
            (None, None) => {
                let tokens = TokenIterator::new(engine, sequence, prompt, options, progress)?;
                Tokens::Plain(Box::new(tokens))
            }
            (None, Some(how)) => {
                let tokens = MtpTokenIterator::new(engine, sequence, prompt, options, how, progress)?;
                Tokens::Speculative(Box::new(tokens))
            }
        };
        session::settle(&runtime);
        Ok(tokens)
    }

    /// Duration of the prompt.
    pub fn prefill_time(&self) -> Duration {
        either!(self, tokens => tokens.prefill_time())
    }

    /// Why the sequence ended, if it has ended.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        either!(self, tokens => tokens.finish_reason())
    }

    /// The counters of speculation.
    pub fn counters(&self) -> Option<&SpeculationCounters> {
        match self {
            Tokens::Plain(_) | Tokens::Constrained(_) => None,
            Tokens::Speculative(tokens) => Some(tokens.counters()),
        }
    }

    /// Ends the iteration; see [`TokenIterator::into_sequence`].
    pub fn into_sequence(self) -> SequenceCache {
        either!(self, tokens => tokens.into_sequence())
    }
}

impl Iterator for Tokens<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        either!(self, tokens => tokens.next())
    }
}

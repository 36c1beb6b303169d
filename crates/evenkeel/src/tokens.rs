//! The tokens of one sequence, alone or within a schema or a grammar.

use keel_cache::SequenceCache;
use keel_engine::batch::Constraint;
use keel_engine::{Engine, GenerateOptions, TokenIterator};

use crate::Result;
use crate::constrained::GrammarConstraint;

/// How tokens are drawn.
///
/// ```
/// use evenkeel::{LoadOptions, Model, TokenOptions, engine::GenerateOptions};
/// let mut model = Model::built_in(&LoadOptions::default())?;
/// let sequence = model.engine_mut().open()?;
/// let options = GenerateOptions { max_tokens: 3, ..GenerateOptions::default() };
/// let tokens = TokenOptions { options, grammar: None };
/// let mut tokens = tokens.start(model.engine_mut(), sequence, &[509, 496], &mut |_| ())?;
/// assert_eq!(tokens.by_ref().count(), 3);
/// drop(tokens); // its memory is free again
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct TokenOptions {
    /// Number of tokens, sampling, drafts and end tokens.
    pub options: GenerateOptions,
    /// The schema or grammar of the text, if there is one. The text then makes no drafts.
    pub grammar: Option<GrammarConstraint>,
}

impl TokenOptions {
    /// Runs the prompt after the tokens that `sequence` holds. Gives the tokens; [`crate::Answer`] gives text.
    /// `progress` gets the number of prompt tokens done.
    ///
    /// # Errors
    /// [`crate::Error::Engine`], as [`TokenIterator::within`].
    ///
    /// See the example of [`TokenOptions`].
    pub fn start<'e>(
        self,
        engine: &'e mut Engine,
        sequence: SequenceCache,
        prompt: &[u32],
        progress: &mut dyn FnMut(usize),
    ) -> Result<TokenIterator<'e>> {
        let constraint = self.grammar.map(|grammar| Box::new(grammar) as Box<dyn Constraint>);
        Ok(TokenIterator::within(engine, sequence, prompt, self.options, constraint, progress)?)
    }
}

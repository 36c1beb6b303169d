//! Draws the tokens of one sequence that follows a schema or a grammar.

use std::time::{Duration, Instant};

use keel_cache::SequenceCache;
use keel_engine::batch::Constraint;
use keel_engine::{Engine, EngineError, FinishReason, GenerateOptions, Result, Sampler};
use keel_text::GrammarState;

/// A grammar at its start, and the token that ends reasoning before it.
///
/// ```
/// use evenkeel::{ModelFiles, ModelText, text::GrammarSource};
/// let files = ModelFiles::built_in()?;
/// let source = GrammarSource::JsonSchema(serde_json::json!({"type": "integer"}));
/// let form = ModelText::open(&files)?.form(&files, &source, &[])?;
/// assert_eq!(form.begins_after, None, "this model does not reason");
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct Form {
    /// The grammar.
    pub state: GrammarState,
    /// The grammar applies after this token. With `None` it applies from the start.
    pub begins_after: Option<u32>,
}

impl Constraint for Form {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        if self.begins_after.is_some() {
            return Ok(());
        }
        self.state.mask(logits).map_err(|error| error.to_string())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        match self.begins_after {
            Some(wanted) if wanted == token => self.begins_after = None,
            Some(_) => {}
            None => self.state.accept(token).map_err(|error| error.to_string())?,
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.begins_after.is_none() && self.state.is_complete()
    }
}

/// As [`keel_engine::TokenIterator`], but restricted to tokens that the form allows. The host draws each token.
pub(crate) struct ConstrainedTokens<'e> {
    engine: &'e mut Engine,
    sequence: SequenceCache,
    sampler: Sampler,
    form: Form,
    /// Logits for the next token, if they were read.
    logits: Vec<f32>,
    /// The last token, if it was returned but not run through the model yet.
    last: Option<u32>,
    end_tokens: Vec<u32>,
    left: usize,
    finished: Option<FinishReason>,
    prefill_time: Duration,
}

impl<'e> ConstrainedTokens<'e> {
    /// Runs `prompt` after the tokens that `sequence` holds. `progress` gets the number of prompt tokens done.
    ///
    /// # Errors
    /// As [`keel_engine::TokenIterator::new`]. The sequence is then released.
    pub fn new(
        engine: &'e mut Engine,
        mut sequence: SequenceCache,
        prompt: &[u32],
        options: GenerateOptions,
        form: Form,
        progress: &mut dyn FnMut(usize),
    ) -> Result<ConstrainedTokens<'e>> {
        let start = Instant::now();
        let mut logits = Vec::new();
        let sampler = Sampler::new(options.sampler, &[&options.seen[..], prompt].concat());
        let mut run = || match options.one_by_one {
            false => engine.prefill(&mut sequence, prompt, &mut logits, progress),
            true => {
                for (i, token) in prompt.iter().enumerate() {
                    engine.decode(&mut [&mut sequence], &[*token])?;
                    progress(i + 1);
                }
                engine.logits(0, &mut logits)
            }
        };
        let sampler = sampler?;
        run()?;
        Ok(ConstrainedTokens {
            engine,
            sequence,
            sampler,
            form,
            logits,
            last: None,
            end_tokens: options.end_tokens,
            left: options.max_tokens,
            finished: None,
            prefill_time: start.elapsed(),
        })
    }

    /// Duration of the prompt.
    pub fn prefill_time(&self) -> Duration {
        self.prefill_time
    }

    /// Why the sequence ended, if it has ended.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finished
    }

    /// Ends the iteration and returns the sequence.
    pub fn into_sequence(self) -> SequenceCache {
        self.sequence
    }

    /// Draws the next token. Returns `None` for an end token.
    fn draw(&mut self) -> Result<Option<u32>> {
        if let Some(last) = self.last.take() {
            self.engine.decode(&mut [&mut self.sequence], &[last])?;
            self.engine.logits(0, &mut self.logits)?;
        }
        self.form.mask(&mut self.logits).map_err(EngineError::Constraint)?;
        let id = self.sampler.sample(&mut self.logits);
        if self.end_tokens.contains(&id) {
            return Ok(None);
        }
        self.form.accept(id).map_err(EngineError::Constraint)?;
        self.last = Some(id);
        Ok(Some(id))
    }
}

impl Iterator for ConstrainedTokens<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        if self.finished.is_some() {
            return None;
        }
        if self.form.is_complete() {
            self.finished = Some(FinishReason::Stop);
            return None;
        }
        if self.left == 0 {
            self.finished = Some(FinishReason::Length);
            return None;
        }
        self.left -= 1;
        let (token, reason) = match self.draw() {
            Ok(Some(id)) => return Some(Ok(id)),
            Ok(None) => (None, FinishReason::Stop),
            Err(EngineError::Context { .. }) => (None, FinishReason::Length),
            Err(error) => (Some(Err(error)), FinishReason::Stop),
        };
        self.finished = Some(reason);
        token
    }
}

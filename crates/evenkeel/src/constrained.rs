//! The schema or grammar that a sequence follows.

use keel_engine::batch::Constraint;
use keel_text::GrammarState;

/// A grammar at its start, and the token that ends reasoning before it.
///
/// ```
/// use evenkeel::{ModelFiles, ModelText, text::GrammarSource};
/// let files = ModelFiles::built_in()?;
/// let source = GrammarSource::JsonSchema(serde_json::json!({"type": "integer"}));
/// let grammar = ModelText::open(&files)?.grammar(&files, &source, &[])?;
/// assert_eq!(grammar.begins_after, None, "this model does not reason");
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub struct GrammarConstraint {
    /// The grammar after the tokens so far.
    pub state: GrammarState,
    /// The grammar applies after this token. With `None` it applies from the start. It stays set after the token has
    /// come, because the token may be taken back.
    pub begins_after: Option<u32>,
    /// Whether that token has come.
    has_begun: bool,
    /// Number of tokens since the grammar began.
    bound: usize,
}

impl GrammarConstraint {
    /// A grammar that applies after the token `begins_after`, or from the start.
    ///
    /// ```
    /// use evenkeel::{GrammarConstraint, ModelFiles, ModelText, engine::batch::Constraint, text::GrammarSource};
    /// let files = ModelFiles::built_in()?;
    /// let source = GrammarSource::Regex("a".into());
    /// let start = ModelText::open(&files)?.grammar(&files, &source, &[])?.state;
    /// let mut grammar = GrammarConstraint::new(start, Some(5));
    /// let (mut before, mut after) = ([0.0; 4096], [0.0; 4096]);
    /// grammar.mask(&mut before).expect("no token is masked");
    /// grammar.accept(5).expect("every token is allowed before the grammar");
    /// grammar.mask(&mut after).expect("the model has 4096 tokens");
    /// assert!(before.iter().all(|&logit| logit == 0.0) && after.iter().any(|&logit| logit < 0.0));
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn new(state: GrammarState, begins_after: Option<u32>) -> GrammarConstraint {
        GrammarConstraint { state, begins_after, has_begun: false, bound: 0 }
    }

    /// The token that must come before the grammar applies, if it has not come yet.
    fn waits_for(&self) -> Option<u32> {
        self.begins_after.filter(|_| !self.has_begun)
    }
}

impl Constraint for GrammarConstraint {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        match self.waits_for() {
            Some(_) => Ok(()),
            None => self.state.mask(logits).map_err(|error| error.to_string()),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        match self.waits_for() {
            Some(wanted) => self.has_begun = token == wanted,
            None => {
                self.state.accept(token).map_err(|error| error.to_string())?;
                self.bound += 1;
            }
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.waits_for().is_none() && self.state.is_complete()
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        let bound = tokens.min(self.bound);
        self.state.rollback(bound).map_err(|error| error.to_string())?;
        self.bound -= bound;
        // Of the tokens before the grammar, the last is `begins_after`. Without it the grammar has not begun.
        self.has_begun &= bound == tokens;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use keel_text::GrammarSource;

    use super::*;
    use crate::{ModelFiles, ModelText};

    /// The tokens that may come next.
    fn allowed(constraint: &mut GrammarConstraint) -> Vec<u32> {
        let mut logits = [0.0; 4096];
        constraint.mask(&mut logits).expect("it is within its bounds");
        (0..4096).filter(|&id| logits[id as usize] == 0.0).collect()
    }

    #[test]
    fn tokens_are_taken_back_within_the_grammar_and_before_it() {
        let files = ModelFiles::built_in().expect("it is there");
        let text = ModelText::open(&files).expect("it opens");
        let source = GrammarSource::Regex("a[0-9]{4}".into());
        let state = text.grammar(&files, &source, &[]).expect("it compiles").state;
        let mut constraint = GrammarConstraint::new(state, Some(5));
        let accept = |constraint: &mut GrammarConstraint, token| constraint.accept(token).expect("allowed");
        let free = allowed(&mut constraint);
        accept(&mut constraint, 9);
        accept(&mut constraint, 5);
        let letters = allowed(&mut constraint);
        assert!(!letters.is_empty() && letters.len() < free.len(), "{letters:?}");
        accept(&mut constraint, letters[0]);
        let digits = allowed(&mut constraint);
        accept(&mut constraint, digits[0]);
        assert_ne!(letters, digits);
        for before in [&digits, &letters, &free] {
            constraint.rollback(1).expect("it came");
            assert_eq!(&allowed(&mut constraint), before);
        }
        for token in [5, letters[0], digits[0]] {
            accept(&mut constraint, token);
        }
        constraint.rollback(3).expect("they came");
        assert_eq!(allowed(&mut constraint), free);
    }
}

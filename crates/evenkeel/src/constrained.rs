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
    /// The grammar.
    pub state: GrammarState,
    /// The grammar applies after this token. With `None` it applies from the start.
    pub begins_after: Option<u32>,
}

impl Constraint for GrammarConstraint {
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

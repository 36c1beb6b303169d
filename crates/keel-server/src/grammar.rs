//! Uses grammars as constraints in a batch.

use keel_engine::batch::Constraint;
use keel_text::{AnswerForm, GrammarSource, GrammarState, TextError, TextFiles, Tokenizer};

use crate::error::Result;

/// The form that an answer must have.
#[derive(Clone, Debug, PartialEq)]
pub struct Grammar(pub GrammarSource);

/// Compiles grammars, if the model's vocabulary supports them.
pub(crate) struct GrammarFactory {
    factory: Result<keel_text::GrammarFactory, String>,
    /// The token that ends reasoning. No grammar applies to reasoning.
    think_end: Option<u32>,
}

impl GrammarFactory {
    pub fn new(files: &TextFiles<'_>, tokenizer: &Tokenizer) -> GrammarFactory {
        GrammarFactory {
            factory: keel_text::GrammarFactory::new(files, tokenizer).map_err(|e| e.to_string()),
            think_end: AnswerForm::reasoning_end(tokenizer),
        }
    }

    /// Compiles a grammar. This may take long.
    pub fn compile(&self, grammar: &Grammar) -> Result<GrammarState> {
        let factory =
            self.factory.as_ref().map_err(|reason| TextError::Grammar { reason: reason.clone() })?;
        Ok(factory.start(&grammar.0)?)
    }

    /// A constraint for one answer.
    pub fn constraint(&self, state: GrammarState, form: &AnswerForm) -> Box<dyn Constraint> {
        let begins_behind = self.think_end.filter(|_| form.begins_in_reasoning);
        Box::new(Masked { state, begins_behind, has_begun: false, bound: 0 })
    }
}

struct Masked {
    state: GrammarState,
    /// The grammar begins after this token; with `None` it begins at once.
    begins_behind: Option<u32>,
    /// Whether that token has come.
    has_begun: bool,
    /// Number of tokens since the grammar began.
    bound: usize,
}

impl Masked {
    /// The token that must come before the grammar begins, if it has not come yet.
    fn waits_for(&self) -> Option<u32> {
        self.begins_behind.filter(|_| !self.has_begun)
    }
}

impl Constraint for Masked {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        match self.waits_for() {
            Some(_) => Ok(()),
            None => self.state.mask(logits).map_err(|e| e.to_string()),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        match self.waits_for() {
            Some(wanted) => self.has_begun = token == wanted,
            None => {
                self.state.accept(token).map_err(|e| e.to_string())?;
                self.bound += 1;
            }
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.waits_for().is_none() && self.state.is_complete()
    }

    fn can_roll_back(&self) -> bool {
        true
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        let bound = tokens.min(self.bound);
        self.state.rollback(bound).map_err(|e| e.to_string())?;
        self.bound -= bound;
        // Of the tokens before the grammar, the last is `begins_behind`. So rolling back one of them undoes
        // `has_begun`.
        self.has_begun &= bound == tokens;
        Ok(())
    }
}

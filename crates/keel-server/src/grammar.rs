//! Grammars as constraints of a batch.

use keel_engine::batch::Constraint;
use keel_text::{AnswerForm, GrammarSource, GrammarState, TextError, TextFiles, Tokenizer};

use crate::error::Result;

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub struct Grammar(pub GrammarSource);

/// Starts grammars, if the model's vocabulary can be used for them.
pub(crate) struct GrammarFactory {
    factory: Result<keel_text::GrammarFactory, String>,
    /// Ends the reasoning, which no grammar binds.
    think_end: Option<u32>,
}

impl GrammarFactory {
    pub fn new(files: &TextFiles<'_>, tokenizer: &Tokenizer) -> GrammarFactory {
        GrammarFactory {
            factory: keel_text::GrammarFactory::new(files, tokenizer).map_err(|e| e.to_string()),
            think_end: tokenizer.token_to_id("</think>"),
        }
    }

    /// A constraint for one answer.
    pub fn constraint(&self, grammar: &Grammar, form: &AnswerForm) -> Result<Box<dyn Constraint>> {
        let factory =
            self.factory.as_ref().map_err(|reason| TextError::Grammar { reason: reason.clone() })?;
        let waits_for = self.think_end.filter(|_| form.begins_in_reasoning);
        Ok(Box::new(Masked { state: factory.start(&grammar.0)?, waits_for }))
    }
}

struct Masked {
    state: GrammarState,
    /// The grammar begins behind this token.
    waits_for: Option<u32>,
}

impl Constraint for Masked {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        match self.waits_for {
            Some(_) => Ok(()),
            None => self.state.mask(logits).map_err(|e| e.to_string()),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        match self.waits_for {
            Some(wanted) => {
                self.waits_for = (token != wanted).then_some(wanted);
                Ok(())
            }
            None => self.state.accept(token).map_err(|e| e.to_string()),
        }
    }

    fn is_complete(&self) -> bool {
        self.waits_for.is_none() && self.state.is_complete()
    }
}

//! Uses grammars as constraints in a batch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use keel_engine::batch::Constraint;
use keel_text::{AnswerForm, GrammarMask, GrammarSource, GrammarState, TextError, TextFiles, Tokenizer};

use crate::engine::mask_ahead::{Computed, MaskAhead};
use crate::error::Result;
use crate::memory::requests::Meter;

/// The form that an answer must have.
#[derive(Clone, Debug, PartialEq)]
pub struct Grammar(pub GrammarSource);

/// Compiles grammars, if the model's vocabulary supports them.
pub(crate) struct GrammarFactory {
    factory: Result<keel_text::GrammarFactory, String>,
    /// Knows the token that ends reasoning. No grammar applies to reasoning.
    tokenizer: Tokenizer,
}

impl GrammarFactory {
    pub fn new(files: &TextFiles<'_>, tokenizer: &Tokenizer) -> GrammarFactory {
        GrammarFactory {
            factory: keel_text::GrammarFactory::new(files, tokenizer).map_err(|e| e.to_string()),
            tokenizer: tokenizer.clone(),
        }
    }

    /// Compiles a grammar and computes its first mask. This may take long. `charge` holds
    /// [`GrammarSource::compile_bytes`] for the work, which may outlive its request, and afterwards the memory of the
    /// grammar.
    pub fn compile(&self, grammar: &Grammar, charge: Meter) -> Result<Compiled> {
        let factory =
            self.factory.as_ref().map_err(|reason| TextError::Grammar { reason: reason.clone() })?;
        let Computed { state, mask, took } = Computed::of(factory.start(&grammar.0)?);
        let first = Arc::new(mask?);
        charge.set(state.bytes() as u64)?;
        Ok(Compiled { state, first, took, charge })
    }

    /// A constraint for one answer, and the charge of its tables.
    pub fn constraint(&self, compiled: Compiled, form: &AnswerForm) -> (Box<dyn Constraint>, Tables) {
        let begins_after = form.begins_in_reasoning.and_then(|markers| markers.end_token(&self.tokenizer));
        let masks = MaskAhead::new(compiled.state, compiled.first, compiled.took);
        let tables = Tables { bytes: masks.bytes(), charge: compiled.charge };
        (Box::new(Masked { masks, begins_after, has_begun: false, bound: 0 }), tables)
    }
}

/// A grammar at its start, and its mask there.
pub(crate) struct Compiled {
    state: GrammarState,
    first: Arc<GrammarMask>,
    /// The time that the mask took.
    took: Duration,
    /// Holds the bytes of the state.
    charge: Meter,
}

impl Compiled {
    /// Bytes that the grammar holds.
    pub fn bytes(&self) -> u64 {
        self.state.bytes() as u64
    }

    /// This grammar and copies of it, `count` in all, which share no tables. Each copy is charged before it is made.
    /// This may take long.
    pub fn copies(self, count: usize) -> Result<Vec<Compiled>> {
        let mut all = Vec::with_capacity(count);
        for _ in 1..count {
            let charge = self.charge.part();
            charge.take(self.bytes())?;
            let (state, first) = (self.state.clone(), Arc::clone(&self.first));
            all.push(Compiled { state, first, took: self.took, charge });
        }
        all.push(self);
        Ok(all)
    }
}

/// The charge of an answer's grammar, whose tables grow with its masks.
pub(crate) struct Tables {
    bytes: Arc<AtomicU64>,
    charge: Meter,
}

impl Tables {
    /// Raises the charge to the grammar's bytes as of its last mask.
    pub fn charge(&self) -> Result<()> {
        let grown = self.bytes.load(Ordering::Acquire).saturating_sub(self.charge.held());
        Ok(self.charge.grow(grown)?)
    }
}

struct Masked {
    masks: MaskAhead,
    /// The grammar begins after this token; with `None` it begins at once.
    begins_after: Option<u32>,
    /// Whether that token has come.
    has_begun: bool,
    /// Number of tokens since the grammar began.
    bound: usize,
}

impl Masked {
    /// The token that must come before the grammar begins, if it has not come yet.
    fn waits_for(&self) -> Option<u32> {
        self.begins_after.filter(|_| !self.has_begun)
    }
}

impl Constraint for Masked {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        match self.waits_for() {
            Some(_) => Ok(()),
            None => self.masks.apply(logits),
        }
    }

    fn is_ready(&mut self, patience: Duration) -> bool {
        self.waits_for().is_some() || self.masks.is_ready(patience)
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        match self.waits_for() {
            Some(wanted) => self.has_begun = token == wanted,
            None => {
                self.masks.accept(token)?;
                self.bound += 1;
            }
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.waits_for().is_none() && self.masks.is_complete()
    }

    fn is_quick(&self) -> bool {
        self.waits_for().is_some() || self.masks.is_quick()
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        let bound = tokens.min(self.bound);
        self.masks.rollback(bound)?;
        self.bound -= bound;
        // Of the tokens before the grammar, the last is `begins_after`. So rolling back one of them undoes
        // `has_begun`.
        self.has_begun &= bound == tokens;
        Ok(())
    }
}

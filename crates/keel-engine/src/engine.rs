//! A model with its memory, ready to run sequences.

use std::collections::VecDeque;

use keel_array::sampling::Draw;
use keel_array::{ArrayError, Executable, FailedRun, RESULT_BYTES_MAX, Regime, RowLog, Runtime};
use keel_cache::{CacheSize, Interruption, ModelCache, SequenceCache};
use keel_models::HybridModel;
use keel_models::loading::{Loader, Parameters};
use serde_json::Value;

use crate::ahead::StepUnderWay;
use crate::options::{EngineOptions, HEAD_LAG_MAX, PREFILL_GRID};
use crate::speculation::Costs;
use crate::step::{HEAD_ROWS, Outcome, Rows, StepShape, Stepper, ids_of};
use crate::{EngineError, Result};

/// Takes one row of logits at a time.
pub type LogitSink<'a> = dyn FnMut(&[f32]) -> Result<()> + 'a;

/// Runs one step of a prompt: the tokens, and the one behind them unless they are the last.
type PrefillStep<'a> = dyn FnMut(&mut Engine, &SequenceCache, &[u32], Option<u32>) -> Result<()> + 'a;

/// A model and everything it needs, allocated. From here on nothing is allocated outside the plan.
pub struct Engine {
    /// Steps that nobody has waited for, the first first. They end before the memory below goes.
    pub(crate) under_way: VecDeque<StepUnderWay>,
    pub(crate) runtime: Runtime,
    pub(crate) model: HybridModel,
    pub(crate) cache: ModelCache,
    pub(crate) stepper: Stepper,
    pub(crate) options: EngineOptions,
    /// What rounds of speculation have been measured to cost.
    pub(crate) costs: Costs,
    /// Logits of the row that a round is choosing from.
    pub(crate) row_logits: Vec<f32>,
}

impl Engine {
    /// Reads a model and allocates its memory. On a planning backend the ledger then reads what a real one would.
    ///
    /// # Errors
    /// What the config, the parameters or the memory limit says; options out of range.
    pub fn load(
        runtime: &Runtime,
        parameters: &dyn Parameters,
        config: &Value,
        options: EngineOptions,
        progress: &dyn Fn(u64),
    ) -> Result<Engine> {
        options.check()?;
        let loader = Loader::new(runtime, parameters, options.compute, progress);
        let model = keel_models::load(&loader, config)?;
        if options.drafts > 0 && model.mtp.is_none() {
            return Err(EngineError::NoMtpHead);
        }
        let size = CacheSize {
            sequences: options.sequences,
            context: options.context,
            checkpoints: options.checkpoints,
            pool_pages: options.pool_pages,
            open_rows: options.open_rows(),
            swap_bytes: options.swap_bytes,
        };
        let cache = ModelCache::allocate(runtime, model.cache_spec(options.kv_format()), size)?;
        let stepper = Stepper::allocate(runtime, &model, &options, size.pages_per_sequence())?;
        let mut engine = Engine {
            under_way: VecDeque::new(),
            runtime: runtime.clone(),
            model,
            cache,
            stepper,
            options,
            costs: Costs::default(),
            row_logits: Vec::new(),
        };
        engine.prepare_largest_steps()?;
        runtime.ledger().freeze();
        Ok(engine)
    }

    /// Traces the steps that need most memory, so that the arena is as large as it will ever be.
    fn prepare_largest_steps(&mut self) -> Result<()> {
        let (prefill, sequences) = (self.options.prefill_rows(), self.options.sequences);
        let step = |regime, rows, sequences, outcome| StepShape { regime, rows, sequences, outcome };
        let mut shapes = vec![
            step(Regime::Decode, 1, 1, Outcome::LastLogits),
            step(Regime::Decode, sequences, sequences, Outcome::LastLogits),
            step(Regime::Prefill, prefill, 1, Outcome::LastLogits),
            StepShape::TOKEN,
        ];
        if self.options.all_logits {
            shapes.push(step(Regime::Prefill, prefill, 1, Outcome::Hidden));
            shapes.push(step(Regime::Prefill, HEAD_ROWS, 1, Outcome::Head));
            if self.model.mtp.is_some() {
                shapes.push(step(Regime::Prefill, prefill, 1, Outcome::MtpHidden));
            }
        }
        if self.options.drafts > 0 {
            shapes.extend(self.draft_steps());
        }
        for shape in shapes {
            self.stepper.prepare(&self.runtime, &self.model, &self.cache, shape)?;
        }
        Ok(())
    }

    /// Traces the steps of batches of every size, and those in which prompts end, whatever their length, ahead of the first
    /// request: few wait for one then, and the engine takes as much of the host's memory from the start as it will.
    ///
    /// # Errors
    /// What the runtime says.
    pub fn prepare_batch_steps(&mut self) -> Result<()> {
        let step = |regime, rows, sequences, outcome| StepShape { regime, rows, sequences, outcome };
        let (decode, open_rows) = (Regime::Decode, self.options.open_rows());
        let batches = (1..=self.options.sequences).flat_map(|sequences| match open_rows {
            0 => vec![step(decode, sequences, sequences, Outcome::LastLogits)],
            _ => vec![
                step(decode, sequences * open_rows, sequences, Outcome::OpenRows),
                step(decode, sequences, sequences, Outcome::Draft),
                step(decode, sequences, sequences, Outcome::OpenRows),
            ],
        });
        let prompt_ends = (1..=PREFILL_GRID).map(|rows| step(Regime::Prefill, rows, 1, Outcome::LastLogits));
        for shape in batches.chain(prompt_ends) {
            self.stepper.prepare(&self.runtime, &self.model, &self.cache, shape)?;
        }
        Ok(())
    }

    /// The steps of one sequence that drafts, and the largest of all sequences.
    fn draft_steps(&self) -> Vec<StepShape> {
        let (sequences, open_rows) = (self.options.sequences, self.options.open_rows());
        let step = |rows, sequences, outcome| StepShape { regime: Regime::Decode, rows, sequences, outcome };
        let mut shapes = vec![
            step(1, 1, Outcome::COMMIT),
            step(HEAD_LAG_MAX, 1, Outcome::HeadState),
            step(sequences, sequences, Outcome::OpenRows),
            step(sequences * open_rows, sequences, Outcome::OpenRows),
            step(sequences * open_rows, sequences, Outcome::Draft),
            step(sequences, sequences, Outcome::Draft),
        ];
        for rows in 1..=open_rows {
            shapes.push(step(rows, 1, Outcome::Draft));
            shapes.push(step(rows, 1, Outcome::OpenRows));
        }
        shapes
    }

    /// The runtime.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// The model.
    pub fn model(&self) -> &HybridModel {
        &self.model
    }

    /// The options it was made with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The storage of sequences.
    pub fn cache(&self) -> &ModelCache {
        &self.cache
    }

    /// The storage of sequences, to save, rewind or fork one.
    pub fn cache_mut(&mut self) -> &mut ModelCache {
        &mut self.cache
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// If all are in use.
    pub fn open(&mut self) -> Result<SequenceCache> {
        Ok(self.cache.open()?)
    }

    /// Ends a sequence and takes its memory back.
    pub fn release(&mut self, sequence: SequenceCache) {
        self.cache.release(sequence);
    }

    /// Checks ids, and that they fit behind what the sequence holds.
    pub(crate) fn admit(&self, sequence: &SequenceCache, tokens: &[u32]) -> Result<()> {
        let vocab = self.model.config.vocab;
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocab) {
            return Err(EngineError::TokenId { id, vocab });
        }
        let (needed, context) = (sequence.len() + tokens.len(), self.options.context);
        if needed > context {
            return Err(EngineError::Context { needed, context });
        }
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        match self.model.config.short_context() {
            Some(original) if needed > original && !sequence.is_long() => {
                Err(EngineError::Outgrown { needed, original })
            }
            _ => Ok(()),
        }
    }

    /// Whether a sequence of so many tokens turns by other frequencies than a short one. All its tokens do then, the first, too.
    pub fn is_long(&self, tokens: usize) -> bool {
        self.model.config.short_context().is_some_and(|original| tokens > original)
    }

    /// Whether a sequence can grow to so many tokens without turning by other frequencies.
    pub fn can_grow(&self, sequence: &SequenceCache, tokens: usize) -> bool {
        sequence.is_long() || !self.is_long(tokens)
    }

    /// Whether a sequence may come to turn by other frequencies.
    pub(crate) fn may_outgrow(&self, sequence: &SequenceCache) -> bool {
        self.model.config.short_context().is_some() && !sequence.is_long()
    }

    /// Lets an empty sequence turn as one of so many tokens.
    pub(crate) fn settle_turns(&self, sequence: &mut SequenceCache, tokens: usize) {
        if sequence.is_empty() {
            sequence.set_long(self.is_long(tokens));
        }
    }

    /// Runs all tokens of a sequence that has outgrown its frequencies again, by those of long ones.
    pub(crate) fn run_as_long(&mut self, sequence: &mut SequenceCache, tokens: &[u32]) -> Result<()> {
        self.finish_under_way()?;
        self.cache.reset(sequence)?;
        sequence.set_long(true);
        for (i, step) in tokens.chunks(self.options.prefill_step).enumerate() {
            let next = tokens.get((i + 1) * self.options.prefill_step).copied();
            self.prefill_chunk(sequence, step, next)?;
        }
        Ok(())
    }

    /// Runs a prompt behind what the sequence holds (which must end on the 64-token grid), in steps, and leaves the
    /// logits of its last token in `logits`. A checkpoint is saved at the last grid point, if there is room.
    /// `progress` gets the tokens done after each step.
    ///
    /// # Errors
    /// Ids out of range, a prompt that does not fit, what the runtime says. The sequence then holds the steps done. If the one
    /// that failed had changed recurrent state, that is only so where the state before it is kept: at the start and at a
    /// checkpoint. Elsewhere the sequence answers [`keel_cache::CacheError::TornState`] until it is rewound.
    pub fn prefill(
        &mut self,
        sequence: &mut SequenceCache,
        prompt: &[u32],
        logits: &mut Vec<f32>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<()> {
        self.run_prompt(sequence, prompt, progress)?;
        self.stepper.read_logits(0, logits)
    }

    /// As [`Engine::prefill`], without reading the logits.
    pub(crate) fn run_prompt(
        &mut self,
        sequence: &mut SequenceCache,
        prompt: &[u32],
        progress: &mut dyn FnMut(usize),
    ) -> Result<()> {
        let mut done = 0;
        self.each_prefill_step(sequence, prompt, &mut |engine, sequence, tokens, next| {
            engine.run_prefill(sequence, tokens, next)?;
            done += tokens.len();
            progress(done);
            Ok(())
        })
    }

    /// Draws the token behind a prompt that has just been run, or behind the first sequence of any other step that left logits,
    /// on the device that has them: 4 bytes come to the host.
    ///
    /// # Errors
    /// What the runtime says. It may be tried again then.
    pub fn draw_last(&mut self, draw: Draw) -> Result<u32> {
        self.finish_under_way()?;
        self.stepper.draw(&self.runtime, &self.model, &self.cache, &draw)
    }

    /// Cuts a prompt into steps. With checkpoints, the last grid point gets a step of its own end.
    fn each_prefill_step(
        &mut self,
        sequence: &mut SequenceCache,
        prompt: &[u32],
        step: &mut PrefillStep<'_>,
    ) -> Result<()> {
        self.settle_turns(sequence, sequence.len() + prompt.len());
        self.admit(sequence, prompt)?;
        if !sequence.offset().is_multiple_of(PREFILL_GRID) {
            let reason =
                format!("a prompt cannot start at token {}, off the 64-token grid", sequence.offset());
            return Err(EngineError::Option(reason));
        }
        self.commit(sequence)?;
        self.cache.reserve(sequence, prompt.len())?;
        let end = sequence.offset() + prompt.len();
        let save_at = if self.options.checkpoints > 0 { (end - 1) / PREFILL_GRID * PREFILL_GRID } else { 0 };
        let mut rest = prompt;
        while !rest.is_empty() {
            let at = sequence.offset();
            let to_save = if at < save_at { save_at - at } else { usize::MAX };
            let (tokens, after) = rest.split_at(rest.len().min(self.options.prefill_step).min(to_save));
            if let Err(error) = step(self, sequence, tokens, after.first().copied()) {
                self.take_back_step(sequence);
                return Err(error);
            }
            sequence.advance(tokens.len());
            if save_at > 0 && sequence.offset() == save_at {
                self.cache.checkpoint(sequence)?;
            }
            rest = after;
        }
        Ok(())
    }

    fn run_prefill(&mut self, sequence: &SequenceCache, tokens: &[u32], next: Option<u32>) -> Result<()> {
        let outcome = if next.is_none() { Outcome::LastLogits } else { Outcome::State };
        self.run(Regime::Prefill, outcome, &[Rows { next, ..Rows::behind(sequence, tokens) }])
    }

    /// Runs one step of a prompt, which must begin on the 64-token grid. `next` is the prompt's token behind it, `None`
    /// if this is the last step; otherwise it must end on the grid. The logits of the last one are read with
    /// [`Engine::logits`], row 0.
    ///
    /// # Errors
    /// As [`Engine::prefill`]; the sequence is as before then, or torn.
    pub fn prefill_chunk(
        &mut self,
        sequence: &mut SequenceCache,
        tokens: &[u32],
        next: Option<u32>,
    ) -> Result<()> {
        self.admit(sequence, tokens)?;
        let (start, rows) = (sequence.offset(), tokens.len());
        let ends_on_grid = next.is_none() || rows.is_multiple_of(PREFILL_GRID);
        if !start.is_multiple_of(PREFILL_GRID) || !ends_on_grid || rows > self.options.prefill_rows() {
            let most = self.options.prefill_rows();
            let reason = format!(
                "a step of {rows} prompt tokens from token {start}: steps begin on the 64-token grid and have at \
                 most {most}"
            );
            return Err(EngineError::Option(reason));
        }
        self.commit(sequence)?;
        self.cache.reserve(sequence, rows)?;
        if let Err(error) = self.run_prefill(sequence, tokens, next) {
            self.take_back_step(sequence);
            return Err(error);
        }
        sequence.advance(rows);
        Ok(())
    }

    /// A step of a prompt failed. Where the state that the sequence had before is kept, it gets it back; otherwise it stays
    /// torn, as it does if this fails, too.
    fn take_back_step(&mut self, sequence: &mut SequenceCache) {
        let at = sequence.offset();
        let is_kept = at == 0 || sequence.checkpoints().any(|kept| kept == at);
        if is_kept && self.cache.expect_whole(sequence).is_err() {
            let _ = self.cache.rewind(sequence, at);
        }
    }

    /// Makes the open rows that were accepted part of the state. Steps do so by themselves; saving and checkpoints of a
    /// sequence that drafts need it. Where a step failed while it was doing so, this does the rest.
    ///
    /// # Errors
    /// What the runtime says; it may be tried again then. [`keel_cache::CacheError::TornState`].
    pub fn commit(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        self.cache.expect_whole(sequence)?;
        let (windows, states) = match self.cache.interruption(sequence) {
            Some(Interruption::Settling { windows, states }) => (windows, states),
            _ => (0, 0),
        };
        if sequence.accepted() > 0 && states < self.cache.spec().recurrent_layers() {
            let outcome = Outcome::Commit { windows, states };
            self.run(Regime::Decode, outcome, &[Rows::behind(sequence, &[])])?;
        }
        self.cache.note_settled(sequence);
        Ok(())
    }

    /// Does the rest of what a step that failed began.
    pub(crate) fn finish_commit(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        if self.cache.interruption(sequence).is_some() { self.commit(sequence) } else { Ok(()) }
    }

    pub(crate) fn run(&mut self, regime: Regime, outcome: Outcome, rows: &[Rows<'_>]) -> Result<()> {
        let ended = self.step_for((regime, outcome), rows)?.run();
        ended.map_err(|failed| self.note_failed((regime, outcome), rows, failed))
    }

    /// As [`Engine::run`] of a decode step, and the `count` tokens that it draws, which come to the host with it.
    pub(crate) fn run_and_draw(
        &mut self,
        outcome: Outcome,
        rows: &[Rows<'_>],
        count: usize,
    ) -> Result<Vec<u32>> {
        let drawn = self.stepper.drawn(outcome, count)?;
        let mut bytes = vec![0; drawn.bytes()];
        if bytes.len() > RESULT_BYTES_MAX {
            self.run(Regime::Decode, outcome, rows)?;
            drawn.read_bytes(0, &mut bytes)?;
        } else {
            let ended = self.step_for((Regime::Decode, outcome), rows)?.submit(&drawn).wait(&mut bytes);
            ended.map_err(|failed| self.note_failed((Regime::Decode, outcome), rows, failed))?;
        }
        Ok(ids_of(&bytes))
    }

    /// The step over these rows, once nothing else is under way.
    fn step_for(&mut self, how: (Regime, Outcome), rows: &[Rows<'_>]) -> Result<&Executable> {
        self.finish_under_way()?;
        for row in rows {
            self.cache.expect_whole(row.sequence)?;
        }
        self.stepper.step_for(&self.runtime, &self.model, &self.cache, how, rows)
    }

    /// Notes what a step that failed has left of its sequences.
    fn note_failed(
        &mut self,
        (regime, outcome): (Regime, Outcome),
        rows: &[Rows<'_>],
        failed: Box<FailedRun>,
    ) -> EngineError {
        let (settled, commits_rows) = match outcome {
            Outcome::Commit { windows, states } => ((windows, states), false),
            outcome => ((0, 0), self.stepper.row_log(regime, outcome) != RowLog::KeepOpen),
        };
        let slots = rows.iter().map(|row| row.sequence.slot());
        self.cache.note_failure(slots, &failed, settled, commits_rows);
        ArrayError::from(failed).into()
    }

    /// Runs one more token of each sequence. The logits are read with [`Engine::logits`]. In an engine that drafts the row
    /// is left open, and the next step commits it.
    ///
    /// # Errors
    /// Ids out of range, a full context, what the runtime says. In an engine that drafts every sequence is as before then, as
    /// after a round that failed. Without a log, sequences whose recurrent state had changed already answer
    /// [`keel_cache::CacheError::TornState`] from then on.
    pub fn decode(&mut self, sequences: &mut [&mut SequenceCache], tokens: &[u32]) -> Result<()> {
        self.decode_and_draw(sequences, tokens, &vec![None; tokens.len()]).map(drop)
    }

    /// As [`Engine::decode`], and draws the token behind each sequence that has a [`Draw`], on the device that has the logits:
    /// 4 bytes a sequence come to the host.
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub fn decode_and_draw(
        &mut self,
        sequences: &mut [&mut SequenceCache],
        tokens: &[u32],
        draws: &[Option<Draw>],
    ) -> Result<Vec<Option<u32>>> {
        let count = sequences.len();
        if count != tokens.len() || count != draws.len() || count > self.options.sequences {
            let (ids, most) = (tokens.len(), self.options.sequences);
            let reason =
                format!("{ids} tokens and {} draws for {count} sequences, of at most {most}", draws.len());
            return Err(EngineError::Option(reason));
        }
        for (sequence, token) in sequences.iter_mut().zip(tokens) {
            self.admit(sequence, &[*token])?;
            self.finish_commit(sequence)?;
            self.cache.reserve(sequence, 1)?;
        }
        let rows: Vec<Rows<'_>> = sequences
            .iter()
            .zip(tokens)
            .zip(draws)
            .map(|((sequence, token), draw)| Rows {
                draws: draw.as_slice(),
                ..Rows::behind(sequence, std::slice::from_ref(token))
            })
            .collect();
        self.run(Regime::Decode, Outcome::LastLogits, &rows)?;
        self.note_decoded(sequences);
        if draws.iter().all(Option::is_none) {
            return Ok(vec![None; count]);
        }
        let drawn = self.stepper.read_tokens(count)?;
        Ok(drawn.into_iter().zip(draws).map(|(token, draw)| draw.map(|_| token)).collect())
    }

    /// Copies the logits of sequence `row` of the last step, also if that is still under way.
    ///
    /// # Errors
    /// If there is no such row.
    pub fn logits(&self, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        self.stepper.read_logits(row, logits)
    }

    /// Logits of every token of a prompt, row by row, in order; then, with `mtp`, those of the multi-token-prediction
    /// head for all but the last (which takes a second sequence for its time). Needs `all_logits`. With `one_by_one`, every token goes through the decode regime.
    ///
    /// # Errors
    /// As [`Engine::prefill`]; [`EngineError::NoMtpHead`].
    pub fn all_logits(
        &mut self,
        sequence: &mut SequenceCache,
        prompt: &[u32],
        one_by_one: bool,
        sink: &mut LogitSink<'_>,
        mtp_sink: Option<&mut LogitSink<'_>>,
    ) -> Result<()> {
        let start = sequence.offset();
        let mut hidden = Vec::new();
        let mut rows = Vec::new();
        let mut collect =
            |engine: &mut Engine, sequence: &SequenceCache, tokens: &[u32], regime| -> Result<()> {
                engine.run(regime, Outcome::Hidden, &[Rows::behind(sequence, tokens)])?;
                engine.stepper.read_hidden(tokens.len(), &mut rows)?;
                hidden.extend_from_slice(&rows);
                engine.stepper.head(&engine.runtime, &engine.model, &engine.cache, &rows, sink)
            };
        if one_by_one {
            self.settle_turns(sequence, sequence.len() + prompt.len());
            self.admit(sequence, prompt)?;
            self.commit(sequence)?;
            self.cache.reserve(sequence, prompt.len())?;
            for token in prompt {
                collect(self, sequence, std::slice::from_ref(token), Regime::Decode)?;
                sequence.advance(1);
            }
        } else {
            self.each_prefill_step(sequence, prompt, &mut |engine, sequence, tokens, _| {
                collect(engine, sequence, tokens, Regime::Prefill)
            })?;
        }
        match mtp_sink {
            Some(sink) if start == 0 => self.mtp_logits(prompt, &hidden, one_by_one, sink),
            Some(_) => Err(EngineError::Option("the head's logits are given for whole prompts only".into())),
            None => Ok(()),
        }
    }

    /// Runs the head over a whole prompt in a sequence of its own: its layers' keys and values are apart from the
    /// model's, but positions and pages are counted alike.
    fn mtp_logits(
        &mut self,
        prompt: &[u32],
        hidden: &[f32],
        one_by_one: bool,
        sink: &mut LogitSink<'_>,
    ) -> Result<()> {
        if self.model.mtp.is_none() {
            return Err(EngineError::NoMtpHead);
        }
        let width = self.model.config.hidden;
        let mut sequence = self.open()?;
        let (regime, step) =
            if one_by_one { (Regime::Decode, 1) } else { (Regime::Prefill, self.options.prefill_step) };
        let mut rows = Vec::new();
        let pairs = prompt[1..].chunks(step).zip(hidden.chunks(step * width));
        let mut outcome = Ok(());
        for (next, hidden) in pairs {
            outcome = (|| {
                self.cache.reserve(&mut sequence, next.len())?;
                self.stepper.write_hidden(&hidden[..next.len() * width])?;
                self.run(regime, Outcome::MtpHidden, &[Rows::behind(&sequence, next)])?;
                sequence.advance(next.len());
                self.stepper.read_hidden(next.len(), &mut rows)?;
                self.stepper.head(&self.runtime, &self.model, &self.cache, &rows, sink)
            })();
            if outcome.is_err() {
                break;
            }
        }
        self.release(sequence);
        outcome
    }
}

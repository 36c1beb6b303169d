//! A model with its memory, ready to run sequences.

use std::collections::VecDeque;
use std::sync::Arc;

use keel_array::sampling::Draw;
use keel_array::{ArrayError, Executable, FailedRun, RESULT_BYTES_MAX, Regime, RowLog, Runtime};
use keel_cache::{CacheSize, Features, Interruption, ModelCache, SequenceCache, Sight};
use keel_models::HybridModel;
use keel_models::loading::{Loader, Parameters};
use keel_models::vision::VisionConfig;
use serde_json::Value;

use crate::ahead::StepUnderWay;
use crate::eyes::{self, Eyes, PatchGrid};
use crate::options::{EngineOptions, PREFILL_GRID};
use crate::speculation::Costs;
use crate::step::{HEAD_ROWS, Outcome, Rows, StepShape, Stepper, ids_of, prefill_rows_max};
use crate::{EngineError, Result};

/// Takes one row of logits at a time.
pub type LogitSink<'a> = dyn FnMut(&[f32]) -> Result<()> + 'a;

/// Runs one step of a prompt: the tokens, and the one behind them unless they are the last.
type PrefillStep<'a> = dyn FnMut(&mut Engine, &SequenceCache, &[u32], Option<u32>) -> Result<()> + 'a;

/// The next tokens of a prompt, in [`Engine::prefill_chunks`].
pub struct Chunk<'a> {
    /// What holds the tokens before them: a multiple of 64.
    pub sequence: &'a mut SequenceCache,
    /// The tokens, a multiple of 64 unless the prompt ends with them.
    pub tokens: &'a [u32],
    /// The prompt's token behind them; `None` if it ends.
    pub next: Option<u32>,
    /// How the token behind the prompt is drawn, if the device does.
    pub draw: Option<Draw>,
}

impl Chunk<'_> {
    fn rows(&self) -> Rows<'_> {
        Rows { next: self.next, draws: self.draw.as_slice(), ..Rows::behind(self.sequence, self.tokens) }
    }
}

/// A model and everything it needs, allocated. From here on nothing is allocated outside the plan.
pub struct Engine {
    /// Steps that nobody has waited for, the first first. They end before the memory below goes.
    pub(crate) under_way: VecDeque<StepUnderWay>,
    /// Steps submitted so far.
    pub(crate) tickets: u64,
    pub(crate) runtime: Runtime,
    pub(crate) model: HybridModel,
    pub(crate) cache: ModelCache,
    pub(crate) stepper: Stepper,
    /// Where pictures were planned for.
    eyes: Option<Eyes>,
    pub(crate) options: EngineOptions,
    /// What rounds of speculation have been measured to cost.
    pub(crate) costs: Costs,
    /// Logits of the row that a round is choosing from.
    pub(crate) row_logits: Vec<f32>,
    /// What had been done when the engine was made ready.
    ready: Option<LateWork>,
}

/// What an engine does besides running steps, while somebody may be waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LateWork {
    /// Steps traced.
    pub trace: u64,
    /// Kernels compiled.
    pub compile: u64,
    /// Kernels loaded on the device.
    pub load: u64,
    /// Programs captured.
    pub capture: u64,
    /// Allocations.
    pub allocate: u64,
}

impl LateWork {
    /// The counts with their names.
    pub fn named(&self) -> [(&'static str, u64); 5] {
        let LateWork { trace, compile, load, capture, allocate } = *self;
        [("trace", trace), ("compile", compile), ("load", load), ("capture", capture), ("allocate", allocate)]
    }

    /// What has been added since it was `before`.
    fn since(self, before: LateWork) -> LateWork {
        LateWork {
            trace: self.trace - before.trace,
            compile: self.compile - before.compile,
            load: self.load - before.load,
            capture: self.capture - before.capture,
            allocate: self.allocate - before.allocate,
        }
    }
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
        let vision = eyes::config(config, options.vision)?;
        let picture_run = vision.as_ref().map_or(0, VisionConfig::run_rows);
        let options = EngineOptions { picture_run, ..options };
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
        let mut spec = model.cache_spec(options.kv_format());
        if picture_run > 0 {
            // A step that holds a picture is written as a whole before its first row looks back.
            spec.widen_windows(prefill_rows_max(&options, runtime.backend().is_compiling()));
        }
        let cache = ModelCache::allocate(runtime, spec, size)?;
        let stepper =
            Stepper::allocate(runtime, &model, vision.as_ref(), &options, size.pages_per_sequence())?;
        let eyes = match (vision, options.vision) {
            (Some(vision), Some(sizes)) => {
                Some(Eyes::load(runtime, &loader, vision, sizes, options.compute)?)
            }
            _ => None,
        };
        let mut engine = Engine {
            under_way: VecDeque::new(),
            tickets: 0,
            runtime: runtime.clone(),
            model,
            cache,
            stepper,
            eyes,
            options,
            costs: Costs::default(),
            row_logits: Vec::new(),
            ready: None,
        };
        engine.prepare_steps()?;
        runtime.ledger().freeze();
        Ok(engine)
    }

    /// Traces every step that serving meets, and the largest of the others, so that the arena is as large as it will ever be.
    fn prepare_steps(&mut self) -> Result<()> {
        for shape in self.stepper.buckets().list() {
            self.stepper.prepare(&self.runtime, &self.model, &self.cache, (shape, true))?;
            // A prompt may show pictures in each of its steps.
            if self.eyes.is_some() && shape.regime == Regime::Prefill {
                let seeing = StepShape { sees: true, ..shape };
                self.stepper.prepare(&self.runtime, &self.model, &self.cache, (seeing, true))?;
            }
        }
        self.prepare_seeing_steps()?;
        if !self.options.all_logits {
            return Ok(());
        }
        let rows = self.stepper.buckets().prefill_rows_max();
        let step =
            |rows, outcome| StepShape { regime: Regime::Prefill, rows, sequences: 1, outcome, sees: false };
        let head = self.model.mtp.is_some().then(|| step(rows, Outcome::MtpHidden));
        for shape in [step(rows, Outcome::Hidden), step(HEAD_ROWS, Outcome::Head)].into_iter().chain(head) {
            self.stepper.prepare(&self.runtime, &self.model, &self.cache, (shape, false))?;
        }
        Ok(())
    }

    /// Does everything that the first requests would wait for: kernels are compiled and loaded, and every step of the list is
    /// run for nobody. [`Engine::late_work`] counts what is done after this. `progress` gets what is done, how much and of how
    /// much.
    ///
    /// # Errors
    /// What the runtime says.
    pub fn make_ready(&mut self, progress: &mut dyn FnMut(&'static str, usize, usize)) -> Result<()> {
        if self.runtime.backend().is_compiling() {
            let compiling = &mut |done, all| progress("compiling", done, all);
            self.runtime.make_ready(&self.stepper.listed(), compiling)?;
            self.stepper.run_for_nobody(&mut |done, all| progress("starting", done, all))?;
        }
        self.ready = Some(self.work_so_far());
        Ok(())
    }

    fn work_so_far(&self) -> LateWork {
        let done = self.runtime.backend().preparations();
        LateWork {
            trace: self.stepper.traced(),
            compile: done.compiled,
            load: done.loaded,
            capture: done.captured,
            allocate: self.runtime.ledger().charges(),
        }
    }

    /// Whether [`Engine::make_ready`] was called.
    pub fn is_ready(&self) -> bool {
        self.ready.is_some()
    }

    /// What was done since [`Engine::make_ready`] that should have been done by it: nothing.
    pub fn late_work(&self) -> LateWork {
        self.ready.map_or_else(LateWork::default, |ready| self.work_so_far().since(ready))
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
            self.prefill_chunks(&mut [Chunk { sequence, tokens: step, next, draw: None }])?;
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
        self.run_prompt(sequence, prompt, None, progress)?;
        self.stepper.read_logits(0, logits)
    }

    /// As [`Engine::prefill`], without reading the logits. With `draw`, the device that has them draws the token behind the
    /// prompt in the last step, and 4 bytes come to the host.
    pub(crate) fn run_prompt(
        &mut self,
        sequence: &mut SequenceCache,
        prompt: &[u32],
        draw: Option<Draw>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Option<u32>> {
        let (mut done, mut first) = (0, None);
        self.each_prefill_step(sequence, prompt, &mut |engine, sequence, tokens, next| {
            let draws = if next.is_none() { draw.as_slice() } else { &[] };
            let drawn = engine.run_prefill(&[Rows { next, draws, ..Rows::behind(sequence, tokens) }])?;
            first = drawn.first().copied();
            done += tokens.len();
            progress(done);
            Ok(())
        })?;
        Ok(first)
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
            let rows = rest.len().min(self.options.prefill_step).min(to_save);
            let rows = self.whole_pictures(sequence, self.chunk_rows(rows))?.min(rest.len());
            let (tokens, after) = rest.split_at(rows);
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

    /// Traces the largest steps that give all logits of prompts with pictures, if they are planned for.
    fn prepare_seeing_steps(&mut self) -> Result<()> {
        if self.eyes.is_none() || !self.options.all_logits {
            return Ok(());
        }
        let rows = self.stepper.buckets().prefill_rows_max();
        let head = self.model.mtp.is_some().then_some(Outcome::MtpHidden);
        for outcome in [Outcome::Hidden].into_iter().chain(head) {
            let shape = StepShape { regime: Regime::Prefill, rows, sequences: 1, outcome, sees: true };
            self.stepper.prepare(&self.runtime, &self.model, &self.cache, (shape, false))?;
        }
        Ok(())
    }

    /// So many tokens or another number, so that the step does not end within a picture whose rows see each other.
    fn whole_pictures(&self, sequence: &SequenceCache, count: usize) -> Result<usize> {
        self.whole_pictures_from(sequence, sequence.offset(), count)
    }

    /// The same for the tokens from `at` on.
    pub(crate) fn whole_pictures_from(
        &self,
        sequence: &SequenceCache,
        at: usize,
        count: usize,
    ) -> Result<usize> {
        let most = self.prefill_rows_max();
        let Some(sight) = sequence.sight() else { return Ok(count) };
        let Some(run) = sight.run_around(at + count) else { return Ok(count) };
        // On the grid before the picture, or before the one that this cuts, and so on; else right before the picture.
        let mut cut = run.start / PREFILL_GRID * PREFILL_GRID;
        while let Some(other) = sight.run_around(cut).filter(|_| cut > at) {
            cut = other.start / PREFILL_GRID * PREFILL_GRID;
        }
        match (cut > at, run.start > at) {
            (true, _) => Ok(cut - at),
            (false, true) => Ok(run.start - at),
            (false, false) if run.end - at <= most => Ok(run.end - at),
            (false, false) => Err(EngineError::Option(format!(
                "a picture of {} tokens must be run in one step, and a step has at most {most}",
                run.end - at
            ))),
        }
    }

    /// What the tower makes of a picture: rows of patches with their grid, or planes where the tower reads pictures of one size.
    ///
    /// # Errors
    /// [`EngineError::NoEyes`] where no pictures were planned for; a picture that does not fit; what the runtime says.
    pub fn see(&mut self, values: &[f32], grid: PatchGrid) -> Result<Features> {
        self.finish_under_way()?;
        self.eyes.as_mut().ok_or(EngineError::NoEyes)?.see(&self.runtime, values, grid)
    }

    /// The numbers of the tower, where pictures were planned for.
    pub fn vision(&self) -> Option<&VisionConfig> {
        self.eyes.as_ref().map(Eyes::config)
    }

    /// The tower, where pictures were planned for.
    pub(crate) fn eyes(&self) -> Option<&Eyes> {
        self.eyes.as_ref()
    }

    /// Whether a step of a prompt may begin and end off the grid: where the rows of a picture see each other, it begins and ends with
    /// pictures.
    pub(crate) fn leaves_grid(&self) -> bool {
        self.options.picture_run > 0
    }

    /// Runs a step of prompts. Returns the tokens that it draws behind them, nothing if no prompt asks for one.
    fn run_prefill(&mut self, rows: &[Rows<'_>]) -> Result<Vec<u32>> {
        let goes_on = rows.len() == 1 && rows[0].next.is_some();
        let outcome = if goes_on { Outcome::State } else { Outcome::LastLogits };
        if rows.iter().all(|row| row.draws.is_empty()) {
            return self.run(Regime::Prefill, outcome, rows).map(|()| Vec::new());
        }
        self.run_and_draw((Regime::Prefill, outcome), rows, rows.len())
    }

    /// Of the next `rows` tokens of a prompt, how many a step by itself should run: all, or fewer on the grid.
    pub fn chunk_rows(&self, rows: usize) -> usize {
        self.stepper.buckets().chunk_rows(rows)
    }

    /// Prompts that one step may run.
    pub fn chunks_max(&self) -> usize {
        self.stepper.buckets().prompts()
    }

    /// Rows that one step of prompts may run.
    pub fn prefill_rows_max(&self) -> usize {
        self.stepper.buckets().prefill_rows_max()
    }

    /// Runs the next tokens of several prompts in one step. Returns the tokens drawn behind those that ask for one; the logits
    /// behind prompt `i` are read with [`Engine::logits`], row `i`.
    ///
    /// # Errors
    /// As [`Engine::prefill`]; each sequence is as before then, or torn.
    pub fn prefill_chunks(&mut self, chunks: &mut [Chunk<'_>]) -> Result<Vec<Option<u32>>> {
        let rows: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let (chunks_max, rows_max) = (self.chunks_max(), self.prefill_rows_max());
        if chunks.is_empty() || chunks.len() > chunks_max || rows > rows_max {
            let count = chunks.len();
            let reason = format!(
                "a step of {rows} tokens of {count} prompts; there are at most {rows_max} of 1 to {chunks_max}"
            );
            return Err(EngineError::Option(reason));
        }
        for Chunk { sequence, tokens, next, .. } in chunks.iter_mut() {
            self.admit(sequence, tokens)?;
            let (start, rows) = (sequence.offset(), tokens.len());
            let ends_on_grid = next.is_none() || rows.is_multiple_of(PREFILL_GRID);
            if !self.leaves_grid() && (!start.is_multiple_of(PREFILL_GRID) || !ends_on_grid) {
                let reason = format!(
                    "a step of {rows} prompt tokens from token {start}: steps begin on the 64-token grid, and end on it \
                     unless the prompt ends"
                );
                return Err(EngineError::Option(reason));
            }
            self.commit(sequence)?;
            self.cache.reserve(sequence, rows)?;
        }
        let rows: Vec<Rows<'_>> = chunks.iter().map(Chunk::rows).collect();
        match self.run_prefill(&rows) {
            Ok(drawn) => {
                let drawn = drawn.into_iter().map(Some).chain(std::iter::repeat(None));
                let drawn =
                    chunks.iter().zip(drawn).map(|(chunk, token)| token.filter(|_| chunk.draw.is_some()));
                let drawn = drawn.collect();
                chunks.iter_mut().for_each(|chunk| chunk.sequence.advance(chunk.tokens.len()));
                Ok(drawn)
            }
            Err(error) => {
                chunks.iter_mut().for_each(|chunk| self.take_back_step(chunk.sequence));
                Err(error)
            }
        }
    }

    /// A step of a prompt failed. Where the state that the sequence had before is kept, it gets it back; otherwise it stays
    /// torn, as it does if this fails, too.
    pub(crate) fn take_back_step(&mut self, sequence: &mut SequenceCache) {
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

    /// As [`Engine::run`], and the `count` tokens that the step draws, which come to the host with it.
    pub(crate) fn run_and_draw(
        &mut self,
        how: (Regime, Outcome),
        rows: &[Rows<'_>],
        count: usize,
    ) -> Result<Vec<u32>> {
        let drawn = self.stepper.drawn(how, count)?;
        let mut bytes = vec![0; drawn.bytes()];
        if bytes.len() > RESULT_BYTES_MAX {
            self.run(how.0, how.1, rows)?;
            drawn.read_bytes(0, &mut bytes)?;
        } else {
            let ended = self.step_for(how, rows)?.submit(&drawn).wait(&mut bytes);
            ended.map_err(|failed| self.note_failed(how, rows, failed))?;
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
            let mut rest = prompt;
            while !rest.is_empty() {
                // The rows of a picture that see each other stay together.
                let at = sequence.offset();
                let together = sequence.sight().map_or(1, |sight| sight.end(at) + 1 - at).min(rest.len());
                let regime = if together > 1 { Regime::Prefill } else { Regime::Decode };
                let (tokens, after) = rest.split_at(together);
                collect(self, sequence, tokens, regime)?;
                sequence.advance(together);
                rest = after;
            }
        } else {
            self.each_prefill_step(sequence, prompt, &mut |engine, sequence, tokens, _| {
                collect(engine, sequence, tokens, Regime::Prefill)
            })?;
        }
        match mtp_sink {
            Some(sink) if start == 0 => {
                let sight = sequence.sight().cloned();
                self.mtp_logits((prompt, sight), &hidden, one_by_one, sink)
            }
            Some(_) => Err(EngineError::Option("the head's logits are given for whole prompts only".into())),
            None => Ok(()),
        }
    }

    /// Runs the head over a whole prompt in a sequence of its own: its layers' keys and values are apart from the
    /// model's, but positions and pages are counted alike.
    fn mtp_logits(
        &mut self,
        (prompt, sight): (&[u32], Option<Arc<Sight>>),
        hidden: &[f32],
        one_by_one: bool,
        sink: &mut LogitSink<'_>,
    ) -> Result<()> {
        if self.model.mtp.is_none() {
            return Err(EngineError::NoMtpHead);
        }
        let width = self.model.config.hidden;
        let mut sequence = self.open()?;
        sequence.look_at(sight);
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

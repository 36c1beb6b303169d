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

/// Runs one step of a prompt: its tokens, and the token after them unless they are the last.
type PrefillStep<'a> = dyn FnMut(&mut Engine, &SequenceCache, &[u32], Option<u32>) -> Result<()> + 'a;

/// The next tokens of a prompt, in [`Engine::prefill_chunks`].
pub struct Chunk<'a> {
    /// The sequence that holds the tokens before them, a multiple of 64.
    pub sequence: &'a mut SequenceCache,
    /// The tokens, a multiple of 64 unless the prompt ends with them.
    pub tokens: &'a [u32],
    /// The prompt's token after them; `None` if the prompt ends.
    pub next: Option<u32>,
    /// How the device draws the token after the prompt, if it does.
    pub draw: Option<Draw>,
}

impl Chunk<'_> {
    fn rows(&self) -> Rows<'_> {
        Rows { next: self.next, draws: self.draw.as_slice(), ..Rows::behind(self.sequence, self.tokens) }
    }
}

/// A model and everything it needs, allocated. After that nothing is allocated outside the plan.
pub struct Engine {
    /// Steps under way, the oldest first. They end before the memory below is freed.
    pub(crate) under_way: VecDeque<StepUnderWay>,
    /// Steps submitted so far.
    pub(crate) tickets: u64,
    pub(crate) runtime: Runtime,
    pub(crate) model: HybridModel,
    pub(crate) cache: ModelCache,
    pub(crate) stepper: Stepper,
    /// The vision tower, where pictures were planned for.
    eyes: Option<Eyes>,
    pub(crate) options: EngineOptions,
    /// Measured costs of rounds of speculation.
    pub(crate) costs: Costs,
    /// Logits of the row that a round chooses from.
    pub(crate) row_logits: Vec<f32>,
    /// The work done until the engine was ready.
    ready: Option<LateWork>,
}

/// Work besides running steps, for which a request may have to wait.
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

    /// The sums of both.
    pub(crate) fn plus(self, other: LateWork) -> LateWork {
        LateWork {
            trace: self.trace + other.trace,
            compile: self.compile + other.compile,
            load: self.load + other.load,
            capture: self.capture + other.capture,
            allocate: self.allocate + other.allocate,
        }
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
    /// Reads a model and allocates its memory. On a planning backend the ledger then reads as it would on a real one.
    ///
    /// # Errors
    /// Errors of the config, the parameters or the memory limit; options out of range.
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
            // A step with a picture writes all its rows before its first row looks back.
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

    /// Traces every step that serving needs, and the largest of the others, so that the arena has its final size.
    fn prepare_steps(&mut self) -> Result<()> {
        for shape in self.stepper.buckets().list() {
            self.stepper.prepare(&self.runtime, &self.model, &self.cache, (shape, true))?;
            // Any step of a prompt may hold pictures.
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

    /// Does everything that the first requests would wait for: compiles and loads kernels, and runs each step of the
    /// list without a sequence. [`Engine::late_work`] counts later work of this kind. `progress` gets the kind of work,
    /// how much is done, and how much there is.
    ///
    /// # Errors
    /// An error of the runtime.
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

    /// The work done since [`Engine::make_ready`] that it should have done. There should be none.
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
    /// All sequences are in use.
    pub fn open(&mut self) -> Result<SequenceCache> {
        Ok(self.cache.open()?)
    }

    /// Ends a sequence and takes its memory back.
    pub fn release(&mut self, sequence: SequenceCache) {
        self.cache.release(sequence);
    }

    /// Checks ids, and that the sequence can hold these tokens, too.
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

    /// Whether a sequence of `tokens` tokens uses other rotary frequencies than a short one. All its tokens then do,
    /// from the first on.
    pub fn is_long(&self, tokens: usize) -> bool {
        self.model.config.short_context().is_some_and(|original| tokens > original)
    }

    /// Whether a sequence can grow to `tokens` tokens with its rotary frequencies.
    pub fn can_grow(&self, sequence: &SequenceCache, tokens: usize) -> bool {
        sequence.is_long() || !self.is_long(tokens)
    }

    /// Whether a sequence may come to need other rotary frequencies.
    pub(crate) fn may_outgrow(&self, sequence: &SequenceCache) -> bool {
        self.model.config.short_context().is_some() && !sequence.is_long()
    }

    /// Gives an empty sequence the rotary frequencies for `tokens` tokens.
    pub(crate) fn settle_turns(&self, sequence: &mut SequenceCache, tokens: usize) {
        if sequence.is_empty() {
            sequence.set_long(self.is_long(tokens));
        }
    }

    /// Runs all tokens of a sequence that has outgrown its rotary frequencies again, with those of long sequences.
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

    /// Runs a prompt in steps after the tokens that the sequence holds, which must end on the 64-token grid. Leaves the
    /// logits of the prompt's last token in `logits`. Saves a checkpoint at the last grid point, if there is room.
    /// `progress` gets the number of tokens done after each step.
    ///
    /// # Errors
    /// Ids out of range, a prompt that does not fit, an error of the runtime. The sequence then holds the steps done.
    /// Exception: the failed step changed recurrent state and did not begin at the start or at a checkpoint. The
    /// sequence then answers [`keel_cache::CacheError::TornState`] until it is rewound.
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

    /// As [`Engine::prefill`], but does not read the logits. With `draw`, the device draws the token after the prompt
    /// in the last step, and 4 bytes come to the host.
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

    /// Cuts a prompt into steps. With checkpoints, one step ends at the last grid point.
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

    /// Returns `count`, or another number so that the step does not end within a picture whose rows see each other.
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
        // Cut at the grid point before the picture. If that is within another picture, cut before that one, and so on.
        // If no grid point is left, cut right before the picture.
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

    /// The tower's features of a picture. `values` are rows of patches with their grid, or planes if the tower reads
    /// pictures of one size.
    ///
    /// # Errors
    /// [`EngineError::NoEyes`] if no pictures were planned for; a picture that does not fit; an error of the runtime.
    pub fn see(&mut self, values: &[f32], grid: PatchGrid) -> Result<Features> {
        self.finish_under_way()?;
        self.eyes.as_mut().ok_or(EngineError::NoEyes)?.see(&self.runtime, values, grid)
    }

    /// The tower's config, where pictures were planned for.
    pub fn vision(&self) -> Option<&VisionConfig> {
        self.eyes.as_ref().map(Eyes::config)
    }

    /// The tower, where pictures were planned for.
    pub(crate) fn eyes(&self) -> Option<&Eyes> {
        self.eyes.as_ref()
    }

    /// Whether a step of a prompt may begin and end off the grid. Where the rows of a picture see each other, it may
    /// begin and end at a picture.
    pub(crate) fn leaves_grid(&self) -> bool {
        self.options.picture_run > 0
    }

    /// Runs a step of prompts. Returns the tokens drawn after them; none if no prompt asks for one.
    fn run_prefill(&mut self, rows: &[Rows<'_>]) -> Result<Vec<u32>> {
        let goes_on = rows.len() == 1 && rows[0].next.is_some();
        let outcome = if goes_on { Outcome::State } else { Outcome::LastLogits };
        if rows.iter().all(|row| row.draws.is_empty()) {
            return self.run(Regime::Prefill, outcome, rows).map(|()| Vec::new());
        }
        self.run_and_draw((Regime::Prefill, outcome), rows, rows.len())
    }

    /// How many of a prompt's next `rows` tokens a step should run if the prompt is alone in it: all, or fewer on the
    /// grid.
    pub fn chunk_rows(&self, rows: usize) -> usize {
        self.stepper.buckets().chunk_rows(rows)
    }

    /// How many prompts one step may run.
    pub fn chunks_max(&self) -> usize {
        self.stepper.buckets().prompts()
    }

    /// How many rows one step of prompts may run.
    pub fn prefill_rows_max(&self) -> usize {
        self.stepper.buckets().prefill_rows_max()
    }

    /// Runs the next tokens of several prompts in one step. Returns the token drawn after each prompt that asks for
    /// one. The logits after prompt `i` are row `i` of [`Engine::logits`].
    ///
    /// # Errors
    /// As [`Engine::prefill`]. Each sequence is then as before, or torn.
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

    /// After a failed step of a prompt: if the state before the step is kept, the sequence gets it back. Otherwise, or
    /// if this fails, too, the sequence stays torn.
    pub(crate) fn take_back_step(&mut self, sequence: &mut SequenceCache) {
        let at = sequence.offset();
        let is_kept = at == 0 || sequence.checkpoints().any(|kept| kept == at);
        if is_kept && self.cache.expect_whole(sequence).is_err() {
            let _ = self.cache.rewind(sequence, at);
        }
    }

    /// Makes the accepted open rows part of the state. Steps do so on their own, but a drafting sequence needs it
    /// before it is saved or gets a checkpoint. If a step failed while it was committing, this commits the rest.
    ///
    /// # Errors
    /// An error of the runtime; the call may then be retried. [`keel_cache::CacheError::TornState`].
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

    /// Commits the rest if a failed step was committing.
    pub(crate) fn finish_commit(&mut self, sequence: &mut SequenceCache) -> Result<()> {
        if self.cache.interruption(sequence).is_some() { self.commit(sequence) } else { Ok(()) }
    }

    pub(crate) fn run(&mut self, regime: Regime, outcome: Outcome, rows: &[Rows<'_>]) -> Result<()> {
        let ended = self.step_for((regime, outcome), rows)?.run();
        ended.map_err(|failed| self.note_failed((regime, outcome), rows, failed))
    }

    /// As [`Engine::run`]. Returns the `count` tokens that the step draws; they come to the host with it.
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

    /// The step over these rows. Waits for all steps under way first.
    fn step_for(&mut self, how: (Regime, Outcome), rows: &[Rows<'_>]) -> Result<&Executable> {
        self.finish_under_way()?;
        for row in rows {
            self.cache.expect_whole(row.sequence)?;
        }
        self.stepper.step_for(&self.runtime, &self.model, &self.cache, how, rows)
    }

    /// Records what a failed step did to its sequences.
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

    /// Runs one more token of each sequence. The logits are read with [`Engine::logits`]. In an engine that drafts, the
    /// row is left open, and the next step commits it.
    ///
    /// # Errors
    /// Ids out of range, a full context, an error of the runtime. In an engine that drafts, each sequence is then as
    /// before, as after a failed round. Without a log, a sequence whose recurrent state has changed answers
    /// [`keel_cache::CacheError::TornState`] from then on.
    pub fn decode(&mut self, sequences: &mut [&mut SequenceCache], tokens: &[u32]) -> Result<()> {
        self.decode_and_draw(sequences, tokens, &vec![None; tokens.len()]).map(drop)
    }

    /// As [`Engine::decode`]. The device also draws the token after each sequence that has a [`Draw`]: 4 bytes a
    /// sequence come to the host.
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

    /// Copies the logits of sequence `row` of the last step, even if the step is still under way.
    ///
    /// # Errors
    /// There is no such row.
    pub fn logits(&self, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        self.stepper.read_logits(row, logits)
    }

    /// Gives the logits of every token of a prompt, row by row. With `mtp_sink`, the MTP head's logits follow, for all
    /// tokens but the last; they take a second sequence meanwhile. Needs `all_logits`. With `one_by_one`, each token
    /// goes through the decode regime.
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
                // Rows of a picture that see each other stay together.
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

    /// Runs the MTP head over a whole prompt in a sequence of its own. The head's keys and values are separate from the
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

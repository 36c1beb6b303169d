//! A model with its memory, ready to run sequences.

pub(crate) mod ahead;
mod all_logits;
mod commit;
mod early;
pub(crate) mod failures;
mod hidden;
mod host_memory;
pub(crate) mod in_flight;
mod prompts;
mod ready;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use keel_array::sampling::Draw;
use keel_array::{RESULT_BYTES_MAX, Regime, Runtime};
use keel_cache::{CacheSpec, DeviceLayers, Features, ModelCache, SequenceCache};
use keel_models::HybridModel;
use keel_models::loading::{Loader, Parameters};
use keel_models::vision::VisionConfig;
use serde_json::Value;

use crate::device_thread::DeviceThread;
use crate::engine::host_memory::HostMemory;
use crate::engine::in_flight::{InFlightSteps, StepTimer, Taken};
use crate::options::EngineOptions;
use crate::speculation::Costs;
use crate::split::microbatches::Microbatches;
use crate::split::step::Peer;
use crate::split::{self, PlacedPart};
use crate::step::{Buckets, Outcome, Rows, StepKind, StepSizes, Stepper, ids_of};
use crate::vision::{self, EncodeJob, EncodeStatus, PatchGrid, VisionRunner};
use crate::{EngineError, Result};

pub use ahead::{HostReads, Ticket, Work, WorkRows};
pub use all_logits::LogitSink;
pub use early::{EarlySteps, LoadProgress};
pub use prompts::Chunk;
pub use ready::LateWork;

/// A model and everything it needs, allocated. After that nothing is allocated outside the plan.
pub struct Engine {
    /// Steps under way, the oldest first. They end before the memory below is freed.
    pub(crate) in_flight: InFlightSteps,
    /// Steps of groups in a pipeline. They end before the devices' threads do.
    pub(crate) microbatches: Microbatches,
    /// The step taken last.
    pub(crate) taken: Taken,
    pub(crate) step_timer: StepTimer,
    /// Steps submitted so far.
    pub(crate) tickets: u64,
    /// The other devices of a split model, by rank.
    pub(crate) peers: Vec<Peer>,
    /// Names of the devices in reports, if they were given.
    pub(crate) device_names: Vec<String>,
    pub(crate) cache: ModelCache,
    /// The device with the output head.
    pub(crate) stepper: Stepper,
    /// The vision tower, where pictures were planned for.
    vision_runner: Option<VisionRunner>,
    /// The runtime of the tower, if it has one of its own.
    pub(crate) tower_runtime: Option<Runtime>,
    pub(crate) options: EngineOptions,
    /// Measured costs of rounds of speculation.
    pub(crate) costs: Costs,
    host_memory: HostMemory,
    /// How many rounds have left hidden states on the device. It has those of the last two.
    pub(crate) kept_rounds: u64,
    /// The work done until the engine was ready.
    ready: Option<LateWork>,
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
        Engine::load_on(&[PlacedPart::whole(runtime.clone())], None, parameters, config, options, progress)
    }

    /// As [`Engine::load`], with a part of the model on each device, by rank. The last one leads: its results are
    /// those of the model. The vision tower may have a runtime of its own, for its weights, its buffers and the
    /// features of pictures. Without pictures in the options that runtime holds nothing.
    ///
    /// # Errors
    /// As [`Engine::load`]; devices that are not one group, in this order; parts that are no split of the model, or lie
    /// on devices of another rank.
    pub fn load_on(
        devices: &[PlacedPart<Runtime>],
        tower: Option<&Runtime>,
        parameters: &dyn Parameters,
        config: &Value,
        options: EngineOptions,
        progress: &dyn Fn(u64),
    ) -> Result<Engine> {
        options.check()?;
        let whole = keel_models::read_config_of(config, parameters)?;
        let runtime = split::check_devices(devices, whole.layers.len())?;
        let vision = vision::config(config, options.vision)?;
        let largest_steps = options.largest_steps && runtime.backend().is_planning();
        let options = EngineOptions { largest_steps, ..options };
        let models = split::load_parts(devices, progress, |PlacedPart { device, part }, progress, stop| {
            let loader = Loader::new(device, parameters, options.compute, progress).until(stop);
            keel_models::load(&loader.in_order(options.sums).of_part(part.clone()), config)
        })?;
        if options.drafts > 0 && models.last().is_some_and(|model| model.mtp.is_none()) {
            return Err(EngineError::NoMtpHead);
        }
        let on = devices.iter().map(|placed| (placed.device.backend(), &placed.part));
        let buckets = Buckets::for_devices(&options, vision.as_ref(), on);
        let (cache, layers) = allocate_cache(devices, &models, &options, &buckets)?;
        let sizes = StepSizes { options: &options, buckets, vision: vision.as_ref(), cache: &cache };
        let mut peers = Vec::with_capacity(models.len());
        for (rank, (model, layers)) in models.into_iter().zip(layers).enumerate() {
            let device = &devices[rank].device;
            let has_thread = rank + 1 < devices.len() && !device.backend().is_planning();
            let thread = has_thread.then(|| DeviceThread::start(&format!("device-{rank}"))).transpose()?;
            let thread = thread.map(Arc::new);
            peers.push(Peer { thread, stepper: Stepper::allocate(device, model, layers, &sizes)? });
        }
        let Some(Peer { mut stepper, .. }) = peers.pop() else { unreachable!("there is a device") };
        stepper.keep_results(&options)?;
        let place = tower.unwrap_or(runtime);
        let loader = Loader::new(place, parameters, options.compute, progress);
        let vision = vision.zip(options.vision);
        let mut runner = vision
            .map(|(config, sizes)| VisionRunner::load(place, &loader, config, &whole, sizes, &options))
            .transpose()?;
        if let Some(runner) = runner.as_mut().filter(|_| tower.is_some_and(|on| !on.backend().is_planning()))
        {
            runner.start_thread()?;
        }
        let costs = Costs::new(stepper.buckets());
        let mut engine = Engine {
            in_flight: InFlightSteps::default(),
            microbatches: Microbatches::default(),
            taken: Taken::default(),
            step_timer: StepTimer::default(),
            tickets: 0,
            peers,
            device_names: Vec::new(),
            cache,
            stepper,
            vision_runner: runner,
            tower_runtime: tower.cloned(),
            options,
            costs,
            host_memory: HostMemory::default(),
            kept_rounds: 0,
            ready: None,
        };
        engine.host_memory = engine.allocate_host_memory()?;
        engine.prepare_steps()?;
        engine.runtimes().for_each(|runtime| runtime.ledger().freeze());
        Ok(engine)
    }

    /// The runtime; of a split model, that of the device with the output head.
    pub fn runtime(&self) -> &Runtime {
        self.stepper.runtime()
    }

    /// The model; of a split one, the part with the output head.
    pub fn model(&self) -> &HybridModel {
        self.stepper.model()
    }

    /// The options it was made with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The storage of sequences.
    pub fn cache(&self) -> &ModelCache {
        &self.cache
    }

    /// The storage of sequences, to save, rewind or fork one. Waits for steps of groups under way.
    pub fn cache_mut(&mut self) -> &mut ModelCache {
        self.finish_microbatches();
        &mut self.cache
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// All sequences are in use.
    pub fn open(&mut self) -> Result<SequenceCache> {
        Ok(self.cache_mut().open()?)
    }

    /// Ends a sequence and takes its memory back. Steps under way may have rows of it. If one fails, that says nothing
    /// about the next owner of its slot.
    pub fn release(&mut self, sequence: SequenceCache) {
        if !sequence.is_parked() && self.cache.owns(&sequence) {
            self.in_flight.forget_slot(sequence.slot());
            self.microbatches.forget_slot(sequence.slot());
        }
        self.cache.release(sequence);
    }

    /// Checks ids, and that the sequence can hold these tokens, too.
    pub(crate) fn admit(&self, sequence: &SequenceCache, tokens: &[u32]) -> Result<()> {
        self.admit_ahead(sequence, 0, tokens)
    }

    /// The same for tokens after `ahead` rows that are under way.
    pub(crate) fn admit_ahead(&self, sequence: &SequenceCache, ahead: usize, tokens: &[u32]) -> Result<()> {
        let vocab = self.model().config.vocab;
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocab) {
            return Err(EngineError::TokenId { id, vocab });
        }
        let (needed, context) = (sequence.len() + ahead + tokens.len(), self.options.context);
        if needed > context {
            return Err(EngineError::Context { needed, context });
        }
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        match self.model().config.short_context() {
            Some(original) if needed > original && !sequence.is_long() => {
                Err(EngineError::Outgrown { needed, original })
            }
            _ => Ok(()),
        }
    }

    /// Whether a sequence of `tokens` tokens uses other rotary frequencies than a short one. All its tokens then do,
    /// from the first on.
    pub fn is_long(&self, tokens: usize) -> bool {
        self.model().config.short_context().is_some_and(|original| tokens > original)
    }

    /// Whether a sequence can grow to `tokens` tokens with its rotary frequencies.
    pub fn can_grow(&self, sequence: &SequenceCache, tokens: usize) -> bool {
        sequence.is_long() || !self.is_long(tokens)
    }

    /// How many more tokens a sequence can hold, with its rotary frequencies.
    pub(crate) fn room_of(&self, sequence: &SequenceCache) -> usize {
        let short = self.model().config.short_context().filter(|_| !sequence.is_long());
        self.options.context.min(short.unwrap_or(usize::MAX)).saturating_sub(sequence.len())
    }

    /// Whether a sequence may come to need other rotary frequencies.
    pub(crate) fn may_outgrow(&self, sequence: &SequenceCache) -> bool {
        self.model().config.short_context().is_some() && !sequence.is_long()
    }

    /// Gives an empty sequence the rotary frequencies for `tokens` tokens.
    pub(crate) fn choose_rope_frequencies(&self, sequence: &mut SequenceCache, tokens: usize) {
        if sequence.is_empty() {
            sequence.set_long(self.is_long(tokens));
        }
    }

    /// The tower's features of a picture. `values` are rows of patches with their grid, or planes if the tower reads
    /// pictures of one size.
    ///
    /// # Errors
    /// [`EngineError::NoVisionTower`] if no pictures were planned for; a picture that does not fit; an error of the
    /// runtime.
    pub fn encode_picture(&mut self, values: &[f32], grid: PatchGrid) -> Result<Features> {
        self.finish_in_flight()?;
        self.vision_runner.as_mut().ok_or(EngineError::NoVisionTower)?.encode(values, grid)
    }

    /// Begins to encode a picture, in pieces.
    pub(crate) fn begin_encoding(&self, values: &[f32], grid: PatchGrid) -> Result<EncodeJob> {
        self.vision_runner.as_ref().ok_or(EngineError::NoVisionTower)?.begin(values, grid)
    }

    /// Whether the tower has a device and a thread of its own, so that steps run while it encodes.
    pub(crate) fn has_tower_thread(&self) -> bool {
        self.vision_runner.as_ref().is_some_and(VisionRunner::has_thread)
    }

    /// Runs the next piece of a job. A tower with a thread of its own is only waited for as long as `patience`.
    pub(crate) fn advance_encoding(
        &mut self,
        job: &mut EncodeJob,
        values: &Arc<Vec<f32>>,
        patience: Duration,
    ) -> Result<EncodeStatus> {
        if self.has_tower_thread() {
            return self
                .vision_runner
                .as_mut()
                .ok_or(EngineError::NoVisionTower)?
                .advance_on_thread(job, values, patience);
        }
        self.finish_in_flight()?;
        self.vision_runner.as_mut().ok_or(EngineError::NoVisionTower)?.advance(job, values)
    }

    /// The tower's config, where pictures were planned for.
    pub fn vision(&self) -> Option<&VisionConfig> {
        self.vision_runner.as_ref().map(VisionRunner::config)
    }

    /// The tower, where pictures were planned for.
    pub(crate) fn vision_runner(&self) -> Option<&VisionRunner> {
        self.vision_runner.as_ref()
    }

    pub(crate) fn run(&mut self, regime: Regime, outcome: Outcome, rows: &[Rows<'_>]) -> Result<()> {
        self.run_step(StepKind { regime, outcome }, rows, None)
    }

    /// As [`Engine::run`]. Returns the `count` tokens that the step draws; they come to the host with it.
    pub(crate) fn run_and_draw(
        &mut self,
        kind: StepKind,
        rows: &[Rows<'_>],
        count: usize,
    ) -> Result<Vec<u32>> {
        self.run_then_read(kind, rows, count)?
    }

    /// As [`Engine::run_and_draw`]. The inner error says that the step has run, and its tokens could not be read.
    pub(crate) fn run_then_read(
        &mut self,
        kind: StepKind,
        rows: &[Rows<'_>],
        count: usize,
    ) -> Result<Result<Vec<u32>>> {
        let drawn = self.stepper.drawn(kind, count)?;
        let mut bytes = vec![0; drawn.bytes()];
        if bytes.len() <= RESULT_BYTES_MAX {
            self.run_step(kind, rows, Some((&drawn, &mut bytes)))?;
            return Ok(Ok(ids_of(&bytes)));
        }
        self.run(kind.regime, kind.outcome, rows)?;
        Ok(drawn.read_bytes(0, &mut bytes).map(|()| ids_of(&bytes)).map_err(EngineError::from))
    }

    /// Runs one more token of each sequence. The logits are read with [`Engine::logits`]. In an engine that drafts, the
    /// row is left open, and the next step commits it.
    ///
    /// # Errors
    /// Ids out of range, a full context, an error of the runtime. In an engine that drafts, each sequence is then as
    /// before, as after a failed round. Without a log, a sequence whose recurrent state has changed answers
    /// [`keel_cache::CacheError::TornState`] or [`keel_cache::CacheError::AheadState`] from then on.
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
                ..Rows::after(sequence, std::slice::from_ref(token))
            })
            .collect();
        let kind = StepKind::decode(Outcome::LastLogits);
        let drawn = match draws.iter().all(Option::is_none) {
            true => self.run(kind.regime, kind.outcome, &rows).map(|()| Ok(vec![0; count]))?,
            false => self.run_then_read(kind, &rows, count)?,
        };
        let drawn =
            drawn.inspect_err(|_| self.note_lost(sequences.iter_mut().map(|sequence| &mut **sequence)))?;
        let is_open = self.leaves_open();
        sequences.iter_mut().for_each(|s| if is_open { s.accept(1) } else { s.advance(1) });
        Ok(drawn.into_iter().zip(draws).map(|(token, draw)| draw.map(|_| token)).collect())
    }

    /// Copies the logits of sequence `row` of the last step, even if the step is still under way.
    ///
    /// # Errors
    /// There is no such row.
    pub fn logits(&self, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        self.stepper.read_logits(row, logits)
    }
}

/// The cache of all devices, and each one's layers in it.
fn allocate_cache(
    devices: &[PlacedPart<Runtime>],
    models: &[HybridModel],
    options: &EngineOptions,
    buckets: &Buckets,
) -> Result<(ModelCache, Vec<Range<usize>>)> {
    let format = options.cache_format();
    let mut spec = CacheSpec { layers: Vec::new(), format };
    let mut of_devices = Vec::with_capacity(models.len());
    for (placed, model) in devices.iter().zip(models) {
        let start = spec.layers.len();
        spec.layers.extend(model.cache_spec(format).layers);
        of_devices.push(DeviceLayers { runtime: placed.device.clone(), layers: start..spec.layers.len() });
    }
    if buckets.leaves_grid() {
        // A step with a picture writes all its rows before its first row looks back.
        spec.widen_windows(buckets.prefill_rows_max());
    }
    let cache = ModelCache::allocate_on(&of_devices, spec, options.cache_size())?;
    Ok((cache, of_devices.into_iter().map(|device| device.layers).collect()))
}

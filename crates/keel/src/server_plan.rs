//! Computes a server's bounds and its plan from the options, the model and the machine.

use anyhow::{Context, Result};
use keel_array::{AttentionSpec, Category, Compute, MemoryReport};
use keel_engine::{EarlySteps, EngineError, EngineOptions, SpeculationOptions};

use crate::args::{COUNT_MAX, Device, DeviceArgs, Member, MemoryArgs, Pooling, Subject, drafts_max};
use crate::commands::serve::ServeOptions;
use crate::failure::usage;
use crate::placed_model::{PlacedModel, Plans, choose_device};
use crate::session;
use evenkeel::context_for;
use evenkeel::human_bytes;
use evenkeel::{Error, FreeMemory, on_host};

/// Default context of a sequence, unless the model's own is shorter.
const CONTEXT_DEFAULT: usize = 8192;
/// Default number of tokens of keys and values, for all sequences together.
const POOL_TOKENS_DEFAULT: usize = 65536;
/// Default bytes for remembered recurrent states.
const PREFIX_STATES_DEFAULT: u64 = 128 << 20;
/// Largest default number of sequences, unless a GPU has room for more.
const SEQUENCES_DEFAULT: usize = 16;
/// Default numbers of sequences on a GPU that has room for them, the first that fits.
const SEQUENCES_OF_A_GPU: [usize; 3] = [128, 64, 32];
/// Tokens of keys and values for each of them.
const TOKENS_EACH: usize = 2048;
/// Smallest default number of sequences.
const SEQUENCES_MIN: usize = 4;
/// Most drafts by default where more do not fit, and on several devices that draft.
const DRAFTS_FEW: usize = 2;
/// Largest number of pages that an engine takes.
const POOL_PAGES_MAX: usize = 1 << 24;
/// The context is not shortened below this to fit a machine. If the plan still does not fit, it is refused.
pub const CONTEXT_MIN: usize = 1024;

/// The models of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Models {
    /// One, loaded all the time.
    One,
    /// Several, which take turns or share the memory.
    Several,
}

/// A server's bounds, and the bytes that follow from them.
pub struct ServerPlan {
    pub options: EngineOptions,
    pub plans: Plans,
}

/// Plans a server with these options. A GPU with much free memory takes more sequences by default. Then bounds that are
/// not given are reduced until the plan fits into the free memory. A plan that still does not fit is refused when the
/// model is loaded.
///
/// # Errors
/// Errors of the plan, or drafts without an MTP head.
pub fn plan_server(args: &ServeOptions, subject: &Subject<'_>, models: Models) -> Result<ServerPlan> {
    args.device.check()?;
    let (engine, step_tokens) = (args.engine.options(), args.step_tokens());
    choose_device(&args.device, |device| {
        let planner = Planner::new(&args.memory, subject, device, engine, step_tokens)?;
        planner.model.plan(planner.wanted)
    });
    let mut planner = Planner::new(&args.memory, subject, &args.device, engine, step_tokens)?;
    let room = room(&args.device, planner.wanted.compute);
    let known = room.as_ref().map(|room| room.bytes).or(args.device.least_limit());
    if let Some(bytes) = known.filter(|_| models == Models::One && args.device.device() != Device::Cpu) {
        planner.take_more_sequences(bytes)?;
    }
    let fitted = planner.fit_into(room.as_ref().map(|room| room.bytes))?;
    if args.memory.swap.is_some_and(|swap| swap > fitted.options.swap_bytes as u64) {
        let all = human_bytes(fitted.options.swap_bytes as u64);
        tracing::info!("--swap: {all} are enough for all sequences at full length; the rest is not taken");
    }
    let has_shrunk = fitted.options != planner.wanted;
    let limit =
        if has_shrunk { planner.model.plans(planner.wanted)?.beyond_limit(&args.device) } else { None };
    let whose =
        if args.device.split.is_split() { "the --memory-limit of a device" } else { "--memory-limit" };
    let limited = limit.map(|bytes| FreeMemory { bytes, why: whose.into() });
    if let Some(room) = limited.or(room).filter(|_| has_shrunk) {
        tracing::info!(
            "{} are {}: reduced to {} sequences of up to {} tokens and {} of keys and values, to fit",
            human_bytes(room.bytes),
            room.why,
            fitted.options.sequences,
            fitted.options.context,
            human_bytes(fitted.plans.model().get(Category::Kv))
        );
    }
    Ok(fitted)
}

/// Free memory, before there is a runtime; of several GPUs, of the one that has least. Returns `None` if it is unknown,
/// for example if there is no such GPU. The limits of several devices are not part of it.
pub fn room(device: &DeviceArgs, compute: Compute) -> Option<FreeMemory> {
    let of_gpu = |gpu: &DeviceArgs| session::driver(gpu, compute).map(|driver| FreeMemory::of_gpu(&driver));
    let mut room = match device.device() {
        Device::Cpu => FreeMemory::of_host(),
        _ if device.split.is_split() => {
            let room_of = |(rank, member): (usize, &Member)| match member.remote {
                Some(bytes) => {
                    Some(FreeMemory { bytes: bytes?, why: format!("free memory of {}", member.name) })
                }
                None => of_gpu(&device.on_member(rank, member.device)),
            };
            let members = device.split.members().iter().enumerate();
            let rooms: Option<Vec<FreeMemory>> = members.map(room_of).collect();
            rooms?.into_iter().min_by_key(|room| room.bytes)
        }
        _ => of_gpu(device),
    };
    if let Some(limit) = device.limit_of(0).filter(|_| !device.split.is_split())
        && room.as_ref().is_none_or(|room| limit < room.bytes)
    {
        room = Some(FreeMemory { bytes: limit, why: "--memory-limit".into() });
    }
    room
}

/// Turns bounds into plans.
pub struct Planner<'a> {
    args: &'a MemoryArgs,
    model: PlacedModel<'a>,
    /// Bytes of a page of keys and values. [`Planner::state_bytes`] are those of one saved state.
    page_bytes: u64,
    state_bytes: u64,
    /// Bytes of one sequence's recurrent state.
    slot_bytes: u64,
    /// Whether the model is for embeddings. Its requests end with their prompts: there is no answer.
    embeds: bool,
    /// The bounds if memory were unlimited.
    pub wanted: EngineOptions,
}

impl<'a> Planner<'a> {
    /// Makes a small plan to learn the bytes of a page and of a state.
    ///
    /// # Errors
    /// Errors of the plan, or drafts without an MTP head.
    pub fn new(
        args: &'a MemoryArgs,
        subject: &'a Subject<'a>,
        device: &'a DeviceArgs,
        base: EngineOptions,
        step_tokens: usize,
    ) -> Result<Planner<'a>> {
        let context = args.context.unwrap_or(subject.config.context_max.min(CONTEXT_DEFAULT));
        let context = context_for(&subject.config, context).context("--context")?;
        let has_head = subject.config.mtp_layers > 0;
        let is_gpu = device.device() != Device::Cpu;
        let drafts = match args.drafts {
            _ if !has_head => 0,
            Some(drafts) => usize::from(drafts),
            // As `auto` of `--speculate`: steps of different answers overlap only in an engine without drafts.
            None if is_gpu && device.split.waits_for_steps() => 0,
            None if device.split.is_split() => DRAFTS_FEW,
            None => drafts_max(Some(SpeculationOptions::default()), device.device()),
        };
        let sequences = args.sequences.unwrap_or(default_sequences(is_gpu));
        let pooling = args.pooling.or(subject.pooling);
        let row_hidden = pooling.unwrap_or_default() == Pooling::Mean;
        let vision = args.vision(subject, step_tokens)?;
        let early_steps = EarlySteps::All;
        let base = EngineOptions { context, sequences, drafts, row_hidden, vision, early_steps, ..base };
        let mut planner = Planner {
            args,
            model: subject.on(device),
            page_bytes: 1,
            state_bytes: 0,
            slot_bytes: 0,
            embeds: pooling.is_some(),
            wanted: base,
        };
        let one = match planner.probe() {
            // The config may name an MTP head that the checkpoint lacks.
            Err(error) if matches!(error.downcast_ref(), Some(Error::Engine(EngineError::NoMtpHead))) => {
                planner.wanted.drafts = 0;
                planner.probe()?
            }
            one => one?,
        };
        if args.drafts.is_some_and(|drafts| drafts > 0) && planner.wanted.drafts == 0 {
            return Err(usage("--drafts: this model has no multi-token-prediction head"));
        }
        planner.page_bytes = one.get(Category::Kv).max(1);
        planner.slot_bytes = one.get(Category::Recurrent);
        planner.state_bytes = one.get(Category::Checkpoints);
        planner.wanted = planner.defaults(&one, is_gpu)?;
        Ok(planner)
    }

    /// A quick plan for one page, one state and one sequence. Its bytes of steps are not used.
    fn probe(&self) -> Result<MemoryReport> {
        let one = EngineOptions { checkpoints: 1, pool_pages: Some(1), sequences: 1, ..self.wanted };
        self.model.plan(EngineOptions { largest_steps: true, ..one })
    }

    /// The bytes of keys and values for these bounds, as in `--kv-cache`.
    pub fn kv_bytes(&self, options: &EngineOptions) -> u64 {
        self.page_bytes * options.pool_pages.unwrap_or(0) as u64
    }

    /// Sets the numbers of pages and states: those requested, or defaults for the model and the device.
    fn defaults(&self, one: &MemoryReport, is_gpu: bool) -> Result<EngineOptions> {
        let (args, base) = (self.args, self.wanted);
        let suits = |bytes: u64| if is_gpu { bytes } else { bytes.min(one.get(Category::Weights)) };
        let pages_of = |bytes: u64| (bytes / self.page_bytes) as usize;
        let pages = match args.kv_cache {
            _ if args.whole_contexts => all_pages(&base),
            Some(bytes) if pages_of(bytes) > POOL_PAGES_MAX => {
                return Err(usage(format!(
                    "--kv-cache: {bytes} bytes are {} pages of {} bytes; a pool has {POOL_PAGES_MAX} at most",
                    pages_of(bytes),
                    self.page_bytes
                )));
            }
            Some(bytes) => pages_of(bytes),
            None => {
                let most = POOL_TOKENS_DEFAULT.div_ceil(AttentionSpec::PAGE);
                let suitable = pages_of(suits(self.page_bytes * most as u64));
                suitable.max(base.context.div_ceil(AttentionSpec::PAGE))
            }
        };
        let prefix_states = args.prefix_states.unwrap_or(suits(PREFIX_STATES_DEFAULT));
        let remembered = (prefix_states / self.state_bytes.max(1)).min(COUNT_MAX as u64) as usize;
        Ok(self.complete(base, pages, remembered))
    }

    /// Takes more sequences than the default, with [`TOKENS_EACH`] for each, if such a plan fits. A number that is
    /// given stays, and gets as many tokens for each. The plan may take half of `room`, which leaves the rest to other
    /// programs, or all of it if the memory has a limit.
    ///
    /// # Errors
    /// Errors of the plan.
    pub fn take_more_sequences(&mut self, room: u64) -> Result<()> {
        if self.embeds {
            return Ok(());
        }
        let room = if self.model.device.is_limited() { room } else { room / 2 };
        let pages = self.wanted.pool_pages.unwrap_or(0);
        let remembered = self.wanted.checkpoints.saturating_sub(self.wanted.sequences);
        let pages_each = TOKENS_EACH.min(self.wanted.context).div_ceil(AttentionSpec::PAGE);
        let given = self.args.sequences;
        let numbers = given.as_ref().map_or(&SEQUENCES_OF_A_GPU[..], std::slice::from_ref);
        for &sequences in numbers {
            let suitable = pages.max(sequences.saturating_mul(pages_each));
            if suitable > pages && self.args.kv_cache.is_some() {
                continue;
            }
            let more = self.complete(EngineOptions { sequences, ..self.wanted }, suitable, remembered);
            if more == self.wanted || self.fits(more, room)? {
                self.wanted = more;
                break;
            }
        }
        Ok(())
    }

    /// Whether a plan takes no more than `room` on a device, and no more than the host has.
    fn fits(&self, options: EngineOptions, room: u64) -> Result<bool> {
        let plans = self.model.plans(EngineOptions { largest_steps: true, ..options })?;
        let of_host = on_host(&plans.model(), plans.is_gpu);
        let host_has_room = || FreeMemory::of_host().is_none_or(|host| of_host <= host.bytes);
        let is_beyond_limit = plans.beyond_limit(self.model.device).is_some();
        Ok(!is_beyond_limit && plans.needed() <= room && host_has_room())
    }

    /// Sets the numbers of pages and of remembered states, and all bounds that depend on them. Requested pages are all
    /// taken: those that no sequence needs keep remembered prefixes. Otherwise there are no more than sequences need.
    fn complete(&self, base: EngineOptions, pages: usize, remembered: usize) -> EngineOptions {
        let reuses = !self.args.no_prefix_reuse && self.state_bytes > 0;
        let most = if self.args.kv_cache.is_some() { pages } else { all_pages(&base) };
        let pages = pages.min(most).max(1);
        let mut options = EngineOptions {
            pool_pages: Some(pages),
            checkpoints: if reuses { remembered + base.sequences } else { 0 },
            swap_bytes: 0,
            ..base
        };
        if self.args.overcommit {
            options.swap_bytes = self.swap_bytes(&options);
        }
        options
    }

    /// Bytes of host memory for parked sequences. More than all keys, values and states would be unused.
    fn swap_bytes(&self, options: &EngineOptions) -> usize {
        let pages = options.pool_pages.unwrap_or(0) as u64;
        let all = self.page_bytes * pages + self.slot_bytes * options.sequences as u64;
        self.args.swap.map_or(all, |asked| asked.min(all)) as usize
    }

    /// Reduces bounds that were not given until the plan fits into `room` bytes, in this order: drafts, remembered
    /// states, pages beyond one full-length sequence, sequences, context.
    ///
    /// # Errors
    /// Errors of the plan.
    pub fn fit_into(&self, room: Option<u64>) -> Result<ServerPlan> {
        let mut options = self.wanted;
        loop {
            let plans = self.model.plans(options)?;
            let is_within = plans.beyond_limit(self.model.device).is_none();
            if is_within && room.is_none_or(|room| plans.needed() <= room) {
                return Ok(ServerPlan { options, plans });
            }
            match self.smaller(options) {
                Some(smaller) => options = smaller,
                // Nothing can be reduced further. The plan of the wanted bounds is returned, and will be refused with
                // its numbers.
                None => {
                    return Ok(ServerPlan { options: self.wanted, plans: self.model.plans(self.wanted)? });
                }
            }
        }
    }

    /// The next smaller bounds. Only bounds that were not given change.
    fn smaller(&self, options: EngineOptions) -> Option<EngineOptions> {
        let args = self.args;
        let (pages, one_full) =
            (options.pool_pages.unwrap_or(1), options.context.div_ceil(AttentionSpec::PAGE));
        let remembered = options.checkpoints.saturating_sub(options.sequences);
        if args.drafts.is_none() && options.drafts > DRAFTS_FEW {
            return Some(EngineOptions { drafts: DRAFTS_FEW, ..options });
        }
        if args.prefix_states.is_none() && remembered > 0 {
            return Some(self.complete(options, pages, remembered / 2));
        }
        if args.kv_cache.is_none() && pages > one_full {
            return Some(self.complete(options, (pages / 2).max(one_full), remembered));
        }
        if args.sequences.is_none() && options.sequences > 1 {
            let fewer = EngineOptions { sequences: options.sequences / 2, ..options };
            return Some(self.complete(fewer, pages, remembered));
        }
        if args.context.is_none() && options.context / 2 >= CONTEXT_MIN {
            let shorter = (options.context / 2).next_multiple_of(AttentionSpec::PAGE);
            let pages = if args.kv_cache.is_none() { shorter.div_ceil(AttentionSpec::PAGE) } else { pages };
            return Some(self.complete(EngineOptions { context: shorter, ..options }, pages, remembered));
        }
        None
    }
}

/// Pages of all sequences at full length.
fn all_pages(options: &EngineOptions) -> usize {
    options.sequences * options.context.div_ceil(AttentionSpec::PAGE)
}

/// The default number of sequences before memory is looked at: [`SEQUENCES_DEFAULT`] on a GPU, one per core on a CPU,
/// within bounds.
fn default_sequences(is_gpu: bool) -> usize {
    let cores = std::thread::available_parallelism().map_or(SEQUENCES_MIN, usize::from);
    if is_gpu { SEQUENCES_DEFAULT } else { cores.clamp(SEQUENCES_MIN, SEQUENCES_DEFAULT) }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::ShapeArgs;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        device: DeviceArgs,
        #[command(flatten)]
        memory: MemoryArgs,
        #[command(flatten)]
        shape: ShapeArgs,
    }

    /// Sequences and tokens of keys and values of a server on a GPU with `room` GiB of free memory.
    fn taken(room: u64, options: &[&str]) -> (usize, usize) {
        let shape = ["keel", "--device", "cuda:0", "--shape", "qwen3.5-4b", "--bits", "4"];
        let Arguments { device, memory, shape } = Arguments::parse_from(shape.iter().chain(options));
        let subject = shape.subject(false).expect("a shape");
        let mut planner =
            Planner::new(&memory, &subject, &device, EngineOptions::default(), 512).expect("planned");
        planner.take_more_sequences(room << 30).expect("planned");
        (planner.wanted.sequences, planner.wanted.pool_pages.unwrap_or(0) * AttentionSpec::PAGE)
    }

    #[test]
    fn a_pipeline_of_gpus_drafts_only_if_it_is_asked_to() {
        let drafts = |options: &[&str]| {
            let shape = ["keel", "--shape", "qwen3.5-4b", "--bits", "4"];
            let Arguments { device, memory, shape } = Arguments::parse_from(shape.iter().chain(options));
            let subject = shape.subject(true).expect("a shape");
            let planner = Planner::new(&memory, &subject, &device, EngineOptions::default(), 512);
            planner.expect("planned").wanted.drafts
        };
        assert_eq!(drafts(&["--devices", "cuda:0,cuda:1"]), 0);
        assert_eq!(drafts(&["--devices", "cuda:0,cuda:1", "--drafts", "3"]), 3);
        assert_eq!(drafts(&["--devices", "cuda:0,cuda:1", "--split", "tensor"]), DRAFTS_FEW);
        assert_eq!(drafts(&["--device", "cuda:0"]), 4);
    }

    #[test]
    fn a_gpu_takes_the_sequences_that_fit_into_half_of_its_memory() {
        assert_eq!(taken(60, &[]), (128, 262_144));
        assert_eq!(taken(40, &[]), (64, 131_072));
        assert_eq!(taken(40, &["--memory-limit", "40Gi"]), (128, 262_144), "all of a limit");
        assert_eq!(taken(16, &[]), (32, 65_536));
        assert_eq!(taken(14, &[]), (16, 65_536));
        // Keys and values that are given have room for 2,048 tokens of each sequence.
        assert_eq!(taken(60, &["--kv-cache", "2Gi"]), (32, 65_536));
        assert_eq!(taken(60, &["--kv-cache", "64Mi"]), (16, 2048));
        // Of a number that is given, keys and values follow.
        assert_eq!(taken(60, &["--sequences", "128"]), (128, 262_144));
        assert_eq!(taken(30, &["--sequences", "128"]), (128, 65_536));
        assert_eq!(taken(60, &["--sequences", "8"]), (8, 65_536));
        assert_eq!(taken(60, &["--context", "1024"]), (128, 131_072));
        assert_eq!(taken(60, &["--pooling", "last"]), (16, 65_536), "no answers");
    }
}

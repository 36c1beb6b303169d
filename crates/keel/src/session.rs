//! Plans, checks and loads a model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use evenkeel::{
    DriverMemory, FreeMemory, ModelFiles, bound, is_vision, machine, on_device, on_host, place, room_on_gpu,
};
use indicatif::ProgressBar;
use keel_array::{Backend, Category, Compute, MemoryReport, Runtime};
use keel_engine::plan::plan_seeing_on;
use keel_engine::split::PlacedPart;
use keel_engine::{Depth, Engine, EngineError, EngineOptions, SpeculationOptions};
use keel_models::loading::Parameters;
use keel_models::{HybridConfig, Part};
use serde_json::Value;

use crate::args::{Device, DeviceArgs, drafts_max};
use crate::progress;
use crate::report::Memory;
use crate::split_model::{self, DevicePlan};

/// A loaded engine, with its plan and load time.
pub struct Session {
    /// The model, ready to run.
    pub engine: Engine,
    /// The engine's memory according to the plan.
    pub planned: MemoryReport,
    /// The plan of each device, where several share the model.
    pub devices: Vec<DevicePlan>,
    /// Time to read and pack the weights.
    pub load_time: Duration,
}

impl Session {
    /// Plans the memory, compares the plan with the memory limit and the free memory, and then loads into `runtime`,
    /// which is made by [`runtime`]. Nothing is loaded or allocated before the checks. On a GPU a requested limit
    /// replaces the free memory of the GPU.
    ///
    /// # Errors
    /// Errors of the plan or of loading, or a plan above the limit.
    pub fn open(
        device: &DeviceArgs,
        runtime: &Runtime,
        parameters: &dyn Parameters,
        config: &Value,
        options: EngineOptions,
    ) -> Result<Session> {
        let options = device.options().engine_options(options);
        let plans = plan_apart(device, parameters, config, options)?;
        bound(&device.options(), runtime, &plans.model, &options)?;
        plans.check_host(&options)?;
        device.announce();
        let planned = plans.total();
        let tower = device.tower()?.filter(|_| plans.tower.is_some());
        let tower = tower.map(|tower| tower.runtime(options.compute)).transpose()?;
        let start = Instant::now();
        let bar = progress::bytes("loading", planned.get(Category::Weights));
        let devices = [PlacedPart::whole(runtime.clone())];
        let tower = tower.as_ref();
        let step = |bytes| bar.inc(bytes);
        let engine = Engine::load_with_tower_on(&devices, tower, parameters, config, options, &step);
        bar.finish_and_clear();
        let (mut engine, devices) = (engine?, plans.devices(device));
        engine.name_devices(devices.iter().map(|plan| plan.name.clone()).collect());
        Ok(Session { engine, planned, devices, load_time: start.elapsed() })
    }

    /// As [`Session::open`], on the device or on the several that share the model.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn start(
        device: &DeviceArgs,
        parameters: &dyn Parameters,
        config: &Value,
        options: EngineOptions,
    ) -> Result<Session> {
        if device.split.is_split() {
            return split_model::open(device, parameters, config, options);
        }
        Session::open(device, &runtime(device, options.compute)?, parameters, config, options)
    }

    /// As [`Session::open`], for a checkpoint.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn load(device: &DeviceArgs, model: &ModelFiles, options: EngineOptions) -> Result<Session> {
        let session = Session::start(device, &*model.parameters(), &model.json, options)?;
        let vision = model.tensors().names().filter(|name| is_vision(name)).count();
        if vision > 0 && options.vision.is_none() {
            tracing::info!("{vision} tensors of the vision tower are not loaded: there are no pictures");
        }
        Ok(session)
    }

    /// Prepares everything in advance, so that no request waits for it.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn make_ready(&mut self) -> Result<()> {
        let start = Instant::now();
        self.engine.make_ready(&mut shown())?;
        tracing::info!("prepared in {:.1} s", start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Prepares the steps of answers in advance, if there may be drafts.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn make_rounds_ready(&mut self) -> Result<()> {
        Ok(self.engine.make_rounds_ready(&mut shown())?)
    }

    /// The current memory report.
    pub fn memory(&self) -> Memory {
        let devices = self.devices.iter().map(|plan| (plan.name.as_str(), plan.planned));
        Memory::measure(self.planned, self.engine.runtimes(), devices)
    }
}

/// Shows how far the preparation of programs has come.
fn shown() -> impl FnMut(&'static str, usize, usize) {
    let mut bar: Option<(&'static str, ProgressBar)> = None;
    move |what, done, all| {
        let (_, bar) = match bar.take_if(|(of, _)| *of == what) {
            Some(same) => bar.insert(same),
            None => bar.insert((what, progress::programs(what, all))),
        };
        bar.set_position(done as u64);
    }
}

/// Releases memory after a model was loaded: the files, the code that loaded them, and free heap. The heap matters
/// because a vocabulary in file form takes several times the memory of the tokenizer.
pub fn close(model: ModelFiles) {
    drop(model);
    forget();
}

/// Gives back what the allocator keeps and code that has run.
pub fn forget() {
    keel_cpu::process::heap::give_back_free();
    keel_cpu::process::code::give_back();
}

/// Releases memory that a prompt needs but the tokens after it do not: most of the arenas, free blocks of the heap, and
/// code. It is taken again for the next prompt.
pub fn release_idle_memory(runtimes: &[Runtime]) {
    runtimes.iter().for_each(Runtime::release_idle_memory);
    keel_cpu::process::heap::give_back_free();
    keel_cpu::process::code::give_back();
}

/// A runtime on the device, with its memory limit.
///
/// # Errors
/// The device is not available, or there are several.
pub fn runtime(device: &DeviceArgs, compute: Compute) -> Result<Runtime> {
    device.check()?;
    device.split.refuse()?;
    Ok(device.options().runtime(compute)?)
}

/// A runtime on a backend of the device, with the device's memory limit.
pub fn runtime_on(backend: Arc<dyn Backend>, device: &DeviceArgs) -> Runtime {
    device.options().runtime_on(backend)
}

/// Chooses the device if it is `auto`, and returns the options for it. `options` returns those for a device, because
/// drafts depend on it.
///
/// # Errors
/// Errors of `options`.
pub fn resolve_options(
    device: &DeviceArgs,
    parameters: &dyn Parameters,
    config: &Value,
    options: impl Fn(Device) -> Result<EngineOptions>,
) -> Result<EngineOptions> {
    if device.is_open() {
        let placed = place(|gpu| plan(&device.on(gpu), parameters, config, options(gpu)?));
        device.choose(placed.device, placed.why);
    }
    Ok(device.options().engine_options(options(device.device())?))
}

/// How a run is planned to fit.
#[derive(Debug)]
pub struct ResolvedOptions {
    /// The options of the engine.
    pub options: EngineOptions,
    /// How the run drafts, if it does.
    pub speculation: Option<SpeculationOptions>,
}

/// As [`resolve_options`], for a run that drafts as `speculation` says. If the depth is `auto` and only a plan without
/// drafts fits on the GPU, the run does not draft.
///
/// # Errors
/// Errors of the plan.
pub fn resolve_drafting(
    device: &DeviceArgs,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
    speculation: Option<SpeculationOptions>,
) -> Result<ResolvedOptions> {
    let options_with = |how, gpu| EngineOptions { drafts: drafts_max(how, gpu), ..options };
    let plan_with = |how, gpu| plan(&device.on(gpu), parameters, config, options_with(how, gpu));
    let is_auto = speculation.is_some_and(|how| how.depth == Depth::Auto);
    let mut how = speculation;
    if device.is_open() {
        let mut placed = place(|gpu| plan_with(how, gpu));
        if is_auto && placed.device == Device::Cpu {
            let plain = place(|gpu| plan_with(None, gpu));
            if plain.device != Device::Cpu {
                (placed, how) = (plain, None);
            }
        }
        device.choose(placed.device, placed.why);
    }
    if let (true, Some(_), Device::Cuda(gpu)) = (is_auto, how, device.device()) {
        let planned = plan_with(how, device.device())?;
        let fits = match device.limit_of(0) {
            Some(limit) => planned.total() <= limit,
            None => room_on_gpu(machine(), gpu).is_none_or(|room| on_device(&planned, true) <= room),
        };
        how = how.filter(|_| fits);
    }
    if speculation.is_some() && how.is_none() {
        tracing::info!(
            "--speculate auto is off: the plan with drafts does not fit on {}",
            device.device_name()
        );
    }
    let options = device.options().engine_options(options_with(how, device.device()));
    Ok(ResolvedOptions { options, speculation: how })
}

/// The name of a vision tower's own device in reports.
const TOWER_NAME: &str = "cpu (vision)";

/// The plan of a model on one device, and of its vision tower if that is on another.
pub struct Plans {
    /// Bytes on the model's device.
    pub model: MemoryReport,
    /// Bytes of the tower, which is on the CPU.
    pub tower: Option<MemoryReport>,
}

impl Plans {
    /// The sums of both.
    pub fn total(&self) -> MemoryReport {
        [self.model].into_iter().chain(self.tower).sum()
    }

    /// The devices with their names, if there are two.
    pub fn devices(&self, device: &DeviceArgs) -> Vec<DevicePlan> {
        let Some(tower) = self.tower else { return Vec::new() };
        let of = |name: String, planned| DevicePlan { name, part: Part::default(), planned };
        vec![of(device.device_name(), self.model), of(TOWER_NAME.into(), tower)]
    }

    /// Compares the bytes of the tower and the model's bytes on the host with the host's free memory.
    fn check_host(&self, options: &EngineOptions) -> Result<()> {
        let (Some(tower), Some(host)) = (self.tower, FreeMemory::of_host()) else { return Ok(()) };
        if on_host(&self.model, true) + tower.total() <= host.bytes {
            return Ok(());
        }
        Err(split_model::too_little(&tower, host.bytes, host.why, options))
    }
}

/// As [`plan`], on a single device, with the bytes of a vision tower that is not on it.
///
/// # Errors
/// As [`evenkeel::plan`].
pub fn plan_apart(
    device: &DeviceArgs,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<Plans> {
    let options = device.options().engine_options(options);
    let Some(tower) = device.tower()?.filter(|_| options.vision.is_some()) else {
        let model = evenkeel::plan(&device.options(), parameters, config, options)?;
        return Ok(Plans { model, tower: None });
    };
    let model = PlacedPart::whole(device.planning_backend(options.compute));
    let tower = tower.planning_backend(options.compute);
    let planned = plan_seeing_on(&[model], Some(&tower), parameters, config, options);
    match planned.map_err(evenkeel::Error::from)?[..] {
        [model, tower] => Ok(Plans { model, tower: Some(tower) }),
        ref other => unreachable!("two devices have {} plans", other.len()),
    }
}

/// Plans the bytes per category, on all devices that share the model. No weight is read. The bytes of a vision tower on
/// a device of its own are not part of it: see [`plan_apart`].
///
/// # Errors
/// As [`evenkeel::plan`] and [`split_model::plan_devices`].
pub fn plan(
    device: &DeviceArgs,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<MemoryReport> {
    if device.split.is_split() {
        let plans = split_model::plan_devices(device, parameters, config, options)?;
        return Ok(plans.iter().map(|plan| plan.planned).sum());
    }
    Ok(plan_apart(device, parameters, config, options)?.model)
}

/// Memory of the device's driver before a model is loaded. `None` on the CPU, or if there is no such GPU.
pub fn driver(device: &DeviceArgs, compute: Compute) -> Option<DriverMemory> {
    if device.device() == Device::Cpu {
        return None;
    }
    DriverMemory::measure(&runtime(device, compute).ok()?)
}

/// Refuses ids outside the vocabulary, before anything is loaded.
///
/// # Errors
/// The first id out of range.
pub fn check_ids(config: &HybridConfig, ids: &[u32]) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= config.vocab) {
        Some(&id) => Err(EngineError::TokenId { id, vocab: config.vocab }.into()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        device: DeviceArgs,
    }

    /// What is settled for the built-in model on a GPU whose memory has this limit.
    fn settled(limit: u64, depth: Depth) -> ResolvedOptions {
        let limit = format!("--memory-limit={limit}");
        let Arguments { device } = Arguments::parse_from(["keel", "--device", "cuda:0", &limit]);
        let model = ModelFiles::built_in().expect("it is in the program");
        let how = Some(SpeculationOptions { depth, ..SpeculationOptions::default() });
        let parameters = model.parameters();
        resolve_drafting(&device, &*parameters, &model.json, EngineOptions::default(), how)
            .expect("it is planned")
    }

    #[test]
    fn auto_is_off_where_the_plan_fits_only_without_drafts() {
        let model = ModelFiles::built_in().expect("it is in the program");
        let Arguments { device } = Arguments::parse_from(["keel", "--device", "cuda:0"]);
        let bytes = |drafts| {
            let options = EngineOptions { drafts, ..EngineOptions::default() };
            plan(&device, &*model.parameters(), &model.json, options).expect("it is planned").total()
        };
        let (with, without) =
            (bytes(drafts_max(Some(SpeculationOptions::default()), Device::Cuda(0))), bytes(0));
        assert!(without < with);
        let ResolvedOptions { options, speculation } = settled(with, Depth::Auto);
        assert!(options.drafts > 0 && speculation.is_some());
        for limit in [with - 1, without] {
            let ResolvedOptions { options, speculation } = settled(limit, Depth::Auto);
            assert_eq!((options.drafts, speculation), (0, None));
        }
        let ResolvedOptions { options, speculation } = settled(without, Depth::Fixed(2));
        assert!(
            options.drafts == 2 && speculation.is_some(),
            "a number insists, and the plan is refused later"
        );
    }
}

//! Plans, checks and loads a model.

use keel_array::{AttentionSpec, MemoryReport, Runtime};
use keel_engine::split::PlacedPart;
use keel_engine::{Engine, EngineOptions};
use keel_models::HybridConfig;
use keel_models::loading::Parameters;
use serde_json::Value;

use crate::free_memory::{FreeMemory, on_device, on_host};
use crate::{DeviceOptions, Error, ModelFiles, Result, place};

/// Default context, unless the model's own is shorter.
const CONTEXT_DEFAULT: usize = 4096;

/// How a model is loaded. All its memory follows from these bounds.
///
/// ```
/// use evenkeel::{LoadOptions, engine::EngineOptions};
/// let engine = EngineOptions { sequences: 4, ..EngineOptions::default() };
/// let options = LoadOptions { context: Some(1024), engine, ..LoadOptions::default() };
/// let files = evenkeel::ModelFiles::built_in()?;
/// let one = LoadOptions { context: Some(1024), ..LoadOptions::default() };
/// assert!(files.plan(&options)?.total() > files.plan(&one)?.total(), "each sequence takes memory");
/// # Ok::<(), evenkeel::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// The device; by default the first GPU on which the plan fits, else the CPU.
    pub device: DeviceOptions,
    /// Tokens of the longest sequence, prompt and answer together; by default 4096, or the model's own context if that
    /// is shorter.
    pub context: Option<usize>,
    /// Further bounds, such as the number of sequences. Its `context` is not used: [`LoadOptions::context`] is.
    pub engine: EngineOptions,
}

impl LoadOptions {
    /// The engine's options for a model.
    ///
    /// # Errors
    /// [`Error::Context`] if the model's context is shorter.
    ///
    /// ```
    /// use evenkeel::{LoadOptions, ModelFiles};
    /// let options = LoadOptions { context: Some(1000), ..LoadOptions::default() };
    /// assert_eq!(options.engine_options(&ModelFiles::built_in()?.config)?.context, 1024, "whole pages");
    /// # Ok::<(), evenkeel::Error>(())
    /// ```
    pub fn engine_options(&self, config: &HybridConfig) -> Result<EngineOptions> {
        let wanted = self.context.unwrap_or(config.context_max.min(CONTEXT_DEFAULT));
        let engine = EngineOptions { context: context_for(config, wanted)?, ..self.engine };
        Ok(self.device.engine_options(engine))
    }
}

/// The context for `tokens` tokens, rounded up to whole pages of the cache. Pages cannot be split.
///
/// # Errors
/// [`Error::Context`] if the model's context is shorter.
///
/// ```
/// let config = evenkeel::ModelFiles::built_in()?.config;
/// assert_eq!(evenkeel::context_for(&config, 257)?, 512);
/// assert!(evenkeel::context_for(&config, 1 << 20).is_err());
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub fn context_for(config: &HybridConfig, tokens: usize) -> Result<usize> {
    let context_max = config.context_max;
    if tokens > context_max {
        return Err(Error::Context { tokens, context_max });
    }
    Ok(tokens.max(1).next_multiple_of(AttentionSpec::PAGE).min(context_max))
}

/// The device, the options and the plan of a load, once its device is chosen.
pub(crate) struct PlacedLoad {
    pub device: DeviceOptions,
    /// The engine of the plan, without memory.
    pub engine: Engine,
    pub planned: MemoryReport,
    /// Why this device was chosen, if the options left the choice open.
    pub placement: Option<String>,
}

impl PlacedLoad {
    pub(crate) fn new(files: &ModelFiles, options: &LoadOptions) -> Result<PlacedLoad> {
        let bounds = options.engine_options(&files.config)?;
        let (parameters, mut device) = (files.parameters(), options.device.clone());
        // The order of sums depends on the device.
        let plan_on = |device: &DeviceOptions| {
            let bounds = device.engine_options(bounds);
            let backend = PlacedPart::whole(device.planning_backend(bounds.compute));
            keel_engine::plan::engine(&[backend], None, &*parameters, &files.json, bounds)
        };
        let bytes_of = |engine: &Engine| keel_engine::plan::bytes_of(engine).into_iter().sum();
        let mut placement = None;
        if device.device.is_none() {
            let placed = place(|gpu| {
                let candidate = DeviceOptions { device: Some(gpu), ..device.clone() };
                plan_on(&candidate).map(|engine| bytes_of(&engine))
            });
            device.device = Some(placed.device);
            placement = Some(placed.why);
        }
        let engine = plan_on(&device)?;
        Ok(PlacedLoad { device, planned: bytes_of(&engine), engine, placement })
    }
}

/// Plans the bytes of every category for an engine. No weight is read. [`crate::ModelFiles::plan`] is the short form.
///
/// # Errors
/// As [`keel_engine::plan::plan`].
///
/// ```
/// use evenkeel::{DeviceOptions, ModelFiles, engine::EngineOptions};
/// let files = ModelFiles::built_in()?;
/// let options = EngineOptions::default();
/// let planned = evenkeel::plan(&DeviceOptions::default(), &*files.parameters(), &files.json, options)?;
/// assert!(planned.total() > 0);
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub fn plan(
    device: &DeviceOptions,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<MemoryReport> {
    let backend = device.planning_backend(options.compute);
    Ok(keel_engine::plan::plan(&backend, parameters, config, options)?)
}

/// Compares a plan with the device's limit, and with the free memory of device and host. Then limits the runtime's
/// memory: to the device's limit, or on a GPU without one to its free memory. Call it before anything is loaded.
///
/// # Errors
/// [`Error::OutOfMemory`] if the plan does not fit.
///
/// ```
/// use evenkeel::{DeviceOptions, Error, LoadOptions, ModelFiles, check_and_limit};
/// let (files, options) = (ModelFiles::built_in()?, LoadOptions::default());
/// let planned = files.plan(&options)?;
/// let engine = options.engine_options(&files.config)?;
/// let runtime = options.device.runtime(engine.compute)?;
/// check_and_limit(&options.device, &runtime, &planned, &engine)?;
/// let small = DeviceOptions { memory_limit: Some(planned.total() - 1), ..options.device };
/// assert!(matches!(check_and_limit(&small, &runtime, &planned, &engine), Err(Error::OutOfMemory(_))));
/// # Ok::<(), evenkeel::Error>(())
/// ```
pub fn check_and_limit(
    device: &DeviceOptions,
    runtime: &Runtime,
    planned: &MemoryReport,
    options: &EngineOptions,
) -> Result<()> {
    let is_gpu = device.is_gpu();
    if let Some(bytes) = device.memory_limit {
        let room = FreeMemory { bytes, why: "the memory limit".into() };
        room.check(planned.total(), planned, options)?;
    }
    if let Some(host) = FreeMemory::of_host() {
        host.check(on_host(planned, is_gpu), planned, options)?;
    }
    let of_gpu = FreeMemory::of(runtime).filter(|_| is_gpu);
    if let Some(room) = &of_gpu {
        room.check(on_device(planned, is_gpu), planned, options)?;
    }
    let free = of_gpu.map(|room| room.bytes + planned.on_host());
    runtime.ledger().set_limit(device.memory_limit.or(free));
    Ok(())
}

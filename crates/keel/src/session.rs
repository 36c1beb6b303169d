//! Plans, checks and loads a model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use indicatif::ProgressBar;
use keel_array::{AttentionSpec, Backend, Category, Compute, MemoryReport, Runtime, RuntimeOptions};
use keel_engine::{Engine, EngineError, EngineOptions};
use keel_models::HybridConfig;
use keel_models::loading::Parameters;
use serde_json::Value;

use crate::args::{Device, DeviceArgs};
use crate::driver::Driver;
use crate::free::{self, Room};
use crate::progress;
use crate::report::{Memory, human_bytes};
use crate::source::Model;

/// A loaded engine, with its plan and load time.
pub struct Session {
    /// The model, ready to run.
    pub engine: Engine,
    /// The engine's memory according to the plan.
    pub planned: MemoryReport,
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
        let planned = plan(device, parameters, config, options)?;
        let limit = check(device, runtime, &planned, &options)?;
        device.announce();
        runtime.ledger().set_limit(limit);
        let start = Instant::now();
        let bar = progress::bytes("loading", planned.get(Category::Weights));
        let engine = Engine::load(runtime, parameters, config, options, &|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        Ok(Session { engine: engine?, planned, load_time: start.elapsed() })
    }

    /// As [`Session::open`], for a checkpoint.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn load(device: &DeviceArgs, model: &Model, options: EngineOptions) -> Result<Session> {
        let session = Session::open(
            device,
            &runtime(device, options.compute)?,
            &*model.parameters(),
            &model.json,
            options,
        )?;
        let vision = model.tensors().names().filter(|name| is_vision(name)).count();
        if vision > 0 && options.vision.is_none() {
            tracing::info!("{vision} tensors of the vision tower are skipped: there are no pictures");
        }
        Ok(session)
    }

    /// Prepares everything in advance, so that no request waits for it.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn make_ready(&mut self) -> Result<()> {
        let start = Instant::now();
        let mut bar: Option<(&'static str, ProgressBar)> = None;
        let outcome = self.engine.make_ready(&mut |what, done, all| {
            let (_, bar) = match bar.take_if(|(of, _)| *of == what) {
                Some(same) => bar.insert(same),
                None => bar.insert((what, progress::programs(what, all))),
            };
            bar.set_position(done as u64);
        });
        drop(bar);
        tracing::info!("prepared in {:.1} s", start.elapsed().as_secs_f64());
        Ok(outcome?)
    }

    /// The current memory report.
    pub fn memory(&self) -> Memory {
        Memory::measure(self.planned, self.engine.runtime())
    }
}

/// Releases memory after a model was loaded: the files, the code that loaded them, and free heap. The heap matters
/// because a vocabulary in file form takes several times the memory of the tokenizer.
pub fn close(model: Model) {
    drop(model);
    forget();
}

/// Gives back what the allocator keeps and code that has run.
pub fn forget() {
    keel_cpu::heap::give_back_free();
    keel_cpu::code::give_back();
}

/// Releases memory that a prompt needs but the tokens after it do not: most of the arena, free blocks of the heap, and
/// code. It is taken again for the next prompt.
pub fn settle(runtime: &Runtime) {
    runtime.rest();
    keel_cpu::heap::give_back_free();
    keel_cpu::code::give_back();
}

/// A runtime on the device, with its memory limit.
///
/// # Errors
/// The device is not available.
pub fn runtime(device: &DeviceArgs, compute: Compute) -> Result<Runtime> {
    Ok(runtime_on(device.backend(compute)?, device))
}

/// A runtime on a backend of the device, with the device's memory limit.
pub fn runtime_on(backend: Arc<dyn Backend>, device: &DeviceArgs) -> Runtime {
    let options = RuntimeOptions { memory_limit: device.memory_limit, ..RuntimeOptions::default() };
    Runtime::new(backend, options)
}

/// Whether a tensor belongs to the vision part of a checkpoint.
pub fn is_vision(name: &str) -> bool {
    name.split('.').any(|part| part == "visual" || part.starts_with("vision"))
}

/// Plans the bytes per category. No weight is read.
///
/// # Errors
/// As [`keel_engine::plan::plan`].
pub fn plan(
    device: &DeviceArgs,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<MemoryReport> {
    let backend = device.planning_backend(options.compute);
    Ok(keel_engine::plan::plan(&backend, parameters, config, options)?)
}

/// Memory of the device's driver before a model is loaded. `None` on the CPU, or if there is no such GPU.
pub fn driver(device: &DeviceArgs, compute: Compute) -> Option<Driver> {
    if device.device() == Device::Cpu {
        return None;
    }
    Driver::measure(&runtime(device, compute).ok()?)
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

/// The context for `tokens` tokens, rounded up to whole pages of the cache. Pages cannot be split.
///
/// # Errors
/// The model's context is shorter.
pub fn context_for(config: &HybridConfig, tokens: usize) -> Result<usize> {
    let context_max = config.context_max;
    if tokens > context_max {
        bail!("{tokens} tokens are more than the model's context of {context_max} (max_position_embeddings)");
    }
    Ok(tokens.max(1).next_multiple_of(AttentionSpec::PAGE).min(context_max))
}

/// Compares a plan with the requested limit, and with the free memory of device and host. Returns the ledger's limit.
///
/// # Errors
/// The plan does not fit. The message has the numbers.
fn check(
    device: &DeviceArgs,
    runtime: &Runtime,
    planned: &MemoryReport,
    options: &EngineOptions,
) -> Result<Option<u64>> {
    let asked = device.memory_limit;
    if let Some(limit) = asked.filter(|&limit| planned.total() > limit) {
        bail!(too_little_memory(planned, planned.total(), limit, "--memory-limit", options));
    }
    let is_gpu = device.device() != Device::Cpu;
    let host = Room::of_host();
    if let Some(host) = host.filter(|host| free::on_host(planned, is_gpu) > host.bytes) {
        let needed = free::on_host(planned, is_gpu);
        bail!(too_little_memory(planned, needed, host.bytes, &host.why, options));
    }
    if !is_gpu || asked.is_some() {
        return Ok(asked);
    }
    let Some(room) = Room::of(runtime) else { return Ok(None) };
    if free::on_device(planned, is_gpu) > room.bytes {
        bail!(too_little_memory(planned, free::on_device(planned, is_gpu), room.bytes, &room.why, options));
    }
    Ok(Some(room.bytes + planned.get(Category::Swap)))
}

fn too_little_memory(
    planned: &MemoryReport,
    needed: u64,
    limit: u64,
    whose: &str,
    options: &EngineOptions,
) -> String {
    let used = planned.iter().filter(|(_, bytes)| *bytes > 0);
    let parts: Vec<String> = used.map(|(category, bytes)| format!("{category} {bytes}")).collect();
    format!(
        "out of memory: {needed} bytes ({}) are needed for a context of {} and {} sequence(s), which is {} more than the {limit} \
         ({}) of {whose}: {}; keel fit shows what fits: fewer bits, a shorter context, fewer sequences",
        human_bytes(needed),
        options.context,
        options.sequences,
        human_bytes(needed.saturating_sub(limit)),
        human_bytes(limit),
        parts.join(", ")
    )
}

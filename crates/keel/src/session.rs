//! A model in memory: planned, refused or loaded.

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

/// An engine, and what was known before it was made.
pub struct Session {
    /// The model, ready to run.
    pub engine: Engine,
    /// Its memory, as the planning backend counted it.
    pub planned: MemoryReport,
    /// Reading and packing the weights.
    pub load_time: Duration,
}

impl Session {
    /// Plans, compares the plan with the memory limit and with what is free, and loads into a runtime of [`runtime`]. Nothing is
    /// loaded or allocated before. On a GPU the limit asked for stands in place of what is free there.
    ///
    /// # Errors
    /// What the plan says; a plan above the limit; what loading says.
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

    /// Prepares everything that requests would wait for.
    ///
    /// # Errors
    /// What the engine says.
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

    /// The memory report as of now.
    pub fn memory(&self) -> Memory {
        Memory::measure(self.planned, self.engine.runtime())
    }
}

/// Lets go of a model's files once it is loaded, of what the heap has free since, as a vocabulary in a file's form takes
/// several times what the tokenizer keeps of it, and of the code that loaded it.
pub fn close(model: Model) {
    drop(model);
    keel_cpu::heap::give_back_free();
    keel_cpu::code::give_back();
}

/// Lets go of what a prompt needed and the tokens behind it do not: most of the arena, free blocks of the heap, and code. It
/// comes back by itself when there is a prompt again.
pub fn settle(runtime: &Runtime) {
    runtime.rest();
    keel_cpu::heap::give_back_free();
    keel_cpu::code::give_back();
}

/// A runtime on the device, with its memory limit.
///
/// # Errors
/// If the device cannot be had.
pub fn runtime(device: &DeviceArgs, compute: Compute) -> Result<Runtime> {
    Ok(runtime_on(device.backend(compute)?, device))
}

/// A runtime on a backend of the device, with the device's memory limit.
pub fn runtime_on(backend: Arc<dyn Backend>, device: &DeviceArgs) -> Runtime {
    let options = RuntimeOptions { memory_limit: device.memory_limit, ..RuntimeOptions::default() };
    Runtime::new(backend, options)
}

/// Whether a tensor belongs to the part of a checkpoint that reads images.
pub fn is_vision(name: &str) -> bool {
    name.split('.').any(|part| part == "visual" || part.starts_with("vision"))
}

/// Bytes per category, without touching a weight.
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

/// What the driver of the device holds before a model is loaded; `None` on the CPU, and where there is no such GPU.
pub fn driver(device: &DeviceArgs, compute: Compute) -> Option<Driver> {
    if device.device() == Device::Cpu {
        return None;
    }
    Driver::measure(&runtime(device, compute).ok()?)
}

/// Refuses ids that the model does not have, before anything is loaded.
///
/// # Errors
/// The first id out of range.
pub fn check_ids(config: &HybridConfig, ids: &[u32]) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= config.vocab) {
        Some(&id) => Err(EngineError::TokenId { id, vocab: config.vocab }.into()),
        None => Ok(()),
    }
}

/// A context for so many tokens, in whole pages of the cache: a page is taken whole or not at all.
///
/// # Errors
/// If the model was not made for so many.
pub fn context_for(config: &HybridConfig, tokens: usize) -> Result<usize> {
    let context_max = config.context_max;
    if tokens > context_max {
        bail!("{tokens} tokens are more than the model's context of {context_max} (max_position_embeddings)");
    }
    Ok(tokens.max(1).next_multiple_of(AttentionSpec::PAGE).min(context_max))
}

/// Compares a plan with the limit asked for and with what the device and the host have free. Returns the ledger's limit.
///
/// # Errors
/// If it does not fit, with the numbers.
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

//! Checks the plan of a model, and loads the model.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use anyhow::Result;
use evenkeel::{DriverMemory, FreeMemory, ModelFiles, check_and_limit, is_vision};
use indicatif::ProgressBar;
use keel_array::{Category, Compute, MemoryReport, Runtime};
use keel_engine::split::PlacedPart;
use keel_engine::{Engine, EngineError, EngineOptions, LoadProgress};
use keel_models::HybridConfig;

use crate::args::{Device, DeviceArgs};
use crate::placed_model::{DevicePlan, PlacedModel, Plans, choose_device};
use crate::progress;
use crate::report::Memory;
use crate::split_model;

/// A loaded engine, with its plan and load time.
pub struct Session {
    /// The model, ready to run.
    pub engine: Engine,
    /// The engine's memory according to the plan.
    pub planned: MemoryReport,
    /// The plan of each device, where several share the model.
    pub devices: Vec<DevicePlan>,
    /// Time to read and pack the weights, and to compile kernels meanwhile.
    pub load_time: Duration,
}

impl Session {
    /// Plans the memory, compares the plan with the memory limit and the free memory, and then loads into `runtime`,
    /// which is made by [`runtime`]. Nothing is loaded or allocated before the checks. On a GPU a requested limit
    /// replaces the free memory of the GPU.
    ///
    /// # Errors
    /// Errors of the plan or of loading, or a plan above the limit.
    pub fn open(model: PlacedModel<'_>, runtime: &Runtime, options: EngineOptions) -> Result<Session> {
        let device = model.device;
        let options = device.options().engine_options(options);
        let plans = model.plans(options)?;
        check_and_limit(&device.options(), runtime, &plans.model(), &options)?;
        if let Some(tower) = &plans.tower {
            check_host(FreeMemory::of_host(), &plans.model(), tower, &options)?;
        }
        device.announce();
        let tower = device.tower()?.filter(|_| plans.tower.is_some());
        let tower = tower.map(|tower| tower.runtime(options.compute)).transpose()?;
        Session::load_on(&[PlacedPart::whole(runtime.clone())], tower.as_ref(), model, plans)
    }

    /// As [`Session::open`], on the device or on the several that share the model. Chooses the device if it is `auto`
    /// and not chosen yet.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn start(model: PlacedModel<'_>, options: EngineOptions) -> Result<Session> {
        choose_device(model.device, |device| PlacedModel { device, ..model }.plan(options));
        if model.device.split.is_split() {
            return split_model::open(model, options);
        }
        Session::open(model, &runtime(model.device, options.compute)?, options)
    }

    /// As [`Session::start`], for a checkpoint.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn load(device: &DeviceArgs, model: &ModelFiles, options: EngineOptions) -> Result<Session> {
        let session = Session::start(PlacedModel::new(device, &*model.parameters(), &model.json), options)?;
        let vision = model.tensors().names().filter(|name| is_vision(name)).count();
        if vision > 0 && options.vision.is_none() {
            tracing::info!("{vision} tensors of the vision tower are not loaded: there are no pictures");
        }
        Ok(session)
    }

    /// Loads each part of a model into its runtime, after the checks of [`Session::open`].
    ///
    /// # Errors
    /// Errors of loading.
    pub fn load_on(
        devices: &[PlacedPart<Runtime>],
        tower: Option<&Runtime>,
        model: PlacedModel<'_>,
        plans: Plans,
    ) -> Result<Session> {
        let (planned, named) = (plans.total(), plans.several());
        let start = Instant::now();
        let bar = progress::bytes("loading", planned.get(Category::Weights));
        let compiling = RefCell::new(shown());
        let step = |progress| match progress {
            LoadProgress::Read(bytes) => bar.inc(bytes),
            LoadProgress::Compiled { done, all } => {
                bar.finish_and_clear();
                compiling.borrow_mut()("compiling", done, all);
            }
        };
        let PlacedModel { parameters, config, .. } = model;
        let engine = Engine::load_planned(plans.engine, devices, tower, parameters, config, &step);
        bar.finish_and_clear();
        let mut engine = engine?;
        engine.name_devices(named.iter().map(|plan| plan.name.clone()).collect());
        Ok(Session { engine, planned, devices: named, load_time: start.elapsed() })
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

    /// The planned bytes that are charged to each device, by rank.
    pub fn charged(&self) -> Vec<u64> {
        match &self.devices[..] {
            [] => vec![self.planned.total()],
            devices => devices.iter().map(|plan| plan.planned.total()).collect(),
        }
    }

    /// The current memory report.
    pub fn memory(&self) -> Memory {
        Memory::measure(self.planned, self.engine.runtimes(), &self.devices)
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

/// Gives back free memory that the allocator keeps, and code that has run.
pub fn forget() {
    keel_cpu::process::heap::give_back_free();
    keel_cpu::process::code::give_back();
}

/// Releases memory that a prompt needs but the tokens after it do not: most of the arenas, free blocks of the heap, and
/// code. It is taken again for the next prompt.
pub fn release_idle_memory(runtimes: &[Runtime]) {
    runtimes.iter().for_each(Runtime::release_idle_memory);
    forget();
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

/// Compares the bytes of a vision tower on the CPU, and the model's bytes on the host, with the host's free memory.
fn check_host(
    host: Option<FreeMemory>,
    model: &MemoryReport,
    tower: &MemoryReport,
    options: &EngineOptions,
) -> Result<()> {
    let needed = model.on_host() + tower.total();
    let planned = [*model, *tower].into_iter().sum();
    Ok(host.map_or(Ok(()), |host| host.check(needed, &planned, options))?)
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

    /// The message once gave the tower's bytes alone, which may be fewer than the host has.
    #[test]
    fn a_host_without_room_for_the_tower_is_told_what_is_needed() {
        let Arguments { device } = Arguments::parse_from(["keel", "--device", "cuda:0"]);
        let model = ModelFiles::built_in().expect("it is in the program");
        let parameters = model.parameters();
        let options = EngineOptions { swap_bytes: 1 << 20, ..EngineOptions::default() };
        let placed = PlacedModel::new(&device, &*parameters, &model.json);
        let planned = placed.plan(options).expect("it is planned");
        let needed = planned.on_host() + planned.total();
        assert!(planned.on_host() > 0);
        let host = |bytes| Some(FreeMemory { bytes, why: "this host".into() });
        assert!(check_host(host(needed), &planned, &planned, &options).is_ok());
        let error = check_host(host(needed - 1), &planned, &planned, &options).expect_err("too much");
        assert!(error.to_string().contains(&format!("{needed} bytes")), "{error}");
    }
}

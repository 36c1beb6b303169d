//! Compiles kernels while the weights are read.
//!
//! A plan has traced the steps without a weight. The kernels of its programs are those of the engine's own, so a thread
//! compiles them while the weights are read.

use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread;

use keel_array::{Executable, Regime, Runtime};
use keel_models::loading::Parameters;
use serde_json::Value;

use super::Engine;
use crate::Result;
use crate::split::PlacedPart;
use crate::step::{Outcome, StepKind, StepShape};

/// The steps whose kernels are compiled while the weights are read, on a device that compiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlySteps {
    /// All of the list, for an engine that is [made ready](Engine::make_ready).
    All,
    /// Those of a prompt of this many tokens and of its answer. Other steps are compiled at their first run.
    Prompt(usize),
}

impl Default for EarlySteps {
    /// A short prompt.
    fn default() -> EarlySteps {
        EarlySteps::Prompt(64)
    }
}

/// A stage of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadProgress {
    /// This many more bytes of weights are in memory.
    Read(u64),
    /// All weights are in memory, and kernels are compiled.
    Compiled {
        /// How many of them are done.
        done: usize,
        /// How many there are on this device.
        all: usize,
    },
}

/// Runs `load`. If all devices [compile plans](keel_array::Programs::compiles_plans), a thread compiles the early steps
/// of `planned` meanwhile.
///
/// # Errors
/// The error of `load`, or else that of the compilation.
fn compile_while<T>(
    devices: &[PlacedPart<Runtime>],
    planned: Engine,
    progress: &dyn Fn(LoadProgress),
    load: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if !devices.iter().all(|placed| placed.device.backend().compiles_plans()) {
        drop(planned);
        return load();
    }
    let (sender, compiled) = mpsc::channel();
    thread::scope(|scope| {
        let compile = move || -> Result<()> {
            let early = planned.listed(|shape| planned.is_early(shape));
            // The load refuses devices that are not those of the plan.
            for (placed, programs) in devices.iter().zip(&early) {
                let Some(planner) = programs.first().map(|program| program.runtime()) else { continue };
                let mut count = |done, all| _ = sender.send(LoadProgress::Compiled { done, all });
                placed.device.compile_planned(planner, programs, &mut count)?;
            }
            Ok(())
        };
        let Ok(thread) = thread::Builder::new().name("keel-compile".into()).spawn_scoped(scope, compile)
        else {
            return load();
        };
        let loaded = load();
        if loaded.is_ok() {
            compiled.iter().for_each(progress);
        }
        let compiled = thread.join();
        // If the load fails, its error comes after the compilation has ended, whatever came of that.
        let loaded = loaded?;
        compiled.unwrap_or_else(|panicked| resume_unwind(panicked))?;
        Ok(loaded)
    })
}

impl Engine {
    /// As [`Engine::load_on`] with the options of `planned`, the engine of a [plan](crate::plan::engine) for these
    /// devices. While weights are read, a thread compiles the kernels of its [early
    /// steps](crate::EngineOptions::early_steps). They are those of the loaded engine.
    ///
    /// # Errors
    /// As [`Engine::load_on`]; or a kernel does not compile.
    pub fn load_planned(
        planned: Engine,
        devices: &[PlacedPart<Runtime>],
        tower: Option<&Runtime>,
        parameters: &dyn Parameters,
        config: &Value,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<Engine> {
        let options = planned.options;
        compile_while(devices, planned, progress, || {
            let read = |bytes| progress(LoadProgress::Read(bytes));
            Engine::load_on(devices, tower, parameters, config, options, &read)
        })
    }

    /// The programs of these steps of the list on each device, by rank. The lead also has those of a vision tower
    /// without a device of its own.
    pub(super) fn listed(&self, of: impl Fn(&StepShape) -> bool) -> Vec<Vec<&Executable>> {
        let mut listed: Vec<_> = self.steppers().map(|stepper| stepper.listed(&of)).collect();
        if let (None, Some(lead)) = (&self.tower_runtime, listed.last_mut()) {
            lead.extend(self.vision_runner.iter().flat_map(|runner| runner.listed()));
        }
        listed
    }

    /// Whether a step is one of [`crate::EngineOptions::early_steps`].
    fn is_early(&self, shape: &StepShape) -> bool {
        let EarlySteps::Prompt(tokens) = self.options.early_steps else { return true };
        let buckets = self.stepper.buckets();
        let rows = buckets.prefill_rows_max();
        let ends = buckets.fit(StepKind::prefill(Outcome::LastLogits), (tokens.max(1) - 1) % rows + 1, 1);
        let goes_on = StepKind::prefill(Outcome::State).of(rows, 1);
        let shape = StepShape { has_pictures: false, ..*shape };
        match shape.regime {
            Regime::Prefill => shape == ends || shape == goes_on && tokens > rows,
            Regime::Decode => self.options.drafts > 0 || shape.sequences == self.options.sequences,
        }
    }
}

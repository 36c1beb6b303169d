//! The memory plan.
//!
//! A plan counts the allocations of an engine: the code of [`Engine::load`] runs on a backend that only counts. So
//! [`plan`] gives the numbers of [`Engine::load`], exact to the byte.

use std::sync::Arc;

use keel_array::{Backend, MemoryReport, Runtime, RuntimeOptions};
use keel_models::loading::Parameters;
use serde_json::Value;

use crate::split::PlacedPart;
use crate::step::Buckets;
use crate::vision::{self, Passes};
use crate::{Engine, EngineOptions, Result};

/// Bytes per category that an engine with these options will allocate. `backend` must be one that only plans.
///
/// # Errors
/// As [`Engine::load`].
pub fn plan(
    backend: &Arc<dyn Backend>,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<MemoryReport> {
    let devices = [PlacedPart::whole(Arc::clone(backend))];
    Ok(plan_on(&devices, None, parameters, config, options)?.swap_remove(0))
}

/// As [`plan`], of a model with a part on each device, by rank: the bytes of each device. Those of a vision tower on a
/// device of its own are the last.
///
/// # Errors
/// As [`Engine::load_on`].
pub fn plan_on(
    devices: &[PlacedPart<Arc<dyn Backend>>],
    tower: Option<&Arc<dyn Backend>>,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<Vec<MemoryReport>> {
    Ok(bytes_of(&engine(devices, tower, parameters, config, options)?))
}

/// An engine without memory, whose runtimes have the ledgers of the plan. It is for [`bytes_of`] and
/// [`Engine::load_planned`]; it cannot run.
///
/// # Errors
/// As [`Engine::load_on`].
pub fn engine(
    devices: &[PlacedPart<Arc<dyn Backend>>],
    tower: Option<&Arc<dyn Backend>>,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<Engine> {
    let all = devices.iter().map(|placed| &placed.device).chain(tower);
    assert!(all.into_iter().all(|backend| backend.is_planning()), "a plan is made on planning backends");
    let runtime = |backend: &Arc<dyn Backend>| Runtime::new(Arc::clone(backend), RuntimeOptions::default());
    let on_runtime = |PlacedPart { device, part }: &PlacedPart<_>| PlacedPart {
        device: runtime(device),
        part: part.clone(),
    };
    let devices: Vec<_> = devices.iter().map(on_runtime).collect();
    let tower = tower.map(runtime);
    Engine::load_on(&devices, tower.as_ref(), parameters, config, options, &|_| ())
}

/// The planned bytes of each device of an [`engine`], by rank.
pub fn bytes_of(planned: &Engine) -> Vec<MemoryReport> {
    planned.runtimes().map(|runtime| runtime.ledger().active()).collect()
}

/// At most the bytes of [`plan`], in a small part of its time: of the list of steps, only the largest of each kind are
/// traced. Only the bytes of activations and workspace may be fewer, where a smaller step needs more than a larger one.
///
/// # Errors
/// As [`plan`].
pub fn at_least(
    backend: &Arc<dyn Backend>,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<MemoryReport> {
    plan(backend, parameters, config, EngineOptions { largest_steps: true, ..options })
}

/// The shapes of steps of an engine with these options on these devices, and of the passes of its tower, as text. All
/// of them are part of [`plan_on`].
///
/// # Errors
/// Errors of the config.
pub fn steps(
    devices: &[PlacedPart<Arc<dyn Backend>>],
    tower: &dyn Backend,
    config: &Value,
    options: EngineOptions,
) -> Result<Vec<String>> {
    let on = devices.iter().map(|placed| (&*placed.device, &placed.part));
    let vision = vision::config(config, options.vision)?;
    let mut lines = Buckets::for_devices(&options, vision.as_ref(), on).lines();
    if let Some((vision, sizes)) = vision.zip(options.vision) {
        let text = keel_models::read_config(config)?;
        lines.extend(Passes::new(&vision, &text, sizes, tower.is_compiling()).lines());
    }
    Ok(lines)
}

/// The launches of a decode step and of a step of prompts, as text: each kernel with those that it computes inline, and
/// the groups of kernels that the backend runs together.
///
/// # Errors
/// As [`plan`].
pub fn launches(
    backend: &Arc<dyn Backend>,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
) -> Result<Vec<String>> {
    let runtime = Runtime::new(Arc::clone(backend), RuntimeOptions::default());
    Ok(Engine::load(&runtime, parameters, config, options, &|_| ())?.program_lines())
}

/// The largest options that fit within a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Longest context for the options' number of sequences; 0 if nothing fits.
    pub context: usize,
    /// Most sequences with the options' context; 0 if nothing fits.
    pub sequences: usize,
}

/// The longest context and the most sequences that stay within `limit` bytes, each with the other as in `options`.
///
/// # Errors
/// As [`plan`].
pub fn fit(
    backend: &Arc<dyn Backend>,
    parameters: &dyn Parameters,
    config: &Value,
    options: EngineOptions,
    limit: u64,
) -> Result<Fit> {
    // The quick plan is a lower bound. It rules out most sizes without a whole plan.
    let fits = |options: EngineOptions| {
        Ok(at_least(backend, parameters, config, options)?.total() <= limit
            && plan(backend, parameters, config, options)?.total() <= limit)
    };
    let context_max = keel_models::read_config_of(config, parameters)?.context_max.clamp(1, 1 << 24);
    Ok(Fit {
        context: largest(context_max, |context| fits(EngineOptions { context, ..options }))?,
        sequences: largest(4096, |sequences| fits(EngineOptions { sequences, ..options }))?,
    })
}

/// The largest `n` of `1..=max` for which `fits` holds, 0 if none; `fits` must be monotone.
fn largest(max: usize, fits: impl Fn(usize) -> Result<bool>) -> Result<usize> {
    let (mut low, mut high) = (0, max);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle)? {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    Ok(low)
}

#[cfg(test)]
mod tests {
    #[test]
    fn bisection_finds_the_edge() {
        for edge in [0, 1, 7, 99, 100] {
            let found = super::largest(100, |n| Ok(n <= edge)).expect("never fails");
            assert_eq!(found, edge);
        }
    }
}

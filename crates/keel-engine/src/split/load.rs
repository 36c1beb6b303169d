//! Loads the parts of a model.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, ScopedJoinHandle};
use std::{io, mem};

use keel_array::Runtime;
use keel_models::{HybridModel, ModelError};

use super::PlacedPart;
use crate::{EngineError, Result};

/// Loads all parts with `load`, which reports the bytes of each weight, as `progress` does for all of them. It ends
/// with [`ModelError::Stopped`] soon after its flag is set: another device has failed.
///
/// Devices load at the same time. Shares of a layer read the same columns, so bytes that one device has read from the
/// disk are still in the system's cache when the others read them.
pub(crate) fn load_parts(
    devices: &[PlacedPart<Runtime>],
    progress: &dyn Fn(u64),
    load: impl Fn(&PlacedPart<Runtime>, &dyn Fn(u64), &AtomicBool) -> keel_models::Result<HybridModel> + Sync,
) -> Result<Vec<HybridModel>> {
    let stop = AtomicBool::new(false);
    if let [only] = devices {
        return Ok(vec![load(only, progress, &stop)?]);
    }
    let (sender, loaded) = mpsc::channel();
    thread::scope(|scope| {
        let start = |(rank, placed)| {
            let (sender, load, others) = (sender.clone(), &load, StopsOthers(&stop));
            let run = move || {
                let part = load(placed, &|bytes| _ = sender.send(bytes), others.0);
                part.inspect(|_| mem::forget(others))
            };
            thread::Builder::new().name(format!("keel-load-{rank}")).spawn_scoped(scope, run).map_err(refused)
        };
        let threads: Vec<_> = devices.iter().enumerate().map(start).collect::<Result<_>>()?;
        drop(sender);
        loaded.iter().for_each(progress);
        // All end before the first error is returned.
        let ended: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
        let (mut parts, mut failures) = (Vec::with_capacity(ended.len()), Vec::new());
        for part in ended {
            match part.unwrap_or_else(|panicked| resume_unwind(panicked)) {
                Ok(part) => parts.push(part),
                Err(error) => failures.push(error),
            }
        }
        let cause = failures.into_iter().min_by_key(|error| matches!(error, ModelError::Stopped));
        cause.map_or(Ok(parts), |error| Err(error.into()))
    })
}

/// Stops the other devices when it is dropped: its own has failed, panicked or not begun.
struct StopsOthers<'a>(&'a AtomicBool);

impl Drop for StopsOthers<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn refused(error: io::Error) -> EngineError {
    EngineError::Option(format!("the devices of the model could not be given a thread each to load: {error}"))
}

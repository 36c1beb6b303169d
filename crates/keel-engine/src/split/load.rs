//! Loads the parts of a model.

use std::io;
use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread::{self, ScopedJoinHandle};

use keel_array::Runtime;
use keel_models::HybridModel;

use super::PlacedPart;
use crate::{EngineError, Result};

/// Loads all parts with `load`, which reports the bytes of each weight, as `progress` does for all of them.
///
/// Devices load at the same time. Shares of a layer read the same columns, so what one device has read from the disk is
/// still in the system's cache when the others read it.
pub(crate) fn load_parts(
    devices: &[PlacedPart<Runtime>],
    progress: &dyn Fn(u64),
    load: impl Fn(&PlacedPart<Runtime>, &dyn Fn(u64)) -> keel_models::Result<HybridModel> + Sync,
) -> Result<Vec<HybridModel>> {
    if let [only] = devices {
        return Ok(vec![load(only, progress)?]);
    }
    let (sender, loaded) = mpsc::channel();
    thread::scope(|scope| {
        let start = |(rank, placed)| {
            let (sender, load) = (sender.clone(), &load);
            let run = move || load(placed, &|bytes| _ = sender.send(bytes));
            thread::Builder::new().name(format!("keel-load-{rank}")).spawn_scoped(scope, run).map_err(refused)
        };
        let threads: Vec<_> = devices.iter().enumerate().map(start).collect::<Result<_>>()?;
        drop(sender);
        loaded.iter().for_each(progress);
        // All end before the first error is returned.
        let ended: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
        let parts = ended.into_iter().map(|part| part.unwrap_or_else(|panicked| resume_unwind(panicked)));
        Ok(parts.collect::<keel_models::Result<_>>()?)
    })
}

fn refused(error: io::Error) -> EngineError {
    EngineError::Option(format!("the devices of the model could not be given a thread each to load: {error}"))
}

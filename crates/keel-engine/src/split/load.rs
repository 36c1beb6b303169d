//! Loads the parts of a model.

use std::sync::mpsc;
use std::{panic, thread};

use keel_array::Runtime;
use keel_models::HybridModel;

use super::PlacedPart;
use crate::Result;

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
        let start = |placed| {
            let (sender, load) = (sender.clone(), &load);
            scope.spawn(move || load(placed, &|bytes| _ = sender.send(bytes)))
        };
        let threads: Vec<_> = devices.iter().map(start).collect();
        drop(sender);
        loaded.iter().for_each(progress);
        let ended =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|e| panic::resume_unwind(e)));
        Ok(ended.collect::<keel_models::Result<_>>()?)
    })
}

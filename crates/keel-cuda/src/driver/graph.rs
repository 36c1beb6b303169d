//! CUDA graphs: a list of launches that is submitted with one call.

use super::{Device, driver};
use crate::error::Result;
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use std::sync::Arc;

/// A captured list of launches.
pub(crate) struct Graph {
    device: Arc<Device>,
    executable: CUgraphExec,
}

// SAFETY: a handle of the driver, used by one thread at a time, which the runtime's stream ensures.
unsafe impl Send for Graph {}

/// Captures the work that `record` puts on the device's stream, as a graph. Nothing runs. `record` allocates and frees
/// no memory of the device. If one thread waits for the whole device, the captures of all other threads end. Then the
/// capture is repeated up to `repeats` times; `None` if each repetition has ended in this way, too.
pub(crate) fn capture<E: From<crate::CudaError>>(
    device: &Arc<Device>,
    repeats: usize,
    record: impl Fn() -> Result<(), E>,
) -> Result<Option<Graph>, E> {
    first_some(repeats, || capture_once(device, &record))
}

/// The first value of `1 + repeats` calls that is there.
fn first_some<T, E>(repeats: usize, of: impl Fn() -> Result<Option<T>, E>) -> Result<Option<T>, E> {
    (0..=repeats).find_map(|_| of().transpose()).transpose()
}

fn capture_once<E: From<crate::CudaError>>(
    device: &Arc<Device>,
    record: impl FnOnce() -> Result<(), E>,
) -> Result<Option<Graph>, E> {
    let stream = device.stream();
    let no_other = device.no_capture();
    // In this mode other threads may allocate, free and wait meanwhile, as long as they do not use this stream.
    // SAFETY: no other thread uses the stream while the lock is held; the work that already runs on it is not captured.
    unsafe {
        driver!(cuStreamBeginCapture_v2(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))?
    };
    let capturing = Capturing(stream);
    let recorded = record();
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is the one above, the pointer is to a local.
    let asked = unsafe { driver!(cuStreamIsCapturing(stream, &mut status)) };
    let captured = capturing.end();
    drop(no_other);
    asked?;
    if status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED {
        return Ok(None);
    }
    recorded?;
    let captured = captured?;
    let mut executable = std::ptr::null_mut();
    // SAFETY: the graph was just captured.
    unsafe { driver!(cuGraphInstantiateWithFlags(&mut executable, captured.0, 0))? };
    Ok(Some(Graph { device: Arc::clone(device), executable }))
}

/// A stream whose launches are captured. The capture ends also if recording fails or panics.
struct Capturing(CUstream);

impl Capturing {
    fn end(self) -> Result<Captured> {
        let captured = self.end_once();
        std::mem::forget(self);
        captured
    }

    fn end_once(&self) -> Result<Captured> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is captured, and the pointer is to a local.
        unsafe { driver!(cuStreamEndCapture(self.0, &mut graph))? };
        Ok(Captured(graph))
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        let _ = self.end_once();
    }
}

/// The captured graph. It is destroyed once the executable graph is made.
struct Captured(CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: captured once, destroyed once.
        let _ = unsafe { driver!(cuGraphDestroy(self.0)) };
    }
}

impl Graph {
    /// Puts the launches on the stream.
    ///
    /// # Safety
    /// The memory that they were captured with must still exist, and stay until the stream has passed them.
    pub unsafe fn launch(&self) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { driver!(cuGraphLaunch(self.executable, self.device.stream())) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: instantiated once, destroyed once; the driver waits for a launch in flight.
        let _ = unsafe { driver!(cuGraphExecDestroy(self.executable)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_capture_that_others_end_is_repeated() {
        let calls = Cell::new(0);
        let ended = |times: usize, then: Result<Option<u8>, &'static str>| {
            calls.set(0);
            let outcome = first_some(3, || {
                calls.set(calls.get() + 1);
                if calls.get() > times { then } else { Ok(None) }
            });
            (outcome, calls.get())
        };
        assert_eq!(ended(0, Ok(Some(7))), (Ok(Some(7)), 1));
        assert_eq!(ended(2, Ok(Some(7))), (Ok(Some(7)), 3));
        assert_eq!(ended(9, Ok(Some(7))), (Ok(None), 4), "a device that others never leave alone");
        assert_eq!(ended(1, Err("refused")), (Err("refused"), 2), "an error is not repeated");
    }
}

//! Events: marks on the stream that the host waits for.

use super::device::poll_for;
use super::{Device, driver};
use crate::error::Result;
use cudarc::driver::sys::{self, CUevent, CUevent_flags};
use std::sync::Arc;
use std::time::Duration;

/// A mark that can be put on the stream again and again.
pub(crate) struct Event {
    device: Arc<Device>,
    event: CUevent,
}

// SAFETY: a handle of the driver, used by one thread at a time: the thread that holds the session.
unsafe impl Send for Event {}

impl Event {
    pub fn new(device: &Arc<Device>) -> Result<Event> {
        device.bind()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the pointer is to a local; destroyed on drop.
        unsafe { driver!(cuEventCreate(&mut event, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32))? };
        Ok(Event { device: Arc::clone(device), event })
    }

    /// Puts the mark on the stream, after everything that is there.
    pub fn record(&self) -> Result<()> {
        // SAFETY: event and stream live as long as this value.
        unsafe { driver!(cuEventRecord(self.event, self.device.stream())) }
    }

    /// Waits until the stream has passed the mark.
    pub fn wait(&self) -> Result<()> {
        self.device.wait(
            // SAFETY: the event lives as long as this value.
            || unsafe { driver!(cuEventSynchronize(self.event)) },
            // SAFETY: as above.
            || unsafe { sys::cuEventQuery(self.event) },
        )
    }

    /// The same, at most so long, and without a look at the device's peers.
    ///
    /// # Errors
    /// The stream has not passed it after this time.
    pub fn wait_for(&self, most: Duration) -> Result<()> {
        // SAFETY: the event lives as long as this value.
        poll_for(most, || unsafe { sys::cuEventQuery(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: created by `new`, destroyed once; the driver frees it after the stream's last use of it.
        let _ = unsafe { driver!(cuEventDestroy_v2(self.event)) };
    }
}

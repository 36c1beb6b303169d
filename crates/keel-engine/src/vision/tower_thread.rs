//! A tower with a device of its own. A thread runs its pieces, and steps of the model go on meanwhile.
//!
//! ```text
//! batch    hand piece 1 | step | step | step        | take 1, hand piece 2 | step | ...
//! thread                | write patches, piece 1    |                      | piece 2 ...
//! ```
//!
//! A piece is under way from its hand-over until the batch takes it. Meanwhile only the thread touches the buffers. A
//! piece whose request has ended runs to its end; its outcome is dropped.

use std::sync::Arc;
use std::time::Duration;

use super::{EncodeJob, EncodeStatus, NextPiece, VisionRunner};
use crate::Result;
use crate::device_thread::{DeviceThread, Job, JobHandle, Queued};

/// The thread of a tower.
pub(super) struct TowerThread {
    /// Ends after its last piece, and before the tower's buffers are freed.
    thread: DeviceThread,
    in_flight: Option<InFlightPiece>,
}

/// A piece under way.
struct InFlightPiece {
    /// The number of its job.
    number: u64,
    running: JobHandle,
}

impl VisionRunner {
    /// Gives the tower a thread of its own.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start_thread(&mut self) -> Result<()> {
        let thread = DeviceThread::start("vision-tower")?;
        self.thread = Some(TowerThread { thread, in_flight: None });
        Ok(())
    }

    /// Whether pieces run on a thread of the tower.
    pub fn has_thread(&self) -> bool {
        self.thread.is_some()
    }

    /// As [`VisionRunner::advance`], on the tower's thread: takes the piece under way if it ends within `patience`,
    /// then hands the next piece over and does not wait for it.
    ///
    /// # Errors
    /// As [`VisionRunner::advance`], for the piece that has ended.
    pub fn advance_on_thread(
        &mut self,
        job: &mut EncodeJob,
        values: &Arc<Vec<f32>>,
        patience: Duration,
    ) -> Result<EncodeStatus> {
        let mut status = EncodeStatus::InFlight;
        if let Some(InFlightPiece { number, running }) = self.in_flight() {
            let (number, ended) = (*number, running.wait_for(patience));
            let Some(ended) = ended else { return Ok(status) };
            self.forget_piece();
            if number == job.number {
                ended.outcome.map_err(|failure| failure.into_error())?;
                status = self.take_piece(job)?;
            }
        }
        if !matches!(status, EncodeStatus::All(_)) {
            let NextPiece { step, input } = self.next_piece(job)?;
            let queued = input.map(|input| {
                let (buffers, config) = (self.input.clone(), self.tower.config.clone());
                let values = Arc::clone(values);
                let fill = Box::new(move || buffers.write(&config, input, &values));
                Queued { fill, has_failed: Arc::default() }
            });
            let number = job.number;
            if let Some(TowerThread { thread, in_flight }) = &mut self.thread {
                let running = thread.hand(Job { step, drawn: None, queued });
                *in_flight = Some(InFlightPiece { number, running });
            }
        }
        Ok(status)
    }

    /// Waits for the piece of an abandoned job, and drops its result.
    pub(super) fn wait_for_thread(&mut self) {
        if let Some(piece) = self.thread.as_mut().and_then(|thread| thread.in_flight.take()) {
            drop(piece.running.wait());
        }
    }

    fn in_flight(&self) -> Option<&InFlightPiece> {
        self.thread.as_ref()?.in_flight.as_ref()
    }

    fn forget_piece(&mut self) {
        if let Some(thread) = &mut self.thread {
            thread.in_flight = None;
        }
    }
}

//! Steps of a tensor split that run ahead of the host, as those of one device do (`engine/ahead.rs`).
//!
//! ```text
//! host        submit 1   submit 2   take 1   submit 3   ...
//! device 0            | step 1         | step 2         | ...
//! device 1, lead      | step 1         | step 2         | ...
//! ```
//!
//! Every device has all logits and draws the same tokens, so each finds the tokens of the step before in its own pool.
//! A step is begun on all devices before [`Engine::submit`] returns, each on its own thread and the lead's on the
//! caller's: the first run of a program may wait for the other devices before it is begun as a whole. Later work of the
//! host on the devices, such as copies of states, follows the step. Each thread also waits for its device's end, so a
//! device that fails is seen while the caller waits for the lead. Once a step has failed on one, later ones are begun
//! on none, until all devices have met again.

use std::sync::Arc;

use keel_array::Regime;

use crate::device_thread::{Beginning, BegunStep, DeviceThread};
use crate::engine::in_flight::InFlightRun;
use crate::step::{Outcome, PreparedStep, Rows, StepKind};
use crate::{Engine, Result};

impl Engine {
    /// Begins a step over these rows on all devices.
    pub(crate) fn submit_on_all(&mut self, kind: StepKind, rows: &[Rows<'_>]) -> Result<InFlightRun> {
        // All steps are prepared before one is begun: that may fail, and a device that has begun waits for all others.
        let mut ready = Vec::with_capacity(self.peers.len());
        for peer in &mut self.peers {
            ready.push(peer.stepper.drawing_step(kind, rows)?);
        }
        let lead = self.stepper.drawing_step(kind, rows)?;
        let threads = self.peers.iter().filter_map(|peer| peer.thread.as_ref());
        // No token depends on rows that the head catches up with. Devices that wait for each other fail together,
        // though.
        let is_apart = kind.outcome == Outcome::MtpState && self.peers.is_empty();
        let mark = || if is_apart { Arc::default() } else { self.in_flight.failure_mark() };
        let begin = |(thread, step): (&Arc<DeviceThread>, _)| thread.begin(step, mark());
        let peers: Vec<Beginning> = threads.zip(ready).map(begin).collect();
        let run = BegunStep::begin(lead, mark());
        let slots = rows.iter().map(|row| row.sequence.slot()).collect();
        let peers = peers.into_iter().map(Beginning::wait).collect();
        Ok(InFlightRun { run, peers, regime: kind.regime, slots })
    }

    /// Begins a program of the lead that keeps results of its last one.
    pub(crate) fn submit_on_lead(&self, regime: Regime, step: PreparedStep) -> InFlightRun {
        let run = BegunStep::begin(step, self.in_flight.failure_mark());
        InFlightRun { run, peers: Vec::new(), regime, slots: Vec::new() }
    }
}

//! The events of a request, from the engine's thread to the request's task.

use std::sync::Arc;
use std::time::{Duration, Instant};

use keel_engine::batch::BatchEvent;
use tokio::sync::mpsc;

use crate::engine::grammar::Tables;
use crate::error::{Result, ServerError};
use crate::memory::requests::Meter;

/// An event, and the time when the engine's thread sent it. A slow reader takes it much later.
pub(crate) type Sent = (Instant, Result<BatchEvent>);

/// The events of one request. Dropping them cancels the request. Tokens that wait are charged to the memory of
/// requests.
pub struct Events {
    pub(crate) receiver: mpsc::UnboundedReceiver<Sent>,
    pub(crate) meter: Arc<Meter>,
}

impl Events {
    /// Waits for the next event. Returns it with the time when it was sent.
    ///
    /// # Errors
    /// The request has failed, too many of its tokens wait, or the engine has stopped.
    pub async fn recv(&mut self) -> Result<(Instant, BatchEvent)> {
        let (sent, event) = self.receiver.recv().await.ok_or(ServerError::EngineStopped)?;
        let event = event?;
        self.meter.give_back(waiting_bytes(&event));
        match event {
            BatchEvent::Failed(error) => Err(error.into()),
            event => Ok((sent, event)),
        }
    }

    /// Ends the request.
    pub fn close(&mut self) {
        self.receiver.close();
    }
}

/// The other end of [`Events`].
pub(crate) struct Listener {
    pub sender: mpsc::UnboundedSender<Sent>,
    pub meter: Arc<Meter>,
    /// The charge of its grammar, if it has one.
    pub tables: Option<Tables>,
    /// `None` once it has started, and where it waits for others of its own request.
    pub patience: Option<Patience>,
}

impl Listener {
    /// Charges an event that waits, and with a token also the growth of the grammar's tables.
    pub fn charge(&self, event: &BatchEvent) -> Result<()> {
        if let (BatchEvent::Token { .. }, Some(tables)) = (event, &self.tables) {
            tables.charge()?;
        }
        Ok(self.meter.take(waiting_bytes(event))?)
    }

    /// Sends an event. A receiver that is gone is noticed before the next step.
    pub fn send(&self, event: Result<BatchEvent>) {
        let _ = self.sender.send((Instant::now(), event));
    }
}

/// How long a request may wait until it starts.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    pub since: Instant,
    pub limit: Duration,
}

/// Bytes charged for a waiting event. Only tokens are charged: other events are rare.
pub(crate) fn waiting_bytes(event: &BatchEvent) -> u64 {
    match event {
        BatchEvent::Token { logprobs, .. } => {
            let top =
                logprobs.as_ref().map_or(0, |logprobs| size_of_val(&logprobs.top[..]) + HEAP_BLOCK_BYTES);
            (size_of::<Sent>() + top) as u64
        }
        _ => 0,
    }
}

/// The allocator's own bytes per block.
const HEAP_BLOCK_BYTES: usize = 16;

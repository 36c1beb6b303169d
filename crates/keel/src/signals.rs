//! Signals that ask a process to end which does not always wait for them.

use anyhow::Result;
use keel_server::wait_for_signal;
use tokio::sync::watch;

/// Whether a process that leads others was asked to end. It may be while it loads or waits for a node.
#[derive(Clone, Debug)]
pub struct Signals(watch::Receiver<bool>);

impl Signals {
    /// Waits for the first signal, on a thread.
    ///
    /// # Errors
    /// The system refuses a thread, or the handling of signals.
    pub fn watch() -> Result<Signals> {
        let waiting = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (tell, told) = watch::channel(false);
        std::thread::Builder::new().name("keel-signals".into()).spawn(move || {
            waiting.block_on(wait_for_signal());
            let _ = tell.send(true);
        })?;
        Ok(Signals(told))
    }

    /// Whether one has come.
    pub fn have_come(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until one has come.
    pub async fn come(mut self) {
        // The sender is gone after the first signal.
        let _ = self.0.wait_for(|has_come| *has_come).await;
    }
}

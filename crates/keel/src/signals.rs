//! Signals that ask a process to end, for a process that does not always wait for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use keel_server::wait_for_signal;
use tokio::sync::watch;

/// The exit code of a process that a signal has ended, as a shell gives it for Ctrl-C.
pub const INTERRUPTED: i32 = 130;

/// Ends the process with this exit code, whatever its threads do. Files that it has not finished are removed. Exit
/// handlers of libraries do not run: those of a GPU's driver would free memory that the threads use.
pub fn end_at_once(code: i32) -> ! {
    keel_weights::remove_unfinished();
    signal_hook::low_level::exit(code)
}

/// Watches for signals in a process that serves, downloads or converts a model. A download and a conversion end at
/// once. While a server runs, it ends in order. While it loads or waits for a node, a signal ends the process at once:
/// nothing is lost, as the nodes free their memory when the connection ends. In a container this process may be the
/// first one, which the system does not end at a signal that it does not watch for.
#[derive(Clone, Debug)]
pub struct Signals {
    told: watch::Receiver<bool>,
    is_serving: Arc<AtomicBool>,
}

/// A server hears of signals by itself, until this is dropped. After a signal that lasts: the process ends in order.
pub struct Serving(Signals);

impl Drop for Serving {
    fn drop(&mut self) {
        if !self.0.have_come() {
            self.0.is_serving.store(false, Ordering::SeqCst);
        }
    }
}

impl Signals {
    /// Waits for signals, on a thread.
    ///
    /// # Errors
    /// The system refuses a thread, or the handling of signals.
    pub fn watch() -> Result<Signals> {
        let waiting = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (tell, told) = watch::channel(false);
        let is_serving = Arc::new(AtomicBool::new(false));
        let serves = Arc::clone(&is_serving);
        std::thread::Builder::new().name("keel-signals".into()).spawn(move || {
            loop {
                waiting.block_on(wait_for_signal());
                tell.send_replace(true);
                if !serves.load(Ordering::SeqCst) {
                    end_at_once(INTERRUPTED);
                }
            }
        })?;
        Ok(Signals { told, is_serving })
    }

    /// Says that a server hears of signals by itself.
    pub fn serving(&self) -> Serving {
        self.is_serving.store(true, Ordering::SeqCst);
        Serving(self.clone())
    }

    /// Whether one has come.
    pub fn have_come(&self) -> bool {
        *self.told.borrow()
    }

    /// Waits until one has come.
    pub async fn come(mut self) {
        let _ = self.told.wait_for(|has_come| *has_come).await;
    }
}

//! Handles Ctrl-C while an answer is drawn: it ends the answer, not the conversation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::Result;

use crate::signals::{INTERRUPTED, end_at_once};

/// Whether Ctrl-C was pressed.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Starts listening. A second Ctrl-C before the first was taken ends the program, because a long prompt cannot be
    /// interrupted.
    ///
    /// # Errors
    /// The system refuses a thread or the signal.
    pub fn listen() -> Result<Interrupt> {
        let interrupt = Interrupt::default();
        let pressed = Arc::clone(&interrupt.0);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut presses = runtime.block_on(async { presses() })?;
        thread::Builder::new().name("ctrl-c".into()).spawn(move || {
            runtime.block_on(async move {
                while presses.next().await {
                    if pressed.swap(true, Ordering::AcqRel) {
                        end_at_once(INTERRUPTED);
                    }
                }
            });
        })?;
        Ok(interrupt)
    }

    /// Whether Ctrl-C was pressed since the last call.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }
}

/// Presses of Ctrl-C from its creation on.
struct Presses(#[cfg(unix)] tokio::signal::unix::Signal);

#[cfg(unix)]
fn presses() -> Result<Presses> {
    Ok(Presses(tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?))
}

#[cfg(not(unix))]
fn presses() -> Result<Presses> {
    Ok(Presses())
}

impl Presses {
    async fn next(&mut self) -> bool {
        #[cfg(unix)]
        return self.0.recv().await.is_some();
        #[cfg(not(unix))]
        return tokio::signal::ctrl_c().await.is_ok();
    }
}

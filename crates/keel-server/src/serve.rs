//! From an engine to a running server, and to its end.

use std::future::{Future, IntoFuture};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::serve::ListenerExt;
use keel_engine::Engine;
use keel_engine::batch::Batcher;
use tokio::net::{TcpListener, TcpStream};

use crate::app::App;
use crate::error::{Result, ServerError};
use crate::options::ServerOptions;
use crate::routes::router;
use crate::text::ModelText;
use crate::worker::EngineHandle;

/// A server that is ready to listen.
pub struct Server {
    app: Arc<App>,
    thread: JoinHandle<()>,
}

/// After an abort, how long connections get to close.
const ABORT_TIME: Duration = Duration::from_secs(2);

/// Opens the address.
///
/// # Errors
/// [`ServerError::Listen`].
pub async fn bind(address: &str) -> Result<TcpListener> {
    let failed = |source| ServerError::Listen { address: address.into(), source };
    TcpListener::bind(address).await.map_err(failed)
}

impl Server {
    /// Makes the engine ready for batches of any size, and starts its thread.
    ///
    /// # Errors
    /// What the engine says; if the system gives no thread.
    pub fn new(mut engine: Engine, text: ModelText, options: ServerOptions) -> Result<Server> {
        engine.prepare_batch_steps()?;
        let batcher = Batcher::new(engine, options.batch);
        let (handle, thread) = EngineHandle::start(batcher, options.prefix_store.clone())?;
        Ok(Server { app: App::new(handle, text, options), thread })
    }

    /// What the handlers share.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Answers until `drain` completes, then refuses what comes and lets what runs end. When `abort` completes, what
    /// runs is ended, too. Returns when all memory of sequences is free and the engine is gone.
    ///
    /// # Errors
    /// If the socket fails.
    pub async fn run(
        self,
        listener: TcpListener,
        drain: impl Future<Output = ()> + Send + 'static,
        abort: impl Future<Output = ()> + Send + 'static,
    ) -> Result<()> {
        let Server { app, thread } = self;
        let routes = router(Arc::clone(&app), listener.local_addr()?)
            .into_make_service_with_connect_info::<SocketAddr>();
        let draining = Arc::clone(&app);
        let aborting = app.engine.clone();
        let listener = listener.tap_io(send_at_once);
        let served = axum::serve(listener, routes).with_graceful_shutdown(async move {
            drain.await;
            draining.drain();
        });
        let mut served = pin!(served.into_future());
        let ended = tokio::select! {
            served = &mut served => Some(served),
            () = abort => {
                aborting.abort();
                tokio::time::timeout(ABORT_TIME, &mut served).await.ok()
            }
        };
        drop(aborting);
        drop(app);
        match ended {
            Some(outcome) => outcome?,
            // A client that reads nothing keeps its connection; it is not waited for.
            None => return Ok(()),
        }
        // The thread ends when the last handle is gone; a stream that is still being dropped may hold one.
        let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        Ok(())
    }
}

/// Has small writes of a connection sent at once. Or the first event of a stream would wait behind the headers for the
/// acknowledgement that a client delays, some 40 ms.
fn send_at_once(connection: &mut TcpStream) {
    if let Err(error) = connection.set_nodelay(true) {
        tracing::debug!("small writes of a connection wait: {error}");
    }
}

/// Completes at the first SIGTERM or SIGINT after the call.
pub async fn wait_for_signal() {
    let interrupt = tokio::signal::ctrl_c();
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => {
                tokio::select! {
                    _ = interrupt => {}
                    _ = terminate.recv() => {}
                }
            }
            Err(_) => drop(interrupt.await),
        }
    }
    #[cfg(not(unix))]
    drop(interrupt.await);
}

#[cfg(test)]
mod tests {
    use axum::serve::Listener;

    use super::*;

    #[tokio::test]
    async fn small_writes_do_not_wait() {
        let mut listener = bind("127.0.0.1:0").await.expect("a free port").tap_io(send_at_once);
        let address = listener.local_addr().expect("it is bound");
        let _client = TcpStream::connect(address).await.expect("it listens");
        let (connection, _) = listener.accept().await;
        assert!(connection.nodelay().expect("it is open"));
    }
}

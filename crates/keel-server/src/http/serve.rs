//! Runs a server from its engine to its end.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use keel_engine::Engine;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::oneshot;

use crate::engine::worker::{EngineHandle, batcher};
use crate::error::{Result, ServerError};
use crate::http::connections::Connections;
use crate::http::routes::router;
use crate::loaded_model::LoadedModel;
use crate::memory::requests::check_limit;
use crate::model_manager::{FREE_TIME, ModelManager, ModelManagerOptions, ServedModel};
use crate::options::ServerOptions;
use crate::shared::Shared;
use crate::text::ServedText;

/// A server that is ready to listen.
pub struct Server {
    manager: Arc<ModelManager>,
}

/// Time for connections to close after an abort.
const ABORT_TIME: Duration = Duration::from_secs(2);
/// Time between two looks whether it has.
const FREE_ROUND: Duration = Duration::from_millis(10);

/// Number of connections that may wait to be accepted, if the system allows it. If more arrive at once, the system
/// drops some, and their clients try again after one second.
const BACKLOG: u32 = 4096;

/// Binds the address.
///
/// # Errors
/// [`ServerError::Listen`].
pub async fn bind(address: &str) -> Result<TcpListener> {
    let failed = |reason| ServerError::Listen { address: address.into(), reason };
    let mut problem = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
    for address in tokio::net::lookup_host(address).await.map_err(failed)? {
        match listen(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => problem = error,
        }
    }
    Err(failed(problem))
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restarted server need not wait for the connections of its predecessor.
    #[cfg(not(windows))]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl Server {
    /// Prepares the engine for batches of any size, and starts its thread.
    ///
    /// # Errors
    /// Errors of the engine, the memory of requests is below its minimum, or the system refuses a thread.
    pub fn new(mut engine: Engine, text: ServedText, options: ServerOptions) -> Result<Server> {
        check_limit(options.request_memory)?;
        if !engine.is_ready() {
            engine.make_ready(&mut |_, _, _| ())?;
        }
        let batch = batcher(engine, options.batch);
        let (handle, thread) = EngineHandle::start(batch, options.prefix_store.clone())?;
        Ok(Server { manager: ModelManager::of_one(Shared::new(options), handle, text, thread) })
    }

    /// Of several models, each loaded when it is asked for.
    ///
    /// # Errors
    /// If there is none, two have one name, one does not fit by itself, or the memory of requests is below its minimum.
    pub fn of_several(
        offers: Vec<ServedModel>,
        manager_options: ModelManagerOptions,
        options: ServerOptions,
    ) -> Result<Server> {
        check_limit(options.request_memory)?;
        Ok(Server { manager: ModelManager::of_several(Shared::new(options), offers, manager_options)? })
    }

    /// The model that was used last, if one is loaded. The server does not end while it is held.
    pub fn last_used(&self) -> Option<Arc<LoadedModel>> {
        self.manager.loaded().into_iter().next()
    }

    /// Answers requests until `drain` completes. Then running requests may end within the grace of the options, and
    /// remembered prefixes are saved as soon as nothing runs. When `abort` completes, running requests are ended, too.
    /// Returns when all memory of sequences is free and the engine is dropped.
    ///
    /// If the engine fails for good, and no other can be loaded in its place, the server drains by itself: its requests
    /// are answered with the failure, and whoever supervises the process can start it again.
    ///
    /// # Errors
    /// The socket fails; [`ServerError::EngineLost`].
    pub async fn run(
        self,
        listener: TcpListener,
        drain: impl Future<Output = ()> + Send + 'static,
        abort: impl Future<Output = ()> + Send + 'static,
    ) -> Result<()> {
        let Server { manager } = self;
        let routes = router(Arc::clone(&manager), listener.local_addr()?);
        let connections = Arc::new(Connections::new(&manager.options));
        // It acts during the drain, too. It also ends if this call is given up.
        let watch = connections.watch();
        let resting = tokio::spawn(manager.memory.clone().give_back_at_rest(manager.options.give_back));
        let (stop_sweep, sweep_stops) = oneshot::channel();
        let sweeping = tokio::spawn(Arc::clone(&manager).sweep(sweep_stops));
        let mut abort = pin!(abort);
        let drained = async {
            tokio::select! {
                () = drain => {}
                () = manager.failed() => tracing::error!("the server ends, because its engine has stopped"),
            }
            manager.drain();
        };
        let is_aborted = tokio::select! {
            () = connections.accept(listener, routes, drained) => false,
            () = &mut abort => true,
        };
        if is_aborted {
            manager.abort();
        } else {
            let_end(&manager, &connections, abort).await;
        }
        connections.close_all();
        connections.all_closed().await;
        drop(watch);
        resting.abort();
        drop(stop_sweep);
        let _ = sweeping.await;
        let failure = manager.failure();
        let threads = manager.close().await;
        drop(manager);
        // A thread ends when the last handle is gone; a stream that is still being dropped may hold one.
        for (thread, has_failed) in threads {
            if !has_failed || ends_soon(&thread).await {
                let _ = tokio::task::spawn_blocking(move || thread.join()).await;
            }
        }
        failure.map_or(Ok(()), Err)
    }
}

/// Waits until the thread of an engine that has failed ends. Returns whether it has ended in time. If not, it is left
/// alone: the end of the process frees its memory and devices.
async fn ends_soon(thread: &JoinHandle<()>) -> bool {
    let end = async {
        while !thread.is_finished() {
            tokio::time::sleep(FREE_ROUND).await;
        }
    };
    tokio::time::timeout(FREE_TIME, end).await.is_ok()
}

/// Waits until running requests have ended, at most for the grace of the options.
async fn let_end(
    manager: &ModelManager,
    connections: &Connections,
    abort: Pin<&mut impl Future<Output = ()>>,
) {
    let grace = manager.options.grace;
    tokio::select! {
        () = connections.all_closed() => return,
        () = abort => {}
        () = tokio::time::sleep(grace) => {
            let left = connections.count();
            tracing::warn!("{left} requests have not ended {} s after the signal and are cut off", grace.as_secs_f64());
        }
    }
    manager.abort();
    // Streams report their failure to clients that still read.
    let _ = tokio::time::timeout(ABORT_TIME, connections.all_closed()).await;
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

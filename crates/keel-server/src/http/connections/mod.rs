//! Connections: their number, their timeouts, and their end.
//!
//! Each connection is a separate task with a [`Link`], which records its current phase. One watch checks all links and
//! closes connections that exceed a timeout, and those whose client has left. If there is no room for a new connection,
//! the connection that has waited longest without a request is closed. So half-open connections neither stay nor keep
//! others out.

mod link;
mod stream;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use futures_util::future::{BoxFuture, FutureExt};
use hyper::Request;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::http::response_body::with_guard;
use crate::options::{CONNECTIONS_MIN, ServerOptions};
use link::{Link, Phase, Times};
use stream::{Answered, Arriving, Watched};

/// Largest size of a request's head, and of each buffer between the socket and a body's reader. It also bounds the
/// bytes that are written ahead of a client.
pub(crate) const READ_BYTES_MAX: usize = 16 << 10;
/// Most bytes of a body that wait for their reader: one buffer is handed over while the next one is filled.
pub(crate) const BODY_BUFFER_BYTES: u64 = 2 * READ_BYTES_MAX as u64;
/// Time between two checks of the watch.
const ROUND: Duration = Duration::from_millis(100);
/// Pause after the system has refused a connection.
const REFUSED_PAUSE: Duration = Duration::from_millis(20);
/// Number of file descriptors that are reserved for files.
const DESCRIPTORS_KEPT: usize = 16;

const NO_ROOM: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// All connections of a server.
pub(crate) struct Connections {
    links: Mutex<Links>,
    limit: usize,
    times: Times,
    /// True after the drain began. Each connection's task holds a receiver, which shows when the last connection has
    /// ended.
    draining: watch::Sender<bool>,
}

#[derive(Default)]
struct Links {
    next: u64,
    open: BTreeMap<u64, Open>,
}

/// An open connection.
struct Open {
    link: Arc<Link>,
    reader: Arc<OwnedReadHalf>,
}

impl Open {
    /// Whether the client has closed its side of the connection while its request is being answered. hyper looks for
    /// that only while it holds no byte that follows the request. A line break after a body is enough to keep it from
    /// looking. As in hyper, a client that closes only its sending side is not answered.
    fn has_left(&self) -> bool {
        if self.link.phase() != Phase::Answering {
            return false;
        }
        let ready = self.reader.ready(Interest::READABLE).now_or_never();
        matches!(ready, Some(Ok(ready)) if ready.is_read_closed())
    }
}

impl Connections {
    pub fn new(options: &ServerOptions) -> Connections {
        let times = Times {
            head: options.head_timeout,
            body: options.body_timeout,
            idle: options.idle_timeout,
            write: options.write_timeout,
        };
        let room = descriptors_left().map_or(usize::MAX, |left| left.saturating_sub(DESCRIPTORS_KEPT));
        let wanted = options.connections();
        if wanted < options.connections_max {
            tracing::warn!("{wanted} connections at once: their buffers take a quarter of --request-memory");
        }
        let limit = wanted.min(room).max(CONNECTIONS_MIN);
        if limit < wanted {
            tracing::warn!(
                "{limit} connections at once, because the system gives no more descriptors (ulimit -n)"
            );
        }
        Connections { links: Mutex::default(), limit, times, draining: watch::channel(false).0 }
    }

    fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Number of open connections.
    pub fn count(&self) -> usize {
        self.links().open.len()
    }

    /// Accepts connections until `drain` completes. Then the address is released, connections without a request are
    /// closed, and the others end after their answer.
    pub async fn accept(
        self: &Arc<Self>,
        listener: TcpListener,
        routes: Router,
        drain: impl Future<Output = ()>,
    ) {
        let mut drain = pin!(drain);
        loop {
            let accepted = tokio::select! {
                () = &mut drain => break,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => self.take(stream, &routes),
                Err(error) => {
                    tracing::debug!("a connection could not be taken: {error}");
                    self.make_room();
                    tokio::time::sleep(REFUSED_PAUSE).await;
                }
            }
        }
        self.draining.send_replace(true);
    }

    /// Completes when all connections are closed.
    pub async fn all_closed(&self) {
        self.draining.closed().await;
    }

    /// Closes all connections in any phase.
    pub fn close_all(&self) {
        self.links().open.values().for_each(|open| open.link.close.notify_one());
    }

    fn take(self: &Arc<Self>, stream: TcpStream, routes: &Router) {
        if self.count() >= self.limit && !self.make_room() {
            tokio::spawn(refuse(stream));
            return;
        }
        send_at_once(&stream);
        let (reader, writer) = stream.into_split();
        let (reader, link) = (Arc::new(reader), Link::new(Instant::now()));
        let number = {
            let mut links = self.links();
            links.next += 1;
            let number = links.next;
            links.open.insert(number, Open { link: Arc::clone(&link), reader: Arc::clone(&reader) });
            number
        };
        let entry = Entry { connections: Arc::clone(self), number };
        let io = Watched { reader, writer, link };
        tokio::spawn(serve(entry, io, routes.clone(), self.draining.subscribe()));
    }

    /// Closes the connection with the first rank of [`Link::dispensable`]. Returns false if all are being answered.
    fn make_room(&self) -> bool {
        let mut links = self.links();
        let waiting =
            links.open.iter().filter_map(|(&number, open)| Some((open.link.dispensable()?, number)));
        let Some((_, number)) = waiting.min() else { return false };
        if let Some(open) = links.open.remove(&number) {
            open.link.close.notify_one();
        }
        true
    }

    /// Starts the watch, which closes connections that exceed a timeout or whose client has left. It ends when the
    /// result is dropped.
    pub fn watch(self: &Arc<Self>) -> JoinSet<()> {
        let connections = Arc::clone(self);
        let mut watch = JoinSet::new();
        watch.spawn(async move {
            loop {
                tokio::time::sleep(ROUND).await;
                connections.close_overdue(Instant::now());
            }
        });
        watch
    }

    fn close_overdue(&self, now: Instant) {
        for open in self.links().open.values() {
            let left = || open.has_left().then_some("the client has left");
            if let Some(reason) = open.link.overdue(now, &self.times).or_else(left) {
                tracing::debug!("a connection is closed: {reason}");
                open.link.close.notify_one();
            }
        }
    }
}

/// The connection's place in the list, until its task ends.
struct Entry {
    connections: Arc<Connections>,
    number: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.connections.links().open.remove(&self.number);
    }
}

/// Makes small writes go out at once. Otherwise the first event of a stream would wait after the headers for the
/// client's delayed acknowledgement, about 40 ms.
fn send_at_once(connection: &TcpStream) {
    if let Err(error) = connection.set_nodelay(true) {
        tracing::debug!("small writes of a connection wait: {error}");
    }
}

/// Tells the client that there is no room. A client that does not read within one second is dropped.
async fn refuse(mut stream: TcpStream) {
    let said = async {
        stream.write_all(NO_ROOM).await?;
        stream.shutdown().await
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), said).await;
}

async fn serve(_entry: Entry, io: Watched, routes: Router, mut draining: watch::Receiver<bool>) {
    let link = Arc::clone(&io.link);
    let entrance = Entrance { routes: TowerToHyperService::new(routes), link: Arc::clone(&link) };
    let io = TokioIo::new(io);
    let mut builder = http1::Builder::new();
    let builder = builder.timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(READ_BYTES_MAX);
    let mut connection = pin!(builder.serve_connection(io, entrance));
    let mut drains = false;
    loop {
        tokio::select! {
            served = connection.as_mut() => {
                if let Err(error) = served {
                    tracing::debug!("a connection ended: {error}");
                }
                return;
            }
            () = link.close.notified() => return,
            changed = draining.wait_for(|&draining| draining), if !drains => {
                if changed.is_err() || link.phase() == Phase::Head {
                    return;
                }
                drains = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Receives the requests of a connection.
struct Entrance {
    routes: TowerToHyperService<Router>,
    link: Arc<Link>,
}

impl Service<Request<Incoming>> for Entrance {
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let link = Arc::clone(&self.link);
        link.enter(if request.body().is_end_stream() { Phase::Answering } else { Phase::Body });
        let request = request.map(|body| Body::new(Arriving { body, link: Arc::clone(&link) }));
        let answer = self.routes.call(request);
        Box::pin(async move {
            let response = answer.await?;
            link.enter(Phase::Answering);
            Ok(with_guard(Answered(link), response))
        })
    }
}

/// Number of descriptors that this process may still open.
#[cfg(target_os = "linux")]
fn descriptors_left() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let limit: usize = line.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(std::fs::read_dir("/proc/self/fd").ok()?.count()))
}

/// Other systems allow at least 256.
#[cfg(not(target_os = "linux"))]
fn descriptors_left() -> Option<usize> {
    Some(256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_stays_of_a_server_that_is_given_up() {
        let connections = Arc::new(Connections::new(&ServerOptions::default()));
        let weak = Arc::downgrade(&connections);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let watch = connections.watch();
        let accepting = connections.accept(listener, Router::new(), std::future::pending());
        tokio::time::timeout(ROUND, accepting).await.expect_err("it accepts");
        drop((connections, watch));
        tokio::time::sleep(ROUND).await;
        assert!(weak.upgrade().is_none());
    }
}

//! Connections between processes: how they are made, kept and found to be lost.

use std::io::{BufWriter, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::message::{Hello, HelloReply, Refusal};
use crate::{RemoteError, Result, frame};

/// How often each end says that it is there.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);

/// A connection that is silent for this long is lost.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(5);

/// How long a connection may take to be made.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// Between two attempts to reach a node.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);

/// Connects with a node, which accepts `hello`. A connection that fails, and one whose refusal may pass, is tried again
/// until `is_last` says that there was time enough. From then on a silent connection is lost.
///
/// # Errors
/// The node cannot be reached, or refuses.
pub(crate) fn greet<T: DeserializeOwned>(
    node: usize,
    address: &str,
    hello: &Hello,
    is_last: impl Fn() -> bool,
) -> Result<(TcpStream, T)> {
    loop {
        let attempt = send_hello(address, hello);
        let is_last = is_last();
        match attempt {
            Ok((stream, HelloReply::Accepted(welcome))) => return Ok((stream, welcome)),
            // It may still be freeing what its last leader had.
            Ok((_, HelloReply::Refused(Refusal { reason, may_pass }))) if is_last || !may_pass => {
                return Err(RemoteError::Refused { node, address: address.into(), reason });
            }
            Err(error) if is_last => {
                let reason = silence_or(&error);
                return Err(RemoteError::Unreachable { node, address: address.into(), reason });
            }
            Ok(_) | Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Connects and sends the first message.
fn open(address: &str, hello: &Hello) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::other("the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_MAX) {
            Ok(mut stream) => {
                stream.set_nodelay(true)?;
                frame::write(&mut stream, hello, &[])?;
                return Ok(stream);
            }
            Err(error) => last = unconnected(error),
        }
    }
    Err(last)
}

/// The error of a connection that was not made. Without an answer in time, nothing has been said on it yet, so it is no
/// silence.
fn unconnected(error: std::io::Error) -> std::io::Error {
    match error.kind() {
        std::io::ErrorKind::TimedOut => std::io::Error::other(format!(
            "no connection within {} s: check the address, the port and the firewall",
            CONNECT_MAX.as_secs()
        )),
        _ => error,
    }
}

/// The same, and the node's answer. From then on a silent connection is lost.
pub(crate) fn send_hello<T: DeserializeOwned>(
    address: &str,
    hello: &Hello,
) -> std::io::Result<(TcpStream, HelloReply<T>)> {
    let mut stream = open(address, hello)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    let reply = frame::read(&mut stream, &mut Vec::new())?;
    Ok((stream, reply))
}

/// Reads a connection until a deadline.
pub(crate) struct UntilDeadline<'a> {
    pub stream: &'a TcpStream,
    pub deadline: Instant,
}

impl Read for UntilDeadline<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(bytes)
    }
}

/// The sending side of a connection, with a heartbeat.
pub(crate) struct MessageSender(Arc<Mutex<BufWriter<TcpStream>>>);

impl MessageSender {
    /// Takes a connection and sends `first`. From then on the other end gets `heartbeat` every second. If the
    /// connection fails, its reader learns it.
    ///
    /// # Errors
    /// No thread can be started. Nothing has been sent then, so a refusal may be the first message.
    pub fn new(
        stream: TcpStream,
        first: &impl Serialize,
        heartbeat: impl Serialize + Send + 'static,
    ) -> Result<MessageSender> {
        let out = Arc::new(Mutex::new(BufWriter::new(stream)));
        let weak = Arc::downgrade(&out);
        // The heartbeat waits for this lock until the first message has left.
        let mut held = locked(&out);
        spawn("keel-heartbeat", move || {
            loop {
                std::thread::sleep(HEARTBEAT);
                let Some(out) = weak.upgrade() else { return };
                MessageSender(out).tell(&heartbeat, &[]);
            }
        })?;
        let _ = send_on(&mut held, first, &[]);
        drop(held);
        Ok(MessageSender(out))
    }

    /// Sends a message, which bytes may follow.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn send(&self, message: &impl Serialize, bytes: &[u8]) -> std::io::Result<()> {
        send_on(&mut locked(&self.0), message, bytes)
    }

    /// The same. If the connection fails, its reader learns it.
    pub fn tell(&self, message: &impl Serialize, bytes: &[u8]) {
        let _ = self.send(message, bytes);
    }
}

fn send_on(out: &mut BufWriter<TcpStream>, message: &impl Serialize, bytes: &[u8]) -> std::io::Result<()> {
    frame::write(out, message, &[bytes]).and_then(|()| out.flush())
}

/// Locks a value that stays valid if a thread panics while it holds the lock.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// An error of a connection in words.
pub(crate) fn silence_or(error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            format!("it has said nothing for {} s", SILENCE_MAX.as_secs())
        }
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => "its connection has ended".into(),
        _ => error.to_string(),
    }
}

/// Starts a thread.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    #[cfg(test)]
    if tests::NO_THREADS.get() {
        return Err(RemoteError::NoThread { reason: "a test".into() });
    }
    let started = std::thread::Builder::new().name(name.into()).spawn(run);
    started.map_err(|error| RemoteError::NoThread { reason: error.to_string() })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;
    use std::io::ErrorKind;

    use super::*;

    thread_local! {
        /// Whether this thread cannot start others.
        pub(crate) static NO_THREADS: Cell<bool> = const { Cell::new(false) };
    }

    #[test]
    fn a_connection_that_is_not_made_is_not_called_silent() {
        let timeout = || std::io::Error::from(ErrorKind::TimedOut);
        let reason = silence_or(&unconnected(timeout()));
        assert_eq!(reason, "no connection within 2 s: check the address, the port and the firewall");
        assert_eq!(silence_or(&timeout()), "it has said nothing for 5 s");
        assert_eq!(unconnected(ErrorKind::ConnectionRefused.into()).kind(), ErrorKind::ConnectionRefused);
    }
}

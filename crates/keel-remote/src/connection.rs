//! Connections between processes: how they are made, kept and found to be lost.

use std::io::{BufWriter, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::message::{Greeting, News, Welcome};
use crate::{RemoteError, Result, frame};

/// How often each end says that it is there.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);

/// A connection that is silent for this long is lost.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(5);

/// How long a connection may take to be made.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// Connects and sends the first message.
pub(crate) fn open(address: &str, greeting: &Greeting) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::other("the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_MAX) {
            Ok(mut stream) => {
                stream.set_nodelay(true)?;
                frame::write(&mut stream, greeting, &[])?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The same, and the node's answer. From then on a silent connection is lost.
pub(crate) fn greet(address: &str, greeting: &Greeting) -> std::io::Result<(TcpStream, Welcome)> {
    let mut stream = open(address, greeting)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    let welcome = frame::read(&mut stream, &mut Vec::new())?;
    Ok((stream, welcome))
}

/// Tells a node every second that the leader is there, from the first moment on: other nodes may be waited for.
pub(crate) fn keep_beating(out: &Arc<Mutex<BufWriter<TcpStream>>>) -> Result<()> {
    let weak = Arc::downgrade(out);
    spawn("keel-heartbeat", move || {
        while let Some(out) = weak.upgrade() {
            {
                let mut out = out.lock().unwrap_or_else(|e| e.into_inner());
                let _ = frame::write(&mut *out, &News::Here, &[]).and_then(|()| out.flush());
            }
            drop(out);
            std::thread::sleep(HEARTBEAT);
        }
    })
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
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(name.into()).spawn(run);
    started
        .map(drop)
        .map_err(|error| RemoteError::Lost { peer: "this process".into(), reason: error.to_string() })
}

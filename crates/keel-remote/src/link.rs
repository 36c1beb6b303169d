//! The leader's end of a device's connection.
//!
//! Requests go out in order. The answers to those that are waited for come back in the same order. A request that is
//! not waited for stays in the buffer until one that is: so the arrays that the host fills before a step and its launch
//! leave together.

use std::io::{BufReader, BufWriter, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::connection::{SILENCE_MAX, locked, silence_or};
use crate::frame;
use crate::message::{DeviceReply, Request};
use crate::{RemoteError, Result};

/// Bytes of requests that are collected before they leave.
const BUFFER_BYTES: usize = 256 << 10;

/// An answer and the bytes that follow it.
type Replied = Result<(DeviceReply, Vec<u8>)>;

/// What requests need to leave.
struct Out {
    stream: BufWriter<TcpStream>,
    /// Takes those who wait, in the order of their requests. Or why the connection has ended.
    waiters: std::result::Result<Sender<Sender<Replied>>, String>,
}

/// A connection with a device of another process.
pub(crate) struct Link {
    /// The device, in errors.
    name: String,
    out: Mutex<Out>,
    stream: TcpStream,
    /// Called when the connection has ended, with the reason.
    when_ended: Box<dyn Fn(&str) + Send + Sync>,
}

impl Link {
    /// Takes a connection whose other end is ready for requests.
    ///
    /// # Errors
    /// The system's.
    pub fn new(
        name: String,
        stream: TcpStream,
        when_ended: Box<dyn Fn(&str) + Send + Sync>,
    ) -> std::io::Result<Arc<Link>> {
        stream.set_nodelay(true)?;
        // The node says each second that it is there.
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        let (waiters, waiting) = channel();
        let writer = BufWriter::with_capacity(BUFFER_BYTES, stream.try_clone()?);
        let out = Mutex::new(Out { stream: writer, waiters: Ok(waiters) });
        let link = Arc::new(Link { name, out, stream: stream.try_clone()?, when_ended });
        let reader = Arc::downgrade(&link);
        std::thread::Builder::new().name("keel-link".into()).spawn(move || {
            let reason = answer_all(stream, &waiting);
            if let Some(link) = reader.upgrade() {
                link.close(&reason);
                (link.when_ended)(&reason);
            }
        })?;
        Ok(link)
    }

    /// The device, in errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        locked(&self.out)
    }

    /// Ends the connection. Requests from now on, and those that wait, are answered with an error.
    pub fn close(&self, reason: &str) {
        // Before the lock: a thread that writes holds it until the shutdown ends its write.
        let _ = self.stream.shutdown(Shutdown::Both);
        let mut out = self.out();
        if out.waiters.is_ok() {
            out.waiters = Err(reason.into());
        }
    }

    fn lost(&self, reason: &str) -> RemoteError {
        RemoteError::Lost { peer: self.name.clone(), reason: reason.into() }
    }

    /// Sends a request that is not waited for. If the connection has ended, the next one that is waited for says so.
    pub fn send(&self, request: &Request, bytes: &[&[u8]]) {
        debug_assert!(!request.has_reply(), "{request:?} is waited for");
        let mut out = self.out();
        if out.waiters.is_err() {
            return;
        }
        let written = frame::write(&mut out.stream, request, bytes);
        drop(out);
        if let Err(error) = written {
            self.fail(&error.to_string());
        }
    }

    /// The connection has failed.
    fn fail(&self, reason: &str) {
        self.close(reason);
        (self.when_ended)(reason);
    }

    /// Sends a request, and waits for its answer.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn ask(&self, request: &Request) -> Replied {
        debug_assert!(request.has_reply(), "{request:?} has no answer");
        let (answer, answered) = channel();
        {
            let mut out = self.out();
            // A reader that has gone drops the waiter, so nothing is waited for below.
            let waiters = out.waiters.as_ref().map_err(|reason| self.lost(reason))?;
            let _ = waiters.send(answer);
            let written = frame::write(&mut out.stream, request, &[]).and_then(|()| out.stream.flush());
            drop(out);
            if let Err(error) = written {
                self.fail(&error.to_string());
            }
        }
        let ended = || match &self.out().waiters {
            Ok(_) => self.lost("its connection has ended"),
            Err(reason) => self.lost(reason),
        };
        answered.recv().unwrap_or_else(|_| Err(ended()))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = self.stream.set_write_timeout(Some(SILENCE_MAX));
        let _ = self.out().stream.flush();
        // The reader may still be reading.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Hands each answer to its waiter. Returns why it cannot go on.
fn answer_all(stream: TcpStream, waiting: &Receiver<Sender<Replied>>) -> String {
    let mut stream = BufReader::new(stream);
    loop {
        let mut bytes = Vec::new();
        match frame::read(&mut stream, &mut bytes) {
            Ok(DeviceReply::Here) => {}
            // A waiter is there before its request leaves.
            Ok(answer) => match waiting.try_recv() {
                Ok(waiter) => drop(waiter.send(Ok((answer, bytes)))),
                Err(_) => return "it answers without having been asked".into(),
            },
            Err(error) => return silence_or(&error),
        }
    }
}

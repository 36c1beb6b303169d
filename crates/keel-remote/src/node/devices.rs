//! The open devices of a node, and the connections to which they are lent.

use std::net::TcpStream;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use keel_array::Runtime;

use super::{Session, refuse};
use crate::connection::{MessageSender, spawn};
use crate::message::{DeviceReply, HelloReply, Refusal};
use crate::{Members, device_worker};

/// Devices of a session, and its connections.
#[derive(Default)]
pub(super) struct Devices {
    pub size: usize,
    pub ranks: Range<usize>,
    pub members: Option<Arc<dyn Members>>,
    pub all: Vec<Device>,
    /// Threads that connect the devices with those of other processes.
    pub connecting: Vec<JoinHandle<()>>,
}

/// A device, and the last connection that the leader has opened for it.
pub(super) struct Device {
    pub runtime: Runtime,
    pub connection: Option<Connection>,
}

/// The connection of a device, and the thread that serves it.
pub(super) struct Connection {
    pub stream: Arc<TcpStream>,
    pub thread: JoinHandle<()>,
}

impl Device {
    /// Lends the device to a connection until that ends. The connection before ends when the leader closes it; until
    /// then a new one is told to come again.
    pub fn lend(
        &mut self,
        stream: &Arc<TcpStream>,
        index: usize,
        session: &Arc<Session>,
    ) -> Result<(), Refusal> {
        if self.connection.as_ref().is_some_and(|former| !former.thread.is_finished()) {
            return Err(Refusal::passing(format!("its device {index} still has an earlier connection")));
        }
        let out = stream.try_clone().map_err(|error| Refusal::passing(error.to_string()))?;
        let (own, runtime, session) = (Arc::clone(stream), self.runtime.clone(), Arc::clone(session));
        let thread =
            spawn(&format!("keel-device-{index}"), move || accept(&own, out, index, runtime, session))
                .map_err(|error| Refusal::passing(error.to_string()))?;
        self.connection = Some(Connection { stream: Arc::clone(stream), thread });
        Ok(())
    }
}

/// Accepts the connection of a device, and serves it until it ends.
fn accept(stream: &TcpStream, out: TcpStream, index: usize, runtime: Runtime, session: Arc<Session>) {
    // A leader that is gone is seen on its control connection. Here it says nothing while it asks for nothing.
    let _ = stream.set_read_timeout(None);
    let _ = stream.set_nodelay(true);
    let to = match MessageSender::new(out, &HelloReply::Accepted(()), DeviceReply::Here) {
        Ok(to) => to,
        Err(error) => return refuse(stream, Refusal::passing(error.to_string())),
    };
    if let Err(error) = device_worker::serve(stream, &to, runtime, session) {
        tracing::warn!("device {index}: {error}");
    }
}

#[cfg(test)]
pub(super) mod tests;

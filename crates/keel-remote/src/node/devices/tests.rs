use std::io;
use std::time::{Duration, Instant};

use keel_array::RuntimeOptions;
use keel_cpu::{CpuBackend, CpuOptions};

use super::*;
use crate::connection::locked;
use crate::connection::tests::NO_THREADS;
use crate::frame;
use crate::node::tests::{connection, session};
use crate::node::{END_MAX, LOOK};

/// A device that is lent to a leader.
pub(crate) struct LentDevice {
    pub runtime: Runtime,
    /// The leader's end of its connection.
    pub stream: TcpStream,
}

/// A device whose connection is accepted.
pub(crate) fn lent_device() -> LentDevice {
    let (session, _control, runtime) = session_with_device();
    LentDevice { runtime, stream: connect_device(&session) }
}

/// A session with an open device, and the leader's end of its control connection.
fn session_with_device() -> (Arc<Session>, TcpStream, Runtime) {
    let (session, leader) = session(1);
    let backend = Arc::new(CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }));
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    locked(&session.devices).all = vec![Device { runtime: runtime.clone(), connection: None }];
    (session, leader, runtime)
}

/// Opens a connection of device 0, as a leader that tries again while its refusal may pass.
fn connect_device(session: &Arc<Session>) -> TcpStream {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let (own, mut leader) = connection();
        match session.serve_device(&Arc::new(own), 0) {
            Err(Refusal { may_pass: true, .. }) if Instant::now() < until => std::thread::sleep(LOOK),
            served => {
                assert_eq!(served, Ok(()));
                let reply = frame::read(&mut leader, &mut Vec::new()).expect("it answers");
                assert!(matches!(reply, HelloReply::Accepted(())), "{reply:?}");
                return leader;
            }
        }
    }
}

/// The leader may have waited too long for the acceptance, or it was lost on the way.
#[test]
fn a_connection_of_a_device_that_was_given_up_is_replaced() {
    let (session, mut control, _runtime) = session_with_device();
    NO_THREADS.set(true);
    let refusal = session.serve_device(&Arc::new(connection().0), 0).expect_err("no thread can serve it");
    NO_THREADS.set(false);
    assert!(refusal.may_pass && refusal.reason.contains("no thread can be started"), "{refusal:?}");
    drop(connect_device(&session));
    let mut live = connect_device(&session);
    // The hello of a connection that was given up may be read after this one has the device.
    let refusal = session.serve_device(&Arc::new(connection().0), 0).expect_err("the live one has it");
    assert_eq!(refusal, Refusal::passing("its device 0 still has an earlier connection"));
    // The heartbeat comes a second after the acceptance, so the refusal has left the connection alive.
    let next = frame::read(&mut live, &mut Vec::new()).expect("its heartbeat");
    assert!(matches!(next, DeviceReply::Here), "{next:?}");
    drop(live);
    let _next = connect_device(&session);
    // The leader keeps the node.
    control.set_nonblocking(true).expect("it can be asked");
    let end = io::Read::read_to_end(&mut control, &mut Vec::new()).expect_err("no end");
    assert_eq!(end.kind(), io::ErrorKind::WouldBlock);
    assert!(session.end(END_MAX));
}

use std::net::{Shutdown, TcpStream};

use keel_array::{Category, Compute, DType, WeightFormat};
use keel_cpu::{CpuBackend, CpuOptions};

use super::*;
use crate::node::tests::lent_device;

/// A backend whose device is at the other end of a connection.
fn remote(stream: &TcpStream) -> RemoteBackend {
    let stream = stream.try_clone().expect("a handle");
    let link = Link::new("node 1".into(), stream, Box::new(|_| ())).expect("a thread");
    let planner = Arc::new(CpuBackend::planning(CpuOptions::default()));
    RemoteBackend::new(link, planner, Weak::new())
}

/// What was written to the device may be missing, so no step may succeed on it. `DeviceLost` would end the engine as if
/// it could not come back.
#[test]
fn nothing_succeeds_on_a_connection_that_has_ended() {
    let lent = lent_device();
    let backend = remote(&lent.stream);
    let memory = backend.allocate(64).expect("it has room");
    let mut bytes = [0; 64];
    backend.write(&*memory, 0, &[1; 64]);
    backend.read(&*memory, 0, &mut bytes).expect("it is there");
    assert_eq!(bytes, [1; 64]);
    lent.stream.shutdown(Shutdown::Both).expect("it is open");
    for _ in 0..2 {
        backend.write(&*memory, 0, &[2; 64]);
        let outcomes = [
            backend.read(&*memory, 0, &mut bytes),
            backend.read_settled(&*memory, 0, &mut bytes),
            backend.make_ready(&[], &mut |_, _| ()),
        ];
        for outcome in outcomes {
            assert!(matches!(outcome, Err(ArrayError::Kernel { .. })), "{outcome:?}");
        }
    }
}

/// Queued work may hold a handle to an arena that the stream has replaced.
#[test]
fn an_arena_lives_as_long_as_its_last_handle() {
    let lent = lent_device();
    let backend = remote(&lent.stream);
    let used = || {
        // What was sent before this question has been done.
        backend.device_usage();
        lent.runtime.ledger().active().get(Category::Activations)
    };
    let first = backend.allocate_arena(1 << 12).expect("it has room");
    let second = backend.allocate_arena(1 << 12).expect("it has room");
    drop(first);
    assert_eq!(used(), 1 << 12);
    assert_eq!(backend.grow_arena(&*second, 1 << 13), Ok(true));
    assert_eq!(used(), 1 << 13);
    drop(second);
    assert_eq!(used(), 0);
}

/// Such a message would end the connection.
#[test]
fn rows_that_are_too_long_for_a_message_are_refused() {
    let lent = lent_device();
    let backend = remote(&lent.stream);
    let memory = backend.allocate(64).expect("it has room");
    let format = WeightFormat::Dense(DType::F32);
    let spec = WeightSpec { experts: 1, rows: 4, cols: 4, format, compute: Compute::F32 };
    let rows = vec![0u8; BYTES_MAX + 1];
    let block = RowBlock { expert: 0, first_row: 0, rows: 4, data: RowData::Dense(&rows) };
    let error = backend.pack(&spec, &*memory, 0, &block).expect_err("it is refused").to_string();
    assert!(error.contains("4 rows are 67108865 bytes, and at most 67108864 are sent"), "{error}");
    backend.read(&*memory, 0, &mut [0; 64]).expect("it is there");
}

use keel_array::{Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::EngineOptions;
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::demo;
use keel_weights::Checkpoint;

use super::*;
use crate::memory::requests::RequestMemory;

/// A worker without a thread, whose queue has one place.
fn worker() -> (EngineHandle, Worker) {
    let checkpoint = Checkpoint::open(&demo()).expect("it opens");
    let runtime = Runtime::new(Arc::new(CpuBackend::new(CpuOptions::default())), RuntimeOptions::default());
    let options =
        EngineOptions { context: 256, sequences: 1, pool_pages: Some(8), ..EngineOptions::default() };
    let parameters = CheckpointParameters(&checkpoint);
    let engine =
        Engine::load(&runtime, &parameters, checkpoint.config(), options, &|_| ()).expect("it loads");
    let options = BatchOptions { queue_limit: 1, ..BatchOptions::default() };
    EngineHandle::of(batcher(engine, options), None)
}

/// Sends a request. Returns the command's answer, and the other end of its events.
fn submit(handle: &EngineHandle, id: u64) -> (oneshot::Receiver<Result<(), EngineError>>, Events) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let meter = Arc::new(RequestMemory::new(1 << 20, 0).meter());
    let listener = Listener { sender, meter: Arc::clone(&meter), tables: None, patience: None };
    let (accepted, answer) = oneshot::channel();
    let (requests, listeners) = (vec![BatchRequest::new(id, vec![1], 4)], HashMap::from([(id, listener)]));
    assert!(handle.send(Command::Submit { requests, listeners, accepted }).is_ok());
    (answer, Events { receiver, meter })
}

#[test]
fn clients_that_have_left_keep_no_place_in_the_queue() {
    let (handle, mut worker) = worker();
    let (mut accepted, waiting) = submit(&handle, 1);
    assert!(worker.take_commands());
    assert!(matches!(accepted.try_recv(), Ok(Ok(()))));
    let (mut refused, _) = submit(&handle, 2);
    assert!(worker.take_commands());
    assert!(matches!(refused.try_recv(), Ok(Err(EngineError::QueueFull { .. }))));
    // One leaves the queue, and one leaves before it is in the queue.
    drop(waiting);
    drop(submit(&handle, 3));
    let (mut accepted, _events) = submit(&handle, 4);
    assert!(worker.take_commands());
    let outcome = accepted.try_recv();
    assert!(matches!(outcome, Ok(Ok(()))), "{outcome:?}");
    assert_eq!(worker.batcher.status().waiting, 1);
}

/// A client may leave between two looks at its channel.
#[test]
fn a_request_that_leaves_the_list_is_cancelled() {
    for (looks, stays) in [([false, true], true), ([true, true], false), ([false, false], true)] {
        let (mut looks, mut cancelled) = (looks.into_iter(), false);
        let goes_on = goes_on(|| looks.next().expect("two looks at most"), || cancelled = true);
        assert_eq!((goes_on, cancelled), (stays, !stays));
    }
}

//! A model whose devices belong to several processes: the bits of one process, failures, lost nodes, and the next
//! leader. The processes are threads that talk over sockets; their devices exchange arrays as those of one process do.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::batching::{assert_all_is_back, run};
use crate::common::nodes::{Cable, Cut, Led, Nodes, Wrap};
use crate::common::splitting::{self, Fault, end, engine_on};
use crate::common::{all_logits, engine, exact, expected, fixture, models, runtime};
use keel_array::{ArrayError, Backend, Launch};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher};
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::CheckpointParameters;
use keel_remote::{Cluster, RemoteError};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;

/// Stages, and devices of each.
type Grid = (usize, usize);

fn as_they_are() -> Arc<Wrap> {
    Arc::new(|_, backend| backend)
}

/// An engine on devices of nodes and one of its own.
fn lead(
    nodes: &Nodes,
    addresses: &[String],
    folder: &Path,
    options: EngineOptions,
    grid: Grid,
) -> Result<(Arc<Cluster>, Engine), String> {
    let checkpoint = Checkpoint::open(folder).expect("the checkpoint opens");
    let parameters = CheckpointParameters(&checkpoint);
    let source = (&parameters as _, checkpoint.config());
    let parts = splitting::parts(source, options, grid).map_err(|error| error.to_string())?;
    let Led { cluster, backends } = nodes.lead_at(addresses, grid.1).expect("the nodes follow");
    assert_eq!(backends.len(), parts.len());
    let engine = splitting::load_on(source, options, backends, &parts).map_err(|error| error.to_string())?;
    Ok((cluster, engine))
}

/// Runs `test` on a thread of its own, and fails if it does not end.
fn within(seconds: u64, test: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        test();
        let _ = sender.send(());
    });
    match receiver.recv_timeout(Duration::from_secs(seconds)) {
        Err(RecvTimeoutError::Timeout) => panic!("something waits without end"),
        _ => thread.join().expect("the test passes"),
    }
}

#[test]
fn devices_of_nodes_give_the_bits_of_one_process() {
    within(300, || {
        for (counts, grid) in [(&[1][..], (2, 1)), (&[1], (1, 2)), (&[2, 1], (2, 2)), (&[2], (3, 1))] {
            let nodes = Nodes::start(counts, as_they_are());
            let mut compared = 0;
            for name in models() {
                let folder = fixture(name);
                let want = expected(&folder);
                let mtp = want.mtp_logits.is_some();
                let mut here = match std::panic::catch_unwind(|| engine_on(&folder, exact(), grid, |_, b| b))
                {
                    Ok(here) => here,
                    Err(_) => continue,
                };
                let (cluster, mut there) =
                    lead(&nodes, &nodes.addresses, &folder, exact(), grid).expect("it loads as there");
                for one_by_one in [false, true] {
                    let [here, there] =
                        [&mut here, &mut there].map(|engine| all_logits(engine, &want.ids, one_by_one, mtp));
                    assert!(here == there, "{name} in {grid:?}, one by one: {one_by_one}");
                }
                assert_eq!(cluster.lost(), None);
                end(there);
                drop(cluster);
                nodes.expect_all_freed();
                compared += 1;
            }
            assert!(compared >= 5, "{compared} fixtures in {grid:?}");
        }
    });
}

fn serving() -> EngineOptions {
    EngineOptions { sequences: 20, context: 512, prefill_step: 128, checkpoints: 8, ..exact() }
}

fn request(i: u64) -> BatchRequest {
    let prompt = (0..30 + i as usize * 37 % 200).map(|j| ((j * 7 + i as usize * 13) % 90) as u32).collect();
    BatchRequest::new(i, prompt, 20)
}

/// Prefixes, states that are kept, drafts, parking and groups of a pipeline, with all of it on nodes.
#[test]
fn a_batch_on_nodes_gives_the_answers_of_one_process() {
    within(300, || {
        let nodes = Nodes::start(&[1], as_they_are());
        let parks = EngineOptions { pool_pages: Some(10), swap_bytes: 1 << 24, ..serving() };
        for (options, grid) in [
            (serving(), (2, 1)),
            (serving(), (1, 2)),
            (EngineOptions { drafts: 2, ..serving() }, (2, 1)),
            (EngineOptions { drafts: 2, ..serving() }, (1, 2)),
            (parks, (1, 2)),
        ] {
            let folder = fixture("qwen3_5");
            let batch = |engine| {
                let options =
                    BatchOptions { step_tokens: 256, reuse_generated: true, ..BatchOptions::default() };
                Batcher::new(engine, options)
            };
            let mut here = batch(engine_on(&folder, options, grid, |_, backend| backend));
            let (cluster, there) = lead(&nodes, &nodes.addresses, &folder, options, grid).expect("it loads");
            let mut there = batch(there);
            for round in 0..2 {
                let answers =
                    [&mut here, &mut there].map(|batcher| run(batcher, (0..18).map(request).collect()));
                let [here, there] = answers;
                for (i, (here, there)) in here.iter().zip(&there).enumerate() {
                    assert!(here.error.is_none() && there.error.is_none(), "{:?}", there.error);
                    assert_eq!(here.tokens, there.tokens, "{grid:?}, round {round}, answer {i}");
                }
            }
            assert_all_is_back(&mut there);
            end(there.into_engine());
            drop(cluster);
            nodes.expect_all_freed();
        }
    });
}

/// The failing device is that of the last node, and of the first: each process hears of it from the others, early or
/// late.
#[test]
fn a_launch_that_fails_on_a_node_ends_its_step_and_the_next_one_runs() {
    within(200, || {
        for (counts, grid) in
            [(&[1][..], (2, 1)), (&[1], (1, 2)), (&[1, 1], (3, 1)), (&[1, 2], (2, 2)), (&[2, 1], (1, 4))]
        {
            for faulty in [0, counts.iter().sum::<usize>() - 1] {
                let fault = Arc::new(Fault::default());
                let wrapped = Arc::clone(&fault);
                let wrap: Arc<Wrap> = Arc::new(move |rank, backend| match rank == faulty {
                    true => InterceptedBackend::new(backend, Arc::clone(&wrapped)) as _,
                    false => backend,
                });
                let nodes = Nodes::start(counts, wrap);
                let folder = fixture("llama");
                let Ok((_cluster, engine)) = lead(&nodes, &nodes.addresses, &folder, serving(), grid) else {
                    assert_eq!(grid, (1, 4), "its heads do not divide by four");
                    continue;
                };
                let mut batcher = Batcher::new(engine, BatchOptions::default());
                let want = run(&mut batcher, vec![request(0)]).remove(0);
                for round in 0..3 {
                    fault.0.store(3, Ordering::Relaxed);
                    let got = run(&mut batcher, vec![request(0)]).remove(0);
                    let of = format!("{counts:?} in {grid:?}, device {faulty}, round {round}");
                    assert_eq!(fault.0.load(Ordering::Relaxed), usize::MAX, "{of}: it came to the fault");
                    // Keys and values are written again, so the answer is whole.
                    assert_eq!((got.error.map(|e| e.to_string()), &got.tokens), (None, &want.tokens), "{of}");
                    assert_eq!(
                        batcher.status().failed_steps,
                        round + 1,
                        "{of}: no step fails but the faulty one"
                    );
                }
            }
        }
    });
}

/// The first leader's steps end with an error soon, its nodes free everything, and the next leader loads.
#[test]
fn a_lost_node_ends_answers_with_an_error_and_comes_back() {
    within(200, || {
        for (how, grid) in [
            (Cut::Closed, (1, 2)),
            (Cut::Silent, (1, 2)),
            (Cut::Closed, (2, 1)),
            (Cut::Silent, (2, 1)),
            (Cut::SilentDevices, (2, 1)),
        ] {
            let nodes = Nodes::start(&[1], as_they_are());
            let cable = Cable::to(&nodes.addresses[0]);
            let folder = fixture("qwen3_5");
            let addresses = [cable.address.clone()];
            let (cluster, engine) = lead(&nodes, &addresses, &folder, serving(), grid).expect("it loads");
            let told = Arc::new(Mutex::new(false));
            let tell = Arc::clone(&told);
            cluster.when_lost(move || *tell.lock().expect("no test panics here") = true);
            let mut batcher = Batcher::new(engine, BatchOptions::default());
            assert!(run(&mut batcher, vec![request(0)])[0].error.is_none());
            cable.cut(how);
            let start = Instant::now();
            for i in 0..3 {
                let request = BatchRequest { id: 0, ..request(i) };
                let error = run(&mut batcher, vec![request])[0].error.as_ref().expect("lost").to_string();
                let is_named = error.contains("node 1 (127.0.0.1:") && error.contains("is lost");
                let is_of_group = error.contains("device 0 of the group has failed");
                assert!(is_named || is_of_group, "{how:?}: {error}");
            }
            // 5 s of silence, and time for a slow core.
            assert!(start.elapsed() < Duration::from_secs(30), "{how:?}: {:?}", start.elapsed());
            // The control connection may notice a little later.
            let is_told = || *told.lock().expect("no test panics here");
            let until = Instant::now() + Duration::from_secs(30);
            while !is_told() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(is_told(), "{how:?}");
            let lost = cluster.lost().expect("it is lost");
            assert!(lost.starts_with("node 1 (127.0.0.1:") && lost.contains("is lost: "), "{lost}");
            drop((batcher, cluster));
            nodes.expect_all_freed();
            let (_cluster, engine) =
                lead(&nodes, &nodes.addresses, &folder, serving(), grid).expect("it is back");
            let mut batcher = Batcher::new(engine, BatchOptions::default());
            assert!(run(&mut batcher, vec![request(0)])[0].error.is_none(), "{how:?}");
        }
    });
}

/// Data on a lost node cannot be read. Zeros must not take its place.
#[test]
fn a_lost_node_gives_an_error_and_no_bytes() {
    within(100, || {
        let nodes = Nodes::start(&[1], as_they_are());
        let cable = Cable::to(&nodes.addresses[0]);
        let folder = fixture("qwen3_5");
        let addresses = [cable.address.clone()];
        let (cluster, engine) = lead(&nodes, &addresses, &folder, serving(), (2, 1)).expect("it loads");
        let mut batcher =
            Batcher::new(engine, BatchOptions { reuse_prefixes: true, ..BatchOptions::default() });
        let saved = tempfile::tempdir().expect("a folder");
        // 141 tokens, of which two blocks are remembered.
        assert!(run(&mut batcher, vec![BatchRequest { id: 0, ..request(3) }])[0].error.is_none());
        assert!(batcher.save_prefixes("m", saved.path()).expect("it is there") > 0);
        cable.cut(Cut::Closed);
        while cluster.lost().is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let error = batcher.save_prefixes("m", saved.path()).expect_err("half of it is lost").to_string();
        assert!(error.contains("is lost"), "{error}");
        drop((batcher, cluster));
        let (_cluster, engine) =
            lead(&nodes, &nodes.addresses, &folder, serving(), (2, 1)).expect("it is back");
        let mut batcher = Batcher::new(engine, BatchOptions::default());
        let restored = batcher.restore_prefixes("m", saved.path());
        assert!(
            restored.texts > 0 && restored.problems.is_empty(),
            "what was saved before stays: {restored:?}"
        );
    });
}

/// A launch may take longer than a connection may be silent: the node says meanwhile that it is there.
#[test]
fn a_launch_that_takes_long_is_waited_for() {
    struct Slow(AtomicUsize);
    impl Interceptor for Slow {
        fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
            if self.0.fetch_add(1, Ordering::Relaxed) == 40 {
                std::thread::sleep(Duration::from_secs(7));
            }
            backend.launch(launch)
        }
    }
    within(100, || {
        let slow = Arc::new(Slow(AtomicUsize::new(0)));
        let wrapped = Arc::clone(&slow);
        let wrap: Arc<Wrap> =
            Arc::new(move |_, backend| InterceptedBackend::new(backend, Arc::clone(&wrapped)) as _);
        let nodes = Nodes::start(&[1], wrap);
        let (_cluster, engine) =
            lead(&nodes, &nodes.addresses, &fixture("llama"), serving(), (2, 1)).expect("it loads");
        let mut batcher = Batcher::new(engine, BatchOptions::default());
        let start = Instant::now();
        for i in 0..4 {
            let request = BatchRequest { id: 0, ..request(i) };
            assert!(run(&mut batcher, vec![request])[0].error.is_none());
        }
        assert!(slow.0.load(Ordering::Relaxed) > 40 && start.elapsed() >= Duration::from_secs(7));
    });
}

/// So no step on them runs ahead of the host.
#[test]
fn devices_of_nodes_say_that_their_group_spans_processes() {
    within(60, || {
        let nodes = Nodes::start(&[1], as_they_are());
        let Led { cluster: _cluster, backends } = nodes.lead(1).expect("it follows");
        assert!(backends[0].group().expect("it is in a group").spans_processes());
    });
}

#[test]
fn a_node_that_is_away_busy_or_refuses_is_named() {
    within(60, || {
        let nobody = Cluster::connect(&["127.0.0.1:9".into()], Duration::ZERO).expect_err("nobody is there");
        let text = nobody.to_string();
        assert!(matches!(nobody, RemoteError::Unreachable { node: 1, .. }), "{text}");
        assert!(text.contains("127.0.0.1:9") && text.contains("--node 1"), "{text}");
        let nodes = Nodes::start(&[2], as_they_are());
        let Led { cluster: _cluster, backends } = nodes.lead(3).expect("it follows");
        assert_eq!(backends.len(), 3);
        let busy =
            Cluster::connect(&nodes.addresses, Duration::ZERO).expect_err("it has a leader").to_string();
        assert!(busy.contains("it has a leader; end that one first"), "{busy}");
    });
}

/// The leader reads the same logits from a model on nodes as from a whole model next to it.
#[test]
fn a_model_on_nodes_is_the_whole_model() {
    within(100, || {
        let nodes = Nodes::start(&[1, 1], as_they_are());
        let folder = fixture("qwen3_5");
        let want = expected(&folder);
        let mut whole = engine(&folder, &runtime(1), exact());
        let (_cluster, mut parts) =
            lead(&nodes, &nodes.addresses, &folder, exact(), (3, 1)).expect("it loads");
        let [whole, parts] =
            [&mut whole, &mut parts].map(|engine| all_logits(engine, &want.ids, false, true));
        assert!(whole == parts);
    });
}

//! A vision tower on a device of its own: the same features and logits to the bit, and every byte on the device that
//! has it. Steps of the model run while it looks.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::common::batching::{Outcome, assert_all_is_back, finish, finish_from, run, step};
use crate::common::looking::{MadeUp, outcome, seeing};
use crate::common::runtime;
use keel_array::{ArrayError, Backend, Category, Launch, Runtime, RuntimeOptions};
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::batch::{BatchOptions, BatchRequest, Batcher, PictureInput, RequestVision};
use keel_engine::split::PlacedPart;
use keel_engine::{Engine, EngineOptions, LateWork, VisionOptions, plan};
use keel_models::loading::CheckpointParameters;
use keel_testkit::fixtures::{SEEING, VLM, seeing_fixture, vlm_fixture};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use keel_weights::Checkpoint;

fn cpu_plan() -> Arc<dyn Backend> {
    Arc::new(CpuBackend::planning(CpuOptions { threads: Some(2), ..CpuOptions::default() }))
}

#[test]
fn a_tower_on_another_device_sees_the_same() {
    let own = SEEING.into_iter().map(|name| (name, seeing_fixture(name)));
    for (name, folder) in own.chain(VLM.into_iter().filter_map(|name| Some((name, vlm_fixture(name)?)))) {
        let source = Checkpoint::open(&folder).expect("opens");
        let parameters = CheckpointParameters(&source);
        let json = source.config();
        let whole = runtime(2);
        let mut engine = Engine::load(&whole, &parameters, json, seeing(), &|_| ()).expect("it loads");
        let want = outcome(&mut engine);
        let all = whole.ledger().active();
        drop(engine);

        let (model, tower) = (runtime(2), runtime(2));
        let devices = [PlacedPart::whole(model.clone())];
        let mut apart =
            Engine::load_on(&devices, Some(&tower), &parameters, json, seeing(), &|_| ()).expect("it loads");
        apart.make_ready(&mut |_, _, _| ()).expect("it is made ready");
        let planned = [PlacedPart::whole(cpu_plan())];
        let planned = plan::plan_on(&planned, Some(&cpu_plan()), &parameters, json, seeing()).expect("plans");
        let held = || vec![model.ledger().active(), tower.ledger().active()];
        assert_eq!(planned, held(), "{name}");
        for _ in 0..2 {
            let got = outcome(&mut apart);
            assert!(got == want, "{name}: other features or logits");
        }
        assert_eq!(planned, held(), "{name}: nothing else is allocated");
        assert_eq!(planned, vec![model.ledger().peak(), tower.ledger().peak()], "{name}");
        let late = apart.late_work();
        assert_eq!((late.allocate, late.compile), (0, 0), "{name}");
        let [on_model, on_tower] = planned[..] else { panic!("two devices") };
        for category in [Category::Weights, Category::Features] {
            let sum = on_model.get(category) + on_tower.get(category);
            assert_eq!(sum, all.get(category), "{name}: {category}");
        }
        assert_eq!(on_model.get(Category::Features), 0, "{name}");
        assert!(on_tower.get(Category::Vision) > 0 && on_tower.get(Category::Weights) > 0, "{name}");
        assert_eq!(on_tower.get(Category::Kv), 0, "{name}");
        assert!(on_model.total() < all.total(), "{name}: the model's device has less");
        drop(apart);
        // The arena is the runtime's.
        let left = tower.ledger().active();
        assert_eq!(left.total(), left.get(Category::Activations), "{name}: all is given back");
    }
}

/// The effect on launches of the tower.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Gate {
    Open,
    Closed,
    /// The next launch fails. Then the gate is open.
    Failing,
}

/// Holds launches of the tower until the test lets them go on.
struct Gated {
    gate: Mutex<(Gate, usize)>,
    changed: Condvar,
    /// The names of the threads that have written to the tower's memory.
    writers: Mutex<BTreeSet<String>>,
}

impl Gated {
    fn set(&self, gate: Gate) {
        self.gate.lock().expect("no panic").0 = gate;
        self.changed.notify_all();
    }

    /// Launches that have come to the gate.
    fn arrived(&self) -> usize {
        self.gate.lock().expect("no panic").1
    }
}

impl Interceptor for Gated {
    fn before_write(&self, _bytes: usize) {
        let name = std::thread::current().name().unwrap_or_default().to_string();
        self.writers.lock().expect("no panic").insert(name);
    }

    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> keel_array::Result<()> {
        let failed = |reason: &str| ArrayError::Kernel { op: "gate".into(), reason: reason.into() };
        let mut gate = self.gate.lock().expect("no panic");
        gate.1 += 1;
        let is_closed = |gate: &mut (Gate, usize)| gate.0 == Gate::Closed;
        let (mut gate, waited) =
            self.changed.wait_timeout_while(gate, Duration::from_secs(60), is_closed).expect("no panic");
        if waited.timed_out() {
            return Err(failed("nothing but the tower goes on"));
        }
        if gate.0 == Gate::Failing {
            gate.0 = Gate::Open;
            return Err(failed("as the test asks"));
        }
        drop(gate);
        backend.launch(launch)
    }
}

/// A batch whose tower has a device of its own, with a gate.
struct Apart {
    gated: Arc<Gated>,
    runtimes: [Runtime; 2],
    batcher: Batcher,
}

/// One block of the tower is a piece.
fn cut() -> EngineOptions {
    let vision = VisionOptions { patches: 64, pictures: 2, piece_tokens: 1 };
    EngineOptions { vision: Some(vision), all_logits: false, sequences: 3, ..seeing() }
}

fn load(name: &str, model: &Runtime, tower: Option<&Runtime>) -> Engine {
    let source = Checkpoint::open(&seeing_fixture(name)).expect("opens");
    let model = [PlacedPart::whole(model.clone())];
    let parameters = CheckpointParameters(&source);
    Engine::load_on(&model, tower, &parameters, source.config(), cut(), &|_| ()).expect("it loads")
}

impl Apart {
    fn new(name: &str) -> Apart {
        let gated = Arc::new(Gated {
            gate: Mutex::new((Gate::Open, 0)),
            changed: Condvar::new(),
            writers: Mutex::default(),
        });
        let cpu = Arc::new(CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }));
        let tower = Runtime::new(InterceptedBackend::new(cpu, Arc::clone(&gated)), RuntimeOptions::default());
        let model = runtime(1);
        let mut engine = load(name, &model, Some(&tower));
        engine.make_ready(&mut |_, _, _| ()).expect("it is made ready");
        Apart { gated, runtimes: [model, tower], batcher: Batcher::new(engine, BatchOptions::default()) }
    }

    /// Steps until the tower is at the closed gate.
    fn wait_for_tower(&mut self, outcomes: &mut [Outcome]) {
        let before = self.gated.arrived();
        while self.gated.arrived() == before {
            step(&mut self.batcher, Instant::now(), outcomes);
        }
    }
}

fn text(id: u64) -> BatchRequest {
    BatchRequest::new(id, (0..70).map(|i| 20 + i * 7 % 60).collect(), 12)
}

fn picture(batcher: &Batcher, id: u64, seed: u64) -> BatchRequest {
    let config = batcher.engine().vision().expect("it sees");
    let MadeUp { values, grid, tokens, .. } = MadeUp::new(config, seed);
    let input = PictureInput { key: [seed as u8; 32], values: Arc::new(values), grid, is_video: false };
    let vision = RequestVision::new(config, &tokens, vec![input]).expect("the tokens fit");
    BatchRequest { vision: Some(vision), ..BatchRequest::new(id, tokens, 6) }
}

fn submit(batcher: &mut Batcher, request: BatchRequest) {
    batcher.submit(request, Instant::now()).expect("it is taken");
}

/// The tokens of a text, of picture 1 and of picture 2 with the tower on the model's device, and the pieces that the
/// tower took for both.
fn expected(name: &str) -> ([Vec<u32>; 3], u64) {
    let mut whole = Batcher::new(load(name, &runtime(1), None), BatchOptions::default());
    let requests = vec![text(0), picture(&whole, 1, 1), picture(&whole, 2, 2)];
    let tokens: Vec<_> = run(&mut whole, requests).into_iter().map(|outcome| outcome.tokens).collect();
    (tokens.try_into().expect("three"), whole.status().pictures.pieces)
}

/// Outcomes for requests 0, 1 and 2.
fn outcomes() -> Vec<Outcome> {
    (0..3).map(|_| Outcome::default()).collect()
}

/// Steps until the text has ended, while the tower is at the closed gate.
fn run_text(apart: &mut Apart, outcomes: &mut [Outcome]) {
    submit(&mut apart.batcher, text(0));
    for _ in 0..1000 {
        step(&mut apart.batcher, Instant::now(), outcomes);
        if outcomes[0].finish.is_some() {
            return;
        }
    }
    panic!("the text does not come to an end");
}

/// As on a GPU: every step and piece is compiled and run without a request, before the first request comes.
struct Compiling;

impl Interceptor for Compiling {
    fn is_compiling(&self, _: &dyn Backend) -> bool {
        true
    }
}

#[test]
fn a_tower_is_made_ready_where_kernels_are_compiled() {
    let compiling = || {
        let cpu = Arc::new(CpuBackend::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }));
        Runtime::new(InterceptedBackend::new(cpu, Arc::new(Compiling)), RuntimeOptions::default())
    };
    for name in SEEING {
        let (want, _) = expected(name);
        for tower in [None, Some(compiling())] {
            let mut engine = load(name, &compiling(), tower.as_ref());
            engine.make_ready(&mut |_, _, _| ()).expect("it is made ready");
            let mut batcher = Batcher::new(engine, BatchOptions::default());
            let requests = vec![text(0), picture(&batcher, 1, 1), picture(&batcher, 2, 2)];
            let got = run(&mut batcher, requests).into_iter().map(|outcome| outcome.tokens);
            assert_eq!(got.collect::<Vec<_>>(), want, "{name}");
            assert_eq!(batcher.status().late_work, LateWork::default(), "{name}");
        }
    }
}

#[test]
fn a_text_is_answered_while_a_tower_apart_looks() {
    for name in SEEING {
        let (want, pieces) = expected(name);
        let mut apart = Apart::new(name);
        let held = apart.runtimes.each_ref().map(|runtime| runtime.ledger().active());
        let mut got = outcomes();
        apart.gated.set(Gate::Closed);
        apart.gated.writers.lock().expect("no panic").clear();
        for number in [1, 2] {
            let request = picture(&apart.batcher, number, number);
            submit(&mut apart.batcher, request);
        }
        apart.wait_for_tower(&mut got);
        run_text(&mut apart, &mut got);
        assert_eq!(got[0].tokens, want[0], "{name}");
        let seen = apart.batcher.status().pictures;
        assert_eq!((seen.encoded, seen.pieces), (0, 0), "{name}: the tower is at the gate");
        assert!(got[1].tokens.is_empty() && got[2].tokens.is_empty(), "{name}");
        apart.gated.set(Gate::Open);
        let got = finish_from(&mut apart.batcher, got);
        assert!(got.iter().all(|outcome| outcome.error.is_none()), "{name}: {got:?}");
        assert_eq!([&got[1].tokens, &got[2].tokens], [&want[1], &want[2]], "{name}");
        let seen = apart.batcher.status().pictures;
        assert_eq!((seen.encoded, seen.pieces), (2, pieces), "{name}");
        assert_all_is_back(&mut apart.batcher);
        assert_eq!(held, apart.runtimes.each_ref().map(|runtime| runtime.ledger().active()), "{name}");
        let writers = std::mem::take(&mut *apart.gated.writers.lock().expect("no panic"));
        assert!(writers.iter().eq(["keel-vision-tower"]), "{name}: no step waits for a copy: {writers:?}");
        let late = apart.batcher.engine().late_work();
        assert_eq!((late.trace, late.allocate, late.compile), (0, 0, 0), "{name}");
    }
}

#[test]
fn a_cancelled_look_at_a_tower_apart_harms_no_other() {
    for name in SEEING {
        let (want, _) = expected(name);
        let mut apart = Apart::new(name);
        let mut got = outcomes();
        apart.gated.set(Gate::Closed);
        let first = picture(&apart.batcher, 1, 1);
        submit(&mut apart.batcher, first);
        apart.wait_for_tower(&mut got);
        apart.batcher.cancel(1);
        assert!(apart.batcher.is_idle(), "{name}: nobody waits for the tower");
        // The tower is still at the first picture.
        let second = picture(&apart.batcher, 2, 2);
        submit(&mut apart.batcher, second);
        run_text(&mut apart, &mut got);
        assert!(got[2].tokens.is_empty(), "{name}");
        apart.gated.set(Gate::Open);
        let got = finish_from(&mut apart.batcher, got);
        assert_eq!([&got[0].tokens, &got[2].tokens], [&want[0], &want[2]], "{name}");
        assert_all_is_back(&mut apart.batcher);

        // The engine is taken back in the middle of a look.
        apart.gated.set(Gate::Closed);
        let again = picture(&apart.batcher, 1, 1);
        submit(&mut apart.batcher, again);
        apart.wait_for_tower(&mut outcomes());
        let gated = Arc::clone(&apart.gated);
        let opens = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            gated.set(Gate::Open);
        });
        let mut engine = apart.batcher.into_engine();
        let MadeUp { values, grid, .. } = MadeUp::new(engine.vision().expect("it sees"), 2);
        let features = engine.encode_picture(&values, grid).expect("it encodes");
        let alone = load(name, &runtime(1), None).encode_picture(&values, grid).expect("it encodes");
        assert!(features == alone, "{name}");
        opens.join().expect("it ends");
        drop(engine);
        let left = apart.runtimes[1].ledger().active();
        assert_eq!(left.total(), left.get(Category::Activations), "{name}: all is given back");
    }
}

#[test]
fn a_failed_look_at_a_tower_apart_ends_its_request_alone() {
    for name in SEEING {
        let (want, _) = expected(name);
        let mut apart = Apart::new(name);
        apart.gated.set(Gate::Failing);
        let failing = picture(&apart.batcher, 1, 1);
        let mut got = run(&mut apart.batcher, vec![text(0), failing]);
        assert_eq!(got[0].tokens, want[0], "{name}");
        let message = got[1].error.take().expect("it fails").to_string();
        assert!(message.contains("as the test asks"), "{name}: {message}");
        let again = picture(&apart.batcher, 1, 1);
        submit(&mut apart.batcher, again);
        assert_eq!(finish(&mut apart.batcher, 2)[1].tokens, want[1], "{name}");
        assert_all_is_back(&mut apart.batcher);
    }
}

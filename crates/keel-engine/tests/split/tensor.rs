//! A model whose layers are shared by several devices: the answers of the whole one to rounding, the same on every run,
//! and each device's memory as planned.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::common::splitting::{self, Fault, backends, end, engine_on, load_on};
use crate::common::{all_logits, decoded, exact, fixture, relative_error, runtime};
use keel_array::{
    ArrayError, Backend, Compute, DType, Launch, RowData, Runtime, RuntimeOptions, WeightFormat, WeightSpec,
};
use keel_cache::CacheError;
use keel_cpu::{CpuBackend, CpuOptions};
use keel_engine::split::{MixtureChoice, PlacedPart, SplitPlanner};
use keel_engine::{Engine, EngineError, EngineOptions, GenerateOptions, SpeculationOptions, TokenIterator};
use keel_models::loading::{Altered, Parameters, RandomParameters, RowSink};
use keel_models::{MixtureCut, ModelError, Part};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use serde_json::{Value, json};

/// Sums in another order differ by less than this.
const ROUNDING_MAX: f64 = 1e-5;

/// A model of any shape, whose every element is a function of its place.
struct Placed {
    first_layer: WeightFormat,
    others: WeightFormat,
}

const DENSE: WeightFormat = WeightFormat::Dense(DType::F32);
const IN_GROUPS: WeightFormat = WeightFormat::Affine { bits: 4, group_size: 32, scale_dtype: DType::F32 };

const FLOATS: Placed = Placed { first_layer: DENSE, others: DENSE };
const CODED: Placed = Placed { first_layer: IN_GROUPS, others: IN_GROUPS };
/// Only the first layer divides between any columns.
const MIXED: Placed = Placed { first_layer: DENSE, others: IN_GROUPS };

impl Placed {
    fn format(&self, module: &str) -> WeightFormat {
        if module.contains("layers.0.") && !module.contains("mtp") { self.first_layer } else { self.others }
    }
}

fn element(name: &str, row: usize, col: usize) -> f32 {
    let seed = name.bytes().fold(17u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    let mixed = (seed ^ (row as u64) << 24 ^ col as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 0.2
}

impl Altered for Placed {
    fn inner(&self) -> &dyn Parameters {
        &RandomParameters { format: WeightFormat::Dense(DType::F32) }
    }

    fn contains(&self, name: &str) -> bool {
        !name.contains("switch_mlp") && !name.contains("experts.0.")
    }

    fn linear_format(
        &self,
        module: &str,
        _: Option<usize>,
        _: usize,
        _: usize,
    ) -> Result<WeightFormat, ModelError> {
        Ok(self.format(module))
    }

    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<(), ModelError> {
        let name = format!("{module} {expert:?}");
        for row in rows {
            let values: Vec<f32> = (0..spec.cols).map(|col| element(&name, row, col)).collect();
            let WeightFormat::Affine { .. } = self.format(module) else {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                sink(1, RowData::Dense(&bytes))?;
                continue;
            };
            let codes: Vec<u8> = values.iter().map(|value| ((value + 0.1) * 80.0) as u8 & 15).collect();
            let groups = spec.cols / 32;
            let scales: Vec<f32> = (0..groups).map(|group| 0.01 + 0.001 * group as f32).collect();
            let biases: Vec<f32> = scales.iter().map(|scale| -7.5 * scale).collect();
            sink(1, RowData::Affine { codes: &codes, scales: &scales, biases: &biases })?;
        }
        Ok(())
    }

    fn values(&self, name: &str, elements: usize) -> Result<Vec<f32>, ModelError> {
        let of = |i| if name.contains("norm") { 1.0 } else { element(name, i, 0) };
        Ok((0..elements).map(of).collect())
    }

    fn rows_are_alike(&self) -> bool {
        false
    }
}

fn config(heads: usize, kv_heads: usize) -> Value {
    json!({
        "model_type": "qwen3_5_moe_text", "hidden_size": 64, "vocab_size": 120, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, "attn_output_gate": true,
        "linear_num_key_heads": 6, "linear_num_value_heads": 12, "linear_key_head_dim": 8,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 192, "shared_expert_intermediate_size": 192, "tie_word_embeddings": false,
        "mtp_num_hidden_layers": 1,
    })
}

/// The parts of a model whose every layer is shared by this many devices.
fn tensor(model: &Placed, config: &Value, count: usize) -> Result<Vec<Part>, EngineError> {
    splitting::parts((model, config), EngineOptions::default(), (1, count))
}

fn placed(model: &Placed, config: &Value, options: EngineOptions, count: usize) -> Engine {
    if count == 1 {
        return Engine::load(&runtime(1), model, config, options, &|_| ()).expect("the model loads");
    }
    let parts = tensor(model, config, count).expect("it divides");
    load_on((model, config), options, backends(count, false), &parts).expect("the model loads")
}

/// The model with experts of this width.
fn with_experts_of(width: usize) -> Value {
    let mut config = config(12, 6);
    config["moe_intermediate_size"] = width.into();
    config["shared_expert_intermediate_size"] = width.into();
    config
}

#[test]
fn experts_whose_columns_do_not_divide_are_shared_whole() {
    let alone: Arc<dyn Backend> = Arc::new(CpuBackend::planning(CpuOptions::default()));
    let choose = |model: &Placed, width, count| {
        let config = &with_experts_of(width);
        let planner = SplitPlanner { backend: &alone, parameters: model, config, options: exact() };
        planner.mixture(count).expect("it can be split")
    };
    let chosen = |model, width, count| choose(model, width, count).expect("a mixture, on several devices");
    let MixtureChoice { cut, reason } = chosen(&CODED, 192, 2);
    assert!(cut == MixtureCut::Columns && reason.contains("all have the same work"), "{reason}");
    let MixtureChoice { cut, reason } = chosen(&CODED, 96, 2);
    assert_eq!(cut, MixtureCut::Experts);
    // A layer after the first may be the one that does not divide.
    assert_eq!(chosen(&MIXED, 96, 2).cut, MixtureCut::Experts);
    assert!(reason.contains("96 columns in groups of 32") && !reason.contains("take fewer"), "{reason}");
    assert_eq!(choose(&CODED, 96, 1), None);

    let ids: Vec<u32> = (0..70).map(|i| i * 37 % 120).collect();
    // Three devices have 1, 1 and 2 of the 4 experts.
    for (model, width, count) in [(&CODED, 96, 2), (&MIXED, 96, 2), (&FLOATS, 64, 3), (&CODED, 64, 3)] {
        let config = with_experts_of(width);
        assert_eq!(
            chosen(model, width, count).cut,
            MixtureCut::Experts,
            "{width} columns on {count} devices"
        );
        let want = all_logits(&mut placed(model, &config, exact(), 1), &ids, false, true);
        let mut engine = placed(model, &config, exact(), count);
        for one_by_one in [false, true] {
            let got = all_logits(&mut engine, &ids, one_by_one, true);
            for (got, want) in [(&got.0, &want.0), (&got.1, &want.1)] {
                let error = relative_error(got, want);
                assert!(error <= ROUNDING_MAX, "experts on {count} devices: {error:.1e}");
            }
        }
        end(engine);
    }
}

/// A model whose rows are read only once two devices have begun to.
struct ReadByTwo {
    begun: Mutex<HashSet<ThreadId>>,
    changed: Condvar,
}

impl Altered for ReadByTwo {
    fn inner(&self) -> &dyn Parameters {
        &FLOATS
    }

    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<(), ModelError> {
        let mut begun = self.begun.lock().expect("no device has panicked");
        begun.insert(thread::current().id());
        self.changed.notify_all();
        let is_alone = |begun: &mut HashSet<_>| begun.len() < 2;
        let waited = self.changed.wait_timeout_while(begun, Duration::from_secs(20), is_alone);
        assert!(!waited.expect("no device has panicked").1.timed_out(), "one device loads after the other");
        self.inner().linear_rows(module, expert, rows, spec, sink)
    }
}

#[test]
fn devices_load_at_the_same_time() {
    let model = ReadByTwo { begun: Mutex::default(), changed: Condvar::new() };
    let (config, options) = (config(12, 6), exact());
    let parts = splitting::parts((&model, &config), options, (1, 2)).expect("it divides");
    end(load_on((&model, &config), options, backends(2, false), &parts).expect("it loads"));
    assert_eq!(model.begun.into_inner().expect("no device has panicked").len(), 2);
}

/// Six devices in two stages of three.
#[test]
fn stages_of_three_give_the_logits_of_the_whole_model() {
    let ids: Vec<u32> = (0..70).map(|i| i * 37 % 120).collect();
    let config = config(12, 6);
    let want = all_logits(&mut placed(&FLOATS, &config, exact(), 1), &ids, false, true);
    let parts = splitting::parts((&FLOATS, &config), exact(), (2, 3)).expect("it divides");
    let mut engine = load_on((&FLOATS, &config), exact(), backends(6, false), &parts).expect("it loads");
    let got = all_logits(&mut engine, &ids, false, true);
    for (got, want) in [(&got.0, &want.0), (&got.1, &want.1)] {
        assert!(relative_error(got, want) <= ROUNDING_MAX);
    }
    end(engine);
}

#[test]
fn odd_numbers_of_devices_and_repeated_key_value_heads() {
    let ids: Vec<u32> = (0..70).map(|i| i * 37 % 120).collect();
    for (model, kv_heads, counts) in [
        (&FLOATS, 6, &[2, 3, 6][..]),
        (&FLOATS, 3, &[3, 6]),
        (&FLOATS, 2, &[2, 6]),
        (&FLOATS, 1, &[2, 3]),
        (&CODED, 6, &[2, 3, 6]),
    ] {
        let config = config(12, kv_heads);
        let want = all_logits(&mut placed(model, &config, exact(), 1), &ids, false, true);
        for &count in counts {
            let mut engine = placed(model, &config, exact(), count);
            let got = all_logits(&mut engine, &ids, false, true);
            for (got, want) in [(&got.0, &want.0), (&got.1, &want.1)] {
                let error = relative_error(got, want);
                assert!(error <= ROUNDING_MAX, "{kv_heads} heads on {count} devices: {error:.1e}");
            }
            end(engine);
        }
    }
}

/// Where key-value heads repeat, each device has one, whatever their number: the shapes agree, and the heads do not.
#[test]
fn a_cache_of_another_number_of_devices_is_refused() {
    let mut config = config(12, 2);
    config["layer_types"] = json!(["full_attention", "full_attention"]);
    let ids: Vec<u32> = (0..70).map(|i| i * 37 % 120).collect();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("cache");
    let mut six = placed(&FLOATS, &config, exact(), 6);
    let mut sequence = six.open().expect("a slot is free");
    six.prefill(&mut sequence, &ids, &mut Vec::new(), &mut |_| ()).expect("runs");
    six.cache().save(&sequence, &ids, "a model", &path).expect("saves");
    drop(sequence);
    let mut two = placed(&FLOATS, &config, exact(), 2);
    let refused = two.cache_mut().load("a model", &path).expect_err("refused").to_string();
    assert!(refused.contains("tensors, and this engine's cache has"), "{refused}");
    let (loaded, tokens) = six.cache_mut().load("a model", &path).expect("loads where it was saved");
    assert_eq!(tokens, ids);
    drop(loaded);
    end(two);
    end(six);
}

#[test]
fn what_does_not_divide_is_refused_with_its_numbers() {
    let refusal = |config: &Value, count| tensor(&FLOATS, config, count).expect_err("refused").to_string();
    let message = refusal(&config(12, 6), 5);
    assert!(message.contains("12 attention heads") && message.contains("over 5 devices"), "{message}");
    let message = refusal(&config(12, 4), 6);
    assert!(message.contains("4 key-value heads"), "{message}");
    let message = refusal(&config(12, 12), 4);
    assert!(
        message.contains("6 key heads of recurrent layers cannot be split evenly over 4 devices"),
        "{message}"
    );
    let mut narrow = config(12, 6);
    narrow["moe_intermediate_size"] = 25.into();
    // There are fewer experts than devices, so they cannot be shared whole either.
    narrow["num_experts"] = 2.into();
    let message = refusal(&narrow, 3);
    assert!(message.contains("25 columns of an expert"), "{message}");
    let mut off_groups = config(12, 6);
    off_groups["moe_intermediate_size"] = 96.into();
    let parts = tensor(&CODED, &off_groups, 2).expect("heads and experts divide");
    let parts = Part::by(MixtureCut::Columns, parts);
    let error =
        load_on((&CODED, &off_groups), exact(), backends(2, false), &parts).err().expect("groups do not");
    let message = error.to_string();
    assert!(message.contains("96 columns in groups of 32") && message.contains("48 each"), "{message}");
}

#[test]
fn drafts_of_shared_heads_leave_the_text_without_drafts() {
    let options = EngineOptions {
        context: 512,
        sequences: 2,
        prefill_step: 64,
        drafts: 3,
        compute: Compute::F32,
        ..EngineOptions::default()
    };
    let config = config(12, 6);
    let prompt: Vec<u32> = (0..70).map(|i| i * 37 % 120).collect();
    let until = || GenerateOptions { max_tokens: 24, ..GenerateOptions::default() };
    for count in [2, 3] {
        let mut engine = placed(&FLOATS, &config, options, count);
        let sequence = engine.open().expect("a slot is free");
        let mut plain =
            TokenIterator::new(&mut engine, sequence, &prompt, until(), &mut |_| ()).expect("fits");
        let want: Vec<u32> = plain.by_ref().collect::<Result<_, _>>().expect("every step runs");
        drop(plain);
        let sequence = engine.open().expect("a slot is free");
        let speculation = SpeculationOptions::default();
        let mut drafted = crate::common::drafting(&mut engine, sequence, &prompt, until(), speculation);
        let got: Vec<u32> = drafted.by_ref().collect::<Result<_, _>>().expect("every round runs");
        drop(drafted);
        assert_eq!(got, want, "on {count} devices");
        assert_eq!(got.len(), 24);
        end(engine);
    }
}

#[test]
fn a_device_that_fails_ends_the_step_of_all_and_a_new_sequence_runs() {
    let options = EngineOptions { context: 256, compute: Compute::F32, ..EngineOptions::default() };
    // Where the devices share the embedding, they meet before a state has changed. 3 devices do not share 121 tokens.
    for (vocab, rank, is_torn) in
        [0, 1, 2].into_iter().flat_map(|rank| [(120, rank, false), (121, rank, true)])
    {
        let mut config = config(12, 6);
        config["vocab_size"] = vocab.into();
        let parts = tensor(&FLOATS, &config, 3).expect("it divides");
        let fault = Arc::new(Fault::default());
        let mut backends = backends(3, false);
        backends[rank] = InterceptedBackend::new(Arc::clone(&backends[rank]), Arc::clone(&fault));
        let mut engine = load_on((&FLOATS, &config), options, backends, &parts).expect("the model loads");
        let mut sequence = decoded(&mut engine, &[1, 2, 3], &[5]);
        let start = Instant::now();
        fault.0.store(0, Ordering::Relaxed);
        let error = engine.decode(&mut [&mut sequence], &[6]).expect_err("a device has failed");
        assert!(error.to_string().contains("injected"), "device {rank}: {error}");
        assert!(start.elapsed() < Duration::from_secs(10), "nobody waits for a device that has failed");
        match engine.decode(&mut [&mut sequence], &[6]) {
            Ok(()) => assert!(!is_torn, "device {rank}: its state is torn"),
            Err(EngineError::Cache(CacheError::TornState { .. })) => assert!(is_torn, "device {rank}"),
            Err(error) => panic!("device {rank}: {error}"),
        }
        engine.release(sequence);
        let again = decoded(&mut engine, &[1, 2, 3], &[5, 6]);
        engine.release(again);
        end(engine);
    }
}

#[test]
fn shares_in_another_order_are_refused() {
    let parts = tensor(&FLOATS, &config(12, 6), 2).expect("it divides");
    let runtimes =
        backends(2, false).into_iter().rev().map(|b| Runtime::new(Arc::clone(&b), RuntimeOptions::default()));
    let devices = PlacedPart::each(runtimes, parts);
    let error =
        Engine::load_on(&devices, None, &FLOATS, &config(12, 6), exact(), &|_| ()).err().expect("refused");
    assert!(error.to_string().contains("is not device 0 of a group of 2"), "{error}");
}

/// Counts the kernels of a device by their operations.
#[derive(Clone, Default)]
struct Counting(Arc<Mutex<BTreeMap<String, usize>>>);

impl Interceptor for Counting {
    fn launch(&self, backend: &dyn Backend, launch: &Launch<'_>) -> Result<(), ArrayError> {
        let mut counts = self.0.lock().expect("a count cannot panic");
        launch.kernels().iter().for_each(|kernel| *counts.entry(kernel.op.name().into()).or_default() += 1);
        drop(counts);
        backend.launch(launch)
    }
}

/// The first device adds the residual. The others once filled an array with zeros instead, for each sum: a kernel more,
/// for which the first device waited.
#[test]
fn no_device_runs_more_kernels_than_the_first() {
    for name in ["qwen3_5", "qwen3_5_moe", "llama"] {
        let counts: [Counting; 2] = Default::default();
        let options = EngineOptions { context: 512, ..EngineOptions::default() };
        let mut engine = engine_on(&fixture(name), options, (1, 2), |rank, backend| {
            InterceptedBackend::new(backend, Arc::new(counts[rank].clone()))
        });
        counts.iter().for_each(|counts| counts.0.lock().expect("no test has failed").clear());
        let mut sequence = engine.open().expect("a slot is free");
        engine.prefill(&mut sequence, &[5, 6, 7], &mut Vec::new(), &mut |_| ()).expect("runs");
        engine.release(sequence);
        let [first, second] = counts.map(|counts| std::mem::take(&mut *counts.0.lock().expect("as above")));
        assert!(first.values().sum::<usize>() > 10, "{name}: {first:?}");
        for (op, count) in &second {
            assert!(
                first.get(op).is_some_and(|of_first| count <= of_first),
                "{name}: {op} in {first:?}, {second:?}"
            );
        }
        end(engine);
    }
}

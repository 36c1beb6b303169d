//! How work is cut never changes a bit. With `KEEL_TEST_CUDA=1` this is tested on a GPU in its deterministic mode, else
//! on the CPU. On the CPU some of it is left out, because `model_laws/one_sequence.rs` holds it there on smaller
//! models.

use std::sync::Arc;

use crate::common::{all_logits, argmax, demo, state_of};
use keel_array::sampling::Draw;
use keel_array::{Compute, DType, Runtime, RuntimeOptions, WeightFormat};
use keel_cuda::{CudaBackend, CudaOptions, Determinism, Precision};
use keel_engine::{Chunk, Depth, Engine, EngineOptions, GenerateOptions, SpeculationOptions};
use keel_models::SumOrder;
use keel_models::loading::RandomParameters;
use serde_json::{Value, json};

/// A model in one arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    /// The built-in model.
    BuiltIn,
    /// The built-in model in f32.
    Exact,
    /// The shape of the built-in model with dense weights.
    Dense,
    /// With experts, 4-bit weights and larger heads.
    Experts,
    /// With more experts, so that the router is a product on tensor cores, and with a shared expert as wide as the
    /// others.
    AlikeExperts,
    /// With experts, in the order of sums that several devices have in common.
    ExpertsOfDevices,
    /// With sliding windows, whose pages rotate within a step.
    Windows,
}

fn has_gpu() -> bool {
    std::env::var_os("KEEL_TEST_CUDA").is_some()
}

/// Whether the CPU leaves out the laws of prefill steps and of kept sequences. `model_laws/one_sequence.rs` holds them
/// there: with dense weights, 4-bit weights, experts and large heads, in f32 and in the arithmetic of `Compute::Auto`.
fn is_held_by_fixtures(subject: Subject) -> bool {
    let is_held = !has_gpu() && matches!(subject, Subject::Exact | Subject::Dense | Subject::Experts);
    if is_held {
        keel_testkit::skipped!("for a GPU; model_laws/one_sequence.rs has it on the CPU");
    }
    is_held
}

/// Whether the CPU leaves out the other laws. Only on a GPU do these experts run other kernels than `Experts` does.
fn is_held_by_experts(subject: Subject) -> bool {
    let is_held = !has_gpu() && subject == Subject::AlikeExperts;
    if is_held {
        keel_testkit::skipped!("for a GPU; the tests of `experts` have it on the CPU");
    }
    is_held
}

/// Token ids of a prompt.
fn prompt(len: usize, seed: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 37 + i * i % 101 + seed * 211) % 4000) as u32).collect()
}

impl Subject {
    fn compute(self) -> Compute {
        if self == Subject::Exact { Compute::F32 } else { Compute::Auto }
    }

    fn runtime(self) -> Runtime {
        let precision = if self == Subject::Exact { Precision::F32 } else { Precision::Fast };
        let of_devices = self == Subject::ExpertsOfDevices;
        let determinism = if of_devices { Determinism::Devices } else { Determinism::Steps };
        let options = CudaOptions { precision, determinism, ..CudaOptions::default() };
        if !has_gpu() {
            return crate::common::runtime(2);
        }
        let backend = CudaBackend::new(&options).expect("a GPU");
        Runtime::new(Arc::new(backend), RuntimeOptions::default())
    }

    fn engine(self, options: EngineOptions) -> Engine {
        let sums = if self == Subject::ExpertsOfDevices { SumOrder::Fixed } else { SumOrder::ByDevice };
        let options = EngineOptions { compute: self.compute(), sums, ..options };
        let mut config: Value =
            serde_json::from_slice(&std::fs::read(demo().join("config.json")).expect("there")).expect("JSON");
        let format = match self {
            Subject::BuiltIn | Subject::Exact => {
                return crate::common::engine(&demo(), &self.runtime(), options);
            }
            Subject::Dense => WeightFormat::Dense(DType::BF16),
            Subject::Experts | Subject::AlikeExperts | Subject::ExpertsOfDevices | Subject::Windows => {
                WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 }
            }
        };
        if self == Subject::Windows {
            config = json!({
                "model_type": "gemma3_text", "hidden_size": 384, "intermediate_size": 768, "vocab_size": 4096,
                "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "query_pre_attn_scalar": 64,
                "sliding_window": 100, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
                "max_position_embeddings": 4096, "tie_word_embeddings": true,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}
                }
            });
        }
        if matches!(self, Subject::Experts | Subject::AlikeExperts | Subject::ExpertsOfDevices) {
            let (experts, shared_width) = if self == Subject::AlikeExperts { (72, 192) } else { (16, 128) };
            let text = config["text_config"].as_object_mut().expect("a map");
            for (name, value) in [
                ("model_type", json!("qwen3_5_moe_text")),
                ("num_hidden_layers", json!(4)),
                (
                    "layer_types",
                    json!(["linear_attention", "full_attention", "linear_attention", "full_attention"]),
                ),
                ("full_attention_interval", json!(2)),
                ("head_dim", json!(128)),
                ("linear_value_head_dim", json!(128)),
                ("num_experts", json!(experts)),
                ("num_experts_per_tok", json!(3)),
                ("moe_intermediate_size", json!(192)),
                ("shared_expert_intermediate_size", json!(shared_width)),
                ("mlp_only_layers", json!([])),
            ] {
                text.insert(name.into(), value);
            }
            config["model_type"] = "qwen3_5_moe".into();
        }
        let parameters = RandomParameters { format };
        Engine::load(&self.runtime(), &parameters, &config, options, &|_| ()).expect("the model loads")
    }
}

fn options() -> EngineOptions {
    EngineOptions { context: 1024, sequences: 40, prefill_step: 256, ..EngineOptions::default() }
}

/// Fails if two rows of logits differ in a bit.
fn expect_same(left: &[f32], right: &[f32], what: std::fmt::Arguments<'_>) {
    assert_eq!(left.len(), right.len(), "{what}");
    assert!(left.iter().all(|x| x.is_finite()), "{what}: not finite");
    let differs = left.iter().zip(right).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    assert!(differs == 0, "{what}: {differs} of {} differ", left.len());
}

/// The size of a prefill step does not change a bit.
fn prefill_steps(subject: Subject) {
    if is_held_by_fixtures(subject) {
        return;
    }
    let ids = prompt(530, 0);
    let logits = |prefill_step| {
        let options = EngineOptions { prefill_step, sequences: 1, all_logits: true, ..options() };
        all_logits(&mut subject.engine(options), &ids, false, false).0
    };
    let whole = logits(1024);
    for step in [64, 128, 256, 512] {
        expect_same(&logits(step), &whole, format_args!("{subject:?}: step {step}"));
    }
}

/// Where a prompt is cut does not change a bit of its logits, its states, and the tokens after it. Chunks from an odd
/// multiple of 64 on begin in the middle of a block of attention.
fn prefill_cuts(subject: Subject) {
    let ids = prompt(375, 12);
    let mut engine =
        subject.engine(EngineOptions { context: 512, sequences: 1, prefill_step: 512, ..options() });
    let mut run = |cuts: &[usize]| {
        let (mut sequence, mut logits) = (engine.open().expect("a slot is free"), Vec::new());
        let ends = cuts.iter().copied().chain([ids.len()]);
        for (from, to) in [0].into_iter().chain(cuts.iter().copied()).zip(ends) {
            let (tokens, next) = (&ids[from..to], ids.get(to).copied());
            let draw = next.is_none().then_some(Draw::GREATEST);
            engine
                .prefill_chunks(&mut [Chunk { sequence: &mut sequence, tokens, next, draw }])
                .expect("the chunk runs");
        }
        engine.logits(0, &mut logits).expect("there");
        let (_, states, answers) = state_of(&mut engine, sequence);
        (logits, states, answers)
    };
    let whole = run(&[]);
    for cuts in [&[64][..], &[128], &[192], &[256], &[320], &[64, 192], &[192, 256]] {
        let got = run(cuts);
        expect_same(&got.0, &whole.0, format_args!("{subject:?}: cut at {cuts:?}"));
        assert!(got.1 == whole.1, "{subject:?}: cut at {cuts:?}: states differ");
        assert!(got.2 == whole.2, "{subject:?}: cut at {cuts:?}: tokens after it differ");
    }
}

/// Logits of a few steps of these sequences, run together. One entry for each sequence.
fn decoded(engine: &mut Engine, numbers: &[usize]) -> Vec<Vec<f32>> {
    let mut sequences = Vec::new();
    for &i in numbers {
        let mut sequence = engine.open().expect("a slot is free");
        // Some sequences cross a page of keys while they are decoded.
        let ids = prompt([3, 64, 254, 65, 130, 17, 511][i % 7], i);
        engine.prefill(&mut sequence, &ids, &mut Vec::new(), &mut |_| ()).expect("runs");
        sequences.push(sequence);
    }
    let mut all = vec![Vec::new(); numbers.len()];
    for step in 0..4 {
        let next: Vec<u32> = numbers.iter().map(|i| (i * 97 + step * 13) as u32 % 4000).collect();
        engine.decode(&mut sequences.iter_mut().collect::<Vec<_>>(), &next).expect("runs");
        for (row, all) in all.iter_mut().enumerate() {
            let mut logits = Vec::new();
            engine.logits(row, &mut logits).expect("there");
            all.extend(logits);
        }
    }
    sequences.into_iter().for_each(|sequence| engine.release(sequence));
    all
}

/// Sequences in a batch get the bits that they get alone.
fn batches(subject: Subject) {
    if is_held_by_experts(subject) {
        return;
    }
    let mut engine = subject.engine(options());
    let counts: &[usize] = if has_gpu() { &[7, 20, 40] } else { &[7] };
    let numbers: Vec<usize> = (0..counts[counts.len() - 1]).collect();
    let alone: Vec<Vec<f32>> = numbers.iter().map(|&i| decoded(&mut engine, &[i]).remove(0)).collect();
    for &count in counts {
        for (i, row) in decoded(&mut engine, &numbers[..count]).iter().enumerate() {
            expect_same(row, &alone[i], format_args!("{subject:?}: sequence {i} of {count}"));
        }
    }
    // A page table with room for a longer context must divide the keys in the same way.
    let mut longer = subject.engine(EngineOptions { context: 4096, sequences: 2, ..options() });
    for i in [2, 6] {
        let row = decoded(&mut longer, &[i]).remove(0);
        expect_same(&row, &alone[i], format_args!("{subject:?}: sequence {i} in a longer context"));
    }
}

/// Drafts do not change a bit.
fn speculation(subject: Subject) {
    if is_held_by_experts(subject) {
        return;
    }
    let run = |drafts: usize| {
        let options = EngineOptions { sequences: 1, drafts: drafts.max(1), ..options() };
        let mut engine =
            subject.engine(if drafts == 0 { EngineOptions { drafts, ..options } } else { options });
        let ids = prompt(250, 1);
        let mut sequence = engine.open().expect("a slot is free");
        if drafts == 0 {
            let (mut logits, mut tokens) = (Vec::new(), Vec::new());
            engine.prefill(&mut sequence, &ids, &mut logits, &mut |_| ()).expect("runs");
            for _ in 0..48 {
                tokens.push(argmax(&logits));
                engine.decode(&mut [&mut sequence], &tokens[tokens.len() - 1..]).expect("runs");
                engine.logits(0, &mut logits).expect("there");
            }
            engine.release(sequence);
            return (tokens, logits);
        }
        let how = SpeculationOptions { depth: Depth::Fixed(drafts), ..Default::default() };
        let max = GenerateOptions { max_tokens: 48, ..GenerateOptions::default() };
        let mut tokens = crate::common::drafting(&mut engine, sequence, &ids, max, how);
        let got: Vec<u32> = tokens.by_ref().collect::<Result<_, _>>().expect("every round runs");
        let drafted = tokens.counters().expect("it drafts").drafted_total();
        assert!(drafted > 20, "{subject:?}: {drafted} drafts");
        // The state that the rounds left must give the logits of plain decoding.
        let (mut sequence, mut logits) = (tokens.into_sequence(), Vec::new());
        for token in &got[sequence.offset() - ids.len()..] {
            engine.decode(&mut [&mut sequence], &[*token]).expect("runs");
        }
        engine.logits(0, &mut logits).expect("there");
        engine.release(sequence);
        (got, logits)
    };
    let plain = run(0);
    for drafts in [1, 3] {
        let (tokens, logits) = run(drafts);
        assert_eq!(tokens, plain.0, "{subject:?}: {drafts} drafts");
        expect_same(&logits, &plain.1, format_args!("{subject:?}: {drafts} drafts"));
    }
}

/// A sequence that was rewound, or saved and loaded, continues with the same bits.
fn what_was_kept(subject: Subject) {
    if is_held_by_fixtures(subject) {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("cache");
    let ids = prompt(333, 2);
    let options = EngineOptions { sequences: 2, checkpoints: 3, ..options() };
    let mut first = subject.engine(options);
    let mut whole = Vec::new();
    let mut sequence = first.open().expect("a slot is free");
    first.prefill(&mut sequence, &ids, &mut whole, &mut |_| ()).expect("runs");
    // Go on, rewind to a checkpoint, and go on from there.
    first.decode(&mut [&mut sequence], &[7]).expect("runs");
    let back = first.cache_mut().rewind(&mut sequence, 333).expect("rewinds");
    assert_eq!(back, 320, "the last grid point before the end of the prompt has a checkpoint");
    let mut again = Vec::new();
    first.prefill(&mut sequence, &ids[back..], &mut again, &mut |_| ()).expect("runs");
    expect_same(&again, &whole, format_args!("{subject:?}: rewound"));
    first.release(sequence);
    let mut sequence = first.open().expect("a slot is free");
    first.prefill(&mut sequence, &ids[..128], &mut Vec::new(), &mut |_| ()).expect("runs");
    first.cache().save(&sequence, &ids[..128], "a model", &path).expect("saves");
    first.release(sequence);
    drop(first);
    let mut second = subject.engine(options);
    let (mut sequence, seen) = second.cache_mut().load("a model", &path).expect("loads");
    second.prefill(&mut sequence, &ids[seen.len()..], &mut again, &mut |_| ()).expect("runs");
    expect_same(&again, &whole, format_args!("{subject:?}: saved and loaded"));
    second.release(sequence);
}

/// Each law of each subject is a test of its own. They run in parallel, since most of the time goes to compiling
/// kernels.
macro_rules! laws {
    ($($subject:ident as $name:ident: $($law:ident),*;)*) => {
        $(mod $name {
            $(
                #[test]
                fn $law() {
                    super::$law(super::Subject::$subject);
                }
            )*
        })*
    };
}

laws! {
    BuiltIn as built_in: prefill_steps, prefill_cuts, batches, speculation, what_was_kept;
    Exact as exact: prefill_steps, prefill_cuts, batches, speculation, what_was_kept;
    Dense as dense: prefill_steps, prefill_cuts, batches, speculation, what_was_kept;
    Experts as experts: prefill_steps, prefill_cuts, batches, speculation, what_was_kept;
    AlikeExperts as alike_experts: batches, speculation;
    ExpertsOfDevices as experts_of_devices: prefill_steps, batches, speculation;
    // This model has no MTP head and no recurrent states.
    Windows as windows: prefill_steps, prefill_cuts, batches;
}

//! In the deterministic mode 1, 2 and 4 devices give the same bits. Models whose shares have other shapes than the
//! whole in every way that has changed kernels: fewer than 64 rows, rows that are no whole tiles, key heads for each
//! device, experts by columns and whole. With `KEEL_TEST_CUDA=1` this is tested on as many GPUs as there are, else on
//! the CPU. `fixtures.rs` has the same for all fixtures on the CPU.

use crate::common::splitting::{backends, end, load_on, load_on_gpus, on_gpus, parts};
use crate::common::{all_logits, argmax};
use std::ops::Range;

use keel_array::{BlockFormat, Compute, DType, WeightFormat, WeightSpec};
use keel_engine::{Engine, EngineOptions};
use keel_models::loading::{Altered, Parameters, RandomParameters, RowSink};
use keel_models::{MixtureCut, Part, Result, SumOrder};
use serde_json::{Value, json};

const AFFINE4: WeightFormat = WeightFormat::Affine { bits: 4, group_size: 32, scale_dtype: DType::BF16 };
const AFFINE8: WeightFormat = WeightFormat::Affine { bits: 8, group_size: 64, scale_dtype: DType::BF16 };

/// Random parameters of which each row follows from its place, so that a share has the rows of the whole.
struct RowsByPlace(RandomParameters);

impl Altered for RowsByPlace {
    fn inner(&self) -> &dyn Parameters {
        &self.0
    }

    fn rows_are_alike(&self) -> bool {
        // A device that repeats rows has those of other places.
        false
    }

    fn linear_rows(
        &self,
        module: &str,
        expert: Option<usize>,
        mut rows: Range<usize>,
        spec: &WeightSpec,
        sink: &mut RowSink<'_>,
    ) -> Result<()> {
        rows.try_for_each(|row| self.0.linear_rows(&format!("{module} {row}"), expert, 0..1, spec, sink))
    }
}

/// Token ids of a prompt.
fn prompt() -> Vec<u32> {
    (0..150).map(|i| (i * 37 + i * i % 101) % 500).collect()
}

/// A model with recurrent layers and attention. Two key heads of attention meet up to four devices.
fn hybrid(hidden: usize, inner: usize) -> Value {
    json!({
        "model_type": "qwen3_5_text", "hidden_size": hidden, "intermediate_size": inner, "vocab_size": 512,
        "num_hidden_layers": 4, "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024, "tie_word_embeddings": true, "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_type": "default"}
    })
}

/// The same with experts, and a shared one as wide as the others or twice as wide.
fn mixture(shared_inner: usize) -> Value {
    let mut config = hybrid(512, 256);
    let text = config.as_object_mut().expect("a map");
    for (name, value) in [
        ("model_type", json!("qwen3_5_moe_text")),
        ("num_experts", json!(16)),
        ("num_experts_per_tok", json!(3)),
        ("moe_intermediate_size", json!(256)),
        ("shared_expert_intermediate_size", json!(shared_inner)),
        ("mlp_only_layers", json!([])),
    ] {
        text.insert(name.into(), value);
    }
    config
}

/// Logits of a prompt at once and one by one, and those of the MTP head.
type Bits = [(Vec<f32>, Vec<f32>); 2];

fn bits_of(engine: &mut Engine) -> Bits {
    let ids = prompt();
    let bits = [false, true].map(|one_by_one| {
        let ids = if one_by_one { &ids[..40] } else { &ids[..] };
        all_logits(engine, ids, one_by_one, true)
    });
    let all = || bits.iter().flat_map(|(logits, mtp)| logits.iter().chain(mtp));
    assert!(all().count() > 10_000 && all().all(|x| x.is_finite()));
    bits
}

/// The bits of the model on this many devices, which divide its experts like this.
fn bits_on(
    (config, format): (&Value, WeightFormat),
    compute: Compute,
    (devices, mixture): (usize, Option<MixtureCut>),
    on_gpus: bool,
) -> Bits {
    let options = EngineOptions {
        context: 256,
        sequences: 2,
        prefill_step: 128,
        all_logits: true,
        drafts: 1,
        sums: SumOrder::Fixed,
        compute,
        ..EngineOptions::default()
    };
    let source = (&RowsByPlace(RandomParameters { format }) as _, config);
    let parts = parts(source, options, (1, devices)).expect("it divides");
    let parts = match mixture {
        Some(mixture) => Part::by(mixture, parts),
        None => parts,
    };
    if on_gpus {
        let engine = load_on_gpus(source, options, &parts, |_, backend| backend);
        let mut engine = engine.expect("the model loads");
        // Ranks that share a GPU load nothing while one of them waits.
        engine.make_ready(&mut |_, _, _| ()).expect("it gets ready");
        return bits_of(&mut engine);
    }
    let engine = load_on(source, options, backends(parts.len(), false), &parts);
    let mut engine = engine.expect("the model loads");
    let bits = bits_of(&mut engine);
    end(engine);
    bits
}

/// Fails if this many devices give other bits than one.
fn expect_bits_of_one(devices: usize, on_gpus: bool) {
    let dense = WeightFormat::Dense(DType::BF16);
    let half = WeightFormat::Dense(DType::F16);
    let blocks = WeightFormat::Blocks(BlockFormat::Q4_1);
    let cuts = [MixtureCut::Columns, MixtureCut::Experts].map(Some);
    let cases: [(Value, WeightFormat, Compute, &[Option<MixtureCut>]); 8] = [
        (hybrid(512, 1536), AFFINE4, Compute::Auto, &[None]),
        (hybrid(512, 1024), AFFINE8, Compute::Bf16, &[None]),
        (hybrid(512, 1024), blocks, Compute::Auto, &[None]),
        // A quarter of gate and up has 144 rows, which are no whole tiles of both.
        (hybrid(480, 288), dense, Compute::Auto, &[None]),
        (hybrid(480, 288), half, Compute::Auto, &[None]),
        (hybrid(512, 1024), AFFINE4, Compute::F32, &[None]),
        (mixture(256), AFFINE4, Compute::Auto, &cuts),
        (mixture(512), AFFINE8, Compute::Auto, &cuts),
    ];
    // As wide as a model of 4B, for kernels that small products do not take.
    let mut wide = hybrid(2560, 9216);
    wide["num_hidden_layers"] = json!(2);
    wide["layer_types"] = json!(["linear_attention", "full_attention"]);
    let wide = on_gpus.then(|| (wide, AFFINE4, Compute::Auto, &[None][..]));
    for (config, format, compute, cuts) in cases.into_iter().chain(wide) {
        let model = (&config, format);
        let whole = bits_on(model, compute, (1, None), on_gpus);
        for &cut in cuts {
            let got = bits_on(model, compute, (devices, cut), on_gpus);
            for (regime, (got, whole)) in ["prompt", "one by one"].into_iter().zip(got.iter().zip(&whole)) {
                for (what, got, whole) in [("logits", &got.0, &whole.0), ("MTP logits", &got.1, &whole.1)] {
                    let differ = got.iter().zip(whole).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                    let (all, best) = (whole.len(), argmax(whole));
                    assert!(
                        differ == 0 && got.len() == all,
                        "{format:?}, {compute:?}, {cut:?}, {regime}: {differ} of {all} {what} differ on {devices} devices; best {best}"
                    );
                }
            }
        }
    }
}

#[test]
fn two_devices_give_the_bits_of_one() {
    if std::env::var_os("KEEL_TEST_CUDA").is_none() {
        return expect_bits_of_one(2, false);
    }
    on_gpus(2, || expect_bits_of_one(2, true));
}

#[test]
fn four_devices_give_the_bits_of_one() {
    if std::env::var_os("KEEL_TEST_CUDA").is_none() {
        return expect_bits_of_one(4, false);
    }
    on_gpus(4, || expect_bits_of_one(4, true));
}

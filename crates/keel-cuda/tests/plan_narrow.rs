//! Which values take 16 bits, as planned. This needs no GPU.

use keel_array::{
    Array, AttentionSpec, Batch, Category, Compute, DType, KvPool, Program, Regime, Runtime, RuntimeOptions,
    Weight, WeightFormat, WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions, Determinism, Precision};
use std::sync::Arc;

const K: usize = 256;

/// How a program is planned.
#[derive(Clone, Copy)]
struct Setting {
    compute: Compute,
    rows: usize,
    determinism: Determinism,
    precision: Precision,
}

/// Prompts in 8-bit floats.
const EIGHT_BITS: Setting = Setting {
    compute: Compute::PrefillFp8,
    rows: 300,
    determinism: Determinism::Off,
    precision: Precision::Fast,
};

impl Setting {
    fn runtime(self) -> Runtime {
        let Setting { determinism, precision, .. } = self;
        let options = CudaOptions { determinism, precision, ..CudaOptions::default() };
        Runtime::new(Arc::new(CudaBackend::planning(&options)), RuntimeOptions::default())
    }

    fn weight(self, runtime: &Runtime, rows: usize, cols: usize) -> Weight {
        let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
        let spec = WeightSpec { experts: 1, rows, cols, format, compute: self.compute };
        Weight::allocate(runtime, spec).expect("a weight")
    }
}

fn array(runtime: &Runtime, shape: &[usize], dtype: DType) -> Array {
    Array::persistent(runtime, Category::Activations, shape, dtype).expect("memory")
}

/// The type of the first kernel's result, as that kernel writes it and as `reads` of the second one reads it.
fn types(program: &Program, reads: impl Fn(&keel_array::Kernel) -> Option<DType>) -> Vec<DType> {
    let [producer, reader, ..] = program.kernels() else { panic!("two kernels: {:?}", program.lines()) };
    [Some(producer.outputs[0].dtype), reads(reader)].into_iter().flatten().collect()
}

/// The types of gates between a product and the product that absorbs SwiGLU, and bytes of the arena.
fn gates(setting: Setting, are_read_twice: bool) -> (Vec<DType>, usize) {
    const F: usize = 512;
    let (runtime, rows) = (setting.runtime(), setting.rows);
    let (gate_up, down) = (setting.weight(&runtime, 2 * F, K), setting.weight(&runtime, K, F));
    let [x, place] = [(); 2].map(|()| array(&runtime, &[rows, K], DType::F32));
    runtime.trace(|| {
        let wide = x.linear(&gate_up).expect("shapes fit");
        let y = wide.swiglu().and_then(|inner| inner.linear_add(&down, &x)).expect("shapes fit");
        let y = match are_read_twice {
            true => wide.slice_axis(-1, 0, K).and_then(|part| part.add(&y)).expect("shapes fit"),
            false => y,
        };
        let prepared = runtime.prepare(&[(&y, &place)]).expect("a program");
        let program = prepared.program();
        let seen = types(program, |down| down.absorbed.first().map(|swiglu| swiglu.inputs[0].dtype));
        (seen, program.arena_bytes())
    })
}

const NARROW: [DType; 2] = [DType::F16; 2];
const WIDE: [DType; 2] = [DType::F32; 2];

#[test]
fn gates_of_products_in_8_bits_take_16_bits() {
    let (types, narrow_bytes) = gates(EIGHT_BITS, false);
    assert_eq!(types, NARROW);
    let (types, wide_bytes) = gates(EIGHT_BITS, true);
    assert_eq!(types, WIDE, "read by another kernel, too");
    assert!(wide_bytes > narrow_bytes, "{wide_bytes} and {narrow_bytes}");
    let f32 = Setting { precision: Precision::F32, ..EIGHT_BITS };
    assert_eq!(gates(f32, false).0, NARROW, "a weight's own arithmetic decides");
    assert_eq!(gates(Setting { rows: 256, ..EIGHT_BITS }, false).0, WIDE, "not rounded to 8 bits");
    let kept = |rows| Setting { compute: Compute::Fp8, rows, ..EIGHT_BITS };
    assert_eq!(gates(kept(129), false).0, NARROW, "steps of many sequences");
    assert_eq!(gates(kept(128), false).0, WIDE, "too few of them");
    for (compute, rows) in [(Compute::Auto, 300), (Compute::Auto, 3000), (Compute::Bf16, 3000)] {
        assert_eq!(gates(Setting { compute, rows, ..EIGHT_BITS }, false).0, WIDE, "{compute:?}");
    }
    let deterministic = Setting { determinism: Determinism::Steps, ..EIGHT_BITS };
    assert_eq!(gates(deterministic, false).0[0], DType::F32, "deterministic");
}

/// The types of attention's result before a product.
fn attended(setting: Setting, window: Option<usize>, pool: DType, is_added: bool) -> Vec<DType> {
    let (runtime, rows) = (setting.runtime(), setting.rows);
    let weight = setting.weight(&runtime, K, K);
    let floats = |shape: &[usize]| array(&runtime, shape, DType::F32);
    let numbers = |shape: &[usize]| array(&runtime, shape, DType::U32);
    let [k, v] = [(); 2].map(|()| floats(&[rows, 2, 64]));
    let (q, place) = (floats(&[rows, 4, 64]), floats(&[rows, K]));
    let pool = || array(&runtime, &[3, 2, 256, 64], pool);
    let pool = KvPool { keys: pool(), values: pool() };
    let batch = Batch {
        row_start: numbers(&[2]),
        slot: numbers(&[1]),
        position: numbers(&[1]),
        table: numbers(&[1, 2]),
        accepted: numbers(&[1]),
    };
    let spec = AttentionSpec { scale: 0.125.into(), window, regime: Regime::Prefill };
    runtime.trace(|| {
        let seen = q.paged_attention(&k, &v, &pool, &batch, spec).and_then(|seen| seen.reshape([rows, K]));
        let seen = seen.expect("shapes fit");
        let y = seen.linear(&weight).expect("shapes fit");
        let y = if is_added { y.add(&seen).expect("shapes fit") } else { y };
        let prepared = runtime.prepare(&[(&y, &place)]).expect("a program");
        types(prepared.program(), |product| Some(product.inputs[0].dtype))
    })
}

#[test]
fn attention_before_a_product_in_8_bits_takes_16_bits() {
    assert_eq!(attended(EIGHT_BITS, None, DType::F16, false), NARROW);
    assert_eq!(attended(EIGHT_BITS, None, DType::F16, true), WIDE, "read by a sum, too");
    assert_eq!(attended(EIGHT_BITS, Some(100), DType::F16, false), WIDE, "in several launches");
    assert_eq!(attended(EIGHT_BITS, None, DType::F32, false), WIDE, "not on tensor cores");
    let f32 = Setting { precision: Precision::F32, ..EIGHT_BITS };
    let deterministic = Setting { determinism: Determinism::Steps, ..EIGHT_BITS };
    let auto = Setting { compute: Compute::Auto, rows: 3000, ..EIGHT_BITS };
    let few = Setting { rows: 200, ..EIGHT_BITS };
    for (setting, why) in
        [(f32, "f32"), (deterministic, "deterministic"), (auto, "16 bits"), (few, "few rows")]
    {
        assert_eq!(attended(setting, None, DType::F16, false), WIDE, "{why}");
    }
}

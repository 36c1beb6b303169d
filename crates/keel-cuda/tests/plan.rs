//! The kernels of a program, as planned. This needs no GPU.

use keel_array::{
    Array, AttentionSpec, Backend, Batch, Category, Compute, ConvWindow, DType, KvPool, Memory, MemoryAt,
    MemoryCopy, MemoryRange, Program, Regime, RopeSpec, Routing, RowLog, Runtime, RuntimeOptions,
    SharedExpert, Weight, WeightFormat, WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions, Determinism};
use keel_testkit::intercepted::{InterceptedBackend, Interceptor};
use std::sync::Arc;

const K: usize = 256;

fn weight(runtime: &Runtime, rows: usize, cols: usize) -> Weight {
    stack(runtime, 1, rows, cols)
}

fn stack(runtime: &Runtime, experts: usize, rows: usize, cols: usize) -> Weight {
    let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
    let spec = WeightSpec { experts, rows, cols, format, compute: Compute::Auto };
    Weight::allocate(runtime, spec).expect("a weight")
}

fn planning() -> Arc<dyn Backend> {
    Arc::new(CudaBackend::planning(&CudaOptions::default()))
}

/// Names of the kernels of the second half of a layer, and bytes of the arena.
fn feed_forward(backend: Arc<dyn Backend>, rows: usize) -> (Vec<String>, usize) {
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    let (gate_up, down) = (weight(&runtime, 2 * 512, K), weight(&runtime, K, 512));
    let array = |shape: &[usize]| {
        Array::persistent(&runtime, Category::Activations, shape, DType::F32).expect("memory")
    };
    let (x, scale, place) = (array(&[rows, K]), array(&[K]), array(&[rows, K]));
    runtime.trace(|| {
        let normed = x.rms_norm(&scale, 1e-6).expect("shapes fit");
        let inner = normed.linear(&gate_up).and_then(|wide| wide.swiglu()).expect("shapes fit");
        let y = inner.linear_add(&down, &x).expect("shapes fit");
        let prepared = runtime.prepare(&[(&y, &place)]).expect("a program");
        let program = prepared.program();
        let names = program.kernels().iter().map(|kernel| kernel.op.name().to_owned()).collect();
        (names, program.arena_bytes())
    })
}

#[test]
fn norms_and_gates_disappear_into_products_of_few_rows() {
    // Each block rounds a single row itself, so the arena holds only the value between the two kernels.
    let (names, arena_bytes) = feed_forward(planning(), 1);
    assert_eq!((&names[..], arena_bytes), (&["swiglu".to_owned(), "linear".to_owned()][..], 4 * 512));
    assert_eq!(feed_forward(planning(), 16).0, ["swiglu", "linear"]);
    // With more rows, the kernel that rounds an intermediate also computes it. x is no intermediate, so its norm stays.
    assert_eq!(feed_forward(planning(), 17).0, ["rms_norm", "linear", "linear"]);
    assert_eq!(feed_forward(planning(), 300).0, ["rms_norm", "linear", "linear"]);
}

/// In 8-bit floats the kernel that rounds an intermediate computes it, too: that of more than 256 rows of prompts, and
/// of more than 128 rows of a weight that is kept in such floats.
#[test]
fn norms_and_gates_disappear_into_products_in_8_bits() {
    for (compute, rows) in [(Compute::PrefillFp8, 300), (Compute::Fp8, 300), (Compute::Fp8, 129)] {
        assert_eq!(feed_forward_in(compute, rows), ["add", "linear", "linear"], "{compute:?}, {rows} rows");
    }
}

/// The kernels of a norm of 4,096 columns, gate and up, SwiGLU, and down, with `rows` rows.
fn feed_forward_in(compute: Compute, rows: usize) -> Vec<String> {
    const K: usize = 4096;
    let runtime = Runtime::new(planning(), RuntimeOptions::default());
    let weight = |rows, cols| {
        let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
        let spec = WeightSpec { experts: 1, rows, cols, format, compute };
        Weight::allocate(&runtime, spec).expect("a weight")
    };
    let array = |shape: &[usize]| {
        Array::persistent(&runtime, Category::Activations, shape, DType::F32).expect("memory")
    };
    let (gate_up, down) = (weight(2 * 4160, K), weight(K, 4160));
    let (x, scale, place) = (array(&[rows, K]), array(&[K]), array(&[rows, K]));
    runtime.trace(|| {
        let sum = x.add(&x).expect("shapes fit");
        let inner =
            sum.rms_norm(&scale, 1e-6).and_then(|normed| normed.linear(&gate_up)).expect("shapes fit");
        let y = inner.swiglu().and_then(|inner| inner.linear_add(&down, &sum)).expect("shapes fit");
        let prepared = runtime.prepare(&[(&y, &place)]).expect("a program");
        prepared.program().kernels().iter().map(|kernel| kernel.op.name().to_owned()).collect()
    })
}

/// Other tests compare bits with such a backend, so it must run the same kernels.
#[test]
fn a_backend_with_something_in_the_way_runs_the_same_kernels() {
    struct Nothing;
    impl Interceptor for Nothing {}
    for rows in [1, 16, 17, 200] {
        let disturbed = InterceptedBackend::new(planning(), Arc::new(Nothing));
        assert_eq!(feed_forward(disturbed, rows), feed_forward(planning(), rows), "{rows} rows");
    }
}

/// A kernel with those that it has absorbed.
fn described(kernel: &keel_array::Kernel) -> String {
    let absorbed: Vec<&str> = kernel.absorbed.iter().map(|kernel| kernel.op.name()).collect();
    format!("{} {absorbed:?}", kernel.op.name())
}

/// A batch of one sequence of two pages.
fn batch_of_one(runtime: &Runtime) -> Batch {
    let numbers = |shape: &[usize]| {
        Array::persistent(runtime, Category::Activations, shape, DType::U32).expect("memory")
    };
    Batch {
        row_start: numbers(&[2]),
        slot: numbers(&[1]),
        position: numbers(&[1]),
        table: numbers(&[1, 2]),
        accepted: numbers(&[1]),
    }
}

/// Names of the kernels of a layer with attention, each with those that it has absorbed.
fn layer(rows: usize, regime: Regime, determinism: Determinism) -> Vec<String> {
    let options = CudaOptions { determinism, ..CudaOptions::default() };
    let runtime = Runtime::new(Arc::new(CudaBackend::planning(&options)), RuntimeOptions::default());
    let (queries, gate_up, down) =
        (weight(&runtime, 512, K), weight(&runtime, 2 * 512, 512), weight(&runtime, K, 512));
    let array = |shape: &[usize], dtype| {
        Array::persistent(&runtime, Category::Activations, shape, dtype).expect("memory")
    };
    let floats = |shape: &[usize]| array(shape, DType::F32);
    let (x, scale, place) = (floats(&[rows, K]), floats(&[K]), floats(&[rows, K]));
    let (k, v) = (floats(&[rows, 2, 64]), floats(&[rows, 2, 64]));
    let pages = [3, 2, 256, 64];
    let pool = KvPool { keys: array(&pages, DType::F16), values: array(&pages, DType::F16) };
    let batch = batch_of_one(&runtime);
    let spec = AttentionSpec { scale: 0.125.into(), window: None, regime };
    runtime.trace(|| {
        let y = || {
            let q = x.rms_norm(&scale, 1e-6)?.linear(&queries)?.reshape([rows, 8, 64])?;
            let seen = q.paged_attention(&k, &v, &pool, &batch, spec.clone())?.reshape([rows, 512])?;
            seen.linear(&gate_up)?.swiglu()?.linear_add(&down, &x)
        };
        let y = y().expect("shapes fit");
        let prepared = runtime.prepare(&[(&y, &place)]).expect("a program");
        prepared.program().kernels().iter().map(described).collect()
    })
}

#[test]
fn in_the_deterministic_mode_the_kernels_of_a_regime_are_always_the_same() {
    for regime in [Regime::Prefill, Regime::Decode] {
        let one = layer(1, regime, Determinism::Steps);
        for rows in [7, 16, 17, 64, 300] {
            assert_eq!(layer(rows, regime, Determinism::Steps), one, "{regime:?}, {rows} rows");
        }
    }
    assert_eq!(layer(300, Regime::Decode, Determinism::Steps), layer(1, Regime::Decode, Determinism::Off));
    assert_ne!(
        layer(17, Regime::Decode, Determinism::Off),
        layer(16, Regime::Decode, Determinism::Off),
        "the fast mode counts rows"
    );
}

/// Kernels of a product with a bias, and of one that is added to a residual. The weight is dense.
fn biased(rows: usize, determinism: Determinism) -> Vec<String> {
    let options = CudaOptions { determinism, ..CudaOptions::default() };
    let runtime = Runtime::new(Arc::new(CudaBackend::planning(&options)), RuntimeOptions::default());
    let format = WeightFormat::Dense(DType::BF16);
    let weight = |rows, cols| {
        let spec = WeightSpec { experts: 1, rows, cols, format, compute: Compute::Auto };
        Weight::allocate(&runtime, spec).expect("a weight")
    };
    let (up, down) = (weight(512, K), weight(K, 512));
    let array =
        |shape: &[usize]| Array::persistent(&runtime, Category::Weights, shape, DType::F32).expect("memory");
    let (x, wide, narrow, place) = (array(&[rows, K]), array(&[512]), array(&[K]), array(&[rows, K]));
    runtime.trace(|| {
        let y = || x.add(&x.linear(&up)?.add(&wide)?.linear(&down)?.add(&narrow)?);
        let prepared = runtime.prepare(&[(&y().expect("shapes fit"), &place)]).expect("a program");
        prepared.program().kernels().iter().map(described).collect()
    })
}

#[test]
fn a_bias_is_added_within_the_product_that_the_library_runs() {
    assert_eq!(biased(17, Determinism::Off), ["add [\"linear\"]", "fused [\"linear\"]"]);
    assert_eq!(biased(300, Determinism::Off), biased(17, Determinism::Off));
    let apart = ["linear []", "add []", "linear []", "fused []"];
    assert_eq!(biased(16, Determinism::Off), apart, "few rows have a kernel of their own");
    assert_eq!(biased(300, Determinism::Steps), apart, "in blocks of rows");
}

/// Kernels of a prompt's attention with rotations of heads of 64, up to the one that attends.
fn turned(rotary: usize, window: Option<usize>, format: DType) -> Vec<String> {
    turned_as(rotary, window, format, Regime::Prefill, 1)
}

/// As [`turned`], where a head is rotated in `parts` heads of its own, before it is one of attention.
fn turned_as(
    rotary: usize,
    window: Option<usize>,
    format: DType,
    regime: Regime,
    parts: usize,
) -> Vec<String> {
    const ROWS: usize = 70;
    let runtime = Runtime::new(planning(), RuntimeOptions::default());
    let array = |shape: &[usize], dtype| {
        Array::persistent(&runtime, Category::Activations, shape, dtype).expect("memory")
    };
    let (x, place) = (array(&[ROWS, 6 * 64], DType::F32), array(&[ROWS, 4, 64], DType::F32));
    let (at, inverse) = (array(&[ROWS], DType::I32), array(&[rotary / 2], DType::F32));
    let row = if format == DType::U8 { 68 } else { 64 };
    let pages = || array(&[3, 1, 256, row], format);
    let pool = KvPool { keys: pages(), values: pages() };
    let batch = batch_of_one(&runtime);
    runtime.trace(|| {
        let y = || {
            let wide = x.add(&x)?;
            let part = |first: usize, heads: usize| {
                wide.slice_axis(-1, first * 64, (first + heads) * 64)?.reshape([
                    ROWS,
                    heads * parts,
                    64 / parts,
                ])
            };
            let turn = |x: Array, heads: usize| {
                let spec = RopeSpec { rotary, sections: None, interleaved: false };
                x.rope(&at, &inverse, spec)?.reshape([ROWS, heads, 64])
            };
            let spec = AttentionSpec { scale: 0.125.into(), window, regime };
            let v = part(5, 1)?.reshape([ROWS, 1, 64])?;
            turn(part(0, 4)?, 4)?.paged_attention(&turn(part(4, 1)?, 1)?, &v, &pool, &batch, spec)
        };
        let prepared = runtime.prepare(&[(&y().expect("shapes fit"), &place)]).expect("a program");
        prepared.program().kernels().iter().skip(1).map(described).collect()
    })
}

#[test]
fn a_prompts_rotations_of_whole_heads_happen_on_the_way_to_pages() {
    assert_eq!(turned(64, None, DType::F16), ["paged_attention [\"rope\", \"rope\"]"]);
    assert_eq!(turned(64, None, DType::F32), turned(64, None, DType::F16));
    let apart = ["rope []", "rope []", "paged_attention []"];
    assert_eq!(turned(32, None, DType::F16), apart);
    assert_eq!(turned(64, Some(40), DType::F16), apart, "in several launches");
    let coded = ["rope []", "paged_attention [\"rope\"]"];
    assert_eq!(turned(64, None, DType::U8), coded, "keys are coded in groups");
    let steps = turned_as(32, None, DType::U8, Regime::Decode, 1);
    assert_eq!(steps, ["paged_attention [\"rope\", \"rope\"]"], "a warp of a decode step has a whole head");
    for regime in [Regime::Prefill, Regime::Decode] {
        let halves = turned_as(32, None, DType::F16, regime, 2);
        assert_eq!(halves, apart, "halves of heads are rotated as a whole");
    }
}

/// The groups of a program, each with its number of kernels. Kernels alone are left out.
fn groups(program: &Program) -> Vec<String> {
    let named = program.groups().iter().filter_map(|group| Some((group.name?, group.kernels.len())));
    named.map(|(name, len)| format!("{name} of {len}")).collect()
}

/// Kernels of a mixture, each with those that it has absorbed, and bytes of the arena.
fn mixture(rows: usize, shared: usize) -> (Vec<String>, usize) {
    mixture_as(rows, shared, |program| {
        (program.kernels().iter().map(described).collect(), program.arena_bytes())
    })
}

fn mixture_as<T>(rows: usize, shared: usize, seen: impl Fn(&Program) -> T) -> T {
    const EXPERTS: usize = 70;
    const F: usize = 128;
    let runtime = Runtime::new(planning(), RuntimeOptions::default());
    let array = |shape: &[usize]| {
        Array::persistent(&runtime, Category::Activations, shape, DType::F32).expect("memory")
    };
    let router = weight(&runtime, EXPERTS + 1, K);
    let (gate_up, down) = (stack(&runtime, EXPERTS, 2 * F, K), stack(&runtime, EXPERTS, K, F));
    let (always_up, always_down) = (weight(&runtime, 2 * shared, K), weight(&runtime, K, shared));
    let (x, scale, place) = (array(&[rows, K]), array(&[K]), array(&[rows, K]));
    runtime.trace(|| {
        let y = || {
            let normed = x.rms_norm(&scale, 1e-6)?;
            let routed = normed.linear(&router)?;
            let logits = routed.slice_axis(-1, 0, EXPERTS)?;
            let Routing { weights, experts: chosen } = logits.route_top_k(3, true)?;
            let outputs = normed.gather_linear(&gate_up, &chosen)?.swiglu()?.gather_linear(&down, &chosen)?;
            let always = normed.linear(&always_up)?.swiglu()?.linear(&always_down)?;
            let gate = routed.slice_axis(-1, EXPERTS, EXPERTS + 1)?;
            outputs.combine_experts(&weights, Some(&x), Some(SharedExpert { output: &always, gate: &gate }))
        };
        let y = y().expect("shapes fit");
        let prepared = runtime.prepare(&[(&y, &place)]).expect("a program");
        seen(prepared.program())
    })
}

#[test]
fn a_mixture_of_few_rows_is_a_group_of_its_program() {
    // The router, the choice, the experts, the shared expert and the combination.
    assert_eq!(mixture_as(1, 128, groups), ["mixture of 5"]);
    assert_eq!(mixture_as(16, 128, groups), ["mixture of 5"]);
    // A shared expert of another width is not part of it, and the combination does not follow at once.
    assert_eq!(mixture_as(1, 192, groups), ["mixture of 3"]);
    assert!(mixture_as(200, 128, groups).is_empty(), "rows sorted by expert");
    let lines = mixture_as(1, 128, Program::lines);
    let mixture =
        "mixture: linear 71x256 (rms_norm) + route_top_k + swiglu (gather_linear 256x256 (rms_norm))";
    assert!(lines.iter().any(|line| line.contains(mixture)), "{lines:#?}");
}

/// Groups of a convolution after a product.
fn convolved(rows: usize, sequences: usize) -> Vec<String> {
    let runtime = Runtime::new(planning(), RuntimeOptions::default());
    let product = weight(&runtime, 96, K);
    let array = |shape: &[usize], dtype| {
        Array::persistent(&runtime, Category::Activations, shape, dtype).expect("memory")
    };
    let floats = |shape: &[usize]| array(shape, DType::F32);
    let (x, taps, place) = (floats(&[rows, K]), floats(&[4, 64]), floats(&[rows, 64]));
    let (window, other) = (ConvWindow { rows: floats(&[3, 3, 64]), open: None }, floats(&[rows, 64]));
    let numbers = |shape: &[usize]| array(shape, DType::U32);
    let batch = Batch {
        row_start: numbers(&[sequences + 1]),
        slot: numbers(&[sequences]),
        position: numbers(&[sequences]),
        table: numbers(&[sequences, 2]),
        accepted: numbers(&[sequences]),
    };
    runtime.trace(|| {
        let y = || {
            x.linear(&product)?
                .slice_axis(-1, 16, 80)?
                .causal_conv(&taps, &window, &batch, RowLog::None)?
                .add(&other)
        };
        let prepared = runtime.prepare(&[(&y().expect("shapes fit"), &place)]).expect("a program");
        groups(prepared.program())
    })
}

#[test]
fn a_convolution_of_one_row_is_in_a_group_with_its_product() {
    assert_eq!(convolved(1, 1), ["convolved product of 2"]);
    assert!(convolved(2, 1).is_empty() && convolved(2, 2).is_empty());
}

#[test]
fn a_mixture_of_few_rows_ends_with_its_products() {
    let enters = ["linear [\"rms_norm\"]", "route_top_k []", "swiglu [\"gather_linear\"]"];
    let (names, arena_bytes) = mixture(1, 128);
    let ends = ["swiglu [\"linear\"]", "combine_experts [\"gather_linear\", \"linear\"]"];
    assert_eq!(names, [&enters[..], &ends].concat());
    // Logits, choices, and the inputs of the products that are added up; not the results of these products.
    assert!(arena_bytes < 4 * (71 + 2 * 3 + 4 * 128) + 5 * 256, "{arena_bytes}");
    // A shared expert of another width is a product of its own.
    let ends = ["swiglu [\"linear\"]", "linear []", "combine_experts [\"gather_linear\"]"];
    assert_eq!(mixture(1, 192).0, [&enters[..], &ends].concat());
    // With several rows, logits and gates are columns of one array, so both are copied from strides.
    let several = mixture(2, 128).0;
    assert_eq!(several[1], "route_top_k [\"copy\"]");
    assert_eq!(several[4..], ["combine_experts [\"gather_linear\", \"linear\", \"copy\"]"]);
    // Many rows are sorted by expert.
    assert!(mixture(200, 128).0.ends_with(&["combine_experts [\"copy\"]".to_owned()]));
}

/// The device maps at least this much at a time, so an arena of a few bytes takes this much there.
/// A stage of a pipeline whose layers begin with a product reads an array that it has received.
#[test]
fn an_array_that_is_made_of_no_other_is_read_as_it_is() {
    let runtime = Runtime::new(planning(), RuntimeOptions::default());
    let (one, many) = (weight(&runtime, 2 * K, K), stack(&runtime, 5, 2 * K, K));
    for rows in [1, 16, 17, 300] {
        let place = |shape: &[usize]| {
            Array::persistent(&runtime, Category::Activations, shape, DType::F32).expect("memory")
        };
        let zeros = |shape: &[usize], dtype| Array::zeros(&runtime, shape, dtype);
        let kernels = |build: &dyn Fn() -> keel_array::Result<Array>| {
            runtime.trace(|| {
                let y = build().expect("shapes fit");
                let prepared = runtime.prepare(&[(&y, &place(y.shape()))]).expect("a program");
                prepared.program().kernels().iter().map(described).collect::<Vec<_>>()
            })
        };
        let x = || zeros(&[rows, K], DType::F32);
        assert_eq!(kernels(&|| x()?.linear(&one)), ["fill []", "linear []"], "{rows} rows");
        let gathered = kernels(&|| x()?.gather_linear(&many, &zeros(&[rows, 3], DType::U32)?));
        assert_eq!(gathered, ["fill []", "fill []", "gather_linear []"], "{rows} rows");
        let gated = || zeros(&[rows, 4, 64], DType::F32)?.sigmoid_gate(&zeros(&[rows, 4, 64], DType::F32)?);
        assert_eq!(kernels(&gated), ["fill []", "fill []", "sigmoid_gate []"], "{rows} rows");
        let routed = kernels(&|| zeros(&[rows, 70], DType::F32)?.route_top_k(3, true)?.weights.exp());
        assert_eq!(routed, ["fill []", "route_top_k []", "exp []"], "{rows} rows");
    }
}

#[test]
fn an_arena_is_planned_in_whole_granules() {
    const GRANULE: usize = 2 << 20;
    let runtime = Runtime::new(planning(), RuntimeOptions::default());
    let own = runtime.ledger().active().total();
    for (bytes, granules) in [(0, 0), (1, 1), (GRANULE, 1), (GRANULE + 1, 2), (5 * GRANULE - 1, 5), (1, 5)] {
        runtime.reserve_arena(bytes).expect("there is no limit");
        let planned = runtime.ledger().active().get(Category::Activations);
        assert_eq!(planned, (granules * GRANULE) as u64, "{bytes}");
    }
    assert_eq!(runtime.ledger().peak_total(), own + (5 * GRANULE) as u64, "never two arenas at a time");
}

#[test]
fn a_plan_runs_nothing_and_says_so() {
    let runtime = Runtime::new(planning(), RuntimeOptions::default());
    let array = || Array::persistent(&runtime, Category::Activations, [3], DType::F32).expect("memory");
    let (x, place) = (array(), array());
    let twice = || x.add(&x).expect("shapes fit");
    let program = runtime.trace(|| runtime.prepare(&[(&twice(), &place)])).expect("a program");
    let mut bytes = [7; 12];
    let failed = program.run().expect_err("there is no device");
    assert_eq!(failed.has_mutated(&x), Some(false));
    for error in [
        twice().eval().expect_err("there is no device").to_string(),
        failed.to_string(),
        program.submit(&place).wait(&mut bytes).expect_err("there is no device").to_string(),
    ] {
        assert!(error.contains("launch: this backend plans programs and has no device"), "{error}");
    }
    x.read_settled_bytes(0, &mut bytes).expect("zeros");
    assert_eq!(bytes, [0; 12]);
}

#[test]
fn a_plan_touches_no_memory() {
    let backend = CudaBackend::planning(&CudaOptions::default());
    let counted = backend.allocate(8).expect("it is only counted");
    let memory = &*counted;
    backend.write(memory, 0, &[1; 8]);
    let at = |offset| MemoryAt { memory, offset };
    backend.copy(&[MemoryCopy { from: at(0), to: at(4), bytes: 4 }]);
    backend.clear(&[MemoryRange { memory, bytes: 0..8 }]);
    let mut bytes = [7; 8];
    backend.read(memory, 0, &mut bytes).expect("zeros");
    assert_eq!(bytes, [0; 8]);
}

//! With `Determinism::Devices` a product with some rows of a weight has the bits of the product with all of them: half
//! of the rows and a quarter, plain and with SwiGLU, in both regimes. Needs a GPU: `KEEL_TEST_CUDA=1`.

use half::{bf16, f16};
use keel_array::{
    Array, AttentionSpec, Batch, BlockFormat, Category, Compute, DType, KvPool, Regime, RowBlock, RowData,
    Runtime, RuntimeOptions, Weight, WeightFormat, WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions, Determinism};
use keel_testkit::random::Random;
use std::ops::Range;
use std::sync::Arc;

const FORMATS: [WeightFormat; 5] = [
    WeightFormat::Affine { bits: 4, group_size: 32, scale_dtype: DType::BF16 },
    WeightFormat::Affine { bits: 8, group_size: 64, scale_dtype: DType::BF16 },
    WeightFormat::Blocks(BlockFormat::Q8_0),
    WeightFormat::Dense(DType::BF16),
    WeightFormat::Dense(DType::F16),
];

/// Rows and columns: a quarter of no whole tiles, of fewer than 64 rows, long columns, and many rows.
const SHAPES: [(usize, usize); 4] = [(288, 320), (160, 2560), (2304, 9216), (9216, 1024)];

/// Rows of x: alone, few, and more than one pass of a kernel of few rows.
const ROWS: [usize; 4] = [1, 5, 40, 130];

/// A random weight on the host.
struct Rows {
    cols: usize,
    format: WeightFormat,
    /// Stored floats, codes or blocks of each row.
    bytes: Vec<Vec<u8>>,
    /// Scales and biases of each row, one of each for a group of an affine weight. None for other weights.
    scales: Vec<Vec<f32>>,
    biases: Vec<Vec<f32>>,
}

impl Rows {
    fn random(random: &mut Random, (rows, cols): (usize, usize), format: WeightFormat) -> Rows {
        let mut row = || match format {
            WeightFormat::Dense(dtype) => {
                let value = |x: f32| match dtype {
                    DType::F16 => f16::from_f32(x).to_le_bytes(),
                    _ => bf16::from_f32(x).to_le_bytes(),
                };
                random.uniforms(cols, -1.0, 1.0).into_iter().flat_map(value).collect()
            }
            WeightFormat::Affine { bits, .. } => (0..cols).map(|_| random.below(1 << bits) as u8).collect(),
            WeightFormat::Blocks(format) => {
                let mut bytes: Vec<u8> =
                    (0..cols / format.values() * format.bytes()).map(|_| random.below(256) as u8).collect();
                for block in bytes.chunks_exact_mut(format.bytes()) {
                    block[..2].copy_from_slice(&f16::from_f32(random.uniform(0.001, 0.01)).to_le_bytes());
                }
                bytes
            }
        };
        let bytes = (0..rows).map(|_| row()).collect();
        let groups = match format {
            WeightFormat::Affine { group_size, .. } => cols / usize::from(group_size),
            _ => 0,
        };
        let mut of_groups =
            |low, high| (0..rows).map(|_| random.uniforms(groups, low, high)).collect::<Vec<_>>();
        Rows { cols, format, bytes, scales: of_groups(0.01, 0.05), biases: of_groups(-0.5, 0.1) }
    }

    /// These rows on the device, one range after the other.
    fn upload(&self, runtime: &Runtime, ranges: &[Range<usize>]) -> Weight {
        let rows: usize = ranges.iter().map(Range::len).sum();
        let (cols, format) = (self.cols, self.format);
        let spec = WeightSpec { experts: 1, rows, cols, format, compute: Compute::Auto };
        let weight = Weight::allocate(runtime, spec).expect("memory");
        let bytes: Vec<u8> = ranges.iter().flat_map(|range| self.bytes[range.clone()].concat()).collect();
        let of_groups = |all: &[Vec<f32>]| {
            ranges.iter().flat_map(|range| all[range.clone()].concat()).collect::<Vec<f32>>()
        };
        let (scales, biases) = (of_groups(&self.scales), of_groups(&self.biases));
        let data = match format {
            WeightFormat::Dense(_) => RowData::Dense(&bytes),
            WeightFormat::Affine { .. } => {
                RowData::Affine { codes: &bytes, scales: &scales, biases: &biases }
            }
            WeightFormat::Blocks(_) => RowData::Blocks(&bytes),
        };
        weight.fill(&RowBlock { expert: 0, first_row: 0, rows, data }).expect("all rows");
        weight
    }
}

/// Attention of one row to itself, which gives a program its regime.
fn attended(runtime: &Runtime, regime: Regime) -> Array {
    let array = |shape: &[usize], dtype| {
        Array::persistent(runtime, Category::Activations, shape, dtype).expect("memory")
    };
    let floats = |shape: &[usize]| array(shape, DType::F32);
    let pages = [1, 1, AttentionSpec::PAGE, 64];
    let pool = KvPool { keys: array(&pages, DType::F16), values: array(&pages, DType::F16) };
    let numbers = |values: &[u32], shape: &[usize]| {
        let array = Array::persistent(runtime, Category::Activations, shape, DType::U32).expect("memory");
        array.write(values).expect("memory");
        array
    };
    let batch = Batch {
        row_start: numbers(&[0, 1], &[2]),
        slot: numbers(&[0], &[1]),
        position: numbers(&[0], &[1]),
        table: numbers(&[0], &[1, 1]),
        accepted: numbers(&[0], &[1]),
    };
    let spec = AttentionSpec { scale: 0.125.into(), window: None, regime };
    let rows = || floats(&[1, 1, 64]);
    rows().paged_attention(&rows(), &rows(), &pool, &batch, spec).expect("shapes fit")
}

/// Products of x `[T, K]` with each weight, with SwiGLU if `gated`.
fn products(runtime: &Runtime, x: &Array, weights: &[Weight], gated: bool, regime: Regime) -> Vec<Vec<f32>> {
    let (program, to) = runtime.trace(|| {
        let mut results = vec![attended(runtime, regime)];
        for weight in weights {
            let y = x.linear(weight).expect("shapes fit");
            results.push(if gated { y.swiglu().expect("shapes fit") } else { y });
        }
        let place = |y: &Array| {
            Array::persistent(runtime, Category::Activations, y.shape().clone(), DType::F32).expect("memory")
        };
        let to: Vec<Array> = results.iter().map(place).collect();
        let pairs: Vec<(&Array, &Array)> = results.iter().zip(&to).collect();
        (runtime.prepare(&pairs).expect("a program"), to)
    });
    assert!(program.program().kernels().iter().all(|kernel| kernel.regime == Some(regime)));
    runtime.make_ready(&[&program], &mut |_, _| ()).expect("kernels");
    program.run().expect("it runs");
    to[1..].iter().map(|y| y.to_vec().expect("memory")).collect()
}

#[test]
fn shares_of_a_weight_have_the_bits_of_the_whole() {
    if !keel_testkit::has_gpu!() {
        return;
    }
    let options = CudaOptions { determinism: Determinism::Devices, ..CudaOptions::default() };
    let backend = Arc::new(CudaBackend::new(&options).expect("a GPU"));
    let runtime = Runtime::new(backend, RuntimeOptions::default());
    let mut random = Random::new(77);
    for (format, shape @ (n, k)) in FORMATS.iter().flat_map(|format| SHAPES.map(|shape| (*format, shape))) {
        let whole = Rows::random(&mut random, shape, format);
        // The columns of a result of all rows, and the rows of the weight that compute them.
        let shares = |gated: bool| -> Vec<(Range<usize>, Vec<Range<usize>>)> {
            let width = if gated { n / 2 } else { n };
            let of = |count: usize| (0..count).map(move |i| i * width / count..(i + 1) * width / count);
            let rows = |columns: Range<usize>| match gated {
                true => vec![columns.clone(), columns.start + width..columns.end + width],
                false => vec![columns],
            };
            [1, 2, 4].into_iter().flat_map(of).map(|columns| (columns.clone(), rows(columns))).collect()
        };
        for gated in [false, true] {
            let shares = shares(gated);
            let weights: Vec<Weight> = shares.iter().map(|(_, rows)| whole.upload(&runtime, rows)).collect();
            for (t, regime) in ROWS.into_iter().flat_map(|t| [(t, Regime::Prefill), (t, Regime::Decode)]) {
                let x =
                    Array::persistent(&runtime, Category::Activations, [t, k], DType::F32).expect("memory");
                x.write(&random.uniforms(t * k, -2.0, 2.0)).expect("memory");
                let results = products(&runtime, &x, &weights, gated, regime);
                let width = shares[0].0.len();
                assert!(results[0].iter().all(|y| y.is_finite()) && results[0].iter().any(|y| *y != 0.0));
                for ((columns, _), share) in shares.iter().zip(&results).skip(1) {
                    let differ = share.chunks_exact(columns.len()).zip(results[0].chunks_exact(width));
                    let differ = differ.flat_map(|(share, all)| share.iter().zip(&all[columns.clone()]));
                    let differ = differ.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                    assert_eq!(
                        differ, 0,
                        "{format:?}, {n} x {k}, gated {gated}, {t} rows, {regime:?}, {columns:?}"
                    );
                }
            }
        }
    }
}

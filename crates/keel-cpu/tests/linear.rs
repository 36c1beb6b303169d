//! Linear layers against the naive oracle, on every instruction set that this machine has, and the law that a row's
//! bits do not depend on other rows.

use half::{bf16, f16};
use keel_array::BlockFormat;
use keel_cpu::isa::Isa;
use keel_cpu::kernels::linear::{
    Compute, Epilogue, FloatType, Linear, PackedLayout, Rows, WeightFormat, pack,
};
use keel_cpu::pool::ThreadPool;
use keel_cpu::shared_slice::SharedMut;
use keel_testkit::cases::{linear as affine_cases, matmul as dense_cases};
use keel_testkit::compare::{assert_close, assert_same_bits};
use keel_testkit::naive::linear::{Affine, gather_linear, linear, quantized_activations};
use keel_testkit::naive::matmul::matmul_transposed;
use keel_testkit::random::Random;
use keel_testkit::tolerance;

fn affine_format(w: &Affine, bits: usize, params: FloatType) -> WeightFormat {
    WeightFormat::Affine { bits, group: w.group, params }
}

/// Packs matrices of one shape into one stack.
fn packed(format: WeightFormat, matrices: &[Affine]) -> (PackedLayout, Vec<u8>) {
    let (n, k) = (matrices[0].quants.len() / matrices[0].k, matrices[0].k);
    let layout = PackedLayout::stacked(matrices.len(), n, k, format).unwrap();
    let mut bytes = vec![0xff; layout.bytes()];
    for (i, w) in matrices.iter().enumerate() {
        let rows = Rows::Affine { quants: &w.quants, scales: &w.scales, biases: &w.biases };
        pack(&layout, rows, &mut bytes[layout.row_bytes(i, 0..n)]);
    }
    (layout, bytes)
}

fn run(pool: &ThreadPool, linear: &Linear, weights: &[u8], x: &[f32]) -> Vec<f32> {
    let rows = x.len() / linear.layout().k();
    let mut y = vec![f32::NAN; rows * linear.layout().n()];
    let mut scratch = vec![0xff; linear.scratch_bytes(rows)];
    let (y_out, scratch) = (SharedMut::new(&mut y), SharedMut::new(&mut scratch));
    pool.run(|worker| linear.run(worker, weights, x, y_out, Epilogue::Store, scratch));
    y
}

fn run_gathered(pool: &ThreadPool, linear: &Linear, weights: &[u8], x: &[f32], experts: &[u32]) -> Vec<f32> {
    let mut y = vec![f32::NAN; experts.len() * linear.layout().n()];
    let scratch_bytes = linear.gathered_scratch_bytes(x.len() / linear.layout().k(), experts.len());
    let mut scratch = vec![0xffff_ffff_ffff_ffffu64; scratch_bytes.div_ceil(8)];
    let y_out = SharedMut::new(&mut y);
    // SAFETY: the words are borrowed for longer than the handle is used.
    let scratch = unsafe { SharedMut::from_raw(scratch.as_mut_ptr().cast::<u8>(), scratch.len() * 8) };
    pool.run(|worker| linear.run_gathered(worker, weights, x, experts, y_out, scratch));
    y
}

#[test]
fn affine_weights_of_every_format_match_the_oracle() {
    let pool = ThreadPool::new(2);
    let mut random = Random::new(1);
    for (case, &(t, n, k)) in affine_cases::SHAPES.iter().enumerate() {
        for &bits in affine_cases::BITS {
            let group = affine_cases::GROUPS[case % 3];
            let params = [FloatType::Bf16, FloatType::F32, FloatType::F16][(case + bits) % 3];
            let w = affine_cases::weights(&mut random, n, k, bits, group);
            let (layout, bytes) = packed(affine_format(&w, bits, params), std::slice::from_ref(&w));
            let x = random.uniforms(t * k, -1.0, 1.0);
            let exact = linear(&x, &w);
            let rounded = linear(&quantized_activations(&x, group), &w);
            for isa in Isa::available() {
                let what = format!("{isa}, [{t}, {n}, {k}], {bits} bits, group {group}, {params:?}");
                let y = run(&pool, &Linear::new(layout, Compute::F32, isa), &bytes, &x);
                assert_close(&what, &y, &exact, tolerance::F32);
                let y = run(&pool, &Linear::new(layout, Compute::Int8, isa), &bytes, &x);
                assert_close(&what, &y, &rounded, tolerance::INT8);
            }
        }
    }
}

#[test]
fn dense_weights_of_every_type_match_the_oracle() {
    let pool = ThreadPool::new(2);
    let mut random = Random::new(2);
    let to_bf16 = |x: &f32| bf16::from_f32(*x).to_f32();
    for &(t, n, k) in dense_cases::SHAPES {
        let x = random.uniforms(t * k, -1.0, 1.0);
        let w = random.uniforms(n * k, -1.0, 1.0);
        for float in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            let stored: Vec<f32> = match float {
                FloatType::F32 => w.clone(),
                FloatType::Bf16 => w.iter().map(to_bf16).collect(),
                FloatType::F16 => w.iter().map(|w| f16::from_f32(*w).to_f32()).collect(),
            };
            let layout = PackedLayout::new(n, k, WeightFormat::Dense(float)).unwrap();
            let mut bytes = vec![0xff; layout.bytes()];
            pack(&layout, Rows::Dense(&w), &mut bytes);
            for isa in Isa::available() {
                let what = format!("{isa}, [{t}, {n}, {k}], {float:?}");
                let y = run(&pool, &Linear::new(layout, Compute::F32, isa), &bytes, &x);
                assert_close(&what, &y, &matmul_transposed(&x, &stored, k), tolerance::F32);
                if float == FloatType::Bf16 {
                    let rounded: Vec<f32> = x.iter().map(to_bf16).collect();
                    let y = run(&pool, &Linear::new(layout, Compute::Bf16, isa), &bytes, &x);
                    let want = matmul_transposed(&rounded, &stored, k);
                    assert_close(&format!("{what}, bf16 x"), &y, &want, tolerance::BF16);
                }
            }
        }
    }
}

#[test]
fn rounding_the_activations_costs_as_little_as_promised() {
    let pool = ThreadPool::new(2);
    let mut random = Random::new(3);
    let (t, n, k) = (16, 48, 1024);
    let w = affine_cases::weights(&mut random, n, k, 4, 64);
    let x = random.uniforms(t * k, -1.0, 1.0);
    let (layout, bytes) = packed(affine_format(&w, 4, FloatType::Bf16), std::slice::from_ref(&w));
    let y = run(&pool, &Linear::new(layout, Compute::Int8, Isa::best()), &bytes, &x);
    assert_close("int8", &y, &linear(&x, &w), tolerance::INT8_ACTIVATIONS);

    let dense: Vec<f32> = w.weights().iter().map(|w| bf16::from_f32(*w).to_f32()).collect();
    let layout = PackedLayout::new(n, k, WeightFormat::Dense(FloatType::Bf16)).unwrap();
    let mut bytes = vec![0; layout.bytes()];
    pack(&layout, Rows::Dense(&dense), &mut bytes);
    let y = run(&pool, &Linear::new(layout, Compute::Bf16, Isa::best()), &bytes, &x);
    assert_close("bf16", &y, &matmul_transposed(&x, &dense, k), tolerance::BF16_ACTIVATIONS);
}

/// `n` rows of `k` values in blocks with moderate scales, as a file has them.
fn blocks(random: &mut Random, format: BlockFormat, n: usize, k: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..n * format.row_bytes(k).unwrap()).map(|_| random.below(256) as u8).collect();
    for block in bytes.chunks_exact_mut(format.bytes()) {
        for &at in format.scale_offsets() {
            let scale = f16::from_f32(random.uniforms(1, 0.001, 0.02)[0]);
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        if format == BlockFormat::MXFP4 {
            block[0] = 118 + block[0] % 8;
        }
    }
    bytes
}

#[test]
fn blocks_of_every_coding_match_the_oracle() {
    let pool = ThreadPool::new(2);
    let mut random = Random::new(10);
    for format in BlockFormat::ALL {
        let group = match format {
            BlockFormat::Q2K | BlockFormat::Q3K | BlockFormat::Q6K => 16,
            _ => 32,
        };
        for (t, n, k) in [(1, 33, 512), (13, 50, 256), (7, 16, 768)] {
            let file = blocks(&mut random, format, n, k);
            let mut decoded = vec![0.0; n * k];
            format.decode(&file, &mut decoded);
            let layout = PackedLayout::new(n, k, WeightFormat::Blocks(format)).unwrap();
            let mut bytes = vec![0xff; layout.bytes()];
            pack(&layout, Rows::Blocks(&file), &mut bytes);
            let x = random.uniforms(t * k, -1.0, 1.0);
            let want = matmul_transposed(&quantized_activations(&x, group), &decoded, k);
            for isa in Isa::available() {
                let y = run(&pool, &Linear::new(layout, Compute::Int8, isa), &bytes, &x);
                assert_close(&format!("{isa}, [{t}, {n}, {k}] in {format}"), &y, &want, tolerance::INT8);
            }
        }
    }
}

/// Every format of weights once, as `[n, 384]` or `[n, 512]`, with every arithmetic that takes it.
fn formats(random: &mut Random, n: usize) -> Vec<(PackedLayout, Vec<u8>, Compute)> {
    let k = 384;
    let mut all = Vec::new();
    for format in BlockFormat::ALL {
        let layout = PackedLayout::new(n, 512, WeightFormat::Blocks(format)).unwrap();
        let mut bytes = vec![0; layout.bytes()];
        pack(&layout, Rows::Blocks(&blocks(random, format, n, 512)), &mut bytes);
        all.push((layout, bytes, Compute::Int8));
    }
    for (i, &bits) in affine_cases::BITS.iter().enumerate() {
        let w = affine_cases::weights(random, n, k, bits, affine_cases::GROUPS[i % 3]);
        let (layout, bytes) = packed(affine_format(&w, bits, FloatType::Bf16), &[w]);
        all.extend([Compute::Int8, Compute::F32].map(|compute| (layout, bytes.clone(), compute)));
    }
    for float in [FloatType::F32, FloatType::F16, FloatType::Bf16] {
        let layout = PackedLayout::new(n, k, WeightFormat::Dense(float)).unwrap();
        let mut bytes = vec![0; layout.bytes()];
        pack(&layout, Rows::Dense(&random.uniforms(n * k, -1.0, 1.0)), &mut bytes);
        all.push((layout, bytes.clone(), Compute::F32));
        if float == FloatType::Bf16 {
            all.push((layout, bytes, Compute::Bf16));
        }
    }
    all
}

#[test]
fn a_rows_bits_do_not_depend_on_its_neighbours_or_on_the_number_of_workers() {
    let pools = [1, 2, 3].map(ThreadPool::new);
    let mut random = Random::new(4);
    let most = *affine_cases::ROWS.iter().max().unwrap();
    for (layout, bytes, compute) in formats(&mut random, 83) {
        let (n, k) = (layout.n(), layout.k());
        let x = random.uniforms(most * k, -1.0, 1.0);
        for isa in Isa::available() {
            let linear = Linear::new(layout, compute, isa);
            let alone: Vec<f32> =
                x.chunks_exact(k).flat_map(|x| run(&pools[0], &linear, &bytes, x)).collect();
            for (i, &rows) in affine_cases::ROWS.iter().enumerate() {
                let (from, pool) = ((most - rows) / 2, &pools[i % 3]);
                let y = run(pool, &linear, &bytes, &x[from * k..(from + rows) * k]);
                let what = format!("{isa}, {:?}, {compute:?}, {rows} rows", layout.format());
                assert_same_bits(&what, &y, &alone[from * n..(from + rows) * n]);
            }
        }
    }
}

#[test]
fn f32_and_int8_arithmetic_give_the_same_bits_on_every_instruction_set() {
    let pool = ThreadPool::new(2);
    let mut random = Random::new(5);
    for (layout, bytes, compute) in formats(&mut random, 35) {
        if compute == Compute::Bf16 {
            continue;
        }
        let x = random.uniforms(11 * layout.k(), -1.0, 1.0);
        let want = run(&pool, &Linear::new(layout, compute, Isa::Portable), &bytes, &x);
        for isa in Isa::available() {
            let y = run(&pool, &Linear::new(layout, compute, isa), &bytes, &x);
            assert_same_bits(&format!("{isa}, {:?}, {compute:?}", layout.format()), &y, &want);
        }
    }
}

#[test]
fn results_can_be_added_to_a_residual() {
    let pool = ThreadPool::new(2);
    let mut random = Random::new(6);
    for (layout, bytes, compute) in formats(&mut random, 37) {
        let x = random.uniforms(3 * layout.k(), -1.0, 1.0);
        let residual = random.uniforms(3 * layout.n(), -1.0, 1.0);
        for isa in Isa::available() {
            let linear = Linear::new(layout, compute, isa);
            let product = run(&pool, &linear, &bytes, &x);
            let want: Vec<f32> = product.iter().zip(&residual).map(|(p, r)| p + r).collect();
            let mut y = residual.clone();
            let mut scratch = vec![0; linear.scratch_bytes(3)];
            let (y_out, scratch) = (SharedMut::new(&mut y), SharedMut::new(&mut scratch));
            pool.run(|worker| linear.run(worker, &bytes, &x, y_out, Epilogue::Add, scratch));
            assert_same_bits(&format!("{isa}, {:?}", layout.format()), &y, &want);
        }
    }
}

#[test]
fn gathered_rows_match_the_oracle_and_have_the_bits_of_plain_ones() {
    let pools = [1, 2].map(ThreadPool::new);
    let mut random = Random::new(7);
    let (n, k, count) = (49, 256, 5);
    for bits in [4, 8] {
        let experts: Vec<Affine> =
            (0..count).map(|_| affine_cases::weights(&mut random, n, k, bits, 64)).collect();
        let (layout, bytes) = packed(affine_format(&experts[0], bits, FloatType::F16), &experts);
        let single = PackedLayout::new(n, k, layout.format()).unwrap();
        for (rows, fanout) in [(1, 2), (3, 1), (17, 3), (40, 2)] {
            let x = random.uniforms(rows * k, -1.0, 1.0);
            // Expert 1 gets nothing.
            let choice: Vec<u32> = (0..rows * fanout).map(|_| [0, 2, 3, 4][random.below(4)]).collect();
            for isa in Isa::available() {
                let what = format!("{isa}, {bits} bits, {rows} rows x {fanout}");
                let y = run_gathered(
                    &pools[rows % 2],
                    &Linear::new(layout, Compute::F32, isa),
                    &bytes,
                    &x,
                    &choice,
                );
                assert_close(&what, &y, &gather_linear(&x, &experts, &choice), tolerance::F32);
                for compute in [Compute::F32, Compute::Int8] {
                    let y = run_gathered(&pools[1], &Linear::new(layout, compute, isa), &bytes, &x, &choice);
                    let plain = Linear::new(single, compute, isa);
                    for (r, y) in y.chunks_exact(n).enumerate() {
                        let weights = &bytes[layout.row_bytes(choice[r] as usize, 0..n)];
                        let x = &x[r / fanout * k..(r / fanout + 1) * k];
                        assert_same_bits(&format!("{what}, row {r}"), y, &run(&pools[0], &plain, weights, x));
                    }
                }
            }
        }
    }
}

/// The harness must notice one wrong bit of one weight.
#[test]
#[should_panic(expected = "error")]
fn a_broken_weight_is_caught() {
    let pool = ThreadPool::new(1);
    let mut random = Random::new(8);
    let w = affine_cases::weights(&mut random, 33, 256, 4, 64);
    let (layout, mut bytes) = packed(affine_format(&w, 4, FloatType::Bf16), std::slice::from_ref(&w));
    bytes[1000] ^= 1;
    let x = random.uniforms(3 * 256, -1.0, 1.0);
    let y = run(&pool, &Linear::new(layout, Compute::F32, Isa::best()), &bytes, &x);
    assert_close("planted", &y, &linear(&x, &w), tolerance::F32);
}

#[test]
fn activations_that_are_not_finite_are_not_hidden() {
    let pool = ThreadPool::new(1);
    let mut random = Random::new(9);
    for (layout, bytes, compute) in formats(&mut random, 17) {
        let mut x = random.uniforms(2 * layout.k(), -1.0, 1.0);
        x[layout.k() + 100] = f32::NAN;
        let y = run(&pool, &Linear::new(layout, compute, Isa::best()), &bytes, &x);
        let (clean, spoilt) = y.split_at(layout.n());
        assert!(clean.iter().all(|y| y.is_finite()) && spoilt.iter().all(|y| y.is_nan()), "{layout:?}");
    }
}

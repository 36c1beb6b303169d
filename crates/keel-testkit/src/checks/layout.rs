//! Creation, copies, views, joins, block replacement.

use super::{Check, FLOATS, INTEGERS, download, expect, layouts, upload};
use crate::cases::elementwise::SHAPES;
use crate::naive::create::{random_bits, random_normal, random_uniform};
use crate::naive::layout::{concatenate, slice_update};
use crate::naive::tensor::Tensor;
use crate::random::Random;
use keel_array::{Array, ArraySpec, DType, RandomKind, Runtime};

pub(super) const CHECKS: &[Check] = &[
    Check { op: "fill", run: fill },
    Check { op: "arange", run: arange },
    Check { op: "random", run: random_numbers },
    Check { op: "copy", run: copies },
    Check { op: "copy", run: reshapes },
    Check { op: "concatenate", run: joins },
    Check { op: "slice_update", run: updates },
    Check { op: "custom", run: custom },
];

fn types() -> impl Iterator<Item = DType> {
    FLOATS.into_iter().chain(INTEGERS).chain([DType::Bool])
}

fn fill(runtime: &Runtime) {
    for dtype in types() {
        for shape in SHAPES {
            let y = Array::full(runtime, *shape, dtype, 3.0).expect("an addressable shape");
            let value = if dtype == DType::Bool { 1.0 } else { 3.0 };
            expect(&format!("fill of {dtype} {shape:?}"), &y, &Tensor::from_fn(shape, |_| value));
        }
    }
}

fn arange(runtime: &Runtime) {
    for dtype in FLOATS.into_iter().chain(INTEGERS) {
        let y = Array::arange(runtime, 3.0, 2.0, 100, dtype).expect("an addressable shape");
        expect(&format!("arange of {dtype}"), &y, &Tensor::from_fn(&[100], |i| 3.0 + 2.0 * i[0] as f64));
    }
    let y = Array::arange(runtime, 0.0, 1.0, (1 << 24) + 3, DType::U32).expect("an addressable shape");
    assert_eq!(download(&y)[(1 << 24) + 1], f64::from((1 << 24) + 1), "arange is exact past 2^24");
}

fn random_numbers(runtime: &Runtime) {
    for (kind, oracle) in [
        (RandomKind::Uniform, random_uniform as fn(u64, u64) -> f64),
        (RandomKind::Normal, random_normal),
        (RandomKind::Bits, |seed, i| (random_bits(seed, i) >> 32) as f64),
    ] {
        for seed in [0, 7, u64::MAX] {
            let y = Array::random(runtime, kind, [3, 4099], seed).expect("an addressable shape");
            let want = Tensor::from_fn(&[3, 4099], |i| oracle(seed, (i[0] * 4099 + i[1]) as u64));
            expect(&format!("random {kind:?} of seed {seed}"), &y, &want);
        }
    }
}

fn copies(runtime: &Runtime) {
    let mut random = Random::new(20);
    for dtype in types() {
        for shape in SHAPES {
            let x = Tensor::integers(&mut random, shape, 0, if dtype == DType::Bool { 2 } else { 99 });
            for (layout, array) in layouts(runtime, &x, dtype) {
                let y = array.contiguous().expect("any layout");
                expect(&format!("copy of {dtype} {shape:?} {layout}"), &y, &x);
            }
        }
    }
}

fn reshapes(runtime: &Runtime) {
    let x = Tensor::from_fn(&[5, 6, 7], |i| (i[0] * 100 + i[1] * 10 + i[2]) as f64);
    for (layout, array) in layouts(runtime, &x, DType::I32) {
        for shape in [&[210][..], &[30, 7], &[5, 42], &[3, 70], &[7, 1, 30]] {
            let want = Tensor { shape: shape.to_vec(), values: x.values.clone() };
            let y = array.reshape(shape).expect("as many elements");
            expect(&format!("reshape {layout} to {shape:?}"), &y, &want);
        }
        let y =
            array.broadcast_to([4, 5, 6, 7]).and_then(|y| y.transpose(&[3, 0, 2, 1])).expect("broadcasts");
        let want = x.broadcast(&[4, 5, 6, 7]).permute(&[3, 0, 2, 1]);
        expect(&format!("broadcast and transpose {layout}"), &y, &want);
    }
}

fn joins(runtime: &Runtime) {
    let mut random = Random::new(21);
    for dtype in [DType::U8, DType::F16, DType::F32, DType::I64] {
        for axis in 0..3 {
            let parts: Vec<Tensor> = [2, 5, 0, 1]
                .into_iter()
                .map(|extent| {
                    let mut shape = [3, 33, 7];
                    shape[axis] = extent;
                    Tensor::integers(&mut random, &shape, 0, 99)
                })
                .collect();
            for kind in 0..3 {
                let arrays: Vec<Array> =
                    parts.iter().map(|p| layouts(runtime, p, dtype)[kind].1.clone()).collect();
                let y =
                    Array::concatenate(&arrays.iter().collect::<Vec<_>>(), axis as isize).expect("they fit");
                expect(&format!("concatenate {dtype} along {axis}"), &y, &concatenate(&parts, axis));
            }
        }
    }
    // A run longer than the piece that a worker takes at a time.
    let parts =
        [Tensor::integers(&mut random, &[2, 9001], 0, 99), Tensor::integers(&mut random, &[2, 17], 0, 99)];
    let arrays = parts.each_ref().map(|p| upload(runtime, p, DType::F32));
    let y = Array::concatenate(&[&arrays[0], &arrays[1]], 1).expect("they fit");
    expect("concatenate long runs", &y, &concatenate(&parts, 1));
}

fn updates(runtime: &Runtime) {
    let mut random = Random::new(22);
    for (shape, block, starts) in [
        (&[300][..], &[17][..], &[200][..]),
        (&[5, 33], &[5, 33], &[0, 0]),
        (&[5, 33], &[2, 33], &[3, 0]),
        (&[5, 33], &[5, 4], &[0, 29]),
        (&[4, 6, 7], &[2, 3, 7], &[1, 2, 0]),
        (&[4, 6, 7], &[2, 6, 3], &[2, 0, 4]),
        (&[4, 6, 7], &[0, 6, 3], &[2, 0, 4]),
    ] {
        for dtype in [DType::Bool, DType::BF16, DType::F32, DType::I64] {
            let x = Tensor::integers(&mut random, shape, 0, 2);
            let update = Tensor::integers(&mut random, block, 0, 2);
            for (layout, array) in layouts(runtime, &update, dtype) {
                let what = format!("slice_update of {dtype} {shape:?} with {block:?} {layout} at {starts:?}");
                let want = slice_update(&x, &update, starts);
                let own = upload(runtime, &x, dtype);
                let kept = upload(runtime, &x, dtype);
                expect(&what, &own.slice_update(&array, starts).expect("the block fits"), &want);
                expect(&what, &kept.clone().slice_update(&array, starts).expect("the block fits"), &want);
                expect(&format!("{what}, the other handle"), &kept, &x);
            }
        }
    }
}

fn custom(runtime: &Runtime) {
    use keel_array::{CudaSource, CustomKernel, HostSlice, HostSliceMut};
    let outputs = vec![ArraySpec::new([2, 3], DType::F32), ArraySpec::new([1], DType::I32)];
    let kernel = CustomKernel::new("custom", outputs, 5.0, |call| {
        let (HostSlice::F32(x), HostSlice::U8(flags)) = (call.inputs[0], call.inputs[1]) else {
            return Err("f32 and bool".into());
        };
        let [HostSliceMut::F32(y), HostSliceMut::I32(count)] = &mut call.outputs[..] else {
            return Err("f32 and i32".into());
        };
        y.iter_mut().zip(x).zip(flags).for_each(|((y, x), flag)| *y += if *flag == 0 { 0.0 } else { *x });
        count[0] += call.input_shapes[0][1] as i32;
        Ok(())
    })
    .with_cuda(CudaSource {
        inputs: vec!["x".into(), "flags".into()],
        outputs: vec!["y".into(), "count".into()],
        header: "__device__ float chosen(float x, bool flag) { return flag ? x : 0.0f; }".into(),
        body: "unsigned i = threadIdx.x; y[i] += chosen(x[i], flags[i].byte != 0); \
               if (i == FIRST) count[0] += x_shape[1];"
            .into(),
        constants: vec![("FIRST".into(), "0".into())],
        grid: [1, 1, 1],
        block: [6, 1, 1],
        ..CudaSource::default()
    });
    let x = Tensor::from_fn(&[2, 3], |i| (i[0] * 3 + i[1]) as f64);
    let flags = x.map(|x| x % 2.0);
    for (layout, array) in layouts(runtime, &x, DType::F32) {
        let y =
            kernel.apply(&[&array, &upload(runtime, &flags, DType::Bool)]).expect("operands of one runtime");
        let want = Tensor::from_fn(&[2, 3], |i| 5.0 + x.at(i) * flags.at(i));
        expect(&format!("custom {layout}"), &y[0], &want);
        assert_eq!(download(&y[1]), [8.0], "the second output");
    }
}

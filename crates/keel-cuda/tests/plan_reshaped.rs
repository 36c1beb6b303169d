//! A reshape between two kernels keeps them apart where one takes the other's rows, choices or heads for its own, as
//! planned. This needs no GPU.

use keel_array::{
    Array, Category, Compute, DType, Program, Result, RopeSpec, Routing, Runtime, RuntimeOptions,
    SharedExpert, Weight, WeightFormat, WeightSpec,
};
use keel_cuda::{CudaBackend, CudaOptions};
use std::sync::Arc;

/// The runtime on which a program is built.
struct Bench(Runtime);

impl Bench {
    fn array(&self, shape: &[usize], dtype: DType) -> Array {
        Array::persistent(&self.0, Category::Activations, shape, dtype).expect("memory")
    }

    fn floats(&self, shape: &[usize]) -> Array {
        self.array(shape, DType::F32)
    }

    /// An intermediate.
    fn sum(&self, shape: &[usize]) -> Result<Array> {
        let x = self.floats(shape);
        x.add(&x)
    }

    fn stack(&self, experts: usize, rows: usize, cols: usize) -> Weight {
        let format = WeightFormat::Affine { bits: 4, group_size: 64, scale_dtype: DType::BF16 };
        let spec = WeightSpec { experts, rows, cols, format, compute: Compute::Auto };
        Weight::allocate(&self.0, spec).expect("a weight")
    }
}

/// The result of `seen` on the program that computes a value.
fn planned<T>(build: impl FnOnce(&Bench) -> Result<Array>, seen: impl FnOnce(&Program) -> T) -> T {
    let backend = Arc::new(CudaBackend::planning(&CudaOptions::default()));
    let bench = Bench(Runtime::new(backend, RuntimeOptions::default()));
    bench.0.trace(|| {
        let y = build(&bench).expect("shapes fit");
        let place = bench.array(y.shape(), y.dtype());
        let prepared = bench.0.prepare(&[(&y, &place)]).expect("a program");
        seen(prepared.program())
    })
}

/// The kernels, each with those that it has absorbed.
fn kernels(build: impl FnOnce(&Bench) -> Result<Array>) -> Vec<String> {
    let described = |kernel: &keel_array::Kernel| {
        let absorbed: Vec<&str> = kernel.absorbed.iter().map(|kernel| kernel.op.name()).collect();
        format!("{} {absorbed:?}", kernel.op.name())
    };
    planned(build, |program| program.kernels().iter().map(described).collect())
}

#[test]
fn a_gate_absorbs_whole_rows_of_a_product() {
    let product = |bench: &Bench| bench.floats(&[4, 256]).linear(&bench.stack(1, 128, 256));
    assert_eq!(kernels(|bench| product(bench)?.swiglu()), ["swiglu [\"linear\"]"]);
    // Leading axes do not matter.
    assert_eq!(kernels(|bench| product(bench)?.reshape([2, 2, 128])?.swiglu()), ["swiglu [\"linear\"]"]);
    assert_eq!(kernels(|bench| product(bench)?.reshape([8, 64])?.swiglu()), ["linear []", "swiglu []"]);
    let gathered = |bench: &Bench| {
        let chosen = bench.array(&[4, 2], DType::U32);
        bench.floats(&[4, 256]).gather_linear(&bench.stack(3, 128, 256), &chosen)
    };
    assert_eq!(kernels(|bench| gathered(bench)?.swiglu()), ["swiglu [\"gather_linear\"]"]);
    let apart = ["gather_linear []", "swiglu []"];
    assert_eq!(kernels(|bench| gathered(bench)?.reshape([4, 4, 64])?.swiglu()), apart);
}

#[test]
fn sorted_experts_absorb_a_gate_of_their_rows() {
    let after = |shape: [usize; 2]| {
        kernels(move |bench| {
            let chosen = bench.array(&[shape[0], 2], DType::U32);
            let inner = bench.sum(&[80, 512])?.swiglu()?.reshape(shape)?;
            inner.gather_linear(&bench.stack(4, 128, shape[1]), &chosen)
        })
    };
    assert_eq!(after([80, 256]), ["add []", "gather_linear [\"swiglu\"]"]);
    assert_eq!(after([160, 128]), ["add []", "swiglu []", "gather_linear []"]);
}

#[test]
fn a_combination_absorbs_what_is_shaped_as_it_sees_it() {
    let outputs = |shape: [usize; 3]| {
        kernels(move |bench| {
            let chosen = bench.array(&[2, 3], DType::U32);
            let outputs = bench.sum(&[2, 3, 128])?.gather_linear(&bench.stack(5, 256, 128), &chosen)?;
            outputs.reshape(shape)?.combine_experts(&bench.floats(&shape[..2]), None, None)
        })
    };
    assert_eq!(outputs([2, 3, 256]), ["add []", "combine_experts [\"gather_linear\"]"]);
    let apart = ["add []", "gather_linear []", "combine_experts []"];
    assert_eq!(outputs([2, 6, 128]), apart);
    assert_eq!(outputs([6, 1, 256]), apart);
    // A gate that is a column of an array is copied, and so is the row here.
    let gate = |is_row: bool| {
        kernels(move |bench| {
            let wide = bench.sum(&[2, 5])?;
            let gate = match is_row {
                true => wide.slice(&[1, 0], &[2, 2])?.contiguous()?.reshape([2, 1])?,
                false => wide.slice_axis(-1, 1, 2)?,
            };
            let shared = SharedExpert { output: &bench.floats(&[2, 256]), gate: &gate };
            let outputs = bench.floats(&[2, 3, 256]);
            outputs.combine_experts(&bench.floats(&[2, 3]), None, Some(shared))
        })
    };
    assert_eq!(gate(false), ["add []", "combine_experts [\"copy\"]"]);
    assert_eq!(gate(true), ["add []", "copy []", "combine_experts []"]);
}

#[test]
fn routing_and_rotations_absorb_copies_of_their_rows_and_heads() {
    let routed = |shape: [usize; 2]| {
        kernels(move |bench| {
            let logits = bench.sum(&[4, 24])?.slice_axis(-1, 0, 20)?.reshape(shape)?;
            Ok(logits.route_top_k(3, true)?.weights)
        })
    };
    assert_eq!(routed([4, 20]), ["add []", "route_top_k [\"copy\"]"]);
    assert_eq!(routed([8, 10]), ["add []", "copy []", "route_top_k []"]);
    let rotated = |shape: [usize; 3], is_normed: bool| {
        kernels(move |bench| {
            let heads = bench.sum(&[5, 4, 36])?.slice_axis(-1, 0, 32)?.contiguous()?.reshape(shape)?;
            let (at, inverse) = (bench.array(&[5], DType::I32), bench.floats(&[8]));
            let spec = RopeSpec { rotary: 16, sections: None, interleaved: false };
            match is_normed {
                true => heads.norm_rope(&at, &inverse, &bench.floats(&shape[2..]), spec, 1e-6),
                false => heads.rope(&at, &inverse, spec),
            }
        })
    };
    for (is_normed, name) in [(false, "rope"), (true, "norm_rope")] {
        assert_eq!(rotated([5, 4, 32], is_normed), ["add []".into(), format!("{name} [\"copy\"]")]);
        let apart = ["add []".into(), "copy []".into(), format!("{name} []")];
        assert_eq!(rotated([5, 2, 64], is_normed), apart);
    }
}

/// The gate absorbs its copy in either case: it walks elements. The product that absorbs the gate reads heads.
#[test]
fn a_product_absorbs_a_gate_of_heads_that_it_can_read() {
    let gated = |size: usize| {
        kernels(move |bench| {
            let gate = bench.sum(&[2, 64, 2 * size])?.slice_axis(-1, 0, size)?.reshape([2, 64 * size])?;
            let gated = bench.floats(&[2, 64 * size]).sigmoid_gate(&gate)?;
            gated.linear(&bench.stack(1, 80, 64 * size))
        })
    };
    assert_eq!(gated(8), ["add []", "linear [\"sigmoid_gate\"]"]);
    assert_eq!(gated(6), ["add []", "sigmoid_gate [\"copy\"]", "linear []"]);
}

#[test]
fn a_mixture_ends_before_a_reshape_of_its_choices() {
    let groups = |is_reshaped: bool| {
        let build = move |bench: &Bench| {
            let x = bench.sum(&[2, 256])?;
            let Routing { mut weights, mut experts } = bench.sum(&[2, 5])?.route_top_k(3, true)?;
            let mut inner = x.gather_linear(&bench.stack(5, 256, 256), &experts)?.swiglu()?;
            if is_reshaped {
                (weights, experts) = (weights.reshape([6, 1])?, experts.reshape([6, 1])?);
                inner = inner.reshape([6, 1, 128])?;
            }
            let outputs = inner.gather_linear(&bench.stack(5, 256, 128), &experts)?;
            outputs.combine_experts(&weights, None, None)
        };
        planned(build, |program| {
            let groups = program.groups().iter().filter_map(|group| Some((group.name?, group.kernels.len())));
            groups.collect::<Vec<_>>()
        })
    };
    assert_eq!(groups(false), [("mixture", 3)]);
    assert_eq!(groups(true), [("mixture", 2)]);
}

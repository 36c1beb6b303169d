//! Creation, copies, element-wise chains, reductions and sorts.

use crate::keys::Keys;
use keel_cuda::kernels;

pub fn keys(keys: &mut Keys) {
    for t in ["flag", "u32", "i64", "bf16"] {
        keys.add(kernels::CREATE, &["fill", "arange", "bits", "uniform", "normal"], &[("ELEM", t)]);
        for d in ["u8", "i32", "f16"] {
            keys.add(kernels::ELEMENTWISE, &["cast"], &[("FROM", t), ("TO", d)]);
        }
    }
    for t in ["u16", "u64"] {
        keys.add(kernels::LAYOUT, &["copy", "join", "scatter"], &[("ELEM", t)]);
        keys.add(kernels::ELEMENTWISE, &["select"], &[("SELECT", "1"), ("ELEM", t)]);
        keys.add(kernels::INDEXING, &["take", "take_along"], &[("ELEM", t), ("INDEX", "i32")]);
    }
    let chain = [
        ("PARAMETERS", ", const ELEM* x0, Strides s0"),
        ("LOADS", "const float v0 = to_f32(x0[s0.at(i)]);"),
        (
            "CHAIN",
            "const float result = gelu_tanh(f_max(v0, f_min(0.5f * v0 * (1.0f + erff(v0 * 0.7f)), softplus(v0))));",
        ),
    ];
    for (t, acc) in [("f16", "float"), ("i64", "i64")] {
        let typed = |rest: &[(&'static str, &'static str)]| [&[("ELEM", t)], rest].concat();
        if acc == "float" {
            keys.add(kernels::ELEMENTWISE, &["chain"], &typed(&chain));
            keys.add(
                kernels::ELEMENTWISE,
                &["compare"],
                &typed(&[("COMPARE", "1"), ("EXPRESSION", "a <= b")]),
            );
            keys.add(kernels::REDUCE, &["softmax"], &typed(&[("SOFTMAX", "1")]));
            keys.add(kernels::REDUCE, &["layer_norm"], &typed(&[("LAYER_NORM", "1")]));
            keys.add(kernels::MATMUL, &["matmul"], &typed(&[]));
        } else {
            let integer = [("INTEGER", "1"), ("RESULT", "flag"), ("EXPRESSION", "a < b")];
            keys.add(kernels::ELEMENTWISE, &["integer"], &typed(&integer));
        }
        let reduction =
            [("REDUCTION", "1"), ("ACC", acc), ("FIRST", "0"), ("COMBINE", "a + b"), ("FINISH", "total")];
        keys.add(kernels::REDUCE, &["reduce"], &typed(&reduction));
        keys.add(
            kernels::REDUCE,
            &["arg_reduce"],
            &typed(&[("ARG", "1"), ("KEY", acc), ("BEFORE", "(a > b)")]),
        );
        let sums = [("CUMSUM", "1"), ("ACC", acc), ("REVERSE", "1"), ("EXCLUSIVE", "0")];
        keys.add(kernels::REDUCE, &["cumsum"], &typed(&sums));
        let sorted = [("KEY", acc), ("DESCENDING", "1")];
        keys.add(kernels::SORT, &["number", "stage", "gather", "top_k"], &typed(&sorted));
    }
}

//! Kernels of rows: norms, rotations, gates, and the choice of experts.

use crate::keys::Keys;
use keel_cuda::kernels;

pub fn keys(keys: &mut Keys) {
    keys.add(
        kernels::RMS_NORM,
        &[
            "rms_norm",
            "rms_norm_half",
            "layer_norm_half",
            "gated_heads_half",
            "add_rms_norm",
            "gated_rms_norm",
        ],
        &[],
    );
    for half in [("HALF_BF16", "1"), ("HALF_PANEL", "64")] {
        keys.add(kernels::RMS_NORM, &["rms_norm_half", "layer_norm_half", "gated_heads_half"], &[half]);
        let by_four = [
            ("CHAIN_BY_FOUR", "16"),
            ("PARAMETERS", ", const float4* x0, u32 s0"),
            ("LOADS", "const float4 w0 = any_four((const float*)(x0 + column));"),
            ("PICK", "const float v0 = (&w0.x)[j];"),
            ("CHAIN", "const float result = gelu_tanh(v0);"),
            half,
        ];
        keys.add(kernels::ELEMENTWISE, &["chain_by_four"], &by_four);
        keys.add(
            kernels::ELEMENTWISE,
            &["chain_by_four"],
            &[&[("CHAIN_BY_FOUR", "32")], &by_four[1..5]].concat(),
        );
        keys.add(kernels::ACTIVATION, &["swiglu_half"], &[half]);
    }
    let turned = [("D", "64"), ("R", "8"), ("NORM", "1"), ("AXES", "{0,1,2,0}"), ("H", "6"), ("KV", "2")];
    for [kv_f16, queries, taken] in [["0", "1", "1"], ["1", "1", "0"], ["1", "0", "1"]] {
        let which =
            [("KV_F16", kv_f16), ("KV_BITS", "0"), ("QUERIES", queries), ("KEYS", taken), ("EARLY", kv_f16)];
        keys.add(kernels::ATTENTION_PREPARE, &["attention_prepare"], &[&turned[..], &which].concat());
    }
    for bits in ["8", "4"] {
        let which = [("KV_F16", "0"), ("KV_BITS", bits), ("QUERIES", "1"), ("KEYS", "1"), ("EARLY", "1")];
        keys.add(kernels::ATTENTION_PREPARE, &["attention_prepare"], &[&turned[..], &which].concat());
    }
    // Angles of less than a warp's lanes, of some more, and of several times as many.
    for (d, [kv_f16, queries, taken]) in
        [("32", ["1", "1", "1"]), ("80", ["0", "0", "1"]), ("256", ["1", "1", "0"])]
    {
        let axes = format!("{{{}}}", "1,".repeat(d.parse::<usize>().expect("a number") / 2));
        let whole = [("D", d), ("R", d), ("NORM", "0"), ("AXES", &*axes), ("H", "6"), ("KV", "2")];
        let which =
            [("KV_F16", kv_f16), ("KV_BITS", "0"), ("QUERIES", queries), ("KEYS", taken), ("EARLY", "0")];
        keys.add(kernels::ATTENTION_PREPARE, &["attention_prepare_rows"], &[&whole[..], &which].concat());
    }
    keys.add(kernels::ROPE, &["rope"], &[("D", "64"), ("R", "8"), ("NORM", "1"), ("AXES", "{0,1,2,0}")]);
    keys.add(kernels::ROPE, &["rope"], &[("D", "64"), ("R", "0"), ("NORM", "0"), ("AXES", "{}")]);
    keys.add(kernels::ROTATE_PAIRS, &["rotate_pairs"], &[]);
    keys.add(kernels::EXCHANGE, &["add_shares"], &[]);
    for (count, is_shared) in [("2", "0"), ("3", "1"), ("8", "0")] {
        let mailboxes = [("COUNT", count), ("GROUPS", "16384"), ("SHARED_GPU", is_shared)];
        keys.add(kernels::ONE_SHOT_ALL_REDUCE, &["one_shot_all_reduce"], &mailboxes);
    }
    keys.add(kernels::ACTIVATION, &["swiglu", "swiglu_half", "sigmoid_gate"], &[]);
    keys.add(kernels::EXPERTS, &["route_top_k", "combine"], &[]);
    let choice = [("EXPERTS", "60"), ("CHOICES", "4"), ("NORMALISE", "1")];
    keys.add(kernels::EXPERTS, &["route_few"], &choice);
}

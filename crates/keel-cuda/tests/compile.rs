//! Every kernel compiles for every supported generation of GPUs. This needs the compiler, but no GPU.

use keel_array::BlockFormat;
use keel_cuda::kernels::{self, KernelKey, SOURCES, Source};
use keel_cuda::{Architecture, CudaError, compile};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const ARCHITECTURES: [(u32, u32); 3] = [(8, 0), (9, 0), (12, 0)];

/// An entry point with constants as a model would give them.
fn key(source: Source, entry: &'static str, defines: &[(&'static str, &str)]) -> KernelKey {
    defines.iter().fold(KernelKey::new(source, entry), |key, (name, value)| key.define(name, value))
}

/// The list of compilations.
#[derive(Default)]
struct Keys(Vec<KernelKey>);

impl Keys {
    fn add(&mut self, source: Source, entries: &[&'static str], defines: &[(&'static str, &str)]) {
        self.0.extend(entries.iter().map(|entry| key(source, entry, defines)));
    }
}

/// At least one compilation for each entry point, together with its variants.
fn keys() -> Vec<KernelKey> {
    let mut keys = Keys::default();
    let families: [fn(&mut Keys); 6] = [elementary, rows, products, block_products, sequences, attention];
    families.into_iter().for_each(|family| family(&mut keys));
    keys.0
}

/// Creation, copies, element-wise chains, reductions and sorts.
fn elementary(keys: &mut Keys) {
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

/// Kernels of rows: norms, rotations, gates, and the choice of experts.
fn rows(keys: &mut Keys) {
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
        let which = [("KV_F16", kv_f16), ("QUERIES", queries), ("KEYS", taken), ("EARLY", kv_f16)];
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
        let which = [("KV_F16", kv_f16), ("QUERIES", queries), ("KEYS", taken)];
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

/// Products with dense and affine weights.
fn products(keys: &mut Keys) {
    for [half, parts] in [["0", "1"], ["1", "1"], ["1", "2"]] {
        let form =
            [("HALF_BF16", half), ("X_PARTS", parts), ("ALPHA", "8"), ("DIM_N", "96"), ("DIM_K", "384")];
        for tile in [("TILE", "64"), ("TILE", "128")] {
            keys.add(kernels::HALF_TILED, &["half_tiled"], &[&form[..], &[tile, ("STAGES", "3")]].concat());
        }
    }
    for weight in [
        [("WEIGHT_T", "bf16"), ("DENSE", "1")].as_slice(),
        &[("BITS", "4"), ("GROUP", "64"), ("PAIR_T", "bf16"), ("DENSE", "0")],
        &[("BITS", "3"), ("GROUP", "32"), ("PAIR_T", "f16"), ("DENSE", "0")],
        &[("BITS", "8"), ("GROUP", "128"), ("PAIR_T", "float"), ("DENSE", "0")],
    ] {
        let with = |rest: &[(&'static str, &'static str)]| {
            [&[("DIM_N", "96"), ("DIM_K", "384"), ("INDEX", "i32"), ("SPLIT", "2")], weight, rest].concat()
        };
        let affine = weight[0].0 == "BITS";
        keys.add(
            kernels::QUANTIZED_MATMUL,
            &["linear_rows"],
            &with(&[("DIM_T", "3"), ("FUSED", "1"), ("GATHER", "0")]),
        );
        keys.add(
            kernels::QUANTIZED_MATMUL,
            &["prepare_rows"],
            &with(&[("DIM_T", "16"), ("FUSED", "0"), ("GATHER", "0")]),
        );
        let single = [("DIM_T", "1"), ("FUSED", "1"), ("GATHER", "0"), ("UNIT", "2")];
        let gate = [("HEAD_DIM", "128"), ("GATE_ROW", "800"), ("GATE_HEAD", "160")];
        for entry in [
            &[("NORM", "1"), ("SWIGLU", "1"), ("FACTORS_EARLY", "1")][..],
            &[("GATE", "1"), ("SWIGLU", "0")],
            &[("GATE", "2"), ("SWIGLU", "0"), ("FACTORS_EARLY", "1")],
            &[("NORM", "1"), ("CONV", "4"), ("CONV_C", "48"), ("CONV_FROM", "16")],
        ] {
            let single = [&single[..], entry, &gate].concat();
            keys.add(kernels::QUANTIZED_MATMUL, &["linear_rows"], &with(&single));
            if entry.iter().all(|(name, _)| *name != "CONV") {
                let prepared = [&[("DIM_T", "5"), ("FUSED", "0"), ("GATHER", "0")], entry, &gate].concat();
                keys.add(kernels::QUANTIZED_MATMUL, &["linear_rows", "prepare_rows"], &with(&prepared));
            }
        }
        if affine {
            mixtures(keys, weight);
        }
        let exact = &weight[..weight.len() - 1];
        let exact =
            [&[("DIM_N", "96"), ("DIM_K", "384"), ("INDEX", "u32"), ("DIM_T", "1"), ("GATHER", "2")], exact];
        keys.add(kernels::EXACT_MATMUL, &["exact_rows", "exact_tiled"], &exact.concat());
        keys.add(
            kernels::DEQUANTIZE,
            &["embedding_rows", "to_half", "to_two_bf16", "leave_padding"],
            &[&exact.concat()[..], &[("ROW", "104")]].concat(),
        );
        if affine {
            keys.add(kernels::DEQUANTIZE, &["dequantize"], &exact.concat());
            let cut = [("PIECES", "2"), ("WARP_TILES", "1")];
            keys.add(kernels::FP8, &["dequantize_to_fp8"], &[&exact.concat()[..], &cut].concat());
            let grouped = [("FANOUT", "2"), ("EXPERTS", "512"), ("BT", "32"), ("STAGES", "6")];
            keys.add(
                kernels::LINEAR_TILED,
                &["group_rows", "to_half_tiles", "linear_tiled"],
                &[&exact.concat()[..2], weight, &grouped].concat(),
            );
            for (parts, groups) in [("1", "3"), ("4", "2")] {
                let cut = [("SPLITS", parts), ("GROUPS", groups), ("STAGES", "3")];
                let panels = [("BT", "128"), ("HALF_PANEL", "128")];
                let entries = ["linear_panels", "to_half_panels", "add_parts"];
                let defines = [&exact.concat()[..2], weight, &panels, &cut].concat();
                keys.add(kernels::LINEAR_PANELS, &entries, &defines);
            }
        }
    }
    keys.add(kernels::FP8, &["swiglu_of_half"], &[]);
    for from in ["FROM_F32", "FROM_F16", "FROM_NORM", "FROM_SWIGLU", "FROM_SWIGLU_F16"] {
        let defines = [("DIM_K", "4160"), ("THREADS", "192"), ("FROM", from)];
        keys.add(kernels::FP8, &["quantize_fp8"], &defines);
    }
    let of_f16 = [("DIM_N", "96"), ("DIM_K", "384"), ("INDEX", "u32"), ("DIM_T", "1"), ("WEIGHT_T", "f16")];
    keys.add(kernels::EXACT_MATMUL, &["exact_rows", "exact_tiled"], &of_f16);
    let padded = [&of_f16[..], &[("ROW", "104")]].concat();
    keys.add(kernels::DEQUANTIZE, &["embedding_rows", "to_half", "leave_padding"], &padded);
}

/// The experts of a mixture for few tokens.
fn mixtures(keys: &mut Keys, weight: &[(&'static str, &'static str)]) {
    let choice =
        [("EXPERTS", "70"), ("CHOICES", "3"), ("MIN_BLOCKS", "2"), ("DIM_N", "96"), ("DIM_K", "384")];
    for [normalise, early, always, added] in
        [["1", "1", "1", "0"], ["0", "0", "0", "1"], ["0", "0", "0", "0"]]
    {
        let how = [
            ("NORMALISE", normalise),
            ("EARLY", early),
            ("ALWAYS", always),
            ("ADDED", added),
            ("LOGITS_ROW", "71"),
            ("SHARE_ROW", "71"),
        ];
        let with = |rest: &[(&'static str, &'static str)]| [&choice[..], &how, weight, rest].concat();
        let gate_up = [("SWIGLU", "1"), ("SPLIT", "8"), ("UNIT", "2"), ("NORM", normalise)];
        keys.add(kernels::MIXTURE, &["chosen_gate_up"], &with(&gate_up));
        let down = [("SWIGLU", "0"), ("SPLIT", "6"), ("UNIT", "2")];
        keys.add(kernels::MIXTURE, &["chosen_down"], &with(&down));
    }
}

/// Products with weights in blocks.
fn block_products(keys: &mut Keys) {
    for format in BlockFormat::ALL {
        let name = format.to_string();
        let weight = [("DIM_N", "96"), ("DIM_K", "768"), ("BLOCK", &*name), ("SPLIT", "2"), ("UNIT", "2")];
        let with = |rest: &[(&'static str, &'static str)]| [&weight[..], rest].concat();
        let (single, few) = ([("DIM_T", "1"), ("GATHER", "2")], [("DIM_T", "3")]);
        keys.add(kernels::QUANTIZED_MATMUL, &["linear_rows"], &with(&single));
        keys.add(kernels::DEQUANTIZE, &["dequantize"], &with(&[]));
        let cut = [("PIECES", "1"), ("WARP_TILES", "2")];
        keys.add(kernels::FP8, &["dequantize_to_fp8"], &with(&cut));
        // The other formats differ only in how values are decoded.
        if matches!(format, BlockFormat::Q4K | BlockFormat::Q6K) {
            keys.add(kernels::QUANTIZED_MATMUL, &["linear_rows", "prepare_rows"], &with(&few));
            keys.add(kernels::EXACT_MATMUL, &["exact_rows", "exact_tiled"], &with(&single));
            keys.add(kernels::DEQUANTIZE, &["embedding_rows"], &with(&[("INDEX", "u32")]));
            keys.add(
                kernels::LINEAR_PANELS,
                &["linear_panels"],
                &with(&[
                    ("BT", "32"),
                    ("HALF_PANEL", "32"),
                    ("SPLITS", "4"),
                    ("GROUPS", "3"),
                    ("STAGES", "6"),
                ]),
            );
            let fetched = [("DIM_T", "1"), ("SWIGLU", "1"), ("BULK", "1"), ("STAGES", "2")];
            keys.add(kernels::QUANTIZED_MATMUL, &["linear_rows"], &with(&fetched));
        }
    }
}

/// Sampling, and operations with state.
fn sequences(keys: &mut Keys) {
    keys.add(kernels::SAMPLE, &["greatest", "weigh", "draw"], &[]);
    keys.add(kernels::DELIVER, &["deliver"], &[("DELIVERIES", "16")]);
    keys.add(kernels::BATCH, &["check_batch"], &[]);
    let conv = [("C", "96"), ("K", "4"), ("X_STRIDE", "100"), ("OPEN", "3")];
    keys.add(kernels::CAUSAL_CONV, &["causal_conv", "causal_conv_prefill"], &conv);
    let heads = [("HK", "2"), ("HV", "4"), ("DK", "32"), ("DV", "48")];
    let strides = [("QKV_STRIDE", "400"), ("A_STRIDE", "400"), ("B_STRIDE", "400"), ("LOG", "3")];
    let half = [("STATE_F16", "1")];
    keys.add(kernels::GATED_DELTA, &["gated_delta"], &[&heads[..], &strides].concat());
    keys.add(kernels::GATED_DELTA, &["gated_delta"], &[&heads[..], &strides, &half].concat());
    let early = [("EARLY", "1")];
    keys.add(kernels::GATED_DELTA, &["gated_delta"], &[&heads[..], &strides, &early].concat());
    let wide = [("HK", "16"), ("HV", "32"), ("DK", "128"), ("DV", "128"), ("STAGES", "2")];
    let entries = ["gated_delta_prepare", "gated_delta_chunks"];
    keys.add(kernels::GATED_DELTA_CHUNKED, &entries, &[&wide[..], &strides].concat());
    keys.add(kernels::GATED_DELTA_CHUNKED, &entries, &[&wide[..], &strides, &half].concat());
    keys.add(kernels::GATED_DELTA_ANY, &["gated_delta_any"], &[&heads[..], &strides].concat());
    keys.add(kernels::GATED_DELTA_ANY, &["gated_delta_any"], &[&heads[..], &strides, &half].concat());
    keys.add(kernels::CUSTOM, &["initial"], &[("ELEM", "i32")]);
}

/// Attention over pages.
fn attention(keys: &mut Keys) {
    for (kv_f16, d) in [("0", "80"), ("1", "256")] {
        let defines = [("H", "8"), ("KV", "2"), ("D", d), ("KV_F16", kv_f16), ("WINDOW", "0")];
        let strides = [("Q_STRIDE", "2048"), ("K_STRIDE", "512"), ("V_STRIDE", "512")];
        let entries = ["kv_write", "attention", "attention_merge"];
        keys.add(kernels::ATTENTION, &entries, &[&defines[..], &strides].concat());
        keys.add(
            kernels::ATTENTION,
            &["attention_merge"],
            &[&defines[..], &strides, &[("EARLY", "1"), ("Y_HALF", "1")]].concat(),
        );
        keys.add(kernels::ATTENTION, &["attention"], &[&defines[..], &strides, &[("UNTIL", "1")]].concat());
        let tensor = [&defines[..], &strides, &[("WARPS", "4")]].concat();
        keys.add(kernels::ATTENTION_TENSOR, &["attention_prefill", "attention_decode"], &tensor);
        for more in [("UNTIL", "1"), ("Y_HALF", "1")] {
            keys.add(kernels::ATTENTION_TENSOR, &["attention_prefill"], &[&tensor[..], &[more]].concat());
        }
        let early = [("KV_STAGES", "2"), ("EARLY", "1")];
        keys.add(kernels::ATTENTION_TENSOR, &["attention_decode"], &[&tensor[..], &early].concat());
        let (stages, blocks) = if d == "256" { ("1", "1") } else { ("3", "2") };
        let walk = [&defines[..], &strides, &[("KV_STAGES", stages), ("BLOCKS", blocks)]].concat();
        keys.add(kernels::ATTENTION_DECODE_PERSISTENT, &["attention_decode_persistent"], &walk);
        keys.add(
            kernels::ATTENTION_DECODE_PERSISTENT,
            &["attention_decode_persistent"],
            &[&walk[..], &[("EARLY", "1")]].concat(),
        );
        let (bits, runs) = if d == "256" { ("8", "0") } else { ("4", "1") };
        let bits = [("KV_BITS", bits), ("RUNS", runs)];
        let coded =
            [&tensor[..2], &[("D", "96"), ("KV_F16", "0"), ("WINDOW", "40")], &tensor[5..], &bits].concat();
        keys.add(kernels::ATTENTION, &entries, &coded);
        keys.add(kernels::ATTENTION_TENSOR, &["attention_prefill", "attention_decode"], &coded);
        keys.add(
            kernels::ATTENTION_DECODE_PERSISTENT,
            &["attention_decode_persistent"],
            &[&coded[..], &[("BLOCKS", "1")]].concat(),
        );
    }
    // An odd and an even number of groups, with and without room for a second block.
    for (d, bits, stages, blocks) in
        [("32", "8", "2", "2"), ("128", "8", "1", "2"), ("256", "8", "2", "1"), ("128", "4", "2", "2")]
    {
        let heads = [("H", "8"), ("KV", "2"), ("D", d), ("KV_BITS", bits), ("WINDOW", "0")];
        let cut = [("Q_STRIDE", "2048"), ("KV_STAGES", stages), ("EARLY", "1")];
        let coded = [&heads[..], &cut].concat();
        keys.add(kernels::ATTENTION_TENSOR, &["attention_decode"], &coded);
        keys.add(
            kernels::ATTENTION_DECODE_PERSISTENT,
            &["attention_decode_persistent"],
            &[&coded[..], &[("BLOCKS", blocks)]].concat(),
        );
    }
    for (d, columns) in [("64", "128"), ("128", "128"), ("256", "64")] {
        let defines = [
            ("H", "8"),
            ("KV", "2"),
            ("D", d),
            ("KV_F16", "1"),
            ("Q_STRIDE", "2048"),
            ("WINDOW", "0"),
            ("BN", columns),
            ("SPLIT_STEP", columns),
        ];
        keys.add(kernels::ATTENTION_WGMMA, &["attention_prefill_wide"], &defines);
        let (until, coded) = (("UNTIL", "1"), ("KV_BITS", "8"));
        for other in [&[until][..], &[coded], &[until, coded], &[("KV_BITS", "4")], &[("Y_HALF", "1")]] {
            let defines = [&defines[..], other].concat();
            keys.add(kernels::ATTENTION_WGMMA, &["attention_prefill_wide"], &defines);
        }
    }
}

/// Names of the entry points of a source: the word before the first parenthesis that opens parameters.
fn entries(source: &Source) -> Vec<&str> {
    let kernels = source.text.split("extern \"C\" __global__").skip(1);
    let name = |text: &'static str| {
        let text = match text.trim_start().strip_prefix("void __launch_bounds__(") {
            Some(bounds) => bounds.split_once(')').map_or(bounds, |(_, rest)| rest),
            None => text,
        };
        let head = text.split('(').next().unwrap_or("").trim_end();
        head.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or("")
    };
    kernels.map(name).collect()
}

#[test]
fn every_entry_point_is_in_the_list() {
    let keys = keys();
    for source in SOURCES {
        for entry in entries(source) {
            let listed = keys.iter().any(|key| key.file == source.file && key.entry == entry);
            assert!(listed, "{}: {entry} is compiled by no test", source.file);
        }
    }
}

/// A launch lets all kernels overlap except a user's. A kernel that does not wait would run before its input is there.
#[test]
fn every_kernel_waits_for_its_inputs() {
    for source in SOURCES {
        for body in source.text.split("extern \"C\" __global__").skip(1) {
            let waits = body.contains("take_turn();") || body.contains("wait_for_inputs();");
            let name = body.split('(').next().unwrap_or_default();
            assert!(waits, "{}: {name} does not wait", source.file);
        }
    }
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let keys = keys();
    let hoppers = |key: &KernelKey| {
        ["linear_panels", "linear_tiled", "attention_prefill_wide"].contains(&key.entry)
            || key.defines.contains(&("BULK", "1".into()))
    };
    let tasks: Vec<_> = ARCHITECTURES
        .into_iter()
        .flat_map(|capability| keys.iter().map(move |key| (capability, key)))
        .filter(|(capability, key)| *capability == (9, 0) || !hoppers(key))
        .collect();
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let compile_all = || {
        while let Some((capability, key)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            match compile(key, Architecture { capability: *capability }) {
                Ok(code) => assert!(!code.is_empty(), "{}", key.name()),
                Err(error @ CudaError::Missing { .. })
                    if std::env::var_os("KEEL_REQUIRE_NVRTC").is_none() =>
                {
                    keel_testkit::skipped!("needs the compiler of kernels: {error}");
                    return;
                }
                Err(error) => failures.lock().expect("nobody panics").push(error.to_string()),
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| _ = scope.spawn(compile_all)));
    let failures = failures.into_inner().expect("nobody panics");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

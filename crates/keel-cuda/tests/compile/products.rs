//! Products with weights.

use crate::keys::Keys;
use keel_array::BlockFormat;
use keel_cuda::kernels;

/// Constants of every product of few rows that is quantised.
const FEW_ROWS: [(&str, &str); 11] = [
    ("SPLIT", "2"),
    ("UNIT", "2"),
    ("PASSES", "1"),
    ("ROW_WARPS", "1"),
    ("MIN_BLOCKS", "1"),
    ("BULK", "0"),
    ("STAGES", "1"),
    ("FUSED", "1"),
    ("SWIGLU", "0"),
    ("LATE", "0"),
    ("GATHER", "0"),
];

/// Products with dense and affine weights.
pub fn keys(keys: &mut Keys) {
    linear_half(keys);
    for weight in [
        [("WEIGHT_T", "bf16"), ("DENSE", "1")].as_slice(),
        &[("BITS", "4"), ("GROUP", "64"), ("PAIR_T", "bf16"), ("DENSE", "0")],
        &[("BITS", "3"), ("GROUP", "32"), ("PAIR_T", "f16"), ("DENSE", "0")],
        &[("BITS", "8"), ("GROUP", "128"), ("PAIR_T", "float"), ("DENSE", "0")],
    ] {
        let with = |rest: &[(&'static str, &'static str)]| {
            [&[("DIM_N", "96"), ("DIM_K", "384")], &FEW_ROWS[..], weight, rest].concat()
        };
        let affine = weight[0].0 == "BITS";
        // Fewer scale groups leave room for larger units; a dense unit is as large as its registers allow.
        let unit = ("UNIT", if affine && weight[0].1 != "8" { "4" } else { "2" });
        keys.add(kernels::LINEAR_FEW_ROWS, &["linear_rows"], &with(&[("DIM_T", "3"), unit]));
        keys.add(
            kernels::LINEAR_FEW_ROWS,
            &["prepare_rows"],
            &with(&[("DIM_T", "16"), ("FUSED", "0"), unit]),
        );
        let eps = ("EPS", "1e-6f");
        let [row, head] = [("GATE_ROW", "800"), ("GATE_HEAD", "160")];
        for entry in [
            &[("NORM", "1"), eps, ("SWIGLU", "1"), ("FACTORS_EARLY", "1")][..],
            &[("GATE", "1"), ("HEAD_DIM", "128"), row, head],
            &[("GATE", "2"), eps, ("HEAD_DIM", "128"), row, head, ("FACTORS_EARLY", "1")],
            &[("NORM", "1"), eps, ("CONV", "4"), ("CONV_C", "48"), ("CONV_FROM", "16")],
        ] {
            let single = [&[("DIM_T", "1")], entry].concat();
            keys.add(kernels::LINEAR_FEW_ROWS, &["linear_rows"], &with(&single));
            if entry.iter().all(|(name, _)| *name != "CONV") {
                let prepared = [&[("DIM_T", "5"), ("FUSED", "0")], entry].concat();
                keys.add(kernels::LINEAR_FEW_ROWS, &["linear_rows", "prepare_rows"], &with(&prepared));
            }
        }
        if affine {
            mixtures(keys, weight);
        }
        let exact = &weight[..weight.len() - 1];
        let exact = [
            &[
                ("DIM_N", "96"),
                ("DIM_K", "384"),
                ("INDEX", "u32"),
                ("DIM_T", "1"),
                ("GATHER", "2"),
                ("SPLIT", "4"),
            ],
            exact,
        ];
        keys.add(kernels::LINEAR_EXACT, &["exact_rows", "exact_tiled"], &exact.concat());
        keys.add(
            kernels::DEQUANTIZE,
            &["embedding_rows", "to_half", "to_two_bf16", "leave_padding"],
            &[&exact.concat()[..], &[("ROW", "104")]].concat(),
        );
        if affine {
            decoded(keys, weight, &exact.concat());
        }
    }
    keys.add(kernels::FP8, &["swiglu_of_half"], &[]);
    for from in ["FROM_F32", "FROM_F16", "FROM_NORM", "FROM_SWIGLU", "FROM_SWIGLU_F16"] {
        let defines = [("DIM_K", "4160"), ("THREADS", "192"), ("FROM", from)];
        keys.add(kernels::FP8, &["quantize_fp8"], &defines);
    }
    let of_f16 = [
        ("DIM_N", "96"),
        ("DIM_K", "384"),
        ("INDEX", "u32"),
        ("DIM_T", "1"),
        ("SPLIT", "4"),
        ("WEIGHT_T", "f16"),
    ];
    keys.add(kernels::LINEAR_EXACT, &["exact_rows", "exact_tiled"], &of_f16);
    let padded = [&of_f16[..], &[("ROW", "104")]].concat();
    keys.add(kernels::DEQUANTIZE, &["embedding_rows", "to_half", "leave_padding"], &padded);
}

/// Products of factors of 16 bits.
fn linear_half(keys: &mut Keys) {
    for [half, parts] in [["0", "1"], ["1", "1"], ["1", "2"]] {
        let form =
            [("HALF_BF16", half), ("X_PARTS", parts), ("ALPHA", "8"), ("DIM_N", "96"), ("DIM_K", "384")];
        for tile in [("TILE", "64"), ("TILE", "128")] {
            keys.add(kernels::LINEAR_HALF, &["linear_half"], &[&form[..], &[tile, ("STAGES", "3")]].concat());
        }
    }
}

/// Affine weights that are decoded before a product, or in the tiles of one.
fn decoded(keys: &mut Keys, weight: &[(&'static str, &'static str)], exact: &[(&'static str, &'static str)]) {
    keys.add(kernels::DEQUANTIZE, &["dequantize"], exact);
    let cut = [("PIECES", "2"), ("WARP_TILES", "1")];
    keys.add(kernels::FP8, &["dequantize_to_fp8"], &[exact, &cut].concat());
    let grouped = [("FANOUT", "2"), ("EXPERTS", "512"), ("BT", "32"), ("STAGES", "6")];
    keys.add(
        kernels::LINEAR_GROUPED,
        &["group_rows", "to_half_tiles", "linear_grouped"],
        &[&exact[..2], weight, &grouped].concat(),
    );
    // The last one is Hopper's.
    for (parts, groups, panel, x_stages) in
        [("1", "3", "128", "3"), ("4", "2", "64", "3"), ("1", "3", "256", "5")]
    {
        let cut = [("SPLITS", parts), ("GROUPS", groups), ("X_STAGES", x_stages), ("W_STAGES", "3")];
        let panels = [("BT", panel), ("HALF_PANEL", panel)];
        let entries = ["linear_panels", "to_half_panels", "add_parts"];
        let defines = [&exact[..2], weight, &panels, &cut].concat();
        keys.add(kernels::LINEAR_PANELS, &entries, &defines);
    }
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
        let eps = if normalise == "1" { &[("EPS", "1e-6f")][..] } else { &[] };
        let gate_up = [("SWIGLU", "1"), ("SPLIT", "8"), ("UNIT", "2"), ("NORM", normalise)];
        let gate_up = [&gate_up[..], eps].concat();
        keys.add(kernels::MIXTURE, &["chosen_gate_up"], &with(&gate_up));
        let down = [("SWIGLU", "0"), ("SPLIT", "6"), ("UNIT", "2")];
        keys.add(kernels::MIXTURE, &["chosen_down"], &with(&down));
    }
}

/// Products with weights in blocks.
pub fn block_keys(keys: &mut Keys) {
    for format in BlockFormat::ALL {
        let name = format.to_string();
        let weight = [("DIM_N", "96"), ("DIM_K", "768"), ("BLOCK", &*name), ("DENSE", "0")];
        let with = |rest: &[(&'static str, &'static str)]| [&weight[..], &FEW_ROWS, rest].concat();
        let (single, few) = ([("DIM_T", "1"), ("GATHER", "2")], [("DIM_T", "3")]);
        keys.add(kernels::LINEAR_FEW_ROWS, &["linear_rows"], &with(&single));
        keys.add(kernels::DEQUANTIZE, &["dequantize"], &with(&[]));
        let cut = [("PIECES", "1"), ("WARP_TILES", "2")];
        keys.add(kernels::FP8, &["dequantize_to_fp8"], &with(&cut));
        // The other formats differ only in how values are decoded.
        if matches!(format, BlockFormat::Q4K | BlockFormat::Q6K) {
            keys.add(kernels::LINEAR_FEW_ROWS, &["linear_rows", "prepare_rows"], &with(&few));
            keys.add(kernels::LINEAR_EXACT, &["exact_rows", "exact_tiled"], &with(&single));
            keys.add(kernels::DEQUANTIZE, &["embedding_rows"], &with(&[("INDEX", "u32")]));
            keys.add(
                kernels::LINEAR_PANELS,
                &["linear_panels"],
                &with(&[
                    ("BT", "32"),
                    ("HALF_PANEL", "32"),
                    ("SPLITS", "4"),
                    ("GROUPS", "3"),
                    ("X_STAGES", "6"),
                    ("W_STAGES", "6"),
                ]),
            );
            let fetched = [("DIM_T", "1"), ("SWIGLU", "1"), ("BULK", "1"), ("STAGES", "2")];
            keys.add(kernels::LINEAR_FEW_ROWS, &["linear_rows"], &with(&fetched));
        }
    }
}

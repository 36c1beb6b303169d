//! Attention over pages.

use crate::keys::Keys;
use keel_cuda::kernels;

pub fn keys(keys: &mut Keys) {
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

//! Attention over pages.

use crate::keys::Keys;
use keel_cuda::kernels;

/// Constants of every kernel of attention, and of the sources with a decode kernel on tensor cores.
const PLAIN: [(&str, &str); 11] = [
    ("H", "8"),
    ("KV", "2"),
    ("Q_STRIDE", "2048"),
    ("K_STRIDE", "512"),
    ("V_STRIDE", "512"),
    ("KV_BITS", "0"),
    ("WINDOW", "0"),
    ("RUNS", "0"),
    ("UNTIL", "0"),
    ("Y_HALF", "0"),
    ("SPLIT_STEP", "64"),
];
const DECODE: [(&str, &str); 3] = [("WARPS", "8"), ("KV_STAGES", "1"), ("EARLY", "0")];

pub fn keys(keys: &mut Keys) {
    let early = ("EARLY", "1");
    for (kv_f16, d) in [("0", "80"), ("1", "256")] {
        let with = |rest: &[(&'static str, &'static str)]| {
            [&PLAIN[..], &[("D", d), ("KV_F16", kv_f16)], rest].concat()
        };
        let entries = ["kv_write", "attention", "attention_merge"];
        keys.add(kernels::ATTENTION, &entries, &with(&[]));
        keys.add(kernels::ATTENTION, &["attention_merge"], &with(&[early, ("Y_HALF", "1")]));
        keys.add(kernels::ATTENTION, &["attention"], &with(&[("UNTIL", "1")]));
        let decode = with(&DECODE);
        for more in [&[][..], &[("UNTIL", "1")], &[("Y_HALF", "1")]] {
            keys.add(kernels::ATTENTION_TENSOR, &["attention_prefill"], &[&decode[..], more].concat());
        }
        for more in [&[("WARPS", "4")][..], &[("WARPS", "4"), ("KV_STAGES", "2"), early]] {
            keys.add(kernels::ATTENTION_TENSOR, &["attention_decode"], &[&decode[..], more].concat());
        }
        let (stages, blocks) = if d == "256" { ("1", "1") } else { ("3", "2") };
        let walk = [&decode[..], &[("KV_STAGES", stages), ("BLOCKS", blocks)]].concat();
        let walks = &["attention_decode_persistent"];
        keys.add(kernels::ATTENTION_DECODE_PERSISTENT, walks, &walk);
        keys.add(kernels::ATTENTION_DECODE_PERSISTENT, walks, &[&walk[..], &[early]].concat());
        let (bits, runs) = if d == "256" { ("8", "0") } else { ("4", "1") };
        let coded =
            with(&[("D", "96"), ("KV_F16", "0"), ("WINDOW", "40"), ("KV_BITS", bits), ("RUNS", runs)]);
        keys.add(kernels::ATTENTION, &entries, &coded);
        let coded = [&coded[..], &DECODE, &[("WARPS", "4"), ("BLOCKS", "1")]].concat();
        keys.add(kernels::ATTENTION_TENSOR, &["attention_prefill", "attention_decode"], &coded);
        keys.add(kernels::ATTENTION_DECODE_PERSISTENT, walks, &coded);
    }
    // An odd and an even number of groups, with and without room for a second block.
    for (d, bits, stages, blocks) in
        [("32", "8", "2", "2"), ("128", "8", "1", "2"), ("256", "8", "2", "1"), ("128", "4", "2", "2")]
    {
        let cut = [("D", d), ("KV_BITS", bits), ("KV_STAGES", stages), early, ("BLOCKS", blocks)];
        let coded = [&PLAIN[..], &DECODE, &cut].concat();
        keys.add(kernels::ATTENTION_TENSOR, &["attention_decode"], &coded);
        keys.add(kernels::ATTENTION_DECODE_PERSISTENT, &["attention_decode_persistent"], &coded);
    }
    for (d, columns) in [("64", "128"), ("128", "128"), ("256", "64")] {
        let shape = [("D", d), ("KV_F16", "1"), ("BN", columns), ("SPLIT_STEP", columns)];
        let (until, coded) = (("UNTIL", "1"), ("KV_BITS", "8"));
        for other in [&[][..], &[until], &[coded], &[until, coded], &[("KV_BITS", "4")], &[("Y_HALF", "1")]] {
            let defines = [&PLAIN[..], &shape, other].concat();
            keys.add(kernels::ATTENTION_WGMMA, &["attention_prefill_wide"], &defines);
        }
    }
}

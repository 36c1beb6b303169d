//! Sampling, and operations with state.

use crate::keys::Keys;
use keel_cuda::kernels;

pub fn keys(keys: &mut Keys) {
    keys.add(kernels::SAMPLE, &["greatest", "weigh", "draw"], &[]);
    keys.add(kernels::MOVES, &["move_words"], &[("MOVES", "48")]);
    keys.add(kernels::BATCH, &["check_batch"], &[]);
    let conv = [("C", "96"), ("K", "4"), ("X_STRIDE", "100"), ("OPEN", "3")];
    keys.add(kernels::CAUSAL_CONV, &["causal_conv", "causal_conv_prefill"], &conv);
    let heads = [("HK", "2"), ("HV", "4"), ("DK", "32"), ("DV", "48")];
    let strides =
        [("QKV_STRIDE", "400"), ("A_STRIDE", "400"), ("B_STRIDE", "400"), ("LOG", "3"), ("STATE_F16", "0")];
    let half = [("STATE_F16", "1")];
    let [late, early] = ["0", "1"].map(|value| [("EARLY", value)]);
    for more in [&late[..], &[late[0], half[0]], &early] {
        keys.add(kernels::GATED_DELTA, &["gated_delta"], &[&heads[..], &strides, more].concat());
    }
    let entries = ["gated_delta_prepare", "gated_delta_chunks"];
    for stages in ["1", "2", "3"] {
        let wide = [("HK", "16"), ("HV", "32"), ("DK", "128"), ("DV", "128"), ("STAGES", stages)];
        keys.add(kernels::GATED_DELTA_CHUNKED, &entries, &[&wide[..], &strides].concat());
        keys.add(kernels::GATED_DELTA_CHUNKED, &entries, &[&wide[..], &strides, &half].concat());
    }
    keys.add(kernels::GATED_DELTA_ANY, &["gated_delta_any"], &[&heads[..], &strides].concat());
    keys.add(kernels::GATED_DELTA_ANY, &["gated_delta_any"], &[&heads[..], &strides, &half].concat());
    keys.add(kernels::CUSTOM, &["initial"], &[("ELEM", "i32")]);
}

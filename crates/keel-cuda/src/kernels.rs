//! The kernels' sources, and the key of a compiled kernel.

use std::sync::Arc;

/// Entry point of a user's kernel.
pub(crate) const CUSTOM_ENTRY: &str = "custom_kernel";

/// Headers that every source may include.
pub(crate) const HEADERS: &[(&str, &str)] = &[
    ("attention_tiles.cuh", include_str!("../kernels/attention_tiles.cuh")),
    ("candidates.cuh", include_str!("../kernels/candidates.cuh")),
    ("common.cuh", include_str!("../kernels/common.cuh")),
    ("decode_chunk.cuh", include_str!("../kernels/decode_chunk.cuh")),
    ("few_rows.cuh", include_str!("../kernels/few_rows.cuh")),
    ("half.cuh", include_str!("../kernels/half.cuh")),
    ("ptx.cuh", include_str!("../kernels/ptx.cuh")),
    ("gated_delta.cuh", include_str!("../kernels/gated_delta.cuh")),
    ("gated_delta_state.cuh", include_str!("../kernels/gated_delta_state.cuh")),
    ("gated_delta_tiles.cuh", include_str!("../kernels/gated_delta_tiles.cuh")),
    ("kv_coded.cuh", include_str!("../kernels/kv_coded.cuh")),
    ("kept.cuh", include_str!("../kernels/kept.cuh")),
    ("paged.cuh", include_str!("../kernels/paged.cuh")),
    ("float_order.cuh", include_str!("../kernels/float_order.cuh")),
    ("rope.cuh", include_str!("../kernels/rope.cuh")),
    ("routing.cuh", include_str!("../kernels/routing.cuh")),
    ("softmax.cuh", include_str!("../kernels/softmax.cuh")),
    ("weight_blocks.cuh", include_str!("../kernels/weight_blocks.cuh")),
    ("weight_tiles.cuh", include_str!("../kernels/weight_tiles.cuh")),
    ("widen_half.cuh", include_str!("../kernels/widen_half.cuh")),
    ("wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
];

/// A source file with its entry points.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// File name.
    pub file: &'static str,
    /// Its text.
    pub text: &'static str,
}

macro_rules! sources {
    ($($name:ident = $file:literal),* $(,)?) => {
        $(
            #[doc = concat!("`kernels/", $file, "`")]
            pub const $name: Source =
                Source { file: $file, text: include_str!(concat!("../kernels/", $file)) };
        )*
        /// Every source file.
        pub const SOURCES: &[Source] = &[$($name),*];
    };
}

sources! {
    MOVES = "moves.cu",
    CREATE = "create.cu",
    LAYOUT = "layout.cu",
    ELEMENTWISE = "elementwise.cu",
    REDUCE = "reduce.cu",
    SORT = "sort.cu",
    SAMPLE = "sample.cu",
    INDEXING = "indexing.cu",
    MATMUL = "matmul.cu",
    RMS_NORM = "rms_norm.cu",
    ROPE = "rope.cu",
    ROTATE_PAIRS = "rotate_pairs.cu",
    ACTIVATION = "activation.cu",
    EXPERTS = "experts.cu",
    LINEAR_FEW_ROWS = "linear_few_rows.cu",
    MIXTURE = "mixture.cu",
    LINEAR_EXACT = "linear_exact.cu",
    DEQUANTIZE = "dequantize.cu",
    FP8 = "fp8.cu",
    LINEAR_HALF = "linear_half.cu",
    LINEAR_PANELS = "linear_panels.cu",
    LINEAR_GROUPED = "linear_grouped.cu",
    BATCH = "batch.cu",
    CAUSAL_CONV = "causal_conv.cu",
    GATED_DELTA = "gated_delta.cu",
    GATED_DELTA_CHUNKED = "gated_delta_chunked.cu",
    GATED_DELTA_ANY = "gated_delta_any.cu",
    CUSTOM = "custom.cu",
    EXCHANGE = "exchange.cu",
    ONE_SHOT_ALL_REDUCE = "one_shot_all_reduce.cu",
    ATTENTION_PREPARE = "attention_prepare.cu",
    ATTENTION = "attention.cu",
    ATTENTION_DECODE_PERSISTENT = "attention_decode_persistent.cu",
    ATTENTION_TENSOR = "attention_tensor.cu",
    ATTENTION_WGMMA = "attention_wgmma.cu",
}

/// A kernel with its constants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelKey {
    /// Name of the source file.
    pub file: &'static str,
    /// Entry point.
    pub entry: &'static str,
    /// Text of the source.
    pub source: Arc<str>,
    /// Constants, by name.
    pub defines: Vec<(&'static str, String)>,
    /// The name of a user's kernel, for messages.
    pub user: Option<Arc<str>>,
}

/// The form in which `half.cuh` writes values of x in 16 bits.
#[derive(Clone, Copy, Debug)]
pub enum HalfForm {
    /// Row by row, as f16 of an eighth.
    Rows {
        /// As bf16 of the value itself instead.
        is_bf16: bool,
    },
    /// As f16 of an eighth, in panels.
    Panels {
        /// The rows of a panel.
        rows: usize,
    },
}

impl HalfForm {
    /// The key of a kernel that writes this form.
    pub fn define(self, key: KernelKey) -> KernelKey {
        match self {
            HalfForm::Rows { is_bf16 } => key.define("HALF_BF16", u8::from(is_bf16)),
            HalfForm::Panels { rows } => key.define("HALF_PANEL", rows),
        }
    }
}

impl KernelKey {
    /// An entry point of a source file, without constants.
    pub fn new(source: Source, entry: &'static str) -> KernelKey {
        let (file, source) = (source.file, source.text.into());
        KernelKey { file, entry, source, defines: Vec::new(), user: None }
    }

    /// With a constant.
    #[must_use]
    pub fn define(mut self, name: &'static str, value: impl ToString) -> KernelKey {
        self.defines.push((name, value.to_string()));
        self
    }

    /// Names the program that holds this kernel: all entry points of the text with these constants, which are compiled
    /// once and kept.
    pub fn program(&self) -> KernelKey {
        KernelKey { entry: "", ..self.clone() }
    }

    /// Whether the kernel itself waits for the kernels before it, so that it may be launched before they have ended.
    /// All kernels of this crate do; a user's kernel does not.
    pub fn waits(&self) -> bool {
        self.entry != CUSTOM_ENTRY
    }

    /// File, entry point and constants, or the user's name, for messages.
    pub fn name(&self) -> String {
        if let Some(user) = &self.user {
            return user.to_string();
        }
        let constants: Vec<String> = self.defines.iter().map(|(n, v)| format!("{n}={v}")).collect();
        let entry = if self.entry.is_empty() { String::new() } else { format!(":{}", self.entry) };
        format!("{}{entry} [{}]", self.file, constants.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A constant that a launch always gives has no default, so the compiler refuses a source without it. These may be
    /// left out. But for the last two they are flags, and 0 is off.
    const DEFAULTS: [(&str, &[&str]); 8] = [
        ("activation.cu", &["QUICK"]),
        ("attention.cu", &["EARLY"]),
        ("linear_exact.cu", &["GATHER"]),
        ("few_rows.cuh", &["NORM", "GATE", "CONV", "FACTORS_EARLY"]),
        ("half.cuh", &["HALF_BF16", "HALF_PANEL"]),
        ("linear_grouped.cu", &["SWIGLU"]),
        ("common.cuh", &["INFINITY"]),
        ("weight_tiles.cuh", &["WEIGHT_T"]),
    ];

    #[test]
    fn no_other_constants_have_defaults() {
        let sources = SOURCES.iter().map(|source| (source.file, source.text));
        for (file, text) in sources.chain(HEADERS.iter().copied()) {
            let found: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("#ifndef ")).collect();
            let known = DEFAULTS.iter().find(|(of, _)| *of == file).map_or(&[][..], |(_, names)| names);
            assert_eq!(found, known, "{file}");
        }
    }
}

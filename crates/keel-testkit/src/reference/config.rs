//! The sizes of a model, from a Hugging Face `config.json`.

use serde_json::Value;

/// The token mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Attention over the whole text.
    Full,
    /// Attention over a window.
    Sliding,
    /// Gated DeltaNet.
    Recurrent,
}

/// A mixture of experts.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// Number of experts.
    pub experts: usize,
    /// Experts per token.
    pub taken: usize,
    /// Inner width of an expert.
    pub width: usize,
    /// Inner width of the shared expert, if there is one.
    pub shared_width: Option<usize>,
}

/// Sizes of Gated DeltaNet; zeros if no layer has it.
#[derive(Clone, Debug)]
pub struct Recurrent {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Size of a query or key head.
    pub key_dim: usize,
    /// Size of a value head.
    pub value_dim: usize,
    /// Width of the convolution.
    pub kernel: usize,
}

/// Sizes of a model, and the features of its family.
#[derive(Clone, Debug)]
pub struct Config {
    /// Number of known tokens.
    pub vocabulary: usize,
    /// Width between layers.
    pub hidden: usize,
    /// Inner width of a layer without experts.
    pub intermediate: usize,
    /// The token mixer of each layer.
    pub layers: Vec<LayerKind>,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Size of a head.
    pub head_dim: usize,
    /// Columns of a head that rotate.
    pub rotary_dim: usize,
    /// Base of the rotary angles.
    pub rope_base: f64,
    /// Base of the rotary angles in layers with a window.
    pub local_rope_base: f64,
    /// Factor on attention scores.
    pub score_scale: f64,
    /// Tokens that a layer with a window sees, itself included.
    pub window: usize,
    /// Added to mean squares.
    pub norm_eps: f64,
    /// Experts, if there are any.
    pub mixture: Option<Mixture>,
    /// Gated DeltaNet.
    pub recurrent: Recurrent,
    /// True if the embeddings are the output head.
    pub tied: bool,
    /// True if there is a multi-token-prediction head.
    pub has_mtp: bool,
    /// True if norm weights are stored as offsets from one.
    pub norms_are_offsets: bool,
    /// True if attention's output is gated. The gates are columns of the query projection.
    pub has_output_gate: bool,
    /// True if queries and keys are normalised per head.
    pub has_head_norms: bool,
    /// True for Gemma: norms around both halves of a layer, scaled embeddings, and GELU.
    pub is_gemma: bool,
}

impl Config {
    /// The sizes in a `config.json`.
    ///
    /// # Panics
    /// If it is not the config of a fixture.
    pub fn read(json: &Value) -> Config {
        let text = json.get("text_config").unwrap_or(json);
        let family = json["model_type"].as_str().expect("a config has a model_type");
        let size = |key: &str| text[key].as_u64().unwrap_or(0) as usize;
        let (heads, hidden) = (size("num_attention_heads"), size("hidden_size"));
        let head_dim = if text["head_dim"].is_u64() { size("head_dim") } else { hidden / heads };
        let is_hybrid = matches!(family, "qwen3_5" | "qwen3_5_moe" | "qwen3_next");
        let is_gemma = family == "gemma3_text";
        let rope = &text["rope_parameters"];
        let base = |rope: &Value| rope["rope_theta"].as_f64();
        let rope_base = base(rope).or_else(|| base(&rope["full_attention"])).expect("a base");
        let scaled = text["query_pre_attn_scalar"].as_f64().unwrap_or(head_dim as f64);
        let experts = size("num_experts").max(size("num_local_experts"));
        let shared = size("shared_expert_intermediate_size");
        Config {
            vocabulary: size("vocab_size"),
            hidden,
            intermediate: size("intermediate_size"),
            layers: layers(text, size("num_hidden_layers")),
            heads,
            kv_heads: size("num_key_value_heads"),
            head_dim,
            rotary_dim: (head_dim as f64 * rope["partial_rotary_factor"].as_f64().unwrap_or(1.0)) as usize,
            rope_base,
            local_rope_base: base(&rope["sliding_attention"]).unwrap_or(rope_base),
            score_scale: scaled.powf(-0.5),
            window: size("sliding_window"),
            norm_eps: text["rms_norm_eps"].as_f64().expect("an epsilon"),
            mixture: (experts > 0).then(|| Mixture {
                experts,
                taken: size("num_experts_per_tok"),
                width: size("moe_intermediate_size"),
                shared_width: (shared > 0).then_some(shared),
            }),
            recurrent: Recurrent {
                key_heads: size("linear_num_key_heads"),
                value_heads: size("linear_num_value_heads"),
                key_dim: size("linear_key_head_dim"),
                value_dim: size("linear_value_head_dim"),
                kernel: size("linear_conv_kernel_dim"),
            },
            tied: text["tie_word_embeddings"].as_bool().unwrap_or(false),
            has_mtp: size("mtp_num_hidden_layers") > 0,
            norms_are_offsets: is_hybrid || is_gemma,
            has_output_gate: is_hybrid,
            has_head_norms: family != "llama",
            is_gemma,
        }
    }
}

fn layers(text: &Value, count: usize) -> Vec<LayerKind> {
    let Some(kinds) = text["layer_types"].as_array() else { return vec![LayerKind::Full; count] };
    let kind = |kind: &Value| match kind.as_str() {
        Some("full_attention") => LayerKind::Full,
        Some("sliding_attention") => LayerKind::Sliding,
        Some("linear_attention") => LayerKind::Recurrent,
        other => panic!("unknown layer type {other:?}"),
    };
    kinds.iter().map(kind).collect()
}

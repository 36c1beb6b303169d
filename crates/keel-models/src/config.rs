//! The numbers of a model and the traits of its blocks, read from config.json. A plain transformer is a hybrid without
//! recurrent layers.
//!
//! Both layouts are accepted: all keys at the top level, or the text model's under `text_config`; rope keys under
//! `rope_parameters`, or `rope_theta` and `partial_rotary_factor` next to the other keys.

pub(crate) mod fields;
pub(crate) mod rope;
pub(crate) mod rope_config;
pub(crate) mod shapes;

use keel_array::AttentionSpec;
use serde_json::Value;

use crate::model_types::transformer::{self, Traits};
use crate::{ModelError, Result};
use fields::Fields;
use rope::{Contexts, RopeScaling};
use rope_config::QueryGrowth;

/// Largest width, count or length: far above all models, and products of two stay far from an overflow.
const EXTENT_MAX: usize = 1 << 24;
/// Widest projection to heads. It bounds the lists with an entry for each of its rows.
const PROJECTED_MAX: usize = 1 << 20;

/// Most layers of a multi-token-prediction head.
pub(crate) const MTP_LAYERS_MAX: usize = 8;

/// Most experts of a layer.
const EXPERTS_MAX: usize = 1 << 14;

/// The reference's default of `partial_rotary_factor` for models with recurrent layers.
const HYBRID_ROTARY: f64 = 0.25;
/// The reference's default of `shared_expert_intermediate_size` for models with recurrent layers.
const HYBRID_SHARED_WIDTH: usize = 512;

/// Kind of a layer's mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MixerKind {
    /// Attention to all earlier tokens.
    Attention,
    /// Attention to a window of the latest tokens.
    SlidingAttention,
    /// Gated DeltaNet.
    GatedDelta,
}

/// Mixture of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixtureConfig {
    /// `E`.
    pub experts: usize,
    /// Those that this device holds: all of them, unless several devices share the experts.
    pub own: std::ops::Range<usize>,
    /// Experts per token.
    pub chosen: usize,
    /// Width of an expert.
    pub intermediate: usize,
    /// Width of the shared expert, if there is one.
    pub shared_intermediate: Option<usize>,
    /// Whether another device holds the shared expert whole.
    pub shared_elsewhere: bool,
    /// Divide the chosen probabilities by their sum.
    pub normalise: bool,
    /// Layers with a dense feed-forward half, despite the experts of the others.
    pub dense_layers: Vec<usize>,
}

/// Frequencies of a rotary embedding with several axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeSections {
    /// How many frequencies read time, row and column.
    pub counts: [usize; 3],
    /// Whether the axes alternate.
    pub interleaved: bool,
}

/// Recurrent layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecurrentConfig {
    /// `Hk`.
    pub key_heads: usize,
    /// `Hv`.
    pub value_heads: usize,
    /// `Dk`.
    pub key_dim: usize,
    /// `Dv`.
    pub value_dim: usize,
    /// `K`.
    pub conv_width: usize,
}

impl RecurrentConfig {
    /// Channels of the convolution: q, k and v.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Values of a token, of all heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }
}

/// A text model.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridConfig {
    /// `model_type` at the top level.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// `V`.
    pub vocab: usize,
    /// Kind of each layer.
    pub layers: Vec<MixerKind>,
    /// Layers of the multi-token-prediction head; 0 without one.
    pub mtp_layers: usize,
    /// Added to the mean square under every root.
    pub eps: f32,
    /// True if the output head is the embedding.
    pub tied: bool,
    /// Most positions that the model supports: `max_position_embeddings`, or more if YaRN stretches the context.
    pub context_max: usize,
    /// `H`.
    pub heads: usize,
    /// `KV`.
    pub kv_heads: usize,
    /// `D`.
    pub head_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Elements of a head that rotate.
    pub rotary: usize,
    /// Axes of the rotation in steps with pictures.
    pub rope_sections: Option<RopeSections>,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Base of the rotary frequencies of sliding layers.
    pub sliding_rope_theta: f64,
    /// Scaling of the rotary frequencies of sliding layers.
    pub sliding_rope_scaling: RopeScaling,
    /// Layers whose queries and keys are not rotated.
    pub unrotated_layers: Vec<usize>,
    /// Tokens that a row of a sliding layer sees, itself included; `None` without such layers.
    pub window: Option<usize>,
    /// Factor on `q . k`, without the factor of a rope scaling: see [`HybridConfig::score_scale`].
    pub attention_scale: f64,
    /// Growth of queries with their position.
    pub query_growth: Option<QueryGrowth>,
    /// Whether attention's output has a gate.
    pub gated: bool,
    /// Recurrent layers, if there are any.
    pub recurrent: Option<RecurrentConfig>,
    /// Width of the dense feed-forward layers; `None` if all layers have experts.
    pub intermediate: Option<usize>,
    /// Experts, if there are any.
    pub moe: Option<MixtureConfig>,
    /// How the blocks of a plain transformer differ from others. Models with recurrent layers have the default.
    pub(crate) traits: Traits,
}

impl HybridConfig {
    /// Reads the config of a model with recurrent layers.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the key that is missing or wrong.
    pub fn from_json(config: &Value) -> Result<HybridConfig> {
        let fields = Fields::new(config);
        transformer::silu_alone(&fields)?;
        transformer::refuse(&fields, "attention_bias")?;
        let layers = fields.layers()?;
        let recurrent = layers.contains(&MixerKind::GatedDelta).then(|| fields.recurrent()).transpose()?;
        let head_dim = fields
            .size_or("head_dim", fields.size("hidden_size")? / fields.size("num_attention_heads")?.max(1))?;
        let rotary = (head_dim as f64 * fields.rope("partial_rotary_factor", HYBRID_ROTARY)?) as usize;
        let rope_scaling = fields.rope_scaling("full_attention")?;
        let rope_theta = fields.rope("rope_theta", 10000.0)?;
        let parsed = HybridConfig {
            hidden: fields.size("hidden_size")?,
            vocab: fields.size("vocab_size")?,
            layers,
            mtp_layers: fields.size_or("mtp_num_hidden_layers", 0)?,
            eps: fields.number_or("rms_norm_eps", 1e-6)? as f32,
            tied: fields.flag("tie_word_embeddings"),
            context_max: rope_scaling.context_max(fields.size_or("max_position_embeddings", 32768)?),
            heads: fields.size("num_attention_heads")?,
            kv_heads: fields.size("num_key_value_heads")?,
            head_dim,
            rope_theta,
            rotary,
            rope_sections: fields.rope_sections()?,
            rope_scaling,
            sliding_rope_theta: rope_theta,
            sliding_rope_scaling: RopeScaling::None,
            unrotated_layers: Vec::new(),
            window: None,
            attention_scale: (head_dim as f64).powf(-0.5),
            query_growth: None,
            gated: true,
            recurrent,
            intermediate: fields.size_if_any("intermediate_size")?,
            moe: fields.moe(HYBRID_SHARED_WIDTH)?,
            traits: Traits::default(),
            model_type: fields.model_type(),
        };
        parsed.check()?;
        Ok(parsed)
    }

    /// Checks that the numbers agree.
    pub(crate) fn check(&self) -> Result<()> {
        // Numbers that are missing are refused as 0 is.
        let numbers = self.recurrent.unwrap_or_default();
        let recurrent = [
            ("linear_num_key_heads", numbers.key_heads),
            ("linear_num_value_heads", numbers.value_heads),
            ("linear_key_head_dim", numbers.key_dim),
            ("linear_value_head_dim", numbers.value_dim),
        ];
        let has = |kind| self.layers.contains(&kind);
        let recurrent = if has(MixerKind::GatedDelta) { &recurrent[..] } else { &[] };
        let window = [("sliding_window", self.window.unwrap_or(0))];
        let window = if has(MixerKind::SlidingAttention) { &window[..] } else { &[] };
        let context_key = match self.rope_scaling {
            RopeScaling::Yarn { .. } => {
                "max_position_embeddings, or factor times original_max_position_embeddings of yarn,"
            }
            _ => "max_position_embeddings",
        };
        let positive = [
            ("hidden_size", self.hidden),
            ("vocab_size", self.vocab),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            (context_key, self.context_max),
        ];
        let mut positive = positive.iter().chain(recurrent).chain(window);
        if let Some((key, value)) = positive.find(|(_, v)| *v == 0 || *v > EXTENT_MAX) {
            return Err(ModelError::Config(format!("{key} is {value}, expected 1 to {EXTENT_MAX}")));
        }
        let recurrent_widths = [
            numbers.key_heads.saturating_mul(numbers.key_dim),
            numbers.value_heads.saturating_mul(numbers.value_dim),
        ];
        let recurrent_wide =
            !recurrent.is_empty() && recurrent_widths.iter().any(|width| *width > PROJECTED_MAX);
        let divides = |a: usize, b: usize| a.is_multiple_of(b);
        let attends = has(MixerKind::Attention) || has(MixerKind::SlidingAttention) || self.mtp_layers > 0;
        let fits =
            divides(self.head_dim, AttentionSpec::HEAD_UNIT) && self.head_dim <= AttentionSpec::HEAD_MAX;
        let wrong = if attends && !fits {
            Some("head_dim is not a multiple of 16 of at most 512")
        } else if !divides(self.heads, self.kv_heads) {
            Some("num_attention_heads is not a multiple of num_key_value_heads")
        } else if !recurrent.is_empty() && !divides(numbers.value_heads, numbers.key_heads) {
            Some("linear_num_value_heads is not a multiple of linear_num_key_heads")
        } else if !recurrent.is_empty() && !(2..=8).contains(&numbers.conv_width) {
            Some("linear_conv_kernel_dim is not in 2..=8")
        } else if recurrent_wide || self.heads.saturating_mul(self.head_dim) > PROJECTED_MAX {
            Some("heads times their size is above 2^20")
        } else if self.rotary > self.head_dim || !divides(self.rotary, 2) {
            Some("partial_rotary_factor does not give an even number of elements within head_dim")
        } else if self.moe.is_none() && self.intermediate.is_none() {
            Some("neither intermediate_size nor num_experts is given")
        } else if self.intermediate > Some(EXTENT_MAX) {
            Some("intermediate_size is above 2^24")
        } else if !self.eps.is_finite() || self.eps < 0.0 {
            Some("rms_norm_eps is not a number from 0 on")
        } else if !self.rope_theta.is_finite() || self.rope_theta <= 1.0 {
            Some("rope_theta is not a number above one")
        } else if !window.is_empty()
            && (!self.sliding_rope_theta.is_finite() || self.sliding_rope_theta <= 1.0)
        {
            Some("the rope_theta of sliding layers is not a number above one")
        } else if self.layers.len() > 4096 || self.mtp_layers > MTP_LAYERS_MAX {
            Some("num_hidden_layers is above 4096 or mtp_num_hidden_layers above 8")
        } else {
            None
        };
        wrong.map_or(Ok(()), |reason| Err(ModelError::Config(reason.into())))?;
        self.check_turns()
    }

    /// The recurrent layers of a model that has some.
    pub fn recurrent_layers(&self) -> RecurrentConfig {
        self.recurrent.unwrap_or_else(|| unreachable!("recurrent layers without numbers are refused"))
    }

    /// Width of the feed-forward half of a layer without experts.
    pub(crate) fn dense_width(&self) -> Result<usize> {
        self.intermediate.ok_or_else(|| ModelError::Config("intermediate_size is missing".into()))
    }

    /// Products of numbers that a token of a prompt costs in all layers. Attention's scores and the output head are
    /// left out: the first depend on the length, the second is paid once a prompt.
    pub fn products_per_token(&self) -> u64 {
        let (hidden, attended) = (self.hidden as u64, (self.heads * self.head_dim) as u64);
        let attention = hidden * attended * (2 + u64::from(self.gated))
            + 2 * hidden * (self.kv_heads * self.head_dim) as u64;
        let recurrent = self.recurrent.map_or(0, |r| {
            let projected = r.conv_channels() + 2 * r.values() + 2 * r.value_heads;
            hidden * projected as u64 + 3 * (r.values() * r.key_dim) as u64
        });
        let dense = 3 * hidden * self.intermediate.unwrap_or(0) as u64;
        let sparse = self.moe.as_ref().map(|moe| {
            let widths = moe.chosen * moe.intermediate + moe.shared_intermediate.unwrap_or(0);
            hidden * (3 * widths + moe.experts) as u64
        });
        let layer = |(i, kind): (usize, &MixerKind)| {
            let is_dense = self.moe.as_ref().is_none_or(|moe| moe.dense_layers.contains(&i));
            let mixer = if *kind == MixerKind::GatedDelta { recurrent } else { attention };
            mixer + sparse.filter(|_| !is_dense).unwrap_or(dense)
        };
        self.layers.iter().enumerate().map(layer).fold(0, u64::saturating_add)
    }
}

/// Values that several models read from several keys.
impl Fields<'_> {
    /// Scaling of the frequencies of a layer type.
    pub fn rope_scaling(&self, layer_type: &str) -> Result<RopeScaling> {
        let context = self.size_or("max_position_embeddings", 32768)?;
        let original = self.size_or("original_max_position_embeddings", context)?;
        rope::parameters(self, layer_type).map_or(Ok(RopeScaling::None), |p| {
            RopeScaling::from_json(p, Contexts { whole: context, original })
        })
    }

    /// The base of the frequencies of a layer type.
    pub fn rope_theta(&self, layer_type: &str, default: f64) -> Result<f64> {
        let theta = rope::parameters(self, layer_type).and_then(|p| p["rope_theta"].as_f64());
        theta.map_or_else(|| self.rope("rope_theta", default), Ok)
    }

    /// Frequencies of each axis of a multi-axis rotary embedding.
    pub fn rope_sections(&self) -> Result<Option<RopeSections>> {
        let Some(parameters) = rope::parameters(self, "full_attention") else { return Ok(None) };
        let Some(sections) = parameters.get("mrope_section").filter(|s| !s.is_null()) else {
            return Ok(None);
        };
        let list = sections.as_array().and_then(|list| {
            list.iter().map(|n| n.as_u64().map(|n| n as usize)).collect::<Option<Vec<usize>>>()
        });
        let counts = list.and_then(|list| <[usize; 3]>::try_from(list).ok());
        let counts = counts.ok_or_else(|| {
            ModelError::Config(format!("mrope_section is {sections}, expected three whole numbers"))
        })?;
        let interleaved = parameters.get("mrope_interleaved").and_then(Value::as_bool).unwrap_or(true);
        Ok(Some(RopeSections { counts, interleaved }))
    }

    /// The kinds in `layer_types`, if the config has it.
    pub fn layer_types(&self) -> Result<Option<Vec<MixerKind>>> {
        let count = self.size("num_hidden_layers")?;
        let Some(types) = self.get("layer_types").and_then(Value::as_array) else { return Ok(None) };
        let kinds = types.iter().map(|t| match t.as_str() {
            Some("full_attention") => Ok(MixerKind::Attention),
            Some("sliding_attention") => Ok(MixerKind::SlidingAttention),
            Some("linear_attention") => Ok(MixerKind::GatedDelta),
            _ => Err(ModelError::Config(format!(
                "layer_types has {t}, expected full_attention, sliding_attention or linear_attention"
            ))),
        });
        let kinds: Vec<_> = kinds.collect::<Result<_>>()?;
        if kinds.len() != count {
            let reason = format!("layer_types has {} entries for {count} layers", kinds.len());
            return Err(ModelError::Config(reason));
        }
        Ok(Some(kinds))
    }

    fn layers(&self) -> Result<Vec<MixerKind>> {
        if let Some(kinds) = self.layer_types()? {
            if kinds.contains(&MixerKind::SlidingAttention) {
                let reason = "sliding_attention is not supported in a model with recurrent layers";
                return Err(ModelError::Config(reason.into()));
            }
            return Ok(kinds);
        }
        let count = self.size("num_hidden_layers")?;
        let every = self.size_or("full_attention_interval", 4)?;
        if every == 0 || count > 4096 {
            return Err(ModelError::Config(format!("{count} layers with full attention every {every}")));
        }
        let kind = |i: usize| {
            if (i + 1).is_multiple_of(every) { MixerKind::Attention } else { MixerKind::GatedDelta }
        };
        Ok((0..count).map(kind).collect())
    }

    fn recurrent(&self) -> Result<RecurrentConfig> {
        Ok(RecurrentConfig {
            key_heads: self.size("linear_num_key_heads")?,
            value_heads: self.size("linear_num_value_heads")?,
            key_dim: self.size("linear_key_head_dim")?,
            value_dim: self.size("linear_value_head_dim")?,
            conv_width: self.size("linear_conv_kernel_dim")?,
        })
    }

    /// The experts, if there are any. The shared expert is `shared_width` wide if the config does not say it. 0 stands
    /// for none.
    pub fn moe(&self, shared_width: usize) -> Result<Option<MixtureConfig>> {
        let experts = self.size_or("num_experts", self.size_or("num_local_experts", 0)?)?;
        if experts == 0 {
            return Ok(None);
        }
        if experts > EXPERTS_MAX {
            return Err(ModelError::Config(format!(
                "num_experts is {experts}, expected at most {EXPERTS_MAX}"
            )));
        }
        let chosen = self.size("num_experts_per_tok")?;
        if chosen == 0 || chosen > experts {
            return Err(ModelError::Config(format!("num_experts_per_tok is {chosen} of {experts} experts")));
        }
        let (own, shared) = ("moe_intermediate_size", "shared_expert_intermediate_size");
        let (intermediate, width) = (self.size(own)?, self.size_or(shared, shared_width)?);
        if intermediate == 0 || intermediate.max(width) > EXTENT_MAX {
            let reason = format!(
                "{own} and {shared} are {intermediate} and {width}, expected 1 and 0 to {EXTENT_MAX}"
            );
            return Err(ModelError::Config(reason));
        }
        Ok(Some(MixtureConfig {
            experts,
            own: 0..experts,
            chosen,
            intermediate,
            shared_intermediate: Some(width).filter(|width| *width > 0),
            shared_elsewhere: false,
            normalise: self.flag_or("norm_topk_prob", true),
            dense_layers: Vec::new(),
        }))
    }
}

#[cfg(test)]
mod tests;

//! Writes the metadata of a GGUF file from a config. [`config`](fn@super::config) reads them back.

use keel_weights::gguf::GgufMetadata;
use serde_json::Value;

use super::{SMOLLM3_INTERVAL, architecture_of};
use crate::model_types::gemma3_text;
use crate::model_types::transformer::{self, ActivationKey};
use crate::{HybridConfig, MixerKind, ModelError, Result, RopeScaling};

/// The metadata of a model with these numbers, without its tokenizer.
///
/// `has_mtp_head`: whether the file will have the tensors of the multi-token-prediction head.
///
/// # Errors
/// [`ModelError::UnknownModelType`]; [`ModelError::Config`] for numbers that files of the architecture cannot express.
pub fn metadata(json: &Value, config: &HybridConfig, has_mtp_head: bool) -> Result<GgufMetadata> {
    let arch = architecture_of(config)?;
    let mut keys = Keys { arch, metadata: GgufMetadata::default(), config };
    keys.metadata.string("general.architecture", arch);
    keys.common(if has_mtp_head { config.mtp_layers } else { 0 })?;
    keys.windows()?;
    keys.experts()?;
    keys.recurrent()?;
    keys.axes(json)?;
    keys.turning()?;
    keys.rope()?;
    keys.check_silent()?;
    Ok(keys.metadata)
}

/// Keys of one architecture.
struct Keys<'a> {
    arch: &'static str,
    metadata: GgufMetadata,
    config: &'a HybridConfig,
}

impl Keys<'_> {
    fn size(&mut self, key: &str, value: usize) -> Result<()> {
        let key = format!("{}.{key}", self.arch);
        let value = u32::try_from(value)
            .map_err(|_| ModelError::Config(format!("{value} does not fit the 32 bits of {key}")))?;
        self.metadata.u32(&key, value);
        Ok(())
    }

    fn number(&mut self, key: &str, value: f64) {
        self.metadata.f32(&format!("{}.{key}", self.arch), value as f32);
    }

    fn common(&mut self, mtp_layers: usize) -> Result<()> {
        let c = self.config;
        self.size("block_count", c.layers.len() + mtp_layers)?;
        if mtp_layers > 0 {
            self.size("nextn_predict_layers", mtp_layers)?;
        }
        for (key, value) in [
            ("context_length", c.context_max),
            ("embedding_length", c.hidden),
            ("vocab_size", c.vocab),
            ("attention.head_count", c.heads),
            ("attention.head_count_kv", c.kv_heads),
            ("attention.key_length", c.head_dim),
            ("attention.value_length", c.head_dim),
            ("rope.dimension_count", c.rotary),
        ] {
            self.size(key, value)?;
        }
        if let Some(width) = c.intermediate {
            self.size("feed_forward_length", width)?;
        }
        self.number("attention.layer_norm_rms_epsilon", f64::from(c.eps));
        self.number("rope.freq_base", c.rope_theta);
        Ok(())
    }

    fn windows(&mut self) -> Result<()> {
        let c = self.config;
        let slides = |kind: &MixerKind| *kind == MixerKind::SlidingAttention;
        if self.arch == "phi3" {
            // 0 stands for no window. All layers have the same.
            return self.size("attention.sliding_window", c.window.unwrap_or(0));
        }
        let Some(window) = c.window else { return Ok(()) };
        let turns_alike = c.sliding_rope_scaling == RopeScaling::None;
        if !matches!(self.arch, "gemma3" | "olmo2") || !turns_alike {
            let reason = format!("GGUF files of {} cannot say how layers that see a window do so", self.arch);
            return Err(ModelError::Config(reason));
        }
        self.size("attention.sliding_window", window)?;
        self.number("rope.freq_base_swa", c.sliding_rope_theta);
        if self.arch == "olmo2" {
            let sliding: Vec<bool> = c.layers.iter().map(slides).collect();
            self.metadata.bools("olmo2.attention.sliding_window_pattern", &sliding);
            return Ok(());
        }
        // Files store the interval between full-attention layers if it is regular, otherwise a list of sliding layers.
        let every = c.layers.iter().position(|kind| !slides(kind)).map_or(c.layers.len() + 1, |i| i + 1);
        if c.layers.iter().enumerate().all(|(i, kind)| slides(kind) != (i + 1).is_multiple_of(every)) {
            return self.size("attention.sliding_window_pattern", every);
        }
        let sliding: Vec<bool> = c.layers.iter().map(slides).collect();
        self.metadata.bools("gemma3.attention.sliding_window_pattern", &sliding);
        Ok(())
    }

    fn experts(&mut self) -> Result<()> {
        let Some(moe) = &self.config.moe else { return Ok(()) };
        if !moe.normalise || !moe.dense_layers.is_empty() {
            let reason = "GGUF files cannot say that experts' weights are not normalised, or that some layers have none";
            return Err(ModelError::Config(reason.into()));
        }
        self.size("expert_count", moe.experts)?;
        self.size("expert_used_count", moe.chosen)?;
        self.size("expert_feed_forward_length", moe.intermediate)?;
        if let Some(width) = moe.shared_intermediate {
            self.size("expert_shared_feed_forward_length", width)?;
        }
        Ok(())
    }

    fn recurrent(&mut self) -> Result<()> {
        let c = self.config;
        if !c.layers.contains(&MixerKind::GatedDelta) {
            return Ok(());
        }
        let r = c.recurrent_layers();
        for (key, value) in [
            ("ssm.conv_kernel", r.conv_width),
            ("ssm.inner_size", r.values()),
            ("ssm.state_size", r.key_dim),
            ("ssm.time_step_rank", r.value_heads),
            ("ssm.group_count", r.key_heads),
        ] {
            self.size(key, value)?;
        }
        let every = c.layers.iter().position(|kind| *kind == MixerKind::Attention).map_or(0, |i| i + 1);
        let regular = |(i, kind): (usize, &MixerKind)| {
            every > 0 && (*kind == MixerKind::Attention) == (i + 1).is_multiple_of(every)
        };
        if c.layers.iter().enumerate().all(regular) {
            self.size("full_attention_interval", every)?;
        } else {
            let recurrent: Vec<bool> = c.layers.iter().map(|kind| *kind == MixerKind::GatedDelta).collect();
            self.metadata.bools(&format!("{}.attention.recurrent_layers", self.arch), &recurrent);
        }
        Ok(())
    }

    /// Refuses numbers and functions that files do not contain, and that are not those of the architecture.
    fn check_silent(&self) -> Result<()> {
        let c = self.config;
        let gemma = self.arch == "gemma3";
        let ActivationKey { key, default: usual } =
            if gemma { gemma3_text::ACTIVATION } else { transformer::ACTIVATION };
        let used = c.traits.activation;
        let (layers, per_head) = (c.layers.len() as u64, (c.hidden / c.heads.max(1)) as u64);
        let scalar = super::query_scalar(self.arch, layers, per_head, c.head_dim as u64);
        let is_usual = (c.attention_scale * (scalar as f64).sqrt() - 1.0).abs() <= 1e-9;
        let reason = if used != usual {
            format!("{key}, which is {used:?} here and {usual:?} in all of these files")
        } else if !is_usual {
            let own = c.attention_scale.powi(-2);
            format!("query_pre_attn_scalar, which is {own:.3} here and would be read as {scalar}")
        } else {
            return Ok(());
        };
        Err(ModelError::Config(format!("GGUF files of {} cannot say {reason}", self.arch)))
    }

    /// Frequencies for each axis of positions in pictures. A text token has the same position on all axes.
    fn axes(&mut self, json: &Value) -> Result<()> {
        let c = self.config;
        let adds_features = matches!(self.arch, "qwen3vl" | "qwen3vlmoe");
        if !adds_features && !c.layers.contains(&MixerKind::GatedDelta) {
            return Ok(());
        }
        let counts = c.rope_sections.map_or([c.rotary / 2, 0, 0], |sections| sections.counts);
        let counts = counts.map(|count| i32::try_from(count).unwrap_or(i32::MAX));
        self.metadata.i32s(&format!("{}.rope.dimension_sections", self.arch), &[&counts[..], &[0]].concat());
        if adds_features {
            let deepstack = json["vision_config"]["deepstack_visual_indexes"].as_array();
            self.size("n_deepstack_layers", deepstack.map_or(0, Vec::len))?;
        }
        Ok(())
    }

    /// Writes which layers are not rotated and how queries grow. An error if files cannot express the config.
    fn turning(&mut self) -> Result<()> {
        let c = self.config;
        let every = |layer: &usize| self.arch == "smollm3" && (layer + 1).is_multiple_of(SMOLLM3_INTERVAL);
        if c.unrotated_layers != (0..c.layers.len()).filter(every).collect::<Vec<_>>() {
            let reason = format!("GGUF files of {} cannot say which layers know no positions", self.arch);
            return Err(ModelError::Config(reason));
        }
        let Some(growth) = c.query_growth else { return Ok(()) };
        let same = matches!(c.rope_scaling, RopeScaling::Yarn { original, .. } if original as usize == growth.original);
        if self.arch != "mistral3" || !same {
            let reason =
                format!("GGUF files of {} cannot say how queries grow with their position", self.arch);
            return Err(ModelError::Config(reason));
        }
        self.number("attention.temperature_scale", growth.beta);
        Ok(())
    }

    fn rope(&mut self) -> Result<()> {
        let arch = self.arch;
        let key = |name: &str| format!("{arch}.rope.scaling.{name}");
        match self.config.rope_scaling {
            // The divisors are written as tensors.
            RopeScaling::None | RopeScaling::Llama3 { .. } | RopeScaling::Divisors(_) => Ok(()),
            RopeScaling::Linear { factor } => {
                self.metadata.string(&key("type"), "linear");
                self.number("rope.scaling.factor", factor);
                Ok(())
            }
            RopeScaling::Long { original, attention, .. } => {
                self.metadata.string(&key("type"), "longrope");
                self.number("rope.scaling.attn_factor", attention);
                self.size("rope.scaling.original_context_length", original)
            }
            RopeScaling::Yarn { factor, fast, slow, original, attention, whole } => {
                let usual = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
                if !whole || self.arch == "mistral3" && attention != 1.0 {
                    let reason = format!(
                        "GGUF files of {} cannot say truncate or attention_factor of yarn",
                        self.arch
                    );
                    return Err(ModelError::Config(reason));
                }
                if self.arch == "mistral3" {
                    self.number("rope.scaling.yarn_log_multiplier", 1.0);
                } else if (attention - usual).abs() > 1e-9 {
                    self.number("rope.scaling.yarn_attn_factor", attention);
                }
                self.metadata.string(&key("type"), "yarn");
                self.number("rope.scaling.factor", factor);
                self.number("rope.scaling.yarn_beta_fast", fast);
                self.number("rope.scaling.yarn_beta_slow", slow);
                self.size("rope.scaling.original_context_length", original as usize)
            }
        }
    }
}

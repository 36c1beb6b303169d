//! Names of Hugging Face checkpoints' parameters in GGUF files.

/// Parts of a layer, without `weight` or `bias`.
const PARTS: [(&str, &str); 31] = [
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.switch_mlp.gate_proj", "ffn_gate_exps"),
    ("mlp.switch_mlp.up_proj", "ffn_up_exps"),
    ("mlp.switch_mlp.down_proj", "ffn_down_exps"),
    ("mlp.experts.gate_up_proj", "ffn_gate_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    // Bare parameters.
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
];

/// Parts of a layer with special names in one architecture.
const GLM4: [(&str, &str); 4] = [
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("mlp.gate_up_proj", "ffn_up"),
];
const PHI3: [(&str, &str); 2] = [("self_attn.qkv_proj", "attn_qkv"), ("mlp.gate_up_proj", "ffn_up")];

/// Parts that only the multi-token-prediction head has.
const HEAD: [(&str, &str); 4] = [
    ("fc", "eh_proj"),
    ("pre_fc_norm_embedding", "enorm"),
    ("pre_fc_norm_hidden", "hnorm"),
    ("norm", "shared_head_norm"),
];

/// Differences between architectures.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names {
    /// Number of layers before those of the multi-token-prediction head.
    pub layers: usize,
    /// True if the norm after attention has a separate name. Otherwise it has the name of the norm before the
    /// feed-forward half.
    pub post_attention_norm: bool,
    /// True if a and b of recurrent layers are in one tensor.
    pub joint_alpha_beta: bool,
    /// Special names of the architecture. They are looked up first.
    pub own: &'static [(&'static str, &'static str)],
}

impl Names {
    /// The names of an architecture.
    pub fn new(arch: &str, layers: usize) -> Names {
        Names {
            layers,
            post_attention_norm: matches!(arch, "gemma3" | "olmo2" | "qwen35" | "qwen35moe" | "qwen3next"),
            joint_alpha_beta: arch == "qwen3next",
            own: match arch {
                "glm4" => &GLM4,
                "phi3" => &PHI3,
                _ => &[],
            },
        }
    }

    /// The tensor of a parameter; `None` if there is no such name.
    pub fn tensor(&self, name: &str) -> Option<String> {
        let (module, suffix) = split(name);
        let found = self.module(module)?;
        Some(format!("{found}{suffix}"))
    }

    /// As [`Names::tensor`], without the suffix.
    pub fn module(&self, module: &str) -> Option<String> {
        if let Some(head) = module.strip_prefix("mtp.") {
            return self.head(head);
        }
        let module = module.strip_prefix("model.").unwrap_or(module);
        let top = match module {
            "embed_tokens" => Some("token_embd"),
            "norm" => Some("output_norm"),
            "lm_head" => Some("output"),
            _ => None,
        };
        if let Some(top) = top {
            return Some(top.into());
        }
        let (layer, part) = module.strip_prefix("layers.")?.split_once('.')?;
        self.part(layer.parse().ok()?, part)
    }

    /// The parameters in a tensor of the file, without `weight` or `bias`: the inverse of [`Names::module`]. Two if the
    /// tensor joins two layers, none if the tensor is no parameter. Experts have the names of transformers, which has
    /// gate and up in one parameter.
    pub fn parameters(&self, tensor: &str) -> Vec<String> {
        let top = match tensor {
            "token_embd" => Some("model.embed_tokens"),
            "output_norm" => Some("model.norm"),
            "output" => Some("lm_head"),
            _ => None,
        };
        if let Some(top) = top {
            return vec![top.into()];
        }
        let Some((layer, part)) = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            return Vec::new();
        };
        let Ok(layer) = layer.parse::<usize>() else { return Vec::new() };
        if let Some(own) = part.strip_prefix("nextn.") {
            let own = HEAD.iter().filter(|(_, name)| *name == own && layer == self.layers);
            return own.map(|(name, _)| format!("mtp.{name}")).collect();
        }
        let layer = match layer.checked_sub(self.layers) {
            None => format!("model.layers.{layer}"),
            Some(layer) => format!("mtp.layers.{layer}"),
        };
        let own = self.own.iter().find(|(_, name)| *name == part);
        let found: Vec<&str> = match part {
            _ if own.is_some() => own.iter().map(|(name, _)| *name).collect(),
            "post_attention_norm" => vec!["post_attention_layernorm"],
            "ffn_norm" if !self.post_attention_norm => vec!["post_attention_layernorm"],
            "ssm_ba" if self.joint_alpha_beta => vec!["linear_attn.in_proj_a", "linear_attn.in_proj_b"],
            "ffn_gate_exps" | "ffn_up_exps" => vec!["mlp.experts.gate_up_proj"],
            "ffn_down_exps" => vec!["mlp.experts.down_proj"],
            part => PARTS.iter().filter(|(_, name)| *name == part).map(|(name, _)| *name).take(1).collect(),
        };
        found.into_iter().map(|part| format!("{layer}.{part}")).collect()
    }

    fn part(&self, layer: usize, part: &str) -> Option<String> {
        let own = self.own.iter().find(|(name, _)| *name == part);
        let found = match part {
            _ if own.is_some() => own?.1,
            "post_attention_layernorm" if self.post_attention_norm => "post_attention_norm",
            "post_attention_layernorm" => "ffn_norm",
            "linear_attn.in_proj_a" | "linear_attn.in_proj_b" if self.joint_alpha_beta => "ssm_ba",
            part => PARTS.iter().find(|(name, _)| *name == part)?.1,
        };
        Some(format!("blk.{layer}.{found}"))
    }

    /// The head's blocks follow the model's. Parts that only the head has are in its first block.
    fn head(&self, module: &str) -> Option<String> {
        if let Some((layer, part)) = module.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
            return self.part(self.layers + layer.parse::<usize>().ok()?, part);
        }
        let (_, own) = HEAD.iter().find(|(name, _)| *name == module)?;
        Some(format!("blk.{}.nextn.{own}", self.layers))
    }
}

/// A name without its `.weight` or `.bias`, and this suffix.
pub(super) fn split(name: &str) -> (&str, &str) {
    for suffix in [".weight", ".bias"] {
        if let Some(module) = name.strip_suffix(suffix) {
            return (module, suffix);
        }
    }
    (name, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_names_are_those_of_one_architecture() {
        for (arch, part, tensor) in [
            ("glm4", "post_attention_layernorm", "ffn_norm"),
            ("glm4", "post_self_attn_layernorm", "post_attention_norm"),
            ("glm4", "post_mlp_layernorm", "post_ffw_norm"),
            ("glm4", "mlp.gate_up_proj", "ffn_up"),
            ("glm4", "self_attn.q_proj", "attn_q"),
            ("phi3", "self_attn.qkv_proj", "attn_qkv"),
            ("phi3", "mlp.gate_up_proj", "ffn_up"),
            ("phi3", "post_attention_layernorm", "ffn_norm"),
            ("olmo2", "post_attention_layernorm", "post_attention_norm"),
            ("olmo2", "post_feedforward_layernorm", "post_ffw_norm"),
            ("olmo2", "mlp.up_proj", "ffn_up"),
            ("smollm3", "mlp.up_proj", "ffn_up"),
        ] {
            let names = Names::new(arch, 2);
            let found = names.module(&format!("model.layers.1.{part}"));
            assert_eq!(found.as_deref(), Some(&*format!("blk.1.{tensor}")), "{arch}");
            assert_eq!(
                names.parameters(&format!("blk.1.{tensor}")),
                [format!("model.layers.1.{part}")],
                "{arch}"
            );
        }
    }

    #[test]
    fn names_are_those_of_the_format() {
        let names = Names { layers: 4, post_attention_norm: true, joint_alpha_beta: false, own: &[] };
        let plain = Names { post_attention_norm: false, joint_alpha_beta: true, ..names };
        for (hugging_face, gguf) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.norm.weight", "output_norm.weight"),
            ("model.layers.3.self_attn.q_proj.bias", "blk.3.attn_q.bias"),
            ("model.layers.0.post_attention_layernorm.weight", "blk.0.post_attention_norm.weight"),
            ("model.layers.1.mlp.experts.gate_up_proj.weight", "blk.1.ffn_gate_up_exps.weight"),
            ("model.layers.2.linear_attn.A_log", "blk.2.ssm_a"),
            ("model.layers.2.linear_attn.dt_bias", "blk.2.ssm_dt.bias"),
            ("mtp.layers.0.mlp.gate", "blk.4.ffn_gate_inp"),
            ("mtp.fc.weight", "blk.4.nextn.eh_proj.weight"),
            ("mtp.norm.weight", "blk.4.nextn.shared_head_norm.weight"),
        ] {
            assert_eq!(names.tensor(hugging_face).as_deref(), Some(gguf));
            let (tensor, (parameter, _)) = (split(gguf).0, split(hugging_face));
            let whole = if gguf.ends_with("ssm_dt.bias") { gguf } else { tensor };
            assert_eq!(names.parameters(whole), [parameter]);
        }
        let both = ["a", "b"].map(|part| format!("model.layers.1.linear_attn.in_proj_{part}"));
        assert_eq!(plain.parameters("blk.1.ssm_ba"), both);
        // Files have three stacks, MLX's checkpoints too, and transformers' two.
        for (part, stack) in [("gate", "gate_up"), ("up", "gate_up"), ("down", "down")] {
            let tensor = format!("blk.0.ffn_{part}_exps");
            let module = format!("model.layers.0.mlp.switch_mlp.{part}_proj");
            assert_eq!(plain.module(&module).as_deref(), Some(&*tensor));
            assert_eq!(plain.parameters(&tensor), [format!("model.layers.0.mlp.experts.{stack}_proj")]);
        }
        for unknown in ["rope_freqs", "blk.x.attn_q", "blk.0.attn_rot_embd", "blk.3.nextn.eh_proj"] {
            assert!(names.parameters(unknown).is_empty(), "{unknown}");
        }
        assert_eq!(plain.tensor("model.layers.0.linear_attn.in_proj_b").as_deref(), Some("blk.0.ssm_ba"));
        assert_eq!(
            plain.tensor("model.layers.0.post_attention_layernorm.weight").as_deref(),
            Some("blk.0.ffn_norm.weight")
        );
        for unknown in
            ["model.layers.x.mlp.gate", "model.visual.patch", "mtp.fd.weight", "model.layers.1.mlp"]
        {
            assert_eq!(names.tensor(unknown), None, "{unknown}");
        }
    }
}

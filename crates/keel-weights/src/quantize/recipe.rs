//! Decides which modules are quantised, and how.

use std::collections::BTreeMap;

use crate::{AffineFormat, TensorInfo};

/// Default for the bytes of an output shard.
pub(super) const SHARD_BYTES_MAX: u64 = 5_000_000_000;

/// How to quantise a checkpoint.
///
/// Every matrix (with embeddings and output head) and every stack of expert matrices is quantised in `format`, if its
/// rows are whole groups. Exceptions:
///
/// * routers (`mlp.gate`) and gates of shared experts (`shared_expert_gate`) take 8 bits, because an error there
///   sends a token to other experts;
/// * norms, `conv1d`, `A_log`, `dt_bias` and the vision tower stay unchanged;
/// * `overrides` win over all of these, and replace `format` for their modules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizeRecipe {
    /// The format of all other modules.
    pub format: AffineFormat,
    /// A format, or `None` for dense, by module path or by its last parts: `lm_head`, `mlp.down_proj`. The longest
    /// match wins.
    pub overrides: BTreeMap<String, Option<AffineFormat>>,
    /// Most bytes of an output shard. A single larger tensor gets a larger shard.
    pub shard_bytes_max: u64,
}

impl QuantizeRecipe {
    /// A recipe without overrides, in shards of 5 GB.
    pub fn new(format: AffineFormat) -> QuantizeRecipe {
        QuantizeRecipe { format, overrides: BTreeMap::new(), shard_bytes_max: SHARD_BYTES_MAX }
    }

    /// The format that the weight of a linear layer or embedding takes; `None` if it stays dense. `cols` are its
    /// columns.
    pub fn format_for(&self, module: &str, cols: usize) -> Option<AffineFormat> {
        let format = self.format_of(module).filter(|_| !is_unchanged(module))?;
        format.groups(cols).filter(|&groups| groups > 0).map(|_| format)
    }

    /// The format of a module whose dense weight can be quantised.
    pub(super) fn format_of(&self, module: &str) -> Option<AffineFormat> {
        let matching = self.overrides.iter().filter(|(path, _)| is_tail(module, path));
        if let Some((_, format)) = matching.max_by_key(|(path, _)| path.len()) {
            return *format;
        }
        if is_tail(module, "mlp.gate") || is_tail(module, "shared_expert_gate") {
            return AffineFormat::new(8, self.format.group_size());
        }
        Some(self.format)
    }
}

/// The module of a tensor that can be quantised: a float matrix or a stack of expert matrices, but not of the vision
/// tower, norms, or the small tensors of recurrent layers.
pub(super) fn module_of<'a>(name: &'a str, info: &TensorInfo<'_>) -> Option<&'a str> {
    let is_expert = name.split('.').any(|part| part == "experts" || part == "switch_mlp");
    if !info.dtype.is_float() || is_unchanged(name) {
        return None;
    }
    match (name.strip_suffix(".weight"), info.shape.len()) {
        (Some(module), 2) => Some(module),
        (Some(module), 3) if is_expert => Some(module),
        (None, 3) if is_expert => Some(name),
        _ => None,
    }
}

/// Whether a name tells that a tensor stays as it is: one of the vision tower, a norm or a part of a recurrent layer.
fn is_unchanged(name: &str) -> bool {
    let is_kept = |part: &str| {
        let is_vision = part == "visual" || part.starts_with("vision");
        is_vision || part.contains("norm") || ["conv1d", "A_log", "dt_bias"].contains(&part)
    };
    name.split('.').any(is_kept)
}

/// Whether the last parts of a dotted path are `tail`.
pub(super) fn is_tail(path: &str, tail: &str) -> bool {
    path.strip_suffix(tail).is_some_and(|head| head.is_empty() || head.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use keel_array::DType;

    use super::*;

    fn module(name: &'static str, dtype: DType, shape: &[usize]) -> Option<&'static str> {
        module_of(name, &TensorInfo { dtype, shape })
    }

    #[test]
    fn matrices_and_experts_can_be_quantized() {
        let matrix = &[8, 64];
        let stack = &[3, 8, 64];
        let of = |name, shape| module(name, DType::BF16, shape);
        assert_eq!(of("lm_head.weight", matrix), Some("lm_head"));
        assert_eq!(of("model.embed_tokens.weight", matrix), Some("model.embed_tokens"));
        assert_eq!(of("l.0.mlp.experts.5.up_proj.weight", matrix), Some("l.0.mlp.experts.5.up_proj"));
        assert_eq!(of("l.0.mlp.experts.gate_up_proj", stack), Some("l.0.mlp.experts.gate_up_proj"));
        assert_eq!(of("l.0.mlp.switch_mlp.up_proj.weight", stack), Some("l.0.mlp.switch_mlp.up_proj"));
    }

    #[test]
    fn the_rest_stays() {
        let of = |name, shape: &[usize]| module(name, DType::BF16, shape);
        assert_eq!(of("l.0.linear_attn.conv1d.weight", &[512, 1, 4]), None);
        assert_eq!(of("l.0.linear_attn.conv1d.weight", &[512, 32]), None);
        assert_eq!(of("l.0.linear_attn.A_log", &[4]), None);
        assert_eq!(of("l.0.input_layernorm.weight", &[64]), None);
        assert_eq!(of("l.0.q_norm.weight", &[2, 64]), None);
        assert_eq!(of("model.visual.blocks.0.attn.proj.weight", &[64, 64]), None);
        assert_eq!(of("vision_tower.blocks.0.attn.proj.weight", &[64, 64]), None);
        assert_eq!(of("l.0.mlp.other.weight", &[3, 8, 64]), None);
        assert_eq!(of("l.0.mlp.router_scale", &[8, 64]), None);
        assert_eq!(module("l.0.mlp.up_proj.weight", DType::U32, &[8, 64]), None);
    }

    #[test]
    fn gates_take_eight_bits_and_overrides_win() {
        let format = |bits, group_size| AffineFormat::new(bits, group_size);
        let mut recipe = QuantizeRecipe::new(format(4, 32).unwrap());
        assert_eq!(recipe.format_of("l.0.mlp.up_proj"), format(4, 32));
        assert_eq!(recipe.format_of("l.0.mlp.gate"), format(8, 32));
        assert_eq!(recipe.format_of("l.0.mlp.gate_proj"), format(4, 32));
        assert_eq!(recipe.format_of("l.0.mlp.shared_expert_gate"), format(8, 32));
        recipe.overrides.insert("up_proj".into(), format(6, 64));
        recipe.overrides.insert("l.0.mlp.up_proj".into(), None);
        recipe.overrides.insert("mlp.gate".into(), format(5, 32));
        assert_eq!(recipe.format_of("l.0.mlp.up_proj"), None);
        assert_eq!(recipe.format_of("l.1.mlp.up_proj"), format(6, 64));
        assert_eq!(recipe.format_of("l.1.mlp.sup_proj"), format(4, 32));
        assert_eq!(recipe.format_of("l.1.mlp.gate"), format(5, 32));
        assert_eq!(recipe.format_for("l.1.mlp.sup_proj", 96), format(4, 32));
        for (module, cols) in [("l.1.mlp.sup_proj", 48), ("l.0.mlp.up_proj", 64), ("visual.proj", 64)] {
            assert_eq!(recipe.format_for(module, cols), None, "{module}");
        }
    }
}

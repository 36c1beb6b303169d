//! The quantisation section of config.json.
//!
//! ```json
//! "quantization": {
//!   "group_size": 64, "bits": 4, "mode": "affine",
//!   "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8},
//!   "model.layers.0.mlp.shared_expert": false
//! }
//! ```

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::AffineFormat;
use crate::fp4::Fp4Mode;

/// The config's quantisation of modules: a default, and overrides by module path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantization {
    default: ModuleQuantization,
    /// `None` if the method's `qweight` is not read.
    gptq: Option<Gptq>,
    overrides: BTreeMap<String, ModuleQuantization>,
}

/// How codes and zeros are stored in words (`qweight`, `qzeros`) of GPTQ's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gptq {
    pub bits: u64,
    /// Added to each stored zero.
    pub zero_offset: u8,
}

/// As the first tools stored them.
impl Default for Gptq {
    fn default() -> Gptq {
        Gptq { bits: 4, zero_offset: 1 }
    }
}

impl Gptq {
    /// The settings of a method; `None` if its words are not read.
    fn of_method(method: &str, section: &Map<String, Value>) -> Option<Gptq> {
        let text = |key: &str| section.get(key).and_then(Value::as_str).unwrap_or_default();
        let bits = section.get("bits").and_then(Value::as_u64).unwrap_or(4);
        match method {
            "awq" | "paroquant" => Some(Gptq::default()),
            "gptq" => Some(Gptq { bits, zero_offset: u8::from(text("checkpoint_format") != "gptq_v2") }),
            // It has several orders. These are those of AutoGPTQ, also where none is named, and of AutoAWQ.
            "auto-round" | "intel/auto-round" => {
                let gptq = ["", "auto", "auto_round:gptq", "auto_round:auto_gptq"];
                let known = [&gptq[..], &["auto_round:awq", "auto_round:auto_awq"]].concat();
                known.contains(&text("packing_format")).then_some(Gptq { bits, zero_offset: 1 })
            }
            _ => None,
        }
    }
}

/// The config's quantisation of one module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModuleQuantization {
    /// Not quantised.
    Dense,
    /// In MLX's affine form.
    Affine(AffineFormat),
    /// In 4-bit floats, in MLX's form.
    Fp4(Fp4Mode),
    /// A format that this crate does not read. The string names it.
    Unsupported(String),
}

impl Quantization {
    /// Reads `quantization`, or else `quantization_config`, of a config.json; `None` if it has neither.
    ///
    /// An unreadable entry becomes [`ModuleQuantization::Unsupported`]. It is an error only when a module with this
    /// entry is read.
    pub fn from_config(config: &Value) -> Option<Quantization> {
        let section =
            ["quantization", "quantization_config"].iter().find_map(|key| config.get(key)?.as_object())?;
        if let Some(method) =
            section.get("quant_method").and_then(Value::as_str).filter(|&name| name != "mlx")
        {
            let detail = |key: &str| Some(format!(", {key} '{}'", section.get(key)?.as_str()?));
            let details: String =
                ["format", "packing_format", "quant_algo"].into_iter().filter_map(detail).collect();
            let default = ModuleQuantization::Unsupported(format!("quant_method '{method}'{details}"));
            let gptq = Gptq::of_method(method, section);
            return Some(Quantization { default, gptq, overrides: BTreeMap::new() });
        }
        let default = parse_format(section, None);
        let mut overrides = BTreeMap::new();
        for (module, value) in section {
            let parsed = match value {
                Value::Bool(false) => ModuleQuantization::Dense,
                Value::Bool(true) => default.clone(),
                Value::Object(object) => parse_format(object, Some(section)),
                _ => continue,
            };
            overrides.insert(module.clone(), parsed);
        }
        Some(Quantization { default, gptq: Some(Gptq::default()), overrides })
    }

    /// The form of `qweight`; `None` if the config's method has one that is not read.
    pub(crate) fn gptq(&self) -> Option<Gptq> {
        self.gptq
    }

    /// The quantisation of the module at this path: its override, or the default.
    pub fn of_module(&self, module: &str) -> &ModuleQuantization {
        self.overrides.get(module).unwrap_or(&self.default)
    }
}

/// The format in `object`. Missing keys come from `defaults`.
fn parse_format(object: &Map<String, Value>, defaults: Option<&Map<String, Value>>) -> ModuleQuantization {
    let get = |key| object.get(key).or_else(|| defaults?.get(key));
    let number = |key| get(key).and_then(Value::as_u64).and_then(|number| usize::try_from(number).ok());
    // As in mlx, an object does not inherit the default's mode. With a mode it does not inherit the sizes either.
    if let Some(mode) = object.get("mode").filter(|mode| mode.as_str() != Some("affine")) {
        let fits = |known: &Fp4Mode| {
            let is =
                |key, size: usize| object.get(key).is_none_or(|value| value.as_u64() == Some(size as u64));
            is("bits", 4) && is("group_size", known.group_size())
        };
        return match mode.as_str().and_then(Fp4Mode::from_name).filter(fits) {
            Some(known) => ModuleQuantization::Fp4(known),
            None => {
                ModuleQuantization::Unsupported(format!("mode {mode} in {}", Value::Object(object.clone())))
            }
        };
    }
    let format = number("bits").zip(number("group_size"));
    match format.and_then(|(bits, group_size)| AffineFormat::new(bits, group_size)) {
        Some(format) => ModuleQuantization::Affine(format),
        None => {
            let show = |key| get(key).map_or("missing".to_string(), Value::to_string);
            let (bits, group_size) = (show("bits"), show("group_size"));
            ModuleQuantization::Unsupported(format!("bits {bits}, group_size {group_size}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn affine(bits: usize, group_size: usize) -> ModuleQuantization {
        ModuleQuantization::Affine(AffineFormat::new(bits, group_size).unwrap())
    }

    #[test]
    fn overrides_win_over_the_default() {
        let config = json!({"quantization": {
            "group_size": 64, "bits": 4, "mode": "affine", "a.plain": {"bits": 8},
            "a.gate": {"group_size": 32, "bits": 8}, "a.half": {"bits": 6}, "a.dense": false, "a.same": true,
            "a.fp": {"group_size": 32, "bits": 4, "mode": "mxfp4"}, "a.nv": {"group_size": 16, "mode": "nvfp4"},
            "a.wide": {"group_size": 64, "mode": "nvfp4"}
        }});
        let quantization = Quantization::from_config(&config).unwrap();
        assert_eq!(*quantization.of_module("a.proj"), affine(4, 64));
        assert_eq!(*quantization.of_module("a.gate"), affine(8, 32));
        assert_eq!(*quantization.of_module("a.half"), affine(6, 64));
        assert_eq!(*quantization.of_module("a.dense"), ModuleQuantization::Dense);
        assert_eq!(*quantization.of_module("a.same"), affine(4, 64));
        assert_eq!(*quantization.of_module("a.fp"), ModuleQuantization::Fp4(Fp4Mode::Mxfp4));
        assert_eq!(*quantization.of_module("a.nv"), ModuleQuantization::Fp4(Fp4Mode::Nvfp4));
        assert_eq!(*quantization.of_module("a.plain"), affine(8, 64));
        let ModuleQuantization::Unsupported(what) = quantization.of_module("a.wide") else {
            panic!("groups of 64")
        };
        assert!(what.contains("nvfp4") && what.contains("64"), "{what}");
    }

    #[test]
    fn either_key_is_read_and_none_is_no_quantization() {
        let section = json!({"group_size": 128, "bits": 3});
        let second = Quantization::from_config(&json!({"quantization_config": section})).unwrap();
        assert_eq!(*second.of_module("x"), affine(3, 128));
        assert_eq!(Quantization::from_config(&json!({"model_type": "qwen3_5"})), None);
        assert_eq!(Quantization::from_config(&json!({"quantization": null})), None);
    }

    #[test]
    fn what_cannot_be_read_says_what_it_is() {
        let default = |section: Value| {
            let quantization = Quantization::from_config(&json!({"quantization_config": section})).unwrap();
            match quantization.of_module("x") {
                ModuleQuantization::Unsupported(what) => what.clone(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(
            default(json!({"quant_method": "awq", "bits": 4, "group_size": 64})),
            "quant_method 'awq'"
        );
        assert_eq!(
            default(json!({"quant_method": "compressed-tensors", "format": "pack-quantized"})),
            "quant_method 'compressed-tensors', format 'pack-quantized'"
        );
        assert_eq!(default(json!({"bits": 7, "group_size": 64})), "bits 7, group_size 64");
        assert_eq!(default(json!({"bits": "4"})), "bits \"4\", group_size missing");
        assert_eq!(
            default(json!({"bits": -4, "group_size": 18446744073709551615u64})),
            "bits -4, group_size 18446744073709551615"
        );
    }
}

//! Rotary frequencies, and the ways in which checkpoints stretch them over longer contexts.
//!
//! Unscaled, frequency `i` of `n / 2` is `theta^(-2i / n)`. The scalings are those of the Hugging Face reference
//! implementation: `linear`, `llama3`, and YaRN (Peng et al., 2023).

use std::f64::consts::{PI, TAU};

use serde_json::Value;

use crate::fields::Fields;
use crate::{ModelError, Result};

/// How frequencies are stretched.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All of them divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Low frequencies divided, high ones kept, smooth between.
    Llama3 {
        /// What the low ones are divided by.
        factor: f64,
        /// Wavelengths above `original / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original / high` are high frequencies.
        high: f64,
        /// Context of the first training.
        original: f64,
    },
    /// Divided below a frequency that turns `slow` times in the original context, kept above one that turns `fast`
    /// times, a ramp between; and scores are sharpened.
    Yarn {
        /// What the low ones are divided by.
        factor: f64,
        /// Turns from which on frequencies are kept.
        fast: f64,
        /// Turns up to which frequencies are divided.
        slow: f64,
        /// Context of the first training.
        original: f64,
        /// Factor on queries and keys after the rotation.
        attention: f64,
        /// The ramp's ends are rounded to whole frequencies.
        whole: bool,
    },
    /// A divisor for each frequency, as GGUF files have them.
    Divisors(Vec<f64>),
}

impl RopeScaling {
    /// Reads `rope_parameters`, or the older `rope_scaling`.
    ///
    /// # Errors
    /// An unknown kind, or a number that is missing or out of range.
    pub(crate) fn from_json(parameters: &Value, context: usize) -> Result<RopeScaling> {
        let kind = parameters.get("rope_type").or_else(|| parameters.get("type"));
        let kind = kind.and_then(Value::as_str).unwrap_or("default");
        let number = |key: &str, default: Option<f64>| {
            let value = parameters.get(key).filter(|v| !v.is_null());
            let found = value.map_or(default, Value::as_f64);
            let sound = found.filter(|x| x.is_finite() && *x > 0.0);
            sound.ok_or_else(|| {
                let found = value.map_or("missing".to_string(), Value::to_string);
                ModelError::Config(format!(
                    "{key} of a rope of type {kind} is {found}, expected a number above 0"
                ))
            })
        };
        let original = || number("original_max_position_embeddings", Some(context as f64));
        match kind {
            // Sections of several axes have the same position in text, so they drop out.
            "default" | "mrope" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: number("factor", None)? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: number("factor", None)?,
                low: number("low_freq_factor", None)?,
                high: number("high_freq_factor", None)?,
                original: original()?,
            }),
            "yarn" => {
                let factor = number("factor", None)?;
                let gain = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
                let scales = (parameters.get("mscale"), parameters.get("mscale_all_dim"));
                let attention = match scales {
                    (Some(_), Some(_)) => {
                        gain(number("mscale", None)?) / gain(number("mscale_all_dim", None)?)
                    }
                    _ => gain(1.0),
                };
                Ok(RopeScaling::Yarn {
                    factor,
                    fast: number("beta_fast", Some(32.0))?,
                    slow: number("beta_slow", Some(1.0))?,
                    original: original()?,
                    attention: number("attention_factor", Some(attention))?,
                    whole: parameters.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                })
            }
            "divisors" => {
                let list = parameters["divisors"].as_array().into_iter().flatten();
                Ok(RopeScaling::Divisors(list.filter_map(Value::as_f64).collect()))
            }
            other => Err(ModelError::Config(format!(
                "rope_type {other:?} is not supported; supported are default, linear, llama3 and yarn"
            ))),
        }
    }

    /// Factor on queries and keys after the rotation.
    pub fn attention_factor(&self) -> f64 {
        if let RopeScaling::Yarn { attention, .. } = self { *attention } else { 1.0 }
    }

    /// The `rotary / 2` inverse frequencies.
    pub fn inverse_frequencies(&self, theta: f64, rotary: usize) -> Vec<f32> {
        let plain = |i: usize| theta.powf(-2.0 * i as f64 / rotary as f64);
        let stretched = |i: usize| match *self {
            RopeScaling::None => plain(i),
            RopeScaling::Linear { factor } => plain(i) / factor,
            RopeScaling::Llama3 { factor, low, high, original } => {
                // Turns in the original context.
                let turns = original * plain(i) / TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) * (kept + (1.0 - kept) / factor)
            }
            RopeScaling::Yarn { factor, fast, slow, original, whole, .. } => {
                let (from, to) = ramp(theta, rotary, (fast, slow), original, whole);
                let divided = ((i as f64 - from) / (to - from)).clamp(0.0, 1.0);
                plain(i) * (1.0 - divided + divided / factor)
            }
            RopeScaling::Divisors(ref divisors) => plain(i) / divisors.get(i).copied().unwrap_or(1.0),
        };
        (0..rotary / 2).map(|i| stretched(i) as f32).collect()
    }
}

/// The frequencies between which YaRN's ramp lies.
fn ramp(theta: f64, rotary: usize, (fast, slow): (f64, f64), original: f64, whole: bool) -> (f64, f64) {
    let frequency_of = |turns: f64| rotary as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut from, mut to) = (frequency_of(fast), frequency_of(slow));
    if whole {
        (from, to) = (from.floor(), to.ceil());
    }
    let last = rotary as f64 - 1.0;
    let (from, to) = (from.max(0.0), to.min(last));
    // The reference keeps the ramp from being empty in the same way.
    (from, if from == to { to + 0.001 } else { to })
}

/// The rope parameters of a layer type: nested under its name, common to all, or the older `rope_scaling`.
pub(crate) fn parameters<'a>(fields: &'a Fields<'_>, layer_type: &str) -> Option<&'a Value> {
    let found = fields.get("rope_parameters").or_else(|| fields.get("rope_scaling"))?;
    Some(found.get(layer_type).unwrap_or(found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn frequencies(parameters: Value, theta: f64) -> Vec<f32> {
        RopeScaling::from_json(&parameters, 4096).expect("sound").inverse_frequencies(theta, 16)
    }

    fn close(got: &[f32], want: &[f32]) {
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got / want - 1.0).abs() < 2e-6, "frequency {i}: {got}, expected {want}");
        }
    }

    /// Values of transformers 5.17 (`ROPE_INIT_FUNCTIONS`), head size 16.
    #[test]
    fn frequencies_are_those_of_the_reference() {
        let plain = [1.0, 0.193_922_74, 0.037_606_03, 0.007_292_665, 0.001_414_213_5, 0.000_274_248_2];
        close(&frequencies(json!({"rope_type": "default"}), 500_000.0), &plain);
        let halved: Vec<f32> = plain.iter().map(|f| f / 8.0).collect();
        close(&frequencies(json!({"rope_type": "linear", "factor": 8.0}), 500_000.0), &halved);
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192});
        let got = frequencies(llama3, 500_000.0);
        close(&got[..4], &plain[..4]);
        // 8192 positions are 1.84 turns of frequency 4, so 0.281 of it is kept.
        close(&got[4..], &[0.000_524_846_2, 0.000_274_248_2 / 8.0]);
    }

    #[test]
    fn yarn_keeps_fast_turns_and_divides_slow_ones() {
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096});
        let scaling = RopeScaling::from_json(&yarn, 32768).expect("sound");
        assert!((scaling.attention_factor() - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
        let (got, plain) =
            (scaling.inverse_frequencies(10_000.0, 16), RopeScaling::None.inverse_frequencies(10_000.0, 16));
        // The ramp runs from floor(2.62) to ceil(5.63).
        close(&got[..3], &plain[..3]);
        close(&got[3..5], &[plain[3] * 0.8125, plain[4] * 0.625]);
        close(&got[6..], &[plain[6] / 4.0, plain[7] / 4.0]);
    }

    #[test]
    fn a_number_that_is_missing_or_unsound_is_named() {
        for (parameters, key) in [
            (json!({"rope_type": "linear"}), "factor"),
            (json!({"rope_type": "yarn", "factor": -1.0}), "factor"),
            (json!({"type": "llama3", "factor": 8, "low_freq_factor": "x"}), "low_freq_factor"),
            (json!({"rope_type": "longrope"}), "longrope"),
        ] {
            let message = RopeScaling::from_json(&parameters, 64).expect_err("unsound").to_string();
            assert!(message.contains(key), "{message}");
        }
    }
}

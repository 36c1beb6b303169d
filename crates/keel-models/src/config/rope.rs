//! Rotary frequencies, and their scalings for longer contexts.
//!
//! Without scaling, frequency `i` of `n / 2` is `theta^(-2i / n)`. The scalings are those of the Hugging Face reference
//! implementation: `linear`, `llama3`, YaRN (Peng et al., 2023) and LongRoPE (Ding et al., 2024).

use std::f64::consts::{PI, TAU};
use std::ops::Range;

use serde_json::Value;

use crate::config::fields::Fields;
use crate::{ModelError, Result};

/// Scaling of the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// All frequencies are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Low frequencies are divided, high ones kept, with a smooth transition.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original / high` are high frequencies.
        high: f64,
        /// Context of the first training.
        original: f64,
    },
    /// Frequencies with fewer than `slow` turns in the original context are divided, those with more than `fast` turns
    /// are kept, with a ramp between. Scores are sharpened.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Least number of turns of frequencies that are kept.
        fast: f64,
        /// Greatest number of turns of frequencies that are fully divided.
        slow: f64,
        /// Context of the first training.
        original: f64,
        /// Factor on queries and keys after the rotation.
        attention: f64,
        /// True if the ramp's ends are rounded to whole frequencies.
        whole: bool,
    },
    /// LongRoPE (Ding et al., 2024): a divisor for each frequency, with a second list for sequences longer than the
    /// original context. Scores are sharpened.
    Long {
        /// Divisors for sequences within the original context.
        short: Vec<f64>,
        /// Divisors for longer sequences.
        long: Vec<f64>,
        /// Context of the first training.
        original: usize,
        /// Factor on queries and keys after the rotation.
        attention: f64,
    },
    /// A divisor for each frequency, as in GGUF files.
    Divisors(Vec<f64>),
}

/// The config's lengths of contexts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contexts {
    /// `max_position_embeddings`.
    pub whole: usize,
    /// `original_max_position_embeddings` of the top level; `whole` if it is missing.
    pub original: usize,
}

impl RopeScaling {
    /// Reads `rope_parameters`, or the older `rope_scaling`.
    ///
    /// # Errors
    /// For an unknown kind, or a number that is missing or out of range.
    pub(crate) fn from_json(parameters: &Value, contexts: Contexts) -> Result<RopeScaling> {
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
        let original = || number("original_max_position_embeddings", Some(contexts.original as f64));
        let stretch = |original: f64| number("factor", Some(contexts.whole as f64 / original));
        match kind {
            // A text token has the same position on all axes, so sections have no effect on frequencies.
            "default" | "mrope" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: number("factor", None)? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: number("factor", None)?,
                low: number("low_freq_factor", None)?,
                high: number("high_freq_factor", None)?,
                original: original()?,
            }),
            // Older configs of Phi-3 name it su or yarn.
            "longrope" | "su" => long(parameters, original()?, &number, &stretch),
            "yarn" if parameters["long_factor"].is_array() => {
                long(parameters, original()?, &number, &stretch)
            }
            "yarn" => {
                let factor = stretch(original()?)?;
                let gain = |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
                let given = |key: &str| parameters[key].as_f64().is_some_and(|scale| scale != 0.0);
                let attention = match given("mscale") && given("mscale_all_dim") {
                    true => gain(number("mscale", None)?) / gain(number("mscale_all_dim", None)?),
                    false => gain(1.0),
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
            "divisors" => Ok(RopeScaling::Divisors(divisors(parameters, "divisors")?)),
            other => Err(ModelError::Config(format!(
                "rope_type {other:?} is not supported; supported are default, linear, llama3, yarn and longrope"
            ))),
        }
    }

    /// Factor on queries and keys after the rotation.
    pub fn attention_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn { attention, .. } | RopeScaling::Long { attention, .. } => *attention,
            _ => 1.0,
        }
    }

    /// Most positions of a model whose config gives `stated` as `max_position_embeddings`. YaRN stretches the original
    /// context by its factor. Model cards tell users to add it to a config and to leave the stated context as it is.
    pub(crate) fn context_max(&self, stated: usize) -> usize {
        match self {
            // A product beyond the range saturates, and is refused with the config.
            RopeScaling::Yarn { factor, original, .. } => stated.max((factor * original).round() as usize),
            _ => stated,
        }
    }

    /// The scaling for sequences longer than the original context; `None` if it is the same.
    pub fn of_long_sequences(&self) -> Option<RopeScaling> {
        match self {
            RopeScaling::Long { long, .. } => Some(RopeScaling::Divisors(long.clone())),
            _ => None,
        }
    }

    /// The original context, if longer sequences have a scaling of their own.
    pub fn short_context(&self) -> Option<usize> {
        match self {
            RopeScaling::Long { original, .. } => Some(*original),
            _ => None,
        }
    }

    /// The `rotary / 2` inverse frequencies.
    pub fn inverse_frequencies(&self, theta: f64, rotary: usize) -> Vec<f32> {
        let plain = |i: usize| theta.powf(-2.0 * i as f64 / rotary as f64);
        let stretched = |i: usize| match *self {
            RopeScaling::None => plain(i),
            RopeScaling::Linear { factor } => plain(i) / factor,
            RopeScaling::Llama3 { factor, low, high, original } => {
                // Number of turns in the original context.
                let turns = original * plain(i) / TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) * (kept + (1.0 - kept) / factor)
            }
            RopeScaling::Yarn { factor, fast, slow, original, whole, .. } => {
                let ramp = ramp(theta, rotary, fast..slow, original, whole);
                let divided = ((i as f64 - ramp.start) / (ramp.end - ramp.start)).clamp(0.0, 1.0);
                plain(i) * (1.0 - divided + divided / factor)
            }
            RopeScaling::Divisors(ref divisors) | RopeScaling::Long { short: ref divisors, .. } => {
                plain(i) / divisors.get(i).copied().unwrap_or(1.0)
            }
        };
        (0..rotary / 2).map(|i| stretched(i) as f32).collect()
    }
}

/// Reads LongRoPE's numbers.
fn long(
    parameters: &Value,
    original: f64,
    number: &dyn Fn(&str, Option<f64>) -> Result<f64>,
    stretch: &dyn Fn(f64) -> Result<f64>,
) -> Result<RopeScaling> {
    let factor = stretch(original)?;
    let attention = if factor > 1.0 { (1.0 + factor.ln() / original.ln()).sqrt() } else { 1.0 };
    Ok(RopeScaling::Long {
        short: divisors(parameters, "short_factor")?,
        long: divisors(parameters, "long_factor")?,
        original: original as usize,
        attention: number("attention_factor", Some(attention))?,
    })
}

/// Reads a list of divisors.
fn divisors(parameters: &Value, key: &str) -> Result<Vec<f64>> {
    let wrong = |found: &Value| {
        ModelError::Config(format!("{key} of the rope has {found}, expected a list of numbers above 0"))
    };
    let list = parameters[key].as_array().ok_or_else(|| wrong(&parameters[key]))?;
    let sound = |x: &Value| x.as_f64().filter(|x| x.is_finite() && *x > 0.0).ok_or_else(|| wrong(x));
    list.iter().map(sound).collect()
}

/// The frequencies between which YaRN's ramp lies, from these numbers of turns in the original context.
fn ramp(theta: f64, rotary: usize, turns: Range<f64>, original: f64, whole: bool) -> Range<f64> {
    let frequency_of = |turns: f64| rotary as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut from, mut to) = (frequency_of(turns.start), frequency_of(turns.end));
    if whole {
        (from, to) = (from.floor(), to.ceil());
    }
    let last = rotary as f64 - 1.0;
    let (from, to) = (from.max(0.0), to.min(last));
    // The reference avoids an empty ramp in the same way.
    from..if from == to { to + 0.001 } else { to }
}

/// The rope parameters of a layer type: nested under its name, common to all types, or the older `rope_scaling`.
pub(crate) fn parameters<'a>(fields: &'a Fields<'_>, layer_type: &str) -> Option<&'a Value> {
    let found = fields.get("rope_parameters").or_else(|| fields.get("rope_scaling"))?;
    Some(found.get(layer_type).unwrap_or(found))
}

/// Whether the rope parameters are nested under the names of layer types.
pub(crate) fn is_by_layer_type(fields: &Fields<'_>) -> bool {
    let nested =
        |p: &Value| p.get("full_attention").or(p.get("sliding_attention")).is_some_and(Value::is_object);
    fields.get("rope_parameters").or_else(|| fields.get("rope_scaling")).is_some_and(nested)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn contexts(whole: usize) -> Contexts {
        Contexts { whole, original: whole }
    }

    fn frequencies(parameters: Value, theta: f64) -> Vec<f32> {
        RopeScaling::from_json(&parameters, contexts(4096)).expect("sound").inverse_frequencies(theta, 16)
    }

    fn close(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got / want - 1.0).abs() < 2e-6, "frequency {i}: {got}, expected {want}");
        }
    }

    /// Values of transformers 5.17 (`ROPE_INIT_FUNCTIONS`), head size 16.
    #[test]
    fn frequencies_are_those_of_the_reference() {
        let plain = [
            1.0,
            0.193_922_74,
            0.037_606_03,
            0.007_292_665,
            0.001_414_213_5,
            0.000_274_248_2,
            0.000_053_182_957,
            0.000_010_313_385,
        ];
        close(&frequencies(json!({"rope_type": "default"}), 500_000.0), &plain);
        let halved: Vec<f32> = plain.iter().map(|f| f / 8.0).collect();
        close(&frequencies(json!({"rope_type": "linear", "factor": 8.0}), 500_000.0), &halved);
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192});
        let got = frequencies(llama3, 500_000.0);
        close(&got[..4], &plain[..4]);
        // 8192 positions are 1.84 turns of frequency 4, so 0.281 of it is kept.
        close(&got[4..5], &[0.000_524_846_2]);
        close(&got[5..], &halved[5..]);
    }

    #[test]
    fn yarn_keeps_fast_turns_and_divides_slow_ones() {
        let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096});
        let scaling = RopeScaling::from_json(&yarn, contexts(32768)).expect("sound");
        assert!((scaling.attention_factor() - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
        let (got, plain) =
            (scaling.inverse_frequencies(10_000.0, 16), RopeScaling::None.inverse_frequencies(10_000.0, 16));
        // The ramp runs from floor(2.62) to ceil(5.63).
        close(&got[..3], &plain[..3]);
        close(&got[3..6], &[plain[3] * 0.8125, plain[4] * 0.625, plain[5] * 0.4375]);
        close(&got[6..], &[plain[6] / 4.0, plain[7] / 4.0]);
    }

    /// Phi-4-mini's numbers, except for the lists.
    #[test]
    fn longrope_has_two_lists_and_a_factor_that_follows_from_the_contexts() {
        let contexts = Contexts { whole: 131_072, original: 4096 };
        for kind in ["longrope", "su", "yarn"] {
            let json = json!({"type": kind, "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]});
            let scaling = RopeScaling::from_json(&json, contexts).expect("sound");
            assert!((scaling.attention_factor() - (1.0 + 32f64.ln() / 4096f64.ln()).sqrt()).abs() < 1e-12);
            close(&scaling.inverse_frequencies(10_000.0, 4), &[1.0, 0.005]);
            let long = scaling.of_long_sequences().expect("it has two lists");
            assert_eq!(scaling.short_context(), Some(4096));
            close(&long.inverse_frequencies(10_000.0, 4), &[0.25, 0.001_25]);
        }
        let own =
            json!({"type": "longrope", "short_factor": [1], "long_factor": [1], "attention_factor": 1.5});
        assert_eq!(RopeScaling::from_json(&own, contexts).expect("sound").attention_factor(), 1.5);
    }

    #[test]
    fn yarn_takes_its_factor_from_the_contexts_and_leaves_scores_where_its_scales_are_equal() {
        let yarn = json!({"rope_type": "yarn", "original_max_position_embeddings": 1024, "mscale": 1.0,
            "mscale_all_dim": 1.0});
        let scaling = RopeScaling::from_json(&yarn, contexts(4096)).expect("sound");
        assert!(matches!(scaling, RopeScaling::Yarn { factor: 4.0, attention: 1.0, .. }), "{scaling:?}");
    }

    #[test]
    fn a_number_that_is_missing_or_unsound_is_named() {
        for (parameters, key) in [
            (json!({"rope_type": "linear"}), "factor"),
            (json!({"rope_type": "yarn", "factor": -1.0}), "factor"),
            (json!({"type": "llama3", "factor": 8, "low_freq_factor": "x"}), "low_freq_factor"),
            (json!({"rope_type": "longrope"}), "short_factor of the rope has null"),
            (
                json!({"rope_type": "longrope", "short_factor": [1], "long_factor": [0]}),
                "long_factor of the rope has 0",
            ),
            (json!({"rope_type": "divisors", "divisors": [1.5, null]}), "divisors of the rope has null"),
            (json!({"rope_type": "divisors", "divisors": [1.5, -2.0]}), "divisors of the rope has -2.0"),
            (json!({"rope_type": "divisors"}), "divisors of the rope has null"),
            (json!({"rope_type": "dynamic"}), "dynamic"),
        ] {
            let message = RopeScaling::from_json(&parameters, contexts(64)).expect_err("unsound").to_string();
            assert!(message.contains(key), "{message}");
        }
    }
}

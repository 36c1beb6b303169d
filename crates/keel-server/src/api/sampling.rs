//! The sampling fields that all APIs share.

use std::collections::BTreeMap;

use keel_engine::{Sampler, SamplerOptions};
use keel_text::GenerationDefaults;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::api::field_names::read;
use crate::api::numbers::{Real, number, whole_number};
use crate::error::{Result, wrong};

/// The sampling fields of a request.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct SamplingFields {
    #[serde(default, deserialize_with = "number")]
    pub temperature: Option<f32>,
    #[serde(default, deserialize_with = "number")]
    pub top_p: Option<f32>,
    #[serde(default, deserialize_with = "whole_number")]
    pub top_k: Option<i64>,
    #[serde(default, deserialize_with = "number")]
    pub min_p: Option<f32>,
    #[serde(default, deserialize_with = "whole_number")]
    pub seed: Option<i64>,
    #[serde(default, deserialize_with = "number")]
    pub presence_penalty: Option<f32>,
    #[serde(default, deserialize_with = "number")]
    pub frequency_penalty: Option<f32>,
    #[serde(default, deserialize_with = "number")]
    pub repetition_penalty: Option<f32>,
    pub logit_bias: Option<BTreeMap<String, Real>>,
    pub ignore_eos: Option<bool>,
}

/// One string or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "stop is a text or a list of texts")]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub fn into_vec(self) -> Vec<String> {
        match self {
            OneOrMany::One(text) => vec![text],
            OneOrMany::Many(texts) => texts,
        }
    }
}

impl SamplingFields {
    /// Those of all fields of a body that its endpoint does not read itself.
    ///
    /// # Errors
    /// A field of a wrong type.
    pub fn of(fields: Map<String, Value>) -> Result<SamplingFields> {
        read(fields)
    }

    /// The sampler's options. The model's recommendations apply where the request has no value.
    pub fn options(&self, defaults: &GenerationDefaults, vocab: usize) -> Result<SamplerOptions> {
        let own = defaults.recommended();
        let options = SamplerOptions {
            temperature: self.temperature.unwrap_or(own.temperature),
            // Some clients send -1 for "all".
            top_k: self.top_k.map_or(own.top_k, |k| k.max(0) as usize),
            top_p: self.top_p.unwrap_or(own.top_p),
            min_p: self.min_p.unwrap_or(own.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(own.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            logit_bias: self.biases(vocab)?,
            seed: 0,
        };
        within("temperature", options.temperature, 0.0, 2.0)?;
        within("top_p", options.top_p, 0.0, 1.0)?;
        within("min_p", options.min_p, 0.0, 1.0)?;
        within("repetition_penalty", options.repetition_penalty, 0.01, 100.0)?;
        within("presence_penalty", options.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", options.frequency_penalty, -2.0, 2.0)?;
        let options = SamplerOptions { top_p: options.top_p.max(f32::MIN_POSITIVE), ..options };
        Sampler::new(options.clone(), &[])?;
        Ok(options)
    }

    /// The seed; `None` if each request has one of its own. Some clients send -1 for that.
    pub fn seed(&self) -> Option<u64> {
        self.seed.filter(|&seed| seed != -1).map(|seed| seed as u64)
    }

    fn biases(&self, vocab: usize) -> Result<Vec<(u32, f32)>> {
        let bias = |(id, &Real(bias)): (&String, &Real)| {
            let id = id.parse::<u32>().ok().filter(|&id| (id as usize) < vocab);
            let id = id.ok_or_else(|| wrong("logit_bias", format!("keys are token ids below {vocab}")))?;
            within("logit_bias", bias, -100.0, 100.0)?;
            Ok((id, bias))
        };
        self.logit_bias.iter().flatten().map(bias).collect()
    }
}

fn within(field: &'static str, value: f32, low: f32, high: f32) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(wrong(field, format!("{value}, expected {low} to {high}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(json: Value) -> Result<SamplerOptions> {
        let fields: SamplingFields = serde_json::from_value(json).expect("the types are right");
        let defaults = GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.7),
            top_k: Some(40),
            ..GenerationDefaults::default()
        };
        fields.options(&defaults, 100)
    }

    #[test]
    fn the_model_recommends_and_the_request_decides() {
        let o = options(serde_json::json!({})).expect("in range");
        assert_eq!((o.temperature, o.top_k, o.top_p), (0.7, 40, 1.0));
        let o = options(
            serde_json::json!({"temperature": 0, "top_k": -1, "top_p": 0, "logit_bias": {"7": -100}}),
        )
        .expect("in range");
        assert_eq!((o.temperature, o.top_k, o.logit_bias), (0.0, 0, vec![(7, -100.0)]));
    }

    #[test]
    fn a_seed_of_minus_one_is_none() {
        for (given, seed) in [(-1, None), (-2, Some(u64::MAX - 1)), (7, Some(7))] {
            let fields = SamplingFields { seed: Some(given), ..SamplingFields::default() };
            assert_eq!(fields.seed(), seed, "{given}");
        }
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        for (json, field) in [
            (serde_json::json!({"temperature": 2.5}), "temperature"),
            (serde_json::json!({"top_p": 1.5}), "top_p"),
            (serde_json::json!({"min_p": 2}), "min_p"),
            (serde_json::json!({"repetition_penalty": 0}), "repetition_penalty"),
            (serde_json::json!({"presence_penalty": -3}), "presence_penalty"),
            (serde_json::json!({"logit_bias": {"100": 1}}), "logit_bias"),
            (serde_json::json!({"logit_bias": {"x": 1}}), "logit_bias"),
        ] {
            assert_eq!(options(json).expect_err("out of range").field(), Some(field));
        }
    }
}

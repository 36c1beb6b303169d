//! Looks up keys of a config.

use serde_json::Value;

use crate::{ModelError, Result};

/// The text part of a config; the top level for keys that exist only there.
pub(crate) struct Fields<'a> {
    text: &'a Value,
    top: &'a Value,
}

impl<'a> Fields<'a> {
    pub fn new(config: &'a Value) -> Fields<'a> {
        let text = if config["text_config"].is_object() { &config["text_config"] } else { config };
        Fields { text, top: config }
    }

    /// `model_type` at the top level.
    pub fn model_type(&self) -> String {
        self.top["model_type"].as_str().unwrap_or_default().to_string()
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        [self.text, self.top].into_iter().filter_map(|v| v.get(key)).find(|v| !v.is_null())
    }

    /// Whether the text part has the key, possibly with the value null.
    pub fn is_mentioned(&self, key: &str) -> bool {
        self.text.get(key).is_some()
    }

    pub fn size(&self, key: &str) -> Result<usize> {
        let value = self.get(key).ok_or_else(|| ModelError::Config(format!("{key} is missing")))?;
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
        number.ok_or_else(|| ModelError::Config(format!("{key} is {value}, expected a whole number")))
    }

    pub fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    /// A number that is 0 where there is nothing of the kind.
    pub fn size_if_any(&self, key: &str) -> Result<Option<usize>> {
        Ok(Some(self.size_or(key, 0)?).filter(|n| *n > 0))
    }

    pub fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| ModelError::Config(format!("{key} is {value}, expected a number")))
    }

    pub fn flag(&self, key: &str) -> bool {
        self.flag_or(key, false)
    }

    pub fn flag_or(&self, key: &str, default: bool) -> bool {
        self.get(key).and_then(Value::as_bool).unwrap_or(default)
    }

    /// A rope number from `rope_parameters` (or `rope_scaling`), or from a key next to the others.
    pub fn rope(&self, key: &str, default: f64) -> Result<f64> {
        let nested = ["rope_parameters", "rope_scaling"].iter().find_map(|k| self.get(k)?.get(key));
        match nested.filter(|value| !value.is_null()) {
            Some(value) => value
                .as_f64()
                .ok_or_else(|| ModelError::Config(format!("{key} is {value}, expected a number"))),
            None => self.number_or(key, default),
        }
    }
}

//! Reads the keys of a processor file.

use serde_json::Value;

use crate::{Result, VisionError};

/// A processor file, or a part of one.
pub(crate) struct Fields<'a> {
    pub file: &'a str,
    pub json: &'a Value,
}

impl Fields<'_> {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    pub fn error(&self, reason: impl Into<String>) -> VisionError {
        VisionError::Processor { file: self.file.into(), reason: reason.into() }
    }

    /// A count or a length of at least 1.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        self.size(key).map(|found| found.unwrap_or(default))
    }

    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        self.get(key).map(|value| self.whole(key, value)).transpose()
    }

    /// A value that must be a whole number from 1 to 2^32.
    pub fn whole(&self, key: &str, value: &Value) -> Result<usize> {
        // Some files contain whole numbers as floats.
        let number = value
            .as_u64()
            .or_else(|| value.as_f64().filter(|x| x.fract() == 0.0 && *x > 0.0).map(|x| x as u64));
        match number.filter(|n| (1..=1 << 32).contains(n)) {
            Some(n) => Ok(n as usize),
            None => Err(self.error(format!("{key} is {value}, expected a whole number above 0"))),
        }
    }

    /// As [`Fields::whole`], of at most `most`.
    pub fn whole_to(&self, key: &str, value: &Value, most: usize) -> Result<usize> {
        match self.whole(key, value)? {
            n if n <= most => Ok(n),
            n => Err(self.error(format!("{key} is {n}, expected at most {most}"))),
        }
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|x| x.is_finite() && *x > 0.0) {
            Some(number) => Ok(Some(number)),
            None => Err(self.error(format!("{key} is {value}, expected a number above 0"))),
        }
    }

    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.error(format!("{key} is {value}, expected true or false")))
    }

    pub fn triple_or(&self, key: &str, default: [f64; 3]) -> Result<[f64; 3]> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let wrong = || self.error(format!("{key} is {value}, expected three numbers"));
        if let Some(same) = value.as_f64() {
            return Ok([same; 3]);
        }
        let list: Option<Vec<f64>> = value.as_array().and_then(|a| a.iter().map(Value::as_f64).collect());
        list.and_then(|list| list.try_into().ok()).ok_or_else(wrong)
    }
}

//! Reads values of JSON objects one by one, with errors that name file, field and value.

use serde_json::{Map, Value};

use crate::{TextError, TextFile};

/// A JSON object and the name of its file.
pub(crate) struct Object<'a> {
    file: &'a str,
    /// `""` at the top level, else a path ending in a dot.
    path: &'static str,
    map: Map<String, Value>,
}

impl<'a> Object<'a> {
    /// Parses a file that must hold one object.
    pub(crate) fn parse(file: &'a TextFile<'_>) -> Result<Self, TextError> {
        let map = serde_json::from_slice(&file.bytes)
            .map_err(|source| TextError::Json { file: file.name.clone(), source })?;
        Ok(Object { file: &file.name, path: "", map })
    }

    /// The object under `key`, if there is one. `prefix` is `key` with a dot.
    pub(crate) fn child(&self, key: &str, prefix: &'static str) -> Result<Option<Object<'a>>, TextError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Object { file: self.file, path: prefix, map: map.clone() })),
            Some(other) => Err(self.wrong(key, other, "an object")),
        }
    }

    /// The value under `key`. `null` counts as absent, as it does in the tools that write these files.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, TextError> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// A number for which `accept` holds; `expected` describes the accepted numbers.
    pub(crate) fn f32(
        &self,
        key: &str,
        expected: &'static str,
        accept: impl Fn(f32) -> bool,
    ) -> Result<Option<f32>, TextError> {
        self.read(key, expected, |value| {
            value.as_f64().map(|x| x as f32).filter(|&x| x.is_finite() && accept(x))
        })
    }

    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, TextError> {
        self.read(key, "a whole number from 0 to 4294967295", as_u32)
    }

    /// One token id or a list of them; empty if absent.
    pub(crate) fn ids(&self, key: &str) -> Result<Vec<u32>, TextError> {
        let parse = |value: &Value| match value {
            Value::Array(items) => items.iter().map(as_u32).collect::<Option<Vec<u32>>>(),
            one => as_u32(one).map(|id| vec![id]),
        };
        Ok(self.read(key, "a token id or a list of token ids", parse)?.unwrap_or_default())
    }

    /// The error for a value that does not match `expected`.
    pub(crate) fn wrong(&self, key: &str, found: &Value, expected: &'static str) -> TextError {
        let field = format!("{}{key}", self.path);
        TextError::Field { file: self.file.to_string(), field, found: shortened(found), expected }
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &'static str,
        parse: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, TextError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        parse(value).map(Some).ok_or_else(|| self.wrong(key, value, expected))
    }
}

fn as_u32(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn shortened(value: &Value) -> String {
    const SHOWN_CHARS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

//! The names of fields in errors. Code that all endpoints share does not know how the endpoint calls its prompt.

use std::borrow::Cow;
use std::fmt;

use axum::response::{IntoResponse, Response};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use serde_path_to_error::Segment;

use crate::error::{Result, ServerError, wrong};
use crate::http::body::error_json;

/// An error of an endpoint, in OpenAI's form. Its `param` is the endpoint's own name of the field.
#[derive(Debug)]
pub(crate) struct EndpointError {
    error: ServerError,
    /// The field with the prompt.
    prompt: &'static str,
}

/// Makes errors of the endpoint whose prompt is in the field `prompt`.
pub(crate) fn about(prompt: &'static str) -> impl Fn(ServerError) -> EndpointError {
    move |error| EndpointError { error, prompt }
}

impl EndpointError {
    fn param(&self) -> Option<&str> {
        self.error.field().or_else(|| self.error.is_of_prompt().then_some(self.prompt))
    }
}

impl IntoResponse for EndpointError {
    fn into_response(self) -> Response {
        let mut body = error_json(&self.error);
        body["error"]["param"] = json!(self.param());
        self.error.response_with(body)
    }
}

/// The error with the endpoint's own name of a field. `names` has pairs of the name in a chat and the own name.
pub(crate) fn renamed(error: ServerError, names: &[(&str, &'static str)]) -> ServerError {
    match error {
        ServerError::Field { field, problem } => {
            let own = names.iter().find(|(chat, _)| *chat == field);
            ServerError::Field { field: own.map_or(field, |&(_, own)| Cow::from(own)), problem }
        }
        error => error,
    }
}

/// Reads a value. An error names the outermost field that is wrong. Only that of a field that is given twice may be a
/// name of the client's own, because values of unknown fields are kept as they are.
///
/// # Errors
/// The field, or [`ServerError::Body`] if the value as a whole is of a wrong type.
pub(crate) fn read<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<T> {
    serde_path_to_error::deserialize(from).map_err(|error| {
        let problem = error.inner().to_string();
        let field = match error.path().iter().next() {
            Some(Segment::Map { key }) => Some(key.clone()),
            _ => missing_or_twice(&problem),
        };
        match field {
            Some(field) => wrong(field, problem),
            None => ServerError::Body(problem),
        }
    })
}

/// The field in serde's message about one that is missing or comes twice. Such an error has no path.
fn missing_or_twice(problem: &str) -> Option<String> {
    let rest =
        ["missing field `", "duplicate field `"].iter().find_map(|begin| problem.strip_prefix(begin))?;
    // A name of the client's own may contain this character.
    Some(rest.rsplit_once('`')?.0.to_string())
}

/// Most bytes of a field's name in an error. No API has a longer one, so a longer one is cut.
const NAME_BYTES_MAX: usize = 64;

/// Reads the fields of a body or of a message that its type does not declare, such as those of sampling.
///
/// # Errors
/// A field that is given twice, because one of its values would be ignored in silence.
pub(crate) fn other_fields<'de, D: Deserializer<'de>>(from: D) -> Result<Map<String, Value>, D::Error> {
    from.deserialize_map(OtherFields)
}

struct OtherFields;

impl<'de> Visitor<'de> for OtherFields {
    type Value = Map<String, Value>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("fields")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Map<String, Value>, A::Error> {
        let mut fields = Map::new();
        while let Some((name, value)) = access.next_entry::<String, Value>()? {
            if fields.contains_key(&name) {
                let mut end = name.len().min(NAME_BYTES_MAX);
                while !name.is_char_boundary(end) {
                    end -= 1;
                }
                // The same message as that about a declared field.
                return Err(A::Error::custom(format!("duplicate field `{}`", &name[..end])));
            }
            fields.insert(name, value);
        }
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use keel_engine::EngineError;
    use keel_text::TextError;

    use super::*;

    #[test]
    fn an_error_names_the_field_as_its_endpoint_does() {
        let context = || ServerError::from(EngineError::Context { needed: 9, context: 4 });
        let stop = TextError::StopString { index: 1, count: 1, reason: "it is empty".into() };
        for (error, param) in [
            (context(), Some("input")),
            (EngineError::EmptyPrompt.into(), Some("input")),
            (
                ServerError::TextTooLong { bytes: 9, bytes_most: 4, tokens: 9, context: 4, context_max: 4 },
                Some("input"),
            ),
            (ServerError::PromptTooLong { prompt: 9, context: 4, context_max: 4 }, Some("input")),
            (stop.into(), Some("stop")),
            (ServerError::UnknownModel { asked: "a".into(), served: "b is".into() }, Some("model")),
            (wrong("top_p", "2, expected 0 to 1"), Some("top_p")),
            (EngineError::Deadline.into(), None),
        ] {
            assert_eq!(about("input")(error).param(), param);
        }
        let own = [("messages", "input"), ("response_format", "text.format")];
        for (chat, own_name) in
            [("messages", "input"), ("response_format", "text.format"), ("tools", "tools")]
        {
            assert_eq!(renamed(wrong(chat, "x"), &own).field(), Some(own_name));
        }
        assert_eq!(renamed(context(), &own).reply(), context().reply());
    }
}

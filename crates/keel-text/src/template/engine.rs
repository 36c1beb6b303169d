//! The template engine, configured like that of the reference implementation.

use std::error::Error as StdError;
use std::fmt;
use std::time::SystemTime;

use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use super::{builtins, limits, python, time, tojson};

/// Creates an environment with the functions and filters that checkpoints' templates expect.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(|out, _state, value| match value.as_str() {
        Some(text) => Ok(out.write_str(text)?),
        None => Ok(out.write_str(&python::text(value)?)?),
    });
    limits::apply(&mut environment);
    builtins::apply(&mut environment);
    environment.add_filter("tojson", tojson::tojson);
    environment.add_filter("string", |value: &Value| python::text(value));
    environment.add_function("raise_exception", raise_exception);
    environment
}

/// The function `strftime_now(format)` for a rendering at time `now`.
pub(super) fn strftime_at(now: SystemTime) -> Value {
    Value::from_function(move |format: &str| {
        time::strftime(now, format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
    })
}

/// The message of `raise_exception`, if it ended the rendering.
pub(super) fn raised(err: &Error) -> Option<String> {
    let mut source = err.source();
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return Some(message.clone());
        }
        source = cause.source();
    }
    None
}

#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Raised {}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template")
        .with_source(Raised(python::text(message)?)))
}

//! The errors of requests, and the one table of their HTTP statuses.

use std::borrow::Cow;

use axum::http::StatusCode;
use keel_engine::EngineError;
use keel_text::TextError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The engine refuses the request, or fails at it.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The tokenizer or the chat template refuses the text.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The body does not match the endpoint.
    #[error("the body is not a request of this kind: {0}")]
    Body(String),
    /// A field has a wrong value.
    #[error("{field}: {problem}")]
    Field {
        /// The field.
        field: Cow<'static, str>,
        /// The defect, and the accepted values.
        problem: String,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "This model's maximum context length is {context} tokens here, for prompt and answer together; the prompt has {prompt} \
         tokens: {}", shorter_prompt(*prompt, *context, *context_max)
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Limit on the tokens of prompt and answer together.
        context: usize,
        /// The model's own limit.
        context_max: usize,
    },
    /// A text is surely too long, by its bytes alone. It has not been made into tokens.
    #[error(
        "This model's maximum context length is {context} tokens here, for prompt and answer together; the text has {bytes} \
         bytes, which are at least {tokens} tokens: {}", shorter_text(*bytes_most, *context, *context_max)
    )]
    TextTooLong {
        /// Bytes of the text.
        bytes: usize,
        /// The most bytes of a text that could fit.
        bytes_most: usize,
        /// The fewest tokens that the text can have.
        tokens: usize,
        /// Limit on the tokens of prompt and answer together.
        context: usize,
        /// The model's own limit.
        context_max: usize,
    },
    /// The requested model is not served here.
    #[error("the model {asked:?} is not served here; {served}")]
    UnknownModel {
        /// The requested model.
        asked: String,
        /// The served models, and a verb.
        served: String,
    },
    /// A model that is served cannot be loaded.
    #[error("the model {id:?} cannot be loaded: {reason}")]
    ModelLoad {
        /// The model.
        id: String,
        /// Why.
        reason: String,
    },
    /// A model is not loaded yet. Loading goes on.
    #[error("the model {id:?} is not loaded yet after {seconds} s; loading goes on, try again")]
    ModelLoading {
        /// The model.
        id: String,
        /// How long the request has waited.
        seconds: f64,
    },
    /// No such endpoint.
    #[error(
        "there is no {method} {path} here; /openapi.json lists the endpoints. The base URL of OpenAI's clients ends in /v1, that \
         of Anthropic's does not, and Ollama's /api is not served"
    )]
    UnknownEndpoint {
        /// The method.
        method: String,
        /// The path.
        path: String,
    },
    /// The key is missing or wrong.
    #[error("a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")]
    Unauthorized,
    /// The server does not answer for this host. The page of another site may have pointed its own name to the server's
    /// address.
    #[error("the host name {host:?} is not allowed; start the server with --allow-host NAME to allow it")]
    ForeignHost {
        /// The host in the request.
        host: String,
    },
    /// The request is from a page of another site.
    #[error("pages of {origin:?} may not call this server; start it with --cors ORIGIN to allow them")]
    ForeignOrigin {
        /// The origin in the request.
        origin: String,
    },
    /// The body is not declared as JSON.
    #[error("the body is {found:?}; send it with content-type: application/json")]
    MediaType {
        /// The declared type.
        found: String,
    },
    /// The key has exceeded its requests per minute.
    #[error("this key allows {limit} requests per minute; try again in {seconds} s")]
    KeyRate {
        /// Allowed requests per minute.
        limit: u32,
        /// Seconds until the next request is allowed.
        seconds: u32,
    },
    /// The key has too many requests in progress.
    #[error("this key allows {limit} requests at once; wait until one has ended")]
    KeyBusy {
        /// Allowed requests at once.
        limit: u32,
    },
    /// A setting of the server is not valid.
    #[error("{what}: {problem}")]
    Setting {
        /// The setting.
        what: &'static str,
        /// The defect.
        problem: String,
    },
    /// The endpoint has other methods.
    #[error("{path} does not accept {method}; the header allow lists the methods that it accepts")]
    Method {
        /// The method.
        method: String,
        /// The path.
        path: String,
    },
    /// The body exceeds the limit.
    #[error("the body is larger than {limit} bytes")]
    BodyTooLarge {
        /// Bytes accepted.
        limit: usize,
    },
    /// The body is compressed.
    #[error("the body is encoded as {found}; send it as it is, without content-encoding")]
    BodyEncoding {
        /// The declared codings.
        found: String,
    },
    /// The body ended too early.
    #[error("the body is not complete: {0}")]
    IncompleteBody(String),
    /// Other requests use the memory of requests.
    #[error(
        "{used} of {limit} bytes for requests are in use, and this request needs {needed} more; try again later"
    )]
    RequestMemory {
        /// Bytes that the request needs.
        needed: u64,
        /// Bytes in use.
        used: u64,
        /// Budget for requests of this size.
        limit: u64,
    },
    /// The request needs more than the whole budget.
    #[error(
        "the request needs {needed} bytes, but all requests together have {limit}; make it smaller, or start the server with a \
         larger --request-memory"
    )]
    RequestTooLarge {
        /// Bytes that the request needs.
        needed: u64,
        /// Budget for requests of this size.
        limit: u64,
    },
    /// The grammar takes too long to compile.
    #[error("the schema or grammar was not ready after {seconds} s; make it smaller")]
    GrammarTime {
        /// The time limit.
        seconds: f64,
    },
    /// The server is shutting down.
    #[error("the server is shutting down; use another server, or try again later")]
    Draining,
    /// Too many requests are being received.
    #[error("too many requests at once; try again later")]
    Busy,
    /// The engine's thread has ended.
    #[error("the engine has stopped; try again later, and see the server's log if this lasts")]
    EngineStopped,
    /// The engine has failed for good, and no other can be loaded in its place. The server has ended because of it.
    #[error("the engine has stopped for good, and the server with it")]
    EngineLost {
        /// The failure. `None` after a panic of the engine's thread, which printed its own message.
        source: Option<Box<EngineError>>,
    },
    /// The server cannot listen on the address.
    #[error("cannot listen on {address}: {reason}{}", another_port(.reason))]
    Listen {
        /// The address.
        address: String,
        /// The system's reason. It is a part of the message.
        reason: std::io::Error,
    },
    /// The operating system reported an error.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Result of this crate.
pub type Result<T, E = ServerError> = std::result::Result<T, E>;

/// The HTTP form of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status.
    pub status: StatusCode,
    /// OpenAI's `error.type`.
    pub kind: &'static str,
    /// OpenAI's `error.code`.
    pub code: &'static str,
    /// Seconds after which a new try is useful.
    pub retry_after: Option<u32>,
    /// Whether a new try at once is known to be useless. Clients repeat each 5xx otherwise.
    pub is_final: bool,
}

const fn reply(status: StatusCode, kind: &'static str, code: &'static str) -> Reply {
    Reply { status, kind, code, retry_after: None, is_final: false }
}

const fn later(status: StatusCode, kind: &'static str, code: &'static str, seconds: u32) -> Reply {
    Reply { status, kind, code, retry_after: Some(seconds), is_final: false }
}

/// The advice for a prompt that is too long.
fn shorter_prompt(prompt: usize, context: usize, context_max: usize) -> String {
    let longer = longer_context(prompt, context, context_max);
    format!("shorten the conversation by at least {} tokens{longer}", prompt + 1 - context)
}

/// The advice for a text that is too long.
fn shorter_text(bytes_most: usize, context: usize, context_max: usize) -> String {
    let longer = longer_context(context_max, context, context_max);
    format!("a text of more than {bytes_most} bytes never fits{longer}")
}

/// The advice for a request that the engine found too long.
const SHORTER_REQUEST: &str = "shorten the prompt, or start the server with a larger --context";

/// The end of advice: a longer context, if the model has one.
fn longer_context(prompt: usize, context: usize, context_max: usize) -> String {
    if prompt < context_max {
        format!(", or start the server with --context {} or more", prompt + 1)
    } else if context < context_max {
        format!("; this model takes at most {context_max}, with --context {context_max}")
    } else {
        "; it is the longest that this model takes".into()
    }
}

/// The end of advice: another port, if a program has this one.
fn another_port(reason: &std::io::Error) -> &'static str {
    if reason.kind() == std::io::ErrorKind::AddrInUse {
        "; another program listens there: choose another port with --port"
    } else {
        ""
    }
}

impl ServerError {
    /// The table of all errors and their statuses.
    pub fn reply(&self) -> Reply {
        use StatusCode as S;
        const INVALID: &str = "invalid_request_error";
        const OURS: &str = "server_error";
        match self {
            ServerError::Engine(error) => match error {
                EngineError::Context { .. } => reply(S::BAD_REQUEST, INVALID, "context_length_exceeded"),
                EngineError::NeverFits { .. } => reply(S::BAD_REQUEST, INVALID, "memory_exceeded"),
                EngineError::EmptyPrompt => reply(S::BAD_REQUEST, INVALID, "empty_prompt"),
                EngineError::TokenId { .. } | EngineError::Option(_) => {
                    reply(S::BAD_REQUEST, INVALID, "invalid_value")
                }
                EngineError::Constraint(_) => reply(S::BAD_REQUEST, INVALID, "invalid_grammar"),
                EngineError::NoVisionTower
                | EngineError::PicturePatches { .. }
                | EngineError::PicturesNeverFit { .. } => reply(S::BAD_REQUEST, INVALID, "invalid_image"),
                EngineError::QueueFull { .. } => {
                    later(S::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", 1)
                }
                EngineError::QueueTimeout { .. } => later(S::SERVICE_UNAVAILABLE, OURS, "queue_timeout", 5),
                EngineError::Deadline => {
                    Reply { is_final: true, ..reply(S::GATEWAY_TIMEOUT, OURS, "deadline_exceeded") }
                }
                // The fault may pass, and a stopped engine may be loaded again. So a new try may succeed.
                _ => reply(S::INTERNAL_SERVER_ERROR, OURS, "engine_failure"),
            },
            ServerError::Text(error) => match error {
                TextError::Refused { .. } | TextError::Template { .. } => {
                    reply(S::BAD_REQUEST, INVALID, "chat_template")
                }
                TextError::Grammar { .. } => reply(S::BAD_REQUEST, INVALID, "invalid_grammar"),
                // No client is left to receive this.
                TextError::Cancelled => reply(S::SERVICE_UNAVAILABLE, OURS, "cancelled"),
                TextError::StopString { .. } | TextError::Tokenize { .. } => {
                    reply(S::BAD_REQUEST, INVALID, "invalid_value")
                }
                _ => reply(S::INTERNAL_SERVER_ERROR, OURS, "text_failure"),
            },
            ServerError::PromptTooLong { .. } | ServerError::TextTooLong { .. } => {
                reply(S::BAD_REQUEST, INVALID, "context_length_exceeded")
            }
            ServerError::Body(_) => reply(S::BAD_REQUEST, INVALID, "invalid_body"),
            ServerError::Field { .. } => reply(S::BAD_REQUEST, INVALID, "invalid_value"),
            ServerError::UnknownModel { .. } => reply(S::NOT_FOUND, INVALID, "model_not_found"),
            ServerError::ModelLoad { .. } => reply(S::INTERNAL_SERVER_ERROR, OURS, "model_load_failure"),
            ServerError::ModelLoading { .. } => later(S::SERVICE_UNAVAILABLE, OURS, "model_loading", 5),
            ServerError::UnknownEndpoint { .. } => reply(S::NOT_FOUND, INVALID, "unknown_url"),
            ServerError::Unauthorized => reply(S::UNAUTHORIZED, INVALID, "invalid_api_key"),
            ServerError::ForeignHost { .. } => reply(S::FORBIDDEN, INVALID, "host_not_allowed"),
            ServerError::ForeignOrigin { .. } => reply(S::FORBIDDEN, INVALID, "origin_not_allowed"),
            ServerError::MediaType { .. } => {
                reply(S::UNSUPPORTED_MEDIA_TYPE, INVALID, "unsupported_media_type")
            }
            ServerError::KeyRate { seconds, .. } => {
                later(S::TOO_MANY_REQUESTS, "rate_limit_error", "key_rate_limit", *seconds)
            }
            ServerError::KeyBusy { .. } => later(S::TOO_MANY_REQUESTS, "rate_limit_error", "key_busy", 1),
            ServerError::Method { .. } => reply(S::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed"),
            ServerError::BodyTooLarge { .. } => reply(S::PAYLOAD_TOO_LARGE, INVALID, "body_too_large"),
            ServerError::BodyEncoding { .. } => {
                reply(S::UNSUPPORTED_MEDIA_TYPE, INVALID, "unsupported_encoding")
            }
            ServerError::IncompleteBody(_) => reply(S::BAD_REQUEST, INVALID, "incomplete_body"),
            ServerError::RequestMemory { .. } => later(S::SERVICE_UNAVAILABLE, OURS, "request_memory", 1),
            ServerError::RequestTooLarge { .. } => reply(S::PAYLOAD_TOO_LARGE, INVALID, "request_too_large"),
            ServerError::GrammarTime { .. } => reply(S::BAD_REQUEST, INVALID, "grammar_too_slow"),
            ServerError::Draining => later(S::SERVICE_UNAVAILABLE, OURS, "shutting_down", 10),
            ServerError::Busy => later(S::TOO_MANY_REQUESTS, "rate_limit_error", "too_many_requests", 1),
            // The model is loaded again, or a supervisor starts the server again.
            ServerError::EngineStopped | ServerError::EngineLost { .. } => {
                later(S::SERVICE_UNAVAILABLE, OURS, "engine_stopped", 10)
            }
            ServerError::Listen { .. } | ServerError::Setting { .. } | ServerError::Io(_) => {
                reply(S::INTERNAL_SERVER_ERROR, OURS, "system_failure")
            }
        }
    }

    /// The message for the client. Details of internal failures go only to the log, because they may name files.
    pub fn public_message(&self) -> String {
        if self.reply().status == StatusCode::INTERNAL_SERVER_ERROR {
            return "the server failed at this request; its log says why".into();
        }
        match self {
            // The engine's own message, in the words by which clients recognise a full context.
            ServerError::Engine(EngineError::Context { needed, context }) => format!(
                "This model's maximum context length is {context} tokens here, for prompt and answer together; the request \
                 needs {needed}: {SHORTER_REQUEST}"
            ),
            _ => self.to_string(),
        }
    }

    /// The message for a client of Anthropic's API. These clients recognise a full context by other words, and some of
    /// them read both numbers.
    pub fn public_message_for_anthropic(&self) -> String {
        let (tokens, words, context, advice) = match self {
            ServerError::PromptTooLong { prompt, context, context_max } => {
                (*prompt, "", *context, shorter_prompt(*prompt, *context, *context_max))
            }
            ServerError::TextTooLong { tokens, bytes_most, context, context_max, .. } => {
                (*tokens, "at least ", *context, shorter_text(*bytes_most, *context, *context_max))
            }
            ServerError::Engine(EngineError::Context { needed, context }) => {
                (*needed, "", *context, SHORTER_REQUEST.into())
            }
            _ => return self.public_message(),
        };
        // A prompt as long as the context is too long, because an answer has at least one token.
        let maximum = context.min(tokens.saturating_sub(1));
        format!("prompt is too long: {words}{tokens} tokens > {maximum} maximum; {advice}")
    }

    /// The name of the field, if a field is wrong.
    pub fn field(&self) -> Option<&str> {
        match self {
            ServerError::Field { field, .. } => Some(field),
            ServerError::UnknownModel { .. } => Some("model"),
            ServerError::Text(TextError::StopString { .. }) => Some("stop"),
            _ => None,
        }
    }

    /// Whether the prompt is wrong. Each API has a name of its own for the field with the prompt.
    pub(crate) fn is_of_prompt(&self) -> bool {
        match self {
            ServerError::PromptTooLong { .. } | ServerError::TextTooLong { .. } => true,
            ServerError::Engine(error) => matches!(
                error,
                EngineError::Context { .. }
                    | EngineError::EmptyPrompt
                    | EngineError::TokenId { .. }
                    | EngineError::NoVisionTower
                    | EngineError::PicturePatches { .. }
                    | EngineError::PicturesNeverFit { .. }
            ),
            ServerError::Text(error) => matches!(
                error,
                TextError::Refused { .. } | TextError::Template { .. } | TextError::Tokenize { .. }
            ),
            _ => false,
        }
    }
}

/// The error for a field with a wrong value.
pub(crate) fn wrong(field: impl Into<Cow<'static, str>>, problem: impl Into<String>) -> ServerError {
    ServerError::Field { field: field.into(), problem: problem.into() }
}

/// The error for a setting with a wrong value.
pub(crate) fn setting(what: &'static str, problem: impl Into<String>) -> ServerError {
    ServerError::Setting { what, problem: problem.into() }
}

#[cfg(test)]
mod tests;

//! Refuses unsupported fields that would change the answer, because a silently different answer is worse than none.
//! Fields that change nothing, such as `user` or `metadata`, are ignored.
//!
//! Hints are accepted and ignored, too: clients send them whatever the model, and an answer without them is right.
//!
//! - `verbosity` of a chat, `text.verbosity` of a response: how long the answer should be.
//! - `thinking.budget_tokens` and `output_config.effort` of messages: how long the model should reason.
//! - `max_tool_calls` of a response: it counts calls of tools that the server runs, and this server runs none.

use serde_json::{Map, Value, json};

use crate::error::{Result, wrong};

/// Advice in the error messages.
const SCHEMA: &str =
    "is not understood; response_format takes a JSON schema, a grammar or a regular expression";
const TOOLS: &str = "is the old form; use tools and tool_choice";
const LENGTH: &str = "is not a field of this API; use max_tokens, in /v1/responses max_output_tokens";
const KWARGS: &str =
    "is not a field of this API; use chat_template_kwargs: {\"enable_thinking\": true} or false";
const THINKING: &str =
    "is not a field of this API; use thinking: {\"type\": \"enabled\"} or {\"type\": \"disabled\"}";
const SYSTEM: &str = "is not a field of this API; use a message with the role system";
const OF_A_CHAT: &str = "is a field of a chat; use /v1/chat/completions";
const BEFORE_PROMPT: &str =
    "is a field of a chat; begin the prompt with its text, or use /v1/chat/completions";
const OPTIONS: &str =
    "is not understood; give its fields in the body itself, and a limit of tokens instead of num_predict";
const NONE: &str = "is not supported here; leave it out";

/// A field, its values that change nothing, and the advice.
struct Unsupported {
    field: &'static str,
    neutral: fn() -> Value,
    advice: &'static str,
}

const fn never(field: &'static str) -> Unsupported {
    Unsupported { field, neutral: || json!([]), advice: NONE }
}

const fn unless(field: &'static str, neutral: fn() -> Value) -> Unsupported {
    Unsupported { field, neutral, advice: NONE }
}

const fn instead(field: &'static str, advice: &'static str) -> Unsupported {
    Unsupported { field, neutral: || json!([]), advice }
}

/// `neutral` lists the values without effect. Null and empty strings, lists and objects never have an effect.
const FIELDS: &[Unsupported] = &[
    never("lora"),
    never("lora_request"),
    never("lora_path"),
    never("adapter"),
    never("adapters"),
    never("suffix"),
    unless("modalities", || json!([["text"]])),
    never("audio"),
    never("web_search_options"),
    never("documents"),
    never("chat_template"),
    unless("continue_final_message", || json!([false])),
    unless("add_generation_prompt", || json!([true])),
    instead("functions", TOOLS),
    instead("function_call", TOOLS),
    instead("guided_json", SCHEMA),
    instead("guided_regex", SCHEMA),
    instead("guided_choice", SCHEMA),
    instead("guided_grammar", SCHEMA),
    instead("structured_outputs", SCHEMA),
    instead("json_schema", SCHEMA),
    instead("grammar", SCHEMA),
    instead("n_predict", LENGTH),
    instead("max_new_tokens", LENGTH),
    instead("num_predict", LENGTH),
    instead("max_length", LENGTH),
    Unsupported {
        neutral: || json!([1]),
        ..instead("repeat_penalty", "is not a field of this API; use repetition_penalty")
    },
    unless("min_tokens", || json!([0])),
    never("bad_words"),
    never("stop_token_ids"),
    never("allowed_token_ids"),
    never("logits_processors"),
    unless("mirostat", || json!([0])),
    unless("mirostat_mode", || json!([0])),
    unless("typical_p", || json!([0, 1])),
    unless("tfs_z", || json!([0, 1])),
    unless("top_a", || json!([0, 0.0])),
    unless("epsilon_cutoff", || json!([0, 0.0])),
    unless("dry_multiplier", || json!([0, 0.0])),
    unless("xtc_probability", || json!([0, 0.0])),
    unless("length_penalty", || json!([1])),
    unless("no_repeat_ngram_size", || json!([0])),
    unless("use_beam_search", || json!([false])),
    unless("num_beams", || json!([1])),
    never("truncate_prompt_tokens"),
    unless("prompt_logprobs", || json!([false])),
    unless("include_stop_str_in_output", || json!([false])),
    // The text of an answer has none.
    unless("skip_special_tokens", || json!([true])),
    // `/v1/completions` has it.
    unless("echo", || json!([false])),
    // From 0 down it is off.
    unless("top_n_sigma", || json!([0, -1])),
    unless("dynatemp_range", || json!([0])),
    // -1 is the whole text.
    Unsupported {
        neutral: || json!([-1]),
        ..instead("repeat_last_n", "is not supported here; penalties read the whole text: leave it out")
    },
    never("samplers"),
    instead("thinking_budget", "is not supported here; the limit of tokens counts reasoning, too"),
    Unsupported {
        neutral: || json!([0]),
        ..instead("n_probs", "is not a field of this API; use logprobs, in a chat with top_logprobs")
    },
    // From 0 down it is off.
    unless("t_max_predict_ms", || json!([0, -1])),
    never("conversation"),
    never("container"),
    never("mcp_servers"),
    unless("background", || json!([false])),
];

/// Completions take it if it is `n`.
const BEST_OF: &[Unsupported] = &[unless("best_of", || json!([1]))];

/// Fields that `/v1/chat/completions` does not take.
const CHAT_FIELDS: &[Unsupported] = &[
    instead("enable_thinking", KWARGS),
    instead("thinking", KWARGS),
    instead("reasoning", "is a field of /v1/responses; use reasoning_effort"),
    instead("stop_sequences", "is a field of /v1/messages; use stop"),
    instead("max_output_tokens", "is a field of /v1/responses; use max_tokens"),
    instead("system", SYSTEM),
    instead("instructions", SYSTEM),
    instead("text", SCHEMA),
    instead("format", SCHEMA),
    instead("output_config", SCHEMA),
    instead("options", OPTIONS),
    // The template writes them.
    unless("add_special_tokens", || json!([false])),
];

/// Fields that `/v1/completions` does not take.
const COMPLETION_FIELDS: &[Unsupported] = &[
    instead("max_completion_tokens", "is a field of a chat; use max_tokens"),
    instead("max_output_tokens", "is a field of /v1/responses; use max_tokens"),
    instead("stop_sequences", "is a field of /v1/messages; use stop"),
    instead("messages", OF_A_CHAT),
    instead("tools", OF_A_CHAT),
    instead("thinking", "is a field of /v1/messages, for a chat"),
    instead("enable_thinking", OF_A_CHAT),
    instead("reasoning_effort", OF_A_CHAT),
    instead("chat_template_kwargs", OF_A_CHAT),
    instead("system", BEFORE_PROMPT),
    instead("instructions", BEFORE_PROMPT),
    instead("format", SCHEMA),
    instead("options", OPTIONS),
    // As the tokenizer adds them.
    unless("add_special_tokens", || json!([true])),
    Unsupported {
        neutral: || json!([0]),
        ..instead("top_logprobs", "is a field of a chat; use logprobs: N")
    },
];

/// Fields that `/v1/responses` does not take. Most are those of a chat.
const RESPONSE_FIELDS: &[Unsupported] = &[
    instead("response_format", "is a field of a chat; use text.format"),
    instead("max_tokens", "is a field of a chat; use max_output_tokens"),
    instead("max_completion_tokens", "is a field of a chat; use max_output_tokens"),
    instead("reasoning_effort", "is a field of a chat; use reasoning.effort"),
    instead("messages", "is a field of a chat; use input"),
    instead("enable_thinking", KWARGS),
    instead("thinking", KWARGS),
    instead("system", "is a field of /v1/messages; use instructions"),
    instead("stop_sequences", "is a field of /v1/messages; use stop"),
    instead("output_config", "is a field of /v1/messages; use text.format"),
    instead("format", "is not understood; use text.format"),
    instead("options", OPTIONS),
    // The template writes them.
    unless("add_special_tokens", || json!([false])),
    unless("n", || json!([1])),
    unless("logprobs", || json!([false])),
    unless("top_logprobs", || json!([0])),
    never("prompt"),
];

/// Fields that `/v1/messages` does not take. Most are those of a chat.
const MESSAGES_FIELDS: &[Unsupported] = &[
    instead("stop", "is a field of a chat; use stop_sequences"),
    instead("response_format", "is a field of a chat; use output_config.format"),
    instead("max_completion_tokens", "is a field of a chat; use max_tokens"),
    instead("max_output_tokens", "is a field of /v1/responses; use max_tokens"),
    instead("instructions", "is a field of /v1/responses; use system"),
    instead("text", "is a field of /v1/responses; use output_config.format"),
    instead("enable_thinking", THINKING),
    instead("chat_template_kwargs", THINKING),
    instead("reasoning_effort", THINKING),
    instead("reasoning", THINKING),
    instead("format", "is not understood; use output_config.format"),
    instead("options", OPTIONS),
    // The template writes them.
    unless("add_special_tokens", || json!([false])),
    unless("n", || json!([1])),
    unless("logprobs", || json!([false])),
    unless("top_logprobs", || json!([0])),
];

/// Fields that `/v1/embeddings` does not take.
const EMBEDDING_FIELDS: &[Unsupported] = &[
    // As the tokenizer adds them.
    unless("add_special_tokens", || json!([true])),
];

/// Fields of `/tokenize` of other servers.
const TOKENIZE_FIELDS: &[Unsupported] = &[
    instead("messages", "is not understood; send the text of the conversation"),
    unless("with_pieces", || json!([false])),
    unless("return_token_strs", || json!([false])),
    // Special tokens in a text are read as such.
    unless("parse_special", || json!([true])),
];

/// The unsupported fields of an endpoint.
pub(crate) struct Refused(&'static [&'static [Unsupported]]);

/// Of `/v1/rerank`.
pub(crate) const RERANK: Refused = Refused(&[FIELDS, BEST_OF]);
/// Of `/v1/chat/completions`.
pub(crate) const CHAT: Refused = Refused(&[FIELDS, BEST_OF, CHAT_FIELDS]);
/// Of `/v1/completions`. See [`check_best_of`], too.
pub(crate) const COMPLETION: Refused = Refused(&[FIELDS, COMPLETION_FIELDS]);
/// Of `/v1/responses`.
pub(crate) const RESPONSE: Refused = Refused(&[FIELDS, BEST_OF, RESPONSE_FIELDS]);
/// Of `/v1/messages`.
pub(crate) const MESSAGES: Refused = Refused(&[FIELDS, BEST_OF, MESSAGES_FIELDS]);
/// Of `/v1/embeddings`.
pub(crate) const EMBEDDING: Refused = Refused(&[FIELDS, BEST_OF, EMBEDDING_FIELDS]);
/// Of `/tokenize`.
pub(crate) const TOKENIZE: Refused = Refused(&[TOKENIZE_FIELDS]);

impl Refused {
    /// Refuses unsupported fields if one of them would change the answer.
    ///
    /// # Errors
    /// The field, and the advice.
    pub fn check(&self, rest: &Map<String, Value>) -> Result<()> {
        let asks = |unsupported: &&Unsupported| {
            rest.get(unsupported.field).is_some_and(|value| changes(value, unsupported))
        };
        match self.0.iter().copied().flatten().find(asks) {
            Some(unsupported) => Err(wrong(unsupported.field, unsupported.advice)),
            None => Ok(()),
        }
    }
}

/// Refuses `best_of` of `/v1/completions` unless it is the number of answers. With more, some would be thrown away.
///
/// # Errors
/// The value, and the expected one.
pub(crate) fn check_best_of(rest: &Map<String, Value>, choices: usize) -> Result<()> {
    let is_asked = |value: &&Value| !is_empty(value) && value.as_f64() != Some(choices as f64);
    match rest.get("best_of").filter(is_asked) {
        Some(value) => Err(wrong("best_of", format!("{value}, expected {choices}, the value of n"))),
        None => Ok(()),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

fn changes(value: &Value, unsupported: &Unsupported) -> bool {
    // 1 and 1.0 are the same number.
    let is_same = |neutral: &Value| match (neutral.as_f64(), value.as_f64()) {
        (Some(neutral), Some(value)) => neutral == value,
        _ => neutral == value,
    };
    !is_empty(value) && !(unsupported.neutral)().as_array().is_some_and(|neutral| neutral.iter().any(is_same))
}

#[cfg(test)]
mod tests;

//! The markers that models write around their reasoning and their calls.

/// A begin marker and its end marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Markers {
    pub begin: &'static str,
    /// `None` if everything after `begin` belongs to it.
    pub end: Option<&'static str>,
}

const fn pair(begin: &'static str, end: &'static str) -> Markers {
    Markers { begin, end: Some(end) }
}

/// Markers around reasoning: those of most models, then Mistral's.
pub(super) const REASONING: [Markers; 2] = [pair("<think>", "</think>"), pair("[THINK]", "[/THINK]")];

/// Comes before each of Mistral's calls, or before the list of them.
pub(super) const MISTRAL: &str = "[TOOL_CALLS]";
/// Stands between the name and the arguments of one of Mistral's calls. [`MISTRAL_ID`] stands before the call's id.
pub(super) const MISTRAL_ARGUMENTS: &str = "[ARGS]";
pub(super) const MISTRAL_ID: &str = "[CALL_ID]";

/// Markers around calls that may appear anywhere in an answer.
pub(super) const CALLS: [Markers; 4] = [
    // Hermes, Qwen, SmolLM3, GLM from 4.5 on.
    pair("<tool_call>", "</tool_call>"),
    // Phi-4-mini.
    pair("<|tool_call|>", "<|/tool_call|>"),
    // OLMo 3.
    pair("<function_calls>", "</function_calls>"),
    Markers { begin: MISTRAL, end: None },
];

/// Llama writes this before calls, and so does Phi-4-mini without its markers ([`FUNCTOOLS`]). The calls end with the
/// answer.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";
pub(super) const FUNCTOOLS: &str = "functools[";

/// Tokens that belong to an answer's form. They are part of its text, also if they are special tokens.
pub(crate) const SHOWN: [&str; 16] = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<tool_call>",
    "</tool_call>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<function_calls>",
    "</function_calls>",
    MISTRAL,
    MISTRAL_ARGUMENTS,
    MISTRAL_ID,
    PYTHON_TAG,
    "<arg_key>",
    "<arg_value>",
];

/// Length of the longest suffix of `text` that is a proper prefix of `marker`.
pub(super) fn overlap(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|&n| text.ends_with(&marker[..n])).unwrap_or(0)
}

//! What models write around their reasoning and their calls.

/// A beginning and the end that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Markers {
    pub begin: &'static str,
    /// `None` if all that follows belongs to it.
    pub end: Option<&'static str>,
}

const fn pair(begin: &'static str, end: &'static str) -> Markers {
    Markers { begin, end: Some(end) }
}

/// Around reasoning: that of most models, and that of Mistral's.
pub(super) const REASONING: [Markers; 2] = [pair("<think>", "</think>"), pair("[THINK]", "[/THINK]")];

/// Before each of Mistral's calls, or before the list of them.
pub(super) const MISTRAL: &str = "[TOOL_CALLS]";
/// Between the name and the arguments of one of Mistral's calls, and before its id.
pub(super) const MISTRAL_ARGUMENTS: &str = "[ARGS]";
pub(super) const MISTRAL_ID: &str = "[CALL_ID]";

/// Around calls in the midst of an answer.
pub(super) const CALLS: [Markers; 4] = [
    // Hermes, Qwen, SmolLM3, GLM from 4.5 on.
    pair("<tool_call>", "</tool_call>"),
    // Phi-4-mini.
    pair("<|tool_call|>", "<|/tool_call|>"),
    // OLMo 3.
    pair("<function_calls>", "</function_calls>"),
    Markers { begin: MISTRAL, end: None },
];

/// What Llama, and Phi-4-mini without its markers, write before calls; the end is that of the answer.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";
pub(super) const FUNCTOOLS: &str = "functools[";

/// Tokens that are part of an answer's form, and so of its text, be they special or not.
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

/// Length of the longest end of `text` that `marker` begins with.
pub(super) fn overlap(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|&n| text.ends_with(&marker[..n])).unwrap_or(0)
}

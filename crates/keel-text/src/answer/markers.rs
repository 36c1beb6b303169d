//! The markers that models write around their reasoning and their calls.

/// A begin marker and its end marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Markers {
    pub begin: &'static str,
    /// `None` if everything after `begin` belongs to it.
    pub end: Option<&'static str>,
    /// The notation of the calls begins with `begin`.
    pub in_notation: bool,
}

const fn pair(begin: &'static str, end: &'static str) -> Markers {
    Markers { begin, end: Some(end), in_notation: false }
}

const fn to_the_end(begin: &'static str) -> Markers {
    Markers { begin, end: None, in_notation: true }
}

/// Markers around reasoning: those of most models, then Mistral's.
pub(super) const REASONING: [Markers; 2] = [pair("<think>", "</think>"), pair("[THINK]", "[/THINK]")];

/// Comes before each of Mistral's calls, or before the list of them.
pub(super) const MISTRAL: &str = "[TOOL_CALLS]";
/// Stands between the name and the arguments of one of Mistral's calls. [`MISTRAL_ID`] stands before the call's id.
pub(super) const MISTRAL_ARGUMENTS: &str = "[ARGS]";
pub(super) const MISTRAL_ID: &str = "[CALL_ID]";

/// Llama writes this before calls, also after text. The calls end with the answer.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";
/// Phi-4-mini writes this before calls if it leaves out its markers. The calls end with the answer.
pub(super) const FUNCTOOLS: &str = "functools[";

/// Hermes, Qwen, SmolLM3, GLM from 4.5 on.
pub(super) const TOOL_CALL: Markers = pair("<tool_call>", "</tool_call>");
/// A call of Qwen3-Coder. The model often leaves out the begin marker of [`TOOL_CALL`] before it.
pub(super) const FUNCTION: Markers =
    Markers { begin: "<function=", end: Some("</function>"), in_notation: true };

/// Markers around calls that may appear anywhere in an answer.
pub(super) const CALLS: [Markers; 6] = [
    TOOL_CALL,
    // Phi-4-mini.
    pair("<|tool_call|>", "<|/tool_call|>"),
    // OLMo 3.
    pair("<function_calls>", "</function_calls>"),
    to_the_end(MISTRAL),
    to_the_end(PYTHON_TAG),
    FUNCTION,
];

/// Tokens around calls and inside them. They are part of an answer's text, also if they are special tokens.
pub(super) const CALL_TOKENS: [&str; 16] = [
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
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "</parameter>",
    "</function>",
];

/// Length of the longest suffix of `text` that is a proper prefix of `marker`.
pub(super) fn overlap(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|&n| text.ends_with(&marker[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A special token that is not listed would be missing from the text that is parsed.
    #[test]
    fn markers_that_are_read_reach_the_text() {
        let source = include_str!("tool_call.rs");
        let is_marker = |text: &&str| text.starts_with('<') && text.ends_with('>') && text.len() > 2;
        let mut read: Vec<&str> = source.split('"').filter(is_marker).collect();
        assert!(read.contains(&"</arg_key>") && read.contains(&"</arg_value>"), "{read:?}");
        read.extend(CALLS.iter().filter(|markers| **markers != FUNCTION).map(|markers| markers.begin));
        read.extend(CALLS.iter().filter_map(|markers| markers.end));
        read.extend([MISTRAL_ARGUMENTS, MISTRAL_ID]);
        for marker in read {
            assert!(CALL_TOKENS.contains(&marker), "{marker}");
        }
    }
}

//! The markers that models write around their reasoning and their calls.

/// A begin marker and its end marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Markers {
    pub begin: &'static str,
    /// `None` if everything after `begin` belongs to it.
    pub end: Option<&'static str>,
}

impl Markers {
    /// The calls are written in tags ([`FUNCTION`]).
    pub(super) fn is_tags(self) -> bool {
        self == FUNCTION
    }

    /// An end marker that may follow the call, because the model left out its begin marker.
    pub(super) fn closer(self) -> Option<&'static str> {
        TOOL_CALL.end.filter(|_| self.is_tags())
    }
}

const fn pair(begin: &'static str, end: &'static str) -> Markers {
    Markers { begin, end: Some(end) }
}

const fn to_the_end(begin: &'static str) -> Markers {
    Markers { begin, end: None }
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
pub(super) const FUNCTION: Markers = pair("<function=", FUNCTION_END);
pub(super) const FUNCTION_END: &str = "</function>";
/// Begins a parameter of a call in tags.
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const PARAMETER_END: &str = "</parameter>";

/// Around the keys and the values of GLM's calls.
pub(super) const KEY: &str = "<arg_key>";
pub(super) const KEY_END: &str = "</arg_key>";
pub(super) const VALUE: &str = "<arg_value>";
pub(super) const VALUE_END: &str = "</arg_value>";

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
    KEY,
    KEY_END,
    VALUE,
    VALUE_END,
    PARAMETER_END,
    FUNCTION_END,
];

/// The first begin marker of a call in a text.
pub(super) fn find_begin(text: &str) -> Option<(usize, Markers)> {
    let begins = |at: usize| CALLS.into_iter().find(|markers| text[at..].starts_with(markers.begin));
    // Every marker begins with one of these characters.
    text.match_indices(['<', '[']).find_map(|(at, _)| Some((at, begins(at)?)))
}

/// Length of the longest suffix of `text` that is a proper prefix of a begin marker of a call.
pub(super) fn overlap_with_begin(text: &str) -> usize {
    CALLS.into_iter().map(|markers| overlap(text, markers.begin)).max().unwrap_or(0)
}

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
        let mut read = vec![MISTRAL_ARGUMENTS, MISTRAL_ID, KEY, KEY_END, VALUE, VALUE_END, PARAMETER_END];
        read.extend(CALLS.iter().filter(|markers| !markers.is_tags()).map(|markers| markers.begin));
        read.extend(CALLS.iter().filter_map(|markers| markers.end));
        for marker in read {
            assert!(CALL_TOKENS.contains(&marker), "{marker}");
        }
        // A literal in another file would be missing from the list above.
        for source in [
            include_str!("mod.rs"),
            include_str!("object.rs"),
            include_str!("reader.rs"),
            include_str!("tags.rs"),
            include_str!("value.rs"),
        ] {
            let code = source.split("mod tests {").next().unwrap_or_default();
            let literal = code.lines().find(|line| line.contains("\"<"));
            assert_eq!(literal, None, "this marker belongs to markers.rs");
        }
    }
}

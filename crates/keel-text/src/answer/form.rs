//! The parts that an answer may have.

use serde_json::Value;

use super::markers::{CALL_TOKENS, Markers, REASONING};
use crate::Tokenizer;

/// The parts that an answer may have.
#[derive(Clone, Debug, Default)]
pub struct AnswerForm {
    /// The answer may begin with reasoning between markers.
    pub reasoning: bool,
    /// The prompt ends inside reasoning that these markers enclose.
    pub begins_in_reasoning: Option<ReasoningMarkers>,
    /// The tools that may be called, in OpenAI's form. Without tools, calls are text.
    pub tools: Vec<Value>,
    /// A grammar allows calls only between markers. A JSON value is then a value, also if it looks like a call.
    pub marked_calls: bool,
    /// The texts before and after calls are joined. Text after calls then begins with a line break, if one came since
    /// the text before them. Without this, white space around calls is dropped.
    pub joins_texts: bool,
}

impl AnswerForm {
    /// The form of the answer to a conversation whose prompt ends with `tail`.
    ///
    /// The parser finds the markers of reasoning in the text. They need not be tokens of the vocabulary. A grammar
    /// needs the token that ends the reasoning, because it begins after this token. Without the token it begins at
    /// once. So an answer with a grammar (`has_grammar`) does not begin in reasoning, and its calls have markers.
    pub fn of_chat(tokenizer: &Tokenizer, tail: &str, tools: Vec<Value>, has_grammar: bool) -> AnswerForm {
        let fits = |markers: &ReasoningMarkers| !has_grammar || markers.end_token(tokenizer).is_some();
        AnswerForm {
            reasoning: true,
            begins_in_reasoning: ReasoningMarkers::begun_at_end(tail).filter(fits),
            tools,
            marked_calls: has_grammar,
            joins_texts: false,
        }
    }

    /// The tokens around the parts, in the vocabulary's spelling. They belong to the text that is parsed.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = &'static str> {
        let reasons = self.reasoning || self.begins_in_reasoning.is_some();
        let reasoning = REASONING.into_iter().filter(move |_| reasons);
        let reasoning = reasoning.flat_map(|markers| [Some(markers.begin), markers.end]).flatten();
        let calls = !self.tools.is_empty();
        reasoning.chain(CALL_TOKENS.into_iter().filter(move |_| calls))
    }
}

/// The markers that a model writes around its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningMarkers(pub(super) Markers);

impl ReasoningMarkers {
    /// The markers of the reasoning that a prompt begins at its end. `None` if a prompt that ends with `tail` does not
    /// end inside reasoning.
    pub fn begun_at_end(tail: &str) -> Option<ReasoningMarkers> {
        let tail = tail.trim_end();
        REASONING.into_iter().find(|markers| tail.ends_with(markers.begin)).map(ReasoningMarkers)
    }

    /// The token that ends the reasoning. `None` if the vocabulary writes the end marker in several tokens.
    pub fn end_token(&self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.token_to_id(self.0.end?)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::TextFiles;

    #[test]
    fn reasoning_needs_no_token_and_a_grammar_does() {
        let files = TextFiles::of_bytes(300).expect("a vocabulary of bytes");
        let tokenizer = Tokenizer::new(&files).expect("it is right");
        assert_eq!(tokenizer.token_to_id("</think>"), None);
        let begins = |tail: &str, has_grammar: bool| {
            AnswerForm::of_chat(&tokenizer, tail, Vec::new(), has_grammar).begins_in_reasoning
        };
        assert_eq!(begins("a<think>\n", false), Some(ReasoningMarkers(REASONING[0])));
        assert_eq!(begins("a[THINK]", false), Some(ReasoningMarkers(REASONING[1])));
        assert_eq!((begins("a<think>\n", true), begins("<think>\n\n</think>\n", false)), (None, None));
    }

    #[test]
    fn only_the_tokens_of_possible_parts_are_text() {
        let tokens = |form: AnswerForm| form.tokens().collect::<Vec<_>>();
        assert!(tokens(AnswerForm::default()).is_empty());
        let reasoning = AnswerForm { reasoning: true, ..AnswerForm::default() };
        assert_eq!(tokens(reasoning), ["<think>", "</think>", "[THINK]", "[/THINK]"]);
        let tools = AnswerForm { tools: vec![json!({"name": "f"})], ..AnswerForm::default() };
        assert_eq!(tokens(tools), CALL_TOKENS);
    }
}

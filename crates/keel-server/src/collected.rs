//! A whole answer, for a client that does not stream.

use keel_text::AnswerPart;

use crate::answer::{Ending, TokenInfo, Usage};

/// A whole answer.
#[derive(Default)]
pub(crate) struct Collected {
    /// In the order of the answer. Neighbours of one kind are joined.
    pub parts: Vec<AnswerPart>,
    pub tokens: Vec<TokenInfo>,
    pub ending: Ending,
    /// The stop string that ended it.
    pub stop: Option<String>,
    pub usage: Usage,
}

impl Collected {
    /// Appends a part, joined with the last one if both are of one kind.
    pub fn push(&mut self, part: AnswerPart) {
        match (self.parts.last_mut(), part) {
            (Some(AnswerPart::Text(text)), AnswerPart::Text(more))
            | (Some(AnswerPart::Reasoning(text)), AnswerPart::Reasoning(more)) => text.push_str(&more),
            (_, part) => self.parts.push(part),
        }
    }

    /// All text, also that between and after calls.
    pub fn text(&self) -> String {
        let texts = self.parts.iter().filter_map(|part| match part {
            AnswerPart::Text(text) => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    pub fn reasoning(&self) -> String {
        let texts = self.parts.iter().filter_map(|part| match part {
            AnswerPart::Reasoning(text) => Some(text.as_str()),
            _ => None,
        });
        texts.collect()
    }

    /// Names and arguments of tool calls.
    pub fn calls(&self) -> impl Iterator<Item = (&str, &str)> {
        self.parts.iter().filter_map(|part| match part {
            AnswerPart::ToolCall { name, arguments } => Some((name.as_str(), arguments.as_str())),
            _ => None,
        })
    }
}

//! Splits an answer into its parts while it streams: reasoning, text and tool calls.
//!
//! ```text
//! <think> reasoning </think> text <tool_call> call </tool_call> text ...
//! ```
//!
//! A marker may be split between two pieces. The parser therefore holds back the end of the text while it could become
//! a marker. `markers.rs` lists the markers that models use, `reader.rs` the notations of calls.

#[cfg(test)]
mod cut_tests;
#[cfg(test)]
mod edge_tests;
mod form;
mod markers;
mod object;
mod pythonic;
mod reader;
#[cfg(test)]
mod reader_tests;
mod schema;
#[cfg(test)]
mod split_tests;
#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod tag_tests;
mod tags;
#[cfg(test)]
mod tests;
mod value;

pub use form::{AnswerForm, ReasoningMarkers};
use markers::{CALLS, FUNCTOOLS, Markers, REASONING, find_begin, overlap, overlap_with_begin};
use reader::{Call, End, Reading, after_brackets, after_name, read_from};
use value::read_value;

/// Bounds the memory for a call that never ends.
const CALL_BYTES_MAX: usize = 1 << 20;
/// Most bytes of white space that are dropped before a call or at the end of reasoning. More of it is text.
const GAP_BYTES_MAX: usize = 1024;
/// An open text up to this length is read again with each piece, and a longer one once its length has doubled.
const SHORT_BYTES_MAX: usize = 256;
/// A longer one is also read again where a call may end. These readings take at most this number of bytes for each byte
/// of the answer, so that the time of an answer grows with its length and not with its square. The same limit holds for
/// the bytes that are read again because they were read as part of a call that is none.
const READS_PER_BYTE: usize = 8;
/// Fewest bytes of a marker's beginning that are left out after text. Fewer may as well be text, such as `<` in `a <`.
const MARKER_PART_MIN: usize = 5;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Reasoning of the model, not meant for the user.
    Reasoning(String),
    /// Text for the user.
    Text(String),
    /// A call of a tool.
    ToolCall {
        /// The tool's name.
        name: String,
        /// The arguments: a JSON object as text.
        arguments: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Only white space so far, or only white space since the reasoning.
    Start,
    /// Inside reasoning, between these markers.
    Reasoning(Markers),
    Text,
    /// After a call without its begin marker. This end marker may follow.
    Closer(&'static str),
    /// In a JSON value that is no call, at the begin of the answer, after a begin marker, or after a name there. A
    /// marker in one of its strings is text. `inside`: in a string.
    Value {
        inside: bool,
    },
}

impl State {
    /// The state after the begin marker of `markers` that is only mentioned, or at the begin of an answer. `text` comes
    /// next.
    fn after_mention(text: &str, markers: Option<Markers>) -> State {
        let text = text.trim_ascii_start();
        let list = text.strip_prefix(FUNCTOOLS).or_else(|| text.strip_prefix('[')).map(str::trim_ascii_start);
        let is_list = list.is_some_and(|list| after_brackets(list).starts_with(['"', '{']));
        let object = list.unwrap_or(text);
        let object = if markers.is_some() { after_name(object) } else { object };
        // What begins otherwise may be a sentence. A quote in it begins no JSON string.
        if is_list || object.starts_with('{') { State::Value { inside: false } } else { State::Text }
    }
}

/// Splits an answer into parts, piece by piece. How the text is cut into pieces does not change the parts, once
/// neighbours of one kind are joined. The parser drops white space around reasoning and before calls. A malformed call
/// becomes text; one that the limit of tokens cuts off is left out ([`AnswerParser::cut_off`]).
#[derive(Clone, Debug)]
pub struct AnswerParser {
    form: AnswerForm,
    state: State,
    /// Text whose part is not decided yet. It is read again when more has come.
    held: String,
    /// Length of the open text when it was read last. Zero if no text is open.
    seen: usize,
    /// Number of bytes that may be read again where a call may end ([`READS_PER_BYTE`]).
    credit: usize,
    /// What is open may have ended since it was read last.
    is_owed: bool,
    /// Number of bytes whose part is decided.
    decided: usize,
    /// Number of bytes that are read again because they were read as part of a call that is none.
    reread: usize,
    /// Reasoning may begin, because there was none yet.
    may_reason: bool,
    /// The next text begins a part, so its leading white space is dropped.
    at_start: bool,
    /// Text or reasoning came since the answer began, or since its last call.
    has_spoken: bool,
    /// Text came since the answer began.
    has_text: bool,
    /// A line break was dropped around calls since the last text. The next text begins with it.
    owes_line: bool,
    /// Number of bytes that were read, also if more than once, without `reread`.
    #[cfg(test)]
    work: usize,
}

impl AnswerParser {
    /// Creates a parser for one answer.
    pub fn new(form: AnswerForm) -> AnswerParser {
        let begun = form.begins_in_reasoning;
        AnswerParser {
            at_start: begun.is_some(),
            may_reason: form.reasoning,
            form,
            state: begun.map_or(State::Start, |markers| State::Reasoning(markers.0)),
            held: String::new(),
            seen: 0,
            credit: 0,
            is_owed: false,
            decided: 0,
            reread: 0,
            has_spoken: false,
            has_text: false,
            owes_line: false,
            #[cfg(test)]
            work: 0,
        }
    }

    /// Takes the next piece and appends the parts that are now certain to `parts`.
    pub fn push(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        self.held.push_str(piece);
        self.credit += READS_PER_BYTE * piece.len();
        let len = self.held.len();
        let is_due = len <= SHORT_BYTES_MAX || len >= 2 * self.seen || len > CALL_BYTES_MAX + GAP_BYTES_MAX;
        if !is_due {
            self.is_owed |= self.may_end(piece.len());
            if self.credit < len || !self.is_owed {
                return;
            }
            self.credit -= len;
        }
        self.advance(End::More, parts);
    }

    /// Ends the answer and appends the text that was held back.
    pub fn finish(&mut self, parts: &mut Vec<AnswerPart>) {
        self.end(End::Whole, parts);
    }

    /// Ends an answer that its limit of tokens or a stop string cut off. A call that was cut off is left out: it can
    /// neither be made nor read. The text and the calls before it are kept.
    pub fn cut_off(&mut self, parts: &mut Vec<AnswerPart>) {
        self.end(End::Cut, parts);
    }

    /// Whether the next text belongs to the reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning(_))
    }

    /// Whether what is open may end in the last `added` bytes of the held text. A string that lacks its quote may end
    /// with the line, after the end marker.
    fn may_end(&self, added: usize) -> bool {
        let (held, added) = (self.held.as_bytes(), self.held.len() - added);
        if let State::Value { .. } = self.state {
            return held[added..].iter().any(|&byte| byte == b'"' || byte < b' ');
        }
        let ends = |marker: &str| {
            let from = added.saturating_sub(marker.len() - 1);
            held[from..].windows(marker.len()).any(|bytes| bytes == marker.as_bytes())
        };
        let is_after = |marker: &str| held[..added].ends_with(marker.as_bytes());
        let ends_call = |marker: &str| ends(marker) || is_after(marker);
        CALLS.iter().any(|markers| ends(markers.begin) || markers.end.is_some_and(ends_call))
    }

    fn end(&mut self, end: End, parts: &mut Vec<AnswerPart>) {
        // What is decided without the end of the answer stays decided.
        self.advance(End::More, parts);
        self.advance(end, parts);
        if end == End::Cut {
            self.drop_begun_marker();
        }
        let rest = std::mem::take(&mut self.held);
        let rest = if self.is_reasoning() { without_gap(&rest) } else { &rest };
        self.emit(rest, parts);
    }

    /// Drops the begin of a marker that is cut off.
    fn drop_begun_marker(&mut self) {
        if let State::Closer(_) = self.state {
            self.held.clear();
        }
        if self.form.tools.is_empty() || self.is_reasoning() {
            return;
        }
        let begun = overlap_with_begin(&self.held);
        let text = self.held[..self.held.len() - begun].trim_end().len();
        let is_alone = begun > 0 && text == 0 && !self.has_spoken;
        if is_alone || begun >= MARKER_PART_MIN {
            self.held.truncate(text);
        }
    }

    /// Makes all decisions that the held text allows.
    fn advance(&mut self, end: End, parts: &mut Vec<AnswerPart>) {
        let held = std::mem::take(&mut self.held);
        (self.seen, self.is_owed) = (0, false);
        let mut at = 0;
        loop {
            let (taken, goes_on) = self.step(&held[at..], end, parts);
            at += taken;
            self.decided += taken;
            if !goes_on {
                break;
            }
        }
        #[cfg(test)]
        (self.work += at + self.seen);
        self.held = held;
        self.held.drain(..at);
    }

    /// Makes one decision. Returns the number of bytes that it takes, and whether another decision may follow without
    /// more text.
    fn step(&mut self, text: &str, end: End, parts: &mut Vec<AnswerPart>) -> (usize, bool) {
        match self.state {
            State::Start => self.begin(text, end, parts),
            State::Reasoning(markers) => {
                let marker = markers.end.unwrap_or_default();
                let found = text.find(marker);
                let certain = without_gap(&text[..found.unwrap_or(text.len() - overlap(text, marker))]).len();
                self.emit(&text[..certain], parts);
                let Some(at) = found else { return (certain, false) };
                (self.state, self.may_reason, self.at_start) = (State::Start, false, true);
                (at + marker.len(), true)
            }
            State::Text if self.form.tools.is_empty() => {
                self.emit(text, parts);
                (text.len(), false)
            }
            State::Text => match find_begin(text) {
                Some((at, markers)) => self.decide(text, at, Some(markers), end, parts),
                None => {
                    let certain = without_gap(&text[..text.len() - overlap_with_begin(text)]).len();
                    self.emit(&text[..certain], parts);
                    (certain, false)
                }
            },
            State::Closer(closer) => {
                let rest = text.trim_start();
                let gap = text.len() - rest.len();
                if gap <= GAP_BYTES_MAX && rest.len() < closer.len() && closer.starts_with(rest) {
                    return (0, false);
                }
                self.state = State::Text;
                let is_closer = gap <= GAP_BYTES_MAX && rest.starts_with(closer);
                (if is_closer { gap + closer.len() } else { 0 }, true)
            }
            State::Value { inside } => {
                let (certain, state) = read_value(text, inside, end);
                if state != State::Text {
                    self.seen = text.len() - certain;
                }
                let certain = without_gap(&text[..certain]).len();
                self.emit(&text[..certain], parts);
                self.state = state;
                (certain, state == State::Text)
            }
        }
    }

    /// Decides which part the answer begins with, or goes on with after the reasoning.
    fn begin(&mut self, text: &str, end: End, parts: &mut Vec<AnswerPart>) -> (usize, bool) {
        let body = text.trim_start();
        let gap = text.len() - body.len();
        let is_near = gap <= GAP_BYTES_MAX;
        if is_near && self.may_reason {
            if let Some(markers) = REASONING.into_iter().find(|markers| body.starts_with(markers.begin)) {
                (self.state, self.may_reason, self.at_start) = (State::Reasoning(markers), false, true);
                return (gap + markers.begin.len(), true);
            }
            if REASONING.iter().any(|markers| markers.begin.starts_with(body)) {
                return (0, false);
            }
        }
        if is_near && body.is_empty() {
            return (0, false);
        }
        let has_calls = is_near && !self.form.tools.is_empty();
        if has_calls && !self.form.marked_calls {
            return self.decide(text, gap, None, end, parts);
        }
        let is_value = has_calls && body.starts_with(['{', '[', '"']);
        self.state = if is_value { State::Value { inside: false } } else { State::Text };
        (0, true)
    }

    /// Decides about the text from `at` on. It begins with the begin marker of `markers`, or the answer begins there.
    fn decide(
        &mut self,
        text: &str,
        at: usize,
        markers: Option<Markers>,
        end: End,
        parts: &mut Vec<AnswerPart>,
    ) -> (usize, bool) {
        let call = head(&text[at..]);
        let is_long = call.len() < text.len() - at;
        let (reading, read) =
            read_from(call, markers, &self.form.tools, if is_long { End::More } else { end });
        let before = without_gap(&text[..at]);
        match reading {
            Reading::Open if !is_long => {
                self.emit(before, parts);
                self.seen = text.len() - before.len();
                (before.len(), false)
            }
            Reading::Calls(calls, taken) => {
                self.emit(before, parts);
                self.note_gap(&text[before.len()..at]);
                self.emit_calls(calls, parts);
                self.state = markers.and_then(Markers::closer).map_or(State::Text, State::Closer);
                (at + taken, true)
            }
            Reading::Text(_) | Reading::Open => {
                let taken = if let Reading::Text(taken) = reading { taken } else { call.len() };
                // A marker inside what was read may begin a call, unless too much would be read again.
                let again = read.saturating_sub(taken);
                let is_last = self.reread + again > READS_PER_BYTE * (self.decided + at + read);
                let (taken, again) = if is_last { (read, 0) } else { (taken, again) };
                self.reread += again;
                let is_mention = !markers.is_some_and(Markers::is_tags)
                    && taken == markers.map_or(0, |markers| markers.begin.len());
                let taken = if taken == 0 { 0 } else { at + taken };
                self.emit(&text[..taken], parts);
                self.state =
                    if is_mention { State::after_mention(&text[taken..], markers) } else { State::Text };
                (taken, true)
            }
        }
    }

    fn emit_calls(&mut self, calls: Vec<Call>, parts: &mut Vec<AnswerPart>) {
        (self.at_start, self.has_spoken) = (true, false);
        let part = |Call { name, arguments }| AnswerPart::ToolCall { name, arguments };
        parts.extend(calls.into_iter().map(part));
    }

    fn emit(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let kept = if self.at_start { text.trim_start() } else { text };
        self.note_gap(&text[..text.len() - kept.len()]);
        if kept.is_empty() {
            return;
        }
        (self.at_start, self.has_spoken) = (false, true);
        if let State::Reasoning(_) = self.state {
            parts.push(AnswerPart::Reasoning(kept.into()));
            return;
        }
        self.has_text = true;
        let line_break = if std::mem::take(&mut self.owes_line) { "\n" } else { "" };
        parts.push(AnswerPart::Text(format!("{line_break}{kept}")));
    }

    /// Notes white space that is dropped before or after calls.
    fn note_gap(&mut self, gap: &str) {
        self.owes_line |= self.form.joins_texts && self.has_text && gap.contains('\n');
    }
}

/// The text without the white space at its end, of which at most [`GAP_BYTES_MAX`] bytes are left out.
fn without_gap(text: &str) -> &str {
    let mut end = text.trim_end().len().max(text.len().saturating_sub(GAP_BYTES_MAX));
    while !text.is_char_boundary(end) {
        end += 1;
    }
    &text[..end]
}

/// The part of a text that a call may take.
fn head(text: &str) -> &str {
    let mut end = text.len().min(CALL_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

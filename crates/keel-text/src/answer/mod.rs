//! Splits an answer into its parts while it streams: reasoning, text and tool calls.
//!
//! ```text
//! <think> reasoning </think> text <tool_call> call </tool_call> text ...
//! ```
//!
//! A marker may be split between two pieces. The parser therefore holds back the end of the text while it could become
//! a marker. `markers.rs` lists the markers that models use, `tool_call.rs` the notations of calls.

mod bare_call;
mod cut;
mod form;
mod markers;
mod pythonic;
mod schema;
mod search;
#[cfg(test)]
mod tag_tests;
mod tags;
#[cfg(test)]
mod tests;
mod tool_call;

use bare_call::{after, may_be_call, may_be_marked_call};
pub use form::{AnswerForm, ReasoningMarkers};
use markers::{CALLS, FUNCTOOLS, Markers, REASONING, overlap};
use search::Search;
use tool_call::{Call, names, parse_between_markers, parse_calls};

/// Bounds the memory for a call that never ends.
const CALL_BYTES_MAX: usize = 1 << 20;
/// Most bytes of white space that are dropped before a call or at the end of reasoning. More of it is text.
const GAP_BYTES_MAX: usize = 1024;
/// Longer pieces are taken in parts, so that the time of an answer grows with its length and not with its square.
const PIECE_BYTES_MAX: usize = 4096;

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
    /// Inside a call, between these markers.
    Call(Markers),
    /// After a call without its begin marker. This end marker may follow.
    Closer(&'static str),
    /// Calls without markers: everything to the first marker of a call, or to the end of the answer.
    BareCall,
    /// A JSON value or a sentence that is no call. It began as [`State::BareCall`], or came after a begin marker. A
    /// marker inside one of its JSON strings is text.
    Unmarked,
}

impl State {
    /// The state after a begin marker that is only mentioned. `text` comes next.
    fn after_mention(text: &str) -> State {
        let text = text.trim_start();
        // What begins otherwise may be a sentence. A quote in it begins no JSON string.
        if after(text, "[").unwrap_or(text).starts_with('{') { State::Unmarked } else { State::Text }
    }
}

/// Splits an answer into parts, piece by piece. How the text is cut into pieces does not change the parts, once
/// neighbours of one kind are joined. The parser drops white space around reasoning and before calls. A malformed call
/// becomes text; one that the limit of tokens cuts off is left out ([`AnswerParser::cut_off`]).
#[derive(Clone, Debug)]
pub struct AnswerParser {
    form: AnswerForm,
    state: State,
    /// Text whose part is not decided yet.
    held: String,
    /// The white space before the current call. It is text if the call is text.
    gap: String,
    /// The search in `held` for the marker that ends the current call.
    search: Search,
    /// Set at the end of an answer in which a parameter never ends, and so hides the end of its call. From then on the
    /// end of a call counts within a parameter, too. Otherwise each later call would search the same text again.
    trusts_ends: bool,
    /// Reasoning may begin, because there was none yet.
    may_reason: bool,
    /// The next text begins a part, so its leading white space is dropped.
    at_start: bool,
    /// Text or reasoning came since the answer began, or since its last call.
    has_spoken: bool,
    /// Number of bytes that earlier searches looked at.
    #[cfg(test)]
    work: usize,
    /// Number of bytes that moved to the begin of `held`.
    #[cfg(test)]
    moved: usize,
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
            gap: String::new(),
            search: Search::default(),
            trusts_ends: false,
            has_spoken: false,
            #[cfg(test)]
            work: 0,
            #[cfg(test)]
            moved: 0,
        }
    }

    /// Takes the next piece and appends the parts that are now certain to `parts`.
    pub fn push(&mut self, piece: &str, parts: &mut Vec<AnswerPart>) {
        let mut rest = piece;
        while !rest.is_empty() {
            let mut end = rest.len().min(PIECE_BYTES_MAX);
            while !rest.is_char_boundary(end) {
                end += 1;
            }
            self.held.push_str(&rest[..end]);
            rest = &rest[end..];
            while self.advance(parts) {
                #[cfg(test)]
                (self.moved += self.held.len());
                // A string that turned out to be none hid markers in a long text. Each of them moves what is left.
                if self.held.len() > PIECE_BYTES_MAX {
                    let held = std::mem::take(&mut self.held);
                    self.push(&held, parts);
                    break;
                }
            }
        }
    }

    /// Whether the next text belongs to the reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning(_))
    }

    fn enter(&mut self, state: State) {
        #[cfg(test)]
        (self.work += self.search.work());
        self.state = state;
        self.search = match state {
            State::BareCall | State::Unmarked => Search::in_json(),
            State::Call(markers) => Search::in_call(markers, self.trusts_ends),
            _ => Search::default(),
        };
    }

    /// Makes one decision. Returns false if the next decision needs more text.
    fn advance(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.state {
            State::Start => self.begin(),
            State::Reasoning(markers) => {
                self.until(&[(markers.end.unwrap_or_default(), State::Start)], parts)
            }
            State::Text if self.form.tools.is_empty() => {
                let text = std::mem::take(&mut self.held);
                self.emit(&text, parts);
                false
            }
            State::Text => self.until(&CALLS.map(|markers| (markers.begin, State::Call(markers))), parts),
            State::Call(markers) => {
                let tools = &self.form.tools;
                let found = markers.end.and_then(|end| self.search.find(&self.held, &[end], tools));
                // The end marker may have begun. How it is cut must not decide.
                let begun = || markers.end.map_or(0, |end| overlap(&self.held, end));
                let inside = &self.held[..found.unwrap_or_else(|| self.held.len() - begun())];
                if !may_be_marked_call(markers, inside, tools) {
                    self.emit_as_text(markers.begin, "", parts);
                    self.enter(State::after_mention(&self.held));
                    return true;
                }
                match found {
                    Some(at) => self.close_call(markers, at, parts),
                    None => self.bound_call(markers.begin, parts),
                }
                found.is_some()
            }
            State::Closer(closer) => self.drop_closer(closer),
            State::BareCall if !may_be_call(&self.held, &self.form.tools) => {
                // The search goes on in the same text.
                self.state = State::Unmarked;
                self.advance(parts)
            }
            State::BareCall => {
                let found = self.find_begin();
                match found {
                    Some(at) => self.end_bare_call(at, parts),
                    None => self.bound_call("", parts),
                }
                found.is_some()
            }
            State::Unmarked => {
                let found = self.find_begin();
                match found {
                    Some(at) => self.end_value(at, parts),
                    None => self.emit_value(parts),
                }
                found.is_some()
            }
        }
    }

    /// The begin of the next call in a text without markers.
    fn find_begin(&mut self) -> Option<usize> {
        self.search.find(&self.held, &CALLS.map(|markers| markers.begin), &self.form.tools)
    }

    /// Decides which part the answer begins with, or goes on with after the reasoning.
    fn begin(&mut self) -> bool {
        let text = self.held.trim_start();
        if self.held.len() - text.len() > GAP_BYTES_MAX {
            self.enter(State::Text);
            return true;
        }
        let could_be = |marker: &str| marker.starts_with(text) || text.starts_with(marker);
        let calls = !self.form.tools.is_empty() && !self.form.marked_calls;
        if self.may_reason && REASONING.iter().any(|markers| could_be(markers.begin)) {
            let begun = |markers: Markers| Some((markers, text.strip_prefix(markers.begin)?));
            let Some((markers, rest)) = REASONING.into_iter().find_map(begun) else { return false };
            self.held = rest.to_string();
            (self.may_reason, self.at_start) = (false, true);
            self.enter(State::Reasoning(markers));
            return true;
        }
        // GLM-4 writes the tool's name on a line of its own.
        let lines = names(&self.form.tools).map(|name| format!("{name}\n"));
        let bare: Vec<String> = [FUNCTOOLS, "{", "[{"].map(String::from).into_iter().chain(lines).collect();
        if calls && bare.iter().any(|marker| could_be(marker)) {
            if !bare.iter().any(|marker| text.starts_with(marker.as_str())) {
                return false;
            }
            self.enter(State::BareCall);
        } else {
            self.enter(State::Text);
        }
        true
    }

    /// Emits text up to the first of `markers`. If there is none, emits the text in which none of them can begin.
    fn until(&mut self, markers: &[(&'static str, State)], parts: &mut Vec<AnswerPart>) -> bool {
        let held = &self.held;
        let marker_at = |at: usize| markers.iter().find(|(marker, _)| held[at..].starts_with(marker));
        // Every marker begins with one of these characters.
        let mut begins = held.match_indices(['<', '[']).map(|(at, _)| at);
        if let Some((at, &(marker, next))) = begins.find_map(|at| Some((at, marker_at(at)?))) {
            let text = without_gap(&held[..at]).to_string();
            self.gap = held[text.len()..at].to_string();
            self.held.drain(..at + marker.len());
            self.emit(&text, parts);
            if next == State::Start {
                (self.may_reason, self.at_start) = (false, true);
            }
            self.enter(next);
            return true;
        }
        let begun = markers.iter().map(|(marker, _)| overlap(held, marker)).max().unwrap_or(0);
        let certain = without_gap(&held[..held.len() - begun]).len();
        let text: String = self.held.drain(..certain).collect();
        self.emit(&text, parts);
        false
    }

    /// Ends a call at its end marker, which begins at `at`.
    fn close_call(&mut self, markers: Markers, at: usize, parts: &mut Vec<AnswerPart>) {
        let end = markers.end.unwrap_or_default();
        let call: String = self.held.drain(..at + end.len()).collect();
        if self.take_calls(markers, &call[..at], true, parts) {
            self.enter(markers.closer().map_or(State::Text, State::Closer));
        } else {
            self.emit_as_text(markers.begin, &call, parts);
            self.enter(State::Text);
        }
    }

    /// Drops the end marker of a call whose begin marker is missing. Returns false if it may still come.
    fn drop_closer(&mut self, closer: &str) -> bool {
        let text = self.held.trim_start();
        if self.held.len() - text.len() <= GAP_BYTES_MAX {
            if let Some(rest) = text.strip_prefix(closer) {
                self.held = rest.to_string();
            } else if closer.starts_with(text) {
                return false;
            }
        }
        self.enter(State::Text);
        true
    }

    /// Ends calls without markers where a call with markers begins.
    fn end_bare_call(&mut self, at: usize, parts: &mut Vec<AnswerPart>) {
        match parse_calls(&self.held[..at], &self.form.tools) {
            Some(calls) => {
                self.held.drain(..at);
                self.emit_calls(calls, parts);
                self.enter(State::Text);
            }
            None => self.end_value(at, parts),
        }
    }

    /// Ends a text without markers, which is no call, where a call with markers begins.
    fn end_value(&mut self, at: usize, parts: &mut Vec<AnswerPart>) {
        let before = without_gap(&self.held[..at]).to_string();
        self.held.drain(..before.len());
        self.emit(&before, parts);
        self.enter(State::Text);
    }

    /// Emits the part of such a text in which no marker can begin.
    fn emit_value(&mut self, parts: &mut Vec<AnswerPart>) {
        let certain = without_gap(&self.held[..self.search.certain()]).len();
        let text: String = self.held.drain(..certain).collect();
        self.search.forget(certain);
        self.emit(&text, parts);
        self.bound_call("", parts);
    }

    /// Treats a call as text once it is too long to be a call.
    fn bound_call(&mut self, begin: &str, parts: &mut Vec<AnswerPart>) {
        if self.held.len() > CALL_BYTES_MAX {
            let text = std::mem::take(&mut self.held);
            self.emit_as_text(begin, &text, parts);
            self.enter(State::Text);
        }
    }

    /// Emits the calls that `inside`, the text after a begin marker, consists of. Returns false if it is no call.
    /// `is_closed`: the end marker follows it.
    fn take_calls(
        &mut self,
        markers: Markers,
        inside: &str,
        is_closed: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> bool {
        let tools = &self.form.tools;
        let end = markers.end.filter(|_| is_closed).unwrap_or_default();
        let calls_from = |from: usize| {
            let calls = match (markers.in_notation, is_closed) {
                (true, _) => parse_calls(&format!("{}{}{end}", markers.begin, &inside[from..]), tools),
                (false, true) => parse_between_markers(&inside[from..], tools),
                (false, false) => parse_calls(&inside[from..], tools),
            };
            calls.map(|calls| (from, calls))
        };
        // A malformed call may have no end. Another call then follows the last marker. A parameter may contain markers.
        let last = || match self.search.is_in_tags() {
            true => None,
            false => inside.rfind(markers.begin).map(|at| at + markers.begin.len()),
        };
        let Some((from, calls)) = calls_from(0).or_else(|| calls_from(last()?)) else { return false };
        if from > 0 {
            let before = without_gap(&inside[..from - markers.begin.len()]);
            self.emit_as_text(markers.begin, before, parts);
        }
        self.gap.clear();
        self.emit_calls(calls, parts);
        true
    }

    fn emit_calls(&mut self, calls: Vec<Call>, parts: &mut Vec<AnswerPart>) {
        (self.at_start, self.has_spoken) = (true, false);
        parts.extend(calls.into_iter().map(|(name, arguments)| AnswerPart::ToolCall { name, arguments }));
    }

    /// Emits a begin marker, the text after it and the white space before it.
    fn emit_as_text(&mut self, begin: &str, after: &str, parts: &mut Vec<AnswerPart>) {
        let text = format!("{}{begin}{after}", std::mem::take(&mut self.gap));
        self.emit(&text, parts);
    }

    fn emit(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let text = if self.at_start { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        (self.at_start, self.has_spoken) = (false, true);
        parts.push(match self.state {
            State::Reasoning(_) => AnswerPart::Reasoning(text.into()),
            _ => AnswerPart::Text(text.into()),
        });
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

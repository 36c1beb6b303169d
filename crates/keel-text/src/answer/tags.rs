//! Reads calls in tags: while they arrive, to find their end, and once they are whole, to find their parts.
//!
//! ```text
//! <function=NAME> <parameter=KEY> VALUE </parameter> ... </function> ...
//! ```
//!
//! A value may contain these tags, and the end marker of the call. The model may leave out `</parameter>`. So a value
//! ends:
//! - at `</parameter>`, if a next parameter, the end of the function, of the call or of the text follows;
//! - without any `</parameter>`: at a next parameter of the tool on a new line, at the end of the function if a next
//!   function or the end of the text follows, or at the end of the text.
//!
//! Within a value the end marker of the call counts if `</function>` is before it and a next call after it. Where the
//! answer ends within a value, [`TagReader::last_end`] says which of the markers counts.

use std::ops::Range;

use serde_json::Value;

use super::markers::{FUNCTION, FUNCTION_END, Markers, PARAMETER, PARAMETER_END, TOOL_CALL};
use super::search::{Begin, begin_of};
use super::tool_call::find;

/// A function that is called. All ranges are bytes of the text that was read.
#[derive(Clone, Debug)]
pub(super) struct Function {
    pub name: Range<usize>,
    /// Keys and values.
    pub parameters: Vec<(Range<usize>, Range<usize>)>,
}

/// The part of a call that the reader has reached. A position is that of the tag that led there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Outside a function.
    Between,
    /// In the name of a function, which begins at this position.
    Name(usize),
    /// In a function, outside its parameters.
    Function,
    /// In the key of a parameter, which begins at this position.
    Key(usize),
    /// In a value, also after tags that turned out to belong to it.
    Value,
    /// In a value, after `</parameter>` and white space. What follows decides whether the tag counts.
    Closed(usize),
    /// The same after `</function>`.
    FunctionClosed(usize),
    /// In a value, after the end marker of the call, which comes after `</function>` or is it.
    Ended(usize),
    /// In a value, after another end marker of the call. It counts only where the answer ends.
    Loose(usize),
    /// The text is no call. Its first end marker counts.
    Broken,
}

/// What the reader does next.
enum Step {
    Found(usize),
    /// The next decision needs more text.
    Wait,
    Go,
}

/// The state of reading. It looks at each byte a bounded number of times.
#[derive(Clone, Debug)]
pub(super) struct TagReader {
    /// Number of bytes that were read.
    read: usize,
    place: Place,
    functions: Vec<Function>,
    /// The key of the current parameter.
    key: Range<usize>,
    /// Where the current value begins.
    value: usize,
    /// The current value contains `</parameter>`.
    has_end: bool,
    /// `None` for a text that is a whole call, without its markers.
    markers: Option<Markers>,
    /// An end marker after `</function>` counts within a value, whatever follows.
    trusts_ends: bool,
    /// The first end marker in the current value that most likely is no part of it.
    likely_end: Option<usize>,
    /// The first `</function>` on its own line in the current value, if it is the end marker.
    line_end: Option<usize>,
    /// Number of bytes that were looked at, also if more than once.
    #[cfg(test)]
    pub(super) work: usize,
}

/// The functions that a text consists of. `is_closed`: an end marker follows the text, so its last value may end with
/// it. The end of the last function may be missing.
pub(super) fn parse(text: &str, tools: &[Value], is_closed: bool) -> Option<Vec<Function>> {
    let mut reader = TagReader::at(Place::Between, 0, None, false);
    reader.find(text, tools);
    let is_read = reader.read == text.len();
    match reader.place {
        Place::Between | Place::Function if is_read => {}
        Place::Closed(at) if is_read => reader.end_value(at),
        Place::FunctionClosed(at) if is_read && !reader.has_end => reader.end_value(at),
        Place::Value | Place::FunctionClosed(_) if is_closed && !reader.has_end => {
            reader.end_value(text.len());
        }
        _ => return None,
    }
    Some(reader.functions)
}

impl TagReader {
    fn at(place: Place, read: usize, markers: Option<Markers>, trusts_ends: bool) -> TagReader {
        TagReader {
            read,
            place,
            functions: Vec::new(),
            key: 0..0,
            value: 0,
            has_end: false,
            markers,
            trusts_ends,
            likely_end: None,
            line_end: None,
            #[cfg(test)]
            work: 0,
        }
    }

    /// Reads the text after the begin marker of `markers`. It has `gap` bytes of white space at its begin.
    pub(super) fn in_call(markers: Markers, gap: usize, trusts_ends: bool) -> TagReader {
        let place = if markers.is_tags() { Place::Name(gap) } else { Place::Between };
        TagReader::at(place, gap, Some(markers), trusts_ends)
    }

    /// The position of the end marker of the call. `text` may only grow between calls.
    pub(super) fn find(&mut self, text: &str, tools: &[Value]) -> Option<usize> {
        while self.read < text.len() {
            #[cfg(test)]
            (self.work += 1);
            match self.step(text, tools) {
                Step::Found(at) => return Some(at),
                Step::Wait => return None,
                Step::Go => {}
            }
        }
        None
    }

    /// The end marker of a call whose last value never ends, at the end of the answer. Text may follow the marker.
    /// `is_cut`: the value may have been cut off, so only a marker counts that is hardly a part of it.
    pub(super) fn last_end(&self, is_cut: bool) -> Option<usize> {
        match self.place {
            // The value has its end.
            Place::Closed(_) => None,
            _ if is_cut || self.likely_end.is_some() => self.likely_end,
            Place::Loose(at) | Place::Ended(at) => Some(at),
            _ => self.line_end,
        }
    }

    fn step(&mut self, text: &str, tools: &[Value]) -> Step {
        let rest = &text.as_bytes()[self.read..];
        let is_space = rest[0].is_ascii_whitespace();
        match self.place {
            Place::Name(start) | Place::Key(start) => self.step_in_name(start, rest[0]),
            Place::Value => return self.step_in_value(text, tools),
            Place::Broken => match self.tag(rest, &[]) {
                Begin::With(_) => return Step::Found(self.read),
                Begin::Open => return Step::Wait,
                Begin::Without => self.read += 1,
            },
            _ if is_space => self.read += 1,
            Place::Between | Place::Function => {
                let next = match self.place {
                    Place::Function => self.tag(rest, &[PARAMETER, FUNCTION_END]),
                    _ => self.tag(rest, &[FUNCTION.begin]),
                };
                match next {
                    Begin::With(tag) if self.ends_call(tag) => return Step::Found(self.read),
                    Begin::With(tag) => {
                        let after = self.read + tag.len();
                        let place = match tag {
                            FUNCTION_END => Place::Between,
                            PARAMETER => Place::Key(after),
                            _ => Place::Name(after),
                        };
                        self.go_on(tag, place);
                    }
                    Begin::Open => return Step::Wait,
                    Begin::Without => self.place = Place::Broken,
                }
            }
            Place::Closed(at) => match self.tag(rest, &[PARAMETER, FUNCTION_END]) {
                Begin::With(_) => {
                    self.end_value(at);
                    self.place = Place::Function;
                }
                Begin::Open => return Step::Wait,
                Begin::Without => (self.place, self.has_end) = (Place::Value, true),
            },
            Place::FunctionClosed(at) => match self.tag(rest, &[FUNCTION.begin]) {
                Begin::With(tag) if self.ends_call(tag) => return self.take_likely_end(self.read, tag),
                Begin::With(_) if !self.has_end => {
                    self.end_value(at);
                    self.place = Place::Between;
                }
                Begin::Open => return Step::Wait,
                _ => self.place = Place::Value,
            },
            Place::Ended(at) => return self.step_after_end(at, rest),
            Place::Loose(_) => self.place = Place::Value,
        }
        Step::Go
    }

    fn step_in_name(&mut self, start: usize, byte: u8) {
        let name = start..self.read;
        match byte {
            b'<' | b'\n' => self.place = Place::Broken,
            b'>' => {
                self.read += 1;
                if self.place == Place::Name(start) {
                    self.functions.push(Function { name, parameters: Vec::new() });
                    self.place = Place::Function;
                } else {
                    (self.key, self.value, self.has_end) = (name, self.read, false);
                    self.place = Place::Value;
                }
            }
            _ => self.read += 1,
        }
    }

    fn step_in_value(&mut self, text: &str, tools: &[Value]) -> Step {
        let (at, rest) = (self.read, &text.as_bytes()[self.read..]);
        // Each tag and each end marker begins with this character.
        let plain = rest.iter().position(|&byte| byte == b'<').unwrap_or(rest.len());
        if plain > 0 {
            self.read += plain;
            #[cfg(test)]
            (self.work += plain - 1);
            return Step::Go;
        }
        let begins_line = at > self.value && text.as_bytes()[at - 1] == b'\n';
        match self.tag(rest, &[PARAMETER_END, FUNCTION_END, PARAMETER]) {
            Begin::With(PARAMETER_END) => self.go_on(PARAMETER_END, Place::Closed(at)),
            Begin::With(FUNCTION_END) if self.ends_call(FUNCTION_END) => {
                if begins_line && self.trusts_ends {
                    return Step::Found(at);
                }
                self.line_end = self.line_end.or(Some(at).filter(|_| begins_line));
                self.go_on(FUNCTION_END, Place::Ended(at));
            }
            Begin::With(FUNCTION_END) => self.go_on(FUNCTION_END, Place::FunctionClosed(at)),
            Begin::With(PARAMETER) if begins_line && !self.has_end => match self.is_next_key(text, tools) {
                Some(true) => {
                    self.end_value(at);
                    self.place = Place::Function;
                }
                Some(false) => self.read += PARAMETER.len(),
                None => return Step::Wait,
            },
            Begin::With(PARAMETER) => self.read += PARAMETER.len(),
            Begin::With(end) => self.go_on(end, Place::Loose(at)),
            Begin::Open => return Step::Wait,
            Begin::Without => self.read += 1,
        }
        Step::Go
    }

    /// Reads what follows an end marker in a value. A next call says that the marker counts.
    fn step_after_end(&mut self, at: usize, rest: &[u8]) -> Step {
        let begin = self.markers.unwrap_or(FUNCTION).begin;
        let closer = self.markers.and_then(Markers::closer);
        match begin_of(rest, [begin, FUNCTION.begin, TOOL_CALL.begin].into_iter().chain(closer)) {
            Begin::With(tag) if Some(tag) == closer => return self.take_likely_end(at, tag),
            Begin::With(_) => return Step::Found(at),
            Begin::Open => return Step::Wait,
            Begin::Without => self.place = Place::Value,
        }
        Step::Go
    }

    /// Notes the end marker at `at`, and reads `tag`, which says that the marker hardly belongs to the value.
    fn take_likely_end(&mut self, at: usize, tag: &str) -> Step {
        if self.trusts_ends {
            return Step::Found(at);
        }
        self.likely_end.get_or_insert(at);
        self.go_on(tag, Place::Ended(at));
        Step::Go
    }

    /// Whether `rest` begins with one of `tags` or with the end marker of the call.
    fn tag(&self, rest: &[u8], tags: &[&'static str]) -> Begin {
        begin_of(rest, tags.iter().copied().chain(self.markers.and_then(|markers| markers.end)))
    }

    fn ends_call(&self, tag: &str) -> bool {
        self.markers.is_some_and(|markers| markers.end == Some(tag))
    }

    /// Whether the parameter that begins here is one of the function that is not set yet. `None` if more text decides.
    fn is_next_key(&self, text: &str, tools: &[Value]) -> Option<bool> {
        let rest = &text.as_bytes()[self.read + PARAMETER.len()..];
        let function = self.functions.last()?;
        let tool = find(tools, &text[function.name.clone()]);
        let properties = tool.and_then(|tool| tool["parameters"]["properties"].as_object());
        let set = || function.parameters.iter().map(|(key, _)| key).chain([&self.key]);
        let is_open = |key: &&String| !set().any(|set| text[set.clone()] == key[..]);
        let mut may_grow = false;
        for key in properties.into_iter().flat_map(|properties| properties.keys()).filter(is_open) {
            match rest.strip_prefix(key.as_bytes()) {
                Some([b'>', ..]) => return Some(true),
                Some([]) => may_grow = true,
                Some(_) => {}
                None => may_grow |= key.as_bytes().starts_with(rest),
            }
        }
        (!may_grow).then_some(false)
    }

    fn go_on(&mut self, tag: &str, place: Place) {
        self.read += tag.len();
        self.place = place;
    }

    fn end_value(&mut self, at: usize) {
        (self.likely_end, self.line_end) = (None, None);
        let parameter = (self.key.clone(), self.value..at);
        if let Some(function) = self.functions.last_mut() {
            function.parameters.push(parameter);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(markers: Markers, text: &str, expected: Option<usize>, ends: [Option<usize>; 2]) {
        let tools = [json!({"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}})];
        for step in [1, 3, 100] {
            let mut reader = TagReader::in_call(markers, 0, false);
            let sizes = (1..text.len()).step_by(step).chain([text.len()]);
            let found = sizes.filter_map(|at| reader.find(&text[..at], &tools)).next();
            assert_eq!(found, expected, "{text} in pieces of {step}");
            if found.is_none() {
                let last = [reader.last_end(false), reader.last_end(true)];
                assert_eq!(last, ends, "{text} in pieces of {step}");
            }
        }
    }

    #[test]
    fn markers_in_parameters_do_not_count() {
        let end = "</tool_call>";
        for (before, after) in [
            ("<function=f><parameter=a>1</parameter> </function> ", ""),
            ("<function=f>", "</parameter></function></tool_call>"),
            ("<function=f><parameter=a></tool_call></parameter>b</tool_call></parameter>\n", ""),
            ("<function=f><parameter=a>1</function>", " <tool_call>"),
            ("<function=f><parameter=a>1</function>\n", "\n<function="),
            ("<function=f>junk<parameter=a>", ""),
            ("<function=f><parameter=a>1\n<parameter=b>2</parameter>", ""),
            ("<parameter=a>", ""),
        ] {
            check(TOOL_CALL, &format!("{before}{end}{after}"), Some(before.len()), [None; 2]);
        }
        let function = "<function=f><parameter=a>";
        // At the end of the answer only an end after `</function>`, or at the end of the text, counts.
        check(TOOL_CALL, &format!("{function}</tool_call>b"), None, [None; 2]);
        check(TOOL_CALL, &format!("{function}</tool_call>\n<tool_call>"), None, [None; 2]);
        check(TOOL_CALL, &format!("{function}</tool_call> "), None, [Some(25), None]);
        let both = "</tool_call> b</function>\n</tool_call>\nc";
        check(TOOL_CALL, &format!("{function}{both}"), None, [Some(51); 2]);
        // The end of the text counts as the end of the call.
        check(TOOL_CALL, &format!("{function}</tool_call></parameter> "), None, [None; 2]);
        let body = "f><parameter=a></function> b</parameter>\n";
        check(FUNCTION, &format!("{body}</function>"), Some(body.len()), [None; 2]);
        check(FUNCTION, "f><parameter=a>1</function> b", None, [None; 2]);
        check(FUNCTION, "f><parameter=a>1\n</function> b", None, [Some(17), None]);
        check(FUNCTION, "f><parameter=a>1</function> </tool_call> b", None, [Some(16); 2]);
        check(FUNCTION, "f><parameter=a>1</function> </tool_call><tool_call>", Some(16), [None; 2]);
    }
}

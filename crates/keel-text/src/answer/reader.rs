//! Reads the calls that a text begins with.
//!
//! | who | notation |
//! |---|---|
//! | Hermes, Qwen, Llama, SmolLM3 | a JSON object with `name` and `arguments` (or `parameters`), one after the other |
//! | Phi-4-mini, Mistral up to 2024 | a JSON list of such objects |
//! | Mistral from 2025 on | `[TOOL_CALLS]NAME[ARGS]{...}`, one after the other |
//! | Qwen3-Coder | `<function=NAME> <parameter=KEY> VALUE </parameter> ... </function>` |
//! | GLM-4 | `NAME`, a line end, a JSON object |
//! | GLM from 4.5 on | `NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ...`, or `NAME` without arguments |
//! | OLMo 3 | `NAME(KEY=VALUE, ...)`, one after the other |
//!
//! The reader keeps nothing between two readings. When more text has come, the same text is read again from its begin.
//! What a reading decides stays decided if the text grows.

use serde::de::DeserializeOwned;
use serde_json::{Deserializer, Map, Value};

use super::markers::{
    CALLS, FUNCTION, FUNCTOOLS, KEY, KEY_END, MISTRAL, MISTRAL_ARGUMENTS, MISTRAL_ID, Markers, VALUE,
    VALUE_END,
};
use super::schema::typed;

/// A call of a tool.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub name: String,
    /// A JSON object as text.
    pub arguments: String,
}

/// What comes after a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// More text may come.
    More,
    /// Nothing: the answer has ended.
    Whole,
    /// The answer was cut off.
    Cut,
}

/// What a text begins with.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// Calls, and the number of bytes that they take. The answer may have cut off another call after them.
    Calls(Vec<Call>, usize),
    /// This number of bytes is text. Only the begin marker is if no call follows it.
    Text(usize),
    /// More text decides.
    Open,
}

/// Why the reader stopped before the end of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The text is no call.
    Wrong,
    /// The text has ended.
    Open,
    /// The text has ended before a call was named. If it is cut off here, it may as well be something else.
    Unnamed,
}

pub(super) type Read<T> = Result<T, Stop>;

/// Reads a text that begins with the begin marker of `markers`, or without markers where an answer begins. Returns also
/// how many bytes the reading took.
pub(super) fn read_from(text: &str, markers: Option<Markers>, tools: &[Value], end: End) -> (Reading, usize) {
    let begin = markers.map_or(0, |markers| markers.begin.len());
    let mut reader = Reader {
        text,
        at: begin,
        markers,
        tools,
        end,
        calls: Vec::new(),
        in_tags: false,
        is_text: false,
        whole: begin,
    };
    let result = reader.calls();
    let Reader { at, calls, in_tags, is_text, whole, .. } = reader;
    let reading = match result {
        Ok(()) if is_text => Reading::Text(text[..at].trim_ascii_end().len()),
        Ok(()) => Reading::Calls(calls, at),
        Err(Stop::Open | Stop::Unnamed) if end == End::More => Reading::Open,
        Err(Stop::Open | Stop::Unnamed) if end == End::Cut && is_text => Reading::Text(text.len()),
        Err(Stop::Open) if end == End::Cut => Reading::Calls(calls, text.len()),
        Err(Stop::Unnamed) if end == End::Cut && !calls.is_empty() => Reading::Calls(calls, text.len()),
        // A marker inside a call in tags begins no call.
        Err(Stop::Wrong) if in_tags => Reading::Text(at),
        Err(_) if in_tags => Reading::Text(text.len()),
        Err(_) => Reading::Text(text[..whole].trim_ascii_end().len()),
    };
    (reading, if matches!(result, Ok(()) | Err(Stop::Wrong)) { at } else { text.len() })
}

#[cfg(test)]
pub(super) fn read(text: &str, markers: Option<Markers>, tools: &[Value], end: End) -> Reading {
    read_from(text, markers, tools, end).0
}

/// Finds a tool (in OpenAI's form) by its name.
pub(super) fn find<'a>(tools: &'a [Value], name: &str) -> Option<&'a Value> {
    definitions(tools).find(|tool| tool["name"] == name)
}

fn definitions(tools: &[Value]) -> impl Iterator<Item = &Value> {
    tools.iter().map(|tool| tool.get("function").unwrap_or(tool))
}

/// The names of the tools.
pub(super) fn names(tools: &[Value]) -> impl Iterator<Item = &str> {
    definitions(tools).filter_map(|tool| tool["name"].as_str())
}

/// Whether a name of a function or of a key may contain this character.
pub(super) fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || "_-.".contains(c)
}

/// Most bytes of the name of a tool that was not offered. A longer one is text without spaces, such as Chinese.
pub(super) const NAME_BYTES_MAX: usize = 64;

/// The text after a name and what Mistral writes between the name and the arguments. Any of these may be missing. An id
/// has at least one character. A text that is too long for a name is returned whole.
pub(super) fn after_name(text: &str) -> &str {
    fn after_word(text: &str) -> &str {
        text.trim_start_matches(is_of_name).trim_ascii_start()
    }
    if text.find(|c: char| !is_of_name(c)).unwrap_or(text.len()) > NAME_BYTES_MAX {
        return text;
    }
    let rest = after_word(text);
    let rest = match rest.strip_prefix(MISTRAL_ID).map(str::trim_ascii_start) {
        Some(id) if id.starts_with(is_of_name) => after_word(id),
        _ => rest,
    };
    rest.strip_prefix(MISTRAL_ARGUMENTS).unwrap_or(rest).trim_ascii_start()
}

/// The text after the brackets at its begin.
pub(super) fn after_brackets(text: &str) -> &str {
    text.trim_start_matches(|c: char| c == '[' || c.is_ascii_whitespace())
}

/// Whether `text` begins with `word`, or is a part of it that may grow.
pub(super) fn fits(text: &str, word: &str) -> bool {
    text.starts_with(word) || word.starts_with(text)
}

pub(super) struct Reader<'a> {
    pub text: &'a str,
    /// Number of bytes that were read.
    pub at: usize,
    /// The markers around the calls. `None` for calls without markers.
    pub markers: Option<Markers>,
    pub tools: &'a [Value],
    pub end: End,
    /// The calls that are whole.
    pub calls: Vec<Call>,
    /// A call in tags has begun.
    pub in_tags: bool,
    /// One of the calls is that of a tool that was not offered, or has an argument without a key. All of them are text,
    /// and a marker inside them begins no call.
    pub is_text: bool,
    /// Number of bytes that begin no other call if these are none: the begin marker, and calls that begin with a name.
    pub whole: usize,
}

impl<'a> Reader<'a> {
    pub fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// The text after white space.
    pub fn next(&mut self) -> &'a str {
        self.at = self.text.len() - self.rest().trim_ascii_start().len();
        self.rest()
    }

    /// Why the text does not go on as a call does.
    pub fn stop(&mut self) -> Stop {
        if self.next().is_empty() { Stop::Open } else { Stop::Wrong }
    }

    /// Whether one of `words` comes next.
    pub fn comes(&mut self, words: &[&str]) -> Read<bool> {
        let rest = self.next();
        let comes = words.iter().any(|word| rest.starts_with(word));
        let may_grow = self.end != End::Whole && words.iter().any(|word| word.starts_with(rest));
        if !comes && may_grow { Err(Stop::Open) } else { Ok(comes) }
    }

    /// Reads `word` if it comes next.
    pub fn take(&mut self, word: &str) -> Read<bool> {
        let comes = self.comes(&[word])?;
        self.at += if comes { word.len() } else { 0 };
        Ok(comes)
    }

    pub fn expect(&mut self, word: &str) -> Read<()> {
        if self.take(word)? { Ok(()) } else { Err(self.stop()) }
    }

    /// Whether the answer has ended here.
    pub fn is_over(&mut self) -> bool {
        self.end == End::Whole && self.rest().trim().is_empty()
    }

    /// The end marker that comes after all calls.
    pub fn outer_end(&self) -> Option<&'static str> {
        self.markers.filter(|markers| !markers.is_tags())?.end
    }

    /// Reads calls, one after the other, up to their end.
    fn calls(&mut self) -> Read<()> {
        if self.markers.is_some_and(Markers::is_tags) {
            self.at = 0;
            return self.function();
        }
        let result = self.lists();
        // A word at the begin of an answer may be the name of a tool, and a bracket may begin a list.
        let text = self.text.trim_start_matches(['[', ']', ' ', '\t', '\r', '\n']);
        let has_begun = self.markers.is_some() || text.contains(['{', '[', '\n']);
        if has_begun { result } else { result.map_err(|stop| stop.if_open(Stop::Unnamed)) }
    }

    fn lists(&mut self) -> Read<()> {
        loop {
            if !self.calls.is_empty() {
                // Without an end marker each of these is on its own, so what follows may be a call.
                if self.is_text && self.outer_end().is_none() {
                    return Ok(());
                }
                let is_mistral = self.markers.is_some_and(|markers| markers.begin == MISTRAL);
                self.whole = if is_mistral { self.at } else { self.whole };
                if self.ends()? {
                    return Ok(());
                }
                if is_mistral {
                    self.take(MISTRAL)?;
                }
            }
            let is_list = self.take(FUNCTOOLS)? || self.take("[")?;
            while !(is_list && self.take("]")?) {
                self.call()?;
                let _ = self.take(",")? || self.take(";")?;
                if !is_list {
                    break;
                }
            }
        }
    }

    /// Whether the calls end here. Those without markers also end where calls with markers begin.
    fn ends(&mut self) -> Read<bool> {
        let is_closed = match self.outer_end() {
            Some(end) => self.take(end)?,
            None => self.markers.is_none() && self.comes(&CALLS.map(|markers| markers.begin))?,
        };
        // The answer may end with any white space.
        if !is_closed && self.end != End::Whole && self.rest().trim().is_empty() {
            return Err(Stop::Open);
        }
        Ok(is_closed || self.is_over())
    }

    fn call(&mut self) -> Read<()> {
        if self.next().starts_with('{') {
            return self.object();
        }
        // A list in a list is no call. Its first element shows whether it is JSON.
        if self.end != End::Whole && self.rest().starts_with('[') && after_brackets(self.rest()).is_empty() {
            return Err(Stop::Unnamed);
        }
        if self.markers.is_some() && self.comes(&[FUNCTION.begin])? {
            return self.function();
        }
        let (tools, rest) = (self.tools, self.rest());
        if self.end != End::Whole
            && names(tools).any(|name| name.len() > rest.len() && name.starts_with(rest))
        {
            return Err(Stop::Open);
        }
        let comes =
            |name: &&str| rest.strip_prefix(*name).is_some_and(|after| !after.starts_with(is_of_name));
        let name = match names(tools).filter(comes).max_by_key(|name| name.len()) {
            Some(name) => {
                self.at += name.len();
                name
            }
            None if self.markers.is_some() => {
                let name = self.identifier()?;
                if name.len() > NAME_BYTES_MAX {
                    return Err(Stop::Wrong);
                }
                self.is_text = true;
                name
            }
            None => return Err(self.stop()),
        };
        let arguments = self.arguments(name)?;
        self.push(name, arguments);
        self.whole = self.at;
        Ok(())
    }

    pub fn push(&mut self, name: &str, arguments: Map<String, Value>) {
        let arguments = Value::Object(arguments).to_string();
        self.calls.push(Call { name: name.to_string(), arguments });
    }

    /// Reads the arguments after a name.
    fn arguments(&mut self, name: &str) -> Read<Map<String, Value>> {
        let from = self.at;
        self.next();
        if self.markers.is_none() {
            let is_below = self.text[from..self.at].contains('\n');
            return if is_below { self.json_object() } else { Err(self.stop()) };
        }
        if let Some(end) = self.outer_end()
            && self.comes(&[end])?
        {
            return Ok(Map::new());
        }
        if self.take("(")? {
            let from = self.at;
            let result = self.python_arguments();
            // The strings that were read hide markers. One that contains the end of the call may lack its quote. So may
            // one that contains the begin of a next call, where calls have no end.
            let outer = self.outer_end().or(self.markers.map(|markers| markers.begin));
            let hides_end = outer.is_some_and(|marker| self.text[from..self.at].contains(marker));
            self.whole = if result.is_err() && !hides_end { self.at } else { self.whole };
            return result;
        }
        if self.take(KEY)? {
            return self.keys(name);
        }
        if self.take(MISTRAL_ID)? {
            self.identifier()?;
        }
        self.take(MISTRAL_ARGUMENTS)?;
        self.json_object()
    }

    fn json_object(&mut self) -> Read<Map<String, Value>> {
        if self.next().starts_with('{') { self.json() } else { Err(self.stop()) }
    }

    /// Reads the characters of a name.
    pub fn identifier(&mut self) -> Read<&'a str> {
        let rest = self.next();
        let len = rest.len() - rest.trim_start_matches(is_of_name).len();
        self.at += len;
        if len > 0 { Ok(&rest[..len]) } else { Err(self.stop()) }
    }

    /// Reads keys and values in tags. The begin marker of a value may be missing.
    fn keys(&mut self, name: &str) -> Read<Map<String, Value>> {
        let mut arguments = Map::new();
        loop {
            let key = self.until(KEY_END, self.outer_end())?.trim();
            // With its begin marker a value may contain the end of the call.
            let stop = if self.take(VALUE)? { None } else { self.outer_end() };
            let value = self.until(VALUE_END, stop)?;
            arguments.insert(key.to_string(), typed(value, find(self.tools, name), key));
            if !self.take(KEY)? {
                return Ok(arguments);
            }
        }
    }

    /// Reads the text before `end`, and `end`. It is missing if a next key or `stop` comes first.
    fn until(&mut self, end: &str, stop: Option<&str>) -> Read<&'a str> {
        let rest = self.rest();
        for (at, _) in rest.match_indices('<') {
            let tag = &rest[at..];
            if tag.starts_with(end) {
                self.at += at + end.len();
                return Ok(&rest[..at]);
            }
            if tag.starts_with(KEY) || stop.is_some_and(|stop| tag.starts_with(stop)) {
                self.at += at;
                return Err(Stop::Wrong);
            }
        }
        Err(Stop::Open)
    }

    /// Reads a value of JSON.
    pub fn json<T: DeserializeOwned>(&mut self) -> Read<T> {
        let mut values = Deserializer::from_str(self.rest()).into_iter();
        match values.next() {
            Some(Ok(value)) => {
                self.at += values.byte_offset();
                Ok(value)
            }
            Some(Err(error)) if !error.is_eof() => {
                // The error's column counts bytes, so it may stand inside a character.
                let lines = self.rest().split_inclusive('\n').take(error.line() - 1);
                self.at += lines.map(str::len).sum::<usize>() + error.column();
                self.at -= (0..4).find(|&n| self.text.is_char_boundary(self.at - n)).unwrap_or(0);
                Err(Stop::Wrong)
            }
            _ => Err(Stop::Open),
        }
    }
}

impl Stop {
    pub fn if_open(self, other: Stop) -> Stop {
        if self == Stop::Open { other } else { self }
    }
}

//! Calls in tags.
//!
//! ```text
//! <function=NAME> <parameter=KEY> VALUE </parameter> ... </function> ...
//! ```
//!
//! A value may contain these tags, and the end marker of the call. The model may leave out `</parameter>`. So a value
//! ends:
//! - at `</parameter>`, if a next parameter, the end of the function, of the call or of the answer follows;
//! - without any `</parameter>`: at a next parameter of the tool on a new line, at the end of the function if a next
//!   function or the end of the answer follows, or at the end of the call if the answer ends with it;
//! - at the end of the function if the end marker of the call and a next call follow.
//!
//! Where the answer ends within a value, the first of these ends counts, whatever follows it:
//! - the end of a function that the end marker of the call follows;
//! - if the answer was not cut off, the end of a function without markers on its own line.

use serde_json::{Map, Value};

use super::markers::{FUNCTION, FUNCTION_END, Markers, PARAMETER, PARAMETER_END, TOOL_CALL};
use super::reader::{End, NAME_BYTES_MAX, Read, Reader, Stop, find, fits, is_of_name, names};
use super::schema::typed;

/// Whether this may be the name of a tool that was not offered, or a part of it.
fn is_name(text: &str) -> bool {
    text.len() <= NAME_BYTES_MAX && text.chars().all(is_of_name)
}

impl<'a> Reader<'a> {
    /// Reads a function. One that was not offered counts, too, if a parameter follows on a new line. So a marker inside
    /// its parameters begins no call.
    pub(super) fn function(&mut self) -> Read<()> {
        self.in_tags = self.markers.is_some_and(|markers| markers.end.is_some());
        self.at += FUNCTION.begin.len();
        let rest = self.rest();
        let name =
            self.tag_end().map_err(|stop| match names(self.tools).any(|name| name.starts_with(rest)) {
                true => stop,
                false if is_name(rest) => stop.if_open(Stop::Unnamed),
                false => Stop::Wrong,
            })?;
        let tool = find(self.tools, name);
        if tool.is_none() {
            self.is_text = true;
            // The tag ends before what is not of a name, however much of it has come.
            self.at -= if is_name(name) { 0 } else { name.len() + 1 };
            if !is_name(name) || !fits(self.rest(), &format!("\n{PARAMETER}")) {
                return Err(Stop::Wrong);
            }
        }
        let mut arguments = Map::new();
        while self.take(PARAMETER)? {
            let key = self.tag_end()?;
            let value = self.value(key, tool, &arguments)?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            arguments.insert(key.to_string(), typed(value, tool, key));
        }
        let is_closed = self.take(FUNCTION_END)? || self.is_over();
        if !is_closed && !self.comes(self.outer_end().as_slice())? {
            return Err(self.stop());
        }
        self.push(name, arguments);
        Ok(())
    }

    /// Reads the rest of a tag. Returns what it names.
    fn tag_end(&mut self) -> Read<&'a str> {
        let rest = self.rest();
        let end = rest.find(['<', '\n', '>']).ok_or(Stop::Open)?;
        if !rest[end..].starts_with('>') {
            return Err(Stop::Wrong);
        }
        self.at += end + 1;
        Ok(&rest[..end])
    }

    /// Reads the value of the parameter `key`. `set`: the parameters before it.
    fn value(&mut self, key: &str, tool: Option<&Value>, set: &Map<String, Value>) -> Read<&'a str> {
        let (text, from) = (self.text, self.at);
        // The value contains `</parameter>`.
        let mut has_end = false;
        while let Some(plain) = self.rest().find('<') {
            let at = self.at + plain;
            self.at = at;
            let begins_line = at > from && text[..at].ends_with('\n');
            if self.take(PARAMETER_END)? {
                let next = [Some(PARAMETER), Some(FUNCTION_END), self.outer_end()];
                let next: Vec<_> = next.into_iter().flatten().collect();
                if self.comes(&next)? || self.is_over() {
                    return Ok(&text[from..at]);
                }
                has_end = true;
                continue;
            }
            let ends = if self.take(FUNCTION_END)? {
                self.ends_function(begins_line, has_end)?
            } else if begins_line && !has_end && self.take(PARAMETER)? {
                self.is_next_key(key, tool, set)?
            } else if let Some(end) = self.outer_end()
                && self.take(end)?
            {
                self.is_over() && !has_end
            } else {
                self.at += 1;
                false
            };
            if ends {
                self.at = at;
                return Ok(&text[from..at]);
            }
        }
        Err(Stop::Open)
    }

    /// Whether `</function>`, which was just read, ends the value that contains it.
    fn ends_function(&mut self, begins_line: bool, has_end: bool) -> Read<bool> {
        let is_alone = self.markers.is_some_and(Markers::is_tags);
        let begin = self.markers.map_or(FUNCTION.begin, |markers| markers.begin);
        let begins = [FUNCTION.begin, TOOL_CALL.begin, begin];
        let next = if is_alone { &begins[..2] } else { &begins[..1] };
        let mut ends = self.comes(next)? && (is_alone || !has_end);
        let close = self.markers.and_then(|markers| markers.closer().or(markers.end));
        if let Some(close) = close
            && self.take(close)?
        {
            // At the end of the answer no regular end has come.
            ends = self.end != End::More || self.comes(&begins)?;
        }
        if ends && has_end {
            return Err(Stop::Wrong);
        }
        let is_last = self.is_over() || self.end == End::Whole && is_alone && begins_line;
        Ok(ends || is_last && !has_end)
    }

    /// Whether the parameter that begins here is one of the tool that is not set yet.
    fn is_next_key(&self, key: &str, tool: Option<&Value>, set: &Map<String, Value>) -> Read<bool> {
        let properties = tool.and_then(|tool| tool["parameters"]["properties"].as_object());
        let mut may_grow = false;
        for next in properties.into_iter().flat_map(Map::keys) {
            if next == key || set.contains_key(next) {
                continue;
            }
            let tag = format!("{next}>");
            if self.rest().starts_with(&tag) {
                return Ok(true);
            }
            may_grow |= tag.starts_with(self.rest());
        }
        if may_grow && self.end != End::Whole { Err(Stop::Open) } else { Ok(false) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::reader::{Reading, read};
    use serde_json::json;

    /// Where the end marker of the call is, if the text, or the answer that ends with it, has one that counts.
    fn end_of(markers: Markers, text: &str, end: End) -> Option<usize> {
        let tools = [json!({"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}})];
        let text = format!("{}{text}", markers.begin);
        let Reading::Calls(calls, taken) = read(&text, Some(markers), &tools, end) else { return None };
        let at = text[..taken].strip_suffix(markers.end?).filter(|_| !calls.is_empty())?.len();
        Some(at - markers.begin.len())
    }

    /// `ends`: the end markers that count where the answer ends, and where it is cut off.
    fn check(markers: Markers, text: &str, expected: Option<usize>, ends: [Option<usize>; 2]) {
        let found = (1..=text.len()).find_map(|at| end_of(markers, &text[..at], End::More));
        assert_eq!(found, expected, "{text}");
        if found.is_none() {
            let last = [End::Whole, End::Cut].map(|end| end_of(markers, text, end));
            assert_eq!(last, ends, "{text}");
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
            ("<function=f><parameter=a>1\n<parameter=b>2</parameter>", ""),
        ] {
            check(TOOL_CALL, &format!("{before}{end}{after}"), Some(before.len()), [None; 2]);
        }
        for wrong in ["<function=f>junk<parameter=a></tool_call>", "<parameter=a></tool_call>"] {
            let text = format!("<tool_call>{wrong}");
            let reading = read(&text, Some(TOOL_CALL), &[json!({"name": "f"})], End::More);
            assert!(matches!(reading, Reading::Text(..=23)), "{wrong}: {reading:?}");
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

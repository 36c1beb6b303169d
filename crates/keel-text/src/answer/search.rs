//! Searches for the marker that ends a call, while the call still grows.

use super::markers::{FUNCTION, Markers};

/// Begins a parameter of a call in tags ([`FUNCTION`]), and ends it.
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// The state of a search. It reads each byte once.
///
/// A marker inside a value does not end a call. A value is a JSON string, or a parameter of a call in tags.
///
/// Malformed JSON may have a string that never ends. So a string with a control character, which JSON forbids, counts
/// as no string.
///
/// A parameter may contain its own end marker. So that marker counts only if a next parameter, the end of the function
/// or the end of the call follows it. The end marker of the call counts inside a parameter if the begin marker of the
/// next call follows it: the end of the parameter is then missing.
#[derive(Clone, Debug, Default)]
pub(super) struct MarkerSearch {
    /// Number of bytes that were read.
    read: usize,
    place: Place,
    /// The first marker inside the current value.
    hidden: Option<usize>,
    /// The marker that begins the call. Empty if markers inside parameters count.
    begin: &'static str,
    /// Number of bytes that were looked at, also if more than once.
    #[cfg(test)]
    pub(super) work: usize,
}

/// The part of a call that the search has reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// Only white space and opening brackets so far.
    #[default]
    Unknown,
    /// The text has neither strings nor tags.
    Ignored,
    /// Outside a JSON string.
    Outside,
    /// Inside a JSON string.
    Inside,
    /// Inside a JSON string, after a backslash.
    Escaped,
    /// In a call in tags, outside a parameter.
    Tags,
    /// Inside a parameter.
    Parameter,
    /// After a parameter's end marker and white space. What follows decides whether the marker counts.
    Closed,
    /// Inside a parameter, after white space and the call's end marker, which is at this position. What follows decides
    /// whether the marker counts.
    Ended(usize),
}

/// What a search does next.
enum Step {
    Found(usize),
    /// The next decision needs more text.
    Wait,
    Go,
}

/// Whether a text begins with a word.
#[derive(PartialEq, Eq)]
enum Begin {
    /// With a word of this length.
    With(usize),
    /// The text is a part of a word and may grow.
    Open,
    Without,
}

fn begin_of<'a>(text: &[u8], words: impl Iterator<Item = &'a str> + Clone) -> Begin {
    match words.clone().find(|word| text.starts_with(word.as_bytes())) {
        Some(word) => Begin::With(word.len()),
        None if words.clone().any(|word| word.as_bytes().starts_with(text)) => Begin::Open,
        None => Begin::Without,
    }
}

impl MarkerSearch {
    /// Begins a search in a text that is JSON.
    pub(super) fn in_json() -> MarkerSearch {
        MarkerSearch { place: Place::Outside, ..MarkerSearch::default() }
    }

    /// Begins a search after the begin marker of `markers`. `reads_tags`: markers inside parameters do not count.
    pub(super) fn in_call(markers: Markers, reads_tags: bool) -> MarkerSearch {
        let place = match markers == FUNCTION {
            true if reads_tags => Place::Tags,
            true => Place::Ignored,
            false => Place::Unknown,
        };
        let begin = if reads_tags { markers.begin } else { "" };
        MarkerSearch { place, begin, ..MarkerSearch::default() }
    }

    /// The position of the first of `markers` outside values. `text` may only grow between calls.
    pub(super) fn find(&mut self, text: &str, markers: &[&str]) -> Option<usize> {
        while let Some(&byte) = text.as_bytes().get(self.read) {
            #[cfg(test)]
            (self.work += 1);
            let rest = &text.as_bytes()[self.read..];
            if self.is_in_tags() {
                match self.step_in_tags(rest, markers) {
                    Step::Found(at) => return Some(at),
                    Step::Wait => return None,
                    Step::Go => continue,
                }
            }
            match begin_of(rest, markers.iter().copied()) {
                Begin::With(_) if !matches!(self.place, Place::Inside | Place::Escaped) => {
                    return Some(self.read);
                }
                Begin::With(_) => {
                    self.hidden.get_or_insert(self.read);
                }
                Begin::Open => return None,
                Begin::Without => {}
            }
            if self.place == Place::Unknown && !self.begin.is_empty() {
                match begin_of(rest, std::iter::once(FUNCTION.begin)) {
                    Begin::With(bytes) => {
                        self.go_on(Place::Tags, bytes);
                        continue;
                    }
                    Begin::Open => return None,
                    Begin::Without => {}
                }
            }
            self.place = self.after(byte);
            match self.place {
                Place::Outside => self.hidden = None,
                Place::Ignored if self.hidden.is_some() => return self.hidden,
                _ => {}
            }
            self.read += 1;
        }
        None
    }

    /// The position of the first marker inside the current value, at the end of the text. A parameter's end marker
    /// counts there.
    pub(super) fn hidden(&self) -> Option<usize> {
        self.hidden.filter(|_| self.place != Place::Closed)
    }

    /// Whether the call is written in tags.
    pub(super) fn is_in_tags(&self) -> bool {
        matches!(self.place, Place::Tags | Place::Parameter | Place::Closed | Place::Ended(_))
    }

    /// Number of bytes before the first place where a marker may be found.
    pub(super) fn certain(&self) -> usize {
        self.hidden.unwrap_or(self.read)
    }

    /// Forgets the first bytes of the text, at most [`MarkerSearch::certain`].
    pub(super) fn forget(&mut self, bytes: usize) {
        self.read -= bytes;
        self.hidden = self.hidden.map(|at| at - bytes);
    }

    fn go_on(&mut self, place: Place, bytes: usize) {
        self.place = place;
        self.read += bytes;
    }

    /// Makes one decision in a call in tags. `rest` is the text that was not read yet.
    fn step_in_tags(&mut self, rest: &[u8], markers: &[&str]) -> Step {
        let ends = markers.iter().copied();
        let is_space = rest.first().is_some_and(u8::is_ascii_whitespace);
        match self.place {
            Place::Closed | Place::Ended(_) if is_space => self.read += 1,
            Place::Closed => match begin_of(rest, ends.chain([PARAMETER, "</function>"])) {
                Begin::With(_) => (self.place, self.hidden) = (Place::Tags, None),
                Begin::Open => return Step::Wait,
                Begin::Without => self.place = Place::Parameter,
            },
            Place::Ended(at) => match begin_of(rest, std::iter::once(self.begin)) {
                Begin::With(_) => return Step::Found(at),
                Begin::Open => return Step::Wait,
                Begin::Without => self.place = Place::Parameter,
            },
            place => {
                let is_inside = place == Place::Parameter;
                let tag = if is_inside { PARAMETER_END } else { PARAMETER };
                match (begin_of(rest, ends), begin_of(rest, std::iter::once(tag))) {
                    (Begin::With(bytes), _) if is_inside => {
                        self.hidden.get_or_insert(self.read);
                        self.go_on(Place::Ended(self.read), bytes);
                    }
                    (Begin::With(_), _) => return Step::Found(self.read),
                    (_, Begin::With(bytes)) => {
                        self.go_on(if is_inside { Place::Closed } else { Place::Parameter }, bytes);
                    }
                    (Begin::Open, _) | (_, Begin::Open) => return Step::Wait,
                    _ => self.read += 1,
                }
            }
        }
        Step::Go
    }

    fn after(&self, byte: u8) -> Place {
        match (self.place, byte) {
            (Place::Unknown, b'{') => Place::Outside,
            (Place::Unknown, b'[' | b' ' | b'\t' | b'\n' | b'\r') => Place::Unknown,
            (Place::Unknown, _) => Place::Ignored,
            (Place::Outside, b'"') => Place::Inside,
            // JSON has backslashes only in strings.
            (Place::Outside, b'\\') => Place::Ignored,
            (Place::Inside, b'"') => Place::Outside,
            (Place::Inside, b'\\') => Place::Escaped,
            (Place::Inside | Place::Escaped, ..b' ') => Place::Ignored,
            (Place::Escaped, _) => Place::Inside,
            (place, _) => place,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::markers::TOOL_CALL;

    fn check(search: &MarkerSearch, text: &str, end: &str, expected: Option<usize>, hidden: Option<usize>) {
        for step in [1, 3, 100] {
            let mut search = search.clone();
            let ends = (1..text.len()).step_by(step).chain([text.len()]);
            let found = ends.filter_map(|at| search.find(&text[..at], &[end])).next();
            assert_eq!(found, expected, "{text} in pieces of {step}");
            if found.is_none() {
                assert_eq!(search.hidden(), hidden, "{text} in pieces of {step}");
            }
        }
    }

    #[test]
    fn markers_in_strings_do_not_count() {
        for (text, expected) in [
            ("a\"b</c>", Some(3)),
            (r#"{"a": "</c>"}</c>"#, Some(13)),
            (r#" [ {"a": "\"</c>"}</c>"#, Some(18)),
            ("{\"a</c>\n", Some(3)),
            ("{\"a</c>", None),
            ("{\\\"a</c>", Some(4)),
            ("{} </c", None),
        ] {
            for step in [1, 3, 100] {
                let mut search = MarkerSearch::default();
                let ends = (1..text.len()).step_by(step).chain([text.len()]);
                let found = ends.filter_map(|end| search.find(&text[..end], &["</c>"])).next();
                assert_eq!(found, expected, "{text} in pieces of {step}");
            }
        }
    }

    #[test]
    fn markers_in_parameters_do_not_count() {
        let call = MarkerSearch::in_call(TOOL_CALL, true);
        let end = "</tool_call>";
        for (before, after) in [
            (" <function=f><parameter=a>1</parameter> </function> ", ""),
            ("<function=f>", "</parameter></function></tool_call>"),
            ("<function=f><parameter=a></tool_call></parameter>b</tool_call></parameter>\n", ""),
            ("<function=f><parameter=a>1</function>", " <tool_call>"),
            ("<parameter=a>", ""),
        ] {
            let text = format!("{before}{end}{after}");
            check(&call, &text, end, Some(before.len()), None);
        }
        check(&call, "<function=f><parameter=a></tool_call>b", end, None, Some(25));
        // The end of the text counts as the end of the call.
        check(&call, "<function=f><parameter=a></tool_call></parameter> ", end, None, None);
        let function = MarkerSearch::in_call(FUNCTION, true);
        let body = "f><parameter=a></function> b</parameter>\n";
        check(&function, &format!("{body}</function>"), "</function>", Some(body.len()), None);
        let open = MarkerSearch::in_call(TOOL_CALL, false);
        check(&open, "<function=f><parameter=a></tool_call>", end, Some(25), None);
    }
}

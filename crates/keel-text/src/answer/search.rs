//! Searches for the marker that ends a call, while the call still grows.

use serde_json::Value;

use super::GAP_BYTES_MAX;
use super::markers::{FUNCTION, Markers};
use super::tags::TagReader;

/// A search for the marker that ends the current call, or that begins one. A marker inside a value does not count. A
/// value is a JSON string, or a parameter of a call in tags.
#[derive(Clone, Debug)]
pub(super) enum Search {
    /// In a call between these markers. Its first bytes decide how it is read.
    Undecided {
        markers: Markers,
        /// As [`TagReader::in_call`] has it.
        trusts_ends: bool,
    },
    Strings(StringSearch),
    Tags(TagReader),
}

impl Default for Search {
    fn default() -> Search {
        Search::Strings(StringSearch::default())
    }
}

impl Search {
    /// Begins a search in a text that is JSON.
    pub(super) fn in_json() -> Search {
        Search::Strings(StringSearch { place: Place::Outside, ..StringSearch::default() })
    }

    /// Begins a search after the begin marker of `markers`.
    pub(super) fn in_call(markers: Markers, trusts_ends: bool) -> Search {
        match markers.is_tags() {
            true => Search::Tags(TagReader::in_call(markers, 0, trusts_ends)),
            false => Search::Undecided { markers, trusts_ends },
        }
    }

    /// The position of the first of `markers` outside values. `text` may only grow between calls.
    pub(super) fn find(&mut self, text: &str, markers: &[&'static str], tools: &[Value]) -> Option<usize> {
        if let Search::Undecided { markers, trusts_ends } = *self {
            let inside = text.trim_start();
            let gap = text.len() - inside.len();
            if gap <= GAP_BYTES_MAX && inside.starts_with(FUNCTION.begin) {
                *self = Search::Tags(TagReader::in_call(markers, gap, trusts_ends));
            } else if gap > GAP_BYTES_MAX || !FUNCTION.begin.starts_with(inside) {
                *self = Search::default();
            }
        }
        match self {
            Search::Undecided { .. } => None,
            Search::Strings(search) => search.find(text, markers),
            Search::Tags(reader) => reader.find(text, tools),
        }
    }

    /// The marker that counts at the end of the answer, because the value that contains it never ends. `is_cut`: the
    /// value may have been cut off.
    pub(super) fn last_end(&self, is_cut: bool) -> Option<usize> {
        match self {
            Search::Undecided { .. } => None,
            Search::Strings(search) => search.hidden,
            Search::Tags(reader) => reader.last_end(is_cut),
        }
    }

    /// Whether the call is written in tags.
    pub(super) fn is_in_tags(&self) -> bool {
        matches!(self, Search::Tags(_))
    }

    /// Number of bytes before the first place where a marker may be found.
    pub(super) fn certain(&self) -> usize {
        match self {
            Search::Strings(search) => search.hidden.unwrap_or(search.read),
            _ => 0,
        }
    }

    /// Forgets the first bytes of the text, at most [`Search::certain`].
    pub(super) fn forget(&mut self, bytes: usize) {
        if let Search::Strings(search) = self {
            search.read -= bytes;
            search.hidden = search.hidden.map(|at| at - bytes);
        }
    }

    /// Number of bytes that were looked at, also if more than once.
    #[cfg(test)]
    pub(super) fn work(&self) -> usize {
        match self {
            Search::Undecided { .. } => 0,
            Search::Strings(search) => search.work,
            Search::Tags(reader) => reader.work,
        }
    }
}

/// A search that knows the strings of JSON. It reads each byte once.
///
/// Malformed JSON may have a string that never ends. So a string with a control character, which JSON forbids, counts
/// as no string.
#[derive(Clone, Debug, Default)]
pub(super) struct StringSearch {
    /// Number of bytes that were read.
    read: usize,
    place: Place,
    /// The first marker inside the current string.
    hidden: Option<usize>,
    #[cfg(test)]
    work: usize,
}

/// The part of a text that the search has reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// Only white space and opening brackets so far.
    #[default]
    Unknown,
    /// The text has no strings.
    Ignored,
    /// Outside a string.
    Outside,
    /// Inside a string.
    Inside,
    /// Inside a string, after a backslash.
    Escaped,
}

/// Whether a text begins with a word.
pub(super) enum Begin {
    /// With this word.
    With(&'static str),
    /// The text is a part of a word and may grow.
    Open,
    Without,
}

pub(super) fn begin_of(text: &[u8], words: impl Iterator<Item = &'static str> + Clone) -> Begin {
    match words.clone().find(|word| text.starts_with(word.as_bytes())) {
        Some(word) => Begin::With(word),
        None if words.clone().any(|word| word.as_bytes().starts_with(text)) => Begin::Open,
        None => Begin::Without,
    }
}

impl StringSearch {
    fn find(&mut self, text: &str, markers: &[&'static str]) -> Option<usize> {
        while let Some(&byte) = text.as_bytes().get(self.read) {
            #[cfg(test)]
            (self.work += 1);
            match begin_of(&text.as_bytes()[self.read..], markers.iter().copied()) {
                Begin::With(_) if !matches!(self.place, Place::Inside | Place::Escaped) => {
                    return Some(self.read);
                }
                Begin::With(_) => {
                    self.hidden.get_or_insert(self.read);
                }
                Begin::Open => return None,
                Begin::Without => {}
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
                let mut search = StringSearch::default();
                let ends = (1..text.len()).step_by(step).chain([text.len()]);
                let found = ends.filter_map(|end| search.find(&text[..end], &["</c>"])).next();
                assert_eq!(found, expected, "{text} in pieces of {step}");
            }
        }
    }
}

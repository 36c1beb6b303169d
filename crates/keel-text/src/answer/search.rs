//! Searches for the marker that ends a call, while the call still grows.

/// The state of a search. It reads each byte once.
///
/// A marker inside a JSON string does not end a call. Malformed JSON may have a string that never ends. So a string
/// with a control character, which JSON forbids, counts as no string.
#[derive(Clone, Debug, Default)]
pub(super) struct MarkerSearch {
    /// Number of bytes that were read.
    read: usize,
    quotes: Quotes,
    /// The first marker inside the current string.
    hidden: Option<usize>,
    /// Number of bytes that were looked at, also if more than once.
    #[cfg(test)]
    pub(super) work: usize,
}

/// Whether quotes begin strings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Quotes {
    /// Only white space and opening brackets so far.
    #[default]
    Unknown,
    /// The text is not JSON.
    Ignored,
    Outside,
    Inside,
    /// Inside, after a backslash.
    Escaped,
}

impl MarkerSearch {
    /// Begins a search in a text that is JSON.
    pub(super) fn in_json() -> MarkerSearch {
        MarkerSearch { quotes: Quotes::Outside, ..MarkerSearch::default() }
    }

    /// The position of the first of `markers` outside strings. `text` may only grow between calls.
    pub(super) fn find(&mut self, text: &str, markers: &[&str]) -> Option<usize> {
        while let Some(&byte) = text.as_bytes().get(self.read) {
            #[cfg(test)]
            (self.work += 1);
            let rest = &text.as_bytes()[self.read..];
            if markers.iter().any(|marker| rest.starts_with(marker.as_bytes())) {
                if !matches!(self.quotes, Quotes::Inside | Quotes::Escaped) {
                    return Some(self.read);
                }
                self.hidden.get_or_insert(self.read);
            } else if markers.iter().any(|marker| marker.as_bytes().starts_with(rest)) {
                return None;
            }
            self.quotes = self.after(byte);
            match self.quotes {
                Quotes::Outside => self.hidden = None,
                Quotes::Ignored if self.hidden.is_some() => return self.hidden,
                _ => {}
            }
            self.read += 1;
        }
        None
    }

    /// The position of the first marker inside the current string.
    pub(super) fn hidden(&self) -> Option<usize> {
        self.hidden
    }

    fn after(&self, byte: u8) -> Quotes {
        match (self.quotes, byte) {
            (Quotes::Unknown, b'{') => Quotes::Outside,
            (Quotes::Unknown, b'[' | b' ' | b'\t' | b'\n' | b'\r') => Quotes::Unknown,
            (Quotes::Unknown, _) => Quotes::Ignored,
            (Quotes::Outside, b'"') => Quotes::Inside,
            // JSON has backslashes only in strings.
            (Quotes::Outside, b'\\') => Quotes::Ignored,
            (Quotes::Inside, b'"') => Quotes::Outside,
            (Quotes::Inside, b'\\') => Quotes::Escaped,
            (Quotes::Inside | Quotes::Escaped, ..b' ') => Quotes::Ignored,
            (Quotes::Escaped, _) => Quotes::Inside,
            (quotes, _) => quotes,
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
                let mut search = MarkerSearch::default();
                let ends = (1..text.len()).step_by(step).chain([text.len()]);
                let found = ends.filter_map(|end| search.find(&text[..end], &["</c>"])).next();
                assert_eq!(found, expected, "{text} in pieces of {step}");
            }
        }
    }
}

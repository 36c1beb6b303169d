//! Stop strings in a stream of text.
//!
//! A stop string may begin in one piece and end in a later one. So text that may still become one is held back. Each
//! stop string has a Knuth-Morris-Pratt automaton over the bytes. Its state is the length of the longest prefix of the
//! stop string that the text ends with. The largest state is the number of bytes to hold back.

use crate::TextError;

/// No API allows more. Each byte costs one automaton step per stop string.
const STOP_STRINGS_MAX: usize = 64;
/// Bounds the text that is held back.
const STOP_BYTES_MAX: usize = 4096;

/// Cuts a stream of text at the first stop string that is completed in it.
///
/// The stream ends at the first byte where a stop string ends. If several end there, the longest counts. The text is
/// cut before the stop string. How the text is split into pieces does not matter.
///
/// ```
/// use keel_text::StopMatcher;
/// let mut stops = StopMatcher::new(&["\n\nUser:"]).unwrap();
/// let step = stops.push("Bye.\n");
/// assert_eq!((step.emit, step.stopped), ("Bye.", false)); // the line break may begin the stop string
/// let step = stops.push("\nUser: and");
/// assert_eq!((step.emit, step.stopped), ("", true));
/// ```
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Automaton>,
    /// Text that is not emitted yet. Its last `state` bytes are held back.
    held: String,
    /// Number of bytes of `held` that the last call emitted.
    emitted: usize,
    matched: Option<usize>,
}

/// Result of one piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopOutcome<'a> {
    /// Text that is now certain to belong to the answer.
    pub emit: &'a str,
    /// Whether a stop string was completed, in this call or earlier. Nothing follows `emit` then.
    pub stopped: bool,
}

impl StopMatcher {
    /// Prepares the stop strings. An empty list never stops the stream and holds nothing back.
    ///
    /// # Errors
    /// [`TextError::StopString`] if one is empty or longer than 4096 bytes, or if there are more than 64.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self, TextError> {
        let count = stops.len();
        let refuse =
            |index: usize, reason: String| Err(TextError::StopString { index: index + 1, count, reason });
        if count > STOP_STRINGS_MAX {
            return refuse(STOP_STRINGS_MAX, format!("at most {STOP_STRINGS_MAX} stop strings are accepted"));
        }
        for (index, stop) in stops.iter().map(AsRef::as_ref).enumerate() {
            if stop.is_empty() {
                return refuse(index, "it is empty, which would stop at once; leave it out".to_string());
            }
            if stop.len() > STOP_BYTES_MAX {
                return refuse(index, format!("{} bytes, at most {STOP_BYTES_MAX} are accepted", stop.len()));
            }
        }
        let stops = stops.iter().map(|stop| Automaton::new(stop.as_ref())).collect();
        Ok(StopMatcher { stops, held: String::new(), emitted: 0, matched: None })
    }

    /// Takes the next piece of text. After a stop, further pieces are ignored.
    pub fn push(&mut self, text: &str) -> StopOutcome<'_> {
        self.held.drain(..self.emitted);
        self.emitted = 0;
        if self.matched.is_some() {
            return StopOutcome { emit: "", stopped: true };
        }
        let unseen = self.held.len();
        self.held.push_str(text);
        for (offset, &byte) in text.as_bytes().iter().enumerate() {
            if let Some(stop) = self.step(byte) {
                self.matched = Some(stop);
                self.held.truncate(unseen + offset + 1 - self.stops[stop].stop.len());
                self.emitted = self.held.len();
                return StopOutcome { emit: &self.held, stopped: true };
            }
        }
        let undecided = self.stops.iter().map(|stop| stop.state).max().unwrap_or(0);
        self.emitted = self.held.len() - undecided;
        StopOutcome { emit: &self.held[..self.emitted], stopped: false }
    }

    /// Ends the stream and emits the text that was held back.
    pub fn finish(&mut self) -> &str {
        self.held.drain(..self.emitted);
        self.emitted = self.held.len();
        self.stops.iter_mut().for_each(|stop| stop.state = 0);
        &self.held
    }

    /// The stop string that ended the stream.
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|stop| self.stops[stop].stop.as_str())
    }

    /// Advances every automaton. Returns the number of the longest stop string that ends with `byte`.
    fn step(&mut self, byte: u8) -> Option<usize> {
        let mut longest: Option<usize> = None;
        for index in 0..self.stops.len() {
            let ends = self.stops[index].step(byte);
            let bytes = |stop: usize| self.stops[stop].stop.len();
            if ends && longest.is_none_or(|longest| bytes(index) > bytes(longest)) {
                longest = Some(index);
            }
        }
        longest
    }
}

#[derive(Clone, Debug)]
struct Automaton {
    stop: String,
    /// `fallback[n]`: length of the longest proper prefix of `stop[..=n]` that is also its suffix.
    fallback: Vec<usize>,
    /// Length of the longest prefix of `stop` that the text ends with. `stop` begins with a whole character, and the
    /// text ends with one between pieces. So this prefix consists of whole characters between pieces.
    state: usize,
}

impl Automaton {
    fn new(stop: &str) -> Self {
        let bytes = stop.as_bytes();
        let mut fallback = vec![0; bytes.len()];
        let mut matched = 0;
        for n in 1..bytes.len() {
            while matched > 0 && bytes[n] != bytes[matched] {
                matched = fallback[matched - 1];
            }
            matched += usize::from(bytes[n] == bytes[matched]);
            fallback[n] = matched;
        }
        Automaton { stop: stop.to_string(), fallback, state: 0 }
    }

    /// Whether the stop string ends with this byte.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.stop.as_bytes();
        while self.state > 0 && bytes[self.state] != byte {
            self.state = self.fallback[self.state - 1];
        }
        self.state += usize::from(bytes[self.state] == byte);
        self.state == bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_cannot_become_a_stop_is_not_held_back() {
        let mut stops = StopMatcher::new(&["END"]).unwrap();
        assert_eq!(stops.push("The E"), StopOutcome { emit: "The ", stopped: false });
        assert_eq!(stops.push("N"), StopOutcome { emit: "", stopped: false });
        assert_eq!(stops.push("E"), StopOutcome { emit: "EN", stopped: false });
        assert_eq!(stops.finish(), "E");
        assert_eq!(stops.matched(), None);
    }

    #[test]
    fn the_stop_that_ends_first_wins_and_of_equals_the_longest() {
        let mut stops = StopMatcher::new(&["abcd", "bc"]).unwrap();
        assert_eq!(stops.push("xabcd"), StopOutcome { emit: "xa", stopped: true });
        assert_eq!(stops.matched(), Some("bc"));
        let mut stops = StopMatcher::new(&["c", "abc", "bc"]).unwrap();
        assert_eq!(stops.push("xabcd"), StopOutcome { emit: "x", stopped: true });
        assert_eq!(stops.matched(), Some("abc"));
    }

    #[test]
    fn nothing_follows_a_stop() {
        let mut stops = StopMatcher::new(&["."]).unwrap();
        assert_eq!(stops.push("One. Two."), StopOutcome { emit: "One", stopped: true });
        assert_eq!(stops.push(" Three"), StopOutcome { emit: "", stopped: true });
        assert_eq!(stops.finish(), "");
    }

    #[test]
    fn no_stop_strings_pass_everything_through() {
        let mut stops = StopMatcher::new::<&str>(&[]).unwrap();
        assert_eq!(stops.push("all of it"), StopOutcome { emit: "all of it", stopped: false });
        assert_eq!(stops.finish(), "");
    }

    #[test]
    fn useless_stop_strings_are_refused_by_position() {
        let err = StopMatcher::new(&["a", ""]).unwrap_err().to_string();
        assert!(err.starts_with("stop string 2 of 2: it is empty"), "{err}");
        let err = StopMatcher::new(&["a".repeat(4097)]).unwrap_err().to_string();
        assert_eq!(err, "stop string 1 of 1: 4097 bytes, at most 4096 are accepted");
        assert!(StopMatcher::new(&["a"; 65]).is_err());
        assert!(StopMatcher::new(&["a"; 64]).is_ok());
    }
}

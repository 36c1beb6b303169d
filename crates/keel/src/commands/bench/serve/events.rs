//! Server-sent events that arrive in arbitrary pieces.

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Largest size of a line, or of a piece of a body, that a server may send.
pub const PIECE_BYTES_MAX: usize = 16 << 20;

/// The part of a line that has arrived.
#[derive(Default)]
pub struct Events {
    rest: Vec<u8>,
}

impl Events {
    /// Returns the events that a piece of the body completes.
    ///
    /// # Errors
    /// An event is not JSON, or a line is too long.
    pub fn push(&mut self, piece: &[u8]) -> Result<Vec<Value>> {
        self.rest.extend_from_slice(piece);
        let Some(end) = self.rest.iter().rposition(|&b| b == b'\n') else {
            if self.rest.len() > PIECE_BYTES_MAX {
                bail!("the server sent a line of more than {PIECE_BYTES_MAX} bytes");
            }
            return Ok(Vec::new());
        };
        let lines: Vec<u8> = self.rest.drain(..=end).collect();
        let data =
            lines.split(|&b| b == b'\n').filter_map(|line| line.trim_ascii_end().strip_prefix(b"data: "));
        data.filter(|data| *data != b"[DONE]")
            .map(|data| serde_json::from_slice(data).context("the server sent no JSON"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keel_testkit::random::Random;

    const STREAM: &str = "data: {\"a\": \"\u{1f600}\u{e9}\"}\n\n: ping\n\ndata: [1, {\"b\": null}]\r\n\nevent: x\n\
                          data: \"\"\n\ndata: [DONE]\n\n";

    /// The events of a body that arrives in pieces.
    fn read(body: &[u8], cut: &mut dyn FnMut() -> usize) -> Result<Vec<Value>> {
        let (mut events, mut all, mut rest) = (Events::default(), Vec::new(), body);
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(cut().clamp(1, rest.len()));
            all.extend(events.push(piece)?);
            rest = after;
        }
        Ok(all)
    }

    #[test]
    fn events_are_the_same_however_they_are_cut() {
        let whole = read(STREAM.as_bytes(), &mut || usize::MAX).expect("right");
        assert_eq!(whole.len(), 3);
        for size in 1..STREAM.len() {
            assert_eq!(read(STREAM.as_bytes(), &mut || size).expect("right"), whole, "pieces of {size}");
        }
    }

    #[test]
    fn damaged_streams_are_errors_and_never_panics() {
        let mut failed = 0;
        for case in 0..5000 {
            let mut random = Random::new(case);
            let mut body = STREAM.as_bytes().to_vec();
            for _ in 0..3 {
                let at = random.below(body.len());
                body[at] = random.below(256) as u8;
            }
            let whole = read(&body, &mut || usize::MAX).ok();
            let cut = read(&body, &mut || 1 + random.below(9)).ok();
            assert_eq!(whole, cut, "case {case}");
            failed += usize::from(whole.is_none());
        }
        assert!((500..4900).contains(&failed), "{failed} were no events");
    }

    #[test]
    fn a_line_without_an_end_is_refused() {
        let mut events = Events::default();
        let piece = vec![b'x'; 1 << 20];
        let sent = (0..100).take_while(|_| events.push(&piece).is_ok()).count();
        assert_eq!(sent, PIECE_BYTES_MAX >> 20);
    }
}

//! Messages on a connection: a head in JSON, and bytes.
//!
//! ```text
//! u32 length of the head │ u64 length of the bytes │ head │ bytes         little-endian
//! ```

use std::io::{Read, Result, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Most bytes of a head. The largest request of copies takes 11 MB, and the program of the largest model's step a few.
/// Decoding takes about 8 times the bytes of a head: a number of 2 bytes becomes one of 8, in a list that doubles.
const HEAD_BYTES_MAX: usize = 32 << 20;

/// Most bytes after a head. Longer arrays go in several messages.
pub(crate) const BYTES_MAX: usize = 64 << 20;

/// Most bytes of memory that a reader keeps for later messages. Weights come in long ones, and steps in short ones.
const KEPT_MAX: usize = 1 << 20;

/// Most bytes of a message.
#[derive(Clone, Copy)]
struct Limits {
    head: usize,
    bytes: usize,
}

const LIMITS: Limits = Limits { head: HEAD_BYTES_MAX, bytes: BYTES_MAX };

/// For a first message, whose sender is not known yet.
const FIRST_LIMITS: Limits = Limits { head: 4 << 10, bytes: 0 };

/// Writes a message.
///
/// # Errors
/// Those of the connection; a head or bytes that are too long.
pub(crate) fn write(to: &mut impl Write, head: &impl Serialize, parts: &[&[u8]]) -> Result<()> {
    let head = serde_json::to_vec(head)?;
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    check(head.len(), bytes, LIMITS)?;
    to.write_all(&(head.len() as u32).to_le_bytes())?;
    to.write_all(&(bytes as u64).to_le_bytes())?;
    to.write_all(&head)?;
    parts.iter().try_for_each(|part| to.write_all(part))
}

/// Reads a message. Its bytes replace those of `bytes`, which gives memory back that a longer one has left.
///
/// # Errors
/// Those of the connection; a message that is too long or has another form.
pub(crate) fn read<T: DeserializeOwned>(from: &mut impl Read, bytes: &mut Vec<u8>) -> Result<T> {
    read_within(from, bytes, LIMITS)
}

/// Reads the first message of a connection.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_first<T: DeserializeOwned>(from: &mut impl Read) -> Result<T> {
    read_within(from, &mut Vec::new(), FIRST_LIMITS)
}

fn read_within<T: DeserializeOwned>(from: &mut impl Read, bytes: &mut Vec<u8>, limits: Limits) -> Result<T> {
    let (mut head_length, mut length) = ([0; 4], [0; 8]);
    from.read_exact(&mut head_length)?;
    from.read_exact(&mut length)?;
    let head_length = u32::from_le_bytes(head_length) as usize;
    let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
    check(head_length, length, limits)?;
    let mut head = Vec::new();
    from.take(head_length as u64).read_to_end(&mut head)?;
    bytes.clear();
    bytes.shrink_to(length.max(KEPT_MAX));
    from.take(length as u64).read_to_end(bytes)?;
    if head.len() < head_length || bytes.len() < length {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&head)?)
}

fn check(head: usize, bytes: usize, limits: Limits) -> Result<()> {
    if head <= limits.head && bytes <= limits.bytes {
        return Ok(());
    }
    let most = format!("at most {} and {}", limits.head, limits.bytes);
    Err(std::io::Error::other(format!("a message of {head} and {bytes} bytes, {most} are read")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{At, CopyAt, MOVES_MAX, Request};

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let mut wire = Vec::new();
        write(&mut wire, &("head", 7), &[b"some ", b"bytes"]).expect("memory");
        write(&mut wire, &("next", 8), &[]).expect("memory");
        let (mut from, mut bytes) = (&wire[..], Vec::new());
        assert_eq!(read::<(String, u32)>(&mut from, &mut bytes).expect("whole"), ("head".into(), 7));
        assert_eq!(bytes, b"some bytes");
        assert_eq!(read::<(String, u32)>(&mut from, &mut bytes).expect("whole"), ("next".into(), 8));
        assert!(bytes.is_empty() && from.is_empty());
    }

    #[test]
    fn the_memory_of_a_long_message_is_given_back() {
        let (mut wire, mut bytes) = (Vec::new(), Vec::new());
        for length in [8 * KEPT_MAX, 100] {
            write(&mut wire, &"head", &[&vec![7u8; length]]).expect("memory");
        }
        let mut from = &wire[..];
        for (length, kept_max) in [(8 * KEPT_MAX, 16 * KEPT_MAX), (100, KEPT_MAX)] {
            read::<String>(&mut from, &mut bytes).expect("whole");
            assert_eq!(bytes.len(), length);
            assert!(bytes.capacity() <= kept_max, "{length}: {}", bytes.capacity());
        }
    }

    /// A head takes many times its bytes while it is decoded.
    #[test]
    fn heads_have_room_for_the_largest_request_and_little_more() {
        let at = At { memory: u64::MAX, offset: usize::MAX };
        let copies = vec![CopyAt { from: at, to: at, bytes: usize::MAX }; MOVES_MAX];
        let mut wire = Vec::new();
        write(&mut wire, &Request::Copy { copies }, &[]).expect("it is not too long");
        assert!(wire.len() > 10 << 20, "{}", wire.len());
        assert!(matches!(read(&mut &wire[..], &mut Vec::new()), Ok(Request::Copy { .. })));
        let error = write(&mut std::io::sink(), &"a".repeat(32 << 20), &[]).expect_err("with its quotes");
        assert!(error.to_string().contains("at most 33554432"), "{error}");
        let long = [&(64u32 << 20).to_le_bytes()[..], &[0; 8]].concat();
        let error = read::<String>(&mut &long[..], &mut Vec::new()).expect_err("64 MiB");
        assert!(error.to_string().contains("at most 33554432"), "{error}");
    }

    #[test]
    fn what_is_cut_short_too_long_or_no_message_is_an_error() {
        let mut wire = Vec::new();
        write(&mut wire, &"head", &[b"bytes"]).expect("memory");
        for length in 0..wire.len() {
            assert!(read::<String>(&mut &wire[..length], &mut Vec::new()).is_err(), "{length} bytes");
        }
        let long = [&[255; 4][..], &[0; 8]].concat();
        let error = read::<String>(&mut &long[..], &mut Vec::new()).expect_err("4 GiB").to_string();
        assert!(error.contains("4294967295") && error.contains("are read"), "{error}");
        assert!(read::<u32>(&mut &wire[..], &mut Vec::new()).is_err(), "another form");
        assert!(read_first::<String>(&mut &wire[..]).is_err(), "a first message has no bytes");
    }
}

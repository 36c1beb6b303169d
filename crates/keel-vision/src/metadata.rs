//! Keeps metadata from the decoders: colour profiles, EXIF and text. A decoder would store it, and would unpack a
//! profile of a few bytes to as much memory as it may take. Only the orientation is used, which is read in place.

use std::io::{self, BufRead, Read, Seek, SeekFrom};

use crate::{Result, VisionError};

/// Reads the parts of a file that a decoder needs, one after the other.
pub(crate) struct Parts<'a, I> {
    now: &'a [u8],
    rest: I,
}

impl<'a, I: Iterator<Item = &'a [u8]>> Parts<'a, I> {
    pub fn new(parts: I) -> Parts<'a, I> {
        Parts { now: &[], rest: parts }
    }
}

impl<'a, I: Iterator<Item = &'a [u8]>> BufRead for Parts<'a, I> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.now.is_empty()
            && let Some(next) = self.rest.next()
        {
            self.now = next;
        }
        Ok(self.now)
    }

    fn consume(&mut self, amount: usize) {
        self.now = &self.now[amount..];
    }
}

impl<'a, I: Iterator<Item = &'a [u8]>> Read for Parts<'a, I> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(into)?;
        self.consume(count);
        Ok(count)
    }
}

/// The library wants it of every reader. Its decoders of PNG and GIF do not call it.
impl<'a, I: Iterator<Item = &'a [u8]>> Seek for Parts<'a, I> {
    fn seek(&mut self, _: SeekFrom) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The chunks of a PNG that a decoder does not get.
const PNG_METADATA: [&[u8]; 5] = [b"iCCP", b"eXIf", b"tEXt", b"zTXt", b"iTXt"];

/// Bytes before the first chunk of a PNG.
const PNG_SIGNATURE_BYTES: usize = 8;

/// The chunks of a PNG: the kind of each, and all its bytes.
fn png_chunks(file: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    // Length, kind and checksum of a chunk.
    const FRAME_BYTES: usize = 12;
    let mut rest = file.get(PNG_SIGNATURE_BYTES..).unwrap_or_default();
    std::iter::from_fn(move || {
        let &[a, b, c, d, ref kind @ ..] = rest.get(..8)? else { return None };
        let bytes = (u32::from_be_bytes([a, b, c, d]) as usize).saturating_add(FRAME_BYTES);
        let (chunk, after) = rest.split_at(bytes.min(rest.len()));
        rest = after;
        Some((kind, chunk))
    })
}

/// The parts of a PNG without metadata.
pub(crate) fn png_parts(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    let needed = png_chunks(file).filter(|(kind, _)| !PNG_METADATA.contains(kind));
    file.get(..PNG_SIGNATURE_BYTES).into_iter().chain(needed.map(|(_, chunk)| chunk))
}

/// The EXIF data before the pixels of a PNG.
pub(crate) fn png_exif(file: &[u8]) -> Option<&[u8]> {
    let (_, chunk) =
        png_chunks(file).take_while(|(kind, _)| *kind != b"IDAT").find(|(kind, _)| *kind == b"eXIf")?;
    chunk.get(8..chunk.len().checked_sub(4)?)
}

/// A JPEG in two parts.
pub(crate) struct JpegParts<'a> {
    /// All before the data of the first scan, without metadata.
    pub header: Vec<u8>,
    /// The data of the first scan, and all after it.
    pub data: &'a [u8],
    /// The EXIF data.
    pub exif: Option<&'a [u8]>,
}

/// The most bytes of a JPEG before its first scan, metadata not counted. Sizes, tables and a thumbnail take far less.
const JPEG_HEADER_BYTES_MAX: usize = 128 << 10;

/// Cuts a JPEG where its first scan begins.
///
/// # Errors
/// The file ends early: a decoder would fill missing parts with grey. Or the header is too large.
pub(crate) fn jpeg_parts(file: &[u8]) -> Result<JpegParts<'_>> {
    let ends = || VisionError::Decode("the file ends before the picture does".into());
    let mut parts = JpegParts { header: vec![0xff, 0xd8], data: &[], exif: None };
    let mut at = 2;
    loop {
        let Some(&[0xff, marker, high, low]) = file.get(at..at + 4) else { return Err(ends()) };
        // A marker may have more bytes 0xff before it.
        if marker == 0xff {
            at += 1;
            continue;
        }
        let end = at + 2 + usize::from(u16::from_be_bytes([high, low]));
        let segment = file.get(at..end).ok_or_else(ends)?;
        at = end;
        match (marker, segment.get(4..)) {
            (0xe1, Some([b'E', b'x', b'i', b'f', 0, 0, exif @ ..])) => parts.exif = Some(exif),
            // Comments and other data of applications. JFIF (0xe0) and Adobe (0xee) tell how colours are coded.
            (0xe1..=0xed | 0xef | 0xfe, _) => {}
            _ => parts.header.extend_from_slice(segment),
        }
        if parts.header.len() > JPEG_HEADER_BYTES_MAX {
            return Err(VisionError::Decode(format!(
                "of the JPEG, the header without metadata has more than {JPEG_HEADER_BYTES_MAX} bytes"
            )));
        }
        if marker == 0xda {
            parts.data = &file[at..];
            // Within a scan, the byte after 0xff is 0 or a restart marker, so 0xff 0xd9 is the end marker.
            let has_end = parts.data.windows(2).any(|pair| pair == [0xff, 0xd9]);
            return if has_end { Ok(parts) } else { Err(ends()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(mut parts: Parts<'static, impl Iterator<Item = &'static [u8]>>) -> Vec<u8> {
        let mut bytes = Vec::new();
        parts.read_to_end(&mut bytes).expect("it is in memory");
        bytes
    }

    const PNG: &[u8] =
        b"\x89PNG\r\n\x1a\n\0\0\0\x02tEXtxx----\0\0\0\x01IHDRh----\0\0\0\x04eXIfexif----\0\0\0\0iCCP----\
        \0\0\0\x01IDATd----\0\0\0\x02zTXtxx----\0\0\0\x01IENDe--";

    #[test]
    fn a_png_is_read_without_metadata() {
        let want = b"\x89PNG\r\n\x1a\n\0\0\0\x01IHDRh----\0\0\0\x01IDATd----\0\0\0\x01IENDe--";
        assert_eq!(read(Parts::new(png_parts(PNG))), want);
        assert_eq!(png_exif(PNG), Some(&b"exif"[..]));
        for end in 0..PNG.len() {
            let cut = read(Parts::new(png_parts(&PNG[..end])));
            assert!(want.starts_with(&cut), "cut at {end}");
            assert!(png_exif(&PNG[..end]).is_none_or(|exif| b"exif".starts_with(exif)), "cut at {end}");
        }
    }

    #[test]
    fn a_jpeg_is_cut_where_its_scan_begins() {
        let file = b"\xff\xd8\xff\xe0\0\x03j\xff\xff\xe1\0\x09Exif\0\0e\xff\xe2\0\x03i\xff\xfe\0\x03c\xff\xdb\0\x03q\xff\xda\0\x03sdata\xff\xd9";
        let JpegParts { header, data, exif } = jpeg_parts(file).expect("sound");
        assert_eq!(header, b"\xff\xd8\xff\xe0\0\x03j\xff\xdb\0\x03q\xff\xda\0\x03s");
        assert_eq!((data, exif), (&b"data\xff\xd9"[..], Some(&b"e"[..])));
        for end in 2..file.len() {
            assert!(jpeg_parts(&file[..end]).is_err(), "cut at {end}");
        }
        let mut tables = b"\xff\xd8".to_vec();
        for _ in 0..5 {
            tables.extend(b"\xff\xdb\xff\xff");
            tables.resize(tables.len() + 0xffff - 2, 0);
        }
        let message = jpeg_parts(&tables).err().expect("too large").to_string();
        assert!(message.contains("more than 131072 bytes"), "{message}");
    }
}

//! The memory that the decoder of lossless WebP takes for its tables. It follows from the prefix codes before the
//! pixels: a file of a few megabytes may have 65,536 groups of codes, of which the pixels use one. So the codes are
//! read here, and not the pixels. Format: RFC 9649, section 3.

use crate::{Result, VisionError, work_limit};

/// Symbols of the five codes of a group: green with lengths, red, blue, alpha, distances.
const ALPHABETS: [usize; 5] = [256 + LENGTHS, 256, 256, 256, DISTANCES];
/// Prefixes of lengths among the symbols of green.
const LENGTHS: usize = 24;
/// Prefixes of distances.
const DISTANCES: usize = 40;
/// The longest code.
const CODE_BITS_MAX: usize = 15;
/// The decoder looks up this many bits in a table, and walks a tree for the others.
const TABLE_BITS_MAX: usize = 10;
/// A node of its tree.
const NODE_BYTES: usize = 16;
/// A group of codes in its list, which may have to move to grow, with the bytes that the allocator adds to each table.
const GROUP_BYTES: usize = 1 << 10;
/// The order in which the lengths of a code of lengths are stored.
const LENGTHS_ORDER: [usize; 19] = [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The most bytes of heap for tables while this file of `pixels` pixels is decoded, pixels not counted. 0 if none of it
/// is lossless.
///
/// # Memory
/// 4 bytes for each block of 16 pixels.
///
/// # Errors
/// The file is broken, or a part has more pixels; the [`crate::WorkLimit`] of this thread is over.
pub(crate) fn table_bytes(file: &[u8], pixels: u64) -> Result<u64> {
    let mut most = 0;
    let mut canvas = [0; 2];
    for (kind, payload) in chunks(file.get(12..).unwrap_or_default()) {
        let frame = match kind {
            b"VP8X" => {
                canvas = [size_at(payload, 4)?, size_at(payload, 7)?];
                continue;
            }
            // A frame of an animation: its place and size, then chunks.
            b"ANMF" => Some([size_at(payload, 6)?, size_at(payload, 9)?]),
            _ => None,
        };
        let Some(size) = frame else {
            most = most.max(part_bytes(kind, payload, canvas, pixels)?);
            continue;
        };
        for (kind, payload) in chunks(payload.get(16..).unwrap_or_default()) {
            most = most.max(part_bytes(kind, payload, size, pixels)?);
        }
    }
    Ok(most)
}

/// The bytes of tables for one chunk, of a picture or a frame of this size.
fn part_bytes(kind: &[u8; 4], payload: &[u8], size: [usize; 2], pixels: u64) -> Result<u64> {
    match (kind, payload.first()) {
        (b"VP8L", _) => picture(payload, pixels),
        // Alpha that is coded as the green of a lossless picture without a header.
        (b"ALPH", Some(info)) if info & 3 == 1 => stream(&mut Bits::new(&payload[1..]), size, pixels),
        _ => Ok(0),
    }
}

/// The EXIF data of a file. A file of one chunk has none.
pub(crate) fn exif(file: &[u8]) -> Option<&[u8]> {
    let mut chunks = chunks(file.get(12..)?);
    chunks.next().filter(|(kind, _)| *kind == b"VP8X")?;
    chunks.find(|(kind, _)| *kind == b"EXIF").map(|(_, payload)| payload)
}

/// The chunks of a file or of a frame.
fn chunks(mut bytes: &[u8]) -> impl Iterator<Item = (&[u8; 4], &[u8])> {
    std::iter::from_fn(move || {
        let (kind, rest) = bytes.split_first_chunk::<4>()?;
        let (size, rest) = rest.split_first_chunk::<4>()?;
        let size = u32::from_le_bytes(*size) as usize;
        let payload = &rest[..size.min(rest.len())];
        bytes = rest.get(size.saturating_add(size % 2)..).unwrap_or_default();
        Some((kind, payload))
    })
}

/// A size of 24 bits, stored less one.
fn size_at(payload: &[u8], at: usize) -> Result<usize> {
    match payload.get(at..at + 3) {
        Some(&[a, b, c]) => Ok(u32::from_le_bytes([a, b, c, 0]) as usize + 1),
        _ => Err(broken()),
    }
}

fn broken() -> VisionError {
    VisionError::Decode("of the WebP picture, a code before the pixels is broken".into())
}

/// The bits of a stream, the lowest of a byte first.
struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Bits<'a> {
    fn new(bytes: &'a [u8]) -> Bits<'a> {
        Bits { bytes, at: 0 }
    }

    /// The next `count` bits, at most 24.
    fn read(&mut self, count: usize) -> Result<usize> {
        let bytes: [u8; 4] = std::array::from_fn(|i| self.bytes.get(self.at / 8 + i).copied().unwrap_or(0));
        let bits = u32::from_le_bytes(bytes) >> (self.at % 8);
        self.at += count;
        if self.at > 8 * self.bytes.len() {
            return Err(broken());
        }
        Ok(bits as usize & ((1 << count) - 1))
    }

    /// A length or a distance that begins with this prefix. A code of one or two symbols may name any byte.
    fn after_prefix(&mut self, prefix: usize) -> Result<usize> {
        if prefix < 4 {
            return Ok(prefix + 1);
        }
        if prefix >= DISTANCES {
            return Err(broken());
        }
        let extra = (prefix - 2) / 2;
        Ok(((2 + prefix % 2) << extra) + self.read(extra)? + 1)
    }
}

/// A prefix code.
struct Code {
    /// How many symbols have a code of each length.
    counts: [usize; CODE_BITS_MAX + 1],
    /// The symbols in the order of their codes. A single one has no code.
    symbols: Vec<u16>,
}

impl Code {
    /// The code of these lengths, one for each symbol; 0 for none.
    fn of(lengths: &[u8]) -> Result<Code> {
        let mut counts = [0; CODE_BITS_MAX + 1];
        lengths.iter().for_each(|&length| counts[usize::from(length)] += 1);
        counts[0] = 0;
        let used =
            |length: u8| (0..).zip(lengths).filter(move |&(_, &own)| own == length).map(|(symbol, _)| symbol);
        let symbols: Vec<u16> = (1..=CODE_BITS_MAX as u8).flat_map(used).collect();
        let left =
            (1..).zip(&counts[1..]).fold(1_i64, |left, (_, &count): (usize, _)| 2 * left - count as i64);
        // A code of several symbols names each sequence of bits once.
        if symbols.is_empty() || symbols.len() > 1 && left != 0 {
            return Err(broken());
        }
        Ok(Code { counts, symbols })
    }

    /// The next symbol.
    fn next(&self, bits: &mut Bits<'_>) -> Result<usize> {
        if let [only] = self.symbols[..] {
            return Ok(usize::from(only));
        }
        let (mut code, mut first, mut before) = (0, 0, 0);
        for &count in &self.counts[1..] {
            code = 2 * code + bits.read(1)?;
            first *= 2;
            if code < first + count {
                return self.symbols.get(before + code - first).map(|&s| usize::from(s)).ok_or_else(broken);
            }
            (first, before) = (first + count, before + count);
        }
        Err(broken())
    }

    /// Bytes of the decoder's table and tree.
    fn bytes(&self) -> u64 {
        if self.symbols.len() == 1 {
            return 0;
        }
        let longest = self.counts.iter().rposition(|&count| count > 0).unwrap_or(0);
        let in_tree: usize = self.counts[TABLE_BITS_MAX + 1..].iter().sum();
        let table = size_of::<u32>() << longest.min(TABLE_BITS_MAX);
        (table + 2 * in_tree.max(2) * NODE_BYTES) as u64
    }

    /// Reads a code of symbols below `alphabet`.
    fn read(bits: &mut Bits<'_>, alphabet: usize) -> Result<Code> {
        if bits.read(1)? == 1 {
            let count = bits.read(1)? + 1;
            let first_bits = if bits.read(1)? == 1 { 8 } else { 1 };
            let mut symbols = Vec::with_capacity(count);
            for width in [first_bits, 8].into_iter().take(count) {
                symbols.push(bits.read(width)? as u16);
            }
            let mut counts = [0; CODE_BITS_MAX + 1];
            counts[1] = count;
            // As the decoder reads them: the first one has the bit 0, also if it is the greater one.
            return Ok(Code { counts, symbols });
        }
        let mut lengths = vec![0; alphabet];
        let mut of_lengths = [0; LENGTHS_ORDER.len()];
        let stored = bits.read(4)? + 4;
        for &at in LENGTHS_ORDER.iter().take(stored) {
            of_lengths[at] = bits.read(3)? as u8;
        }
        let code = Code::of(&of_lengths)?;
        let mut left = alphabet;
        if bits.read(1)? == 1 {
            let width = 2 + 2 * bits.read(3)?;
            left = 2 + bits.read(width)?;
        }
        let (mut at, mut last) = (0, 8);
        while at < alphabet && left > 0 {
            left -= 1;
            let symbol = code.next(bits)?;
            let (length, times) = match symbol {
                16 => (last, 3 + bits.read(2)?),
                17 => (0, 3 + bits.read(3)?),
                18 => (0, 11 + bits.read(7)?),
                _ => (symbol as u8, 1),
            };
            lengths.get_mut(at..at + times).ok_or_else(broken)?.fill(length);
            at += times;
            last = if length > 0 { length } else { last };
        }
        Code::of(&lengths)
    }

    fn read_group(bits: &mut Bits<'_>, cache_bits: Option<usize>) -> Result<[Code; 5]> {
        let cached = cache_bits.map_or(0, |bits| 1 << bits);
        let mut group = Vec::with_capacity(ALPHABETS.len());
        for (i, symbols) in ALPHABETS.into_iter().enumerate() {
            group.push(Code::read(bits, symbols + if i == 0 { cached } else { 0 })?);
        }
        group.try_into().map_err(|_| broken())
    }
}

/// A picture with its header.
fn picture(payload: &[u8], pixels: u64) -> Result<u64> {
    let mut bits = Bits::new(payload);
    let is_signed = bits.read(8)? == 0x2f;
    let size = [bits.read(14)? + 1, bits.read(14)? + 1];
    // Alpha is a hint; then the version.
    bits.read(1)?;
    if !is_signed || bits.read(3)? != 0 { Err(broken()) } else { stream(&mut bits, size, pixels) }
}

/// Blocks of `2^bits` pixels in a row of `size`.
fn blocks(size: usize, bits: usize) -> usize {
    size.div_ceil(1 << bits)
}

/// Transforms and groups of codes of a picture of this width and height, with at most `pixels` pixels.
fn stream(bits: &mut Bits<'_>, [mut width, height]: [usize; 2], pixels: u64) -> Result<u64> {
    if (width * height) as u64 > pixels {
        return Err(broken());
    }
    let (mut bytes, mut seen) = (0, [false; 4]);
    while bits.read(1)? == 1 {
        let kind = bits.read(2)?;
        if std::mem::replace(&mut seen[kind], true) {
            return Err(broken());
        }
        let size = match kind {
            2 => continue,
            3 => {
                let colours = bits.read(8)? + 1;
                width = blocks(width, [3, 2, 1, 0][[2, 4, 16].partition_point(|&most| most < colours)]);
                [colours, 1]
            }
            _ => {
                let block = bits.read(3)? + 2;
                [blocks(width, block), blocks(height, block)]
            }
        };
        small_picture(bits, size)?;
        bytes += 4 * (size[0] * size[1]) as u64;
    }
    let cache_bits = read_cache_bits(bits)?;
    let mut groups = 1;
    if bits.read(1)? == 1 {
        let block = bits.read(3)? + 2;
        let size = [blocks(width, block), blocks(height, block)];
        let pixels = small_picture(bits, size)?;
        groups = pixels.iter().map(|pixel| pixel >> 8 & 0xffff).max().unwrap_or(0) as usize + 1;
        bytes += 6 * pixels.len() as u64;
    }
    for _ in 0..groups {
        work_limit::check()?;
        let group = Code::read_group(bits, cache_bits)?;
        bytes += group.iter().map(Code::bytes).sum::<u64>() + GROUP_BYTES as u64;
    }
    Ok(bytes)
}

/// The logarithm of the number of colours that are remembered, if any are.
fn read_cache_bits(bits: &mut Bits<'_>) -> Result<Option<usize>> {
    if bits.read(1)? == 0 {
        return Ok(None);
    }
    let cache_bits = bits.read(4)?;
    if (1..=11).contains(&cache_bits) { Ok(Some(cache_bits)) } else { Err(broken()) }
}

/// The pixels of a picture within the stream, as ARGB.
fn small_picture(bits: &mut Bits<'_>, [width, height]: [usize; 2]) -> Result<Vec<u32>> {
    let cache_bits = read_cache_bits(bits)?;
    let group = Code::read_group(bits, cache_bits)?;
    let [green, red, blue, alpha, distance] = &group;
    let count = width * height;
    let mut cache = vec![0; cache_bits.map_or(0, |bits| 1 << bits)];
    let place = |pixel: u32| cache_bits.map(|bits| (pixel.wrapping_mul(0x1e35_a7bd) >> (32 - bits)) as usize);
    let near = near_distances(width);
    let mut pixels: Vec<u32> = Vec::with_capacity(count);
    while pixels.len() < count {
        if pixels.len().is_multiple_of(width) {
            work_limit::check()?;
        }
        let symbol = green.next(bits)?;
        let from = pixels.len();
        if symbol < 256 {
            let [red, blue, alpha] = [red.next(bits)?, blue.next(bits)?, alpha.next(bits)?];
            pixels.push((alpha << 24 | red << 16 | symbol << 8 | blue) as u32);
        } else if symbol < 256 + LENGTHS {
            let length = bits.after_prefix(symbol - 256)?;
            let code = distance.next(bits)?;
            let code = bits.after_prefix(code)?;
            let back = near.get(code - 1).copied().unwrap_or(code.saturating_sub(near.len()));
            if back > from || length > count - from {
                return Err(broken());
            }
            (from..from + length).for_each(|at| pixels.push(pixels[at - back]));
        } else {
            pixels.push(*cache.get(symbol - 256 - LENGTHS).ok_or_else(broken)?);
        }
        for &pixel in &pixels[from..] {
            if let Some(at) = place(pixel) {
                cache[at] = pixel;
            }
        }
    }
    Ok(pixels)
}

/// The distances of the first codes: those of the nearest pixels to the left and above, the nearest first.
fn near_distances(width: usize) -> Vec<usize> {
    let mut near: Vec<(i64, i64)> = (0..8).flat_map(|y| (-7..9).map(move |x| (x, y))).collect();
    near.retain(|&(x, y)| y > 0 || x > 0);
    near.sort_by_key(|&(x, y)| (x * x + y * y, x.abs(), x < 0));
    near.into_iter().map(|(x, y)| (x + y * width as i64).max(1) as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture of 8 x 8 pixels. The picture of its groups is a copy whose distance has a prefix that no alphabet has.
    fn with_prefix(prefix: usize) -> Vec<u8> {
        let mut bits = Vec::new();
        let mut write = |value: usize, count: usize| bits.extend((0..count).map(|i| value >> i & 1));
        // Signature, size less one, no alpha, version 0, no transform, no remembered colours, groups by blocks.
        [(0x2f, 8), (7, 14), (7, 14), (0, 1), (0, 3), (0, 1), (0, 1), (1, 1), (0, 3)]
            .into_iter()
            .for_each(|(value, count)| write(value, count));
        // No remembered colours. Green has one symbol, 256: after 138 and 118 zeros (18), a length of one (1).
        [(0, 1), (0, 1), (0, 4), (0, 3), (1, 3), (0, 3), (1, 3), (1, 1), (0, 3), (1, 2)]
            .into_iter()
            .chain([(1, 1), (138 - 11, 7), (1, 1), (118 - 11, 7), (0, 1)])
            .for_each(|(value, count)| write(value, count));
        // Codes of one symbol of 8 bits.
        for symbol in [0, 0, 0, prefix] {
            write(0b101, 3);
            write(symbol, 8);
        }
        write(0, 24);
        let payload: Vec<u8> =
            bits.chunks(8).map(|byte| byte.iter().rev().fold(0, |all, bit| all << 1 | *bit as u8)).collect();
        let size = (payload.len() as u32).to_le_bytes();
        [&b"RIFF....WEBPVP8L"[..], &size, &payload].concat()
    }

    #[test]
    fn a_distance_that_no_alphabet_has_is_refused() {
        for prefix in [40, 41, 62, 130, 255] {
            let message = table_bytes(&with_prefix(prefix), 64).expect_err("it is broken").to_string();
            assert!(message.contains("a code before the pixels is broken"), "{prefix}: {message}");
        }
    }

    #[test]
    fn exif_is_found_in_extended_files_alone() {
        let file = |first: &[u8]| [&b"RIFF....WEBP"[..], first, b"\0\0\0\0EXIF\x03\0\0\0abc"].concat();
        assert_eq!(exif(&file(b"VP8X")), Some(&b"abc"[..]));
        assert_eq!(exif(&file(b"VP8L")), None);
        assert_eq!(exif(b"RIFF"), None);
    }
}

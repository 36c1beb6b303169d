//! Decodes JPEG to the same bits as libjpeg-turbo, which every reference uses.
//!
//! The standard (ITU-T T.81) leaves the inverse transform and the interpolation of colours open. libjpeg uses the
//! "islow" transform in 13-bit integers, triangle filters between colour samples, and colour conversion in 16-bit fixed
//! point. The `image` crate's decoder differs from it by up to 18 levels where colours have half the resolution. So
//! this crate has its own decoder.
//!
//! ```text
//! mod.rs       markers: sizes, tables, scans
//! scan.rs      entropy-coded data to coefficients, sequential and progressive
//! samples.rs   coefficients to samples, samples to pixels
//! ```
//!
//! Lossless, arithmetic and 12-bit files are not supported here.

mod samples;
mod scan;

use scan::{HuffmanTable, Scan, decode_scan};

use crate::{VisionError, work_limit};

/// Why decoding stopped.
#[derive(Debug)]
pub(crate) enum Stop {
    /// A kind of JPEG that this decoder does not support.
    Unsupported,
    /// The file is broken.
    Broken(&'static str),
    /// The work must end early.
    Impatient(VisionError),
}

/// A component of the picture, as coefficients.
pub(super) struct Component {
    id: u8,
    /// Sampling factors, along rows and columns: the component has `h / h_max` samples per pixel of a row.
    h: usize,
    v: usize,
    table: usize,
    /// Blocks per row, and rows of blocks. Both cover whole MCUs.
    blocks_w: usize,
    blocks_h: usize,
    /// Samples per row, and rows, without the padding to whole MCUs.
    width: usize,
    height: usize,
    /// 64 per block, in natural order.
    coefficients: Vec<i16>,
    /// The quantisation table in force at the component's first scan.
    quantisation: Option<[u16; 64]>,
}

/// A picture before its coefficients are turned into samples.
pub(super) struct Frame {
    width: usize,
    height: usize,
    h_max: usize,
    v_max: usize,
    is_progressive: bool,
    components: Vec<Component>,
}

/// Decoded pixels, RGB.
pub(crate) struct Pixels {
    pub width: usize,
    pub height: usize,
    pub rgb: Vec<u8>,
}

/// The natural-order index of each coefficient in the file's order.
pub(super) const ZIGZAG: [u8; 64] = [
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7,
    14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39,
    46, 53, 60, 61, 54, 47, 55, 62, 63,
];

#[derive(Default)]
struct Tables {
    quantisation: [Option<[u16; 64]>; 4],
    dc: [Option<HuffmanTable>; 4],
    ac: [Option<HuffmanTable>; 4],
    restart_interval: usize,
    has_jfif: bool,
    adobe_transform: Option<u8>,
}

/// How components are converted to RGB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Colours {
    Grey,
    Rgb,
    Ycc,
    Cmyk,
    Ycck,
}

/// Decodes a file of at most `pixels_max` pixels.
pub(crate) fn decode(bytes: &[u8], pixels_max: u64) -> Result<Pixels, Stop> {
    let mut tables = Tables::default();
    let mut frame: Option<Frame> = None;
    let mut at = 2;
    if bytes.get(..2) != Some(&[0xff, 0xd8]) {
        return Err(Stop::Broken("it does not begin as a JPEG does"));
    }
    loop {
        let marker = next_marker(bytes, &mut at).ok_or(Stop::Broken("it ends before the picture does"))?;
        if marker == 0xd9 {
            break;
        }
        if matches!(marker, 0x01 | 0xd0..=0xd8) {
            continue;
        }
        let body = segment(bytes, &mut at).ok_or(Stop::Broken("a segment is cut short"))?;
        match marker {
            0xc0..=0xc2 if frame.is_none() => {
                frame = Some(Frame::new(body, marker == 0xc2, pixels_max)?);
            }
            0xc0..=0xc2 => return Err(Stop::Broken("it has two frames")),
            0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => return Err(Stop::Unsupported),
            0xc4 => tables.huffman(body)?,
            0xdb => tables.quantisation(body)?,
            0xdd => tables.restart_interval = body.first_chunk::<2>().map_or(0, |b| word(*b)),
            0xe0 if body.starts_with(b"JFIF\0") => tables.has_jfif = true,
            0xee if body.starts_with(b"Adobe") => tables.adobe_transform = body.get(11).copied(),
            0xda => {
                // A small file may have very many scans, each of which goes through the whole picture.
                work_limit::check().map_err(Stop::Impatient)?;
                let frame = frame.as_mut().ok_or(Stop::Broken("a scan comes before its frame"))?;
                let scan = tables.scan(frame, body)?;
                at += decode_scan(frame, &scan, &bytes[at..])?;
            }
            _ => {}
        }
    }
    let frame = frame.ok_or(Stop::Broken("it has no frame"))?;
    let colours = tables.colours(&frame)?;
    samples::pixels(&frame, colours)
}

/// The most bytes of heap while a file is decoded: coefficients and samples of all blocks, then samples and pixels.
/// `None` if it has no frame of a kind that is supported here.
pub(crate) fn decode_bytes(bytes: &[u8]) -> Option<u64> {
    let mut at = 2;
    loop {
        let marker = next_marker(bytes, &mut at)?;
        if matches!(marker, 0x01 | 0xd0..=0xd8) {
            continue;
        }
        let body = segment(bytes, &mut at)?;
        if !matches!(marker, 0xc0..=0xc2) {
            continue;
        }
        let &[precision, y1, y0, x1, x0, count, ref specs @ ..] = body else { return None };
        let (height, width) = (word([y1, y0]), word([x1, x0]));
        let specs = specs.as_chunks::<3>().0.get(..usize::from(count))?;
        if precision != 8 || height == 0 || !matches!(count, 1 | 3 | 4) {
            return None;
        }
        let factors = |spec: &[u8; 3]| (usize::from(spec[1] >> 4), usize::from(spec[1] & 15));
        let h_max = specs.iter().map(|s| factors(s).0).max()?.max(1);
        let v_max = specs.iter().map(|s| factors(s).1).max()?.max(1);
        let are_whole = |(h, v)| h_max.is_multiple_of(h) && v_max.is_multiple_of(v);
        if !specs.iter().map(factors).all(are_whole) {
            return None;
        }
        let mcus = width.div_ceil(8 * h_max) * height.div_ceil(8 * v_max);
        let blocks: usize = specs.iter().map(|s| mcus * factors(s).0 * factors(s).1).sum();
        // 64 coefficients of two bytes and 64 samples of one; rows of samples for each thread.
        let rows = rayon::current_num_threads() * specs.len() * (width + 8);
        return Some((blocks * 64 * 3 + width * height * 3 + rows) as u64);
    }
}

fn word(bytes: [u8; 2]) -> usize {
    usize::from(u16::from_be_bytes(bytes))
}

/// Finds the next marker. Bytes before it are skipped.
fn next_marker(bytes: &[u8], at: &mut usize) -> Option<u8> {
    loop {
        let start = *at + bytes.get(*at..)?.iter().position(|&byte| byte == 0xff)?;
        let marker = *bytes.get(start + 1)?;
        *at = start + 1;
        if marker != 0 && marker != 0xff {
            *at += 1;
            return Some(marker);
        }
    }
}

fn segment<'a>(bytes: &'a [u8], at: &mut usize) -> Option<&'a [u8]> {
    let len = word(*bytes.get(*at..)?.first_chunk()?);
    let body = bytes.get(*at + 2..*at + len)?;
    *at += len;
    Some(body)
}

impl Frame {
    fn new(body: &[u8], is_progressive: bool, pixels_max: u64) -> Result<Frame, Stop> {
        let &[precision, y1, y0, x1, x0, count, ref specs @ ..] = body else {
            return Err(Stop::Broken("a frame is cut short"));
        };
        let (height, width) = (word([y1, y0]), word([x1, x0]));
        let specs = specs.as_chunks::<3>().0;
        if precision != 8 || height == 0 || !matches!(count, 1 | 3 | 4) || specs.len() < usize::from(count) {
            return Err(Stop::Unsupported);
        }
        if width as u64 * height as u64 > pixels_max || width == 0 {
            return Err(Stop::Broken("its size is out of bounds"));
        }
        let specs = &specs[..usize::from(count)];
        let factors = |spec: &[u8; 3]| (usize::from(spec[1] >> 4), usize::from(spec[1] & 15));
        if specs
            .iter()
            .any(|s| !(1..=4).contains(&factors(s).0) || !(1..=4).contains(&factors(s).1) || s[2] > 3)
        {
            return Err(Stop::Broken("its sampling factors are not 1 to 4"));
        }
        let h_max = specs.iter().map(|s| factors(s).0).max().unwrap_or(1);
        let v_max = specs.iter().map(|s| factors(s).1).max().unwrap_or(1);
        let (mcus_w, mcus_h) = (width.div_ceil(8 * h_max), height.div_ceil(8 * v_max));
        let components = specs.iter().map(|spec| {
            let (h, v) = factors(spec);
            // Each sample must cover a whole number of pixels.
            if !h_max.is_multiple_of(h) || !v_max.is_multiple_of(v) {
                return Err(Stop::Unsupported);
            }
            let (blocks_w, blocks_h) = (mcus_w * h, mcus_h * v);
            Ok(Component {
                id: spec[0],
                h,
                v,
                table: usize::from(spec[2]),
                blocks_w,
                blocks_h,
                width: (width * h).div_ceil(h_max),
                height: (height * v).div_ceil(v_max),
                coefficients: vec![0; blocks_w * blocks_h * 64],
                quantisation: None,
            })
        });
        let components = components.collect::<Result<_, _>>()?;
        Ok(Frame { width, height, h_max, v_max, is_progressive, components })
    }
}

impl Tables {
    fn quantisation(&mut self, mut body: &[u8]) -> Result<(), Stop> {
        while let [head, rest @ ..] = body {
            let (wide, number) = (head >> 4 != 0, usize::from(head & 15));
            let len = if wide { 128 } else { 64 };
            let (true, Some(values)) = (number < 4, rest.get(..len)) else {
                return Err(Stop::Broken("a quantisation table is cut short"));
            };
            let mut table = [0; 64];
            for (i, &place) in ZIGZAG.iter().enumerate() {
                let value =
                    if wide { word([values[2 * i], values[2 * i + 1]]) as u16 } else { values[i].into() };
                table[usize::from(place)] = value;
            }
            self.quantisation[number] = Some(table);
            body = &rest[len..];
        }
        Ok(())
    }

    fn huffman(&mut self, mut body: &[u8]) -> Result<(), Stop> {
        while let [head, rest @ ..] = body {
            let (class, number) = (head >> 4, usize::from(head & 15));
            let counts = rest.first_chunk::<16>().filter(|_| class < 2 && number < 4);
            let total = counts.map(|counts| counts.iter().map(|&n| usize::from(n)).sum::<usize>());
            let (Some(counts), Some(values)) = (counts, total.and_then(|total| rest.get(16..16 + total)))
            else {
                return Err(Stop::Broken("a Huffman table is cut short"));
            };
            let table =
                HuffmanTable::new(counts, values).ok_or(Stop::Broken("a Huffman table is no code"))?;
            let tables = if class == 0 { &mut self.dc } else { &mut self.ac };
            tables[number] = Some(table);
            body = &rest[16 + values.len()..];
        }
        Ok(())
    }

    /// Reads a scan's header and resolves its tables. A missing Huffman table stays `None`.
    fn scan<'t>(&'t self, frame: &mut Frame, body: &[u8]) -> Result<Scan<'t>, Stop> {
        const CUT: Stop = Stop::Broken("a scan's header is cut short");
        let (&count, rest) = body.split_first().ok_or(CUT)?;
        let specs = rest.get(..2 * usize::from(count)).ok_or(CUT)?.as_chunks::<2>().0;
        let &[from, to, approximation] =
            rest.get(2 * usize::from(count)..).and_then(|r| r.first_chunk()).ok_or(CUT)?;
        let mut components = Vec::new();
        for &[id, which] in specs {
            let index = frame.components.iter().position(|c| c.id == id);
            let index = index.ok_or(Stop::Broken("a scan is of a component that is not there"))?;
            let component = &mut frame.components[index];
            if component.quantisation.is_none() {
                component.quantisation = self.quantisation[component.table];
            }
            let (dc, ac) = (usize::from(which >> 4), usize::from(which & 15));
            let of = |tables: &'t [Option<HuffmanTable>; 4], i: usize| tables.get(i).and_then(Option::as_ref);
            components.push((index, of(&self.dc, dc), of(&self.ac, ac)));
        }
        if components.is_empty() || components.len() > 4 || from > 63 || to > 63 || from > to {
            return Err(Stop::Broken("a scan's header makes no sense"));
        }
        let (high, low) = (approximation >> 4, approximation & 15);
        if low > 13 || (frame.is_progressive && from == 0 && to != 0) || (from > 0 && components.len() > 1) {
            return Err(Stop::Broken("a scan's header makes no sense"));
        }
        let (from, to) = if frame.is_progressive { (from.into(), to.into()) } else { (0, 63) };
        Ok(Scan { components, from, to, high, low, restart_interval: self.restart_interval })
    }

    fn colours(&self, frame: &Frame) -> Result<Colours, Stop> {
        let ids: Vec<u8> = frame.components.iter().map(|component| component.id).collect();
        Ok(match (ids.len(), self.adobe_transform) {
            (1, _) => Colours::Grey,
            (3, _) if self.has_jfif => Colours::Ycc,
            (3, Some(0)) => Colours::Rgb,
            (3, None) if ids == *b"RGB" => Colours::Rgb,
            (3, _) => Colours::Ycc,
            (_, Some(2)) => Colours::Ycck,
            _ => Colours::Cmyk,
        })
    }
}

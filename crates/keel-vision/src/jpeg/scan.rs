//! Decodes entropy-coded data to coefficients (ITU-T T.81, annexes F and G).

use super::{Frame, Stop, ZIGZAG};

/// Number of bits that one table look-up decodes.
const LOOK_BITS: u32 = 9;

/// A Huffman code.
pub(super) struct HuffmanTable {
    /// For each value of the next [`LOOK_BITS`] bits: length and value of the code that they begin with. Length 0 means
    /// a longer code.
    short: Vec<(u8, u8)>,
    /// For each length: the largest code + 1, aligned to 16 bits, and the offset from a code to the index of its value.
    longest: [(u32, i32); 17],
    values: Vec<u8>,
}

impl HuffmanTable {
    /// Builds the code from the number of values of each length from 1 to 16. `None` if no such code exists.
    pub fn new(counts: &[u8; 16], values: &[u8]) -> Option<HuffmanTable> {
        let mut table = HuffmanTable {
            short: vec![(0, 0); 1 << LOOK_BITS],
            longest: [(0, 0); 17],
            values: values.to_vec(),
        };
        let (mut code, mut place) = (0u32, 0usize);
        for (i, &count) in counts.iter().enumerate() {
            let len = i as u32 + 1;
            if code + u32::from(count) > 1 << len {
                return None;
            }
            table.longest[i + 1].1 = place as i32 - code as i32;
            for _ in 0..count {
                if len <= LOOK_BITS {
                    let first = (code << (LOOK_BITS - len)) as usize;
                    table.short[first..first + (1 << (LOOK_BITS - len))].fill((len as u8, values[place]));
                }
                code += 1;
                place += 1;
            }
            table.longest[i + 1].0 = code << (16 - len);
            code <<= 1;
        }
        Some(table)
    }
}

/// The contents of a scan.
pub(super) struct Scan<'t> {
    /// For each component: its index, the table of its DC coefficients, and the table of its AC coefficients.
    pub components: Vec<(usize, Option<&'t HuffmanTable>, Option<&'t HuffmanTable>)>,
    /// First and last coefficient, in the file's order.
    pub from: usize,
    pub to: usize,
    /// Lowest bit known from earlier scans; 0 in a first scan.
    pub high: u8,
    /// Lowest bit known after this scan.
    pub low: u8,
    pub restart_interval: usize,
}

struct Bits<'a> {
    data: &'a [u8],
    at: usize,
    buffer: u64,
    count: u32,
    /// Number of zero bits that were supplied because the data had ended.
    missing: u32,
}

impl<'a> Bits<'a> {
    fn fill(&mut self) {
        while self.count <= 56 {
            let byte = match (self.data.get(self.at), self.data.get(self.at + 1)) {
                (Some(0xff), Some(0)) => {
                    self.at += 2;
                    0xff
                }
                (Some(0xff), _) | (None, _) => {
                    self.missing += 8;
                    0
                }
                (Some(&byte), _) => {
                    self.at += 1;
                    byte
                }
            };
            self.buffer |= u64::from(byte) << (56 - self.count);
            self.count += 8;
        }
    }

    fn skip(&mut self, bits: u32) {
        self.buffer <<= bits;
        self.count -= bits;
    }

    /// Reads the next bits, at most 16.
    fn take(&mut self, bits: u32) -> u32 {
        if bits == 0 {
            return 0;
        }
        if self.count < bits {
            self.fill();
        }
        let value = (self.buffer >> (64 - bits)) as u32;
        self.skip(bits);
        value
    }

    /// Reads a signed number of `bits` bits.
    fn signed(&mut self, bits: u32) -> i32 {
        let value = self.take(bits) as i32;
        if bits > 0 && value < 1 << (bits - 1) { value - (1 << bits) + 1 } else { value }
    }

    fn value(&mut self, table: &HuffmanTable) -> Result<u8, Stop> {
        if self.count < 16 {
            self.fill();
        }
        let (len, value) = table.short[(self.buffer >> (64 - LOOK_BITS)) as usize];
        if len > 0 {
            self.skip(len.into());
            return Ok(value);
        }
        let ahead = (self.buffer >> 48) as u32;
        for len in LOOK_BITS + 1..=16 {
            let (end, offset) = table.longest[len as usize];
            if ahead < end {
                self.skip(len);
                let place = (ahead >> (16 - len)) as i32 + offset;
                return table.values.get(place as usize).copied().ok_or(Stop::Broken("a code has no value"));
            }
        }
        Err(Stop::Broken("a code is not in its table"))
    }

    /// Skips to the position after the next restart marker.
    fn restart(&mut self) -> Result<(), Stop> {
        (self.buffer, self.count) = (0, 0);
        loop {
            match (self.data.get(self.at), self.data.get(self.at + 1)) {
                (Some(0xff), Some(0xd0..=0xd7)) => {
                    self.at += 2;
                    return Ok(());
                }
                (Some(0xff), Some(0 | 0xff)) | (Some(0..=0xfe), _) => self.at += 1,
                _ => return Err(Stop::Broken("a restart marker is missing")),
            }
        }
    }
}

/// State while a scan is decoded.
struct State {
    /// The last DC coefficient of each component.
    last: [i32; 4],
    /// Number of following blocks without further coefficients.
    empty: u32,
}

/// Decodes a scan into the frame's coefficients. Returns the number of bytes read.
pub(super) fn decode_scan(frame: &mut Frame, scan: &Scan<'_>, data: &[u8]) -> Result<usize, Stop> {
    let mut bits = Bits { data, at: 0, buffer: 0, count: 0, missing: 0 };
    let mut state = State { last: [0; 4], empty: 0 };
    let is_single = scan.components.len() == 1;
    let first = &frame.components[scan.components[0].0];
    let (units_w, units_h) = match is_single {
        true => (first.width.div_ceil(8), first.height.div_ceil(8)),
        false => (frame.width.div_ceil(8 * frame.h_max), frame.height.div_ceil(8 * frame.v_max)),
    };
    for unit in 0..units_w * units_h {
        if scan.restart_interval > 0 && unit > 0 && unit.is_multiple_of(scan.restart_interval) {
            bits.restart()?;
            state = State { last: [0; 4], empty: 0 };
        }
        let (row, column) = (unit / units_w, unit % units_w);
        for (slot, &(index, dc, ac)) in scan.components.iter().enumerate() {
            let component = &mut frame.components[index];
            let (h, v) = if is_single { (1, 1) } else { (component.h, component.v) };
            for y in 0..v {
                for x in 0..h {
                    let block = (row * v + y) * component.blocks_w + column * h + x;
                    let Some(block) = component.coefficients.as_chunks_mut::<64>().0.get_mut(block) else {
                        return Err(Stop::Broken("a block lies outside the picture"));
                    };
                    let tables = (dc, ac);
                    if frame.is_progressive {
                        progressive(block, scan, tables, &mut state, slot, &mut bits)?;
                    } else {
                        sequential(block, tables, &mut state.last[slot], &mut bits)?;
                    }
                }
            }
        }
        if bits.missing > 64 + 16 && bits.at >= data.len() {
            return Err(Stop::Broken("it ends before the picture does"));
        }
    }
    Ok(bits.at)
}

type TablePair<'t> = (Option<&'t HuffmanTable>, Option<&'t HuffmanTable>);

const NO_TABLE: Stop = Stop::Broken("a scan's Huffman table is missing, as in single frames of a video");

fn sequential(
    block: &mut [i16; 64],
    tables: TablePair<'_>,
    last: &mut i32,
    bits: &mut Bits<'_>,
) -> Result<(), Stop> {
    let (dc, ac) = (tables.0.ok_or(NO_TABLE)?, tables.1.ok_or(NO_TABLE)?);
    let len = u32::from(bits.value(dc)?).min(16);
    *last = last.wrapping_add(bits.signed(len));
    block[0] = *last as i16;
    let mut k = 1;
    while k < 64 {
        let code = bits.value(ac)?;
        let (zeros, len) = (usize::from(code >> 4), u32::from(code & 15));
        if len == 0 {
            if zeros < 15 {
                break;
            }
            k += 16;
            continue;
        }
        k += zeros;
        let value = bits.signed(len);
        let place = ZIGZAG.get(k).ok_or(Stop::Broken("a block has too many coefficients"))?;
        block[usize::from(*place)] = value as i16;
        k += 1;
    }
    Ok(())
}

fn progressive(
    block: &mut [i16; 64],
    scan: &Scan<'_>,
    tables: TablePair<'_>,
    state: &mut State,
    slot: usize,
    bits: &mut Bits<'_>,
) -> Result<(), Stop> {
    match (scan.from, scan.high) {
        (0, 0) => {
            let len = u32::from(bits.value(tables.0.ok_or(NO_TABLE)?)?).min(16);
            state.last[slot] = state.last[slot].wrapping_add(bits.signed(len));
            block[0] = (state.last[slot] << scan.low) as i16;
            Ok(())
        }
        (0, _) => {
            block[0] |= (bits.take(1) << scan.low) as i16;
            Ok(())
        }
        (_, 0) => first_of_band(block, scan, tables.1.ok_or(NO_TABLE)?, state, bits),
        _ => refine_band(block, scan, tables.1.ok_or(NO_TABLE)?, state, bits),
    }
}

fn first_of_band(
    block: &mut [i16; 64],
    scan: &Scan<'_>,
    table: &HuffmanTable,
    state: &mut State,
    bits: &mut Bits<'_>,
) -> Result<(), Stop> {
    if state.empty > 0 {
        state.empty -= 1;
        return Ok(());
    }
    let mut k = scan.from;
    while k <= scan.to {
        let code = bits.value(table)?;
        let (zeros, len) = (u32::from(code >> 4), u32::from(code & 15));
        if len == 0 {
            if zeros < 15 {
                state.empty = (1 << zeros) - 1 + bits.take(zeros);
                break;
            }
            k += 16;
            continue;
        }
        k += zeros as usize;
        let value = bits.signed(len) << scan.low;
        let place = ZIGZAG.get(k).ok_or(Stop::Broken("a block has too many coefficients"))?;
        block[usize::from(*place)] = value as i16;
        k += 1;
    }
    Ok(())
}

fn refine_band(
    block: &mut [i16; 64],
    scan: &Scan<'_>,
    table: &HuffmanTable,
    state: &mut State,
    bits: &mut Bits<'_>,
) -> Result<(), Stop> {
    let step = 1i16 << scan.low;
    let refine = |value: &mut i16, bits: &mut Bits<'_>| {
        if bits.take(1) == 1 && *value & step == 0 {
            *value = value.wrapping_add(if *value >= 0 { step } else { -step });
        }
    };
    let mut k = scan.from;
    if state.empty == 0 {
        while k <= scan.to {
            let code = bits.value(table)?;
            let (mut zeros, len) = (u32::from(code >> 4), u32::from(code & 15));
            let mut new = 0;
            if len == 0 {
                if zeros < 15 {
                    state.empty = (1 << zeros) + bits.take(zeros);
                    break;
                }
            } else {
                new = if bits.take(1) == 1 { step } else { -step };
            }
            // Each coefficient that is already nonzero has a correction bit here. `zeros` counts the zero coefficients
            // to skip.
            while k <= scan.to {
                let value = &mut block[usize::from(ZIGZAG[k])];
                if *value != 0 {
                    refine(value, bits);
                } else if zeros == 0 {
                    *value = new;
                    k += 1;
                    break;
                } else {
                    zeros -= 1;
                }
                k += 1;
            }
        }
    }
    if state.empty > 0 {
        while k <= scan.to {
            let value = &mut block[usize::from(ZIGZAG[k])];
            if *value != 0 {
                refine(value, bits);
            }
            k += 1;
        }
        state.empty -= 1;
    }
    Ok(())
}

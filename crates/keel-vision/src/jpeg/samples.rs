//! Turns coefficients into samples and samples into pixels, as libjpeg's `jidctint.c`, `jdsample.c` and `jdcolor.c` do.

use std::num::Wrapping;

use rayon::prelude::*;

use super::{Colours, Component, Frame, Pixels, Stop};

/// A component's samples, `stride` per row.
struct Plane {
    samples: Vec<u8>,
    stride: usize,
    /// Samples per row, and rows, inside the picture.
    width: usize,
    height: usize,
    /// Pixels per sample, along rows and columns.
    h: usize,
    v: usize,
}

/// Computes the pixels of a frame after all of its scans were read.
pub(super) fn pixels(frame: &Frame, colours: Colours) -> Result<Pixels, Stop> {
    let planes = frame.components.iter().map(|component| plane(frame, component));
    let planes = planes.collect::<Result<Vec<_>, _>>()?;
    let mut rgb = vec![0; frame.width * frame.height * 3];
    rgb.par_chunks_mut(frame.width * 3).enumerate().for_each_init(
        || vec![vec![0u8; frame.width + 2 * 4]; planes.len()],
        |rows, (y, output)| {
            for (plane, row) in planes.iter().zip(rows.iter_mut()) {
                plane.row(y, row, frame.width);
            }
            colour(rows, colours, output);
        },
    );
    Ok(Pixels { width: frame.width, height: frame.height, rgb })
}

fn plane(frame: &Frame, component: &Component) -> Result<Plane, Stop> {
    let table = component.quantisation.ok_or(Stop::Broken("a component has no quantisation table"))?;
    let stride = component.blocks_w * 8;
    let mut samples = vec![0; stride * component.blocks_h * 8];
    samples
        .par_chunks_mut(stride * 8)
        .zip(component.coefficients.par_chunks(component.blocks_w * 64))
        .for_each(|(rows, blocks)| {
            for (x, block) in blocks.as_chunks::<64>().0.iter().enumerate() {
                let values = inverse_transform(block, &table);
                for (row, values) in rows.chunks_exact_mut(stride).zip(values.as_chunks::<8>().0) {
                    row[x * 8..x * 8 + 8].copy_from_slice(values);
                }
            }
        });
    let (h, v) = (frame.h_max / component.h, frame.v_max / component.v);
    Ok(Plane { samples, stride, width: component.width, height: component.height, h, v })
}

/// Fraction bits of the constants. [`PASS_BITS`] fraction bits remain between the two passes.
const CONSTANT_BITS: usize = 13;
const PASS_BITS: usize = 2;

/// One pass over eight values. The results are in order and have [`CONSTANT_BITS`] more fraction bits.
#[inline(always)]
fn pass(x: [Wrapping<i32>; 8]) -> [Wrapping<i32>; 8] {
    let c = Wrapping::<i32>;
    let z1 = (x[2] + x[6]) * c(4433);
    let (even2, even3) = (z1 - x[6] * c(15137), z1 + x[2] * c(6270));
    let (even0, even1) = ((x[0] + x[4]) << CONSTANT_BITS, (x[0] - x[4]) << CONSTANT_BITS);
    let even = [even0 + even3, even1 + even2, even1 - even2, even0 - even3];
    let (z1, z2, z3, z4) = (x[7] + x[1], x[5] + x[3], x[7] + x[3], x[5] + x[1]);
    let z5 = (z3 + z4) * c(9633);
    let (z1, z2) = (z1 * c(-7373), z2 * c(-20995));
    let (z3, z4) = (z3 * c(-16069) + z5, z4 * c(-3196) + z5);
    let odd = [
        x[1] * c(12299) + z1 + z4,
        x[3] * c(25172) + z2 + z3,
        x[5] * c(16819) + z2 + z4,
        x[7] * c(2446) + z1 + z3,
    ];
    [
        even[0] + odd[0],
        even[1] + odd[1],
        even[2] + odd[2],
        even[3] + odd[3],
        even[3] - odd[3],
        even[2] - odd[2],
        even[1] - odd[1],
        even[0] - odd[0],
    ]
}

fn rounded(x: Wrapping<i32>, bits: usize) -> Wrapping<i32> {
    (x + Wrapping(1 << (bits - 1))) >> bits
}

fn inverse_transform(block: &[i16; 64], table: &[u16; 64]) -> [u8; 64] {
    let mut between = [Wrapping(0i32); 64];
    for column in 0..8 {
        let value = |i: usize| {
            let at = 8 * i + column;
            Wrapping(i32::from(block[at]) * i32::from(table[at]))
        };
        let sums = pass(std::array::from_fn(value));
        for (i, sum) in sums.into_iter().enumerate() {
            between[8 * i + column] = rounded(sum, CONSTANT_BITS - PASS_BITS);
        }
    }
    let mut values = [0; 64];
    for (row, values) in between.as_chunks::<8>().0.iter().zip(values.as_chunks_mut::<8>().0) {
        for (sum, value) in pass(*row).into_iter().zip(values) {
            *value = (rounded(sum, CONSTANT_BITS + PASS_BITS + 3).0.saturating_add(128)).clamp(0, 255) as u8;
        }
    }
    values
}

impl Plane {
    fn samples(&self, row: usize) -> &[u8] {
        &self.samples[row.min(self.height - 1) * self.stride..][..self.width]
    }

    /// Writes row `y` of the picture, `width` pixels. `row` has capacity for the extra pixels of the last whole sample.
    fn row(&self, y: usize, row: &mut Vec<u8>, width: usize) {
        let near = self.samples(y / self.v);
        // The second nearest row of samples. At an edge of the picture it is the nearest row itself.
        let far = || match y % 2 {
            0 => self.samples((y / 2).saturating_sub(1)),
            _ => self.samples(y / 2 + 1),
        };
        row.resize(self.width * self.h, 0);
        match (self.h, self.v) {
            (1, 1) => row.copy_from_slice(near),
            (2, 1) if self.width > 2 => {
                let columns: Vec<u16> = near.iter().map(|&x| u16::from(x)).collect();
                between_columns(&columns, row, 2, [1, 2]);
            }
            (1, 2) => {
                let bias = 1 + (y % 2) as u16;
                for ((value, &near), &far) in row.iter_mut().zip(near).zip(far()) {
                    *value = ((3 * u16::from(near) + u16::from(far) + bias) >> 2) as u8;
                }
            }
            (2, 2) if self.width > 2 => {
                let sum = |(&near, &far): (&u8, &u8)| 3 * u16::from(near) + u16::from(far);
                let columns: Vec<u16> = near.iter().zip(far()).map(sum).collect();
                between_columns(&columns, row, 4, [8, 7]);
            }
            (h, _) => row.chunks_mut(h).zip(near).for_each(|(pixels, &x)| pixels.fill(x)),
        }
        row.resize(width, 0);
    }
}

/// Makes two pixels per sample: 3/4 of the nearer sample and 1/4 of the other. At the ends the outermost sample is
/// both. `bits` is the shift after the sum; `left` and `right` are the rounding biases of the two pixels.
fn between_columns(columns: &[u16], row: &mut [u8], bits: u32, [left, right]: [u16; 2]) {
    let last = columns.len() - 1;
    for (i, pixels) in row.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let this = columns[i];
        let (before, after) = (columns[i.saturating_sub(1)], columns[(i + 1).min(last)]);
        *pixels = [((3 * this + before + left) >> bits) as u8, ((3 * this + after + right) >> bits) as u8];
    }
}

/// One half in fixed point with 16 fraction bits.
const HALF: i32 = 1 << 15;

fn clamped(x: i32) -> u8 {
    x.clamp(0, 255) as u8
}

fn ycc(y: u8, cb: u8, cr: u8) -> [u8; 3] {
    let (y, cb, cr) = (i32::from(y), i32::from(cb) - 128, i32::from(cr) - 128);
    [
        clamped(y + ((91881 * cr + HALF) >> 16)),
        clamped(y + ((-22554 * cb - 46802 * cr + HALF) >> 16)),
        clamped(y + ((116_130 * cb + HALF) >> 16)),
    ]
}

/// Pillow's formula for inverted inks, the form that files contain. It multiplies the complements of ink and black,
/// with rounding.
fn inks(colours: [u8; 3], black: u8) -> [u8; 3] {
    colours.map(|left| {
        let product = u32::from(255 - left) * u32::from(black) + 128;
        black - (((product >> 8) + product) >> 8) as u8
    })
}

fn colour(rows: &[Vec<u8>], colours: Colours, output: &mut [u8]) {
    let output = output.as_chunks_mut::<3>().0.iter_mut();
    match (colours, rows) {
        (Colours::Grey, [grey, ..]) => output.zip(grey).for_each(|(pixel, &x)| *pixel = [x; 3]),
        (_, [a, b, c, rest @ ..]) => {
            let black = rest.first();
            for (i, pixel) in output.enumerate() {
                let three = [a[i], b[i], c[i]];
                let black = black.map_or(255, |black| black[i]);
                *pixel = match colours {
                    Colours::Ycc => ycc(a[i], b[i], c[i]),
                    Colours::Cmyk => inks(three, black),
                    Colours::Ycck => inks(ycc(a[i], b[i], c[i]).map(|x| 255 - x), black),
                    Colours::Grey | Colours::Rgb => three,
                };
            }
        }
        _ => {}
    }
}

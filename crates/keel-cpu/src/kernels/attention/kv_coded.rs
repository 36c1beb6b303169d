//! Pages whose keys and values have 8 or 4 bits, see [`keel_array::KvFormat`].
//!
//! A head's page begins with its codes, in the order of a plain page: keys `[4, D, 64]`, values `[256, D]`. Its steps
//! follow: bf16 `[4, D / 32, 64]` for keys, bf16 `[256, D / 32]` for values. With 4 bits, a byte of keys holds tokens
//! `j` and `j + 32` of a tile; a byte of values holds columns `i` and `i + 16` of a group.
//!
//! A sweep widens the part of a page that it needs to f32, in the worker's scratch. Every sweep widens to the same
//! values.

use super::pages::{KvRead, KvWrite, PAGE, TILE};
use crate::shared_slice::SharedMut;
use half::bf16;
use keel_array::KvFormat;
use std::ops::Range;

const GROUP: usize = KvFormat::GROUP;

/// Bytes of a step.
const STEP: usize = size_of::<bf16>();

/// The pools of one layer's pages with values of `BITS` bits, 8 or 4, to read.
#[derive(Clone, Copy)]
pub struct CodedPages<'a, const BITS: usize> {
    /// Keys, `[pages, KV, 256, W]` bytes.
    pub keys: &'a [u8],
    /// Values, in the same shape.
    pub values: &'a [u8],
    /// KV
    pub kv_heads: usize,
    /// D, a multiple of 32.
    pub head_dim: usize,
}

/// Bytes of the codes of a head's page, and of the whole page.
const fn page_bytes(bits: usize, head_dim: usize) -> (usize, usize) {
    let codes = PAGE * head_dim * bits / 8;
    (codes, codes + PAGE * head_dim / GROUP * STEP)
}

/// Codes and steps of one head of a page.
#[inline(always)]
fn parts(pool: &[u8], page: usize, heads: usize, head: usize, bits: usize, size: usize) -> (&[u8], &[u8]) {
    let (codes, all) = page_bytes(bits, size);
    pool[(page * heads + head) * all..][..all].split_at(codes)
}

#[inline(always)]
fn step_at(steps: &[u8], i: usize) -> f32 {
    bf16::from_le_bytes([steps[STEP * i], steps[STEP * i + 1]]).to_f32()
}

impl<const BITS: usize> KvRead for CodedPages<'_, BITS> {
    type Element = f32;

    fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    fn head_dim(&self) -> usize {
        self.head_dim
    }

    fn scratch_len(head_dim: usize) -> usize {
        PAGE * head_dim
    }

    #[inline(always)]
    fn keys<'s>(
        &'s self,
        page: usize,
        head: usize,
        tiles: Range<usize>,
        scratch: &'s mut [f32],
    ) -> &'s [f32] {
        let size = self.head_dim;
        let (codes, steps) = parts(self.keys, page, self.kv_heads, head, BITS, size);
        let tile_codes = TILE * BITS / 8;
        for tile in tiles {
            for group in 0..size / GROUP {
                let first = (tile * (size / GROUP) + group) * TILE;
                let steps: [f32; TILE] = std::array::from_fn(|j| step_at(steps, first + j));
                for d in tile * size + group * GROUP..tile * size + (group + 1) * GROUP {
                    let codes = &codes[d * tile_codes..][..tile_codes];
                    let out = &mut scratch[d * TILE..][..TILE];
                    if BITS == 8 {
                        for j in 0..TILE {
                            out[j] = f32::from(codes[j] as i8) * steps[j];
                        }
                    } else {
                        let (low, high) = out.split_at_mut(TILE / 2);
                        for j in 0..TILE / 2 {
                            low[j] = (f32::from(codes[j] & 15) - 8.0) * steps[j];
                            high[j] = (f32::from(codes[j] >> 4) - 8.0) * steps[j + TILE / 2];
                        }
                    }
                }
            }
        }
        scratch
    }

    #[inline(always)]
    fn values<'s>(
        &'s self,
        page: usize,
        head: usize,
        tokens: Range<usize>,
        scratch: &'s mut [f32],
    ) -> &'s [f32] {
        let groups = self.head_dim / GROUP;
        let (codes, steps) = parts(self.values, page, self.kv_heads, head, BITS, self.head_dim);
        let group_codes = GROUP * BITS / 8;
        for group in tokens.start * groups..tokens.end * groups {
            let step = step_at(steps, group);
            let codes = &codes[group * group_codes..][..group_codes];
            let out = &mut scratch[group * GROUP..][..GROUP];
            if BITS == 8 {
                for i in 0..GROUP {
                    out[i] = f32::from(codes[i] as i8) * step;
                }
            } else {
                let (low, high) = out.split_at_mut(GROUP / 2);
                for i in 0..GROUP / 2 {
                    low[i] = (f32::from(codes[i] & 15) - 8.0) * step;
                    high[i] = (f32::from(codes[i] >> 4) - 8.0) * step;
                }
            }
        }
        scratch
    }
}

/// The pools of one layer's pages, to write; see [`CodedPages`].
#[derive(Clone, Copy)]
pub struct CodedPagesMut<'a, const BITS: usize> {
    /// Keys, `[pages, KV, 256, W]` bytes.
    pub keys: SharedMut<'a, u8>,
    /// Values, in the same shape.
    pub values: SharedMut<'a, u8>,
    /// KV
    pub kv_heads: usize,
    /// D, a multiple of 32.
    pub head_dim: usize,
}

/// The step of a group, and its codes: signed bytes for 8 bits; 0 to 15, with 8 for zero, for 4 bits.
#[inline(always)]
fn code_group<const BITS: usize>(x: &[f32]) -> (bf16, [u8; GROUP]) {
    // A NaN makes the group's step NaN, and so all of its values.
    let farthest = x.iter().fold(0.0f32, |a, &b| if b.abs() > a.abs() || b.is_nan() { b } else { a });
    let step = bf16::from_f32(if BITS == 8 { farthest.abs() / 127.0 } else { farthest / -8.0 });
    let inverse = if step == bf16::ZERO { 0.0 } else { 1.0 / step.to_f32() };
    let code = |x: f32| {
        let q = (x * inverse).round_ties_even();
        if BITS == 8 { q.clamp(-127.0, 127.0) as i8 as u8 } else { (q.clamp(-8.0, 7.0) + 8.0) as u8 }
    };
    (step, std::array::from_fn(|i| code(x[i])))
}

impl<const BITS: usize> KvWrite for CodedPagesMut<'_, BITS> {
    fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    fn head_dim(&self) -> usize {
        self.head_dim
    }

    unsafe fn write(&self, page: usize, head: usize, slot: usize, key: &[f32], value: &[f32]) {
        let size = self.head_dim;
        let (code_bytes, all) = page_bytes(BITS, size);
        let start = (page * self.kv_heads + head) * all;
        let (tile, tile_bytes) = (slot / TILE, TILE * size * BITS / 8);
        let (steps, groups) = (start + code_bytes, size / GROUP);
        let range = |first: usize, len: usize| first..first + len;
        // SAFETY: the caller's promise. A token's keys and their steps lie in its tile; its values and their steps are
        // its own.
        let (tile_codes, tile_steps, row_codes, row_steps) = unsafe {
            (
                self.keys.range(range(start + tile * tile_bytes, tile_bytes)),
                self.keys.range(range(steps + tile * groups * TILE * STEP, groups * TILE * STEP)),
                self.values.range(range(start + slot * size * BITS / 8, size * BITS / 8)),
                self.values.range(range(steps + slot * groups * STEP, groups * STEP)),
            )
        };
        let within = slot % TILE;
        for (group, key) in key.chunks_exact(GROUP).enumerate() {
            let (step, codes) = code_group::<BITS>(key);
            let at = (group * TILE + within) * STEP;
            tile_steps[at..at + STEP].copy_from_slice(&step.to_le_bytes());
            for (d, code) in (group * GROUP..).zip(codes) {
                if BITS == 8 {
                    tile_codes[d * TILE + within] = code;
                } else {
                    let byte = &mut tile_codes[d * (TILE / 2) + within % (TILE / 2)];
                    let shift = within / (TILE / 2) * 4;
                    *byte = *byte & !(15 << shift) | code << shift;
                }
            }
        }
        for (group, value) in value.chunks_exact(GROUP).enumerate() {
            let (step, codes) = code_group::<BITS>(value);
            row_steps[group * STEP..][..STEP].copy_from_slice(&step.to_le_bytes());
            let row = &mut row_codes[group * GROUP * BITS / 8..][..GROUP * BITS / 8];
            if BITS == 8 {
                row.copy_from_slice(&codes);
            } else {
                let (low, high) = codes.split_at(GROUP / 2);
                for ((byte, low), high) in row.iter_mut().zip(low).zip(high) {
                    *byte = low | high << 4;
                }
            }
        }
    }
}

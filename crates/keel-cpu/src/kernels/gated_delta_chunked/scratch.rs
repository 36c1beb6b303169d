//! A worker's matrices.

use super::{CHUNK, GatedDeltaShape};
use crate::simd::LANES;

/// A worker's matrices, row-major; `dv` is Dv rounded up to whole vectors.
pub(super) struct Scratch<'a> {
    /// `[Dk, dv]`
    pub(super) state: &'a mut [f32],
    /// `[64, Dk]`
    pub(super) q: &'a mut [f32],
    /// `[64, Dk]`
    pub(super) k: &'a mut [f32],
    /// `[Dk, 64]`
    pub(super) k_transposed: &'a mut [f32],
    /// `[64, dv]`
    pub(super) u: &'a mut [f32],
    /// `[64, dv]`, v, later u decayed to the chunk's end
    pub(super) u_decayed: &'a mut [f32],
    /// `[64, dv]`
    pub(super) y: &'a mut [f32],
    /// D `[64, 64]`, zero above the diagonal
    pub(super) between: &'a mut [f32],
    /// -L `[64, 64]`, zero from the diagonal on
    pub(super) lower: &'a mut [f32],
    /// P `[64, 64]`, zero above the diagonal
    pub(super) scores: &'a mut [f32],
    /// beta, `[64]`
    pub(super) beta: &'a mut [f32],
    /// G as the sum of two floats, `[64]` each
    pub(super) log_high: &'a mut [f32],
    pub(super) log_low: &'a mut [f32],
    /// `e^G`, `[64]`
    pub(super) from_start: &'a mut [f32],
    /// `e^(G[last] - G)`, `[64]`
    pub(super) to_end: &'a mut [f32],
    pub(super) dk: usize,
    pub(super) dv: usize,
}

impl<'a> Scratch<'a> {
    pub(super) fn new(shape: &GatedDeltaShape, memory: &'a mut [f32]) -> Scratch<'a> {
        let (dk, dv) = (shape.key_size, shape.value_size.next_multiple_of(LANES));
        let mut rest = memory;
        let mut take = |len: usize| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(len);
            rest = tail;
            part
        };
        Scratch {
            state: take(dk * dv),
            u: take(CHUNK * dv),
            u_decayed: take(CHUNK * dv),
            y: take(CHUNK * dv),
            between: take(CHUNK * CHUNK),
            lower: take(CHUNK * CHUNK),
            scores: take(CHUNK * CHUNK),
            beta: take(CHUNK),
            log_high: take(CHUNK),
            log_low: take(CHUNK),
            from_start: take(CHUNK),
            to_end: take(CHUNK),
            q: take(CHUNK * dk),
            k: take(CHUNK * dk),
            k_transposed: take(CHUNK * dk),
            dk,
            dv,
        }
    }
}

//! Rotary position embedding of an array of heads, with or without the norm of each head before it.
//!
//! Half-split pairs over the first `n` values of a head, the rest unchanged; `i < n / 2`:
//!
//! ```text
//! angle[t, i]  = position[axis[i], t] * inverse_frequency[i]
//! y[i]         = x[i] * cos(angle[i])         - x[i + n/2] * sin(angle[i])
//! y[i + n/2]   = x[i + n/2] * cos(angle[i])   + x[i] * sin(angle[i])
//! ```
//!
//! The sines of a token are computed once for all its heads. Angles are computed in `f64`: in `f32` an angle near
//! position 8192 would be off by 2e-4.
//!
//! Memory: reads each value once and writes it once, `H * D` a row.

use super::rms_norm::{inverse_rms, scale_by_weight};
use super::rows::{Rows, RowsMut};
use crate::pool::Worker;
use crate::simd::{self, Simd, VectorKernel};

/// Largest number of frequencies.
pub const FREQUENCIES_MAX: usize = 256;

/// For multi-axis rope: the row of positions that each frequency uses.
///
/// `sections` counts the frequencies of each axis (time, height, width). Without interleaving, the axes follow each
/// other in that order. Interleaved, frequency `i` belongs to axis `i % 3` while that axis has any left, and to time
/// otherwise.
pub fn mrope_axes(sections: [usize; 3], interleaved: bool) -> Vec<u8> {
    let frequencies = sections.iter().sum();
    (0..frequencies)
        .map(|i| {
            let axis = if interleaved {
                let axis = i % 3;
                if i < 3 * sections[axis] { axis } else { 0 }
            } else {
                usize::from(i >= sections[0]) + usize::from(i >= sections[0] + sections[1])
            };
            axis as u8
        })
        .collect()
}

/// The norm of each head.
#[derive(Clone, Copy)]
pub struct HeadNorm<'a> {
    /// `[D]`
    pub weight: &'a [f32],
    /// Epsilon.
    pub eps: f32,
}

/// Operands of [`rope`].
#[derive(Clone, Copy)]
pub struct Rope<'a> {
    /// `[T, H * D]`
    pub x: Rows<'a>,
    /// D
    pub head_dim: usize,
    /// `[axes, T]`
    pub positions: &'a [i32],
    /// `[rotary / 2]`
    pub inverse_frequencies: &'a [f32],
    /// Row of positions of each frequency; empty: always the first row.
    pub axes: &'a [u8],
    /// The norm before the rotation.
    pub norm: Option<HeadNorm<'a>>,
    /// `[T, H * D]`
    pub y: RowsMut<'a>,
}

/// Norms (if asked to) and rotates each head.
///
/// # Panics
/// If the shapes disagree or there are more than [`FREQUENCIES_MAX`] frequencies.
pub fn rope(task: &Rope<'_>, worker: &Worker<'_>) {
    let frequencies = task.inverse_frequencies.len();
    assert!(task.x.width() == task.y.width() && task.x.len() == task.y.len());
    assert!(frequencies <= FREQUENCIES_MAX && 2 * frequencies <= task.head_dim);
    assert!(task.x.width().is_multiple_of(task.head_dim));
    assert!(task.norm.is_none_or(|norm| norm.weight.len() == task.head_dim));
    assert!(task.axes.is_empty() || task.axes.len() == frequencies);
    simd::run_at(worker.isa, Task { task, worker });
}

struct Task<'a, 'w> {
    task: &'a Rope<'a>,
    worker: &'a Worker<'w>,
}

impl VectorKernel for Task<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let task = self.task;
        let (tokens, half) = (task.x.len(), task.inverse_frequencies.len());
        let (mut cos, mut sin) = ([0.0; FREQUENCIES_MAX], [0.0; FREQUENCIES_MAX]);
        for t in self.worker.claim(tokens, 1).flatten() {
            for (i, frequency) in task.inverse_frequencies.iter().enumerate() {
                let axis = task.axes.get(i).map_or(0, |&axis| usize::from(axis));
                let angle = f64::from(task.positions[axis * tokens + t]) * f64::from(*frequency);
                (sin[i], cos[i]) = (angle.sin() as f32, angle.cos() as f32);
            }
            // SAFETY: each token is claimed once.
            let y = unsafe { task.y.row(t) };
            let heads = task.x.row(t).chunks_exact(task.head_dim);
            for (x, y) in heads.zip(y.chunks_exact_mut(task.head_dim)) {
                match task.norm {
                    Some(HeadNorm { weight, eps }) => {
                        scale_by_weight(s, x, inverse_rms(s, x, eps), weight, y)
                    }
                    None => y.copy_from_slice(x),
                }
                let (low, high) = y[..2 * half].split_at_mut(half);
                for (i, (low, high)) in low.iter_mut().zip(high).enumerate() {
                    let (a, b) = (*low, *high);
                    (*low, *high) = (a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]);
                }
            }
        }
    }
}

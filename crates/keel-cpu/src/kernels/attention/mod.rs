//! Scaled dot-product attention over paged keys and values, with grouped heads and an optional window. It is causal,
//! but in prefill a row may also see later keys.
//!
//! ```text
//! score[h, t, j] = scale * q[t, h] . k[j, h / (H / KV)]    for position[t] - window < j <= max(position[t], until[t])
//! y[t, h]        = sum_j softmax_j(score[h, t, j]) * v[j, h / (H / KV)]
//! ```
//!
//! [`attention_decode`] serves few rows per sequence and is bound by reading the pages; [`attention_prefill`] serves
//! many and is bound by arithmetic. Both take keys in whole pages anchored at position 0, in order, so a row's bits
//! depend only on its own query and the pages.
//!
//! Values are finite: a key that a row does not see has weight 0, and 0 times NaN or infinity is NaN.

mod decode;
mod kv_coded;
mod page;
mod pages;
mod prefill;
mod segments;

pub use decode::{attention_decode, decode_workspace_len};
pub use kv_coded::{CodedPages, CodedPagesMut};
pub use pages::{KvElement, KvPages, KvPagesMut, KvRead, KvWrite, PAGE, PageTable, TILE, kv_write};
pub use prefill::{attention_prefill, prefill_workspace_len};

use super::rows::{Batch, Rows, RowsMut};
use crate::simd::LANES;
use keel_array::AttentionSpec;

/// Largest head.
pub const HEAD_DIM_MAX: usize = AttentionSpec::HEAD_MAX;
const _: () = assert!(AttentionSpec::HEAD_UNIT.is_multiple_of(LANES));

/// Score of a key that a row must not see; finite, so that a row of such scores has no NaN.
const MASKED: f32 = -1e30;

/// Operands of attention.
#[derive(Clone, Copy)]
pub struct Attention<'a, P> {
    /// `[T, H * D]`
    pub q: Rows<'a>,
    /// Rows and positions of each sequence. Their keys and values must be in the pages already.
    pub batch: Batch<'a>,
    /// Where each sequence's tokens live.
    pub table: PageTable<'a>,
    /// Keys and values.
    pub pages: P,
    /// Factor on the scores, usually `D^-0.5`.
    pub scale: f32,
    /// A row sees this many positions, its own included; `None`: all of them.
    pub window: Option<usize>,
    /// For each row, the last position that it sees, if that is after its own; prefill only.
    pub until: Option<&'a [u32]>,
    /// `[T, H * D]`
    pub y: RowsMut<'a>,
}

/// First position that a row at `position` sees under a window.
#[inline]
fn first_seen(window: Option<usize>, position: usize) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

impl<P: KvRead> Attention<'_, P> {
    /// Query heads.
    fn heads(&self) -> usize {
        self.q.width() / self.pages.head_dim()
    }

    /// First position that the row at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        first_seen(self.window, position)
    }

    /// One past the last position that row `t` of sequence `b`, which is at `position`, sees.
    fn end_seen(&self, b: usize, t: usize, position: usize) -> usize {
        let rows = self.batch.rows_of(b);
        let end = self.batch.position[b] as usize + rows.len();
        let until = self.until.map_or(position, |until| (until[t] as usize).max(position));
        (until + 1).min(end)
    }

    /// `f32` values of scratch that each worker needs to read pages: half for keys, half for values.
    fn page_scratch(&self) -> usize {
        2 * P::scratch_len(self.pages.head_dim())
    }

    fn check(&self) {
        let (size, kv_heads) = (self.pages.head_dim(), self.pages.kv_heads());
        assert!(
            self.q.width().is_multiple_of(size) && self.heads().is_multiple_of(kv_heads) && self.heads() > 0
        );
        assert!(self.y.width() == self.q.width());
        assert!(self.q.len() >= self.batch.rows() && self.y.len() >= self.batch.rows());
        assert!(self.window != Some(0), "a window of no positions");
        assert!(self.until.is_none_or(|until| until.len() >= self.batch.rows()));
    }
}

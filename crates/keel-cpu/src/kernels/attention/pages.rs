//! Pages of keys and values.
//!
//! A page holds 256 tokens of one layer. Keys have the layout `[KV, 4, D, 64]`: transposed tiles of 64 tokens, so that
//! the lanes of a vector are tokens and a score needs no sum across lanes. Values have the layout `[KV, 256, D]`. In
//! both, a sweep over the tokens of one head reads memory in order. Places past a sequence's end may hold anything,
//! including NaN; kernels keep it out of every result.
//!
//! Writing one token touches one cache line (64 bytes) for each of its `KV * D` key values. With 2 heads of 256 that is
//! 32 KB a layer, as much as reading the f16 keys of 32 tokens.

use super::{Attention, decode, prefill};
use crate::kernels::rows::{Batch, Rows};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use crate::simd::Element;
use half::f16;
use std::ops::Range;

/// Tokens of a page.
pub const PAGE: usize = 256;
/// Tokens of a tile of keys.
pub const TILE: usize = 64;

/// A number type that keys and values are kept in.
pub trait KvElement: Element + sealed::Attend {}

mod sealed {
    use super::{Attention, Batch, KvPages, KvPagesMut, PageTable, Rows, SharedMut, Worker};

    /// The kernels over pages of one element.
    pub trait Attend: Sized {
        /// [`attention_decode`](crate::kernels::attention::attention_decode)
        fn decode(
            attention: &Attention<'_, KvPages<'_, Self>>,
            workspace: SharedMut<'_, f32>,
            worker: &Worker<'_>,
        );

        /// [`attention_prefill`](crate::kernels::attention::attention_prefill)
        fn prefill(
            attention: &Attention<'_, KvPages<'_, Self>>,
            workspace: SharedMut<'_, f32>,
            worker: &Worker<'_>,
        );

        /// [`kv_write`](crate::kernels::attention::kv_write)
        fn write_rows(
            k: Rows<'_>,
            v: Rows<'_>,
            batch: Batch<'_>,
            table: PageTable<'_>,
            pages: KvPagesMut<'_, Self>,
            worker: &Worker<'_>,
        );
    }
}

/// Implements the kernels for each element without type parameters. So they are compiled in this crate, and not again
/// in each program that calls them.
macro_rules! kv_elements {
    ($($element:ty)+) => { $(
        impl KvElement for $element {}

        impl sealed::Attend for $element {
            #[inline(never)]
            fn decode(
                attention: &Attention<'_, KvPages<'_, $element>>,
                workspace: SharedMut<'_, f32>,
                worker: &Worker<'_>,
            ) {
                decode::run(attention, workspace, worker);
            }

            #[inline(never)]
            fn prefill(
                attention: &Attention<'_, KvPages<'_, $element>>,
                workspace: SharedMut<'_, f32>,
                worker: &Worker<'_>,
            ) {
                prefill::run(attention, workspace, worker);
            }

            #[inline(never)]
            fn write_rows(
                k: Rows<'_>,
                v: Rows<'_>,
                batch: Batch<'_>,
                table: PageTable<'_>,
                pages: KvPagesMut<'_, $element>,
                worker: &Worker<'_>,
            ) {
                write_rows(k, v, batch, table, pages, worker);
            }
        }
    )+ };
}
kv_elements!(f32 f16);

/// The pools of one layer's pages, to read.
#[derive(Clone, Copy)]
pub struct KvPages<'a, E> {
    /// `[pages, KV, 4, D, 64]`
    pub keys: &'a [E],
    /// `[pages, KV, 256, D]`
    pub values: &'a [E],
    /// KV
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
}

/// Pools of pages that attention reads.
pub trait KvRead: Copy + Send + Sync {
    /// Element type that a page is read as.
    type Element: KvElement;

    /// KV
    fn kv_heads(&self) -> usize;

    /// D
    fn head_dim(&self) -> usize;

    /// `f32` values of scratch that a worker needs for the keys of a page; its values need the same number.
    fn scratch_len(head_dim: usize) -> usize;

    /// The keys `[4, D, 64]` of one head of a page; only those of `tiles` are valid.
    fn keys<'s>(
        &'s self,
        page: usize,
        head: usize,
        tiles: Range<usize>,
        scratch: &'s mut [f32],
    ) -> &'s [Self::Element];

    /// The values `[256, D]` of one head of a page; only those of `tokens` are valid.
    fn values<'s>(
        &'s self,
        page: usize,
        head: usize,
        tokens: Range<usize>,
        scratch: &'s mut [f32],
    ) -> &'s [Self::Element];

    /// [`attention_decode`](super::attention_decode) over these pages.
    #[doc(hidden)]
    fn decode(attention: &Attention<'_, Self>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
        decode::run(attention, workspace, worker);
    }

    /// [`attention_prefill`](super::attention_prefill) over these pages.
    #[doc(hidden)]
    fn prefill(attention: &Attention<'_, Self>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
        prefill::run(attention, workspace, worker);
    }
}

impl<E: KvElement> KvRead for KvPages<'_, E> {
    type Element = E;

    fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    fn head_dim(&self) -> usize {
        self.head_dim
    }

    fn scratch_len(_head_dim: usize) -> usize {
        0
    }

    #[inline(always)]
    fn keys<'s>(&'s self, page: usize, head: usize, _: Range<usize>, _: &'s mut [f32]) -> &'s [E] {
        let start = (page * self.kv_heads + head) * PAGE * self.head_dim;
        &self.keys[start..start + PAGE * self.head_dim]
    }

    #[inline(always)]
    fn values<'s>(&'s self, page: usize, head: usize, _: Range<usize>, _: &'s mut [f32]) -> &'s [E] {
        let start = (page * self.kv_heads + head) * PAGE * self.head_dim;
        &self.values[start..start + PAGE * self.head_dim]
    }

    fn decode(attention: &Attention<'_, Self>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
        E::decode(attention, workspace, worker);
    }

    fn prefill(attention: &Attention<'_, Self>, workspace: SharedMut<'_, f32>, worker: &Worker<'_>) {
        E::prefill(attention, workspace, worker);
    }
}

/// The pools of one layer's pages, to write; shapes as in [`KvPages`].
#[derive(Clone, Copy)]
pub struct KvPagesMut<'a, E> {
    /// `[pages, KV, 4, D, 64]`
    pub keys: SharedMut<'a, E>,
    /// `[pages, KV, 256, D]`
    pub values: SharedMut<'a, E>,
    /// KV
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
}

/// Pools of pages that tokens are written to.
pub trait KvWrite: Copy + Send + Sync {
    /// KV
    fn kv_heads(&self) -> usize;

    /// D
    fn head_dim(&self) -> usize;

    /// Writes one token of one head.
    ///
    /// # Safety
    /// No other thread may use the same tile of keys meanwhile.
    ///
    /// # Panics
    /// If the token lies outside the pool.
    unsafe fn write(&self, page: usize, head: usize, slot: usize, key: &[f32], value: &[f32]);

    /// [`kv_write`] to these pages.
    #[doc(hidden)]
    fn write_rows(
        k: Rows<'_>,
        v: Rows<'_>,
        batch: Batch<'_>,
        table: PageTable<'_>,
        pages: Self,
        worker: &Worker<'_>,
    ) {
        write_rows(k, v, batch, table, pages, worker);
    }
}

impl<E: KvElement> KvWrite for KvPagesMut<'_, E> {
    fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    fn head_dim(&self) -> usize {
        self.head_dim
    }

    #[inline(always)]
    unsafe fn write(&self, page: usize, head: usize, slot: usize, key: &[f32], value: &[f32]) {
        let size = self.head_dim;
        let start = (page * self.kv_heads + head) * PAGE * size;
        let (tile, row) = (start + slot / TILE * TILE * size, start + slot * size);
        // SAFETY: the caller's promise; the values of a token belong to its tile.
        let (tile, row) =
            unsafe { (self.keys.range(tile..tile + TILE * size), self.values.range(row..row + size)) };
        for (column, &x) in tile.chunks_exact_mut(TILE).zip(key) {
            column[slot % TILE] = E::from_f32(x);
        }
        for (y, &x) in row.iter_mut().zip(value) {
            *y = E::from_f32(x);
        }
    }

    fn write_rows(
        k: Rows<'_>,
        v: Rows<'_>,
        batch: Batch<'_>,
        table: PageTable<'_>,
        pages: Self,
        worker: &Worker<'_>,
    ) {
        E::write_rows(k, v, batch, table, pages, worker);
    }
}

/// The pages of each sequence.
#[derive(Clone, Copy)]
pub struct PageTable<'a> {
    /// `[B, stride]`: page `i` of sequence `b` is `pages[b * stride + i]`. Entries of unseen pages are not read.
    pub pages: &'a [u32],
    /// Entries of a sequence.
    pub stride: usize,
}

impl PageTable<'_> {
    /// Page `i` of sequence `b`.
    ///
    /// # Panics
    /// If the table has no such entry.
    #[inline(always)]
    pub fn page(&self, b: usize, i: usize) -> usize {
        assert!(i < self.stride, "page {i} of a table of {}", self.stride);
        self.pages[b * self.stride + i] as usize
    }
}

/// Writes the rows `k` and `v`, both `[T, KV * D]`, into the pages at their positions.
///
/// # Panics
/// If the shapes disagree or a page lies outside the pool.
pub fn kv_write<P: KvWrite>(
    k: Rows<'_>,
    v: Rows<'_>,
    batch: Batch<'_>,
    table: PageTable<'_>,
    pages: P,
    worker: &Worker<'_>,
) {
    P::write_rows(k, v, batch, table, pages, worker);
}

/// [`kv_write`] to pages of any form.
fn write_rows<P: KvWrite>(
    k: Rows<'_>,
    v: Rows<'_>,
    batch: Batch<'_>,
    table: PageTable<'_>,
    pages: P,
    worker: &Worker<'_>,
) {
    let (size, heads) = (pages.head_dim(), pages.kv_heads());
    assert!(k.width() == heads * size && v.width() == heads * size);
    assert!(k.len() >= batch.rows() && v.len() >= batch.rows());
    // Tokens of one tile of keys share cache lines, so one worker writes all of them.
    let tiles = batch.most_rows().div_ceil(TILE) + 1;
    for unit in worker.claim(batch.sequences() * tiles * heads, 1).flatten() {
        let (b, tile, head) = (unit / heads / tiles, unit / heads % tiles, unit % heads);
        let (rows, first) = (batch.rows_of(b), batch.position[b] as usize);
        let tile_start = (first / TILE + tile) * TILE;
        let columns = head * size..(head + 1) * size;
        for position in tile_start.max(first)..(tile_start + TILE).min(first + rows.len()) {
            let t = rows.start + position - first;
            let page = table.page(b, position / PAGE);
            let (k, v) = (&k.row(t)[columns.clone()], &v.row(t)[columns.clone()]);
            // SAFETY: each tile of each head is claimed once.
            unsafe { pages.write(page, head, position % PAGE, k, v) };
        }
    }
}

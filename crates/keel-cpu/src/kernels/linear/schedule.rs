//! Which worker computes which part of a linear layer, and in which order.
//!
//! A unit of work is a run of tile pairs of one matrix against a chunk of rows. Each worker walks its share of the
//! units in order, so its weights are one stream. Then it takes units that others have left: the machine may be shared,
//! and with fixed shares all would wait for the slowest worker.
//!
//! With few blocks of rows, memory is the limit: each pair meets all blocks while it is in the first-level cache. With
//! many, each block meets all pairs of the unit: its activations stay in the first-level cache, the unit's weights in
//! the second, and its results are adjacent. In both cases the next weights are prefetched evenly, each block its
//! share. A single block prefetches at a fixed distance.

use super::block::{Ahead, Block, BlockFns, MAX_ROWS};
use super::format::{PAIR, PackedLayout, TILE_ROWS, WeightFormat};
use super::rows::{BlockAt, RowMap, RowOrder, Segment};
use crate::pool::Worker;
use crate::shared_slice::SharedMut;
use std::ops::Range;

/// Bytes of activations of a chunk of rows: a quarter of a common second-level cache.
const CHUNK_BYTES: usize = 256 << 10;

/// Most bytes of weights of a unit: a fraction of that cache; with few rows, some microseconds of a core's bandwidth.
const UNIT_BYTES: usize = 128 << 10;

/// Fewest bytes of a unit where memory is the limit: a unit that another worker takes begins a stream of its own.
const STREAMED_UNIT_BYTES: usize = 32 << 10;

/// Wanted units per worker: at the end, others wait while a worker does its last unit and the one claimed ahead.
const UNITS_PER_WORKER: usize = 32;

/// Most blocks of rows that each pair of tiles meets one after another.
const FEW_BLOCKS: usize = 4;

/// Data that all blocks of one call share.
pub(super) struct Call<'a> {
    pub layout: &'a PackedLayout,
    pub blocks: BlockFns,
    pub weights: &'a [u8],
    /// Prepared activations.
    pub x: *const u8,
    /// Bytes of one row.
    pub x_stride: usize,
    /// The prepared rows lie in the order of positions, with the rows of a block together; otherwise in the order of x.
    pub x_in_blocks: bool,
    pub y: SharedMut<'a, f32>,
    pub add: bool,
}

/// Some tile pairs of a matrix, for some positions.
#[derive(Clone)]
struct Unit {
    segment: Segment,
    pairs: Range<usize>,
    positions: Range<usize>,
}

impl Unit {
    /// First byte of pair `pair` of the unit's matrix.
    fn pair(&self, call: &Call<'_>, pair: usize) -> *const u8 {
        tile(call, &self.segment, pair * PAIR)
    }
}

/// How segments are cut into units. The cut changes only the time, no result.
struct Cut<'a> {
    segments: &'a [Segment],
    pairs: usize,
    chunk_rows: usize,
    unit_pairs: usize,
}

impl<'a> Cut<'a> {
    fn new(call: &Call<'_>, segments: &'a [Segment], workers: usize) -> Cut<'a> {
        let pairs = call.layout.tiles().div_ceil(PAIR);
        let largest = call.blocks.sizes()[0];
        let chunk_rows = (CHUNK_BYTES / call.x_stride / largest * largest).max(largest);
        let mut cut = Cut { segments, pairs, chunk_rows, unit_pairs: 1 };
        let rows = segments.iter().map(|segment| segment.end - segment.start).max().unwrap_or(0) as usize;
        let streamed = rows <= FEW_BLOCKS * largest;
        let pairs_of = |bytes: usize| bytes / (PAIR * call.layout.tile_bytes());
        let wanted = cut.len() / (workers * UNITS_PER_WORKER);
        let least = if streamed { pairs_of(STREAMED_UNIT_BYTES) } else { 1 };
        cut.unit_pairs = wanted.clamp(least, pairs_of(UNIT_BYTES).max(least)).max(1);
        cut
    }

    fn units_of(&self, segment: &Segment) -> usize {
        let rows = (segment.end - segment.start) as usize;
        rows.div_ceil(self.chunk_rows) * self.pairs.div_ceil(self.unit_pairs)
    }

    fn len(&self) -> usize {
        self.segments.iter().map(|segment| self.units_of(segment)).sum()
    }

    /// Unit `index`. The search starts at segment `at`, whose first unit is `first`; both move to the unit's segment.
    fn unit(&self, index: usize, at: &mut usize, first: &mut usize) -> Unit {
        if index < *first {
            (*at, *first) = (0, 0);
        }
        while index - *first >= self.units_of(&self.segments[*at]) {
            *first += self.units_of(&self.segments[*at]);
            *at += 1;
        }
        let segment = self.segments[*at];
        let per_chunk = self.pairs.div_ceil(self.unit_pairs);
        let (chunk, pair) = ((index - *first) / per_chunk, (index - *first) % per_chunk * self.unit_pairs);
        let start = segment.start as usize + chunk * self.chunk_rows;
        Unit {
            segment,
            pairs: pair..(pair + self.unit_pairs).min(self.pairs),
            positions: start..(start + self.chunk_rows).min(segment.end as usize),
        }
    }
}

/// Prefetches the first weights that this worker will read in [`run`], before the activations are ready.
pub(super) fn ask_for_first(worker: &Worker<'_>, call: &Call<'_>, segments: &[Segment]) {
    let cut = Cut::new(call, segments, worker.count);
    let share = worker.split(cut.len(), 1);
    if !share.is_empty() {
        let unit = cut.unit(share.start, &mut 0, &mut 0);
        Ahead::first(unit.pair(call, unit.pairs.start));
    }
}

/// Computes all segments. Every worker makes the same call, and makes no other claim until the next barrier.
pub(super) fn run(worker: &Worker<'_>, call: &Call<'_>, RowOrder { segments, map }: RowOrder<'_>) {
    let cut = Cut::new(call, segments, worker.count);
    let (mut at, mut first) = (0, 0);
    let claims = worker.claim_near(cut.len()).flatten();
    let mut units = claims.map(|index| cut.unit(index, &mut at, &mut first));
    // One unit is claimed ahead, to prefetch its weights in time.
    let mut current = units.next();
    while let Some(unit) = current {
        let next = units.next();
        run_unit(call, &unit, next.as_ref(), map);
        current = next;
    }
}

/// Computes all pairs of a unit against all its blocks of rows.
fn run_unit(call: &Call<'_>, unit: &Unit, next: Option<&Unit>, map: RowMap<'_>) {
    let blocks = || unit.segment.blocks(unit.positions.clone(), call.blocks.sizes()).enumerate();
    let count = blocks().count();
    let share =
        |(unit, pair): (&Unit, usize), block| Ahead::share(call.layout, unit.pair(call, pair), block, count);
    if count == 1 && !matches!(call.layout.format(), WeightFormat::Dense(_)) {
        blocks().for_each(|(_, block)| stream(call, unit, next, block, map));
    } else if count <= FEW_BLOCKS {
        for pair in unit.pairs.clone() {
            let after = next.map(|next| (next, next.pairs.start));
            let coming = if pair + 1 < unit.pairs.end { Some((unit, pair + 1)) } else { after };
            for (i, block) in blocks() {
                let ahead = |_| coming.map(|coming| share(coming, i));
                run_block(call, unit, pair..pair + 1, block, ahead, map);
            }
        }
    } else {
        for (i, block) in blocks() {
            let ahead = |pair: usize| {
                let next = next?;
                let pair = next.pairs.start + pair;
                (pair < next.pairs.end).then(|| share((next, pair), i))
            };
            run_block(call, unit, unit.pairs.clone(), block, ahead, map);
        }
    }
}

/// Computes all pairs of a unit against its only block of rows. The weights are one stream, on into the next unit.
fn stream(call: &Call<'_>, unit: &Unit, next: Option<&Unit>, block: BlockAt, map: RowMap<'_>) {
    let pair_bytes = PAIR * call.layout.tile_bytes();
    let start = unit.pair(call, unit.pairs.start);
    let end = start.wrapping_add(unit.pairs.len() * pair_bytes);
    let then = next.map_or(std::ptr::null(), |next| next.pair(call, next.pairs.start));
    let ahead =
        |pair: usize| Some(Ahead::after(call.layout, start.wrapping_add(pair * pair_bytes), end, then));
    run_block(call, unit, unit.pairs.clone(), block, ahead, map);
}

/// First byte of tile `tile` of a segment's matrix.
fn tile(call: &Call<'_>, segment: &Segment, tile: usize) -> *const u8 {
    &raw const call.weights[(segment.matrix as usize * call.layout.tiles() + tile) * call.layout.tile_bytes()]
}

/// Computes some pairs of tiles against one block of rows. `ahead` gives each pair's prefetch, counted from the first.
fn run_block(
    call: &Call<'_>,
    unit: &Unit,
    pairs: Range<usize>,
    BlockAt { start: position, rows, .. }: BlockAt,
    ahead: impl Fn(usize) -> Option<Ahead>,
    map: RowMap<'_>,
) {
    let (layout, n) = (call.layout, call.layout.n());
    let compute = call.blocks.of(rows);
    let x = call.x.wrapping_add(position * call.x_stride);
    // Filled in place: a copy in large pieces after writes in small ones would wait a store's full latency.
    let mut block = Block {
        layout,
        tiles: [std::ptr::null(); PAIR],
        stride: 0,
        ahead: None,
        x: [x; MAX_ROWS],
        y: [std::ptr::null_mut(); MAX_ROWS],
        column: 0,
        columns: [0; PAIR],
        add: call.add,
    };
    let columns = pairs.start * PAIR * TILE_ROWS..n.min(pairs.end * PAIR * TILE_ROWS);
    for row in 0..rows {
        let (from, to) = map.rows(position + row);
        if !call.x_in_blocks {
            block.x[row] = call.x.wrapping_add(from * call.x_stride);
        }
        // SAFETY: only this unit has these columns of this row.
        let y = unsafe { call.y.range(to * n + columns.start..to * n + columns.end) };
        block.y[row] = y.as_mut_ptr();
    }
    let mut left = tile(call, &unit.segment, pairs.start * PAIR);
    for pair in 0..pairs.len() {
        let width = columns.len() - block.column;
        // The right tile of the last pair may be missing. The left one replaces it, and nothing is written.
        let tiles = width.div_ceil(TILE_ROWS).min(PAIR);
        block.tiles = [0, tiles - 1].map(|tile| left.wrapping_add(layout.units(tile, tiles).first));
        block.stride = layout.units(0, tiles).stride;
        block.columns = [width.min(TILE_ROWS), width.saturating_sub(TILE_ROWS).min(TILE_ROWS)];
        block.ahead = ahead(pair);
        // SAFETY: `Linear::new` has checked the CPU and chose the kernel for the layout; tiles, rows and
        // outputs lie within slices whose lengths were checked.
        unsafe { compute(&block) }
        block.column += PAIR * TILE_ROWS;
        left = left.wrapping_add(PAIR * layout.tile_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_cover_every_pair_of_every_position_once() {
        let segments = [Segment { matrix: 2, start: 0, end: 20 }, Segment { matrix: 5, start: 20, end: 21 }];
        let cut = Cut { segments: &segments, pairs: 7, chunk_rows: 8, unit_pairs: 3 };
        let mut seen = vec![[0; 7]; 21];
        let (mut at, mut first) = (0, 0);
        let (front, back) = (0..cut.len() / 2, cut.len() / 2..cut.len());
        for index in front.chain(back.rev()) {
            let unit = cut.unit(index, &mut at, &mut first);
            for position in unit.positions {
                assert_eq!(unit.segment.matrix, if position < 20 { 2 } else { 5 });
                for pair in unit.pairs.clone() {
                    seen[position][pair] += 1;
                }
            }
        }
        assert!(seen.iter().flatten().all(|count| *count == 1));
    }
}

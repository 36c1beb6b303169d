//! Weights of the array runtime in the layout of the linear kernels.

use super::memory::HostMemory;
use crate::error::Error;
use crate::isa::Isa;
use crate::kernels::blocks::{self, BlockWeight};
use crate::kernels::linear::{self, Compute, FloatType, Linear, PAIR_ROWS, PackedLayout, Rows, WeightFormat};
use crate::pool::ThreadPool;
use crate::shared_slice::SharedMut;
use half::{bf16, f16};
use keel_array::{ArrayError, BlockFormat, DType, RowBlock, RowData, WeightSpec};
use std::ops::Range;

/// The coding of a weight whose blocks are stored as they came; `None` if the weight is packed. Blocks stay as they
/// came where activations must not be rounded to 8 bits; such a weight is multiplied in f32.
pub(super) fn raw_blocks(spec: &WeightSpec) -> Option<BlockFormat> {
    match (spec.format, spec.compute) {
        (
            keel_array::WeightFormat::Blocks(_),
            keel_array::Compute::Auto | keel_array::Compute::PrefillFp8 | keel_array::Compute::Fp8,
        ) => None,
        (keel_array::WeightFormat::Blocks(format), _) => Some(format),
        _ => None,
    }
}

/// The stack of blocks of a weight, if its blocks stay as they came.
pub(super) fn blocks<'a>(spec: &WeightSpec, bytes: &'a [u8]) -> Option<BlockWeight<'a>> {
    raw_blocks(spec).map(|format| BlockWeight { format, bytes, n: spec.rows, k: spec.cols })
}

/// The layout of a packed weight, which has memory and so can be addressed.
pub(super) fn layout(spec: &WeightSpec) -> PackedLayout {
    try_layout(spec).unwrap_or_else(|e| panic!("the runtime has checked the weight: {e}"))
}

fn try_layout(spec: &WeightSpec) -> Result<PackedLayout, Error> {
    let format = match spec.format {
        keel_array::WeightFormat::Dense(dtype) => WeightFormat::Dense(float_type(dtype)),
        keel_array::WeightFormat::Affine { bits, group_size, scale_dtype } => WeightFormat::Affine {
            bits: bits.into(),
            group: group_size.into(),
            params: float_type(scale_dtype),
        },
        keel_array::WeightFormat::Blocks(format) => WeightFormat::Blocks(format),
    };
    PackedLayout::stacked(spec.experts, spec.rows, spec.cols, format)
}

/// Size of a stored weight in bytes; `usize::MAX` for a weight that cannot be addressed, which no allocation grants.
pub(super) fn packed_bytes(spec: &WeightSpec) -> usize {
    match raw_blocks(spec) {
        Some(format) => blocks::packed_bytes(format, spec.experts.saturating_mul(spec.rows), spec.cols),
        None => try_layout(spec).map_or(usize::MAX, |layout| layout.bytes()),
    }
}

/// First byte of some rows of a matrix, if they lie there as they would alone. Packed rows do if they are whole pairs
/// of tiles. Raw blocks always do.
pub(super) fn first_byte_of_rows(spec: &WeightSpec, rows: Range<usize>) -> Option<usize> {
    if let Some(format) = raw_blocks(spec) {
        return Some(blocks::packed_bytes(format, rows.start, spec.cols));
    }
    let is_edge = |row: usize| row.is_multiple_of(PAIR_ROWS) || row == spec.rows;
    let are_whole = rows.start.is_multiple_of(PAIR_ROWS) && is_edge(rows.end);
    are_whole.then(|| layout(spec).row_bytes(0, rows).start)
}

fn float_type(dtype: DType) -> FloatType {
    match dtype {
        DType::F16 => FloatType::F16,
        DType::BF16 => FloatType::Bf16,
        _ => FloatType::F32,
    }
}

/// The linear layer of a weight, with its compute type.
pub(super) fn linear(spec: &WeightSpec, isa: Isa) -> Linear {
    let layout = layout(spec);
    let compute = match spec.compute {
        keel_array::Compute::F32 => Compute::F32,
        keel_array::Compute::Bf16 if Compute::Bf16.takes(layout.format()) && isa.has_bf16_dots() => {
            Compute::Bf16
        }
        keel_array::Compute::Bf16 => Compute::F32,
        // No CPU multiplies 8-bit floats.
        keel_array::Compute::Auto | keel_array::Compute::PrefillFp8 | keel_array::Compute::Fp8 => {
            Compute::fastest(layout.format(), isa)
        }
    };
    Linear::new(layout, compute, isa)
}

/// Packs a block of rows, which the runtime has checked, on all threads of the pool. Each thread takes pairs of tiles.
pub(super) fn pack(
    pool: &ThreadPool,
    spec: &WeightSpec,
    memory: &HostMemory,
    offset: usize,
    block: &RowBlock<'_>,
) -> Result<(), ArrayError> {
    if let (RowData::Blocks(bytes), Some(format)) = (block.data, raw_blocks(spec)) {
        let first = block.expert * spec.rows + block.first_row;
        let start = offset + blocks::packed_bytes(format, first, spec.cols);
        assert!(start + bytes.len() <= memory.bytes(), "a weight outside its memory");
        memory.each_large_page(pool, start..start + bytes.len(), |piece| {
            memory.write(piece.start, &bytes[piece.start - start..piece.end - start]);
        });
        return Ok(());
    }
    let layout = layout(spec);
    let rows = block.first_row..block.first_row + block.rows;
    if !rows.start.is_multiple_of(PAIR_ROWS) || !(rows.end.is_multiple_of(PAIR_ROWS) || rows.end == spec.rows)
    {
        let reason = format!("rows {rows:?} of {} are not whole tiles of {PAIR_ROWS} rows", spec.rows);
        return Err(ArrayError::Argument { op: "pack_weight", reason });
    }
    let range = layout.row_bytes(block.expert, rows);
    assert!(offset + layout.bytes() <= memory.bytes(), "a weight outside its memory");
    if range.start == 0 {
        // Neighbouring rows share pages, so the pages come before the threads that pack rows.
        memory.each_large_page(pool, offset..offset + layout.bytes(), |bytes| memory.populate(bytes));
    }
    // SAFETY: within the memory; the stream lets nothing else touch it meanwhile.
    let out = unsafe { SharedMut::from_raw(memory.start().add(offset + range.start), range.len()) };
    pool.run(|worker| {
        for pair in worker.claim(block.rows.div_ceil(PAIR_ROWS), 1) {
            let rows = pair.start * PAIR_ROWS..block.rows.min(pair.end * PAIR_ROWS);
            let first = block.first_row + rows.start;
            let bytes = layout.row_bytes(block.expert, first..block.first_row + rows.end);
            // SAFETY: pairs of tiles do not overlap, and each is claimed once.
            let out = unsafe { out.range(bytes.start - range.start..bytes.end - range.start) };
            pack_part(spec, &layout, block, rows, out);
        }
    });
    Ok(())
}

/// Packs some rows of a block.
fn pack_part(
    spec: &WeightSpec,
    layout: &PackedLayout,
    block: &RowBlock<'_>,
    rows: Range<usize>,
    out: &mut [u8],
) {
    fn part<'d, T>(all: &'d [T], rows: &Range<usize>, count: usize) -> &'d [T] {
        let row = all.len() / count;
        &all[rows.start * row..rows.end * row]
    }
    let count = block.rows;
    let dense;
    let data = match (block.data, spec.format) {
        (RowData::Dense(bytes), keel_array::WeightFormat::Dense(dtype)) => {
            dense = widen(part(bytes, &rows, count), dtype);
            Rows::Dense(&dense)
        }
        (RowData::Affine { codes, scales, biases }, _) => Rows::Affine {
            quants: part(codes, &rows, count),
            scales: part(scales, &rows, count),
            biases: part(biases, &rows, count),
        },
        (RowData::Blocks(bytes), _) => Rows::Blocks(part(bytes, &rows, count)),
        (RowData::Dense(_), format) => unreachable!("floats for a weight in {format:?}"),
    };
    linear::pack(layout, data, out);
}

/// Little-endian floats as f32.
fn widen(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let halves = |f: fn(u16) -> f32| bytes.as_chunks().0.iter().map(|b| f(u16::from_le_bytes(*b))).collect();
    match dtype {
        DType::F16 => halves(|x| f16::from_bits(x).to_f32()),
        DType::BF16 => halves(|x| bf16::from_bits(x).to_f32()),
        _ => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keel_array::Compute;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_first_rows_bring_the_memory_of_the_whole_weight() {
        let page = memmap2::MmapMut::map_anon(4096).unwrap();
        if page.advise(memmap2::Advice::PopulateWrite).is_err() {
            return keel_testkit::skipped!("needs MADV_POPULATE_WRITE: Linux 5.14");
        }
        let (rows, cols, format) = (8192, 1024, keel_array::WeightFormat::Blocks(BlockFormat::Q8_0));
        let spec = WeightSpec { experts: 1, rows, cols, format, compute: Compute::Auto };
        let (pool, offset) = (ThreadPool::new(2), 192);
        let memory = HostMemory::zeroed(offset + packed_bytes(&spec)).unwrap();
        let pack_rows = |first_row: usize, byte: u8| {
            let bytes = vec![byte; PAIR_ROWS * cols / 32 * BlockFormat::Q8_0.bytes()];
            let data = RowData::Blocks(&bytes);
            let block = RowBlock { expert: 0, first_row, rows: PAIR_ROWS, data };
            pack(&pool, &spec, &memory, offset, &block).unwrap();
        };
        pack_rows(rows - PAIR_ROWS, 7);
        let last = || {
            let mut last = vec![0; 1024];
            memory.read(memory.bytes() - last.len(), &mut last);
            last
        };
        let packed = last();
        assert_eq!(memory.is_backed(), Some(false));
        pack_rows(0, 5);
        assert_eq!(memory.is_backed(), Some(true));
        assert_eq!(last(), packed, "other rows stay");
    }

    /// Over several large pages, which different threads copy.
    #[test]
    fn raw_blocks_lie_in_memory_as_they_came() {
        let (rows, cols, format) = (4096, 1024, keel_array::WeightFormat::Blocks(BlockFormat::Q8_0));
        let spec = WeightSpec { experts: 1, rows: rows + 3, cols, format, compute: Compute::F32 };
        let (pool, offset, row_bytes) = (ThreadPool::new(2), 192, cols / 32 * BlockFormat::Q8_0.bytes());
        let memory = HostMemory::zeroed(offset + packed_bytes(&spec)).unwrap();
        let bytes: Vec<u8> = (0..rows * row_bytes).map(|i| ((i * 2_654_435_761) >> 11) as u8 | 1).collect();
        let block = RowBlock { expert: 0, first_row: 2, rows, data: RowData::Blocks(&bytes) };
        pack(&pool, &spec, &memory, offset, &block).unwrap();
        let mut all = vec![9; memory.bytes()];
        memory.read(0, &mut all);
        let packed = offset + 2 * row_bytes..offset + (2 + rows) * row_bytes;
        assert!(all[packed.clone()] == bytes);
        assert!(all[..packed.start].iter().chain(&all[packed.end..]).all(|byte| *byte == 0));
    }
}

// Finds the rows and keys that a block works on: batches of ragged sequences, pages of 256 tokens, keys cut into
// splits.
#pragma once
#include "ptx.cuh"

#define PAGE 256
// If pages are reused (RUNS), rows of a sequence are written and attended up to a multiple of this position, then up to
// the next one; see attention.cu.
#define RUN 64

/// The rows of a sequence that a launch works on: all, or those of one run.
struct SequenceRows {
    u32 first, count;
};
static __device__ __forceinline__ SequenceRows rows_of(const u32* row_start, const u32* position, u32 sequence, u32 run) {
    u32 first = row_start[sequence], end = row_start[sequence + 1];
    if (RUNS) {
        // Positions of run 0 that are before the first row.
        const u32 before = position[sequence] % RUN, from = max(run * RUN, before) - before;
        end = min(end, first + (run + 1) * RUN - before);
        first = min(first + from, end);
    }
    return {first, end - first};
}

/// Finds the sequence of unit `index` and the unit's index within it. Each sequence has ceil(rows * per_row / size)
/// units. Returns false past the last. Runs need positions. All lanes of a warp call this.
static __device__ __forceinline__ bool locate(const u32* row_start, u32 sequences, u32 per_row, u32 size, u32 index,
                                              u32& sequence, u32& unit, u32 run = 0, const u32* position = nullptr) {
    u32 lane = threadIdx.x % 32;
    for (u32 base = 0; base < sequences; base += 32) {
        u32 b = base + lane, count = 0;
        if (b < sequences) count = (rows_of(row_start, position, b, run).count * per_row + size - 1) / size;
        u32 until = count;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            u32 before = __shfl_up_sync(FULL_WARP, until, d);
            if (lane >= d) until += before;
        }
        u32 past = __popc(__ballot_sync(FULL_WARP, until <= index));
        if (past < 32) {
            sequence = base + past;
            unit = index - __shfl_sync(FULL_WARP, until - count, past);
            return sequence < sequences;
        }
        index -= __shfl_sync(FULL_WARP, until, 31);
    }
    return false;
}

/// Where a split begins if its place must not depend on the batch: 16 splits of one page, 16 of two, 16 of four and so
/// on.
static __device__ __forceinline__ u32 split_start(u32 split) {
    const u32 run = split / 16;
    return PAGE * (16 * ((1u << run) - 1) + (split % 16 << run));
}

#ifdef SPLIT_STEP
/// Keys from..to of a split of a sequence whose rows are at positions first..high; empty if from >= to. by_position
/// cuts at positions that are the same for every sequence; otherwise the existing keys are cut evenly, in multiples of
/// SPLIT_STEP.
static __device__ __forceinline__ void split_range(u32 first, u32 high, u32 window, u32 split, u32 splits, u32 by_position,
                                                   u32& from, u32& to) {
    u32 low = window > 0 && first + 1 > window ? (first + 1 - window) / 64 * 64 : 0;
    if (by_position) {
        from = max(split_start(split), low);
        to = min(high, split_start(split + 1));
    } else {
        const u32 split_keys = ((high - low + splits - 1) / splits + SPLIT_STEP - 1) / SPLIT_STEP * SPLIT_STEP;
        from = low + split * split_keys;
        to = min(high, from + split_keys);
    }
}
#endif

/// Narrows keys from..to to those that a row at one of the positions first..last sees; from stays a multiple of 64.
static __device__ __forceinline__ void visible_range(u32 first, u32 last, u32 window, u32& from, u32& to) {
    if (window > 0 && first + 1 > window) from = max(from, (first + 1 - window) / 64 * 64);
    to = min(to, last + 1);
}

/// Whether a row at `position` sees any of the keys from..to.
static __device__ __forceinline__ bool sees(u32 position, u32 window, u32 from, u32 to) {
    return from < to && from <= position && (window == 0 || to + window > position + 1);
}

#ifdef KV
/// The result of a split for a row and head: the sum of e^(s - m) v [D], then m and the sum of e^(s - m). `partial`
/// holds all sums of the first kind [splits, T, H, D], then all pairs of the second [splits, T, H, 2].
static __device__ __forceinline__ float* split_sums(float* partial, u32 rows, u32 split, u32 row, u32 head) {
    return partial + (((u64)split * rows + row) * H + head) * D;
}
static __device__ __forceinline__ float2* split_scale(float* partial, u32 splits, u32 rows, u32 split, u32 row, u32 head) {
    return (float2*)(partial + (u64)splits * rows * (H * D)) + ((u64)split * rows + row) * H + head;
}
#endif

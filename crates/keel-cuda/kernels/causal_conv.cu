// Depthwise causal convolution with SiLU over the rows of a batch, and the window that each sequence keeps.
//
//   y[t, c] = silu(sum_j w[j, c] x[t - (K - 1) + j, c])        rows before the step come from the window
//
// x [T, C] with X_STRIDE values from row to row; w [K, C]; y [T, C]; window [slots, K - 1, C], oldest row first.
// open [slots, OPEN, C]: rows of the last step that may still be taken back. A step is told how many of them were
// accepted, and first moves the window forward by that number. A step that keeps its own rows open writes them to
// `open` and moves the window no further.
//
// Constants: C, K, X_STRIDE, OPEN (open rows of a slot; 0 without a log).
// Launch: block 128 threads, one channel each; grid.x = ceil(C / 128).
//   causal_conv          grid.y = B: a block does all rows of a sequence (decode)
//   causal_conv_prefill  grid.y = ceil(T / TILE) + B: a block does up to TILE = 32 rows of one sequence
// Only the block with a sequence's first rows reads and writes its window, so the order of blocks does not matter.
//
// Bytes: 8 T C for rows and 8 B (K - 1) C for windows. Floor: those bytes at the memory's rate.

#include "common.cuh"

#define TILE 32
#define BEFORE (K - 1)

/// Rows `from..to` of a sequence that starts at row `first` of x and has `rows` rows.
static __device__ __forceinline__ void convolve(const float* __restrict__ x, const float* __restrict__ w, float* window,
                                                float* open, float* __restrict__ y, u32 channel, u32 first, u32 rows, u32 from,
                                                u32 to, u32 accepted, u32 keep_open) {
    x += (u64)first * X_STRIDE + channel;
    y += (u64)first * C + channel;
    float weight[K], recent[K];
#pragma unroll
    for (int j = 0; j < K; j++) weight[j] = w[j * C + channel];
    // recent[1..K] are the K - 1 rows before `from`.
#pragma unroll
    for (int j = 0; j < BEFORE; j++) {
        // Row accepted + j of [window; open].
        const u32 row = accepted + j;
        recent[j + 1] = from != 0 ? x[(u64)(from - BEFORE + j) * X_STRIDE] : row < BEFORE ? window[row * C] : open[(row - BEFORE) * C];
    }
    if (from == 0) {
        float kept[BEFORE + 1];
#pragma unroll
        for (int j = 0; j < BEFORE; j++) {
            // Row rows + j of [window; x]: without open rows the last K - 1 rows become the window.
            kept[j] = recent[j + 1];
            if (!keep_open) {
                if (rows + j >= BEFORE) {
                    kept[j] = x[(u64)(rows + j - BEFORE) * X_STRIDE];
                } else {
#pragma unroll
                    for (int i = 0; i < BEFORE; i++) {
                        if (i == rows + j) kept[j] = recent[i + 1];
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < BEFORE; j++) window[j * C] = kept[j];
        if (keep_open) {
            for (u32 t = 0; t < rows; t++) open[t * C] = x[(u64)t * X_STRIDE];
        }
    }
#pragma unroll 4
    for (u32 t = from; t < to; t++) {
#pragma unroll
        for (int j = 0; j < BEFORE; j++) recent[j] = recent[j + 1];
        recent[BEFORE] = x[(u64)t * X_STRIDE];
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < K; j++) sum = fmaf(weight[j], recent[j], sum);
        y[(u64)t * C] = silu(sum);
    }
}

/// open and accepted are null without a log.
extern "C" __global__ void __launch_bounds__(128)
causal_conv(
#include "causal_conv.params"
) {
    take_turn();
    u32 channel = blockIdx.x * 128 + threadIdx.x, b = blockIdx.y;
    if (channel >= C) return;
    u32 first = row_start[b], rows = row_start[b + 1] - first;
    if (rows == 0 && !(accepted && accepted[b])) return;
    window += (u64)slot[b] * BEFORE * C + channel;
    if (open) open += (u64)slot[b] * OPEN * C + channel;
    convolve(x, w, window, open, y, channel, first, rows, 0, rows, accepted ? accepted[b] : 0, keep_open);
}

/// The same for many rows. This regime leaves no rows open.
extern "C" __global__ void __launch_bounds__(128)
causal_conv_prefill(
#include "causal_conv_prefill.params"
) {
    take_turn();
    u32 channel = blockIdx.x * 128 + threadIdx.x, tile = blockIdx.y;
    if (channel >= C) return;
    for (u32 b = 0; b < sequences; b++) {
        u32 first = row_start[b], rows = row_start[b + 1] - first, tiles = (rows + TILE - 1) / TILE;
        // A sequence without rows keeps its window.
        if (tile < tiles) {
            window += (u64)slot[b] * BEFORE * C + channel;
            convolve(x, w, window, nullptr, y, channel, first, rows, tile * TILE, min(rows, (tile + 1) * TILE), 0, 0);
            return;
        }
        tile -= tiles;
    }
}

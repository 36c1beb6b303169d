// Rows of a weight and x in 16 bits (see half.cuh): the operands of cuBLASLt in long prefills. Also rows of an
// embedding.
//
// Macros: DIM_N, DIM_K; BITS, GROUP, PAIR_T or BLOCK (or WEIGHT_T, embedding_rows alone)
//   dequantize      w f16 [experts N][K], the weights rounded once. A warp converts one 16 x 64 tile.
//                   Arguments weight, pairs, out, experts. Grid ceil(experts * row tiles * column tiles / 8), block
//                   256.
//                   Floor: 2 bytes a weight plus its packed bytes.
//   embedding_rows  y f32 [T][K]: rows `ids` (INDEX: u32 or i32) of the weight.
//                   Arguments weight, pairs, ids, y, fault, kernel. Grid T, block 128.
#include "half.cuh"
#include "weight_tiles.cuh"

#ifdef BITS
extern "C" __global__ void __launch_bounds__(256) dequantize(
#include "dequantize.params"
) {
    const int lane = threadIdx.x % 32;
    take_turn();
    const u32 tile = blockIdx.x * 8 + threadIdx.x / 32;
    if (tile >= experts * (u32)(N_TILES * K_TILES)) return;
    const int kt = tile % K_TILES, rt = tile / K_TILES % N_TILES;
    const size_t expert = tile / (u32)(K_TILES * N_TILES);
    float w[2][16];
    widen_tile(w, expert_of(WEIGHT, expert), rt, kt, lane);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int n = 16 * rt + 8 * h + lane / 4;
        if (n >= DIM_N) continue;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            int k = 64 * kt + 32 * m + 8 * (lane % 4);
            if (k >= DIM_K) continue; // DIM_K is a multiple of 32
            const float *v = &w[h][8 * m];
            auto two = [&](int i) { return two_weights(WEIGHT_FACTOR * v[i], WEIGHT_FACTOR * v[i + 1]); };
            store16(out + (expert * DIM_N + n) * DIM_K + k, two(0), two(2), two(4), two(6));
        }
    }
}
#endif

#ifdef INDEX
extern "C" __global__ void embedding_rows(
#include "embedding_rows.params"
) {
    take_turn();
    const u32 id = (u32)ids[blockIdx.x];
    if (id >= DIM_N) {
        if (threadIdx.x == 0) report(fault, kernel, 0, id, DIM_N);
        return;
    }
    float *row = y + (size_t)blockIdx.x * DIM_K;
#ifdef BITS
    const int lane_of_row = 4 * (id % 8) + threadIdx.x % 4;
    for (int kt = threadIdx.x / 4; kt < K_TILES; kt += blockDim.x / 4) {
        float w[2][16];
        widen_tile(w, WEIGHT, id / 16, kt, lane_of_row);
        for (int s = 0; s < 16; s += 4) {
            int k = 64 * kt + 32 * (s / 8) + 8 * (threadIdx.x % 4) + s % 8;
            bool upper = id % 16 >= 8;
            if (k < DIM_K)
                *(float4 *)(row + k) = make_float4(upper ? w[1][s] : w[0][s], upper ? w[1][s + 1] : w[0][s + 1],
                                                   upper ? w[1][s + 2] : w[0][s + 2], upper ? w[1][s + 3] : w[0][s + 3]);
        }
    }
#else
    for (int k = threadIdx.x; k < DIM_K; k += blockDim.x) row[k] = to_f32(weight[(size_t)id * DIM_K + k]);
#endif
}

#endif

// Rounds `pairs` pairs of x to 16 bits. Grid ceil(pairs / 4 / 256), block 256; 4 bytes read and 2 written a value.
extern "C" __global__ void to_half(
#include "to_half.params"
) {
    take_turn();
    const long long first = ((long long)blockIdx.x * 256 + threadIdx.x) * 4;
    if (first + 4 <= pairs) {
        float4 a = ((const float4 *)(x + first))[0], b = ((const float4 *)(x + first))[1];
        store16(y + first, two_inputs(a.x, a.y), two_inputs(a.z, a.w), two_inputs(b.x, b.y), two_inputs(b.z, b.w));
    } else {
        for (long long i = first; i < pairs; i++) y[i] = two_inputs(x[i].x, x[i].y);
    }
}

// Splits `pairs` pairs of x into two bf16, x = hi + lo, which keep 16 bits of it. Grid ceil(pairs / 256), block 256; 4
// bytes read and 4 written a value.
extern "C" __global__ void __launch_bounds__(256) to_two_bf16(
#include "to_two_bf16.params"
) {
    take_turn();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= pairs) return;
    const float2 v = x[i];
    const bf16x2 rounded = two_bf16(v.x, v.y);
    hi[i] = rounded;
    lo[i] = two_bf16(v.x - to_f32(rounded.x), v.y - to_f32(rounded.y));
}

#ifdef ROW
// Removes padding: y f32 [rows][DIM_N] from rows that are ROW wide. Grid rows, block up to 256. Bytes moved: y's,
// twice.
extern "C" __global__ void leave_padding(
#include "leave_padding.params"
) {
    take_turn();
    for (u32 n = threadIdx.x; n < DIM_N; n += blockDim.x) y[(size_t)blockIdx.x * DIM_N + n] = padded[(size_t)blockIdx.x * ROW + n];
}
#endif

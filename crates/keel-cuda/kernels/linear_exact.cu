// y[t, n] = sum_k x[t, k] W[n, k] (+ residual[t, n]) in f32 throughout, for every format: `--compute f32`.
// Weights are widened to f32 (affine ones by one fma, blocks as they are decoded). Sums are f32 fma in an order that
// depends on DIM_K, and in exact_rows on SPLIT.
//
// Macros: DIM_N, DIM_K, DIM_T (exact_rows); BITS, GROUP, PAIR_T or BLOCK or WEIGHT_T; SPLIT (exact_rows).
// Optional GATHER=J' as in linear_few_rows.cu (exact_rows, DIM_T = 1).
//   exact_rows   1 to 16 rows. x begins at a multiple of 16 bytes if DIM_K is a multiple of 4. Warp s of a block takes
//                the column tiles s, s + SPLIT, ... of one row tile.
//                Grid ceil(DIM_N / 16) (x rows of y if GATHER), block 32 SPLIT, no dynamic shared memory.
//                Floor: the weight's bytes / (3.0 TB/s).
//   exact_tiled  any number of rows: 128 x 64 tiles of y, 8 x 4 of it per thread. Grid (ceil(DIM_N / 128),
//                ceil(DIM_T / 64)), block 256, dynamic shared memory EXACT_SHARED. Floor: 2 N K T / (60 TFLOP/s).
#include "weight_tiles.cuh"

#ifndef GATHER
#define GATHER 0
#endif

#if defined(DIM_T)
extern "C" __global__ void __launch_bounds__(32 * SPLIT) exact_rows(
#include "exact_rows.params"
) {
    __shared__ float partial[SPLIT][DIM_T][17];
    const int lane = threadIdx.x % 32, split = threadIdx.x / 32, rt = blockIdx.x;
    take_turn();
    size_t expert = 0;
#if GATHER
    expert = experts[blockIdx.y];
    if (expert >= stack) {
        if (blockIdx.x == 0 && threadIdx.x == 0) report(fault, kernel, 1, (u32)expert, stack);
        return;
    }
    x += (size_t)(blockIdx.y / GATHER) * DIM_K;
    y += (size_t)blockIdx.y * DIM_N;
    residual = nullptr;
#endif
    const Weights weights = expert_of(WEIGHT, expert);
    float acc[DIM_T][2] = {};
#pragma unroll 2
    for (int kt = split; kt < K_TILES; kt += SPLIT) {
        float w[2][16];
        widen_tile(w, weights, rt, kt, lane);
#pragma unroll
        for (int row = 0; row < DIM_T; row++) {
            float v[16];
            load_slots(v, x + (size_t)row * DIM_K, kt, lane % 4);
#pragma unroll
            for (int s = 0; s < 16; s++) {
                acc[row][0] = __fmaf_rn(w[0][s], v[s], acc[row][0]);
                acc[row][1] = __fmaf_rn(w[1][s], v[s], acc[row][1]);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < DIM_T; row++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = acc[row][h];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0) partial[split][row][8 * h + lane / 4] = sum;
        }
    __syncthreads();
    for (int i = threadIdx.x; i < DIM_T * 16; i += 32 * SPLIT) {
        int row = i / 16, n = 16 * rt + i % 16;
        if (n >= DIM_N) continue;
        float sum = partial[0][row][i % 16];
        for (int s = 1; s < SPLIT; s++) sum = __fadd_rn(sum, partial[s][row][i % 16]);
        size_t at = (size_t)row * DIM_N + n;
        y[at] = residual ? __fadd_rn(residual[at], sum) : sum;
    }
}
#endif

#define W_STRIDE 136
#define X_STRIDE 72
#define EXACT_SHARED (64 * (W_STRIDE + X_STRIDE) * 4)
extern "C" __global__ void __launch_bounds__(256) exact_tiled(
#include "exact_tiled.params"
) {
    extern __shared__ float4 memory[];
    float *w_tile = (float *)memory, *x_tile = w_tile + 64 * W_STRIDE; // [k][row of W], [k][row of x]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n0 = blockIdx.x * 128, t0 = blockIdx.y * 64;
    const int n_thread = threadIdx.x % 16 * 4, t_thread = threadIdx.x / 16 * 4; // rows n_thread + {0..3, 64..67}
    take_turn();
    const Weights weights = WEIGHT;
    float acc[4][8] = {};
    for (int kt = 0; kt < K_TILES; kt++) {
        float w[2][16];
        int rt = n0 / 16 + warp;
        widen_tile(w, weights, min(rt, N_TILES - 1), kt, lane);
        __syncthreads(); // all warps have read the tiles before
#pragma unroll
        for (int s = 0; s < 16; s++) {
            int k = 32 * (s / 8) + 8 * (lane % 4) + s % 8;
            w_tile[k * W_STRIDE + 16 * warp + lane / 4] = w[0][s];
            w_tile[k * W_STRIDE + 16 * warp + lane / 4 + 8] = w[1][s];
        }
        for (int i = threadIdx.x; i < 64 * 64; i += 256) {
            int k = i % 64, row = i / 64;
            x_tile[k * X_STRIDE + row] = 64 * kt + k < DIM_K ? x[(size_t)min(t0 + row, (int)rows - 1) * DIM_K + 64 * kt + k] : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < 64; k++) {
            float4 a = *(float4 *)&w_tile[k * W_STRIDE + n_thread], b = *(float4 *)&w_tile[k * W_STRIDE + 64 + n_thread];
            float4 c = *(float4 *)&x_tile[k * X_STRIDE + t_thread];
            float ws[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, xs[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) acc[i][j] = __fmaf_rn(xs[i], ws[j], acc[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int row = t0 + t_thread + i, n = n0 + n_thread + (j < 4 ? j : 60 + j);
            if (row >= (int)rows || n >= DIM_N) continue;
            size_t at = (size_t)row * DIM_N + n;
            y[at] = residual ? __fadd_rn(residual[at], acc[i][j]) : acc[i][j];
        }
}

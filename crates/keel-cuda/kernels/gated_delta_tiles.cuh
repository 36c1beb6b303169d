// Tiles of the chunked gated delta rule: the workspace of a chunk, products of tiles, the inverse of I + M. The
// formula is in gated_delta_chunked.cu.
#pragma once
#include "gated_delta_state.cuh"
#define RUNS 0 // all rows of a sequence at once
#include "paged.cuh"

#define ROWS 64
#define COLUMNS 32
#define BLOCKS ((DV + COLUMNS - 1) / COLUMNS)
#define SHARE (HV / HK)
// Lines of tiles: 16 bytes longer than a row, so that eight rows lie on different banks.
#define KEY_LINE (DK + 8)
#define PAIR_LINE 72
#define VALUE_LINE 36
#define KEY_TILE (ROWS * KEY_LINE)
#define PAIR_TILE (ROWS * PAIR_LINE)
#define MATRIX_LINE 68
#define MATRIX_BYTES ((ROWS * MATRIX_LINE + 32 * 36) * 4)
// Bytes of k and q, then of two matrices.
#define PREPARE_TILES (4 * KEY_TILE > 2 * MATRIX_BYTES ? 4 * KEY_TILE : 2 * MATRIX_BYTES)
// Then sums of log decays, two floats each, and betas.
#define PREPARE_SHARED (PREPARE_TILES + 3 * SHARE * ROWS * 4)
// Of the workspace, for each chunk.
#define WORKSPACE_BYTES (HK * 2 * KEY_TILE * 2 + HV * (2 * PAIR_TILE * 2 + 2 * ROWS * 4))

/// A chunk's part of the workspace.
struct Chunk {
    f16* keys;   // [2, 64, KEY_LINE] of one key head: k, q
    f16* pairs;  // [2, 64, PAIR_LINE] of one value head: T, P
    float* gates; // [2, 64] of one value head: e^G, e^(G_63 - G)
};
static __device__ __forceinline__ Chunk chunk_of(void* workspace, u32 chunks, u32 chunk, u32 head) {
    f16* keys = (f16*)workspace;
    f16* pairs = keys + (u64)chunks * HK * 2 * KEY_TILE;
    float* gates = (float*)(pairs + (u64)chunks * HV * 2 * PAIR_TILE);
    Chunk c;
    c.keys = keys + ((u64)chunk * HK + head / SHARE) * (2 * KEY_TILE);
    c.pairs = pairs + ((u64)chunk * HV + head) * (2 * PAIR_TILE);
    c.gates = gates + ((u64)chunk * HV + head) * (2 * ROWS);
    return c;
}

/// `c = a b` on 16 rows of a and 8 columns of b [SIZE], f32 in shared memory. Computed in tf32, whose significand is as
/// long as that of the f16 results.
template <int SIZE>
static __device__ __forceinline__ void multiply(float (&c)[4], const float* a, u32 a_line, const float* b, u32 b_line) {
    const u32 group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    c[0] = c[1] = c[2] = c[3] = 0.0f;
    a += group * a_line + quad;
    b += quad * b_line + group;
#pragma unroll
    for (int k = 0; k < SIZE; k += 8)
        mma_tf32(c, a[k], a[8 * a_line + k], a[k + 4], a[8 * a_line + k + 4], b[k * b_line], b[(k + 4) * b_line]);
}

/// Stores a result of `multiply`.
static __device__ __forceinline__ void store_tile(float* to, u32 line, const float (&c)[4], float sign) {
    to += threadIdx.x % 32 / 4 * line + threadIdx.x % 4 * 2;
    *(float2*)to = make_float2(sign * c[0], sign * c[1]);
    *(float2*)(to + 8 * line) = make_float2(sign * c[2], sign * c[3]);
}

/// Inverts I + M for the strictly lower triangular M [64, 64], in place. Half a block of 256 threads calls it.
static __device__ __forceinline__ void invert(float* matrix, float* scratch, u32 half) {
    constexpr u32 LINE = MATRIX_LINE, SCRATCH = 36;
    const u32 warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    {
        // Warp w solves (I + M) x = e_j on diagonal block w; lane j has column j.
        float* block = matrix + warp * 16 * (LINE + 1);
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            x[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
            for (int m = 0; m < i; m += 4) {
                float4 y = *(const float4*)(block + i * LINE + m);
                x[i] = fmaf(-y.x, x[m], x[i]);
                if (m + 1 < i) x[i] = fmaf(-y.y, x[m + 1], x[i]);
                if (m + 2 < i) x[i] = fmaf(-y.z, x[m + 2], x[i]);
                if (m + 3 < i) x[i] = fmaf(-y.w, x[m + 3], x[i]);
            }
        }
        __syncwarp();
        if (lane < 16) {
#pragma unroll
            for (int i = 0; i < 16; i++) block[i * LINE + lane] = x[i];
        }
    }
    barrier(1 + half, 128);
    {
        // Combines two blocks of 16 into one of 32: [T0 0; -T1 M10 T0 T1]. Two warps a pair, eight columns each.
        float *block = matrix + warp / 2 * 32 * (LINE + 1), *part = scratch + warp / 2 * 16 * SCRATCH, c[4];
        const u32 column = warp % 2 * 8;
        multiply<16>(c, block + 16 * LINE, LINE, block + column, LINE);
        store_tile(part + column, SCRATCH, c, 1.0f);
        barrier(1 + half, 128);
        multiply<16>(c, block + 16 * (LINE + 1), LINE, part + column, SCRATCH);
        store_tile(block + 16 * LINE + column, LINE, c, -1.0f);
    }
    barrier(1 + half, 128);
    {
        // The same for two blocks of 32: a warp has 16 rows of 16 columns.
        const u32 row = warp % 2 * 16, column = warp / 2 * 16;
        float c[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            multiply<32>(c[n], matrix + (32 + row) * LINE, LINE, matrix + column + n * 8, LINE);
            store_tile(scratch + row * SCRATCH + column + n * 8, SCRATCH, c[n], 1.0f);
        }
        barrier(1 + half, 128);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            multiply<32>(c[n], matrix + (32 + row) * LINE + 32, LINE, scratch + column + n * 8, SCRATCH);
            store_tile(matrix + (32 + row) * LINE + column + n * 8, LINE, c[n], -1.0f);
        }
    }
    barrier(1 + half, 128);
}

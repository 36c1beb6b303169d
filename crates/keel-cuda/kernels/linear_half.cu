// y[t, n] = ALPHA sum_k x[t, k] W[n, k] (+ residual[t, n]) for factors of 16 bits, with sums in f32: many rows in the
// deterministic mode.
// The tensor cores add 16 columns at a time, in the order of the columns, to a sum that stays in registers. So the bits
// of an element follow from its own row of x and of W, and depend neither on N nor on T nor on TILE.
//
// A block of 8 warps computes TILE x TILE elements, a warp half of the rows of x and a quarter of those of W. It takes
// 64 columns at a time, which arrive in the background with STAGES - 1 fetches under way. In shared memory a row has
// 128 bytes, whose chunks lie at panel_offset.
//
// Macros: DIM_N = N; DIM_K = K, a multiple of 8; HALF_BF16, see half.cuh; ALPHA; TILE = 64 or 128; STAGES from 2 on;
//   X_PARTS=2  x is the sum of two parts, both multiplied, the smaller one first
// Grid: (ceil(T / TILE), ceil(N / TILE)), block 256, dynamic shared memory STAGES * TILE * 256 bytes. x and W begin at
// multiples of 16 bytes. Bytes moved: x N / TILE times and W T / TILE times, from L2 where they fit.
// Floor: 2 X_PARTS N K T / (600 TFLOP/s), which mma.sync reaches on an H100.
#include "half.cuh"
#include "ptx.cuh"

#define K_TILES ((DIM_K + 63) / 64)
#define STAGE_BYTES (2 * TILE * 128)
#define X_TILES (TILE / 32) // of 16 rows of x that a warp multiplies
#define W_TILES (TILE / 32) // of 8 rows of W

static __device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF_BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    mma_f16(c, a, b0, b1);
#endif
}

extern "C" __global__ void __launch_bounds__(256) linear_half(
#include "linear_half.params"
) {
    DYNAMIC_SHARED(u8, stages);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 t0 = blockIdx.x * TILE, n0 = blockIdx.y * TILE;
    take_turn();

    // Requests 64 columns of the tiles; zeros for rows and columns that do not exist.
    auto fetch = [&](u32 i) {
        const u32 to = shared_address(stages) + i % STAGES * STAGE_BYTES, kt = i % K_TILES;
        const u16* part = x;
#if X_PARTS == 2
        if (i < K_TILES) part = lo;
#endif
#pragma unroll
        for (u32 c = threadIdx.x; c < 2 * TILE * 8; c += 256) {
            const u32 line = c / 8, chunk = c % 8, column = 64 * kt + 8 * chunk;
            const bool is_x = line < TILE;
            const u32 row = is_x ? t0 + line : n0 + line - TILE;
            const bool exists = column < DIM_K && row < (is_x ? rows : DIM_N);
            copy_async_to(to + panel_offset(line, chunk), (is_x ? part : w) + (exists ? (u64)row * DIM_K + column : 0), exists);
        }
    };

    float sums[X_TILES][W_TILES][4] = {};
#pragma unroll
    for (u32 i = 0; i < STAGES - 1; i++) {
        if (i < X_PARTS * K_TILES) fetch(i);
        copy_commit();
    }
    const u32 x_row = warp % 2 * (TILE / 2) + lane % 16, x_chunk = lane / 16;
    const u32 w_row = warp / 2 * (TILE / 4) + lane / 16 * 8 + lane % 8, w_chunk = lane / 8 % 2;
    for (u32 i = 0; i < X_PARTS * K_TILES; i++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); // the stage has arrived for all threads, and all have read the one that is fetched next
        if (i + STAGES - 1 < X_PARTS * K_TILES) fetch(i + STAGES - 1);
        copy_commit();
        const u8* x_tile = stages + i % STAGES * STAGE_BYTES;
        const u8* w_tile = x_tile + TILE * 128;
#pragma unroll
        for (u32 step = 0; step < 4; step++) {
            u32 a[X_TILES][4], b[W_TILES / 2][4];
#pragma unroll
            for (u32 j = 0; j < X_TILES; j++) load_matrices(a[j], x_tile + panel_offset(x_row + 16 * j, 2 * step + x_chunk));
#pragma unroll
            for (u32 j = 0; j < W_TILES / 2; j++) load_matrices(b[j], w_tile + panel_offset(w_row + 16 * j, 2 * step + w_chunk));
#pragma unroll
            for (u32 m = 0; m < X_TILES; m++)
#pragma unroll
                for (u32 n = 0; n < W_TILES; n++) multiply(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }

#pragma unroll
    for (u32 m = 0; m < X_TILES; m++)
#pragma unroll
        for (u32 n = 0; n < W_TILES; n++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 row = t0 + warp % 2 * (TILE / 2) + 16 * m + lane / 4 + e / 2 * 8;
                const u32 column = n0 + warp / 2 * (TILE / 4) + 8 * n + lane % 4 * 2 + e % 2;
                if (row >= rows || column >= DIM_N) continue;
                const u64 at = (u64)row * DIM_N + column;
                const float sum = ALPHA * sums[m][n][e];
                y[at] = residual ? __fadd_rn(residual[at], sum) : sum;
            }
}

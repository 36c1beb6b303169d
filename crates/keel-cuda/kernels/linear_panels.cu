// y[t, n] = sum_k x[t, k] W[n, k] for many rows of x; for any number with `--compute bf16`, and in prompts with
// `--deterministic`. W is dequantised on its way into the tensor cores. x and W are f16 (see half.cuh), sums f32.
//
// A block has 4 GROUPS warps, each with one row tile of W, by BT rows of x: a panel of x. It has a multiprocessor to
// itself, so that few blocks read x.
// - W is the products' A operand and is made in registers: a lane's slots of a tile are its fragments for four steps of
//   16 columns. The columns of x are permuted in the same way.
// - Tiles of W pass, two at a time, through a ring of each warp, which it fills by cp.async.
// - Tiles of x pass, X_UNIT at a time, through a ring of the block.
//   On Hopper one thread copies 8 to 32 KB at once. Warps wait for a copy at a barrier in shared memory. The last warp
//   that is done with a place in the ring starts the next copy into it, so no warp waits for another. While fragments
//   of a warp are multiplied, it widens the next.
//   Elsewhere all threads copy, and all warps begin a fetch together.
//
// Macros: DIM_N, DIM_K; BITS, GROUP, PAIR_T or BLOCK; BT = HALF_PANEL (32, 64, ... 256; elsewhere up to 128); GROUPS;
//   SPLITS (parts of K, at least 1); X_STAGES and W_STAGES (fetches in the rings: on Hopper at least 3, elsewhere at
//   least 2, and as many of x as of W)
//   linear_panels   codes, pairs, x f16 in panels (see half.cuh), u32 rows, residual (SPLITS=1 only, may be null),
//                   y f32 ([SPLITS][rows][N] if SPLITS > 1: add_parts adds them up).
//                   Grid (ceil(rows / BT), ceil(row tiles / (4 GROUPS)), SPLITS), block 128 GROUPS, dynamic shared
//                   memory PANELS_SHARED. Bytes moved: the weight's for each BT rows of x, x once for each block of
//                   rows of W. Floor on an H100: the larger of the weight's bytes / (3.0 TB/s) and 2 N K rows /
//                   (790 TFLOP/s).
//   to_half_panels  x f32 [rows][K] -> f16 in panels. Arguments x, out, u32 rows.
//                   Grid ceil(rows * K_TILES * 8 / 256), block 256.
//   add_parts       parts [SPLITS][rows][N], residual or null, y, u32 elements (rows N, a multiple of 4).
//                   Grid ceil(elements / 1024), block 256.
#include "widen_half.cuh"

#define X_TILE (BT * 128)
#define X_UNIT (BT > 128 ? 1 : 2) // tiles of x of a fetch
#define X_SLOT (X_UNIT * X_TILE)
#define WARPS (4 * GROUPS)
#define PANELS_SHARED (1024 + X_STAGES * X_SLOT + W_STAGES * WARPS * W_SLOT)

#ifdef BT
// A block's part of the sums.
struct Part {
    Weights w;
    const u8 *panel;   // of x
    int rt;            // a warp's row tile
    int begin, end;    // of K, in fetches
    u8 *x_ring, *w_ring;
};
// Copies the warp's tiles of W of fetch f. The copies belong to the group that is committed next. Row tiles beyond the
// last one fetch the last one; their sums are not stored.
__device__ __forceinline__ void fetch_weights(const Part &part, int f) {
    const int lane = threadIdx.x % 32, n = min(W_UNIT, K_TILES - f * W_UNIT);
    if (f < part.end)
        copy_tiles_async<W_UNIT>(part.w_ring + (f - part.begin) % W_STAGES * W_SLOT, part.w, min(part.rt, N_TILES - 1), f * W_UNIT, n, lane);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Of each slot in the ring of x: a barrier that its copy has arrived, and the number of warps that are done with it.
__shared__ u64 full[X_STAGES];
__shared__ u32 done[X_STAGES];
__device__ __forceinline__ void make_barriers() {
    if (threadIdx.x == 0) init_barriers(full, X_STAGES);
    if (threadIdx.x < X_STAGES) done[threadIdx.x] = 0;
    __syncthreads();
}
// Counts a warp, and says whether it is the last one. Then the count is 0 again.
__device__ __forceinline__ bool is_last(u32 *count) {
    u32 before;
    asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;" : "=r"(before) : "r"(shared_address(count)), "n"(WARPS - 1) : "memory");
    return before == WARPS - 1;
}

// Steps of 16 columns that are multiplied at once, and sets of their fragments: while one is multiplied, the next is
// made. The sums of wide blocks leave registers for fewer; other warps then keep the tensor cores busy.
#define STEPS (GROUPS == 3 && BT > 192 ? 2 : 4)
#define SETS (GROUPS == 3 && BT > 224 ? 1 : 2)

// Adds up the part. The first W_STAGES - 1 fetches of W are under way.
__device__ __forceinline__ void sum_part(float (&acc)[BT / 8][4], const Part &part) {
    const int lane = threadIdx.x % 32, first_tile = W_UNIT * part.begin, tiles_end = min(W_UNIT * part.end, K_TILES);
    auto fetch_x = [&](int kt, int slot) {
        if (kt >= tiles_end) return;
        const u32 bytes = min(X_UNIT, tiles_end - kt) * X_TILE;
        expect_bytes(full + slot, bytes);
        fetch_bytes(part.x_ring + slot * X_SLOT, part.panel + (size_t)kt * X_TILE, bytes, full + slot);
    };
    if (threadIdx.x == 0)
        for (int i = 0; i < X_STAGES; i++) fetch_x(first_tile + i * X_UNIT, i);
    __syncwarp();

    u32 a[SETS][STEPS][4];
    int w_slot = 0, x_slot = 0;
    u32 parity = 0;
    // The products before tile kt, the first of a fetch of x, are done, so the slot of the fetch before is free.
    auto free_slot = [&](int kt) {
        const int before = x_slot ? x_slot - 1 : X_STAGES - 1;
        if (lane == 0 && kt > first_tile && is_last(done + before)) fetch_x(kt + (X_STAGES - 1) * X_UNIT, before);
        __syncwarp();
    };
#pragma unroll 1
    for (int f = part.begin; f < part.end; f++) {
#pragma unroll
        for (int turn = 0; turn < 4 * W_UNIT / STEPS; turn++) {
            const int tile = turn * STEPS / 4, step = turn * STEPS % 4, kt = f * W_UNIT + tile;
            const bool begins_x = step == 0 && tile % X_UNIT == 0, ends_x = step + STEPS == 4 && (tile + 1) % X_UNIT == 0;
            if (K_TILES % W_UNIT != 0 && kt >= K_TILES) break;
            if (turn == 0) {
                copy_wait<W_STAGES - 2>();
                __syncwarp(); // the warp's tiles of W have arrived
            }
            if (SETS == 1) {
                wait_products<0>(); // the fragments may be written again
                if (begins_x) free_slot(kt);
            }
            widen_fragments(a[turn % SETS], part.w_ring + w_slot * W_SLOT, tile, lane, step);
            if (begins_x) wait_full(full + x_slot, parity);
            start_product<BT>(acc, a[turn % SETS], shared_address(part.x_ring) + x_slot * X_SLOT + tile % X_UNIT * X_TILE, step);
            if (turn == 0) {
                fetch_weights(part, f + W_STAGES - 1);
                copy_commit();
            }
            if (SETS == 2) {
                wait_products<1>(); // the fragments of the turn before may be written again
                if (begins_x) free_slot(kt);
            }
            if (ends_x && ++x_slot == X_STAGES) x_slot = 0, parity ^= 1;
        }
        if (++w_slot == W_STAGES) w_slot = 0;
    }
    finish_products(acc);
}
#else
__device__ __forceinline__ void make_barriers() {}

__device__ __forceinline__ void sum_part(float (&acc)[BT / 8][4], const Part &part) {
    const int lane = threadIdx.x % 32, begin = part.begin, end = part.end;
    auto fetch_x = [&](int f) {
        const int bytes = min(W_UNIT, K_TILES - f * W_UNIT) * X_TILE;
        const u32 to = shared_address(part.x_ring) + (f - begin) % W_STAGES * X_SLOT;
#pragma unroll
        for (int at = 16 * threadIdx.x; at < X_SLOT; at += 16 * 32 * WARPS)
            if (f < end && at < bytes) copy_async_to(to + at, part.panel + (size_t)f * X_SLOT + at);
        copy_commit();
    };
    for (int i = 0; i < W_STAGES - 1; i++) fetch_x(begin + i);

    u32 a[4][4];
    int slot = 0;
#pragma unroll 1
    for (int f = begin; f < end; f++) {
        copy_wait<W_STAGES - 2>();
        __syncthreads(); // the fetch has arrived, and all warps are done with the one before
        fetch_weights(part, f + W_STAGES - 1);
        fetch_x(f + W_STAGES - 1);
#pragma unroll
        for (int tile = 0; tile < W_UNIT; tile++) {
            if (K_TILES % W_UNIT != 0 && f * W_UNIT + tile >= K_TILES) break;
            widen_fragments(a, part.w_ring + slot * W_SLOT, tile, lane);
            start_product<BT>(acc, a, shared_address(part.x_ring) + slot * X_SLOT + tile * X_TILE);
        }
        if (++slot == W_STAGES) slot = 0;
    }
}
#endif

// Calls each(j, i, place in y) for a lane's sums acc[from + j][i], j < 4, that exist.
template <typename Each> __device__ __forceinline__ void for_sums(int first, int count, int rt, int lane, Each each, int from) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 8 * (from + j) + 2 * (lane % 4) + i % 2, n = 16 * rt + 8 * (i / 2) + lane / 4;
            if (row < count && n < DIM_N) each(j, i, (size_t)(first + row) * DIM_N + n);
        }
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS, 1) linear_panels(
#include "linear_panels.params"
) {
    extern __shared__ u8 memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rt = blockIdx.y * WARPS + warp, first = blockIdx.x * BT, count = min(BT, (int)rows - first);
    u8 *const x_ring = memory + (1024 - shared_address(memory) % 1024) % 1024;
    let_next_start();

    constexpr int FETCHES = (K_TILES + W_UNIT - 1) / W_UNIT;
    const Part part = {Weights{codes, pairs},
                       (const u8 *)x + (size_t)blockIdx.x * K_TILES * X_TILE,
                       rt,
                       (int)(FETCHES * blockIdx.z / SPLITS),
                       (int)(FETCHES * (blockIdx.z + 1) / SPLITS),
                       x_ring,
                       x_ring + X_STAGES * X_SLOT + W_STAGES * (warp * W_SLOT)};
    for (int i = 0; i < W_STAGES - 1; i++) {
        fetch_weights(part, part.begin + i);
        copy_commit();
    }
    make_barriers();
    wait_for_inputs();
    float acc[BT / 8][4] = {};
    sum_part(acc, part);

    if (rt >= N_TILES) return;
    // Each residual is read before the first of four tiles is stored, since the compiler may not swap them.
#pragma unroll
    for (int from = 0; from < BT / 8; from += 4) {
        float before[4][4] = {};
#if SPLITS == 1
        if (residual)
            for_sums(first, count, rt, lane, [&](int j, int i, size_t at) { before[j][i] = residual[at]; }, from);
        float *const to = y;
#else
        float *const to = y + (size_t)blockIdx.z * rows * DIM_N;
#endif
        for_sums(first, count, rt, lane, [&](int j, int i, size_t at) { to[at] = before[j][i] + acc[from + j][i]; }, from);
    }
}
#endif

// A thread writes one chunk.
extern "C" __global__ void __launch_bounds__(256) to_half_panels(
#include "to_half_panels.params"
) {
    take_turn();
    const u64 item = (u64)blockIdx.x * 256 + threadIdx.x;
    if (item >= (u64)rows * (K_TILES * 8)) return;
    const u32 chunk = item % 8, kt = item / 8 % K_TILES, row = item / (K_TILES * 8), column = 64 * kt + column_of_chunk(chunk);
    const float *from = x + (u64)row * DIM_K + column;
    u32 v[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const bool is_there = DIM_K % 64 == 0 || column + 8 * t < DIM_K; // DIM_K is a multiple of 32
        const float2 f = is_there ? *(const float2 *)(from + 8 * t) : make_float2(0.0f, 0.0f);
        v[t] = two_inputs(f.x, f.y);
    }
    store16((uint4 *)out + chunk_in_panels(row, kt, chunk, K_TILES), v[0], v[1], v[2], v[3]);
}

extern "C" __global__ void __launch_bounds__(256) add_parts(
#include "add_parts.params"
) {
    take_turn();
    const u32 i = blockIdx.x * 256 + threadIdx.x, quads = elements / 4;
    if (i >= quads) return;
    float4 sum = parts[i];
    for (int s = 1; s < SPLITS; s++) {
        float4 p = parts[(size_t)s * quads + i];
        sum.x += p.x, sum.y += p.y, sum.z += p.z, sum.w += p.w;
    }
    if (residual) {
        float4 r = residual[i];
        sum.x += r.x, sum.y += r.y, sum.z += r.z, sum.w += r.w;
    }
    y[i] = sum;
}

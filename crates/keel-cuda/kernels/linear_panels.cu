// y[t, n] = sum_k x[t, k] W[n, k] for 17 rows of x up to thousands. W is dequantised on its way into the tensor
// cores. x and W are f16 (see half.cuh), sums f32.
//
// A block has 4 GROUPS warps, each with one row tile of W, by BT rows of x: a panel of x. It has a multiprocessor to
// itself, so that few blocks read x.
// - W is the products' A operand and is made in registers: a lane's slots of a tile are its fragments for four steps of
//   16 columns. The columns of x are permuted in the same way.
// - Tiles of W pass, two at a time, through a ring of each warp, which it fills by cp.async.
// - Tiles of x pass, two at a time, through a ring of the block.
//   On Hopper one thread copies 8 to 32 KB at once. Warps wait for a copy, and say when they are done with it, at
//   barriers in shared memory. No barrier holds all warps together. While a warp's tile is multiplied, it widens the
//   next.
//   Elsewhere all threads copy, and all warps begin a fetch together.
//
// Macros: DIM_N, DIM_K; BITS, GROUP, PAIR_T or BLOCK; BT = HALF_PANEL (32, 64, 128); GROUPS; SPLITS (parts of K, at
//   least 1); STAGES (fetches in the rings, at least 3 on Hopper and 2 elsewhere)
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
#define X_SLOT (W_UNIT * X_TILE)
#define WARPS (4 * GROUPS)
#define PANELS_SHARED (1024 + STAGES * (X_SLOT + WARPS * W_SLOT))

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
        copy_tiles_async<W_UNIT>(part.w_ring + (f - part.begin) % STAGES * W_SLOT, part.w, min(part.rt, N_TILES - 1), f * W_UNIT, n, lane);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A warp says that it is done with a slot in the ring of x.
__device__ __forceinline__ void arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Barriers of each slot in the ring of x: its copy has arrived; all warps are done with it.
__shared__ u64 full[STAGES], done[STAGES];
__device__ __forceinline__ void make_barriers() {
    if (threadIdx.x == 0) {
        init_barriers(full, STAGES);
        init_barriers(done, STAGES, WARPS);
    }
    __syncthreads();
}

// Adds up the part. The first STAGES - 1 fetches of W are under way.
__device__ __forceinline__ void sum_part(float (&acc)[BT / 8][4], const Part &part) {
    const int lane = threadIdx.x % 32, begin = part.begin, end = part.end;
    auto fetch_x = [&](int f, int slot) {
        if (f >= end) return;
        const u32 bytes = min(W_UNIT, K_TILES - f * W_UNIT) * X_TILE;
        expect_bytes(full + slot, bytes);
        fetch_bytes(part.x_ring + slot * X_SLOT, part.panel + (size_t)f * X_SLOT, bytes, full + slot);
    };
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) fetch_x(begin + i, i);
    __syncwarp();

    u32 even[4][4], odd[4][4];
    int f = begin, slot = 0;
    u32 parity = 0;
    // The first tile of a fetch. Then no warp reads the x of two fetches before, which is replaced.
    auto first_tile = [&] {
        copy_wait<STAGES - 2>();
        __syncwarp(); // the warp's tiles of W have arrived
        widen_fragments(even, part.w_ring + slot * W_SLOT, 0, lane);
        wait_full(full + slot, parity);
        start_product<BT>(acc, even, shared_address(part.x_ring) + slot * X_SLOT);
        fetch_weights(part, f + STAGES - 1);
        copy_commit();
        wait_products<1>(); // the fetch before is done, and `odd` may be written again
        if (lane == 0 && f > begin) arrive(done + (slot ? slot - 1 : STAGES - 1));
        if (threadIdx.x == 0 && f >= begin + 2) {
            const int before = f - 2 - begin, freed = before % STAGES;
            if (f - 2 + STAGES < end) wait_full(done + freed, before / STAGES % 2);
            fetch_x(f - 2 + STAGES, freed);
        }
        __syncwarp();
    };
    const int pairs_end = min(end, K_TILES / W_UNIT);
#pragma unroll 1
    for (; f < pairs_end; f++) {
        first_tile();
        widen_fragments(odd, part.w_ring + slot * W_SLOT, 1, lane);
        start_product<BT>(acc, odd, shared_address(part.x_ring) + slot * X_SLOT + X_TILE);
        wait_products<1>(); // `even` may be written again
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    if (f < end) first_tile();
    finish_products(acc);
}
#else
__device__ __forceinline__ void make_barriers() {}

__device__ __forceinline__ void sum_part(float (&acc)[BT / 8][4], const Part &part) {
    const int lane = threadIdx.x % 32, begin = part.begin, end = part.end;
    auto fetch_x = [&](int f) {
        const int bytes = min(W_UNIT, K_TILES - f * W_UNIT) * X_TILE;
        const u32 to = shared_address(part.x_ring) + (f - begin) % STAGES * X_SLOT;
#pragma unroll
        for (int at = 16 * threadIdx.x; at < X_SLOT; at += 16 * 32 * WARPS)
            if (f < end && at < bytes) copy_async_to(to + at, part.panel + (size_t)f * X_SLOT + at);
        copy_commit();
    };
    for (int i = 0; i < STAGES - 1; i++) fetch_x(begin + i);

    u32 a[4][4];
    int slot = 0;
#pragma unroll 1
    for (int f = begin; f < end; f++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); // the fetch has arrived, and all warps are done with the one before
        fetch_weights(part, f + STAGES - 1);
        fetch_x(f + STAGES - 1);
#pragma unroll
        for (int tile = 0; tile < W_UNIT; tile++) {
            if (K_TILES % W_UNIT != 0 && f * W_UNIT + tile >= K_TILES) break;
            widen_fragments(a, part.w_ring + slot * W_SLOT, tile, lane);
            start_product<BT>(acc, a, shared_address(part.x_ring) + slot * X_SLOT + tile * X_TILE);
        }
        if (++slot == STAGES) slot = 0;
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
                       x_ring + STAGES * (X_SLOT + warp * W_SLOT)};
    for (int i = 0; i < STAGES - 1; i++) {
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

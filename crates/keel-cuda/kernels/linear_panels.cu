// y[t, n] = sum_k x[t, k] W[n, k] for 17 rows of x up to thousands. W is dequantised on its way into Hopper's tensor
// cores (sm_90a). x and W are f16 (see half.cuh), sums f32.
//
// A block has GROUPS warpgroups, each with 64 rows of W (a warp has one row tile) by BT rows of x: a panel of x. It has
// a multiprocessor to itself, so that few blocks read x.
// - W is wgmma's A operand and is made in registers: a lane's slots of a tile are its fragments for four steps of 16
//   columns. The columns of x are permuted in the same way.
// - Tiles of W pass, two at a time, through a ring of each warp, which it fills by cp.async.
// - Tiles of x pass, two at a time, through a ring of the block: one thread copies 8 to 32 KB at once. Warps wait for a
//   copy, and say when they are done with it, at barriers in shared memory. No barrier holds all warps together.
// - While one tile is multiplied, the next is widened.
//
// Macros: DIM_N, DIM_K; BITS, GROUP, PAIR_T or BLOCK; BT = HALF_PANEL (32, 64, 128); GROUPS; SPLITS (parts of K, at
//   least 1); STAGES (fetches in the rings, at least 3)
//   linear_panels   codes, pairs, x f16 in panels (see half.cuh), u32 rows, residual (SPLITS=1 only, may be null),
//                   y f32 ([SPLITS][rows][N] if SPLITS > 1: add_parts adds them up).
//                   Grid (ceil(rows / BT), ceil(row tiles / (4 GROUPS)), SPLITS), block 128 GROUPS, dynamic shared
//                   memory PANELS_SHARED. Bytes moved: the weight's for each BT rows of x, x once for each block of
//                   rows of W. Floor: the larger of the weight's bytes / (3.0 TB/s) and 2 N K rows / (790 TFLOP/s).
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
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A warp says that it is done with a slot in the ring of x.
__device__ __forceinline__ void arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

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
    // Barriers of each slot in the ring of x: its copy has arrived; all warps are done with it.
    __shared__ u64 full[STAGES], done[STAGES];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u8 *const x_ring = memory + (1024 - shared_address(memory) % 1024) % 1024;
    u8 *const w_ring = x_ring + STAGES * (X_SLOT + warp * W_SLOT);
    const int rt = blockIdx.y * WARPS + warp, first = blockIdx.x * BT, count = min(BT, (int)rows - first);
    // This block's part of K, in whole fetches.
    constexpr int FETCHES = (K_TILES + W_UNIT - 1) / W_UNIT;
    const int begin = FETCHES * blockIdx.z / SPLITS, end = FETCHES * (blockIdx.z + 1) / SPLITS;
    let_next_start();

    // Row tiles beyond the last one fetch the last one; their sums are not stored.
    auto fetch_weights = [&](int f) {
        const int n = min(W_UNIT, K_TILES - f * W_UNIT);
        if (f < end)
            copy_tiles_async<W_UNIT>(w_ring + (f - begin) % STAGES * W_SLOT, Weights{codes, pairs}, min(rt, N_TILES - 1), f * W_UNIT, n, lane);
        copy_commit();
    };
    for (int i = 0; i < STAGES - 1; i++) fetch_weights(begin + i);
    if (threadIdx.x == 0) {
        init_barriers(full, STAGES);
        init_barriers(done, STAGES, WARPS);
    }
    __syncthreads();
    wait_for_inputs();

    const u8 *const panel = (const u8 *)x + (size_t)blockIdx.x * K_TILES * X_TILE;
    auto fetch_x = [&](int f, int slot) {
        if (f >= end) return;
        const u32 bytes = min(W_UNIT, K_TILES - f * W_UNIT) * X_TILE;
        expect_bytes(full + slot, bytes);
        fetch_bytes(x_ring + slot * X_SLOT, panel + (size_t)f * X_SLOT, bytes, full + slot);
    };
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) fetch_x(begin + i, i);
    __syncwarp();

    float acc[BT / 8][4] = {};
    u32 even[4][4], odd[4][4];
    int f = begin, slot = 0;
    u32 parity = 0;
    // The first tile of a fetch. Then no warp reads the x of two fetches before, which is replaced.
    auto first_tile = [&] {
        copy_wait<STAGES - 2>();
        __syncwarp(); // the warp's tiles of W have arrived
        widen_fragments(even, w_ring + slot * W_SLOT, 0, lane);
        wait_full(full + slot, parity);
        start_product<BT>(acc, even, shared_address(x_ring) + slot * X_SLOT);
        fetch_weights(f + STAGES - 1);
        wgmma_wait<1>(); // the fetch before is done, and `odd` may be written again
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
        widen_fragments(odd, w_ring + slot * W_SLOT, 1, lane);
        start_product<BT>(acc, odd, shared_address(x_ring) + slot * X_SLOT + X_TILE);
        wgmma_wait<1>(); // `even` may be written again
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    if (f < end) first_tile();
    wgmma_wait<0>();
    settle(acc);

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

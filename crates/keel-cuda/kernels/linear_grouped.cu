// y[t, n] = sum_k x[t, k] W[n, k] with an expert W for each row: rows of a mixture, grouped by expert. W is dequantised
// on its way into the tensor cores. x and W are f16 (see half.cuh), sums f32. One weight: see linear_panels.cu.
//
// A block has eight warps, each with one row tile of W, by BT rows of x.
// - W is the products' A operand and is made in registers: a lane's slots of a tile are its fragments for four steps of
//   16 columns. The columns of x must be permuted in the same way, which `to_half_tiles` does.
// - Tiles of W pass, two at a time, through a ring of each warp in shared memory.
// - Tiles of x [BT][64] f16 are gathered into a ring of the block, swizzled as products read them.
// - cp.async fills both rings: bulk copies of 1 KB for each warp would keep the copy engine busier than the memory.
// - While one tile is multiplied, the next is widened. On Hopper the same warp does both; elsewhere warps overlap.
//
// Macros: DIM_N, DIM_K; BITS, GROUP, PAIR_T or BLOCK; EXPERTS; BT (32, 64, 128); STAGES (fetches in the rings);
//   FANOUT (row r of y is from row r / FANOUT of x)
//   linear_grouped  codes, pairs, x f16 [rows][64 K_TILES] (permuted), row_of u32 [rows of y], tiles (see
//                   group_rows), y f32. Grid (MOST_TILES, ceil(row tiles / 8)), block 256, dynamic shared memory
//                   GROUPED_SHARED. Bytes moved: the weight's for each BT rows of an expert.
//                   Floor: the larger of these / (3.0 TB/s) and 2 N K rows / (700 TFLOP/s).
//   to_half_tiles   x f32 [rows][K] -> f16 [rows][64 K_TILES], permuted. SWIGLU=1: x f32 [rows][2 K],
//                   silu(first half) * second half. Arguments x, out, u32 rows, chosen, choices, share, counts, fault,
//                   kernel. Grid ceil(choices / share) + ceil(rows * K_TILES * 8 / 256), block 256. EXPERTS <= 512. The
//                   first blocks each count the rows of each expert in a share of chosen u32 [choices] into counts u32
//                   [shares][EXPERTS].
//   group_rows      chosen, counts -> row_of u32 [choices]: rows by expert, those of one expert in
//                   their order; tiles u32: [count, 0, 0, 0], then (expert, first, rows, 0) of each.
//                   Every block adds up the counts and places its share.
//                   Arguments chosen, choices, share, counts, row_of, tiles. Grid ceil(choices / share), block 1024.
//                   tiles: 16 (1 + MOST_TILES) bytes, MOST_TILES = min(choices, ceil(choices / BT) + EXPERTS).
//                   Floor: 8 bytes a row and the counts once a block, 1 us; the launch takes longer.
#include "widen_half.cuh"

#ifndef SWIGLU
#define SWIGLU 0
#endif
#define X_TILE (BT * 128)
#define X_SLOT (W_UNIT * X_TILE)
#define GROUPED_SHARED (1024 + STAGES * (X_SLOT + 8 * W_SLOT))

#ifdef BT
template <int N> struct Extent {
    static constexpr int VALUE = N;
};

extern "C" __global__ void __launch_bounds__(256, 2) linear_grouped(
#include "linear_grouped.params"
) {
    extern __shared__ u8 memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u8 *const x_ring = memory + (1024 - shared_address(memory) % 1024) % 1024;
    u8 *const w_ring = x_ring + STAGES * (X_SLOT + warp * W_SLOT);
    const int rt = blockIdx.y * 8 + warp;
    let_next_start();
    wait_for_inputs();
    if (blockIdx.x >= tiles[0].x) return;
    const uint4 part = tiles[1 + blockIdx.x];
    const Weights w = expert_of(Weights{codes, pairs}, part.x);
    const int first = part.y, count = part.z;
    constexpr int FETCHES = (K_TILES + W_UNIT - 1) / W_UNIT;

    // Row tiles beyond the last one fetch the last one; their sums are not stored.
    auto fetch_weights = [&](int f) {
        if (f >= FETCHES) return;
        const int slot = f % STAGES, n = min(W_UNIT, K_TILES - f * W_UNIT);
        copy_tiles_async<W_UNIT>(w_ring + slot * W_SLOT, w, min(rt, N_TILES - 1), f * W_UNIT, n, lane);
    };
    for (int i = 0; i < STAGES - 1; i++) fetch_weights(i);

    // N rows of the tile, of which `count` exist.
    auto multiply_tile = [&](auto extent) {
        constexpr int N = decltype(extent)::VALUE;
        // Each thread copies the same 16 bytes of N / 32 rows of each tile of x. Rows beyond the last repeat it.
        const f16 *from[N / 32];
        const int chunk = threadIdx.x % 8;
#pragma unroll
        for (int i = 0; i < N / 32; i++) {
            int row = first + min(i * 32 + (int)threadIdx.x / 8, count - 1);
            row = row_of[row] / FANOUT;
            from[i] = x + (size_t)row * (64 * K_TILES) + chunk * 8;
        }
        auto fetch_x = [&](int f) {
            if (f < FETCHES) {
#pragma unroll
                for (int tile = 0; tile < W_UNIT; tile++) {
                    if (K_TILES % W_UNIT != 0 && f * W_UNIT + tile >= K_TILES) break;
                    const u32 to = shared_address(x_ring) + f % STAGES * X_SLOT + tile * X_TILE;
#pragma unroll
                    for (int i = 0; i < N / 32; i++) {
                        const int row = i * 32 + threadIdx.x / 8;
                        copy_async_to(to + panel_offset(row, chunk), from[i] + (f * W_UNIT + tile) * 64);
                    }
                }
            }
            copy_commit();
        };
        for (int i = 0; i < STAGES - 1; i++) fetch_x(i);

        float acc[N / 8][4] = {};
        u32 even[4][4], odd[4][4];
        int stage = 0;
#pragma unroll 1
        for (int f = 0; f < FETCHES; f++) {
            const u8 *slot = w_ring + stage * W_SLOT;
            const u32 x_slot = shared_address(x_ring) + stage * X_SLOT;
            copy_wait<STAGES - 2>();
            __syncwarp(); // the warp's tiles of W have arrived
            widen_fragments(even, slot, 0, lane);
            wait_products<0>();
            publish_to_products();
            __syncthreads(); // the tiles of x have arrived, and all warps are done with the tiles before
            fetch_weights(f + STAGES - 1);
            fetch_x(f + STAGES - 1);
            start_product<N>(acc, even, x_slot);
            const bool both = K_TILES % W_UNIT == 0 || f * W_UNIT + 1 < K_TILES;
            if (both) widen_fragments(odd, slot, 1, lane);
            if (both) start_product<N>(acc, odd, x_slot + X_TILE);
            wait_products<1>(); // `even` may be written again
            if (++stage == STAGES) stage = 0;
        }
        finish_products(acc);

        if (rt >= N_TILES) return;
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = 8 * j + 2 * (lane % 4) + e;
                if (row >= count) continue;
                const size_t to = row_of[first + row];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int n = 16 * rt + 8 * h + lane / 4;
                    if (n >= DIM_N) continue;
                    const size_t at = to * DIM_N + n;
                    y[at] = acc[j][e + 2 * h];
                }
            }
    };
#if BT > 32
    // The last tile of an expert is usually short.
    if (count <= BT / 2) return multiply_tile(Extent<BT / 2>());
#endif
    multiply_tile(Extent<BT>());
}
#endif

// silu(a) b
__device__ __forceinline__ float2 gated(float2 a, float2 b) {
    return make_float2(__fdiv_rn(a.x, 1.0f + expf(-a.x)) * b.x, __fdiv_rn(a.y, 1.0f + expf(-a.y)) * b.y);
}
// An expert that does not exist is reported. Its rows go to the last expert and are not used.
__device__ __forceinline__ u32 existing(u32 expert) { return min(expert, (u32)EXPERTS - 1); }

// Counts the rows of a block's share by expert.
__device__ void count_share(const u32 *chosen, u32 R, u32 share, u32 *counts, Fault *fault, u32 kernel) {
    __shared__ u32 n[EXPERTS];
    for (u32 e = threadIdx.x; e < EXPERTS; e += 256) n[e] = 0;
    __syncthreads();
    const u32 begin = blockIdx.x * share, end = min(begin + share, R);
#pragma unroll 4
    for (u32 row = begin + threadIdx.x; row < end; row += 256) {
        const u32 e = chosen[row];
        if (e >= EXPERTS) report(fault, kernel, 1, e, EXPERTS);
        atomicAdd(&n[existing(e)], 1u);
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < EXPERTS; e += 256) counts[blockIdx.x * EXPERTS + e] = n[e];
}
// A thread writes one chunk.
extern "C" __global__ void __launch_bounds__(256) to_half_tiles(
#include "to_half_tiles.params"
) {
    take_turn();
    u32 block = blockIdx.x;
    const u32 shares = (choices + share - 1) / share;
    if (block < shares) return count_share(chosen, choices, share, counts, fault, kernel);
    block -= shares;
    const size_t item = (size_t)block * 256 + threadIdx.x;
    if (item >= (size_t)rows * (K_TILES * 8)) return;
    const u32 eight = item % 8, kt = item / 8 % K_TILES;
    const float *row = x + item / (K_TILES * 8) * (DIM_K * (SWIGLU ? 2 : 1));
    const u32 column = 64 * kt + column_of_chunk(eight);
    u32 v[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
        float2 f = make_float2(0, 0);
        if (DIM_K % 64 == 0 || column + 8 * t < DIM_K) { // DIM_K is a multiple of 32
            f = *(const float2 *)(row + column + 8 * t);
            if (SWIGLU) f = gated(f, *(const float2 *)(row + DIM_K + column + 8 * t));
        }
        v[t] = two_inputs(f.x, f.y);
    }
    store16((uint4 *)out + item, v[0], v[1], v[2], v[3]);
}

#define PARTS_OF_SHARES 4
extern "C" __global__ void __launch_bounds__(1024) group_rows(
#include "group_rows.params"
) {
    __shared__ u32 next[EXPERTS]; // where the next row of an expert goes
    // The sums over the shares come first, in the memory of `at`. Separate arrays would take 48 KB for 480 experts, all
    // the static shared memory.
    // A warp's rows of each expert; later the number of the round's rows before them.
    __shared__ __align__(16) u16 at[32][EXPERTS];
    u32(*const of_all)[EXPERTS] = (u32(*)[EXPERTS])at;
    u32(*const of_those_before)[EXPERTS] = of_all + PARTS_OF_SHARES;
    static_assert(2 * PARTS_OF_SHARES * 4 <= 32 * 2, "the sums fit into the place of `at`");
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, shares = (choices + share - 1) / share;
    take_turn();
    for (u32 i = threadIdx.x; i < PARTS_OF_SHARES * EXPERTS; i += 1024) {
        const u32 part = i / EXPERTS, e = i % EXPERTS;
        u32 all = 0, before = 0;
#pragma unroll 8
        for (u32 s = part; s < shares; s += PARTS_OF_SHARES) {
            const u32 n = counts[s * EXPERTS + e];
            all += n;
            if (s < blockIdx.x) before += n;
        }
        of_all[part][e] = all, of_those_before[part][e] = before;
    }
    __syncthreads();
    // One warp finds where each expert's rows begin, and lists its tiles.
    if (warp == 0) {
        auto sum = [](const u32(*x)[EXPERTS], u32 e) {
            u32 sum = 0;
            for (int part = 0; part < PARTS_OF_SHARES; part++) sum += x[part][e];
            return sum;
        };
        u32 rows_before = 0, tiles_before = 0;
        for (u32 first = 0; first < EXPERTS; first += 32) {
            const u32 e = first + lane, n = e < EXPERTS ? sum(of_all, e) : 0, t = (n + BT - 1) / BT;
            u32 rows = n, cells = t;
            for (int d = 1; d < 32; d *= 2) {
                const u32 r = __shfl_up_sync(~0u, rows, d), c = __shfl_up_sync(~0u, cells, d);
                if (lane >= d) rows += r, cells += c;
            }
            const u32 begins = rows_before + rows - n;
            if (e < EXPERTS) {
                next[e] = begins + sum(of_those_before, e);
                if (blockIdx.x == 0)
                    for (u32 i = 0; i < t; i++) tiles[1 + tiles_before + cells - t + i] = make_uint4(e, begins + i * BT, min(n - i * BT, (u32)BT), 0);
            }
            rows_before += __shfl_sync(~0u, rows, 31);
            tiles_before += __shfl_sync(~0u, cells, 31);
        }
        if (blockIdx.x == 0 && lane == 0) tiles[0] = make_uint4(tiles_before, 0, 0, 0);
    }
    __syncthreads(); // the sums have been read
    const u32 begin = blockIdx.x * share, end = min(begin + share, choices);
    for (u32 round = begin; round < end; round += 1024) {
        const u32 row = round + threadIdx.x;
        const bool is_there = row < end;
        const u32 e = is_there ? existing(chosen[row]) : EXPERTS;
        for (u32 i = lane; i < EXPERTS; i += 32) at[warp][i] = 0;
        __syncwarp();
        const u32 same = __match_any_sync(~0u, e), rank = __popc(same & ((1u << lane) - 1));
        if (is_there && rank == 0) at[warp][e] = __popc(same);
        __syncthreads(); // also before `next` of this round is read
        u32 in_round = 0;
        if (threadIdx.x < EXPERTS)
            for (int w = 0; w < 32; w++) {
                const u32 n = at[w][threadIdx.x];
                at[w][threadIdx.x] = in_round;
                in_round += n;
            }
        __syncthreads();
        if (is_there) row_of[next[e] + at[warp][e] + rank] = row;
        __syncthreads();
        if (threadIdx.x < EXPERTS) next[threadIdx.x] += in_round;
    }
}

// y[t, n] = sum_k x[t, k] W[n, k] (+ residual[t, n]) for 1 to 16 rows of x: the products of decoding.
//
// Affine weights and block codings: each 64 columns of a row of x (32 if the weight's groups have fewer than 64) become
// p = round(x / c), c = max |x| / 127, and y = sum over the weight's groups of  c scale (sum q p) + bias (c sum p).
// - Sums are exact integers from mma.m16n8k32 (rows of W are its M, rows of x its N), then f32 in an order that
//   follows from SPLIT and UNIT. So the bits of a row of y depend neither on T nor on the other rows.
// - With a single row, the other seven columns of the tensor cores take other groups of the same row. The sums of a
//   unit are then in four lanes, each of which scales one slot.
// Dense bf16 weights (DENSE=1): x is split into bf16 parts hi + lo, both multiplied on the tensor cores, sums in f32.
//
// A block has SPLIT x ROW_WARPS warps. Warp (s, r) takes row tile r of the block. Of its columns it takes the units
// s, s + SPLIT, ... of UNIT tiles. Each unit is loaded while the one before is multiplied. The SPLIT partial sums are
// added in shared memory in the order of s. With PASSES > 1 a block continues with the row tiles one grid further.
//
// Macros: DIM_N = N, DIM_K = K, DIM_T = T; BITS, GROUP, PAIR_T or BLOCK or DENSE=1;
// SPLIT, UNIT: they order the sums, and follow from the weight's shape and the absorbed kernels, never from T;
// ROW_WARPS, PASSES, STAGES, MIN_BLOCKS, BULK: they change only the time.
//   FUSED=1    each block quantises x in shared memory: a single row of at most 32,768 columns, or rows with chosen
//              experts (`is_fused` of dispatch/linear/few_rows.rs). 0: `prepare_rows` has done it
//   NORM=1     x is first multiplied by norm[k] / sqrt(mean x^2 + EPS)
//   GATE=1     x is first multiplied by sigmoid(gate). GATE=2: x is normed by heads of HEAD_DIM as with NORM, then
//              multiplied by silu(gate). gate [T, heads, HEAD_DIM], GATE_ROW values from row to row, GATE_HEAD from
//              head to head
//   FACTORS_EARLY=1  no kernel that may still run writes norm or gate, so they are fetched while earlier kernels finish
//   SWIGLU=1   W is [gate; up], N = 2 F, F a multiple of 16; y[t, f] = silu(gate) up, [T, F]
//   CONV=W     T = 1: columns CONV_FROM to CONV_FROM + CONV_C of y also pass through causal_conv.cu's convolution of
//              width W, as one row of one sequence without a log, to conv_y [CONV_C]. y is the same as without CONV
//   LATE=1     the next kernel starts once all before this one have ended
//   GATHER=J'  grid.y = rows of y, at most 65,535 a launch; row r is x[r / J'] W[experts[r]]^T; T = 1
// Grid: ceil(row tiles / (ROW_WARPS * PASSES)), row tiles = ceil(N / 16) or F / 16. Block: 32 * SPLIT * ROW_WARPS.
// Shared memory: see SHARED_BYTES of few_rows.cuh. Bytes moved: the weight's, once. Floor: these / (3.0 TB/s).
#include "few_rows.cuh"

// Prepares rows of x for FUSED=0: x [T, K] (with NORM=1 or GATE=2, norm; with GATE, gate) -> X_BYTES + X_SCALE_BYTES.
// Grid T, block PREPARE_THREADS.
#define PREPARE_THREADS (K_TILES >= 256 ? 1024 : (K_TILES * 4 + 31) / 32 * 32)
#define PREPARE_ITEMS ((K_TILES * 4 + PREPARE_THREADS - 1) / PREPARE_THREADS)
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare_rows(
#include "prepare_rows.params"
) {
    const int t = threadIdx.x % 4, row = blockIdx.x;
    take_turn();
    float v[PREPARE_ITEMS][16];
    // Quads beyond the end repeat the last tile, because all lanes take part in the shuffles.
#define ITEM(i) within((int)threadIdx.x / 4 + (i) * (PREPARE_THREADS / 4), K_TILES)
#pragma unroll
    for (int i = 0; i < PREPARE_ITEMS; i++) load_slots(v[i], x + (size_t)row * DIM_K, ITEM(i), t);
#if NORM
    __shared__ float sums[K_TILES];
    float w[PREPARE_ITEMS][16];
#pragma unroll
    for (int i = 0; i < PREPARE_ITEMS; i++) load_slots(w[i], norm, ITEM(i), t);
#pragma unroll
    for (int i = 0; i < PREPARE_ITEMS; i++) {
        float sum = tile_square_sum(v[i]);
        if (t == 0) sums[ITEM(i)] = sum;
    }
    __syncthreads();
    float by = row_norm(sums);
#pragma unroll
    for (int i = 0; i < PREPARE_ITEMS; i++) scale_slots(v[i], by, w[i]);
#elif GATE
    Gate g[PREPARE_ITEMS];
#pragma unroll
    for (int i = 0; i < PREPARE_ITEMS; i++) load_gate(g[i], HEAD_NORM, gate, row, ITEM(i), t);
#pragma unroll
    for (int i = 0; i < PREPARE_ITEMS; i++) gate_slots(v[i], g[i]);
#endif
#pragma unroll
    for (int i = 0; i < PREPARE_ITEMS; i++) prepare_tile(v[i], prepared, (float2 *)(prepared + X_BYTES), ITEM(i), row, t);
#undef ITEM
}

#if FUSED
// ---- x, prepared by each block ----

// Up to HELD tiles of x stay in registers between the norm and the rounding.
#define ITEMS ((DIM_T * K_TILES + 8 * WARPS - 1) / (8 * WARPS))
#define HELD (ITEMS < 3 ? ITEMS : 1)
#define ITEM(i) within(warp * 8 + lane / 4 + (i) * WARPS * 8, DIM_T * K_TILES)
#define BUSY(i) (DIM_T * K_TILES % (8 * WARPS) == 0 || warp * 8 + (i) * WARPS * 8 < DIM_T * K_TILES)

// Factors of x are loaded together with x. Loads after the barrier would cost a second wait.
struct Factors {
#if NORM
    const float *norm;
    float scales[HELD][16];
#elif GATE
    const float *norm, *gate;
    Gate gates[HELD];
#endif
};
__device__ __forceinline__ void load_factors_of(Factors &f, int i, int warp, int lane) {
#if NORM
    load_slots(f.scales[i % HELD], f.norm, ITEM(i) % K_TILES, lane % 4);
#elif GATE
    load_gate(f.gates[i % HELD], f.norm, f.gate, ITEM(i) / K_TILES, ITEM(i) % K_TILES, lane % 4);
#endif
}
__device__ __forceinline__ void load_factors(Factors &f, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (HELD == ITEMS && BUSY(i)) load_factors_of(f, i, warp, lane);
}
// Rounds the rows `from` to `x` and `x_scale`. `sums` has room for DIM_T (K_TILES + 1) floats where NORM=1.
__device__ __forceinline__ void prepare_x(Factors &f, const float *from, u8 *x, float2 *x_scale, float *sums, int warp, int lane) {
    float v[HELD][16];
#define LOAD(i) load_slots(v[(i) % HELD], from + (size_t)(ITEM(i) / K_TILES) * DIM_K, ITEM(i) % K_TILES, lane % 4)
    if (HELD == ITEMS) {
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (BUSY(i)) LOAD(i);
    }
    if (!FACTORS_EARLY) load_factors(f, warp, lane);
#if NORM
    float *norms = sums + DIM_T * K_TILES;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (!BUSY(i)) continue;
        if (HELD != ITEMS) LOAD(i);
        float sum = tile_square_sum(v[i % HELD]);
        if (lane % 4 == 0) sums[ITEM(i)] = sum;
    }
    __syncthreads();
    if (DIM_T > 1) {
        for (int row = warp; row < DIM_T; row += WARPS) {
            float by = row_norm(sums + row * K_TILES);
            if (lane == 0) norms[row] = by;
        }
        __syncthreads();
    }
    const float only = DIM_T == 1 && BUSY(0) ? row_norm(sums) : 0;
#endif
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        if (!BUSY(i)) continue;
        if (HELD != ITEMS) LOAD(i), load_factors_of(f, i, warp, lane);
        int row = ITEM(i) / K_TILES, kt = ITEM(i) % K_TILES;
#if NORM
        scale_slots(v[i % HELD], DIM_T == 1 ? only : norms[row], f.scales[i % HELD]);
#elif GATE
        gate_slots(v[i % HELD], f.gates[i % HELD]);
#endif
        prepare_tile(v[i % HELD], x, x_scale, kt, row, lane % 4);
    }
    __syncthreads();
}
#endif

#if BULK
// A warp's ring, and the next unit to fetch.
struct Ring {
    u8 *slots;
    u64 *full;
    int tile, unit, pass;
};
__device__ __forceinline__ void fetch_next(Ring &r, int slot, const Weights &w, int split, int lane) {
    if (r.pass >= PASSES || r.tile >= OUT_TILES) return;
    if (lane == 0) fetch_unit_of(r.slots + slot * SLOT_BYTES, r.full + slot, w, r.tile, r.unit);
    r.unit += SPLIT;
    if (r.unit >= UNITS) r.unit = split, r.tile += gridDim.x * ROW_WARPS, r.pass++;
}
#endif

// ---- sums of a block: [ROW_WARPS][DIM_T][16], THREADS at a time ----

#define SUMS (ROW_WARPS * DIM_T * 16)
#define SUM_ROW(i) ((i) / 16 % DIM_T)
#define SUM_COLUMN(i) ((tile - row_warp + (i) / 16 / DIM_T) * 16 + (i) % 16)

// A lane's sums to partial sums [row warp][half][row of x][split][17].
__device__ __forceinline__ void store_partials(float *partial, const Sums &acc, int row_warp, int split, int lane) {
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int j = 0; j < N8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (DIM_T == 1 && (e & 1)) continue;
                const float sum = sum_of(acc, h, j, e);
                int row = 8 * j + 2 * (lane % 4) + (e & 1), n = lane / 4 + 8 * (e / 2);
                if (row < DIM_T) partial[(((row_warp * HALVES + h) * DIM_T + row) * SPLIT + split) * 17 + n] = sum;
            }
}

#if CONV
static_assert(DIM_T == 1 && SUMS <= THREADS && !SWIGLU && !GATHER, "a thread for each column");
// The convolution of a thread's column.
struct Taps {
    int channel;
    bool active;
    float *window;
    float taps[CONV], recent[CONV];
};
__device__ __forceinline__ Taps load_taps(int column, const float *weight, float *window, const u32 *row_start, const u32 *slot) {
    Taps c;
    c.channel = column - CONV_FROM;
    // A sequence without rows keeps its window.
    c.active = threadIdx.x < SUMS && c.channel >= 0 && c.channel < CONV_C && row_start[1] == 1;
    c.window = window + (c.active ? (size_t)slot[0] * (CONV - 1) * CONV_C + c.channel : 0);
#pragma unroll
    for (int k = 0; k < CONV; k++) {
        c.taps[k] = c.active ? weight[k * CONV_C + c.channel] : 0.0f;
        c.recent[k] = c.active && k < CONV - 1 ? c.window[k * CONV_C] : 0.0f;
    }
    return c;
}
__device__ __forceinline__ void convolve(Taps &c, float x, float *y) {
    c.recent[CONV - 1] = x;
    float through = 0.0f;
#pragma unroll
    for (int k = 0; k < CONV; k++) through = fmaf(c.taps[k], c.recent[k], through);
#pragma unroll
    for (int k = 1; k < CONV; k++) c.window[(k - 1) * CONV_C] = c.recent[k];
    y[c.channel] = silu(through);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) linear_rows(
#include "linear_rows.params"
) {
    extern __shared__ uint4 shared[];
    // The shuffle tells the compiler that `warp` is the same in all lanes, so addresses of fetches stay in uniform
    // registers.
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    const int split = warp % SPLIT, row_warp = warp / SPLIT;
    if (!LATE) let_next_start();
    int tile = blockIdx.x * ROW_WARPS + row_warp;
    size_t expert = 0;
#if FUSED
    Factors factors;
#if NORM || GATE == 2
    factors.norm = norm;
#endif
#if GATE
    factors.gate = gate;
#endif
    if (FACTORS_EARLY) load_factors(factors, warp, lane);
#endif
#if GATHER
    wait_for_inputs(); // the experts are the router's result
    expert = experts[blockIdx.y];
    if (expert >= stack) {
        if (blockIdx.x == 0 && threadIdx.x == 0) report(fault, kernel, 1, (u32)expert, stack);
        return;
    }
    x_or_prepared += (size_t)(blockIdx.y / GATHER) * DIM_K;
    y += (size_t)blockIdx.y * OUT;
    residual = nullptr;
#endif
    const Weights w = expert_of(WEIGHT, expert);
#if BULK
    u8 *const free_memory = (u8 *)shared + RING_BYTES;
    u64 *const barriers = (u64 *)((u8 *)shared + WARPS * STAGES * SLOT_BYTES);
    // The first STAGES fetches start before x exists: weights do not depend on it.
    Ring ring = {(u8 *)shared + warp * (STAGES * SLOT_BYTES), barriers + warp * STAGES, tile, split, split < UNITS ? 0 : PASSES};
    int stage = 0;
    u32 parity = 0;
    if (lane == 0) init_barriers(ring.full, STAGES);
    __syncwarp();
    for (int i = 0; i < STAGES; i++) fetch_next(ring, i, w, split, lane);
#else
    u8 *const free_memory = (u8 *)shared;
    Unit next;
    if (tile < OUT_TILES && split < UNITS) load_unit(next, w, tile, split, lane);
#endif
#if !GATHER
    wait_for_inputs();
#endif
    if (LATE) let_next_start();

#if FUSED
    u8 *x = free_memory;
    float2 *x_scale = (float2 *)(x + X_BYTES);
    float *partials = (float *)(x + X_BYTES + X_SCALE_BYTES);
    prepare_x(factors, x_or_prepared, x, x_scale, partials + PARTIAL_FLOATS * (PASSES > 1 ? 2 : 1), warp, lane);
#else
    const u8 *x = (const u8 *)x_or_prepared;
    const float2 *x_scale = (const float2 *)(x + X_BYTES);
    float *partials = (float *)free_memory;
#endif

    for (int pass = 0; pass < PASSES; pass++) {
        const int following = tile + gridDim.x * ROW_WARPS;
        Sums acc = {};
        // The residual is loaded while the sums are computed.
        float kept[(SUMS + THREADS - 1) / THREADS];
#pragma unroll
        for (int j = 0; j * THREADS < SUMS; j++) {
            const int i = threadIdx.x + j * THREADS;
            const bool there = !SWIGLU && residual && i < SUMS && SUM_COLUMN(i) < OUT;
            kept[j] = there ? residual[(size_t)SUM_ROW(i) * OUT + SUM_COLUMN(i)] : 0.0f;
        }
#if CONV
        Taps taps = load_taps(SUM_COLUMN((int)threadIdx.x), conv_weight, window, row_start, slot);
#endif
#if BULK
        for (int unit = split; unit < UNITS && tile < OUT_TILES; unit += SPLIT) {
            wait_full(ring.full + stage, parity);
            Unit now;
            unit_of_slot(now, ring.slots + stage * SLOT_BYTES, unit, lane);
            multiply_unit(acc, now, x, x_scale, unit, lane);
            __syncwarp(); // all lanes have read the slot
            fetch_next(ring, stage, w, split, lane);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
#else
#pragma unroll 2
        for (int unit = split; unit < UNITS && tile < OUT_TILES; unit += SPLIT) {
            Unit now = next;
            if (unit + SPLIT < UNITS) {
                load_unit(next, w, tile, unit + SPLIT, lane);
            } else if (PASSES > 1 && pass + 1 < PASSES && following < OUT_TILES) {
                load_unit(next, w, following, split, lane);
            }
            multiply_unit(acc, now, x, x_scale, unit, lane);
        }
#endif
        float *partial = partials + (PASSES > 1 ? pass % 2 : 0) * PARTIAL_FLOATS;
        store_partials(partial, acc, row_warp, split, lane);
        __syncthreads();
#pragma unroll
        for (int j = 0; j * THREADS < SUMS; j++) {
            const int i = threadIdx.x + j * THREADS, row = SUM_ROW(i), column = SUM_COLUMN(i);
            if (i >= SUMS || column >= OUT) continue;
            float sum[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const float *from = partial + ((i / 16 / DIM_T * HALVES + h) * DIM_T + row) * SPLIT * 17 + i % 16;
                sum[h] = from[0];
#pragma unroll
                for (int s = 1; s < SPLIT; s++) sum[h] = __fadd_rn(sum[h], from[s * 17]);
            }
            const size_t at = (size_t)row * OUT + column;
#if SWIGLU
            y[at] = __fdividef(sum[0], 1.0f + __expf(-sum[0])) * sum[1];
#else
            y[at] = residual ? __fadd_rn(kept[j], sum[0]) : sum[0];
#endif
#if CONV
            if (taps.active) convolve(taps, sum[0], conv_y);
#endif
        }
        tile = following;
    }
}

// The experts of a mixture for few tokens, in two launches: products of single rows as in linear_few_rows.cu, with
// quantised weights.
//
//   chosen_gate_up   (SWIGLU=1, N = 2 F) finds a token's experts (see routing.cuh), then
//                    inner[t, j] = silu(gate) up of x[t] for choice j. Each block finds the experts itself, which takes
//                    less time than a launch. With ALWAYS=1 the shared expert is one more. The sums have the order of
//                    linear_rows with the same SPLIT and UNIT. Grid (F / 16, T (CHOICES + ALWAYS)), block 32 SPLIT.
//   chosen_down      (SWIGLU=0)
//                    y[t] = residual[t] + sum_j p[t, j] W[e[t, j]] inner[t, j] + sigmoid(gate[t]) shared[t].
//                    The residual may be null.
//                    A block computes all summands of 16 columns of a token. With ALWAYS=1 shared[t] is also a product
//                    of this launch; with ADDED=1 it is in memory. Warp w takes the units w, w + SPLIT, ... of all
//                    products, one after the other. Grid (ceil(N / 16), T), block 32 SPLIT.
//
// Macros in addition to those of linear_few_rows.cu: EXPERTS, CHOICES, NORMALISE, ALWAYS, ADDED; LOGITS_ROW and
// SHARE_ROW, the elements from one token's logits, or gate, to the next token's.
//   EARLY=1    chosen_gate_up: x is settled (see Call::is_settled), so it is normed and rounded before the wait.
//              chosen_down: logits are settled, so experts are found and their weights fetched while inner is computed.
#define DIM_T 1
// This source has its own entries, so it does not use the other variants of the parts.
#define DENSE 0
#define BULK 0
#define ROW_WARPS 1
#include "few_rows.cuh"
#include "routing.cuh"

#define PRODUCTS (CHOICES + ALWAYS) // of a token
#define PREPARED_BYTES ((X_BYTES + X_SCALE_BYTES + 15) / 16 * 16)

#if SWIGLU
#define TURNS ((UNITS + SPLIT - 1) / SPLIT) // units of a warp
#define HELD_UNITS (TURNS < 2 ? TURNS : 2)

// Prepares x [K] for the products; with NORM it is normed first.
__device__ __forceinline__ void prepare_x(const float *x, const float *norm, u8 *to, float2 *x_scale, float *sums, int warp, int lane) {
    const int turns = (K_TILES + 8 * WARPS - 1) / (8 * WARPS);
    float v[16], w[16];
    // A quad beyond the end writes the last tile again, with the same values.
    auto tile_of = [&](int i) { return min(i * 8 * WARPS + warp * 8 + lane / 4, K_TILES - 1); };
    auto is_busy = [&](int i) { return i * 8 * WARPS + warp * 8 < K_TILES; };
    auto load = [&](int i) {
        load_slots(v, x, tile_of(i), lane % 4);
        if (NORM) load_slots(w, norm, tile_of(i), lane % 4);
    };
    if (NORM || turns == 1) {
        for (int i = 0; i < turns; i++) {
            if (!is_busy(i)) break;
            load(i);
            if (!NORM) break;
            const float sum = tile_square_sum(v);
            if (lane % 4 == 0) sums[tile_of(i)] = sum;
        }
    }
    if (NORM) __syncthreads();
    const float by = NORM ? row_norm(sums) : 1.0f;
    for (int i = 0; i < turns; i++) {
        if (!is_busy(i)) break;
        if (turns > 1) load(i);
        if (NORM) scale_slots(v, by, w);
        prepare_tile(v, to, x_scale, tile_of(i), 0, lane % 4);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) chosen_gate_up(
#include "chosen_gate_up.params"
) {
    __shared__ __align__(16) u8 prepared[PREPARED_BYTES];
    __shared__ float sums[K_TILES], partials[HALVES * SPLIT * 17];
    __shared__ u32 found;
    float2 *const x_scale = (float2 *)(prepared + X_BYTES);
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), tile = blockIdx.x;
    const u32 token = blockIdx.y / PRODUCTS, j = blockIdx.y % PRODUCTS;
    const bool is_always = ALWAYS && j == CHOICES;
#if !NORM
    const float *norm = nullptr;
#endif
    if (!EARLY) wait_for_inputs();
    prepare_x(x + (size_t)token * DIM_K, norm, prepared, x_scale, sums, warp, lane);
    if (EARLY) wait_for_inputs();

    logits += (size_t)token * LOGITS_ROW;
    Choice choice;
    Weights w = {codes, pairs};
#if ALWAYS
    if (is_always) w = {always_codes, always_pairs};
#endif
    // One block of a token writes its experts: block 0 of the last product. If that is the shared expert, its weights
    // need no choice.
    const bool tells = blockIdx.x == 0 && j == PRODUCTS - 1;
    if (!is_always) {
        // One warp does it: several would slow each other down.
        if (warp == 0) {
            choice = choose_experts(logits, j + 1);
            if (lane == j) found = choice.expert;
        }
        __syncthreads();
        w = expert_of(w, found);
    }
    Unit held[HELD_UNITS];
#pragma unroll
    for (int i = 0; i < HELD_UNITS; i++)
        if (warp + i * SPLIT < UNITS) load_unit(held[i], w, tile, warp + i * SPLIT, lane);
    let_next_start(); // after these loads: early fetches of the next kernel would delay them
    if (tells && warp == 0) {
        if (is_always) choice = choose_experts(logits, CHOICES);
        const float probability = probability_of(choice);
        if (lane < CHOICES) {
            probabilities[token * CHOICES + lane] = probability;
            chosen[token * CHOICES + lane] = choice.expert;
        }
    }

    Sums acc = {};
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int unit = warp + i * SPLIT, later = unit + HELD_UNITS * SPLIT;
        if (unit >= UNITS) break;
        multiply_unit(acc, held[i % HELD_UNITS], prepared, x_scale, unit, lane);
        if (i + HELD_UNITS < TURNS && later < UNITS) load_unit(held[i % HELD_UNITS], w, tile, later, lane);
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const float sum = sum_of(acc, h, 0, e);
            if (lane % 4 == 0) partials[(h * SPLIT + warp) * 17 + lane / 4 + 4 * e] = sum;
        }
    __syncthreads();
    if (threadIdx.x >= 16) return;
    float sum[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        const float *from = partials + h * SPLIT * 17 + threadIdx.x;
        sum[h] = from[0];
#pragma unroll
        for (int s = 1; s < SPLIT; s++) sum[h] = __fadd_rn(sum[h], from[s * 17]);
    }
    float *to = y + (size_t)(token * CHOICES + j) * OUT;
#if ALWAYS
    if (is_always) to = always_y + (size_t)token * OUT;
#endif
    to[16 * tile + threadIdx.x] = __fdividef(sum[0], 1.0f + __expf(-sum[0])) * sum[1];
}

#else
#define ALL_UNITS (PRODUCTS * UNITS)
#define TURNS ((ALL_UNITS + SPLIT - 1) / SPLIT)
#define HELD_UNITS (TURNS < 3 ? TURNS : 3)

extern "C" __global__ void __launch_bounds__(THREADS) chosen_down(
#include "chosen_down.params"
) {
    __shared__ __align__(16) u8 prepared[PRODUCTS][PREPARED_BYTES];
    __shared__ float partials[ALL_UNITS][17], shares[CHOICES];
    __shared__ u32 experts[CHOICES];
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), tile = blockIdx.x;
    const size_t token = blockIdx.y;
#if EARLY
    if (warp == 0) {
        const Choice choice = choose_experts(logits + token * LOGITS_ROW, CHOICES);
        const float probability = probability_of(choice);
        if (lane < CHOICES) experts[lane] = choice.expert, shares[lane] = probability;
    }
#else
    wait_for_inputs();
    if (threadIdx.x < CHOICES) {
        u32 expert = chosen[token * CHOICES + threadIdx.x];
        if (expert >= EXPERTS) {
            report(fault, kernel, 1, expert, EXPERTS);
            expert = 0;
        }
        experts[threadIdx.x] = expert, shares[threadIdx.x] = probabilities[token * CHOICES + threadIdx.x];
    }
#endif
    __syncthreads();
    Unit held[HELD_UNITS];
    auto load = [&](int i) {
        const int unit = warp + i * SPLIT, j = unit / UNITS;
        if (unit >= ALL_UNITS) return;
        Weights w = {codes, pairs};
#if ALWAYS
        if (j == CHOICES) w = {always_codes, always_pairs};
#endif
        if (!ALWAYS || j < CHOICES) w = expert_of(w, experts[j]);
        load_unit(held[i % HELD_UNITS], w, tile, unit % UNITS, lane);
    };
#pragma unroll
    for (int i = 0; i < HELD_UNITS; i++) load(i);
#if EARLY
    wait_for_inputs();
#endif
    let_next_start(); // after the wait: early fetches of the next kernel would delay these weights
    // The residual and the gate are loaded while the sums are computed.
    const int n = 16 * tile + threadIdx.x;
    const bool sums_up = threadIdx.x < 16 && n < DIM_N;
    const float kept = sums_up && residual ? residual[token * DIM_N + n] : 0.0f;
#if ALWAYS || ADDED
    const float always_share = sums_up ? sigmoid(gate[token * SHARE_ROW]) : 0.0f;
#endif
#if ADDED
    const float added = sums_up ? always[token * DIM_N + n] : 0.0f;
#endif
    // Each warp rounds the inputs that it multiplies.
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int unit = warp + i * SPLIT, j = unit / UNITS, own = unit % UNITS;
        if (unit >= ALL_UNITS) break;
        const float *x = inner + (token * CHOICES + j) * DIM_K;
#if ALWAYS
        if (j == CHOICES) x = always + token * DIM_K;
#endif
        const int kt = own * UNIT + min(lane / 4, tiles_of(own) - 1);
        float v[16];
        load_slots(v, x, kt, lane % 4);
        prepare_tile(v, prepared[j], (float2 *)(prepared[j] + X_BYTES), kt, 0, lane % 4);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int unit = warp + i * SPLIT, j = unit / UNITS;
        if (unit >= ALL_UNITS) break;
        Sums acc = {};
        multiply_unit(acc, held[i % HELD_UNITS], prepared[j], (const float2 *)(prepared[j] + X_BYTES), unit % UNITS, lane);
        if (i + HELD_UNITS < TURNS) load(i + HELD_UNITS);
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const float sum = sum_of(acc, 0, 0, e);
            if (lane % 4 == 0) partials[unit][lane / 4 + 4 * e] = sum;
        }
    }
    __syncthreads();
    if (!sums_up) return;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < PRODUCTS; j++) {
        float product = partials[j * UNITS][threadIdx.x];
#pragma unroll
        for (int u = 1; u < UNITS; u++) product = __fadd_rn(product, partials[j * UNITS + u][threadIdx.x]);
#if ALWAYS
        if (j == CHOICES) {
            sum = __fmaf_rn(always_share, product, sum);
            continue;
        }
#endif
        sum = __fmaf_rn(shares[j], product, sum);
    }
#if ADDED
    sum = __fmaf_rn(always_share, added, sum);
#endif
    y[token * DIM_N + n] = residual ? __fadd_rn(sum, kept) : sum;
}
#endif

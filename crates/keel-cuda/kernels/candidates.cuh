// Candidates of a draw: their order and weight, and totals over a block. The rule is in sample.cu.
#pragma once
#include "common.cuh"

#define THREADS 1024u
#define WARPS (THREADS / 32)
// Logits of a thread at a time. 32 bits hold the sum of the low 20 bits of a chunk's weights, and of the 21 bits above.
#define EACH 3
#define CHUNK (EACH * THREADS)
// Thread i has bucket i.
#define BUCKETS THREADS
#define LISTED 4096u
#define DIVISIONS 256u
#define FEW 64u
#define EXPONENT_MIN -27.75f
#define DRAW_WORDS 5
#define ALL_LANES 0xffffffffu

struct Draw {
    float temperature;
    u64 top_k;
    float top_p, log_min_p, uniform;
};

// Number and weight of some candidates.
struct Totals {
    u64 count, mass;
    __device__ Totals operator+(Totals b) const { return {count + b.count, mass + b.mass}; }
    __device__ Totals operator-(Totals b) const { return {count - b.count, mass - b.mass}; }
    __device__ Totals of_lane(u32 lane) const {
        return {__shfl_sync(ALL_LANES, count, lane), __shfl_sync(ALL_LANES, mass, lane)};
    }
};

// Orders of the first and of the last candidate; 0 and the greatest number if there is none.
struct Ends {
    u64 first, last;
    __device__ Ends operator+(Ends b) const { return {first > b.first ? first : b.first, last < b.last ? last : b.last}; }
    __device__ Ends of_lane(u32 lane) const {
        return {__shfl_sync(ALL_LANES, first, lane), __shfl_sync(ALL_LANES, last, lane)};
    }
};
#define NO_ENDS Ends{0, ~0ull}

// Data that the blocks of a row share.
struct Board {
    u64 masses[BUCKETS];
    u64 list[LISTED];
    u32 counts[BUCKETS];
    // Weight of the candidates that min-p keeps.
    u64 probable;
    u32 listed, arrived;
};

// One of several parts: its number, the totals before it, and its own totals.
struct Place {
    u32 part;
    Totals before, within;
};

// A candidate, and the weight of all candidates up to it and including it.
struct Located {
    u64 order, mass;
};

// The least and the greatest value that a number can have.
struct Span {
    u64 low, high;
};

__device__ inline Draw draw_of(const float* draws, u32 row) {
    const float* words = draws + (u64)row * DRAW_WORDS;
    return Draw{words[0], (u64)words[1], words[2], words[3], words[4]};
}

// e^x for x from EXPONENT_MIN to 0.
__device__ inline float power(float x) {
    const float shifted = __fadd_rn(__fmul_rn(x, 1.44269502f), 12582912.0f);
    const float n = __fadd_rn(shifted, -12582912.0f);
    const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float tail = 0.00138146f;
    tail = __fadd_rn(__fmul_rn(tail, r), 0.00836872f);
    tail = __fadd_rn(__fmul_rn(tail, r), 0.04166839f);
    tail = __fadd_rn(__fmul_rn(tail, r), 0.16666521f);
    tail = __fadd_rn(__fmul_rn(tail, r), 0.49999994f);
    const float result = __fadd_rn(1.0f, __fadd_rn(r, __fmul_rn(__fmul_rn(r, r), tail)));
    return __uint_as_float(__float_as_uint(result) + (__float_as_uint(shifted) << 23));
}

__device__ inline bool is_within(float exponent) { return exponent >= EXPONENT_MIN && exponent <= 0.0f; }
__device__ inline u64 weight_of(float exponent) { return __float2ull_rn(__fmul_rn(power(exponent), 1099511627776.0f)); }

// An order: greater for candidates that come first; -0 equals 0, NaN comes last.
__device__ inline u64 order_of(float logit, u32 id) {
    const u32 bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    const u32 key = logit != logit ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)key << 32 | (u32)~id;
}
__device__ inline float logit_of(u64 order) {
    const u32 key = (u32)(order >> 32);
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
__device__ inline u32 id_of(u64 order) { return ~(u32)order; }

// The least weight that is this share of a mass above 0.
__device__ inline u64 enough(float top_p, u64 mass) {
    const u64 share = (u64)ceil((double)top_p * (double)mass);
    return share < 1 ? 1 : share > mass ? mass : share;
}
// The weight of all candidates before the one that is drawn.
__device__ inline u64 target_of(float uniform, u64 kept) {
    const u64 below = (u64)((double)uniform * (double)kept);
    return below < kept ? below : kept - 1;
}

// Combines the values of all lanes; the same in each lane.
template <typename T> __device__ inline T over_warp(T x) {
    for (u32 step = 16; step > 0; step >>= 1) x = x + x.of_lane(threadIdx.x % 32 ^ step);
    return x;
}
// Combines the values of all threads; the same in each thread. Shuffles of all warps would compete, so one warp
// combines the warps' results.
template <typename T> __device__ inline T over_block(T x, T (&shared)[WARPS + 1]) {
    x = over_warp(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        x = over_warp(shared[threadIdx.x]);
        if (threadIdx.x == 0) shared[WARPS] = x;
    }
    __syncthreads();
    return shared[WARPS];
}

// Totals of the lanes up to this one, inclusive.
__device__ inline Totals through_own(Totals own) {
    const u32 lane = threadIdx.x % 32;
    for (u32 step = 1; step < 32; step <<= 1) {
        const Totals other = own.of_lane(lane - step & 31);
        if (lane >= step) own = own + other;
    }
    return own;
}
// Totals of the threads before this one, and of all.
struct Sums {
    Totals before, all;
};
__device__ inline Sums sums_of(Totals own, Totals (&shared)[WARPS + 1]) {
    const Totals through = through_own(own);
    __syncthreads();
    if (threadIdx.x % 32 == 31) shared[threadIdx.x / 32 + 1] = through;
    if (threadIdx.x == 0) shared[0] = Totals{0, 0};
    __syncthreads();
    if (threadIdx.x < 32) shared[threadIdx.x + 1] = through_own(shared[threadIdx.x + 1]);
    __syncthreads();
    return {shared[threadIdx.x / 32] + through - own, shared[WARPS]};
}

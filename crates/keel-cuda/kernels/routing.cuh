// Chooses the experts of a token: the CHOICES largest of E = EXPERTS logits. Among equals the lower index comes first;
// NaN comes last. Weights are softmax probabilities, divided by the sum of the chosen ones if NORMALISE. One warp a
// token, E <= 512, CHOICES <= 32. Every kernel that routes finds the same bits.
#pragma once
#include "float_order.cuh"

#define LOGITS_HELD ((EXPERTS + 31) / 32) // logits in a lane: those of experts 32 i + lane

// A lane's result: lane j has choice j.
struct Choice {
    float x[LOGITS_HELD];
    u32 expert, rank, first; // `first`: the rank of choice 0
};
// Finds the first `count` choices. All lanes call it.
__device__ __forceinline__ Choice choose_experts(const float *logits, u32 count) {
    const u32 lane = threadIdx.x % 32;
    Choice c = {};
    u32 ranks[LOGITS_HELD];
#pragma unroll
    for (int i = 0; i < LOGITS_HELD; i++) c.x[i] = 32 * i + lane < EXPERTS ? logits[32 * i + lane] : -INFINITY;
#pragma unroll
    for (int i = 0; i < LOGITS_HELD; i++) ranks[i] = 32 * i + lane < EXPERTS ? rank_of(c.x[i]) : 0;
    // The best logit that the lane has left, the lower index among equals.
    u32 best, which;
    auto find_best = [&] {
        best = 0, which = lane;
#pragma unroll
        for (int i = 0; i < LOGITS_HELD; i++)
            if (ranks[i] > best) best = ranks[i], which = 32 * i + lane;
    };
    find_best();
#pragma unroll 1
    for (u32 j = 0; j < count; j++) {
        const u32 top = __reduce_max_sync(~0u, best), at = __reduce_min_sync(~0u, best == top ? which : 0xffffffffu);
        if (j == 0) c.first = top;
        if (j == lane) c.rank = top, c.expert = at;
        if (at == which) {
#pragma unroll
            for (int i = 0; i < LOGITS_HELD; i++)
                if (at == 32 * i + lane) ranks[i] = 0;
            find_best();
        }
    }
    return c;
}
// Returns the probability of choice j in lane j, once all choices are found. All lanes call it.
__device__ __forceinline__ float probability_of(const Choice &c) {
    const float largest = ranked(c.first), weight = expf(ranked(c.rank) - largest);
    float total = 0.0f;
    if (NORMALISE) {
        for (int j = 0; j < CHOICES; j++) total += __shfl_sync(~0u, weight, j);
    } else {
#pragma unroll
        for (int i = 0; i < LOGITS_HELD; i++) total += expf(ranked(rank_of(c.x[i])) - largest);
        total = warp_sum(total);
    }
    return weight / total;
}

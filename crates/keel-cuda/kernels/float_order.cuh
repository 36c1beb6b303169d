// The order in which experts are chosen.
#pragma once
#include "common.cuh"

#define RANK_OF_NAN 1u

// An integer above 0 that is larger for a larger float. -0 counts as +0; NaN comes last, after -inf.
__device__ __forceinline__ u32 rank_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return x != x ? RANK_OF_NAN : bits >> 31 ? ~bits : bits | 0x80000000u;
}
// The float of a rank; -inf for NaN.
__device__ __forceinline__ float ranked(u32 rank) {
    return rank == RANK_OF_NAN ? -INFINITY : __uint_as_float(rank >> 31 ? rank & 0x7fffffffu : ~rank);
}

// The 16-bit operands of prefill's products on tensor cores.
//
// f16, which keeps eight times as much of a value as bf16 does. Its range is the smaller one, so x enters as x / 8 and W as
// 8 W: values of x reach 524,000, weights are normal numbers from 8e-6 on, and what lies beyond saturates.
// HALF_BF16=1: bf16 as they are, where a dense weight lies in memory so.
#pragma once
#include "common.cuh"

#ifndef HALF_BF16
#define HALF_BF16 0
#endif

// Two values of x in a register, `low` in its low half.
__device__ __forceinline__ u32 two_inputs(float low, float high) {
#if HALF_BF16
    const bf16x2 v = two_bf16(low, high);
#else
    const f16x2 v = two_f16(low * 0.125f, high * 0.125f);
#endif
    return *(const u32*)&v;
}
// Two weights that are 8 times as large already.
__device__ __forceinline__ u32 two_weights(float low, float high) {
    const f16x2 v = two_f16(low, high);
    return *(const u32*)&v;
}
#define WEIGHT_FACTOR 8.0f

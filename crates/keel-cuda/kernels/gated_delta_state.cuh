// How the elements of a gated-delta state lie in memory: f32, or f16 with STATE_F16=1. Arithmetic is in f32. A state in
// f16 is rounded after each update, also where it stays in registers, so it does not matter which rows share a step.
#pragma once
#include "common.cuh"

#ifndef STATE_F16
#define STATE_F16 0
#endif

#if STATE_F16
typedef f16 State;
#else
typedef float State;
#endif

/// `x` as memory keeps it. f16: rounded to nearest, ties to even, at most 65,504 in magnitude; a NaN stays one.
static __device__ __forceinline__ float kept(float x) {
#if STATE_F16
    x = x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
    return to_f32(From<f16>::f32(x));
#else
    return x;
#endif
}

static __device__ __forceinline__ float load_state(const State* s) {
#if STATE_F16
    return to_f32(*s);
#else
    return *s;
#endif
}

/// Stores a value that `kept` gave.
static __device__ __forceinline__ void store_state(State* s, float x) {
#if STATE_F16
    *s = From<f16>::f32(x);
#else
    *s = x;
#endif
}

/// Four neighbours, aligned to their size.
static __device__ __forceinline__ float4 load_state4(const State* s) {
#if STATE_F16
    const ushort4 x = *(const ushort4*)s;
    return make_float4(to_f32(f16{x.x}), to_f32(f16{x.y}), to_f32(f16{x.z}), to_f32(f16{x.w}));
#else
    return *(const float4*)s;
#endif
}

static __device__ __forceinline__ void store_state4(State* s, float4 x) {
#if STATE_F16
    *(ushort4*)s = make_ushort4(From<f16>::f32(x.x).bits, From<f16>::f32(x.y).bits, From<f16>::f32(x.z).bits, From<f16>::f32(x.w).bits);
#else
    *(float4*)s = x;
#endif
}

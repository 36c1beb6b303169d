// How the elements of a gated-delta state lie in memory: f32, or f16 with STATE_F16=1. Arithmetic is in f32. A state in
// f16 is rounded after each update, also where it stays in registers, so it does not matter which rows share a step.
#pragma once
#include "ptx.cuh"

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

/// Four neighbours, in registers as in memory.
#if STATE_F16
typedef uint2 StateQuad;
static __device__ __forceinline__ float4 wide(StateQuad s) {
    return make_float4(low_f16(s.x), high_f16(s.x), low_f16(s.y), high_f16(s.y));
}
/// Rounded as `kept` does.
static __device__ __forceinline__ StateQuad narrow(float4 x) { return make_uint2(pack_f16(x.x, x.y), pack_f16(x.z, x.w)); }
#else
typedef float4 StateQuad;
static __device__ __forceinline__ float4 wide(StateQuad s) { return s; }
static __device__ __forceinline__ StateQuad narrow(float4 x) { return x; }
#endif

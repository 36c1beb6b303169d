// Rotary embedding of one head, half-split pairs (i, i + R/2) of its first R elements, optionally behind an RMS norm of the
// head. Frequency i reads row AXES[i] of the positions [3, T] (all 0 for one row).
// The angle is reduced in f64: at position 256K an f32 product is off by 0.008 rad.
// Constants: D, R (rotary elements), NORM (0 or 1), and AXES, R/2 digits as an initialiser.
#pragma once
#include "common.cuh"

#if R > 0
__device__ const u8 axes[] = AXES;
#endif

// One warp calls it; `put` gets each index and its value.
template <typename Put>
__device__ __forceinline__ void turn_head(
    const float* row, const i32* positions, const float* inverse, const float* w, float eps, u64 tokens, u64 token, Put put
) {
    const u32 lane = threadIdx.x % 32;
    float scale = 1.0f;
    if (NORM) {
        float squares = 0.0f;
        for (u32 i = lane; i < D; i += 32) squares = fmaf(row[i], row[i], squares);
        scale = 1.0f / sqrtf(warp_sum(squares) / (float)D + eps);
    }
#if R > 0
    for (u32 i = lane; i < R / 2; i += 32) {
        const double turns = (double)positions[(u64)axes[i] * tokens + token] * (double)inverse[i] * 0.15915494309189535;
        float sine, cosine;
        sincospif((float)(2.0 * (turns - floor(turns))), &sine, &cosine);
        float a = row[i] * scale, b = row[i + R / 2] * scale;
        if (NORM) { a *= w[i]; b *= w[i + R / 2]; }
        put(i, a * cosine - b * sine);
        put(i + R / 2, b * cosine + a * sine);
    }
#endif
    for (u32 i = R + lane; i < D; i += 32) put(i, NORM ? row[i] * scale * w[i] : row[i] * scale);
}

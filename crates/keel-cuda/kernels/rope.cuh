// Rotary embedding of one head: half-split pairs (i, i + R/2) of its first R elements, optionally after an RMS norm of
// the head. Frequency i reads row AXES[i] of the positions [3, T] (all 0 for one row).
// The angle is reduced in f64: at position 256K an f32 product is off by 0.008 rad.
// Constants: D, R (rotary elements), NORM (0 or 1), and AXES, R/2 digits as an initialiser.
#pragma once
#include "common.cuh"

#if R > 0
__device__ const u8 axes[] = AXES;
#endif

#define TURNS ((R / 2 + 31) / 32) // pairs of a lane
#define TURNS_HELD (TURNS > 0 ? TURNS : 1)

// A token's rotation, shared among the lanes of a warp. It does not depend on the head.
struct Angles {
    float sine[TURNS_HELD], cosine[TURNS_HELD];

    __device__ __forceinline__ Angles(const i32* positions, const float* inverse, u64 tokens, u64 token) {
#if R > 0
#pragma unroll
        for (int j = 0; j < TURNS; j++) {
            const u32 i = min(j * 32 + threadIdx.x % 32, R / 2 - 1);
            const double turns = (double)positions[(u64)axes[i] * tokens + token] * (double)inverse[i] * 0.15915494309189535;
            sincospif((float)(2.0 * (turns - floor(turns))), &sine[j], &cosine[j]);
        }
#endif
    }
};

// Called by one warp; `put` receives each index and its value.
template <typename Put>
__device__ __forceinline__ void rotate_head(const float* row, const Angles& angles, const float* w, float eps, Put put) {
    const u32 lane = threadIdx.x % 32;
    float scale = 1.0f;
    if (NORM) {
        float squares = 0.0f;
        for (u32 i = lane; i < D; i += 32) squares = fmaf(row[i], row[i], squares);
        scale = 1.0f / sqrtf(warp_sum(squares) / (float)D + eps);
    }
#if R > 0
#pragma unroll
    for (int j = 0; j < TURNS; j++) {
        const u32 i = j * 32 + lane;
        if (i >= R / 2) break;
        float a = row[i] * scale, b = row[i + R / 2] * scale;
        if (NORM) { a *= w[i]; b *= w[i + R / 2]; }
        put(i, a * angles.cosine[j] - b * angles.sine[j]);
        put(i + R / 2, b * angles.cosine[j] + a * angles.sine[j]);
    }
#endif
    for (u32 i = R + lane; i < D; i += 32) put(i, NORM ? row[i] * scale * w[i] : row[i] * scale);
}

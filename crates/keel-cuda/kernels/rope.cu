// Rotary embedding of heads [T, H, D], half-split pairs (i, i + R/2) of the first R elements, optionally behind an RMS
// norm of the head. One warp a head. Frequency i reads row AXES[i] of the positions [3, T] (all 0 for one row).
// The angle is reduced in f64: at position 256K an f32 product is off by 0.008 rad. Bytes moved: x once, y once.
// Constants: D, R (rotary elements), NORM (0 or 1), and AXES, R/2 digits as an initialiser.
#include "common.cuh"

#if R > 0
__device__ const u8 axes[] = AXES;
#endif

extern "C" __global__ void rope(
    const float* x, u64 stride, const i32* positions, const float* inverse, const float* w, float eps, float* y, u32 tokens, u32 heads
) {
    const u64 unit = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    if (unit >= (u64)tokens * heads) return;
    const u64 token = unit / heads, head = unit % heads;
    const float* row = x + token * stride + head * D;
    float* out = y + unit * D;
    float scale = 1.0f;
    if (NORM) {
        float squares = 0.0f;
        for (u32 i = lane; i < D; i += 32) squares = fmaf(row[i], row[i], squares);
        scale = 1.0f / sqrtf(warp_sum(squares) / (float)D + eps);
    }
#if R > 0
    for (u32 i = lane; i < R / 2; i += 32) {
        const double turns = (double)positions[(u64)axes[i] * tokens + token] * (double)inverse[i] * 0.15915494309189535;
        const float angle = (float)((turns - floor(turns)) * 6.283185307179586);
        float sine, cosine;
        sincosf(angle, &sine, &cosine);
        float a = row[i] * scale, b = row[i + R / 2] * scale;
        if (NORM) { a *= w[i]; b *= w[i + R / 2]; }
        out[i] = a * cosine - b * sine;
        out[i + R / 2] = b * cosine + a * sine;
    }
#endif
    for (u32 i = R + lane; i < D; i += 32) out[i] = NORM ? row[i] * scale * w[i] : row[i] * scale;
}

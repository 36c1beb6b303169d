// RMS norms of rows of `width` f32: y = x / sqrt(mean(x^2) + eps) * w. One block a row; the row is read once from
// memory and once from the cache. Rows of x (and z) are `stride` elements apart; y is gap-free.
#include "common.cuh"

__device__ inline float inverse_rms(float squares, u32 width, float eps, float* shared) {
    return 1.0f / sqrtf(block_sum(squares, shared) / (float)width + eps);
}

extern "C" __global__ void rms_norm(const float* x, u64 stride, const float* w, float* y, u32 width, float eps) {
    take_turn();
    __shared__ float shared[33];
    const float* row = x + blockIdx.x * stride;
    float* out = y + (u64)blockIdx.x * width;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) squares = fmaf(row[i], row[i], squares);
    const float scale = inverse_rms(squares, width, eps, shared);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = row[i] * scale * w[i];
}

// sum = x + residual, y = its norm; sum may be residual's own memory.
extern "C" __global__ void add_rms_norm(const float* x, const float* residual, const float* w, float* sum, float* y, u32 width, float eps) {
    take_turn();
    __shared__ float shared[33];
    const u64 first = (u64)blockIdx.x * width;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
        const float s = x[first + i] + residual[first + i];
        sum[first + i] = s;
        squares = fmaf(s, s, squares);
    }
    const float scale = inverse_rms(squares, width, eps, shared);
    // Each thread reads what it wrote itself.
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) y[first + i] = sum[first + i] * scale * w[i];
}

// y = rms_norm(x) * w * silu(z)
extern "C" __global__ void gated_rms_norm(const float* x, u64 x_stride, const float* w, const float* z, u64 z_stride, u32 heads, float* y, u32 width, float eps) {
    take_turn();
    __shared__ float shared[33];
    const u64 token = blockIdx.x / heads, head = blockIdx.x % heads;
    const float* row = x + token * x_stride + head * width;
    const float* gate = z + token * z_stride + head * width;
    float* out = y + (u64)blockIdx.x * width;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) squares = fmaf(row[i], row[i], squares);
    const float scale = inverse_rms(squares, width, eps, shared);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = row[i] * scale * w[i] * silu(gate[i]);
}

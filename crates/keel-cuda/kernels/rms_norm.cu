// RMS norms of rows of `width` f32: y = x / sqrt(mean(x^2) + eps) * w. One block a row; the row is read once from
// memory and once from the cache. Rows of x (and z) are `stride` elements apart; y is gap-free.
#include "half.cuh"

__device__ inline float inverse_rms(float squares, u32 width, float eps, float* shared) {
    return 1.0f / sqrtf(block_sum(squares, shared) / (float)width + eps);
}

extern "C" __global__ void rms_norm(
#include "rms_norm.params"
) {
    take_turn();
    __shared__ float shared[33];
    const float* row = x + blockIdx.x * stride;
    float* out = (float*)y + (u64)blockIdx.x * width;
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) squares = fmaf(row[i], row[i], squares);
    const float scale = inverse_rms(squares, width, eps, shared);
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) out[i] = row[i] * scale * w[i];
}

// The same in 16 bits, for products on tensor cores (see half.cuh). Four columns a thread; width is a multiple of 4 and
// at most 4 blockDim.x.
extern "C" __global__ void rms_norm_half(
#include "rms_norm.params"
) {
    take_turn();
    __shared__ float shared[33];
    const u32 fours = width / 4, i = threadIdx.x;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f), scale = v;
    if (i < fours) {
        v = *(const float4*)(x + blockIdx.x * stride + 4 * i);
        scale = any_four(w + 4 * i);
    }
    const float by = inverse_rms(fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w))), width, eps, shared);
    if (i >= fours) return;
    put_four((u16*)y, blockIdx.x, width, 4 * i,
             make_float4(v.x * by * scale.x, v.y * by * scale.y, v.z * by * scale.z, v.w * by * scale.w));
}

// The layer norm, y = (x - mean) / sqrt(var + eps) * w + bias, in 16 bits; shapes as in rms_norm_half.
extern "C" __global__ void layer_norm_half(
#include "layer_norm_half.params"
) {
    take_turn();
    __shared__ float shared[33];
    const u32 fours = width / 4, i = threadIdx.x;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f), scale = v, shift = v;
    if (i < fours) {
        v = *(const float4*)(x + blockIdx.x * stride + 4 * i);
        scale = any_four(w + 4 * i), shift = any_four(bias + 4 * i);
    }
    const float mean = block_sum(v.x + v.y + v.z + v.w, shared) / (float)width;
    if (i < fours) v = make_float4(v.x - mean, v.y - mean, v.z - mean, v.w - mean);
    const float by = inverse_rms(fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w))), width, eps, shared);
    if (i >= fours) return;
    put_four(y, blockIdx.x, width, 4 * i,
             make_float4(fmaf(v.x * by, scale.x, shift.x), fmaf(v.y * by, scale.y, shift.y), fmaf(v.z * by, scale.z, shift.z),
                         fmaf(v.w * by, scale.w, shift.w)));
}

// y = x * sigmoid(gate) in 16 bits for heads [rows, D]; with w, y = rms_norm(x) * w * silu(gate). One warp a head, four
// columns a lane; D is a multiple of 4 and at most 512. gate has a stride from token to token and one from head to
// head.
extern "C" __global__ void __launch_bounds__(256) gated_heads_half(
#include "gated_heads_half.params"
) {
    take_turn();
    const u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const u32 first = row % heads * d; // column of the token's row
    x += (u64)row * d;
    gate += row / heads * gate_row + row % heads * gate_head;
    float4 v[4], z[4];
    // All loads are under way before the first value is used.
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 i = j * 128 + lane * 4;
        v[j] = z[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < d) {
            v[j] = *(const float4*)(x + i);
            z[j] = *(const float4*)(gate + i);
        }
    }
    float by = 1.0f;
    if (w) {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) squares = fmaf(v[j].x, v[j].x, fmaf(v[j].y, v[j].y, fmaf(v[j].z, v[j].z, fmaf(v[j].w, v[j].w, squares))));
        by = 1.0f / sqrtf(warp_sum(squares) / (float)d + eps);
    }
    // Off by a few units in the last place; rounding to 16 bits follows.
    auto share = [](float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); };
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 i = j * 128 + lane * 4;
        if (i >= d) continue;
        float4 f = make_float4(share(z[j].x), share(z[j].y), share(z[j].z), share(z[j].w));
        if (w) {
            const float4 n = any_four(w + i);
            f = make_float4(by * n.x * z[j].x * f.x, by * n.y * z[j].y * f.y, by * n.z * z[j].z * f.z, by * n.w * z[j].w * f.w);
        }
        put_four(y, row / heads, heads * d, first + i, make_float4(v[j].x * f.x, v[j].y * f.y, v[j].z * f.z, v[j].w * f.w));
    }
}

// sum = x + residual, y = its norm; sum may be residual's own memory.
extern "C" __global__ void add_rms_norm(
#include "add_rms_norm.params"
) {
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
    // Each thread reads the sums that it wrote itself.
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) y[first + i] = sum[first + i] * scale * w[i];
}

// y = rms_norm(x) * w * silu(z)
extern "C" __global__ void gated_rms_norm(
#include "gated_rms_norm.params"
) {
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

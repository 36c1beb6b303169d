// Rotary embedding of heads [T, H, D], see rope.cuh. One warp a head. Rows of x are `stride` elements apart, heads
// `head_stride`; y is gap-free. Bytes moved: x once, y once.
#include "rope.cuh"

extern "C" __global__ void rope(
#include "rope.params"
) {
    take_turn();
    const u64 unit = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= (u64)tokens * heads) return;
    const u64 token = unit / heads, head = unit % heads;
    float* out = y + unit * D;
    const Angles angles(positions, inverse, tokens, token);
    rotate_head(x + token * stride + head * head_stride, angles, w, eps, [&](u32 i, float value) { out[i] = value; });
}

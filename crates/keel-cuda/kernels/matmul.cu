// y [batch, m, n] = a [batch, m, k] b [batch, k, n] of any strides, summed in f32.
// A block of 256 threads computes 32 x 32 elements, four a thread. For small products of the user's own; models use the
// packed weights of linear_*.cu. ELEM: float, f16 or bf16. Bytes moved: a is read n / 32 times, b m / 32 times.
#include "common.cuh"

extern "C" __global__ void matmul(
#include "matmul.params"
) {
    take_turn();
    __shared__ float left[32][33], right[32][33];
    const u64 batch = blockIdx.z, row0 = (u64)blockIdx.y * 32, col0 = (u64)blockIdx.x * 32;
    const u32 tx = threadIdx.x % 32, ty = threadIdx.x / 32;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u64 inner = 0; inner < k; inner += 32) {
        for (u32 r = ty; r < 32; r += 8) {
            const u64 row = row0 + r, depth = inner + tx;
            left[r][tx] = row < m && depth < k ? to_f32(a[sa.at((batch * m + row) * k + depth)]) : 0.0f;
            const u64 from = inner + r, col = col0 + tx;
            right[r][tx] = from < k && col < n ? to_f32(b[sb.at((batch * k + from) * n + col)]) : 0.0f;
        }
        __syncthreads();
        for (u32 d = 0; d < 32; ++d)
            for (u32 r = 0; r < 4; ++r) sums[r] = fmaf(left[ty + 8 * r][d], right[d][tx], sums[r]);
        __syncthreads();
    }
    for (u32 r = 0; r < 4; ++r) {
        const u64 row = row0 + ty + 8 * r, col = col0 + tx;
        if (row < m && col < n) y[(batch * m + row) * n + col] = From<ELEM>::f32(sums[r]);
    }
}

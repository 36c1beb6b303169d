// The gated delta rule for heads of any size, one token at a time; the formula is that of gated_delta.cu, which is faster and
// takes value sizes that are multiples of 4. One block for each sequence and value head, one thread a column of the state,
// which stays in memory. For sizes that no published model has.
// Constants: HK, HV, DK, DV, QKV_STRIDE, A_STRIDE, B_STRIDE. Shared memory: 2 DK floats.
#include "common.cuh"

extern "C" __global__ void gated_delta_any(
    const float* qkv, const float* a, const float* b, const float* a_log, const float* dt_bias, float* state,
    const u32* row_start, const u32* slot, float* y
) {
    take_turn();
    __shared__ float q[DK], k[DK], shared[33];
    const u32 head = blockIdx.x, sequence = blockIdx.y, key_head = head / (HV / HK);
    float* s = state + ((u64)slot[sequence] * HV + head) * DK * DV;
    for (u32 t = row_start[sequence]; t < row_start[sequence + 1]; ++t) {
        const float* row = qkv + (u64)t * QKV_STRIDE;
        float qq = 0.0f, kk = 0.0f;
        for (u32 i = threadIdx.x; i < DK; i += blockDim.x) {
            q[i] = row[key_head * DK + i];
            k[i] = row[(HK + key_head) * DK + i];
            qq = fmaf(q[i], q[i], qq);
            kk = fmaf(k[i], k[i], kk);
        }
        const float q_scale = 1.0f / (sqrtf(block_sum(qq, shared) + 1e-6f) * sqrtf((float)DK));
        const float k_scale = 1.0f / sqrtf(block_sum(kk, shared) + 1e-6f);
        const float beta = sigmoid(b[(u64)t * B_STRIDE + head]);
        const float decay = expf(-expf(a_log[head]) * softplus(a[(u64)t * A_STRIDE + head] + dt_bias[head]));
        for (u32 j = threadIdx.x; j < DV; j += blockDim.x) {
            float seen = 0.0f, out = 0.0f;
            for (u32 i = 0; i < DK; ++i) seen = fmaf(k[i] * k_scale, s[i * DV + j] * decay, seen);
            const float u = beta * (row[2 * HK * DK + head * DV + j] - seen);
            for (u32 i = 0; i < DK; ++i) {
                const float next = fmaf(k[i] * k_scale, u, s[i * DV + j] * decay);
                s[i * DV + j] = next;
                out = fmaf(q[i] * q_scale, next, out);
            }
            y[((u64)t * HV + head) * DV + j] = out;
        }
        __syncthreads();
    }
}

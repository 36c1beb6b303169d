// The gated delta rule for heads of any size, one token at a time. Formula, operands and the delta log are those of
// gated_delta.cu, which is faster and takes value sizes that are multiples of 4. For sizes that no published model has.
//
// One block for each sequence and key head; one thread for each column of the states of all value heads that read the
// key head. So no block reads a record that another one writes. States stay in memory. While rows stay open the state
// must not change: for each row, the state before it is computed again from the committed state and the records of the
// rows before.
//
// Constants: HK, HV, DK, DV, QKV_STRIDE, A_STRIDE, B_STRIDE, LOG (records of a slot; 0 without a log), STATE_F16.
// Launch: grid (HK, B), block a multiple of 32. Shared memory: 2 DK floats.
// Bytes of a row: 16 DK DV HV; with open rows 8 DK DV HV, and the records of all open rows before it.
#include "common.cuh"

#define SHARE (HV / HK)
#define RECORD (HK * DK + HV * (DV + 1))
#include "gated_delta_state.cuh"

/// The parts of a record that a block reads or writes: k [DK], u [SHARE DV], log decays [SHARE].
struct Record {
    float *k, *u, *log_decay;
};
static __device__ __forceinline__ Record record_of(float* records, u32 row, u32 key_head) {
    float* record = records + (u64)row * RECORD;
    return {record + key_head * DK, record + HK * DK + key_head * (SHARE * DV), record + HK * DK + HV * DV + key_head * SHARE};
}

/// Element i of a column of a state after `rows` records are applied.
static __device__ __forceinline__ float replayed(float s, float* records, u32 rows, u32 key_head, u32 i, u32 column) {
    for (u32 r = 0; r < rows; ++r) {
        const Record record = record_of(records, r, key_head);
        s = kept(fmaf(record.k[i], record.u[column], s * expf(record.log_decay[column / DV])));
    }
    return s;
}

/// records and accepted are null without a log.
extern "C" __global__ void gated_delta_any(
#include "gated_delta.params"
) {
    take_turn();
    __shared__ float q[DK], k[DK], shared[33];
    const u32 key_head = blockIdx.x, sequence = blockIdx.y, begin = row_start[sequence], end = row_start[sequence + 1];
    if (begin == end && !(accepted && accepted[sequence])) return;
    State* states = state + ((u64)slot[sequence] * HV + key_head * SHARE) * (DK * DV);
    if (LOG > 0 && records != nullptr) {
        records += (u64)slot[sequence] * LOG * RECORD;
        const u32 applied = accepted[sequence];
        for (u32 column = threadIdx.x; applied > 0 && column < SHARE * DV; column += blockDim.x) {
            State* s = states + column / DV * (DK * DV) + column % DV;
            for (u32 i = 0; i < DK; ++i)
                store_state(s + i * DV, replayed(load_state(s + i * DV), records, applied, key_head, i, column));
        }
    }
    for (u32 t = begin; t < end; ++t) {
        // All threads are done with q, k and the earlier records.
        __syncthreads();
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
        for (u32 i = threadIdx.x; i < DK; i += blockDim.x) {
            q[i] *= q_scale;
            k[i] *= k_scale;
        }
        __syncthreads();
        const u32 open = LOG > 0 && keep_open ? t - begin : 0;
        for (u32 column = threadIdx.x; column < SHARE * DV; column += blockDim.x) {
            const u32 head = key_head * SHARE + column / DV;
            State* s = states + column / DV * (DK * DV) + column % DV;
            const float log_decay = -expf(a_log[head]) * softplus(a[(u64)t * A_STRIDE + head] + dt_bias[head]);
            const float decay = expf(log_decay), beta = sigmoid(b[(u64)t * B_STRIDE + head]);
            float seen = 0.0f, out = 0.0f;
            for (u32 i = 0; i < DK; ++i)
                seen = fmaf(k[i], replayed(load_state(s + i * DV), records, open, key_head, i, column) * decay, seen);
            const float u = beta * (row[2 * HK * DK + key_head * (SHARE * DV) + column] - seen);
            for (u32 i = 0; i < DK; ++i) {
                const float next = fmaf(k[i], u, replayed(load_state(s + i * DV), records, open, key_head, i, column) * decay);
                if (!(LOG > 0 && keep_open)) store_state(s + i * DV, kept(next));
                out = fmaf(q[i], next, out);
            }
            y[((u64)t * HV + key_head * SHARE) * DV + column] = out;
            if (LOG > 0 && keep_open) {
                const Record record = record_of(records, t - begin, key_head);
                record.u[column] = u;
                if (column % DV == 0) record.log_decay[column / DV] = log_decay;
            }
        }
        if (LOG > 0 && keep_open) {
            const Record record = record_of(records, t - begin, key_head);
            for (u32 i = threadIdx.x; i < DK; i += blockDim.x) record.k[i] = k[i];
        }
    }
}

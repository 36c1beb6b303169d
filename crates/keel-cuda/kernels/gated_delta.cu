// The gated delta rule, one token at a time. For value head h, which reads key head h / (HV / HK), S its state:
//
//   q, k = q / |q| * DK^-0.5, k / |k|       |x| = sqrt(sum(x^2) + 1e-6)
//   beta = sigmoid(b)        g = -e^a_log * softplus(a + dt_bias)
//   S    = e^g S
//   u    = beta (v - k S)
//   y    = q S + (q . k) u        equal to q (S + k u^T); needs one reduction a token instead of two
//   S    = S + k u^T
//
// The reduction computes five sums from unscaled inputs: k S, q S, |q|^2, |k|^2 and q . k. Norms and decay are applied
// to the sums.
//
// qkv [T, 2 HK DK + HV DV] (QKV_STRIDE values from row to row), a and b [T, HV] (A_STRIDE, B_STRIDE),
// state [slots, HV, DK, DV] f32 or f16 (STATE_F16) in place, y [T, HV, DV].
//
// The delta log: (k, u, g) of a token is its record, [k HK DK][u HV DV][g HV]; each slot has LOG records.
// S = e^g S + k u^T from a record gives the same bits again. A step that keeps its rows open writes records and no
// state. The next step is told how many were accepted, applies those, and writes the state once.
//
// Macros: HK, HV, DK, DV (DV a multiple of 4), QKV_STRIDE, A_STRIDE, B_STRIDE (any number; qkv and its v part need only
// be 4-byte aligned), LOG (records of a slot; 0 without a log), STATE_F16. EARLY=1: no kernel that may still run
// writes the state, slot, row_start, a_log or dt_bias, so they are fetched while earlier kernels finish.
// Launch: block 128; grid (HV * ceil(DV / 32), B). Shared memory: static. A block holds 32 columns of one head's state
// in registers: thread (group of 16, lane of 8) has rows group, group + 16, ... of 4 columns. Any number of rows.
// counters: u32 [B, HK], zero before the first launch and left zero; only read where keep_open.
//
// Bytes: 8 HV DK DV a sequence (4 if rows stay open and none was accepted); half of it with an f16 state. Floor:
// those bytes at the memory's bandwidth.

#include "gated_delta.cuh"

// Blocks that a multiprocessor has room for. A block with an f16 state asks for half as many bytes, so more of them
// are needed.
#define BLOCKS_AT_ONCE (STATE_F16 ? 6 : 4)
// Whether a row is read while the one before it is applied. It takes registers, and without a log most steps have one
// row a sequence.
#define READS_AHEAD (LOG > 0 || !STATE_F16)
// Slot number of a padding sequence.
#define NO_SLOT 0xffffffffu

/// Loads this thread's part of a row.
static __device__ __forceinline__ void load_token(Token& token, const Part& part, const float* qkv, const float* a, const float* b,
                                                  u32 row, u32 head) {
    const float* q = qkv + (u64)row * QKV_STRIDE + head / SHARE * DK;
    const float* v = qkv + (u64)row * QKV_STRIDE + 2 * HK * DK + head * DV + part.column;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const u32 at = r * GROUPS + part.group;
        token.q[r] = at < DK ? q[at] : 0.0f;
        token.k[r] = at < DK ? q[HK * DK + at] : 0.0f;
    }
    token.v = part.valid ? make_float4(v[0], v[1], v[2], v[3]) : zero4();
    token.a = a[(u64)row * A_STRIDE + head];
    token.b = b[(u64)row * B_STRIDE + head];
}

/// records, accepted and counters are null without a log.
extern "C" __global__ void __launch_bounds__(128, BLOCKS_AT_ONCE)
gated_delta(
#include "gated_delta.params"
) {
    if (!EARLY) wait_for_inputs();
    __shared__ Sums sums;
    __shared__ float k_factors[TILE];
    const u32 head = blockIdx.x / BLOCKS, sequence = blockIdx.y, key_head = head / SHARE;
    const u32 my_slot = slot[sequence], begin = row_start[sequence], end = row_start[sequence + 1];
    if (my_slot == NO_SLOT) {
        if (EARLY) wait_for_inputs();
        return;
    }

    State* s_block = state + ((u64)my_slot * HV + head) * (DK * DV);
    Part part;
    load_part(part, s_block, blockIdx.x % BLOCKS * COLUMNS);
    const Decay decay = decay_of(a_log, dt_bias, head);
    if (EARLY) wait_for_inputs();
    // Not earlier: the next kernel may read results of kernels before this one without waiting.
    let_next_start();
    Token next;
    if (begin < end) load_token(next, part, qkv, a, b, begin, head);

    bool last = false;
    u32 applied = 0;
    if (LOG > 0 && records != nullptr) {
        records += (u64)my_slot * LOG * RECORD;
        applied = accepted != nullptr ? accepted[sequence] : 0;
        for (u32 i = 0; i < applied; i++) apply_record(part, records + (u64)i * RECORD, head);
        if (keep_open) last = last_to_read(counters + sequence * HK, key_head);
    }
    if (keep_open && applied > 0) store_part(part, s_block);

    for (u32 tile = begin; tile < end; tile += TILE) {
        const u32 rows = min(end - tile, TILE);
        for (u32 t = 0; t < rows; t++) {
            const Token token = next;
            if (READS_AHEAD && tile + t + 1 < end) load_token(next, part, qkv, a, b, tile + t + 1, head);
            float4 u, out;
            const float k_factor = step(part, token, decay, sums, t, u, out);
            if (LOG > 0 && keep_open && threadIdx.x == 0) k_factors[t] = k_factor;
            if (part.group == 0 && part.valid) {
                *(float4*)(y + ((u64)(tile + t) * HV + head) * DV + part.column) = out;
                if (LOG > 0 && keep_open) {
                    // Records are aligned to four bytes only.
                    float* to = records + (u64)(tile + t - begin) * RECORD + HK * DK + head * DV + part.column;
                    to[0] = u.x;
                    to[1] = u.y;
                    to[2] = u.z;
                    to[3] = u.w;
                }
            }
            if (!READS_AHEAD && tile + t + 1 < end) load_token(next, part, qkv, a, b, tile + t + 1, head);
        }
        if (LOG > 0 && keep_open) {
            __syncthreads(); // `k_factors` is written
            if (last) write_keys(records + (u64)(tile - begin) * RECORD, qkv, k_factors, a, a_log, dt_bias, tile, rows, key_head);
            __syncthreads();
        }
    }
    if (!keep_open && (end > begin || applied > 0)) store_part(part, s_block);
}

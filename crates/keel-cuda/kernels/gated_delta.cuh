// One token of the gated delta rule on 32 columns of a head's state, in the registers of 128 threads: thread (group of
// 16, lane of 8) has rows group, group + 16, ... of 4 columns. The formula is in gated_delta.cu.
#pragma once
#include "ptx.cuh"

#define COLUMNS 32
#define BLOCKS ((DV + COLUMNS - 1) / COLUMNS)
#define SHARE (HV / HK)
#define GROUPS 16
#define ROWS ((DK + GROUPS - 1) / GROUPS)
#define TILE 8 // rows whose records are written together
#define RECORD (HK * DK + HV * (DV + 1))
#include "gated_delta_state.cuh"

/// A thread's part of a token: rows group, group + 16, ... of q and k, unscaled; its columns of v; and the head's
/// gates.
struct Token {
    float q[ROWS], k[ROWS];
    float4 v;
    float a, b;
};

/// A head's e^a_log and dt_bias.
struct Decay {
    float rate, bias;
};

/// Sums over a thread's rows, later over all rows: k S, q S, q q, k k and q k.
struct Products {
    float4 ks, qs;
    float qq, kk, qk;
};

/// Products of the four warps, in two alternating buffers: a warp is at most one token ahead of the block's slowest
/// warp.
struct Sums {
    float4 states[2][2][4][COLUMNS / 4];
    float lengths[2][3][4];
};

/// This thread's part of the state.
struct Part {
    StateQuad s[ROWS];
    u32 group, lane, column;
    bool valid;
};

static __device__ __forceinline__ float4 zero4() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

static __device__ __forceinline__ Decay decay_of(const float* a_log, const float* dt_bias, u32 head) {
    return {expf(a_log[head]), dt_bias[head]};
}

static __device__ __forceinline__ float log_decay_of(float a, const Decay& decay) {
    float x = a + decay.bias;
    // Beyond 20, softplus(x) = x in f32.
    return -decay.rate * (x > 20.0f ? x : log1pf(expf(x)));
}

/// `s = decay * s + k u^T` on one row.
static __device__ __forceinline__ void update(StateQuad& s, float decay, float k, const float4& u) {
    const float4 x = wide(s);
    s = narrow(make_float4(fmaf(k, u.x, x.x * decay), fmaf(k, u.y, x.y * decay), fmaf(k, u.z, x.z * decay), fmaf(k, u.w, x.w * decay)));
}

/// Sum over the four groups of a warp, which lie 8 lanes apart.
static __device__ __forceinline__ float sum_groups(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 8);
    return x + __shfl_xor_sync(FULL_WARP, x, 16);
}
static __device__ __forceinline__ float4 sum_groups(float4 x) {
    return make_float4(sum_groups(x.x), sum_groups(x.y), sum_groups(x.z), sum_groups(x.w));
}

static __device__ __forceinline__ void add(float4& x, const float4& y) {
    x.x += y.x;
    x.y += y.y;
    x.z += y.z;
    x.w += y.w;
}

/// Loads this thread's part of the state at `s_block` [DK, DV], from column `block_column` on.
static __device__ __forceinline__ void load_part(Part& part, const State* s_block, u32 block_column) {
    part.group = threadIdx.x / 8;
    part.lane = threadIdx.x % 8;
    part.column = block_column + part.lane * 4;
    part.valid = part.column < DV;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        u32 row = r * GROUPS + part.group;
        part.s[r] = part.valid && row < DK ? *(const StateQuad*)(s_block + row * DV + part.column) : narrow(zero4());
    }
}

static __device__ __forceinline__ void store_part(const Part& part, State* s_block) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        u32 row = r * GROUPS + part.group;
        if (part.valid && row < DK) *(StateQuad*)(s_block + row * DV + part.column) = part.s[r];
    }
}

/// `S = e^g S + k u^T` with a record.
static __device__ __forceinline__ void apply_record(Part& part, const float* record, u32 head) {
    float decay = expf(record[HK * DK + HV * DV + head]);
    const float *k = record + head / SHARE * DK, *from = record + HK * DK + head * DV + part.column;
    float4 u = part.valid ? make_float4(from[0], from[1], from[2], from[3]) : zero4();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        u32 row = r * GROUPS + part.group;
        update(part.s[r], decay, row < DK ? k[row] : 0.0f, u);
    }
}

static __device__ __forceinline__ void add_row(float4& sum, float by, const float4& s) {
    sum = make_float4(fmaf(by, s.x, sum.x), fmaf(by, s.y, sum.y), fmaf(by, s.z, sum.z), fmaf(by, s.w, sum.w));
}

static __device__ __forceinline__ Products products_of_rows(const Part& part, const Token& token) {
    Products p = {zero4(), zero4(), 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float q = token.q[r], k = token.k[r];
        const float4 s = wide(part.s[r]);
        add_row(p.ks, k, s);
        add_row(p.qs, q, s);
        p.qq = fmaf(q, q, p.qq);
        p.kk = fmaf(k, k, p.kk);
        p.qk = fmaf(q, k, p.qk);
    }
    return p;
}

/// Sums over the block, the same bits in all groups. `t` counts the calls. One barrier.
static __device__ __forceinline__ Products sum_products(Products p, const Part& part, Sums& sums, u32 t) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto& states = sums.states[t & 1];
    auto& lengths = sums.lengths[t & 1];
    p.ks = sum_groups(p.ks), p.qs = sum_groups(p.qs);
    p.qq = sum_groups(p.qq), p.kk = sum_groups(p.kk), p.qk = sum_groups(p.qk);
    if (lane < 8) {
        states[0][warp][part.lane] = p.ks;
        states[1][warp][part.lane] = p.qs;
    }
    if (lane == 0) lengths[0][warp] = p.qq, lengths[1][warp] = p.kk, lengths[2][warp] = p.qk;
    __syncthreads();
    p.ks = states[0][0][part.lane], p.qs = states[1][0][part.lane];
    p.qq = lengths[0][0], p.kk = lengths[1][0], p.qk = lengths[2][0];
#pragma unroll
    for (int w = 1; w < 4; w++) {
        add(p.ks, states[0][w][part.lane]);
        add(p.qs, states[1][w][part.lane]);
        p.qq += lengths[0][w], p.kk += lengths[1][w], p.qk += lengths[2][w];
    }
    return p;
}

/// Applies one token to the state and returns 1 / |k|. u and y are those of this thread's columns, the same bits in all
/// groups. The scales of q and k and the decay are needed only after the sums, so the sums wait for neither.
static __device__ __forceinline__ float step(Part& part, const Token& token, const Decay& head, Sums& sums, u32 t, float4& u,
                                             float4& y) {
    const float decay = expf(log_decay_of(token.a, head)), beta = sigmoid(token.b);
    const Products p = sum_products(products_of_rows(part, token), part, sums, t);
    const float q_factor = 1.0f / (sqrtf(p.qq + 1e-6f) * sqrtf((float)DK)), k_factor = 1.0f / sqrtf(p.kk + 1e-6f);
    const float of_k = k_factor * decay, of_q = q_factor * decay, qk = p.qk * q_factor * k_factor;
    const float4 v = token.v, ks = p.ks, qs = p.qs;
    u = make_float4(beta * (v.x - of_k * ks.x), beta * (v.y - of_k * ks.y), beta * (v.z - of_k * ks.z), beta * (v.w - of_k * ks.w));
    y = make_float4(fmaf(qk, u.x, of_q * qs.x), fmaf(qk, u.y, of_q * qs.y), fmaf(qk, u.z, of_q * qs.z), fmaf(qk, u.w, of_q * qs.w));
#pragma unroll
    for (int r = 0; r < ROWS; r++) update(part.s[r], decay, __fmul_rn(token.k[r], k_factor), u);
    return k_factor;
}

/// Counts this block as done with reading the data that all blocks of a key head share. Returns true in the last such
/// block, which may overwrite the data. All threads call it after their reads. A sequence's counters [HK] are zero
/// before and after.
static __device__ __forceinline__ bool last_to_read(u32* counters, u32 key_head) {
    __shared__ u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(counters + key_head, 1) == SHARE * BLOCKS - 1;
        if (last) counters[key_head] = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

/// Writes keys and decays of `rows` rows from `first` on into records from `record` on. The last reader of a key head
/// calls it.
static __device__ __forceinline__ void write_keys(float* record, const float* qkv, const float* k_factors, const float* a,
                                                  const float* a_log, const float* dt_bias, u32 first, u32 rows, u32 key_head) {
    for (u32 t = 0; t < rows; t++, record += RECORD) {
        const float* k = qkv + (u64)(first + t) * QKV_STRIDE + HK * DK + key_head * DK;
        for (u32 i = threadIdx.x; i < DK; i += 128) record[key_head * DK + i] = __fmul_rn(k[i], k_factors[t]);
        // The decays of all value heads that read this key head.
        for (u32 i = threadIdx.x; i < SHARE; i += 128) {
            const u32 h = key_head * SHARE + i;
            record[HK * DK + HV * DV + h] = log_decay_of(a[(u64)(first + t) * A_STRIDE + h], decay_of(a_log, dt_bias, h));
        }
    }
}

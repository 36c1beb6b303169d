// One token of the gated delta rule on 32 columns of a head's state, held in the registers of 128 threads: thread (group of
// 16, lane of 8) has rows group, group + 16, ... of 4 columns. The formula stands in gated_delta.cu.
#pragma once
#include "ptx.cuh"

#ifndef LOG
#define LOG 0
#endif
#define COLUMNS 32
#define BLOCKS ((DV + COLUMNS - 1) / COLUMNS)
#define SHARE (HV / HK)
#define GROUPS 16
#define ROWS ((DK + GROUPS - 1) / GROUPS)
#define TILE 8
#define RECORD (HK * DK + HV * (DV + 1))

/// A few tokens as one head sees them: q and k, raw and then normed in place, and their gates.
struct Tokens {
    float q[TILE][ROWS * GROUPS];
    float k[TILE][ROWS * GROUPS];
    float qk[TILE], beta[TILE], log_decay[TILE];
};

/// Sums of the four warps, two buffers by turns: a block is at most one token ahead of its slowest warp.
struct Sums {
    float4 parts[2][2][4][COLUMNS / 4];
};

/// This thread's part of the state.
struct Part {
    float4 s[ROWS];
    u32 group, lane, column;
    bool valid;
};

static __device__ __forceinline__ float4 zero4() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

static __device__ __forceinline__ float log_decay_of(float a, float a_log, float dt_bias) {
    float x = a + dt_bias;
    // Beyond 20 softplus(x) and x agree in f32.
    return -expf(a_log) * (x > 20.0f ? x : log1pf(expf(x)));
}

/// Norms q and k of token t in place; one warp calls it. Values past DK are zero and stay so.
static __device__ __forceinline__ void norm_token(Tokens& tokens, u32 t, u32 lane) {
    constexpr int WIDTH = ROWS * GROUPS, EACH = (WIDTH + 31) / 32;
    float x[EACH], z[EACH], qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        u32 j = i * 32 + lane;
        x[i] = j < WIDTH ? tokens.q[t][j] : 0.0f;
        z[i] = j < WIDTH ? tokens.k[t][j] : 0.0f;
        qq = fmaf(x[i], x[i], qq);
        kk = fmaf(z[i], z[i], kk);
        qk = fmaf(x[i], z[i], qk);
    }
    float q_factor = 1.0f / (sqrtf(warp_sum(qq) + 1e-6f) * sqrtf((float)DK)), k_factor = 1.0f / sqrtf(warp_sum(kk) + 1e-6f);
    qk = warp_sum(qk);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        u32 j = i * 32 + lane;
        if (j < WIDTH) {
            tokens.q[t][j] = x[i] * q_factor;
            tokens.k[t][j] = z[i] * k_factor;
        }
    }
    if (lane == 0) tokens.qk[t] = qk * q_factor * k_factor;
}

/// `s = decay * s + k u^T` on one row.
static __device__ __forceinline__ void update(float4& s, float decay, float k, const float4& u) {
    s.x = fmaf(k, u.x, s.x * decay);
    s.y = fmaf(k, u.y, s.y * decay);
    s.z = fmaf(k, u.z, s.z * decay);
    s.w = fmaf(k, u.w, s.w * decay);
}

/// Sum over the four groups of a warp, which lie 8 lanes apart.
static __device__ __forceinline__ float4 sum_groups(float4 x) {
#pragma unroll
    for (int lane = 8; lane <= 16; lane <<= 1) {
        x.x += __shfl_xor_sync(FULL_WARP, x.x, lane);
        x.y += __shfl_xor_sync(FULL_WARP, x.y, lane);
        x.z += __shfl_xor_sync(FULL_WARP, x.z, lane);
        x.w += __shfl_xor_sync(FULL_WARP, x.w, lane);
    }
    return x;
}

static __device__ __forceinline__ void add(float4& x, const float4& y) {
    x.x += y.x;
    x.y += y.y;
    x.z += y.z;
    x.w += y.w;
}

/// Columns from `block_column` on of the state at `s_block` [DK, DV].
static __device__ __forceinline__ void load_part(Part& part, const float* s_block, u32 block_column) {
    part.group = threadIdx.x / 8;
    part.lane = threadIdx.x % 8;
    part.column = block_column + part.lane * 4;
    part.valid = part.column < DV;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        u32 row = r * GROUPS + part.group;
        part.s[r] = part.valid && row < DK ? *(const float4*)(s_block + row * DV + part.column) : zero4();
    }
}

static __device__ __forceinline__ void store_part(const Part& part, float* s_block) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        u32 row = r * GROUPS + part.group;
        if (part.valid && row < DK) *(float4*)(s_block + row * DV + part.column) = part.s[r];
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

/// Token t on the state: u and y of this thread's columns (all groups get the same bits). One barrier.
static __device__ __forceinline__ void step(Part& part, const Tokens& tokens, Sums& sums, u32 t, const float4& v, float4& u,
                                            float4& y) {
    const u32 warp = threadIdx.x / 32;
    float decay = expf(tokens.log_decay[t]);
    float4 ks = zero4(), qs = zero4();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        u32 row = r * GROUPS + part.group;
        float k = tokens.k[t][row], q = tokens.q[t][row];
        const float4& s = part.s[r];
        float4 d = make_float4(s.x * decay, s.y * decay, s.z * decay, s.w * decay);
        ks = make_float4(fmaf(k, d.x, ks.x), fmaf(k, d.y, ks.y), fmaf(k, d.z, ks.z), fmaf(k, d.w, ks.w));
        qs = make_float4(fmaf(q, d.x, qs.x), fmaf(q, d.y, qs.y), fmaf(q, d.z, qs.z), fmaf(q, d.w, qs.w));
    }
    ks = sum_groups(ks);
    qs = sum_groups(qs);
    if (threadIdx.x % 32 < 8) {
        sums.parts[t & 1][0][warp][part.lane] = ks;
        sums.parts[t & 1][1][warp][part.lane] = qs;
    }
    __syncthreads();
    ks = sums.parts[t & 1][0][0][part.lane];
    qs = sums.parts[t & 1][1][0][part.lane];
#pragma unroll
    for (int w = 1; w < 4; w++) {
        add(ks, sums.parts[t & 1][0][w][part.lane]);
        add(qs, sums.parts[t & 1][1][w][part.lane]);
    }
    float beta = tokens.beta[t], qk = tokens.qk[t];
    u = make_float4(beta * (v.x - ks.x), beta * (v.y - ks.y), beta * (v.z - ks.z), beta * (v.w - ks.w));
    y = make_float4(fmaf(qk, u.x, qs.x), fmaf(qk, u.y, qs.y), fmaf(qk, u.z, qs.z), fmaf(qk, u.w, qs.w));
#pragma unroll
    for (int r = 0; r < ROWS; r++) update(part.s[r], decay, tokens.k[t][r * GROUPS + part.group], u);
}

/// Says that this block has read what all blocks of a key head share; true for the last of them, which may replace it.
/// All threads call it, after their reads; counters of a sequence are [HK], zero before and after.
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

/// Keys and decays of `rows` rows from `first` on, as records from `record` on. For the last reader of a key head.
static __device__ __forceinline__ void write_keys(float* record, const Tokens& tokens, const float* a, const float* a_log,
                                                  const float* dt_bias, u32 first, u32 rows, u32 key_head) {
    for (u32 t = 0; t < rows; t++, record += RECORD) {
        for (u32 i = threadIdx.x; i < DK; i += 128) record[key_head * DK + i] = tokens.k[t][i];
        // The decays of all value heads that read this key head.
        if (threadIdx.x < SHARE) {
            u32 h = key_head * SHARE + threadIdx.x;
            record[HK * DK + HV * DV + h] = log_decay_of(a[(u64)(first + t) * A_STRIDE + h], a_log[h], dt_bias[h]);
        }
    }
}

// The work before attention, in one launch. It rotates queries and keys (rope.cuh), writes queries to
// a buffer [T, H, D], and writes keys and values to their pages (attention.cu).
//
// Constants: H, KV, D, KV_F16, KV_BITS (attention_prepare only, 8 or 4 for coded pools); R, NORM, AXES of the rotation;
// QUERIES and KEYS, 0 if another launch handles the queries, or the keys and values. q, k and v have their own strides
// from row to row and from head to head. A row beyond those of all sequences writes no page.
// EARLY=1: no kernel that may still run writes positions, tables or row_start. So angles and pages are found while
// earlier kernels finish.
// Launch:
//   attention_prepare        one warp a head of q, k or v; block 128, grid ceil(T HEADS / 4)
//   attention_prepare_rows   for many rows, if heads are rotated as a whole (R = D) and not normed: grid T, block 128
// Bytes: q, k and v once in, once out.
#define RUNS 0 // all rows of a sequence at once
#include "kept.cuh"
#include "paged.cuh"
#include "rope.cuh"

#if KV_F16
/// A value as pages store it; values beyond the range of f16 saturate.
static __device__ __forceinline__ kv_t kept(float x) { return two_f16(x, 0.0f).x; }
#elif !KV_BITS
static __device__ __forceinline__ kv_t kept(float x) { return x; }
#endif

#define Q_HEADS (QUERIES ? H : 0)
#define HEADS (Q_HEADS + (KEYS ? 2 * KV : 0))

struct Heads {
    const float* at;
    u64 row, head;
};

struct RopeArgs {
    const i32* positions;
    const float* inverse;
    const float* norm; // null without a norm
    float eps;
};

// `parameters.rs` passes them as words of 64 bits.
static_assert(sizeof(Heads) == 3 * sizeof(u64) && sizeof(RopeArgs) == 4 * sizeof(u64), "words of a parameter");

extern "C" __global__ void __launch_bounds__(128)
attention_prepare(
#include "attention_prepare.params"
) {
    let_next_start();
    if (!EARLY) wait_for_inputs();
    const u32 unit = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 row = min(unit / HEADS, rows - 1), head = unit % HEADS;
    const bool is_query = head < Q_HEADS;
    // Member by member: a struct that is selected at run time would go through local memory.
    const RopeArgs rope = {is_query ? rope_q.positions : rope_k.positions, is_query ? rope_q.inverse : rope_k.inverse,
                       is_query ? rope_q.norm : rope_k.norm, is_query ? rope_q.eps : rope_k.eps};
    const Angles angles(rope.positions, rope.inverse, rows, row);
    u32 b = 0, own = 0;
    const bool located = is_query || locate(row_start, sequences, 1, 1, row, b, own);
    const u32 at = is_query || !located ? 0 : position[b] + own, page = is_query || !located ? 0 : table[b * pages + at / PAGE];
    if (EARLY) wait_for_inputs();
    if (unit / HEADS >= rows || !located) return;
    if (is_query) {
        float* to = rotated + ((u64)row * H + head) * D;
        rotate_head(q.at + row * q.row + head * q.head, angles, rope.norm, rope.eps, [&](u32 i, float value) { to[i] = value; });
        return;
    }
    const u32 kv = (head - Q_HEADS) % KV;
#if KV_BITS
    // A group of 32 values is coded as a whole: the warp collects its head first.
    __shared__ float collected[4][D];
    float* mine = collected[threadIdx.x / 32];
    const bool is_key = head < Q_HEADS + KV;
    if (is_key) {
        rotate_head(k.at + row * k.row + kv * k.head, angles, rope.norm, rope.eps, [&](u32 i, float value) { mine[i] = value; });
    } else {
        const float* from = v.at + row * v.row + kv * v.head;
#pragma unroll
        for (u32 i = lane; i < D; i += 32) mine[i] = from[i];
    }
    __syncwarp();
    u8* to = (is_key ? keys : values) + head_page(page, kv);
#pragma unroll
    for (u32 group = 0; group < GROUPS_OF_ROW; group++) store_group(to, at % PAGE, group, mine[group * 32 + lane]);
#else
    const u64 place = (((u64)page * KV + kv) * PAGE + at % PAGE) * D;
    if (head < Q_HEADS + KV) {
        rotate_head(k.at + row * k.row + kv * k.head, angles, rope.norm, rope.eps,
                  [&](u32 i, float value) { keys[place + i] = kept(value); });
    } else {
        const float* from = v.at + row * v.row + kv * v.head;
        for (u32 i = lane; i < D; i += 32) values[place + i] = kept(from[i]);
    }
#endif
}

#if R == D && !NORM && !KV_BITS
static __device__ __forceinline__ void keep_four(float* to, float4 x) { *(float4*)to = x; }
static __device__ __forceinline__ void keep_four(f16* to, float4 x) {
    *(uint2*)to = make_uint2(pack_f16(x.x, x.y), pack_f16(x.z, x.w));
}

// A block has a row, so the row's angles are computed once. D is a multiple of 8; q, k and v begin at multiples of 16
// bytes, and their rows and heads are multiples of 4 apart.
extern "C" __global__ void __launch_bounds__(128)
attention_prepare_rows(
#include "attention_prepare.params"
) {
    take_turn();
    constexpr u32 HALF = D / 2, FOURS = D / 8;
    // Of queries, and of keys.
    __shared__ float4 cosines[2][FOURS], sines[2][FOURS];
    const u32 row = blockIdx.x, which = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (which < 2) {
        const Angles angles(which ? rope_k.positions : rope_q.positions, which ? rope_k.inverse : rope_q.inverse, rows, row);
#pragma unroll
        for (int j = 0; j < TURNS; j++) {
            const u32 i = j * 32 + lane;
            if (i < HALF) ((float*)cosines[which])[i] = angles.cosine[j], ((float*)sines[which])[i] = angles.sine[j];
        }
    }
    u32 b = 0, own = 0;
    const bool located = KEYS && locate(row_start, sequences, 1, 1, row, b, own);
    const u32 at = located ? position[b] + own : 0, page = located ? table[b * pages + at / PAGE] : 0;
    __syncthreads();
    // Four pairs of a head. `put` receives a column, and the values from it on.
    auto rotate_four = [&](u32 of, const float* head, u32 four, auto put) {
        const float4 x = ((const float4*)head)[four], y = ((const float4*)(head + HALF))[four];
        const float4 c = cosines[of][four], s = sines[of][four];
        put(4 * four, make_float4(x.x * c.x - y.x * s.x, x.y * c.y - y.y * s.y, x.z * c.z - y.z * s.z, x.w * c.w - y.w * s.w));
        put(HALF + 4 * four, make_float4(y.x * c.x + x.x * s.x, y.y * c.y + x.y * s.y, y.z * c.z + x.z * s.z, y.w * c.w + x.w * s.w));
    };
    for (u32 i = threadIdx.x; i < Q_HEADS * FOURS; i += 128) {
        const u32 head = i / FOURS;
        float* to = rotated + ((u64)row * H + head) * D;
        rotate_four(0, q.at + row * q.row + head * q.head, i % FOURS, [&](u32 d, float4 x) { keep_four(to + d, x); });
    }
    if (!located) return;
    for (u32 i = threadIdx.x; i < KV * FOURS; i += 128) {
        const u32 kv = i / FOURS;
        kv_t* to = keys + (((u64)page * KV + kv) * PAGE + at % PAGE) * D;
        rotate_four(1, k.at + row * k.row + kv * k.head, i % FOURS, [&](u32 d, float4 x) { keep_four(to + d, x); });
    }
    for (u32 i = threadIdx.x; i < KV * (D / 4); i += 128) {
        const u32 kv = i / (D / 4), d = i % (D / 4) * 4;
        kv_t* to = values + (((u64)page * KV + kv) * PAGE + at % PAGE) * D;
        keep_four(to + d, *(const float4*)(v.at + row * v.row + kv * v.head + d));
    }
}
#endif

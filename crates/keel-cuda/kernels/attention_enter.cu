// What comes before attention in a decode step, in one launch: queries and keys are turned (rope.cuh), queries go to a buffer
// [T, H, D], keys and values to their pages (attention.cu).
//
// Constants: H, KV, D, KV_BF16, and of the rotation R, NORM, AXES; QUERIES and KEYS, 0 where another launch sees to the
// queries, or to keys and values. q, k and v have strides of their own from row to row and from head to head. A row beyond
// those of all sequences writes no page.
// Launch: one warp a head of q, k or v; block 128, grid ceil(T HEADS / 4). Bytes: q, k and v once in, once out.
#include "paged.cuh"
#include "rope.cuh"

#if KV_BF16
typedef bf16 kv_t;
#else
typedef float kv_t;
#endif

#define Q_HEADS (QUERIES ? H : 0)
#define HEADS (Q_HEADS + (KEYS ? 2 * KV : 0))

struct Heads {
    const float* at;
    u64 row, head;
};

struct Turn {
    const i32* positions;
    const float* inverse;
    const float* norm; // null without one
    float eps;
};

extern "C" __global__ void __launch_bounds__(128)
attention_enter(Heads q, Heads k, Heads v, Turn turn_q, Turn turn_k, float* turned, kv_t* keys, kv_t* values, const u32* table,
                const u32* row_start, const u32* position, u32 sequences, u32 pages, u32 rows) {
    take_turn();
    const u32 unit = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 row = unit / HEADS, head = unit % HEADS;
    if (row >= rows) return;
    if (head < Q_HEADS) {
        float* to = turned + ((u64)row * H + head) * D;
        turn_head(q.at + row * q.row + head * q.head, turn_q.positions, turn_q.inverse, turn_q.norm, turn_q.eps, rows, row,
                  [&](u32 i, float value) { to[i] = value; });
        return;
    }
    u32 b, own;
    if (!locate(row_start, sequences, 1, 1, row, b, own)) return;
    const u32 at = position[b] + own, page = table[b * pages + at / PAGE], kv = (head - Q_HEADS) % KV;
    const u64 place = (((u64)page * KV + kv) * PAGE + at % PAGE) * D;
    if (head < Q_HEADS + KV) {
        turn_head(k.at + row * k.row + kv * k.head, turn_k.positions, turn_k.inverse, turn_k.norm, turn_k.eps, rows, row,
                  [&](u32 i, float value) { keys[place + i] = From<kv_t>::f32(value); });
    } else {
        const float* from = v.at + row * v.row + kv * v.head;
        for (u32 i = lane; i < D; i += 32) values[place + i] = From<kv_t>::f32(from[i]);
    }
}

// Causal attention of a decode step of many sequences, on tensor cores: attention_decode of attention_tensor.cu for
// whole keys (one split), with the same formula, operands, roundings and order of sums.
//
// With one block for each short sequence, most of a block's time would be its start and its end. So the grid has the
// blocks that the device runs at once, and each takes a share of the items. An item is 16 pairs (row, head of the
// group) of a sequence and a key head. While an item is computed, keys, values and queries of the next ones are on
// their way.
//
// Macros: those of attention_tiles.cuh; WARPS; KV_STAGES (chunks of keys and of values that a warp has under way, at
//   least 1); BLOCKS (of a multiprocessor); EARLY=1: no kernel that may still run writes earlier steps' keys and
//   values, row_start, position or table.
// Launch:
//   attention_decode_persistent   grid (blocks that run at the same time), block 32 WARPS, shared memory
//                    MANY_SHARED(items) bytes; items = COST_RATIO ceil(KV (ceil(T G / 16) + B) / blocks) + 1.
//
// Floor: 4 KV D bytes a key; coded 2 KV D (KV_BITS / 8 + 1 / 16).

#include "decode_chunk.cuh"

// Keys between two chunks of a warp. Which warp takes a key depends on the key's position alone.
#define STEP (WARPS * CHUNK)
#define THREADS (32 * WARPS)
// Pairs whose sums pass through shared memory together.
#define SUM_ROWS (D > 64 ? 4 : 8)

// 16 pairs of a sequence from pair 16 unit on, and a key head.
struct __align__(16) Item {
    u32 sequence, first_row, start, packed;

    __device__ __forceinline__ u32 kv() const { return packed % 4096; }
    __device__ __forceinline__ u32 count() const { return packed / 4096 % 16 + 1; }
    __device__ __forceinline__ u32 first() const { return packed >> 16 << 4; }
    __device__ __forceinline__ u32 first_position() const { return start + first() / G; }
    __device__ __forceinline__ u32 last_position() const { return start + (first() + count() - 1) / G; }
    // The keys that any of its rows sees.
    __device__ __forceinline__ u32 from() const {
        const u32 low = first_position() + 1;
        return WINDOW > 0 && low > WINDOW ? (low - WINDOW) / 64 * 64 : 0;
    }
    __device__ __forceinline__ u32 to() const { return last_position() + 1; }
};

// The sums of all warps for some pairs of an item.
struct WarpSums {
    float sums[WARPS][SUM_ROWS][D];
    float largest[WARPS][SUM_ROWS], total[WARPS][SUM_ROWS];
};

// Of an item there are two queries and two sums: the next item's are written while this one's are read.
#define QUERY_BYTES (2 * 16 * LINE)
#define MANY_SHARED(items) (WARPS * KV_STAGES * 2 * CHUNK_BYTES + 2 * (QUERY_BYTES + sizeof(WarpSums)) + (items) * sizeof(Item))

// The cost of an item: its start and end, and its chunks. A limit keeps the greatest cost COST_RATIO times the least,
// so that a block's list has room for its share of any items.
#define ITEM_COST 8
#define CHUNKS_MAX 64
#define COST_RATIO 8
static_assert(ITEM_COST + CHUNKS_MAX <= COST_RATIO * (ITEM_COST + 1), "see above");

// The units of a sequence, all of the same cost.
struct Units {
    u32 first_row, rows, start, count, cost;

    __device__ Units(const u32* row_start, const u32* position, u32 sequence, u32 sequences) : first_row(0), rows(0), start(0), count(0), cost(0) {
        if (sequence >= sequences) return;
        first_row = row_start[sequence], rows = row_start[sequence + 1] - first_row, start = position[sequence];
        count = (rows * G + 15) / 16;
        const u32 end = start + rows, keys = WINDOW > 0 ? min(end, WINDOW + rows) : end;
        cost = ITEM_COST + min((keys + CHUNK - 1) / CHUNK, CHUNKS_MAX);
    }
};

// Lists this block's items and returns their number. Items lie in a row, key head by key head and sequence by sequence;
// each block takes those that begin in its share of the cost of all.
static __device__ __forceinline__ u32 list_items(Item* list, const u32* row_start, const u32* position, u32 sequences) {
    __shared__ u32 warp_costs[WARPS], listed;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) listed = 0;
    u32 all = 0;
    for (u32 b = lane; b < sequences; b += 32) {
        const Units units(row_start, position, b, sequences);
        all += units.count * units.cost;
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) all += __shfl_xor_sync(FULL_WARP, all, d);
    const u64 whole = (u64)all * KV, low = whole * blockIdx.x / gridDim.x, high = whole * (blockIdx.x + 1) / gridDim.x;
    u32 before = 0;
    for (u32 base = 0; base < sequences; base += THREADS) {
        const u32 b = base + threadIdx.x;
        const Units units(row_start, position, b, sequences);
        u32 until = units.count * units.cost;
        const u32 own = until;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const u32 lower = __shfl_up_sync(FULL_WARP, until, d);
            if (lane >= d) until += lower;
        }
        if (lane == 31) warp_costs[warp] = until;
        __syncthreads();
        u32 at = before + until - own;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            if (w < warp) at += warp_costs[w];
            before += warp_costs[w];
        }
        if (own > 0)
            for (u32 kv = low / all; kv < KV && (u64)kv * all < high; kv++)
                for (u32 unit = 0; unit < units.count; unit++) {
                    const u64 place = (u64)kv * all + at + unit * units.cost;
                    if (place < low || place >= high) continue;
                    const u32 count = min(units.rows * G - unit * 16, 16);
                    list[atomicAdd(&listed, 1)] = {b, units.first_row, units.start, unit << 16 | (count - 1) << 12 | kv};
                }
        __syncthreads();
    }
    return listed;
}

// A chunk of 16 keys of an item.
struct Place {
    u32 item, key;
};

// A thread's part of the queries of an item: on their way in registers, then in shared memory.
struct Queries {
    static constexpr u32 QUADS = (16 * (D / 4) + THREADS - 1) / THREADS;
    float4 coming[QUADS];

    __device__ __forceinline__ void fetch(const float* q, const Item item) {
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) {
            const u32 m = (threadIdx.x + i * THREADS) / (D / 4), d = (threadIdx.x + i * THREADS) % (D / 4) * 4;
            coming[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (m < item.count())
                coming[i] = *(const float4*)(q + (u64)(item.first_row + (item.first() + m) / G) * Q_STRIDE + (item.kv() * G + (item.first() + m) % G) * D + d);
        }
    }

    __device__ __forceinline__ void store(f16* tile) const {
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) {
            const u32 m = (threadIdx.x + i * THREADS) / (D / 4), d = (threadIdx.x + i * THREADS) % (D / 4) * 4;
            if (m < 16) put_query(tile + m * LINE, d, coming[i]);
        }
    }
};

// Writes the rows of an item: its warps attended to different keys for the same pairs. The sums are divided by the
// total here, because attention_merge does not run.
static __device__ __forceinline__ void write_rows(WarpSums& result, const float (&sums)[D / 8][4], const Softmax& softmax, const Item& item, float scale, float* y) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = item.count();
#pragma unroll
    for (int begin = 0; begin < 16; begin += SUM_ROWS) {
        if (begin >= count) break;
        if (begin > 0) __syncthreads(); // the pairs before have been read
        const int half = begin / 8;
        const u32 m = lane / 4 + 8 * half - begin, pairs = min(count - begin, SUM_ROWS);
        if (m < pairs && softmax.total[half] != 0.0f) put_sums(result.sums[warp][m], sums, half);
        if (m < pairs && lane % 4 == 0) {
            result.largest[warp][m] = softmax.largest[half] * scale;
            result.total[warp][m] = softmax.total[half];
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < pairs * (D / 2); i += THREADS) {
            const u32 pair = i / (D / 2), d = i % (D / 2) * 2;
            const Combined all = combine_warps<SUM_ROWS>(&result.sums[0][0][0], result.largest[0], result.total[0], pair, d);
            const u32 in_sequence = item.first() + begin + pair;
            const u64 row = item.first_row + in_sequence / G, head = item.kv() * G + in_sequence % G;
            const float f = 1.0f / all.total;
            *(float2*)(y + (row * H + head) * D + d) = make_float2(all.sum.x * f, all.sum.y * f);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
attention_decode_persistent(
#include "attend.params"
) {
    let_next_start();
    if (!EARLY) wait_for_inputs();
    DYNAMIC_SHARED(u8, shared);
    const u32 warp = threadIdx.x / 32;
    u8* const chunks = shared + warp * (KV_STAGES * 2 * CHUNK_BYTES);
    f16* const q_tiles = (f16*)(shared + WARPS * KV_STAGES * 2 * CHUNK_BYTES);
    WarpSums* const results = (WarpSums*)(q_tiles + 2 * 16 * LINE);
    Item* const list = (Item*)(results + 2);
    const u32 items = list_items(list, row_start, position, sequences);
    if (items == 0) {
        if (EARLY) wait_for_inputs();
        return;
    }

    // This warp's chunks, item by item.
    auto enter = [&](u32 item) {
        for (; item < items; item++) {
            const u32 from = list[item].from(), key = from + (warp * CHUNK + STEP - from % STEP) % STEP;
            if (key < list[item].to()) return Place{item, key};
        }
        return Place{items, 0};
    };
    auto next = [&](Place at) { return at.key + STEP < list[at.item].to() ? Place{at.item, at.key + STEP} : enter(at.item + 1); };
    auto load = [&](u8* chunk, const kv_t* pool, Place at, bool now = true) {
        if (at.item < items && now) {
            const Item item = list[at.item];
            const u32 page = table[item.sequence * pages + at.key / PAGE];
            fetch_chunk(chunk, pool, page, item.kv(), at.key % PAGE, item.to() - at.key);
        }
        copy_commit();
    };
    auto key_chunk = [&](u32 stage) { return chunks + stage * (2 * CHUNK_BYTES); };
    auto value_chunk = [&](u32 stage) { return chunks + (stage * 2 + 1) * CHUNK_BYTES; };
    auto is_old = [&](Place at) { return !EARLY || at.item == items || at.key + CHUNK <= list[at.item].start; };

    Place at = enter(0), ahead = at;
#pragma unroll
    for (u32 s = 0; s < KV_STAGES; s++) {
        load(key_chunk(s), keys, ahead, is_old(ahead));
        load(value_chunk(s), values, ahead, is_old(ahead));
        if (ahead.item < items) ahead = next(ahead);
    }
    if (EARLY) {
        wait_for_inputs();
        Place late = at;
        bool any = false;
#pragma unroll
        for (u32 s = 0; s < KV_STAGES; s++) {
            if (late.item == items) continue;
            if (!is_old(late)) {
                load(key_chunk(s), keys, late);
                load(value_chunk(s), values, late);
                any = true;
            }
            late = next(late);
        }
        if (any) copy_wait<0>();
    }

    Queries queries;
    queries.fetch(q, list[0]);
    queries.store(q_tiles);
    __syncthreads();

    const float factor = scale * 1.4426950408889634f;
    u32 stage = 0;
    for (u32 n = 0; n < items; n++) {
        if (n + 1 < items) queries.fetch(q, list[n + 1]);
        f16* const q_tile = q_tiles + n % 2 * (16 * LINE);
        const Item item = list[n];
        const u32 first = item.first(), to = item.to();
        Softmax softmax;
        softmax.start();
        float sums[D / 8][4];
#pragma unroll
        for (int i = 0; i < D / 8; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
        while (at.item == n) {
            copy_wait<2 * KV_STAGES - 1>();
            __syncwarp();
            float scores[2][4];
            multiply_chunk_keys(scores, q_tile, key_chunk(stage));
            __syncwarp();
            load(key_chunk(stage), keys, ahead);
            if (at.key + CHUNK > item.first_position() + 1 || at.key + CHUNK > to || (WINDOW > 0 && at.key + WINDOW <= item.last_position()))
                hide<2>(scores, item.start, first, at.key, to, Until{});
            float shrink[2];
            softmax.weigh<2>(scores, factor, shrink);
            shrink_sums(sums, shrink);
            copy_wait<2 * KV_STAGES - 1>();
            __syncwarp();
            multiply_chunk_values(sums, scores, value_chunk(stage));
            __syncwarp();
            load(value_chunk(stage), values, ahead);
            if (ahead.item < items) ahead = next(ahead);
            at = next(at);
            if (++stage == KV_STAGES) stage = 0;
        }
        softmax.finish();
        if (n + 1 < items) queries.store(q_tiles + (n + 1) % 2 * (16 * LINE));

        write_rows(results[n % 2], sums, softmax, item, scale, y);
    }
}

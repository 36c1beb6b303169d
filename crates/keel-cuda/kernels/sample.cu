// Draws a token for each row of `width` logits. Candidates are finite logits l, the greatest first, the lower id first
// among equals. Each weighs 2^40 e^((l - max) / temperature), rounded. This follows `keel_array::sampling` to the bit:
// weights are summed as integers, and products and sums of e^x are rounded one by one.
//
// Candidates fall into buckets by (l - max) / temperature. Buckets have the order of the candidates and divide evenly
// the range from the first candidate to the last one that has a weight. Counts and weights of the buckets tell which
// bucket holds a boundary, or which few buckets may hold it if it depends on an earlier boundary. The members of those
// are listed, and one block decides among them in shared memory. If they are too many (thousands of equals), it decides
// among the whole row.
//
//   greatest   grid (R, PARTS): first and last candidate of each part; clears the board
//   weigh      grid (R, PARTS): counts and weights of the buckets; writes the token if that is the greatest logit
//   draw       grid (R, PARTS): lists the members of the buckets that may hold the token or the boundary of top-k or
//              top-p; the last block of a row to arrive decides
//
// draws: float [R, 5]: temperature (below 0: nothing is drawn), top-k, top-p, ln(min-p), and the random number in [0,
// 1).
// ends: Ends [R, PARTS]; boards: Board [R].
// Bytes: the row three times, twice of them from L2: under 1 us for 248,320 logits. The floor is three launches that
// wait for each other, 2 us each, plus the serial work of the block that decides: four trips to L2 for its list and its
// turn, 0.7 us each, and some 40 barriers of 1,024 threads, 0.1 us each with the work between two.
#include "candidates.cuh"

// Where a part of a row begins; parts are as even as possible.
__device__ inline u32 part_start(u32 part, u32 width) { return (u32)((u64)width * part / gridDim.y); }

// This thread's logits of a chunk of the block's part: x[k] is that of `id` + k THREADS, NaN after the end.
struct Logits {
    float x[EACH];
    u32 id;
};

// The block's part of a row, chunk by chunk.
struct Part {
    const float* row;
    u32 start, end;

    __device__ Part(const float* row, u32 width)
        : row(row), start(part_start(blockIdx.y, width)), end(part_start(blockIdx.y + 1, width)) {}
    __device__ Logits chunk(u32 at) const {
        Logits own;
        own.id = at + threadIdx.x;
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) own.x[k] = own.id + k * THREADS < end ? row[own.id + k * THREADS] : NAN;
        return own;
    }
};

// The ends of a row, from those of its parts.
__device__ inline Ends ends_of(const Ends* ends, Ends& shared) {
    if (threadIdx.x < 32) {
        Ends own = NO_ENDS;
        for (u32 i = threadIdx.x; i < gridDim.y; i += 32) own = own + ends[(u64)blockIdx.x * gridDim.y + i];
        own = over_warp(own);
        if (threadIdx.x == 0) shared = own;
    }
    __syncthreads();
    return shared;
}

// A row to draw from.
struct Row {
    const float* logits;
    u32 width;
    float largest, temperature, buckets_per_unit;

    __device__ Row(const float* logits, u32 width, float temperature, Ends ends)
        : logits(logits), width(width), largest(logit_of(ends.first)), temperature(temperature) {
        const float reach = fminf(-exponent(logit_of(ends.last)), -EXPONENT_MIN);
        buckets_per_unit = __fdiv_rn((float)BUCKETS, fmaxf(reach, 1e-20f));
    }
    __device__ float exponent(float logit) const { return __fdiv_rn(__fsub_rn(logit, largest), temperature); }
    __device__ u32 bucket_of(float exponent) const {
        return (u32)fminf(__fmul_rn(-exponent, buckets_per_unit), (float)(BUCKETS - 1));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) greatest(
#include "greatest.params"
) {
    take_turn();
    __shared__ Ends shared[WARPS + 1];
    const u32 row = blockIdx.x;
    const float temperature = draws[(u64)row * DRAW_WORDS];
    if (temperature < 0.0f) return;
    if (blockIdx.y == 0) {
        Board& board = boards[row];
        board.masses[threadIdx.x] = 0;
        board.counts[threadIdx.x] = 0;
        if (threadIdx.x == 0) {
            board.probable = 0;
            board.listed = board.arrived = 0;
        }
    }
    const Part part(logits + (u64)row * width, width);
    const float most = temperature > 0.0f ? 3.402823466e38f : INFINITY;
    Ends best = NO_ENDS;
    for (u32 at = part.start; at < part.end; at += CHUNK) {
        const Logits own = part.chunk(at);
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            const u64 order = order_of(own.x[k], own.id + k * THREADS);
            if (fabsf(own.x[k]) <= most) best = best + Ends{order, order};
        }
    }
    best = over_block(best, shared);
    if (threadIdx.x == 0) ends[(u64)row * gridDim.y + blockIdx.y] = best;
}

extern "C" __global__ void __launch_bounds__(THREADS) weigh(
#include "draw.params"
) {
    take_turn();
    __shared__ Ends both;
    __shared__ Totals sums[WARPS + 1];
    // Low 20 bits of the weights, and the bits above.
    __shared__ u32 counts[BUCKETS], lows[BUCKETS], highs[BUCKETS];
    const Draw draw = draw_of(draws, blockIdx.x);
    const bool is_greedy = draw.temperature == 0.0f;
    if (draw.temperature < 0.0f || (is_greedy && blockIdx.y > 0)) return;
    const float* start = logits + (u64)blockIdx.x * width;
    const Part part(start, width);
    Logits own = part.chunk(part.start);
    const Ends best = ends_of(ends, both);
    if (is_greedy || best.first == 0) {
        if (blockIdx.y == 0 && threadIdx.x == 0) y[blockIdx.x] = best.first == 0 ? 0u : id_of(best.first);
        return;
    }
    const Row row(start, width, draw.temperature, best);
    Totals bucket = {0, 0};
    u64 probable = 0;
    for (u32 at = part.start; at < part.end; at += CHUNK) {
        if (at > part.start) own = part.chunk(at);
        counts[threadIdx.x] = lows[threadIdx.x] = highs[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            const float exponent = row.exponent(own.x[k]);
            if (!is_within(exponent)) continue;
            const u32 i = row.bucket_of(exponent);
            const u64 weight = weight_of(exponent);
            atomicAdd(&counts[i], 1u);
            atomicAdd(&lows[i], (u32)weight & 0xfffffu);
            atomicAdd(&highs[i], (u32)(weight >> 20));
            if (exponent >= draw.log_min_p) probable += weight;
        }
        __syncthreads();
        bucket = bucket + Totals{counts[threadIdx.x], ((u64)highs[threadIdx.x] << 20) + lows[threadIdx.x]};
    }
    Board& board = boards[blockIdx.x];
    if (bucket.count > 0) {
        atomicAdd(&board.counts[threadIdx.x], (u32)bucket.count);
        atomicAdd(&board.masses[threadIdx.x], bucket.mass);
    }
    if (!is_within(draw.log_min_p)) return;
    probable = over_block(Totals{0, probable}, sums).mass;
    if (threadIdx.x == 0) atomicAdd(&board.probable, probable);
}

struct Shared {
    Ends ends[WARPS + 1];
    Totals sums[WARPS + 1];
    // A bit for each bucket whose members are listed, and the number of these members.
    u32 wanted[WARPS], to_list;
    Place place;
    Totals divided[DIVISIONS];
    u64 orders[LISTED];
    u32 held, from;
    bool is_last;
    // Members with their own weights.
    Located few[FEW], found;
    u32 few_held;
};

// Finds the part that holds the candidate after `target` candidates, or after weight `target`. Each thread has a part
// `own` and the totals `before` it.
__device__ inline Place find(Shared& s, Totals before, Totals own, bool by_count, u64 target) {
    __syncthreads();
    const u64 from = by_count ? before.count : before.mass, size = by_count ? own.count : own.mass;
    if (from <= target && target - from < size) s.place = Place{threadIdx.x, before, own};
    __syncthreads();
    return s.place;
}

// Applies the cuts in order: top-k, top-p, min-p, then the token. `boundary` gets its measure (count or weight) and how
// much comes before it, which depends on the boundary before. It returns the weight of the candidates that it keeps.
template <typename F> __device__ inline void cut(const Draw& draw, Totals all, u64 probable, F boundary) {
    Span kept = {all.mass, all.mass};
    if (draw.top_k > 0 && draw.top_k < all.count) kept = boundary(true, Span{draw.top_k - 1, draw.top_k - 1});
    if (draw.top_p < 1.0f) kept = boundary(false, Span{enough(draw.top_p, kept.low) - 1, enough(draw.top_p, kept.high) - 1});
    if (is_within(draw.log_min_p)) kept = Span{min(kept.low, probable), min(kept.high, probable)};
    boundary(false, Span{target_of(draw.uniform, kept.low), target_of(draw.uniform, kept.high)});
}

// Calls f with order and exponent of each member of a bucket in a span of orders, each on some thread of the block.
// Members are looked up in `s.orders` if `held`, else in the row.
template <typename F> __device__ inline void each_member(const Shared& s, const Row& row, bool held, u32 bucket, Span span, F f) {
    const u32 count = held ? s.held : row.width;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        const u64 order = held ? s.orders[i] : order_of(row.logits[i], i);
        if (order < span.low || order > span.high) continue;
        const float exponent = row.exponent(logit_of(order));
        if (is_within(exponent) && row.bucket_of(exponent) == bucket) f(order, exponent);
    }
}

// Copies the members of a bucket in a span of orders to `s.orders`.
__device__ inline void hold(Shared& s, const Row& row, u32 bucket, Span span) {
    __syncthreads();
    if (threadIdx.x == 0) s.held = 0;
    __syncthreads();
    each_member(s, row, false, bucket, span, [&](u64 order, float) { s.orders[atomicAdd(&s.held, 1u)] = order; });
    __syncthreads();
}

// Finds the candidate after `target` (count or weight), within a part of few members. The whole block calls it.
__device__ inline Located locate_among_few(Shared& s, const Row& row, bool held, u32 bucket, Span span, Totals before, bool by_count, u64 target) {
    if (threadIdx.x == 0) s.few_held = 0;
    __syncthreads();
    each_member(s, row, held, bucket, span, [&](u64 order, float exponent) {
        s.few[atomicAdd(&s.few_held, 1u)] = Located{order, weight_of(exponent)};
    });
    __syncthreads();
    if (threadIdx.x < s.few_held) {
        const Located own = s.few[threadIdx.x];
        for (u32 i = 0; i < s.few_held; ++i)
            if (s.few[i].order > own.order) before = before + Totals{1, s.few[i].mass};
        const u64 from = by_count ? before.count : before.mass, size = by_count ? 1 : own.mass;
        if (from <= target && target - from < size) s.found = Located{own.order, before.mass + own.mass};
    }
    __syncthreads();
    return s.found;
}

// Finds the candidate after `target` (count or weight). The whole block calls it. `s.orders` has the members of all
// buckets that matter, unless they are too many.
__device__ inline Located locate(Shared& s, const Row& row, bool is_crowded, Totals before, Totals own, bool by_count, u64 target) {
    Place at = find(s, before, own, by_count, target);
    const u32 bucket = at.part;
    Span span = {0, ~0ull};
    bool held = !is_crowded;
    while (at.within.count > FEW) {
        if (!held && at.within.count <= LISTED) {
            hold(s, row, bucket, span);
            held = true;
        }
        Ends ends = NO_ENDS;
        each_member(s, row, held, bucket, span, [&](u64 order, float) { ends = ends + Ends{order, order}; });
        ends = over_block(ends, s.ends);
        const int bits = 64 - __clzll((i64)(ends.first - ends.last)), shift = bits > 8 ? bits - 8 : 0;
        if (threadIdx.x < DIVISIONS) s.divided[threadIdx.x] = Totals{0, 0};
        __syncthreads();
        each_member(s, row, held, bucket, span, [&](u64 order, float exponent) {
            Totals& part = s.divided[(ends.first - order) >> shift];
            atomicAdd(&part.count, 1ull);
            atomicAdd(&part.mass, weight_of(exponent));
        });
        __syncthreads();
        const Totals part = threadIdx.x < DIVISIONS ? s.divided[threadIdx.x] : Totals{0, 0};
        at = find(s, at.before + sums_of(part, s.sums).before, part, by_count, target);
        const u64 high = ends.first - ((u64)at.part << shift), rest = (1ull << shift) - 1;
        span = Span{high - ends.last > rest ? high - rest : ends.last, high};
    }
    return locate_among_few(s, row, held, bucket, span, at.before, by_count, target);
}

// Adds the members of wanted buckets in the block's part, whose first chunk is `own`, to the list of the row.
__device__ inline void list_wanted(Shared& s, const Row& row, const Part& part, Logits own, Board& board) {
    if (threadIdx.x == 0) s.held = 0;
    __syncthreads();
    for (u32 at = part.start; at < part.end; at += CHUNK) {
        if (at > part.start) own = part.chunk(at);
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            const float exponent = row.exponent(own.x[k]);
            if (!is_within(exponent)) continue;
            const u32 i = row.bucket_of(exponent);
            if (s.wanted[i / 32] >> i % 32 & 1) s.orders[atomicAdd(&s.held, 1u)] = order_of(own.x[k], own.id + k * THREADS);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && s.held > 0) s.from = atomicAdd(&board.listed, s.held);
    __syncthreads();
    for (u32 i = threadIdx.x; i < s.held; i += THREADS) board.list[s.from + i] = s.orders[i];
}

// Returns whether this block is the last of its row to arrive. If so, `s.orders` then has the list.
__device__ inline bool has_list(Shared& s, Board& board) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        s.is_last = atomicAdd(&board.arrived, 1u) == gridDim.y - 1;
        __threadfence();
        s.held = __ldcg(&board.listed);
    }
    __syncthreads();
    if (!s.is_last) return false;
    for (u32 i = threadIdx.x; i < s.held; i += THREADS) s.orders[i] = __ldcg(&board.list[i]);
    __syncthreads();
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(
#include "draw.params"
) {
    take_turn();
    __shared__ Shared s;
    const Draw draw = draw_of(draws, blockIdx.x);
    if (!(draw.temperature > 0.0f)) return;
    const float* start = logits + (u64)blockIdx.x * width;
    const Part part(start, width);
    const Logits first_chunk = part.chunk(part.start);
    Board& board = boards[blockIdx.x];
    const Totals own = {board.counts[threadIdx.x], board.masses[threadIdx.x]};
    const u64 probable = board.probable;
    const Ends best = ends_of(ends, s.ends[0]);
    if (best.first == 0) return;
    const Row row(start, width, draw.temperature, best);
    if (threadIdx.x == 0) s.to_list = 0;
    const Sums sums = sums_of(own, s.sums);
    const Totals before = sums.before, all = sums.all;
    bool is_wanted = false;
    cut(draw, all, probable, [&](bool by_count, Span target) {
        const Place low = find(s, before, own, by_count, target.low);
        const Place high = target.high == target.low ? low : find(s, before, own, by_count, target.high);
        is_wanted |= threadIdx.x >= low.part && threadIdx.x <= high.part;
        // Each member weighs at least 1.
        return Span{low.before.mass + 1, high.before.mass + high.within.mass};
    });
    const u32 wanted = __ballot_sync(ALL_LANES, is_wanted);
    const u32 members = __reduce_add_sync(ALL_LANES, is_wanted ? (u32)own.count : 0u);
    if (threadIdx.x % 32 == 0) {
        s.wanted[threadIdx.x / 32] = wanted;
        atomicAdd(&s.to_list, members);
    }
    __syncthreads();
    const bool is_crowded = s.to_list > LISTED;
    if (is_crowded && blockIdx.y > 0) return;
    if (!is_crowded) {
        list_wanted(s, row, part, first_chunk, board);
        if (!has_list(s, board)) return;
    }
    u64 token = 0;
    cut(draw, all, probable, [&](bool by_count, Span target) {
        const Located at = locate(s, row, is_crowded, before, own, by_count, target.low);
        token = at.order;
        return Span{at.mass, at.mass};
    });
    if (threadIdx.x == 0) y[blockIdx.x] = id_of(token);
}

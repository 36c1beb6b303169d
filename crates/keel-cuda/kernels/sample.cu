// A token for each row of `width` logits. Candidates are finite logits l, the greatest first, the lower id first among equals;
// each weighs 2^40 e^((l - max) / temperature), rounded. See `keel_array::sampling`, which this follows to the bit: weights are
// summed as whole numbers, and products and sums of e^x are rounded one by one.
//
// Candidates fall into buckets by (l - max) / temperature, which follow each other as the candidates do. Counts and weights of the
// buckets say in which of them a boundary lies; its members alone are compared with each other.
//
//   greatest   grid (R, PARTS): first candidate of each part; zeroes the buckets
//   weigh      grid (R, PARTS): counts and weights of the buckets; writes the token where that is the greatest logit
//   draw       grid R: boundaries of top-k, top-p and min-p, and the token
//
// draws: float [R, 5], temperature (below 0: nothing is drawn), top-k, top-p, ln(min-p) and what decides, in [0, 1).
// first: u64 [R, PARTS]; buckets: Totals [R, BUCKETS].
// Bytes: the row once; once more where it is drawn from, and once for each boundary out of the second-level cache. A pass over
// 248,320 logits by one block: 1 MB at about 100 GB/s, 10 us.
#include "common.cuh"

#define BUCKETS 512u
#define BUCKETS_PER_UNIT 18.0f
#define EXPONENT_MIN -27.75f
#define DRAW_WORDS 5
// Members of a bucket that are compared with each other; more are divided further.
#define HELD 1024
#define SPREAD 256
#define DIVISIONS 256

struct Totals {
    u64 count, mass;
};

struct Draw {
    float temperature;
    u64 top_k;
    float top_p, log_min_p, uniform;
};

__device__ inline Draw draw_of(const float* draws, u32 row) {
    const float* words = draws + (u64)row * DRAW_WORDS;
    return Draw{words[0], (u64)words[1], words[2], words[3], words[4]};
}

// e^x for x from EXPONENT_MIN to 0.
__device__ inline float power(float x) {
    const float shifted = __fadd_rn(__fmul_rn(x, 1.44269502f), 12582912.0f);
    const float n = __fadd_rn(shifted, -12582912.0f);
    const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float tail = 0.00138146f;
    tail = __fadd_rn(__fmul_rn(tail, r), 0.00836872f);
    tail = __fadd_rn(__fmul_rn(tail, r), 0.04166839f);
    tail = __fadd_rn(__fmul_rn(tail, r), 0.16666521f);
    tail = __fadd_rn(__fmul_rn(tail, r), 0.49999994f);
    const float result = __fadd_rn(1.0f, __fadd_rn(r, __fmul_rn(__fmul_rn(r, r), tail)));
    return __uint_as_float(__float_as_uint(result) + (__float_as_uint(shifted) << 23));
}

__device__ inline bool is_within(float exponent) { return exponent >= EXPONENT_MIN && exponent <= 0.0f; }
__device__ inline u32 bucket_of(float exponent) { return (u32)__fmul_rn(exponent, -BUCKETS_PER_UNIT); }
__device__ inline u64 weight_of(float exponent) { return __float2ull_rn(__fmul_rn(power(exponent), 1099511627776.0f)); }

// Greater for what comes first; -0 equals 0, NaN comes last.
__device__ inline u64 order_of(float logit, u32 id) {
    const u32 bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    const u32 key = logit != logit ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)key << 32 | (u32)~id;
}

// Of all lanes, the same in each.
__device__ inline u64 warp_greatest(u64 x) {
    for (int step = 16; step > 0; step >>= 1) {
        const u64 other = __shfl_xor_sync(0xffffffffu, x, step);
        x = other > x ? other : x;
    }
    return x;
}
__device__ inline u64 warp_total(u64 x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Parts of a row, as even as can be.
__device__ inline u32 part_start(u32 part, u32 width) { return (u32)((u64)width * part / gridDim.y); }

// The first candidate of a row, out of those of its parts.
__device__ inline u64 first_of(const u64* first, u32 row, u32 parts) {
    const u64* own = first + (u64)row * parts;
    u64 best = 0;
    for (u32 i = 0; i < parts; ++i) best = own[i] > best ? own[i] : best;
    return best;
}

extern "C" __global__ void __launch_bounds__(SPREAD) greatest(const float* logits, const float* draws, u64* first, Totals* buckets, u32 width) {
    take_turn();
    const u32 row = blockIdx.x, part = blockIdx.y;
    const Draw draw = draw_of(draws, row);
    if (draw.temperature < 0.0f) return;
    const u32 share = (BUCKETS + gridDim.y - 1) / gridDim.y;
    for (u32 i = part * share + threadIdx.x; i < min((part + 1) * share, BUCKETS); i += SPREAD)
        buckets[(u64)row * BUCKETS + i] = Totals{0, 0};
    const float* x = logits + (u64)row * width;
    const float most = draw.temperature > 0.0f ? 3.402823466e38f : INFINITY;
    const u32 end = part_start(part + 1, width);
    u64 best = 0;
    for (u32 i = part_start(part, width) + threadIdx.x; i < end; i += SPREAD) {
        const float logit = x[i];
        const bool counts = draw.temperature > 0.0f ? fabsf(logit) <= most : logit == logit;
        const u64 order = counts ? order_of(logit, i) : 0;
        best = order > best ? order : best;
    }
    __shared__ u64 shared[SPREAD / 32];
    best = warp_greatest(best);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < SPREAD / 32; ++i) best = shared[i] > best ? shared[i] : best;
    first[(u64)row * gridDim.y + part] = best;
}

extern "C" __global__ void __launch_bounds__(SPREAD) weigh(const float* logits, const float* draws, const u64* first, Totals* buckets, u32* y, u32 width) {
    take_turn();
    const u32 row = blockIdx.x, part = blockIdx.y;
    const Draw draw = draw_of(draws, row);
    if (draw.temperature < 0.0f) return;
    const u64 best = first_of(first, row, gridDim.y);
    const u32 id = best == 0 ? 0u : ~(u32)best;
    if (draw.temperature == 0.0f || best == 0) {
        if (part == 0 && threadIdx.x == 0) y[row] = id;
        return;
    }
    __shared__ u32 counts[BUCKETS];
    __shared__ u64 masses[BUCKETS];
    for (u32 i = threadIdx.x; i < BUCKETS; i += SPREAD) { counts[i] = 0; masses[i] = 0; }
    __syncthreads();
    const float* x = logits + (u64)row * width;
    const float largest = x[id];
    const u32 end = part_start(part + 1, width);
    for (u32 i = part_start(part, width) + threadIdx.x; i < end; i += SPREAD) {
        const float exponent = __fdiv_rn(__fsub_rn(x[i], largest), draw.temperature);
        if (!is_within(exponent)) continue;
        const u32 bucket = bucket_of(exponent);
        atomicAdd(&counts[bucket], 1u);
        atomicAdd(&masses[bucket], weight_of(exponent));
    }
    __syncthreads();
    Totals* own = buckets + (u64)row * BUCKETS;
    for (u32 i = threadIdx.x; i < BUCKETS; i += SPREAD) {
        if (counts[i] == 0) continue;
        atomicAdd(&own[i].count, (u64)counts[i]);
        atomicAdd(&own[i].mass, masses[i]);
    }
}

// A row with its draw.
struct Row {
    const float* logits;
    u32 width;
    float largest, temperature;

    __device__ float exponent(u32 id) const { return __fdiv_rn(__fsub_rn(logits[id], largest), temperature); }

    // Calls f with order and exponent of each member of a bucket, each on some thread of the block.
    template <typename F> __device__ void each_member(u32 bucket, F f) const {
        // Cheaper than a division, and wide enough for its rounding.
        const float slack = 1e-5f * (fabsf(largest) + temperature * -EXPONENT_MIN);
        const float low = largest - temperature * ((float)(bucket + 1) / BUCKETS_PER_UNIT) - slack;
        const float high = largest - temperature * ((float)bucket / BUCKETS_PER_UNIT) + slack;
#pragma unroll 4
        for (u32 id = threadIdx.x; id < width; id += blockDim.x) {
            const float logit = logits[id];
            if (!(logit >= low && logit <= high)) continue;
            const float x = exponent(id);
            if (is_within(x) && bucket_of(x) == bucket) f(order_of(logit, id), x);
        }
    }
};

struct Shared {
    Totals buckets[BUCKETS];
    Totals divided[DIVISIONS];
    u64 orders[HELD], masses[HELD];
    // What a search has found: the part, what is before it, and what is in it.
    u32 part;
    Totals before, within;
    u32 held;
    u64 mass;
    u32 id;
};

// The first part that together with those before it, `before` among them, measures more than `target`. By one warp.
__device__ inline void find(Shared& s, const Totals* parts, u32 count, bool by_count, u64 target, Totals before) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const u32 lane = threadIdx.x, run = count / 32;
        Totals own = {0, 0};
        for (u32 i = lane * run; i < (lane + 1) * run; ++i) { own.count += parts[i].count; own.mass += parts[i].mass; }
        Totals sum = before;
        for (u32 other = 0; other < 31; ++other) {
            const u64 others = __shfl_sync(0xffffffffu, own.count, other), weight = __shfl_sync(0xffffffffu, own.mass, other);
            if (other < lane) { sum.count += others; sum.mass += weight; }
        }
        for (u32 i = lane * run; i < (lane + 1) * run; ++i) {
            const Totals next = {sum.count + parts[i].count, sum.mass + parts[i].mass};
            if ((by_count ? sum.count : sum.mass) <= target && (by_count ? next.count : next.mass) > target) {
                s.part = i;
                s.before = sum;
                s.within = parts[i];
            }
            sum = next;
        }
    }
    __syncthreads();
}

// The first candidate that together with those before it measures more than `target`: leaves its id in `s.id` and their weight
// in `s.mass`. By the whole block.
__device__ inline void locate(Shared& s, const Row& row, bool by_count, u64 target) {
    find(s, s.buckets, BUCKETS, by_count, target, Totals{0, 0});
    const u32 bucket = s.part;
    u64 low = 0, high = ~0ull, count = s.within.count;
    while (count > HELD) {
        const Totals before = s.before;
        const int bits = 64 - __clzll((i64)(high - low)), shift = bits > 8 ? bits - 8 : 0;
        for (u32 i = threadIdx.x; i < DIVISIONS; i += blockDim.x) s.divided[i] = Totals{0, 0};
        __syncthreads();
        row.each_member(bucket, [&](u64 order, float exponent) {
            if (order < low || order > high) return;
            Totals& part = s.divided[(high - order) >> shift];
            atomicAdd(&part.count, 1ull);
            atomicAdd(&part.mass, weight_of(exponent));
        });
        find(s, s.divided, DIVISIONS, by_count, target, before);
        high -= (u64)s.part << shift;
        const u64 span = (1ull << shift) - 1, least = high > span ? high - span : 0;
        low = low > least ? low : least;
        count = s.within.count;
    }
    const Totals before = s.before;
    __syncthreads();
    if (threadIdx.x == 0) s.held = 0;
    __syncthreads();
    row.each_member(bucket, [&](u64 order, float exponent) {
        if (order < low || order > high) return;
        const u32 at = atomicAdd(&s.held, 1u);
        s.orders[at] = order;
        s.masses[at] = weight_of(exponent);
    });
    __syncthreads();
    for (u32 i = threadIdx.x; i < s.held; i += blockDim.x) {
        const u64 order = s.orders[i];
        Totals sum = before;
        for (u32 j = 0; j < s.held; ++j)
            if (s.orders[j] > order) { sum.count += 1; sum.mass += s.masses[j]; }
        const u64 through = by_count ? sum.count + 1 : sum.mass + s.masses[i];
        if ((by_count ? sum.count : sum.mass) <= target && through > target) {
            s.id = ~(u32)order;
            s.mass = sum.mass + s.masses[i];
        }
    }
    __syncthreads();
}

// The weight of the candidates with at least this exponent. By the whole block.
__device__ inline u64 mass_down_to(Shared& s, const Row& row, float exponent) {
    const u32 last = bucket_of(exponent);
    u64 own = 0;
    for (u32 i = threadIdx.x; i < last; i += blockDim.x) own += s.buckets[i].mass;
    row.each_member(last, [&](u64, float x) { own += x >= exponent ? weight_of(x) : 0; });
    own = warp_total(own);
    __syncthreads();
    if (threadIdx.x == 0) s.mass = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicAdd(&s.mass, own);
    __syncthreads();
    return s.mass;
}

extern "C" __global__ void __launch_bounds__(1024) draw(const float* logits, const float* draws, const u64* first, const Totals* buckets, u32* y, u32 width, u32 parts) {
    take_turn();
    __shared__ Shared s;
    const u32 number = blockIdx.x;
    const Draw draw = draw_of(draws, number);
    if (!(draw.temperature > 0.0f)) return;
    const u64 best = first_of(first, number, parts);
    if (best == 0) return;
    const float* x = logits + (u64)number * width;
    const Row row = {x, width, x[~(u32)best], draw.temperature};
    Totals all = {0, 0};
    for (u32 i = threadIdx.x; i < BUCKETS; i += blockDim.x) {
        s.buckets[i] = buckets[(u64)number * BUCKETS + i];
        all.count += s.buckets[i].count;
        all.mass += s.buckets[i].mass;
    }
    if (threadIdx.x == 0) s.within = Totals{0, 0};
    __syncthreads();
    all.count = warp_total(all.count);
    all.mass = warp_total(all.mass);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&s.within.count, all.count);
        atomicAdd(&s.within.mass, all.mass);
    }
    __syncthreads();
    all = s.within;
    u64 kept = all.mass;
    if (draw.top_k > 0 && draw.top_k < all.count) {
        locate(s, row, true, draw.top_k - 1);
        kept = s.mass;
    }
    if (draw.top_p < 1.0f) {
        const u64 share = (u64)ceil((double)draw.top_p * (double)kept);
        locate(s, row, false, (share < 1 ? 1 : share > kept ? kept : share) - 1);
        kept = s.mass;
    }
    if (is_within(draw.log_min_p)) {
        const u64 probable = mass_down_to(s, row, draw.log_min_p);
        kept = probable < kept ? probable : kept;
    }
    const u64 below = (u64)((double)draw.uniform * (double)kept);
    locate(s, row, false, below < kept ? below : kept - 1);
    if (threadIdx.x == 0) y[number] = s.id;
}

// Sorting rows, and their k largest elements. The order is total: value, then index; NaN last.
// sort: a bitonic network over indices padded to a power of two, one launch for each of its log^2 stages.
// top_k: one block a row finds the next element k times; bytes moved: k passes over the row, from the cache.
// ELEM: element type; KEY: float or i64; DESCENDING: 0 or 1.
#include "common.cuh"

__device__ inline float key_of(float, ELEM x) { return to_f32(x); }
__device__ inline i64 key_of(i64, ELEM x) { return to_i64(x); }

__device__ inline bool comes_first(KEY a, u32 i, KEY b, u32 j) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan || b_nan) return a_nan == b_nan ? i < j : b_nan;
    if (a == b) return i < j;
    return DESCENDING ? a > b : a < b;
}

extern "C" __global__ void number(
#include "sort_number.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < total) order[i] = (u32)(i % padded);
}

// One stage: pairs at distance `step` within runs of `run`, ascending or descending by turns.
extern "C" __global__ void stage(
#include "sort_stage.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    const u64 row = i / padded, at = i % padded, other = at ^ step;
    if (other <= at) return;
    u32* places = order + row * padded;
    const ELEM* values = x + row * width;
    const u32 a = places[at], b = places[other];
    // Places beyond the row come last.
    const bool right = b >= width ? true : a >= width ? false
        : comes_first(key_of(KEY(), values[a]), a, key_of(KEY(), values[b]), b);
    if (right != ((at & run) == 0)) {
        places[at] = b;
        places[other] = a;
    }
}

extern "C" __global__ void gather(
#include "sort_gather.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    const u64 row = i / width;
    const u32 place = order[row * padded + i % width];
    indices[i] = place;
    values[i] = x[row * width + place];
}

extern "C" __global__ void top_k(
#include "top_k.params"
) {
    take_turn();
    __shared__ KEY keys[256];
    __shared__ u32 places[256];
    const ELEM* row = x + blockIdx.x * width;
    KEY last = KEY();
    u32 last_place = 0;
    for (u32 n = 0; n < k; ++n) {
        KEY best = KEY();
        u32 place = 0xffffffffu;
        for (u64 i = threadIdx.x; i < width; i += 256) {
            const KEY key = key_of(KEY(), row[i]);
            if (n > 0 && !comes_first(last, last_place, key, (u32)i)) continue;
            if (place == 0xffffffffu || comes_first(key, (u32)i, best, place)) { best = key; place = (u32)i; }
        }
        keys[threadIdx.x] = best;
        places[threadIdx.x] = place;
        __syncthreads();
        for (int half = 128; half > 0; half /= 2) {
            if (threadIdx.x < half) {
                const int other = threadIdx.x + half;
                const u32 mine = places[threadIdx.x], theirs = places[other];
                const bool take = theirs != 0xffffffffu
                    && (mine == 0xffffffffu || comes_first(keys[other], theirs, keys[threadIdx.x], mine));
                if (take) { keys[threadIdx.x] = keys[other]; places[threadIdx.x] = theirs; }
            }
            __syncthreads();
        }
        last = keys[0];
        last_place = places[0];
        if (threadIdx.x == 0) {
            values[(u64)blockIdx.x * k + n] = row[last_place];
            indices[(u64)blockIdx.x * k + n] = last_place;
        }
        __syncthreads();
    }
}

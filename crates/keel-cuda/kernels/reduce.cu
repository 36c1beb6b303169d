// Reductions of the last axis: one block of 256 threads for each row of `width` gap-free elements.
// Bytes moved: the input once (softmax and layer norm read it from the cache again). ELEM: element type.
// RESULT: the type of y.
#include "common.cuh"

#if defined(ARG)
#define RESULT u32
#else
#define RESULT ELEM
#endif

#if defined(REDUCTION)
// ACC: float or i64. FIRST: neutral element. COMBINE over a and b. FINISH over total and width.
__device__ inline ACC combine(ACC a, ACC b) { return COMBINE; }
__device__ inline float as_acc(float, ELEM x) { return to_f32(x); }
__device__ inline i64 as_acc(i64, ELEM x) { return to_i64(x); }
__device__ inline ELEM from_acc(float x) { return From<ELEM>::f32(x); }
__device__ inline ELEM from_acc(i64 x) { return From<ELEM>::i64_(x); }

extern "C" __global__ void reduce(
#include "reduce.params"
) {
    take_turn();
    __shared__ ACC shared[256];
    const ELEM* row = x + blockIdx.x * width;
    ACC total = FIRST;
    for (u64 i = threadIdx.x; i < width; i += 256) total = combine(total, as_acc(ACC(), row[i]));
    shared[threadIdx.x] = total;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        const ACC total = shared[0];
        y[blockIdx.x] = from_acc((ACC)(FINISH));
    }
}
#endif

#if defined(ARG)
// Index of the element that comes first: BEFORE over a and b decides, the lower index among equals; NaN comes last.
// KEY: float or i64.
__device__ inline float key_of(float, ELEM x) { return to_f32(x); }
__device__ inline i64 key_of(i64, ELEM x) { return to_i64(x); }
__device__ inline bool comes_first(KEY a, u32 i, KEY b, u32 j) {
    const bool a_nan = a != a, b_nan = b != b;
    if (a_nan || b_nan) return a_nan == b_nan ? i < j : b_nan;
    return BEFORE ? true : (a == b && i < j);
}

extern "C" __global__ void arg_reduce(
#include "reduce.params"
) {
    take_turn();
    __shared__ KEY keys[256];
    __shared__ u32 places[256];
    const ELEM* row = x + blockIdx.x * width;
    const u32 start = threadIdx.x < width ? threadIdx.x : 0;
    KEY best = key_of(KEY(), row[start]);
    u32 place = start;
    for (u64 i = start + 256; i < width; i += 256) {
        const KEY key = key_of(KEY(), row[i]);
        if (comes_first(key, (u32)i, best, place)) { best = key; place = (u32)i; }
    }
    keys[threadIdx.x] = best;
    places[threadIdx.x] = place;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            const int other = threadIdx.x + half;
            if (comes_first(keys[other], places[other], keys[threadIdx.x], places[threadIdx.x])) {
                keys[threadIdx.x] = keys[other];
                places[threadIdx.x] = places[other];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) y[blockIdx.x] = places[0];
}
#endif

#if defined(SOFTMAX)
extern "C" __global__ void softmax(
#include "reduce.params"
) {
    take_turn();
    __shared__ float shared[256];
    const ELEM* row = x + blockIdx.x * width;
    ELEM* out = y + blockIdx.x * width;
    float largest = -INFINITY;
    for (u64 i = threadIdx.x; i < width; i += 256) {
        const float value = to_f32(row[i]);
        largest = largest > value || largest != largest ? largest : value;
    }
    shared[threadIdx.x] = largest;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            const float a = shared[threadIdx.x], b = shared[threadIdx.x + half];
            shared[threadIdx.x] = a > b || a != a ? a : b;
        }
        __syncthreads();
    }
    largest = shared[0];
    __syncthreads();
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += 256) sum += expf(to_f32(row[i]) - largest);
    const float total = block_sum(sum, shared);
    for (u64 i = threadIdx.x; i < width; i += 256) out[i] = From<ELEM>::f32(expf(to_f32(row[i]) - largest) / total);
}
#endif

#if defined(LAYER_NORM)
extern "C" __global__ void layer_norm(
#include "layer_norm.params"
) {
    take_turn();
    __shared__ float shared[33];
    const ELEM* row = x + blockIdx.x * width;
    ELEM* out = y + blockIdx.x * width;
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += 256) sum += to_f32(row[i]);
    const float mean = block_sum(sum, shared) / (float)width;
    float squares = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += 256) {
        const float d = to_f32(row[i]) - mean;
        squares += d * d;
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, shared) / (float)width + eps);
    for (u64 i = threadIdx.x; i < width; i += 256)
        out[i] = From<ELEM>::f32((to_f32(row[i]) - mean) * scale * to_f32(weight[i]) + to_f32(bias[i]));
}
#endif

#if defined(CUMSUM)
// ACC: float or i64. Each thread sums its own run, then writes running sums that begin with the total of all runs
// before it.
__device__ inline float as_sum(float, ELEM x) { return to_f32(x); }
__device__ inline i64 as_sum(i64, ELEM x) { return to_i64(x); }
__device__ inline ELEM from_sum(float x) { return From<ELEM>::f32(x); }
__device__ inline ELEM from_sum(i64 x) { return From<ELEM>::i64_(x); }

extern "C" __global__ void cumsum(
#include "reduce.params"
) {
    take_turn();
    __shared__ ACC before[257];
    const ELEM* row = x + blockIdx.x * width;
    ELEM* out = y + blockIdx.x * width;
    const u64 run = (width + 255) / 256;
    const u64 first = threadIdx.x * run, last = first + run < width ? first + run : width;
    ACC total = 0;
    for (u64 i = first; i < last; ++i) total += as_sum(ACC(), row[REVERSE ? width - 1 - i : i]);
    before[threadIdx.x + 1] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        before[0] = 0;
        for (int t = 1; t <= 256; ++t) before[t] += before[t - 1];
    }
    __syncthreads();
    ACC sum = before[threadIdx.x];
    for (u64 i = first; i < last; ++i) {
        const u64 at = REVERSE ? width - 1 - i : i;
        const ACC next = sum + as_sum(ACC(), row[at]);
        out[at] = from_sum(EXCLUSIVE ? sum : next);
        sum = next;
    }
}
#endif

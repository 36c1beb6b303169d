// The two ends of a mixture of experts. One block a token.
#include "common.cuh"

// Softmax probabilities of the k largest of E logits, the lower index among equals, divided by their sum if
// `normalise`. E floats of dynamic shared memory.
extern "C" __global__ void route_top_k(const float* logits, float* weights, u32* chosen, u32 experts, u32 k, u32 normalise) {
    take_turn();
    extern __shared__ float row[];
    __shared__ float keys[256];
    __shared__ u32 places[256];
    __shared__ float shared[33];
    __shared__ float largest;
    const float* x = logits + (u64)blockIdx.x * experts;
    float* w = weights + (u64)blockIdx.x * k;
    u32* e = chosen + (u64)blockIdx.x * k;
    for (u32 i = threadIdx.x; i < experts; i += blockDim.x) row[i] = x[i];
    __syncthreads();
    float sum = 0.0f;
    for (u32 n = 0; n < k; ++n) {
        float best = -INFINITY;
        u32 place = 0xffffffffu;
        for (u32 i = threadIdx.x; i < experts; i += blockDim.x)
            if (row[i] == row[i] && (place == 0xffffffffu || row[i] > best)) { best = row[i]; place = i; }
        keys[threadIdx.x] = best;
        places[threadIdx.x] = place;
        __syncthreads();
        for (int half = blockDim.x / 2; half > 0; half /= 2) {
            if (threadIdx.x < half) {
                const u32 other = threadIdx.x + half;
                const bool better = keys[other] > keys[threadIdx.x] || (keys[other] == keys[threadIdx.x] && places[other] < places[threadIdx.x]);
                if (better) { keys[threadIdx.x] = keys[other]; places[threadIdx.x] = places[other]; }
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) {
            // A row of nothing but NaN still names experts that exist.
            const u32 found = places[0] == 0xffffffffu ? n : places[0];
            if (n == 0) largest = keys[0];
            e[n] = found;
            w[n] = expf(keys[0] - largest);
            sum += w[n];
            row[found] = NAN;
        }
        __syncthreads();
    }
    float total = 0.0f;
    if (normalise) {
        total = sum;
    } else {
        float part = 0.0f;
        for (u32 i = threadIdx.x; i < experts; i += blockDim.x) part += expf(x[i] - largest);
        total = block_sum(part, shared);
    }
    if (threadIdx.x == 0)
        for (u32 n = 0; n < k; ++n) w[n] /= total;
}

#ifdef CHOICES
// The same for up to 512 experts and 32 choices, one warp a token: constants EXPERTS, CHOICES and NORMALISE. Grid ceil(T / 4),
// block 128.
#define HELD ((EXPERTS + 31) / 32)
extern "C" __global__ void __launch_bounds__(128) route_few(const float* logits, float* weights, u32* chosen, u32 tokens) {
    take_turn();
    const u32 lane = threadIdx.x % 32, token = blockIdx.x * 4 + threadIdx.x / 32;
    if (token >= tokens) return;
    float x[HELD], largest = -INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const u32 e = 32 * i + lane;
        const float value = e < EXPERTS ? logits[(u64)token * EXPERTS + e] : -INFINITY;
        // NaN is chosen last.
        x[i] = value == value ? value : -INFINITY;
        largest = fmaxf(largest, x[i]);
    }
    largest = warp_max(largest);
    if (!NORMALISE) {
#pragma unroll
        for (int i = 0; i < HELD; i++) total += expf(x[i] - largest);
        total = warp_sum(total);
    }
    float mine = 0.0f;
    u32 taken = 0, which = 0; // bit i of `taken`: x[i] is chosen; lane j keeps choice j
    for (u32 j = 0; j < CHOICES; j++) {
        float best = -INFINITY;
        u32 at = EXPERTS;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const u32 e = 32 * i + lane;
            if (!(taken >> i & 1) && e < EXPERTS && (at == EXPERTS || x[i] > best)) { best = x[i]; at = e; }
        }
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) {
            const float other = __shfl_xor_sync(0xffffffffu, best, d);
            const u32 place = __shfl_xor_sync(0xffffffffu, at, d);
            if (place < EXPERTS && (at == EXPERTS || other > best || (other == best && place < at))) { best = other; at = place; }
        }
        if (at % 32 == lane) taken |= 1u << (at / 32);
        const float weight = expf(best - largest);
        if (NORMALISE) total += weight;
        if (lane == j) { mine = weight; which = at; }
    }
    if (lane < CHOICES) {
        weights[(u64)token * CHOICES + lane] = mine / total;
        chosen[(u64)token * CHOICES + lane] = which;
    }
}
#endif

// y = sum_j w[j] experts[j] + sigmoid(gate) shared + residual; SHARED: 0 or 1.
extern "C" __global__ void combine(
    const float* experts, const float* weights, const float* shared, const float* gate, const float* residual, float* y,
    u32 choices, u32 width, u32 with_shared
) {
    take_turn();
    const u64 token = blockIdx.y;
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float sum = 0.0f;
    for (u32 j = 0; j < choices; ++j) sum = fmaf(weights[token * choices + j], experts[(token * choices + j) * width + i], sum);
    if (with_shared) sum = fmaf(sigmoid(gate[token]), shared[token * width + i], sum);
    y[token * width + i] = sum + residual[token * width + i];
}

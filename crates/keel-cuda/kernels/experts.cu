// The first and the last operation of a mixture of experts. Rows of logits and of gates may lie `stride` elements
// apart.
#include "common.cuh"
#include "float_order.cuh"

// Softmax probabilities of the k largest of E logits, divided by their sum if `normalise`. Among equals the lower index
// comes first; NaN comes last and has probability 0. E words of dynamic shared memory.
extern "C" __global__ void route_top_k(
#include "route_top_k.params"
) {
    take_turn();
    extern __shared__ u32 ranks[]; // 0: chosen already
    __shared__ u32 keys[256];
    __shared__ u32 places[256];
    __shared__ float shared[33];
    __shared__ float largest;
    const float* x = logits + (u64)blockIdx.x * stride;
    float* w = weights + (u64)blockIdx.x * k;
    u32* e = chosen + (u64)blockIdx.x * k;
    for (u32 i = threadIdx.x; i < experts; i += blockDim.x) ranks[i] = rank_of(x[i]);
    __syncthreads();
    float sum = 0.0f;
    for (u32 n = 0; n < k; ++n) {
        u32 best = 0, place = 0xffffffffu;
        for (u32 i = threadIdx.x; i < experts; i += blockDim.x)
            if (ranks[i] > best) { best = ranks[i]; place = i; }
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
            if (n == 0) largest = ranked(keys[0]);
            e[n] = places[0];
            w[n] = expf(ranked(keys[0]) - largest);
            sum += w[n];
            ranks[places[0]] = 0;
        }
        __syncthreads();
    }
    float total = 0.0f;
    if (normalise) {
        total = sum;
    } else {
        float part = 0.0f;
        for (u32 i = threadIdx.x; i < experts; i += blockDim.x) part += expf(ranked(rank_of(x[i])) - largest);
        total = block_sum(part, shared);
    }
    if (threadIdx.x == 0)
        for (u32 n = 0; n < k; ++n) w[n] /= total;
}

#ifdef CHOICES
#include "routing.cuh"
// The same for up to 512 experts and 32 choices, one warp a token. Grid ceil(T / 4), block 128.
extern "C" __global__ void __launch_bounds__(128) route_few(
#include "route_few.params"
) {
    take_turn();
    const u32 lane = threadIdx.x % 32, token = blockIdx.x * 4 + threadIdx.x / 32;
    if (token >= tokens) return;
    const Choice choice = choose_experts(logits + (u64)token * stride, CHOICES);
    const float probability = probability_of(choice);
    if (lane < CHOICES) {
        weights[(u64)token * CHOICES + lane] = probability;
        chosen[(u64)token * CHOICES + lane] = choice.expert;
    }
}
#endif

// y = sum_j w[j] experts[j] + sigmoid(gate) shared + residual; `with_shared` is 0 or 1, the residual may be null.
extern "C" __global__ void combine(
#include "combine.params"
) {
    take_turn();
    const u64 token = blockIdx.y;
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float sum = 0.0f;
    for (u32 j = 0; j < choices; ++j) sum = fmaf(weights[token * choices + j], experts[(token * choices + j) * width + i], sum);
    if (with_shared) sum = fmaf(sigmoid(gate[token * stride]), shared[token * width + i], sum);
    y[token * width + i] = residual ? sum + residual[token * width + i] : sum;
}

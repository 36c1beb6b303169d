// Element-wise operations. The chain of float operations of one kernel is generated and takes the place of CHAIN:
// a sequence of statements over v0, v1, ... (inputs) that ends by defining `result`.
// Bytes moved: each input once, the output once; values between steps stay in registers.
#include "half.cuh"

__device__ inline float f_max(float a, float b) { return a > b || a != a ? a : b; }
__device__ inline float f_min(float a, float b) { return a < b || a != a ? a : b; }
__device__ inline float gelu_tanh(float x) {
    return x * sigmoid(2.0f * 0.7978846f * (x + 0.044715f * x * x * x));
}

#if defined(CHAIN) && !defined(CHAIN_BY_FOUR)
// ELEM: float, f16 or bf16. PARAMETERS: one pointer and one Strides for each input. LOADS: v0 = x0[s0.at(i)] and so on.
extern "C" __global__ void chain(ELEM* y, u64 n PARAMETERS) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        LOADS
        CHAIN
        y[i] = From<ELEM>::f32(result);
    }
}
#endif

#if defined(CHAIN_BY_FOUR)
// The chain over rows of `fours` * 4 f32, four columns a thread; `n` counts fours, and leaves room for a step of the
// grid. PARAMETERS: a pointer for each input, and the distance of its rows in fours, which is 0 for one row that meets
// all and may begin anywhere. LOADS: w0 = four values of the first input, and so on. PICK: v0 = value j of w0, and so
// on. CHAIN_BY_FOUR=16: y has 16 bits, for products on tensor cores (half.cuh).
extern "C" __global__ void chain_by_four(void* y, u32 n, u32 fours PARAMETERS) {
    take_turn();
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const u32 row = i / fours, column = i - row * fours;
        LOADS
        float results[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            PICK
            CHAIN
            results[j] = result;
        }
        const float4 four = make_float4(results[0], results[1], results[2], results[3]);
#if CHAIN_BY_FOUR == 16
        put_four((u16*)y, row, 4 * fours, 4 * column, four);
#else
        ((float4*)y)[i] = four;
#endif
    }
}
#endif

#if defined(FROM) && defined(TO)
extern "C" __global__ void cast(
#include "cast.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const FROM value = x[from.at(i)];
        y[i] = From<FROM>::IS_FLOAT ? From<TO>::f32(to_f32(value)) : From<TO>::i64_(to_i64(value));
    }
}
#endif

#if defined(INTEGER)
// ELEM: an integer type or flag; EXPRESSION over a (and b) of type i64; RESULT: type of the result.
extern "C" __global__ void integer(
#include "two_operands.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const i64 a = to_i64(x[sx.at(i)]), b = to_i64(z[sz.at(i)]);
        (void)a; (void)b;
        y[i] = From<RESULT>::i64_(EXPRESSION);
    }
}
#endif

#if defined(COMPARE)
// ELEM: a float type; EXPRESSION over floats a and b.
#define RESULT flag
extern "C" __global__ void compare(
#include "two_operands.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const float a = to_f32(x[sx.at(i)]), b = to_f32(z[sz.at(i)]);
        y[i] = flag{(u8)(EXPRESSION)};
    }
}
#endif

#if defined(SELECT)
// ELEM: an unsigned type of the element's size.
extern "C" __global__ void select(
#include "select.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        y[i] = c[sc.at(i)].byte ? a[sa.at(i)] : b[sb.at(i)];
}
#endif

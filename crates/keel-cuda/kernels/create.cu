// Generators: y[i] = f(i), one element a thread. Bytes moved: the output's. ELEM: element type.
// Random numbers are those of keel-cpu: the same for the same seed on every device.
#include "common.cuh"

extern "C" __global__ void fill(
#include "fill.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = From<ELEM>::f32(value);
}

extern "C" __global__ void arange(
#include "arange.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const double x = start + step * (double)i;
    y[i] = From<ELEM>::IS_FLOAT ? From<ELEM>::f32((float)x) : From<ELEM>::i64_((i64)x);
}

__device__ inline u64 random_bits(u64 seed, u64 counter) {
    u64 z = seed + (counter + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ inline float random_uniform(u64 seed, u64 counter) {
    return (float)(random_bits(seed, counter) >> 40) / 16777216.0f;
}

extern "C" __global__ void bits(
#include "random.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) ((u32*)y)[i] = (u32)(random_bits(seed, i) >> 32);
}

extern "C" __global__ void uniform(
#include "random.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) ((float*)y)[i] = random_uniform(seed, i);
}

extern "C" __global__ void normal(
#include "random.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const double u = random_uniform(seed, 2 * i), v = random_uniform(seed, 2 * i + 1);
    ((float*)y)[i] = (float)(sqrt(-2.0 * log(1.0 - u)) * cos(6.283185307179586 * v));
}

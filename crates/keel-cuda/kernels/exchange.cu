// The sum of n elements of the arrays of several devices: y[i] = ((x0[i] + x1[i]) + x2[i]) + ...
// The arrays lie one after the other, `stride` floats each; `shares` is the first element of x0 that is added.
// The order is that of the devices' ranks, so all devices get the same bits. One element a thread, in strides.
// Bytes moved: 4 * n * (count + 1).
#include "common.cuh"

extern "C" __global__ void add_shares(
#include "add_shares.params"
) {
    take_turn();
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        float sum = shares[i];
        for (u32 share = 1; share < count; share++) sum += shares[share * stride + i];
        y[i] = sum;
    }
}

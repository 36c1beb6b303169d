// Moving elements: copies from strides, joins, block replacement. Bytes moved: operands read once, output written once.
// ELEM: an unsigned type of the element's size (u8, u16, u32, u64).
#include "common.cuh"

extern "C" __global__ void copy(
#include "copy.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        y[i] = x[from.at(i)];
}

// One operand of a join: x is [outer, run], and goes to columns at..at + run of y [outer, width].
extern "C" __global__ void join(
#include "join.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        y[i / run * width + at + i % run] = x[from.at(i)];
}

// Writes x at the places `to`, from element `first` of y.
extern "C" __global__ void scatter(
#include "scatter.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        y[first + to.at(i)] = x[from.at(i)];
}

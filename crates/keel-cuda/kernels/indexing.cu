// Gathering by index. Bytes moved: the indices, and each chosen element read and written once.
// ELEM: an unsigned type of the element's size; INDEX: u32 or i32. An index out of range is reported; its element is
// not written.
#include "common.cuh"

// y [count, width] = x[indices] for blocks of `width` elements.
extern "C" __global__ void take(
#include "take.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const INDEX index = indices[i / width];
        if ((u32)index >= entries) {
            report(fault, kernel, 0, (u32)index, entries);
            continue;
        }
        y[i] = x[(u64)index * width + i % width];
    }
}

// y [rows, width] = x[row, indices[row, column]] for rows of `entries` elements.
extern "C" __global__ void take_along(
#include "take.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const INDEX index = indices[i];
        if ((u32)index >= entries) {
            report(fault, kernel, 0, (u32)index, entries);
            continue;
        }
        y[i] = x[i / width * entries + (u32)index];
    }
}

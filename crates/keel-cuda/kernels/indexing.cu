// Gathering by index. Bytes moved: the indices, and each chosen element read and written once.
// ELEM: an unsigned type of the element's size; INDEX: u32 or i32. An index out of range is reported; its element is
// not written.
#include "common.cuh"

// y [count, width] = x[indices] for blocks of `width` elements.
extern "C" __global__ void take(const ELEM* x, const INDEX* indices, ELEM* y, u64 n, u64 width, u32 entries, Fault* fault, u32 kernel) {
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

// y [rows, picks] = x[row, indices[row, pick]] for rows of `width` elements.
extern "C" __global__ void take_along(const ELEM* x, const INDEX* indices, ELEM* y, u64 n, u64 picks, u32 width, Fault* fault, u32 kernel) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const INDEX index = indices[i];
        if ((u32)index >= width) {
            report(fault, kernel, 0, (u32)index, width);
            continue;
        }
        y[i] = x[i / picks * width + (u32)index];
    }
}

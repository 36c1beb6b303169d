// Gates. Bytes moved: operands once, result once.
#include "common.cuh"

// y [rows, width] = silu(x[:, :width]) * x[:, width:], rows of x `stride` apart.
extern "C" __global__ void swiglu(const float* x, u64 stride, float* y, u64 rows, u32 width) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < rows * width; i += (u64)gridDim.x * blockDim.x) {
        const float* row = x + i / width * stride + i % width;
        y[i] = silu(row[0]) * row[width];
    }
}

// y = x * sigmoid(gate); rows of `width` elements with strides of their own.
extern "C" __global__ void sigmoid_gate(
    const float* x, Strides sx, const float* gate, Strides sg, float* y, u64 n
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        y[i] = x[sx.at(i)] * sigmoid(gate[sg.at(i)]);
}

// Gates. Bytes moved: operands once, result once.
#include "half.cuh"

#ifndef QUICK
#define QUICK 0
#endif

// y [rows, width] = silu(x[:, :width]) * x[:, width:], rows of x `stride` apart. QUICK=1: with the bits of the products
// of few rows that end with SwiGLU (linear_few_rows.cu, mixture.cu).
extern "C" __global__ void swiglu(
#include "swiglu.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < rows * width; i += (u64)gridDim.x * blockDim.x) {
        const float* row = x + i / width * stride + i % width;
        const float gate = row[0];
        ((float*)y)[i] = (QUICK ? __fdividef(gate, 1.0f + __expf(-gate)) : silu(gate)) * row[width];
    }
}

// The same in 16 bits, for products on tensor cores (see half.cuh). Eight columns a thread; width is a multiple of 8,
// rows are aligned to 16 bytes.
extern "C" __global__ void swiglu_half(
#include "swiglu.params"
) {
    take_turn();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, eights = width / 8;
    if (i >= rows * eights) return;
    const u32 column = i % eights * 8;
    const float* row = x + i / eights * stride + column;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 gate = *(const float4*)(row + 4 * half), up = *(const float4*)(row + width + 4 * half);
        put_four((u16*)y, i / eights, width, column + 4 * half,
                 make_float4(silu(gate.x) * up.x, silu(gate.y) * up.y, silu(gate.z) * up.z, silu(gate.w) * up.w));
    }
}

// y = x * sigmoid(gate); rows of `width` elements with strides of their own.
extern "C" __global__ void sigmoid_gate(
#include "sigmoid_gate.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        y[i] = x[sx.at(i)] * sigmoid(gate[sg.at(i)]);
}

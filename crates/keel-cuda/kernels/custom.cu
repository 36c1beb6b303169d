// For the user's own kernels: fills their outputs with `value` before they start. ELEM: element type.
#include "common.cuh"

extern "C" __global__ void initial(
#include "fill.params"
) {
    take_turn();
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) y[i] = From<ELEM>::f32(value);
}

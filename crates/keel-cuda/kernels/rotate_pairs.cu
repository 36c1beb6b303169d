// Scales columns, then rotates them in pairs, see keel_array::PairRotation. One block a row; y is the working memory,
// in L2. Bytes moved: x and y once. Pairs and angles (8 bytes a column and round) come from L2, except for the first
// row.
#include "common.cuh"

// Rows of x are `stride` elements apart; y [rows, width] is gap-free. Pairs of a round share no column.
extern "C" __global__ void rotate_pairs(
#include "rotate_pairs.params"
) {
    take_turn();
    const float* from = x + blockIdx.x * stride;
    float* row = y + (u64)blockIdx.x * width;
    for (u32 i = threadIdx.x; i < width; i += blockDim.x) row[i] = __fmul_rn(from[i], scales[i]);
    for (u32 round = 0; round < rounds; ++round) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < width / 2; i += blockDim.x) {
            const u64 at = (u64)round * (width / 2) + i;
            const u32 a = pairs[2 * at], b = pairs[2 * at + 1];
            if (a >= width || b >= width) {
                report(fault, kernel, 0, a >= width ? a : b, width);
                continue;
            }
            const float2 turn = cos_sin[at]; // cos, sin
            const float first = row[a], second = row[b];
            row[a] = __fmaf_rn(first, turn.x, __fmul_rn(second, turn.y));
            row[b] = __fmaf_rn(second, turn.x, -__fmul_rn(first, turn.y));
        }
    }
}

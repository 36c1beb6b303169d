// Codes of weights in shared memory as fragments of tensor cores (A operand, f16), and their products with tiles of x.
// Hopper's matrix instructions run in the background (wgmma.cuh). Other generations multiply by mma.sync, whose sums
// are in place at once. Sums have the same order. Included by linear_panels.cu and linear_grouped.cu.
#pragma once
#include "half.cuh"
#include "weight_tiles.cuh"
#include "wgmma.cuh"

#define W_UNIT 2 // tiles of a fetch, of W or x
#define W_SLOT COPY_BYTES(W_UNIT)

// Factors that widen a level: affine weights with 16-bit scales in f16 arithmetic, two at a time; others in f32, then
// rounded.
template <typename T> __device__ __forceinline__ f16x2 factor_of(T v) { return two_f16(WEIGHT_FACTOR * to_f32(v), WEIGHT_FACTOR * to_f32(v)); }
__device__ __forceinline__ float factor_of(float v) { return WEIGHT_FACTOR * v; }
#ifdef BLOCK
typedef float Factor;
#else
typedef decltype(factor_of(PAIR_T())) Factor;
#endif
struct Widening {
    Factor scale, bias;
};
// Factors of the eight columns of lane t in columns 32 m to 32 m + 31 of a tile.
__device__ __forceinline__ Widening widening(const SlotPairs (&p)[TILE_SLOTS], int m, int half, int t) {
#ifdef BLOCK
    const Scaling s = scaling_at(p, m, half, t);
    return {factor_of(s.scale), factor_of(bias_of(s))};
#else
    const PAIR_T *pair = (const PAIR_T *)p[0].subs + 2 * (2 * (PARTS == 2 ? m : 0) + half);
    return {factor_of(pair[0]), factor_of(pair[1])};
#endif
}
// Widens two slots to scale q + bias. 0x6400 | q is the f16 1024 + q.
__device__ __forceinline__ u32 widen_two(u32 q, int which, f16x2 scale, f16x2 bias) {
    const u32 v = __byte_perm(q, 0x64646464u, which ? 0x4342 : 0x4140), offset = 0x64006400u;
    const f16x2 w = __hfma2(__hsub2(*(const f16x2 *)&v, *(const f16x2 *)&offset), scale, bias);
    return *(const u32 *)&w;
}
__device__ __forceinline__ u32 widen_two(u32 q, int which, float scale, float bias) {
    const float lo = byte_as_float(q, 2 * which), hi = byte_as_float(q, 2 * which + 1);
    return two_weights(fmaf(lo, scale, bias), fmaf(hi, scale, bias));
}
// Fragments for STEPS steps of 16 columns, from step `first` on, of tile `i` of the fetch at `slot`. A tile has four.
template <int STEPS> __device__ __forceinline__ void widen_fragments(u32 (&a)[STEPS][4], const u8 *slot, int i, int lane, int first = 0) {
    TileCodes c;
    SlotPairs p[TILE_SLOTS];
    const TilesAt at = copy_at<W_UNIT>(slot);
    load_codes<true>(c, at.codes + i * TILE_WORDS, lane);
#pragma unroll
    for (int s = 0; s < TILE_SLOTS; s++) load_pairs<true>(p[s], at, i * TILE_SLOTS + s, lane / 4);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 q = four_codes(c, h, first + s);
            const Widening by = widening(p, (first + s) / 2, h, lane % 4);
            a[s][h] = widen_two(q, 0, by.scale, by.bias), a[s][h + 2] = widen_two(q, 1, by.scale, by.bias);
        }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Starts the product of such fragments with the same columns of N rows of a tile of x.
template <int N, int STEPS>
__device__ __forceinline__ void start_product(float (&acc)[N / 8][4], const u32 (&a)[STEPS][4], u32 x_tile, int first = 0) {
    const u64 b = panel_of_rows(x_tile);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; s++) wgmma<N, 0, false>(acc, a[s], b + (first + s) * 2);
    wgmma_commit();
}
// Waits until at most `PENDING` products are under way.
template <int PENDING> __device__ __forceinline__ void wait_products() { wgmma_wait<PENDING>(); }
// The sums are in place after this.
template <int TILES> __device__ __forceinline__ void finish_products(float (&acc)[TILES][4]) {
    wgmma_wait<0>();
    settle(acc);
}
#else
template <int N> __device__ __forceinline__ void start_product(float (&acc)[N / 8][4], const u32 (&a)[4][4], u32 x_tile) {
    const u32 lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {
            u32 b[4];
            load_matrices_at(b, x_tile + panel_offset(8 * j + row, 2 * s + chunk));
            mma_f16(acc[j], a[s], b[0], b[1]);
            mma_f16(acc[j + 1], a[s], b[2], b[3]);
        }
}
template <int PENDING> __device__ __forceinline__ void wait_products() {}
template <int TILES> __device__ __forceinline__ void finish_products(float (&)[TILES][4]) {}
__device__ __forceinline__ void publish_to_products() {}
#endif

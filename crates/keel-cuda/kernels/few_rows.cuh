// Parts of products of few rows: x converted for the tensor cores, a unit of the weight, its contribution to the sums.
// The formula and the macros are in linear_few_rows.cu; mixture.cu has its own entries.
#pragma once
#include "weight_tiles.cuh"

#ifndef NORM
#define NORM 0
#endif
#ifndef GATE
#define GATE 0
#endif
#ifndef CONV
#define CONV 0
#endif
#ifndef FACTORS_EARLY
#define FACTORS_EARLY 0
#endif
// Without a norm and without a gate, nothing depends on these.
#if !NORM && GATE != 2
#define EPS 0.0f
#endif
#if !GATE
#define HEAD_DIM 64
#endif
#define HALVES (SWIGLU ? 2 : 1) // row tiles of a warp: the gate's and the up projection's
#define WARPS (SPLIT * ROW_WARPS)
#define THREADS (32 * WARPS)
#define OUT (SWIGLU ? DIM_N / 2 : DIM_N)
#define OUT_TILES ((OUT + 15) / 16)
#define N8 ((DIM_T + 7) / 8) // mma tiles of rows of x
#define UNITS ((K_TILES + UNIT - 1) / UNIT)
#if DENSE
#define ROW_BYTES 256 // of a prepared row, for each 64 columns: [2][t]{8 hi, 8 lo} bf16
#define X_PARTS 0
#else
#define ROW_BYTES 64
#define X_PARTS PARTS
#define ALONE (DIM_T == 1)
#define SLOTS (UNIT * TILE_SLOTS) // of a unit: each has its own sum, and its own lane of a quad if ALONE
static_assert(SLOTS <= 4, "a lane for each slot");
#endif
// Prepared rows of x: section 1 [K_TILES][T][ROW_BYTES], section 2 [K_TILES][PARTS][T] (c, c sum p) as float2.
#define X_BYTES (K_TILES * DIM_T * ROW_BYTES)
#define X_SCALE_BYTES (K_TILES * DIM_T * X_PARTS * 8)
#define PARTIAL_FLOATS (WARPS * HALVES * DIM_T * 17)
#if BULK
#define RING_BYTES (WARPS * STAGES * SLOT_BYTES + (WARPS * STAGES * 8 + 15) / 16 * 16)
#else
#define RING_BYTES 0
#endif
#define SHARED_BYTES (RING_BYTES + (FUSED ? X_BYTES + X_SCALE_BYTES : 0) + PARTIAL_FLOATS * (PASSES > 1 ? 2 : 1) * 4 + (NORM && FUSED ? DIM_T * (K_TILES + 1) * 4 : 0))

// ---- x: from f32 to the operands of the tensor cores ----

// The larger; NaN if either is. fmaxf gives the other one.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// The four lanes of a quad prepare 64 columns of one row. No code stands for NaN or infinity. They reach c instead, and
// with it every output of the row.
__device__ __forceinline__ void prepare_tile(const float (&v)[16], u8 *x, float2 *x_scale, int kt, int row, int t) {
#if DENSE
    for (int m = 0; m < 2; m++) {
        u32 hi[4], lo[4];
        for (int i = 0; i < 4; i++) {
            float a = v[8 * m + 2 * i], b = v[8 * m + 2 * i + 1];
            bf16x2 h = two_bf16(a, b);
            bf16x2 l = two_bf16(a - to_f32(h.x), b - to_f32(h.y));
            hi[i] = *(u32 *)&h, lo[i] = *(u32 *)&l;
        }
        uint4 *to = (uint4 *)(x + (size_t)(kt * DIM_T + row) * ROW_BYTES + m * 128 + t * 32);
        to[0] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        to[1] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
#else
    // Runs of columns with a common c: 64 columns, or 32 if groups have fewer than 64.
    const int runs = PARTS == 1 ? 1 : 2;
    float top[2];
    for (int m = 0; m < 2; m++) {
        top[m] = 0;
        for (int i = 0; i < 8; i++) top[m] = max_or_nan(top[m], fabsf(v[8 * m + i]));
    }
    if (runs == 1) top[0] = top[1] = max_or_nan(top[0], top[1]);
    u32 words[4];
    for (int run = 0; run < runs; run++) {
        float peak = top[run];
        peak = max_or_nan(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = max_or_nan(peak, __shfl_xor_sync(~0u, peak, 2));
        float to_integer = peak > 0 ? __fdividef(127.0f, peak) : 0.0f;
        int sum = 0;
        for (int w = run * 2; w < (runs == 2 ? run * 2 + 2 : 4); w++) {
            u32 word = 0;
            for (int b = 0; b < 4; b++) {
                int p = __float2int_rn(__fmul_rn(v[4 * w + b], to_integer));
                sum += p;
                word |= (u32)(p & 255) << (8 * b);
            }
            words[w] = word;
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        if (PARTS < 4) sum += __shfl_xor_sync(~0u, sum, 2); // two lanes have a group of 16
        float c = __fmul_rn(peak, 1.0f / 127.0f);
        const int part = PARTS == 4 ? 2 * run + t / 2 : run;
        if (t == 0 || PARTS == 4 && t == 2) x_scale[(kt * PARTS + part) * DIM_T + row] = make_float2(c, __fmul_rn(c, (float)sum));
    }
    *(uint4 *)(x + (size_t)(kt * DIM_T + row) * ROW_BYTES + t * 16) = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

// Sum of squares of a quad's tile, on all four lanes.
__device__ __forceinline__ float tile_square_sum(const float (&v)[16]) {
    float sum = 0;
#pragma unroll
    for (int s = 0; s < 16; s++) sum = __fmaf_rn(v[s], v[s], sum);
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}
// 1 / sqrt(mean x^2 + EPS) from the sums of a row's tiles. The order of the sum depends on DIM_K alone. All lanes of a
// warp call it.
__device__ __forceinline__ float row_norm(const float *tile_sums) {
    float sum = 0;
    for (int kt = threadIdx.x % 32; kt < K_TILES; kt += 32) sum += tile_sums[kt];
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)DIM_K), EPS)));
}
__device__ __forceinline__ void scale_slots(float (&v)[16], float by, const float (&w)[16]) {
#pragma unroll
    for (int s = 0; s < 16; s++) v[s] = __fmul_rn(__fmul_rn(v[s], by), w[s]);
}

#define HEAD_TILES (GATE == 2 ? HEAD_DIM / 64 : 1) // tiles that are normed together, on neighbouring quads of a warp
// Index of a tile. Beyond `count` it repeats a tile of the last head, which is then written twice with the same values.
__device__ __forceinline__ int within(int tile, int count) { return min(tile, count - HEAD_TILES + tile % HEAD_TILES); }
#if GATE == 2
#define HEAD_NORM norm
#else
#define HEAD_NORM nullptr
#endif
#if GATE
static_assert(GATE == 1 || HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256 || HEAD_DIM == 512, "the tiles of a head share a warp");
struct Gate {
    float z[16], w[16];
};
__device__ __forceinline__ void load_gate(Gate &g, const float *norm, const float *gate, int row, int kt, int t) {
    gate += (size_t)row * GATE_ROW;
#pragma unroll
    for (int s = 0; s < 16; s += 4) {
        const int k = 64 * kt + 32 * (s / 8) + 8 * t + s % 8;
        float4 four = make_float4(0, 0, 0, 0);
        if (DIM_K % 64 == 0 || k < DIM_K) four = *(const float4 *)(gate + (size_t)(k / HEAD_DIM) * GATE_HEAD + k % HEAD_DIM);
        g.z[s] = four.x, g.z[s + 1] = four.y, g.z[s + 2] = four.z, g.z[s + 3] = four.w;
    }
#if GATE == 2
    load_slots(g.w, norm - kt / HEAD_TILES * HEAD_DIM, kt, t);
#endif
}
// All lanes of a warp call it.
__device__ __forceinline__ void gate_slots(float (&v)[16], const Gate &g) {
    float by = 1;
#if GATE == 2
    float sum = tile_square_sum(v);
    for (int d = 4; d < 4 * HEAD_TILES; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    by = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)HEAD_DIM), EPS)));
#endif
#pragma unroll
    for (int s = 0; s < 16; s++) {
        // Off by a few units in the last place; rounding to 8 bits follows.
        const float share = __fdividef(1.0f, 1.0f + __expf(-g.z[s]));
        v[s] = GATE == 2 ? v[s] * by * g.w[s] * (g.z[s] * share) : v[s] * share;
    }
}
#endif

// ---- one unit: load, then multiply ----

__device__ __forceinline__ void mma_u8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#if DENSE
// A lane's part of one column tile.
struct Tile {
    uint4 w[HALVES][2][2]; // [32 columns][row g, row g + 8]: 8 columns from 8 t
};
__device__ __forceinline__ void load_tile(Tile &tile, const Weights &w, int row_tile, int kt, int lane) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        int rt = row_tile + h * OUT_TILES;
        for (int m = 0; m < 2; m++) {
            int k = 64 * kt + 32 * m + 8 * (lane % 4);
            for (int r = 0; r < 2; r++) {
                int n = min(16 * rt + lane / 4 + 8 * r, DIM_N - 1);
                tile.w[h][m][r] = DIM_K % 64 == 0 || k < DIM_K ? stream16(w.dense + (size_t)n * DIM_K + k) : make_uint4(0, 0, 0, 0);
            }
        }
    }
}
struct Unit {
    Tile tiles[UNIT];
};
__device__ __forceinline__ void load_unit(Unit &u, const Weights &w, int row_tile, int unit, int lane) {
#pragma unroll
    for (int i = 0; i < UNIT; i++)
        if (K_TILES % UNIT == 0 || unit * UNIT + i < K_TILES) load_tile(u.tiles[i], w, row_tile, unit * UNIT + i, lane);
}

struct Sums {
    float v[HALVES][N8][4];
};
__device__ __forceinline__ void multiply_unit(Sums &acc, const Unit &u, const u8 *x, const float2 *, int unit, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        const int kt = unit * UNIT + i;
        if (K_TILES % UNIT != 0 && kt >= K_TILES) break;
#pragma unroll
        for (int j = 0; j < N8; j++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const uint4 *b = (const uint4 *)(x + (size_t)(kt * DIM_T + min(8 * j + g, DIM_T - 1)) * ROW_BYTES + m * 128 + t * 32);
                uint4 hi = b[0], lo = b[1];
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    const uint4 p = u.tiles[i].w[h][m][0], q = u.tiles[i].w[h][m][1];
                    mma_bf16(acc.v[h][j], p.x, q.x, p.y, q.y, lo.x, lo.y);
                    mma_bf16(acc.v[h][j], p.x, q.x, p.y, q.y, hi.x, hi.y);
                    mma_bf16(acc.v[h][j], p.z, q.z, p.w, q.w, lo.z, lo.w);
                    mma_bf16(acc.v[h][j], p.z, q.z, p.w, q.w, hi.z, hi.w);
                }
            }
    }
}
#else
// A lane's part of a unit. With a single row a lane holds only the scales of its own slot.
struct Unit {
    TileCodes codes[UNIT][HALVES];
    SlotPairs pairs[ALONE ? 1 : SLOTS][HALVES];
};
__device__ __forceinline__ int tiles_of(int unit) { return K_TILES % UNIT == 0 ? UNIT : min(UNIT, K_TILES - unit * UNIT); }

template <bool SHARED_MEMORY = false>
__device__ __forceinline__ void load_half(Unit &u, int h, const TilesAt &at, int tiles, int lane) {
#pragma unroll
    for (int i = 0; i < UNIT; i++)
        if (i < tiles) load_codes<SHARED_MEMORY>(u.codes[i][h], at.codes + i * TILE_WORDS, lane);
#pragma unroll
    for (int s = 0; s < (ALONE ? 1 : SLOTS); s++) {
        const int slot = ALONE ? min(lane % 4, tiles * TILE_SLOTS - 1) : s;
        if (ALONE || s < tiles * TILE_SLOTS) load_pairs<SHARED_MEMORY>(u.pairs[s][h], at, slot, lane / 4);
    }
}
__device__ __forceinline__ void load_unit(Unit &u, const Weights &w, int row_tile, int unit, int lane) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) load_half(u, h, tiles_at(w, row_tile + h * OUT_TILES, unit * UNIT), tiles_of(unit), lane);
}

#if BULK
// A warp's units pass through a ring in shared memory; place i % STAGES of the ring holds unit i.
#define HALF_BYTES COPY_BYTES(UNIT)
#define SLOT_BYTES (HALVES * HALF_BYTES)
static_assert(UNIT % SHARE == 0, "a unit holds whole groups");

__device__ __forceinline__ void fetch_unit_of(u8 *slot, u64 *full, const Weights &w, int row_tile, int unit) {
    const int tiles = tiles_of(unit);
    expect_bytes(full, HALVES * tile_bytes(tiles));
    for (int h = 0; h < HALVES; h++) fetch_tiles<UNIT>(slot + h * HALF_BYTES, full, w, row_tile + h * OUT_TILES, unit * UNIT, tiles);
}
__device__ __forceinline__ void unit_of_slot(Unit &u, const u8 *slot, int unit, int lane) {
#pragma unroll
    for (int h = 0; h < HALVES; h++) load_half<true>(u, h, copy_at<UNIT>(slot + h * HALF_BYTES), tiles_of(unit), lane);
}
#endif

// An accumulator that starts as MAGIC_BITS is, read as a float, 1.5 2^23 + sum if |sum| < 2^22.
#define MAGIC_BITS 0x4B400000
#define MAGIC 12582912.0f

// Rows g and g + 8 of 32 columns, as operands of a product.
__device__ __forceinline__ void operands_of(u32 (&a)[4], const TileCodes &codes, int m) {
    a[0] = four_codes(codes, 0, 2 * m), a[1] = four_codes(codes, 1, 2 * m);
    a[2] = four_codes(codes, 0, 2 * m + 1), a[3] = four_codes(codes, 1, 2 * m + 1);
}
// acc + the contribution of one scale group: `sum` from the product, `cx` = (c, c sum p).
__device__ __forceinline__ float scaled_sum(int sum, Scaling s, float2 cx, float acc) {
    acc = __fmaf_rn(__fsub_rn(__int_as_float(sum), MAGIC), __fmul_rn(s.scale, cx.x), acc);
    return __fmaf_rn(bias_of(s), cx.y, acc);
}

#if ALONE
// Sums of rows g and g + 8 in the lane's own slot.
struct Sums {
    float v[HALVES][2];
};
// Column 2 s + p of x in the product holds part p of slot s and is zero elsewhere. So lane t gets the sums of slot t.
__device__ __forceinline__ void multiply_unit(Sums &acc, const Unit &u, const u8 *x, const float2 *x_scale, int unit, int lane) {
    const int g = lane / 4, t = lane % 4, kt = unit * UNIT, tiles = tiles_of(unit), slots = tiles * TILE_SLOTS;
    u32 b[4];
    const u8 *columns = x + (kt + min(g / 2 / TILE_SLOTS, tiles - 1)) * ROW_BYTES + t * 16;
    if (PARTS == 1) {
        const uint4 v = *(const uint4 *)columns;
        b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
    } else {
        const uint2 v = *(const uint2 *)(columns + (PARTS == 2 ? g % 2 : g / 2 % 2) * 8);
        const bool zero = PARTS == 4 && t / 2 != g % 2;
        b[0] = b[2] = zero ? 0 : v.x, b[1] = b[3] = zero ? 0 : v.y;
    }
    // A product waits for the one before it, so each half of the columns has its own sum.
    int sums[HALVES][4], others[HALVES][4] = {};
#pragma unroll
    for (int h = 0; h < HALVES; h++) sums[h][0] = sums[h][1] = sums[h][2] = sums[h][3] = MAGIC_BITS;
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        if (i >= tiles) break;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const bool mine = PARTS == 1 ? g == 2 * i : PARTS == 2 ? g == 2 * i + m : g / 2 == 2 * i + m;
            const u32 b0 = mine ? b[2 * m] : 0, b1 = mine ? b[2 * m + 1] : 0;
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                u32 a[4];
                operands_of(a, u.codes[i][h], m);
                mma_u8(m ? others[h] : sums[h], a, b0, b1);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[h][e] += others[h][e];
    const bool busy = SLOTS == 4 && K_TILES % UNIT == 0 || t < slots;
#pragma unroll
    for (int part = 0; part < SLOT_PARTS; part++) {
        float2 cx = x_scale[kt * PARTS + min(t, slots - 1) * SLOT_PARTS + part];
        if (!busy) cx = make_float2(0, 0);
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
            for (int r = 0; r < 2; r++) acc.v[h][r] = scaled_sum(sums[h][2 * r + part], scaling(u.pairs[0][h], part, r), cx, acc.v[h][r]);
    }
}
#else
struct Sums {
    float v[HALVES][N8][4][SLOTS];
};
__device__ __forceinline__ void multiply_unit(Sums &acc, const Unit &u, const u8 *x, const float2 *x_scale, int unit, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        const int kt = unit * UNIT + i;
        if (i >= tiles_of(unit)) break;
        u32 a[HALVES][2][4];
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
            for (int m = 0; m < 2; m++) operands_of(a[h][m], u.codes[i][h], m);
#pragma unroll
        for (int j = 0; j < N8; j++) {
            const uint4 b = *(const uint4 *)(x + (size_t)(kt * DIM_T + min(8 * j + g, DIM_T - 1)) * ROW_BYTES + t * 16);
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const float2 *scales = x_scale + (kt * PARTS + part) * DIM_T;
                float2 c0, c1;
                if (DIM_T % 2 == 0) {
                    float4 both = *(const float4 *)(scales + min(8 * j + 2 * t, DIM_T - 2));
                    c0 = make_float2(both.x, both.y), c1 = make_float2(both.z, both.w);
                } else {
                    c0 = scales[min(8 * j + 2 * t, DIM_T - 1)], c1 = scales[min(8 * j + 2 * t + 1, DIM_T - 1)];
                }
                const bool in_part = PARTS < 4 || t / 2 == part % 2;
                const int slot = i * TILE_SLOTS + part / SLOT_PARTS;
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    int sums[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
                    if (part * 2 < PARTS || PARTS == 1) mma_u8(sums, a[h][0], in_part ? b.x : 0, in_part ? b.y : 0);
                    if (part * 2 >= PARTS || PARTS == 1) mma_u8(sums, a[h][1], in_part ? b.z : 0, in_part ? b.w : 0);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &to = acc.v[h][j][e][slot];
                        to = scaled_sum(sums[e], scaling(u.pairs[slot][h], part % SLOT_PARTS, e / 2), e & 1 ? c1 : c0, to);
                    }
                }
            }
        }
    }
}
#endif
#endif

// A lane's sum for row 8 j + 2 t + e % 2 of x and row g + 8 (e / 2) of the tile. All lanes of a quad call it. With a
// single row all of them get the sum.
__device__ __forceinline__ float sum_of(const Sums &acc, int h, int j, int e) {
#if DENSE
    return acc.v[h][j][e];
#elif ALONE
    float v = acc.v[h][e / 2];
    v = __fadd_rn(v, __shfl_xor_sync(~0u, v, 1));
    return __fadd_rn(v, __shfl_xor_sync(~0u, v, 2));
#else
    const float (&v)[SLOTS] = acc.v[h][j][e];
    const float first = __fadd_rn(v[0], SLOTS > 1 ? v[1 % SLOTS] : 0.0f);
    return __fadd_rn(first, SLOTS > 2 ? __fadd_rn(v[2 % SLOTS], v[3 % SLOTS]) : 0.0f);
#endif
}

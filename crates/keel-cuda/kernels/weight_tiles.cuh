// Quantised weights as the kernels read them, and the rows of x that they multiply. Included by the kernels' sources.
//
// A weight [N, K] is cut into tiles of 16 rows and 64 columns, padded with zeros. Lane (g, t) = (lane / 4, lane % 4) of
// a warp holds 16 codes of row g ("half" 0) and 16 of row g + 8 (half 1): its slot s is column 32 (s / 8) + 8 t + s % 8
// of the tile. The codes are operands of mma.m16n8k32 without rearrangement, because a product may sum its columns in
// any order. A warp reads each tile as consecutive 16-byte words.
//
// Section 1, codes: [expert][N / 16][K / 64] tiles of 128 BITS bytes. A tile is several planes, each [lane][words]:
//   8 bits:  half 0, 4 words (byte b of word r is slot 4 r + b); then half 1, 4 words
//   4 bits:  4 words: word 2 h + r / 2 of half h; its byte b holds slot 4 r + b, in the low nibble for even r
//   2 bits:  2 words: word h; bits 2 r, 2 r + 1 of byte b are slot 4 r + b
//   1 bit:   1 word: bit 4 h + r of byte b is slot 4 r + b of half h
//   6 = 4-bit plane of q % 16, then 2-bit plane of q / 16; 5 = 4-bit plane, 1-bit plane of q / 16;
//   3 = 2-bit plane of q % 4, 1-bit plane of q / 4
// Section 2, at a multiple of 256 bytes: the scales of each GROUP of columns of a row, SUB_BYTES,
//   groups of 16, 32, 64: [expert][N / 16][K / 64][g][group of the tile][half]
//   groups of 128:        [expert][N / 16][K / 128][g][half]
//   Affine weights: (scale, bias), two PAIR_T. Block codings: see weight_blocks.cuh. If these have SUPER_BYTES for each
//   256 columns of a row, [g][half] of them come before the subs of each four tiles.
//
// Macros: DIM_N, DIM_K; BITS, GROUP, PAIR_T or BLOCK. Dense weights are stored row by row; a lane takes the same
// columns of them.
#pragma once
#include "ptx.cuh"
#ifdef BLOCK
#include "weight_blocks.cuh"
#elif defined(BITS)
#define SUB_BYTES (2 * (int)sizeof(PAIR_T))
#define SUPER_BYTES 0
#define LEAST_LEVEL 0.0f // the range of a level
#define GREATEST_LEVEL ((float)((1 << BITS) - 1))
#endif

#define K_TILES ((DIM_K + 63) / 64)
#define N_TILES ((DIM_N + 15) / 16)
#define TILE_WORDS (32 * BITS)
#define PARTS (GROUP < 64 ? 64 / GROUP : 1)  // scale groups of a tile
#define SHARE (GROUP == 128 ? 2 : 1)         // tiles that share a scale group
#define SUB_TILE (16 * PARTS * SUB_BYTES)    // bytes of the scale groups of one tile, or of SHARE tiles
#define SUPER_TILE (16 * SUPER_BYTES)        // and of the superscales that four tiles share
// Of a row tile:
#define PAIR_ROW ((size_t)((K_TILES + SHARE - 1) / SHARE * SUB_TILE + (SUPER_BYTES ? K_TILES / 4 * SUPER_TILE : 0)))

// One 16-byte store; the compiler may split an ordinary one.
__device__ __forceinline__ void store16(void *p, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Weights are read once, so these loads bypass L1.
__device__ __forceinline__ uint4 stream16(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 stream8(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 stream4(const void *p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

#ifdef BITS
// A lane's part of one tile.
struct TileCodes {
    u32 w[BITS];
};

// From global memory, or (SHARED_MEMORY) from a copy of the tile in shared memory.
template <bool SHARED_MEMORY = false>
__device__ __forceinline__ void load_codes(TileCodes &c, const u32 *tile, int lane) {
    int at = 0, plane = 0; // words loaded; words of the planes before
    if (BITS == 8 || (BITS & 4)) {
        for (int i = 0; i < (BITS == 8 ? 2 : 1); i++, at += 4, plane += 128) {
            const uint4 *from = (const uint4 *)(tile + plane + 4 * lane);
            uint4 v = SHARED_MEMORY ? *from : stream16(from);
            c.w[at] = v.x, c.w[at + 1] = v.y, c.w[at + 2] = v.z, c.w[at + 3] = v.w;
        }
    }
    if (BITS & 2) {
        const uint2 *from = (const uint2 *)(tile + plane + 2 * lane);
        uint2 v = SHARED_MEMORY ? *from : stream8(from);
        c.w[at] = v.x, c.w[at + 1] = v.y;
        at += 2, plane += 64;
    }
    if (BITS & 1) c.w[at] = SHARED_MEMORY ? tile[plane + lane] : stream4(tile + plane + lane);
}

// Slots 4 r .. 4 r + 3 of a half, one per byte. h and r are constants once unrolled.
__device__ __forceinline__ u32 four_codes(const TileCodes &c, int h, int r) {
#if defined(BLOCK) && HAS_TABLE
    return four_of_table((c.w[2 * h + r / 2] >> (4 * (r & 1))) & 0x0f0f0f0fu);
#endif
    if (BITS == 8) return c.w[4 * h + r];
    u32 q = 0;
    int at = 0, shift = 0;
    if (BITS & 4) {
        q = (c.w[2 * h + r / 2] >> (4 * (r & 1))) & 0x0f0f0f0fu;
        at = 4, shift = 4;
    }
    if (BITS & 2) {
        u32 two = c.w[at + h];
        q |= shift ? (2 * r <= shift ? (two << (shift - 2 * r)) : (two >> (2 * r - shift))) & (0x03030303u << shift)
                   : (two >> (2 * r)) & 0x03030303u;
        at += 2, shift += 2;
    }
    if (BITS & 1) {
        int bit = 4 * h + r;
        u32 one = c.w[at];
        q |= (bit <= shift ? one << (shift - bit) : one >> (bit - shift)) & (0x01010101u << shift);
    }
    return q;
}

// A slot is a run of columns of a tile with one or two scale groups: the tile, or half of it if groups have 16 columns.
#define TILE_SLOTS (PARTS == 4 ? 2 : 1)
#define SLOT_PARTS (PARTS >= 2 ? 2 : 1)
#define SUB_SLOT (SLOT_PARTS * 2 * SUB_BYTES) // bytes of a lane's two rows

// The scales of a lane's two rows in one slot, as stored.
struct SlotPairs {
    u32 subs[SUB_SLOT / 4]; // [part][half]
    u32 supers[SUPER_BYTES ? SUPER_BYTES / 2 : 1]; // [half]
};

template <bool SHARED_MEMORY, int BYTES> __device__ __forceinline__ void load_words(u32 *to, const u8 *from) {
    if (BYTES == 4) {
        *to = SHARED_MEMORY ? *(const u32 *)from : stream4(from);
    } else if (BYTES == 8) {
        const uint2 v = SHARED_MEMORY ? *(const uint2 *)from : stream8(from);
        to[0] = v.x, to[1] = v.y;
    } else {
        for (int i = 0; i < BYTES / 16; i++) {
            const uint4 v = SHARED_MEMORY ? ((const uint4 *)from)[i] : stream16((const uint4 *)from + i);
            to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
        }
    }
}

// Where consecutive tiles of a row tile lie; at most four tiles, with the same supers.
struct TilesAt {
    const u32 *codes;
    const u8 *subs, *supers;
};
// Loads slot `slot` of the tiles at `at`, rows g and g + 8.
template <bool SHARED_MEMORY = false>
__device__ __forceinline__ void load_pairs(SlotPairs &p, const TilesAt &at, int slot, int g) {
    const int place = slot / TILE_SLOTS / SHARE * SUB_TILE + (g * TILE_SLOTS + slot % TILE_SLOTS) * SUB_SLOT;
    load_words<SHARED_MEMORY, SUB_SLOT>(p.subs, at.subs + place);
#if SUPER_BYTES
    load_words<SHARED_MEMORY, 2 * SUPER_BYTES>(p.supers, at.supers + g * (2 * SUPER_BYTES));
#endif
}

// The factor and the offset of a level, for a lane's row `half` in part `part` of a slot. Both indices are constants
// once unrolled.
#ifdef BLOCK
__device__ __forceinline__ Scaling scaling(const SlotPairs &p, int part, int half) { return scaling_of(p.subs, 2 * part + half, p.supers, half); }
#else
struct Scaling {
    float scale, offset;
};
__device__ __forceinline__ Scaling scaling(const SlotPairs &p, int part, int half) {
    const PAIR_T *pair = (const PAIR_T *)p.subs + 2 * (2 * part + half);
    return {to_f32(pair[0]), to_f32(pair[1])};
}
// Rounded once.
__device__ __forceinline__ float value_of(float level, Scaling s) { return __fmaf_rn(s.scale, level, s.offset); }
__device__ __forceinline__ float bias_of(Scaling s) { return s.offset; }
#endif
#endif

// ---- weights as f32, for the kernels that multiply in f32 and those that write dense rows ----

#ifdef BITS
// The scales of the eight columns of lane t in columns 32 m to 32 m + 31 of a tile.
__device__ __forceinline__ Scaling scaling_at(const SlotPairs (&p)[TILE_SLOTS], int m, int half, int t) {
    if (PARTS < 4) return scaling(p[0], PARTS == 2 ? m : 0, half);
    const SlotPairs &of = p[m % TILE_SLOTS];
    const Scaling low = scaling(of, 0, half), high = scaling(of, SLOT_PARTS - 1, half);
    return t < 2 ? low : high;
}
#define STORED u32 // type of the words at a weight's address: codes, or dense weights
#define WEIGHT Weights{weight, pairs}
struct Weights {
    const u32 *codes; // section 1, of the first row tile of this expert
    const u8 *pairs;  // section 2, likewise
};
__device__ __forceinline__ Weights expert_of(Weights w, size_t expert) {
    return {w.codes + expert * N_TILES * K_TILES * TILE_WORDS, w.pairs + expert * N_TILES * PAIR_ROW};
}
// Row tile `rt` from column tile `kt` on, a multiple of SHARE.
__device__ __forceinline__ TilesAt tiles_at(const Weights &w, int rt, int kt) {
    const u8 *row = w.pairs + rt * PAIR_ROW;
    const u8 *supers = row + kt / 4 * (SUPER_TILE + 4 * SUB_TILE);
    const u8 *subs = SUPER_BYTES ? supers + SUPER_TILE + kt % 4 * SUB_TILE : row + kt / SHARE * SUB_TILE;
    return {w.codes + ((size_t)rt * K_TILES + kt) * TILE_WORDS, subs, supers};
}
// Widens the 16 slots of each half of a tile to f32.
__device__ __forceinline__ void widen_tile(float (&w)[2][16], const Weights &from, int rt, int kt, int lane) {
    TileCodes c;
    SlotPairs p[TILE_SLOTS];
    const TilesAt at = tiles_at(from, rt, kt);
    load_codes(c, at.codes, lane);
    for (int s = 0; s < TILE_SLOTS; s++) load_pairs(p[s], at, s, lane / 4);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int s = 0; s < 16; s++) {
            w[h][s] = value_of(byte_as_float(four_codes(c, h, s / 4), s % 4), scaling_at(p, s / 8, h, lane % 4));
        }
}
#else
#ifndef WEIGHT_T
#define WEIGHT_T bf16 // type of dense weights
#endif
#define STORED WEIGHT_T
#define WEIGHT Weights{weight}
struct Weights {
    const WEIGHT_T *dense; // [DIM_N][DIM_K] of this expert
};
__device__ __forceinline__ Weights expert_of(Weights w, size_t expert) { return {w.dense + expert * DIM_N * DIM_K}; }
__device__ __forceinline__ void widen_tile(float (&w)[2][16], const Weights &from, int rt, int kt, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const WEIGHT_T *row = from.dense + (size_t)min(16 * rt + 8 * h + lane / 4, DIM_N - 1) * DIM_K;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            int k = 64 * kt + 32 * m + 8 * (lane % 4);
            if (DIM_K % 8 == 0 && k < DIM_K) {
                WEIGHT_T v[8];
                for (int i = 0; i < (int)sizeof(v) / 16; i++) ((uint4 *)v)[i] = stream16((const uint4 *)(row + k) + i);
                for (int i = 0; i < 8; i++) w[h][8 * m + i] = to_f32(v[i]);
            } else {
                for (int i = 0; i < 8; i++) w[h][8 * m + i] = k + i < DIM_K ? to_f32(row[k + i]) : 0.0f;
            }
        }
    }
}
#endif

// The columns of a row of x that belong to the slots of lane t in column tile kt; zeros beyond the end.
__device__ __forceinline__ void load_slots(float (&v)[16], const float *row, int kt, int t) {
    for (int m = 0; m < 2; m++) {
        int k = 64 * kt + 32 * m + 8 * t;
        for (int i = 0; i < 2; i++, k += 4) {
            float4 f = make_float4(0, 0, 0, 0);
            if (DIM_K % 4 == 0 && (DIM_K % 64 == 0 || k < DIM_K)) {
                f = *(const float4 *)(row + k);
            } else if (DIM_K % 4 != 0) {
                if (k < DIM_K) f.x = row[k];
                if (k + 1 < DIM_K) f.y = row[k + 1];
                if (k + 2 < DIM_K) f.z = row[k + 2];
                if (k + 3 < DIM_K) f.w = row[k + 3];
            }
            v[8 * m + 4 * i] = f.x, v[8 * m + 4 * i + 1] = f.y, v[8 * m + 4 * i + 2] = f.z, v[8 * m + 4 * i + 3] = f.w;
        }
    }
}

// ---- tiles in shared memory ----

#ifdef BITS
// A copy of up to COUNT tiles in shared memory: codes, subs, supers.
#define COPY_BYTES(COUNT) ((COUNT) * TILE_WORDS * 4 + (COUNT + SHARE - 1) / SHARE * SUB_TILE + SUPER_TILE)
__device__ __forceinline__ u32 tile_bytes(int tiles) { return tiles * TILE_WORDS * 4 + (tiles + SHARE - 1) / SHARE * SUB_TILE + SUPER_TILE; }
template <int COUNT> __device__ __forceinline__ TilesAt copy_at(const u8 *copy) {
    const u8 *subs = copy + COUNT * TILE_WORDS * 4;
    return {(const u32 *)copy, subs, subs + (COUNT + SHARE - 1) / SHARE * SUB_TILE};
}
// Copies `tiles` (at most COUNT) column tiles from kt, a multiple of SHARE, of one row tile. All lanes of a warp copy;
// the copies belong to the group that they commit next.
template <int COUNT> __device__ __forceinline__ void copy_tiles_async(u8 *copy, const Weights &w, int rt, int kt, int tiles, int lane) {
    const TilesAt from = tiles_at(w, rt, kt), to = copy_at<COUNT>(copy);
    auto part = [&](const void *to, const void *from, int bytes, int most) {
#pragma unroll
        for (int at = 16 * lane; at < most; at += 512)
            if (at < bytes) copy_async_to(shared_address(to) + at, (const u8 *)from + at);
    };
    part(to.codes, from.codes, tiles * TILE_WORDS * 4, COUNT * TILE_WORDS * 4);
    part(to.subs, from.subs, (tiles + SHARE - 1) / SHARE * SUB_TILE, (COUNT + SHARE - 1) / SHARE * SUB_TILE);
    if (SUPER_BYTES) part(to.supers, from.supers, SUPER_TILE, SUPER_TILE);
}
#endif

// One lane starts copies, and a barrier signals their arrival (sm_90 and later).

#if __CUDA_ARCH__ >= 900
// Makes `count` barriers, each of whose phases ends with the last of `arrivals`.
__device__ __forceinline__ void init_barriers(u64 *barriers, int count, u32 arrivals = 1) {
    for (int i = 0; i < count; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barriers + i)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(u64 *full, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_full(const u64 *full, u32 parity) {
    asm volatile("{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(shared_address(full)),
                 "r"(parity) : "memory");
}
// A multiple of 16 bytes from global to shared memory.
__device__ __forceinline__ void fetch_bytes(void *to, const void *from, u32 bytes, u64 *full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes), "r"(shared_address(full)) : "memory");
}
#ifdef BITS
// As copy_tiles_async, but one lane starts the copies, and `full` signals their arrival.
template <int COUNT> __device__ __forceinline__ void fetch_tiles(u8 *copy, u64 *full, const Weights &w, int rt, int kt, int tiles) {
    const TilesAt from = tiles_at(w, rt, kt), to = copy_at<COUNT>(copy);
    fetch_bytes((void *)to.codes, from.codes, tiles * TILE_WORDS * 4, full);
    fetch_bytes((void *)to.subs, from.subs, (tiles + SHARE - 1) / SHARE * SUB_TILE, full);
    if (SUPER_BYTES) fetch_bytes((void *)to.supers, from.supers, SUPER_TILE, full);
}
#endif
#endif

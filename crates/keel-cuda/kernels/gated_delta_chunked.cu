// The gated delta rule in the prefill regime: chunks of 64 rows, products on tensor cores (f16, sums in f32).
//
// Within a chunk let G_i be the sum of log decays up to row i, S the state before it, and (rows are tokens)
//
//   A_ij = beta_i e^(G_i - G_j) k_i . k_j   (j < i)         P_ij = e^(G_i - G_j) q_i . k_j   (j <= i)
//   T    = (I + A)^-1 diag(beta)
//   U    = T (V - e^G (K S))                                 the u of gated_delta.cu, all rows at once
//   Y    = e^G (Q S) + P U
//   S   <- e^(G_63) S + K^T (e^(G_63 - G) U)
//
// Two launches. gated_delta_prepare works on all chunks at once: norms, gates, T and P. It sums log decays in f64, to
// base 2. It inverts blocks of 16 rows by substitution in f32, then combines two and four of them in tf32 with sums in
// f32. gated_delta_chunks walks through a sequence's chunks in
// order. Its states stay in registers, transposed: a warp holds 16 columns of S as the rows of its accumulators. So S,
// V - K S and U are operands of the next product without being moved, and warps exchange nothing.
// Sequences start at multiples of 64 positions; the last chunk may be ragged (absent rows have beta 0 and k 0).
//
// qkv [T, 2 HK DK + HV DV] (QKV_STRIDE; 16-byte rows), a and b [T, HV] (A_STRIDE, B_STRIDE), state [slots, HV, DK, DV]
// f32 or f16 (STATE_F16; rounded after each chunk), y [T, HV, DV].
// Macros: HK, HV, DK, DV (DK and DV multiples of 16, DK at most 256), QKV_STRIDE, A_STRIDE, B_STRIDE,
// STAGES (chunks in shared memory, 1 to 3: with 1, blocks that share a multiprocessor hide each other's waits).
// Launch, with chunks = ceil(T / 64) + B:
//   gated_delta_prepare  grid (HK, chunks), block 256, shared memory PREPARE_SHARED
//   gated_delta_chunks   grid (HV * ceil(DV / 32), B), block 128 (two warps multiply, two copy),
//                        shared memory STAGES sizeof(Stage)
// workspace: normalised k and q of all chunks [chunks, HK, 2, 64, DK + 8] f16; then T and P of all chunks
// [chunks, HV, 2, 64, 72] f16; then the gates e^G and e^(G_63 - G) of all chunks [chunks, HV, 2, 64] f32.
//
// Bytes: 4 (2 HK DK + 2 HV DV) a token for qkv and y, and the workspace twice unless it stays in L2.

#include "gated_delta_tiles.cuh"

extern "C" __global__ void __launch_bounds__(256, 3)
gated_delta_prepare(
#include "gated_delta_prepare.params"
) {
    take_turn();
    DYNAMIC_SHARED(char, shared);
    // The matrices to invert replace k and q once the products of these are in registers.
    f16 *k_tile = (f16*)shared, *q_tile = k_tile + KEY_TILE;
    float* matrices = (float*)shared;
    // Sums of log decays to base 2, each as the sum of two floats, and betas.
    float2 (*sums)[ROWS] = (float2 (*)[ROWS])(shared + PREPARE_TILES);
    float (*betas)[ROWS] = (float (*)[ROWS])(sums + SHARE);

    u32 sequence, unit;
    if (!locate(row_start, sequences, 1, ROWS, blockIdx.y, sequence, unit)) return;
    const u32 first = row_start[sequence] + unit * ROWS, rows = min(row_start[sequence + 1] - first, ROWS);
    const u32 key_head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Norms: a warp takes a row, four values a lane.
    constexpr int QUADS = (DK + 127) / 128;
#pragma unroll 4
    for (u32 t = warp; t < ROWS; t += 8) {
        const float* q = qkv + (u64)(first + t) * QKV_STRIDE + key_head * DK;
        float4 x[QUADS], z[QUADS];
        float qq = 0.0f, kk = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            u32 d = i * 128 + lane * 4;
            bool there = t < rows && d < DK;
            x[i] = there ? *(const float4*)(q + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            z[i] = there ? *(const float4*)(q + HK * DK + d) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            qq += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
            kk += z[i].x * z[i].x + z[i].y * z[i].y + z[i].z * z[i].z + z[i].w * z[i].w;
        }
        float fq = rsqrtf((warp_sum(qq) + 1e-6f) * DK), fk = rsqrtf(warp_sum(kk) + 1e-6f);
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            u32 d = i * 128 + lane * 4;
            if (d < DK) {
                *(uint2*)(q_tile + t * KEY_LINE + d) = make_uint2(pack_f16(x[i].x * fq, x[i].y * fq), pack_f16(x[i].z * fq, x[i].w * fq));
                *(uint2*)(k_tile + t * KEY_LINE + d) = make_uint2(pack_f16(z[i].x * fk, z[i].y * fk), pack_f16(z[i].z * fk, z[i].w * fk));
            }
        }
    }
    // Gates: a warp takes a value head, a lane rows 2 lane and 2 lane + 1. Sums are in f64: after a strong decay,
    // differences of later f32 sums would lose their digits.
    for (u32 r = warp; r < SHARE; r += 8) {
        u32 head = key_head * SHARE + r;
        float g[2], rate = -1.4426950408889634f * expf(a_log[head]), bias = dt_bias[head];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 t = 2 * lane + i;
            float beta = 0.0f;
            g[i] = 0.0f;
            if (t < rows) {
                float x = a[(u64)(first + t) * A_STRIDE + head] + bias;
                g[i] = rate * (x > 20.0f ? x : log1pf(expf(x)));
                beta = 1.0f / (1.0f + expf(-b[(u64)(first + t) * B_STRIDE + head]));
            }
            betas[r][t] = beta;
        }
        double until = (double)g[0] + g[1];
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            double before = __shfl_up_sync(FULL_WARP, until, d);
            if (lane >= d) until += before;
        }
        double all = __shfl_sync(FULL_WARP, until, 31), odd = until, even = until - g[1];
        float high_even = (float)even, high_odd = (float)odd;
        *(float4*)&sums[r][2 * lane] = make_float4(high_even, (float)(even - high_even), high_odd, (float)(odd - high_odd));
        float* out = chunk_of(workspace, chunks, blockIdx.y, head).gates + 2 * lane;
        *(float2*)out = make_float2(exp2f(high_even), exp2f(high_odd));
        *(float2*)(out + ROWS) = make_float2(exp2f((float)(all - even)), exp2f((float)(all - odd)));
    }
    __syncthreads();

    uint4* keys_out = (uint4*)chunk_of(workspace, chunks, blockIdx.y, key_head * SHARE).keys;
    for (u32 i = threadIdx.x; i < 2 * KEY_TILE / 8; i += 256) keys_out[i] = ((const uint4*)k_tile)[i];

    // Each of the first four warps has 16 rows of K K^T, each of the others 16 of Q K^T. Columns past the diagonal
    // block are not needed.
    const bool inverts = warp < 4;
    const u32 row = warp % 4 * 16;
    float products[8][4];
#pragma unroll
    for (int n = 0; n < 8; n++) products[n][0] = products[n][1] = products[n][2] = products[n][3] = 0.0f;
#pragma unroll 2
    for (int k = 0; k < DK / 16; k++) {
        u32 x[4];
        load_matrices(x, row_major<KEY_LINE>(inverts ? k_tile : q_tile, row, k * 16));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n * 16 <= row) {
                u32 z[4];
                load_matrices(z, column_major<KEY_LINE>(k_tile, n * 16, k * 16));
                mma_f16(products[2 * n], x, z[0], z[1]);
                mma_f16(products[2 * n + 1], x, z[2], z[3]);
            }
        }
    }
    __syncthreads();

    // Two value heads at a time: half of the warps write both matrices while the others write both P; then each half
    // inverts one matrix.
    for (u32 pair = 0; pair < SHARE; pair += 2) {
        for (u32 r = pair; r < min(pair + 2, SHARE); r++) {
            f16* scores = chunk_of(workspace, chunks, blockIdx.y, key_head * SHARE + r).pairs + PAIR_TILE;
            float* matrix = matrices + (r - pair) * (MATRIX_BYTES / 4);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 i = row + lane / 4 + 8 * half;
                float2 sum = sums[r][i];
                float beta = betas[r][i];
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    u32 j = n * 8 + lane % 4 * 2;
                    // Of columns j and j + 1.
                    float4 of_j = *(const float4*)&sums[r][j];
                    // Exponents that count are at most 0; others could overflow.
                    float x0 = j <= i ? products[n][2 * half] * exp2f((sum.x - of_j.x) + (sum.y - of_j.y)) : 0.0f;
                    float x1 = j + 1 <= i ? products[n][2 * half + 1] * exp2f((sum.x - of_j.z) + (sum.y - of_j.w)) : 0.0f;
                    if (inverts) {
                        *(float2*)(matrix + i * MATRIX_LINE + j) = make_float2(j < i ? beta * x0 : 0.0f, j + 1 < i ? beta * x1 : 0.0f);
                    } else {
                        *(u32*)(scores + i * PAIR_LINE + j) = pack_f16(x0, x1);
                    }
                }
            }
        }
        __syncthreads();
        const u32 half = warp / 4, r = pair + half;
        if (r < SHARE) {
            float* matrix = matrices + half * (MATRIX_BYTES / 4);
            invert(matrix, matrix + ROWS * MATRIX_LINE, half);
            f16* out = chunk_of(workspace, chunks, blockIdx.y, key_head * SHARE + r).pairs;
            for (u32 i = threadIdx.x % 128; i < ROWS * 16; i += 128) {
                u32 line = i / 16, column = i % 16 * 4;
                float4 x = *(const float4*)(matrix + line * MATRIX_LINE + column), beta = *(const float4*)&betas[r][column];
                *(uint2*)(out + line * PAIR_LINE + column) =
                    make_uint2(pack_f16(x.x * beta.x, x.y * beta.y), pack_f16(x.z * beta.z, x.w * beta.w));
            }
        }
        if (pair + 2 < SHARE) __syncthreads();
    }
}

/// A chunk's data in shared memory.
struct __align__(16) Stage {
    f16 keys[2 * KEY_TILE];
    f16 pairs[2 * PAIR_TILE];
    float values[ROWS * VALUE_LINE];
    float gates[2][ROWS];
};

/// c [16 columns, 64 rows] += a [16 columns, 16 of DK] times columns 16 k.. of `tile` [64, DK].
static __device__ __forceinline__ void multiply_rows(float (&c)[8][4], const u32 (&a)[4], const f16* tile, u32 k) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        u32 x[4];
        load_matrices(x, column_major<KEY_LINE>(tile, n * 16, k * 16));
        mma_f16(c[2 * n], a, x[0], x[1]);
        mma_f16(c[2 * n + 1], a, x[2], x[3]);
    }
}

/// c [16 columns, 64 rows] += a [16 columns, 64] times the lines of a lower triangular tile [64, 64].
static __device__ __forceinline__ void multiply_lower(float (&c)[8][4], const u32 (&a)[4][4], const f16* tile) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int n = k; n < 4; n++) {
            u32 x[4];
            load_matrices(x, column_major<PAIR_LINE>(tile, n * 16, k * 16));
            mma_f16(c[2 * n], a[k], x[0], x[1]);
            mma_f16(c[2 * n + 1], a[k], x[2], x[3]);
        }
    }
}

/// Accumulators [16, 16] as the left operand of the next product.
static __device__ __forceinline__ void as_operand(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_f16(left[0], left[1]);
    a[1] = pack_f16(left[2], left[3]);
    a[2] = pack_f16(right[0], right[1]);
    a[3] = pack_f16(right[2], right[3]);
}
static __device__ __forceinline__ void as_operand(u32 (&a)[4][4], const float (&c)[8][4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) as_operand(a[k], c[2 * k], c[2 * k + 1]);
}

/// The copying half of a block of gated_delta_chunks: brings the chunks of rows begin..end to shared memory. Copies of
/// STAGES - 1 chunks are under way while the other half works on one.
static __device__ __forceinline__ void copy_chunks(Stage* stages, const float* qkv, void* workspace, u32 chunks, u32 first_chunk,
                                                   u32 begin, u32 end, u32 head, u32 block_column) {
    const u32 thread = threadIdx.x - 64, count = (end - begin + ROWS - 1) / ROWS;
    auto load = [&](u32 c) {
        Stage& stage = stages[c % STAGES];
        Chunk from = chunk_of(workspace, chunks, first_chunk + c, head);
#pragma unroll 2
        for (u32 i = thread; i < 2 * KEY_TILE / 8; i += 64) copy_async(stage.keys + i * 8, from.keys + i * 8, true);
#pragma unroll 2
        for (u32 i = thread; i < 2 * PAIR_TILE / 8; i += 64) copy_async(stage.pairs + i * 8, from.pairs + i * 8, true);
        if (thread < ROWS / 2) copy_async(&stage.gates[0][0] + thread * 4, from.gates + thread * 4, true);
#pragma unroll 2
        for (u32 i = thread; i < ROWS * (COLUMNS / 4); i += 64) {
            u32 t = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
            bool there = begin + c * ROWS + t < end && block_column + column < DV;
            const float* v = qkv + (u64)(begin + c * ROWS + t) * QKV_STRIDE + 2 * HK * DK + head * DV + block_column + column;
            copy_async(stage.values + t * VALUE_LINE + column, there ? v : qkv, there);
        }
    };
#pragma unroll
    for (int c = 0; c < STAGES - 1; c++) {
        if (c < count) load(c);
        copy_commit();
    }
    for (u32 c = 0; c < count; c++) {
#if STAGES == 1
        if (c > 0) __syncthreads(); // the other half is done with chunk c - 1
        load(c);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
#else
        copy_wait<STAGES - 2>();
        // Chunk c has arrived completely, and the other half is done with chunk c - 1.
        __syncthreads();
        if (c + STAGES - 1 < count) load(c + STAGES - 1);
        copy_commit();
#endif
    }
}

extern "C" __global__ void __launch_bounds__(128, STAGES == 1 ? 2 : 1)
gated_delta_chunks(
#include "gated_delta_chunks.params"
) {
    take_turn();
    DYNAMIC_SHARED(char, shared);
    Stage* stages = (Stage*)shared;
    const u32 sequence = blockIdx.y, head = blockIdx.x / BLOCKS, block_column = blockIdx.x % BLOCKS * COLUMNS;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 begin = row_start[sequence], end = row_start[sequence + 1], count = (end - begin + ROWS - 1) / ROWS;
    if (count == 0) return;
    // Chunks of the sequences before this one.
    u32 first_chunk = 0;
    for (u32 b = lane; b < sequence; b += 32) first_chunk += (row_start[b + 1] - row_start[b] + ROWS - 1) / ROWS;
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) first_chunk += __shfl_xor_sync(FULL_WARP, first_chunk, d);

    if (warp >= 2) {
        copy_chunks(stages, qkv, workspace, chunks, first_chunk, begin, end, head, block_column);
        return;
    }

    const u32 group = lane / 4, quad = lane % 4, column = block_column + warp * 16;
    const bool active = column < DV;
    // This thread's first element; the others lie at constant distances.
    State* my_state = state + ((u64)slot[sequence] * HV + head) * (DK * DV) + quad * 2 * DV + column + group;
    float* my_y = y + ((u64)(begin + quad * 2) * HV + head) * DV + column + group;
    // s[n]: columns group, group + 8 of this warp's 16; rows 8 n + 2 quad, 2 quad + 1 of the state.
    float s[DK / 8][4];
#pragma unroll
    for (int n = 0; n < DK / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = active ? load_state(my_state + (n * 8 + i % 2) * DV + i / 2 * 8) : 0.0f;
    }

    for (u32 c = 0; c < count; c++) {
        if (STAGES == 1 && c > 0) __syncthreads();
        __syncthreads();
        if (!active) continue;
        const Stage& stage = stages[c % STAGES];
        const f16 *k_tile = stage.keys, *q_tile = stage.keys + KEY_TILE;

        float u[8][4], out[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) u[n][i] = out[n][i] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < DK / 16; k++) {
            u32 part[4];
            as_operand(part, s[2 * k], s[2 * k + 1]);
            multiply_rows(u, part, k_tile, k);
            multiply_rows(out, part, q_tile, k);
        }
        // V - e^G (K S), then U.
        u32 operand[4][4];
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 t = n * 8 + quad * 2 + i % 2;
                float e = stage.gates[0][t];
                u[n][i] = stage.values[t * VALUE_LINE + warp * 16 + group + i / 2 * 8] - e * u[n][i];
                out[n][i] *= e;
            }
        }
        as_operand(operand, u);
#pragma unroll
        for (int n = 0; n < 8; n++) u[n][0] = u[n][1] = u[n][2] = u[n][3] = 0.0f;
        multiply_lower(u, operand, stage.pairs);
        as_operand(operand, u);
        multiply_lower(out, operand, stage.pairs + PAIR_TILE);

        // S = e^(G_63) S + K^T (e^(G_63 - G) U)
        const float decay = stage.gates[0][ROWS - 1];
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) u[n][i] *= stage.gates[1][n * 8 + quad * 2 + i % 2];
        }
        as_operand(operand, u);
#pragma unroll
        for (int n = 0; n < DK / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] *= decay;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int n = 0; n < DK / 16; n++) {
                u32 x[4];
                load_matrices_transposed(x, row_major<KEY_LINE>(k_tile, k * 16, n * 16));
                mma_f16(s[2 * n], operand[k], x[0], x[1]);
                mma_f16(s[2 * n + 1], operand[k], x[2], x[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < DK / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = kept(s[n][i]);
        }

        // Rows left, from this thread's first one on.
        const int left = (int)(end - begin - c * ROWS) - (int)quad * 2;
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (n * 8 + i % 2 < left) my_y[(n * 8 + i % 2) * (HV * DV) + i / 2 * 8] = out[n][i];
            }
        }
        my_y += (u64)ROWS * HV * DV;
    }
    if (active) {
#pragma unroll
        for (int n = 0; n < DK / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) store_state(my_state + (n * 8 + i % 2) * DV + i / 2 * 8, s[n][i]);
        }
    }
}

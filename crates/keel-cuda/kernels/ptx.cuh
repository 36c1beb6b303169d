// PTX instructions that have no C++ equivalent, and packing of f16.
//
// Fragments of mma.m16n8k16 (lane = 4 * group + quad):
//   A 16x16, 4 registers of two f16: columns 2 quad, 2 quad + 1 of rows group, group + 8 | the same, 8 columns further
//   B 16x8,  2 registers: rows 2 quad, 2 quad + 1 of column group | the same, 8 rows further
//   C 16x8,  4 floats: row group, columns 2 quad, 2 quad + 1 | row group + 8
#pragma once
#include "common.cuh"

#define FULL_WARP 0xffffffffu
#define INF __int_as_float(0x7f800000)
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(128) type name[]

/// Address of shared memory as a PTX operand.
static __device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

/// Barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads.
static __device__ __forceinline__ void barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/// 16 bytes from global to shared memory, in the background; zeros if not `valid`.
static __device__ __forceinline__ void copy_async_to(u32 to, const void* from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
static __device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
    copy_async_to(shared_address(to), from, valid);
}

/// BYTES (4 or 8) from global to shared memory, in the background; zeros if not `valid`.
template <int BYTES> static __device__ __forceinline__ void copy_async_few(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(from), "n"(BYTES), "r"(valid ? BYTES : 0) : "memory");
}

/// 16 bytes to shared memory, the first `bytes` of them from global memory, the others zeros.
static __device__ __forceinline__ void copy_async_part(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

/// Closes a group of copies.
static __device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// Waits until at most `PENDING` of this thread's groups are under way.
template <int PENDING> static __device__ __forceinline__ void copy_wait() {
    static_assert(PENDING >= 0, "the assembler takes a negative number and waits for nothing");
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

/// Four 8x8 matrices of 16 bits; lane l gives the address of row l % 8 of matrix l / 8.
static __device__ __forceinline__ void load_matrices_at(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
static __device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* row) {
    load_matrices_at(r, shared_address(row));
}

/// A lane's address for load_matrices of 16 rows and 16 columns of a tile whose rows are LINE elements apart: the A
/// operand, or with load_matrices_transposed B from rows [k][n].
template <int LINE> static __device__ __forceinline__ const f16* row_major(const f16* tile, u32 row, u32 column) {
    u32 lane = threadIdx.x % 32;
    return tile + (row + lane % 16) * LINE + column + lane / 16 * 8;
}
/// The same for B from rows [n][k].
template <int LINE> static __device__ __forceinline__ const f16* column_major(const f16* tile, u32 row, u32 column) {
    u32 lane = threadIdx.x % 32;
    return tile + (row + lane / 16 * 8 + lane % 8) * LINE + column + lane / 8 % 2 * 8;
}

/// Where a 16-byte chunk of a row of 128 bytes lies in a tile of such rows: eight rows of a column are in different
/// banks.
static __device__ __forceinline__ u32 panel_offset(u32 row, u32 chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

/// The same, each matrix transposed.
static __device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/// `c += a b` for f16 16x16 by 16x8.
static __device__ __forceinline__ void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// `c += a b` for tf32 16x8 by 8x8. A: column quad of rows group and group + 8, then column quad + 4 of the same rows.
/// B: rows quad and quad + 4 of column group. C: as above.
static __device__ __forceinline__ void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    u32 x[6];
    float from[6] = {a0, a1, a2, a3, b0, b1};
#pragma unroll
    for (int i = 0; i < 6; i++) asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(x[i]) : "f"(from[i]));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]));
}

/// Two floats as f16 in one register, `low` in the low half; values beyond the range saturate.
static __device__ __forceinline__ u32 pack_f16(float low, float high) {
    const f16x2 r = two_f16(low, high);
    return *(const u32*)&r;
}

/// 2^x by the device's approximation; results below the normal numbers are 0.
static __device__ __forceinline__ float exp2_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// The low and the high f16 of a register.
static __device__ __forceinline__ float low_f16(u32 x) { return to_f32(f16{(unsigned short)x}); }
static __device__ __forceinline__ float high_f16(u32 x) { return to_f32(f16{(unsigned short)(x >> 16)}); }

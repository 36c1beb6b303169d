// Hopper's matrix instructions (sm_90a): a warpgroup multiplies 64 rows of A (f16) by a tile of B in shared memory, and
// continues while the product runs.
//
// Tiles are stored in panels of 64 columns: rows of 128 bytes, whose chunks lie at panel_offset. A panel begins at a
// multiple of 1024 bytes. Sums are fragments as in mma.sync: warp w of the warpgroup has rows from 16 w on, d[j] has
// columns from 8 j on.
#pragma once
#include "ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Descriptor of a tile that is summed over its columns: step s of 16 columns begins 2 s further in the same panel.
static __device__ __forceinline__ u64 panel_of_rows(u32 address) {
    return (u64)(address >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
/// Descriptor of a tile that is summed over its rows, with panels `panel_bytes` apart: step s of 16 rows begins 128 s
/// further.
static __device__ __forceinline__ u64 panels_of_columns(u32 address, u32 panel_bytes) {
    return (u64)(address >> 4) | (u64)(panel_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

/// Products started after this see all registers and shared memory written before it.
static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Closes a group of products.
static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `PENDING` groups are under way. Sums have to be settled before they are read.
template <int PENDING> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
/// Keeps the compiler from reading sums before the wait.
template <int TILES> static __device__ __forceinline__ void settle(float (&d)[TILES][4]) {
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(d[j][e])::"memory");
}
/// Makes writes to shared memory by ordinary instructions visible to products; a barrier must follow.
static __device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define SUMS_1(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SUMS_4(d, j) SUMS_1(d, j), SUMS_1(d, j + 1), SUMS_1(d, j + 2), SUMS_1(d, j + 3)
#define SUMS_8(d, j) SUMS_4(d, j), SUMS_4(d, j + 4)
#define SUMS_12(d, j) SUMS_8(d, j), SUMS_4(d, j + 8)
#define SUMS_16(d, j) SUMS_8(d, j), SUMS_8(d, j + 8)
#define SUMS_20(d, j) SUMS_16(d, j), SUMS_4(d, j + 16)
#define SUMS_24(d, j) SUMS_16(d, j), SUMS_8(d, j + 16)
#define SUMS_28(d, j) SUMS_24(d, j), SUMS_4(d, j + 24)
#define SUMS_32(d, j) SUMS_16(d, j), SUMS_16(d, j + 16)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_80 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_96 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_112 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_128 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/// One width of the product below: N columns, whose N / 2 sums are the first operands. The others follow them.
#define WGMMA_OF(N, SUMS, NAMES, A0, A1, A2, A3, B, BY)                                                                    \
    if constexpr (WIDTH == N)                                                                                              \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES "}, "                                \
                     "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, %" #BY ";"                               \
                     : SUMS(d, FROM / 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)BY_COLUMNS));

/// Columns FROM .. FROM + WIDTH of d += A B. A is a fragment of 16 columns in registers; B is from panel_of_rows, or
/// with BY_COLUMNS from panels_of_columns.
template <int WIDTH, int FROM, bool BY_COLUMNS, int TILES>
static __device__ __forceinline__ void wgmma(float (&d)[TILES][4], const u32 (&a)[4], u64 b) {
    static_assert(WIDTH % 32 == 0 && 32 <= WIDTH && WIDTH <= 256, "an instruction of these widths");
    WGMMA_OF(32, SUMS_4, NAMES_16, 16, 17, 18, 19, 20, 21)
    WGMMA_OF(64, SUMS_8, NAMES_32, 32, 33, 34, 35, 36, 37)
    WGMMA_OF(96, SUMS_12, NAMES_48, 48, 49, 50, 51, 52, 53)
    WGMMA_OF(128, SUMS_16, NAMES_64, 64, 65, 66, 67, 68, 69)
    WGMMA_OF(160, SUMS_20, NAMES_80, 80, 81, 82, 83, 84, 85)
    WGMMA_OF(192, SUMS_24, NAMES_96, 96, 97, 98, 99, 100, 101)
    WGMMA_OF(224, SUMS_28, NAMES_112, 112, 113, 114, 115, 116, 117)
    WGMMA_OF(256, SUMS_32, NAMES_128, 128, 129, 130, 131, 132, 133)
}

/// d = A B, or d += A B if `add`, with A and B from panel_of_rows.
template <int TILES> static __device__ __forceinline__ void wgmma(float (&d)[TILES][4], u64 a, u64 b, bool add) {
    static_assert(TILES == 8 || TILES == 16, "an instruction of these widths");
    if constexpr (TILES == 8)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NAMES_32 "}, %32, %33, p, 1, 1, 0, 0; }"
                     : SUMS_8(d, 0) : "l"(a), "l"(b), "r"((int)add));
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" NAMES_64 "}, %64, %65, p, 1, 1, 0, 0; }"
                     : SUMS_16(d, 0) : "l"(a), "l"(b), "r"((int)add));
}
#endif

// Shared by all kernels: element types without the toolkit's headers, strided operands, reports of wrong data.
#pragma once

// A condition of the preprocessor on a constant that is not given is an error. Without this it would take 0 for it.
#pragma nv_diag_error 193

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif

// Half-precision types by their bits. NVRTC from a package comes without cuda_fp16.h, so the conversions are here.
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
// Two of them in a register, x in the low half.
struct __align__(4) bf16x2 { bf16 x, y; };
struct __align__(4) f16x2 { f16 x, y; };
// A boolean of one byte: anything but zero is true.
struct flag { u8 byte; };

__device__ inline float to_f32(float x) { return x; }
__device__ inline float to_f32(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ inline float to_f32(u8 x) { return (float)x; }
__device__ inline float to_f32(u32 x) { return (float)x; }
__device__ inline float to_f32(i32 x) { return (float)x; }
__device__ inline float to_f32(i64 x) { return (float)x; }
__device__ inline float to_f32(flag x) { return x.byte ? 1.0f : 0.0f; }

__device__ inline i64 to_i64(float x) { return x != x ? 0 : (i64)x; }
__device__ inline i64 to_i64(f16 x) { return to_i64(to_f32(x)); }
__device__ inline i64 to_i64(bf16 x) { return to_i64(to_f32(x)); }
__device__ inline i64 to_i64(u8 x) { return x; }
__device__ inline i64 to_i64(u32 x) { return x; }
__device__ inline i64 to_i64(i32 x) { return x; }
__device__ inline i64 to_i64(i64 x) { return x; }
__device__ inline i64 to_i64(flag x) { return x.byte != 0; }

// The f32 towards zero from x, with the last bit set if any of x is lost: it rounds to a shorter float as x itself
// does.
__device__ inline float to_odd(i64 x) {
    const float y = __ll2float_rz(x);
    return __uint_as_float(__float_as_uint(y) | ((i64)y != x ? 1u : 0u));
}

// Conversion from f32: floats round to nearest; integers truncate and saturate, and NaN becomes 0.
template <typename Elem> struct From;
template <> struct From<float> {
    static const bool IS_FLOAT = true;
    __device__ static float f32(float x) { return x; }
    __device__ static float i64_(i64 x) { return (float)x; }
};
template <> struct From<f16> {
    static const bool IS_FLOAT = true;
    __device__ static f16 f32(float x) { f16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
    __device__ static f16 i64_(i64 x) { return f32(to_odd(x)); }
};
template <> struct From<bf16> {
    static const bool IS_FLOAT = true;
    __device__ static bf16 f32(float x) { bf16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
    __device__ static bf16 i64_(i64 x) { return f32(to_odd(x)); }
};
template <> struct From<u8> {
    static const bool IS_FLOAT = false;
    __device__ static u8 f32(float x) { return x != x ? 0 : (u8)fminf(fmaxf(truncf(x), 0.0f), 255.0f); }
    __device__ static u8 i64_(i64 x) { return (u8)x; }
};
template <> struct From<u32> {
    static const bool IS_FLOAT = false;
    __device__ static u32 f32(float x) { return x != x || x <= 0.0f ? 0u : x >= 4294967296.0f ? 0xffffffffu : (u32)x; }
    __device__ static u32 i64_(i64 x) { return (u32)x; }
};
template <> struct From<i32> {
    static const bool IS_FLOAT = false;
    __device__ static i32 f32(float x) {
        return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x <= -2147483648.0f ? (-2147483647 - 1) : (i32)x;
    }
    __device__ static i32 i64_(i64 x) { return (i32)x; }
};
template <> struct From<i64> {
    static const bool IS_FLOAT = false;
    __device__ static i64 f32(float x) {
        if (x != x) return 0;
        if (x >= 9223372036854775808.0f) return 9223372036854775807ll;
        if (x <= -9223372036854775808.0f) return -9223372036854775807ll - 1;
        return (i64)x;
    }
    __device__ static i64 i64_(i64 x) { return x; }
};
template <> struct From<flag> {
    static const bool IS_FLOAT = false;
    __device__ static flag f32(float x) { return flag{(u8)(x != 0.0f)}; }
    __device__ static flag i64_(i64 x) { return flag{(u8)(x != 0)}; }
};

__device__ inline bf16x2 two_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return *(bf16x2*)&r;
}
// Values beyond the range of f16 saturate to its greatest value.
__device__ inline f16x2 two_f16(float low, float high) {
    u32 r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return *(f16x2*)&r;
}
// a b + c, each half rounded once.
__device__ inline f16x2 __hfma2(f16x2 a, f16x2 b, f16x2 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(*(u32*)&a), "r"(*(u32*)&b), "r"(*(u32*)&c));
    return *(f16x2*)&r;
}
__device__ inline f16x2 __hmul2(f16x2 a, f16x2 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(*(u32*)&a), "r"(*(u32*)&b));
    return *(f16x2*)&r;
}
__device__ inline f16x2 __hsub2(f16x2 a, f16x2 b) {
    u32 r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(*(u32*)&a), "r"(*(u32*)&b));
    return *(f16x2*)&r;
}

// Hopper and later: kernels of a stream overlap. A kernel lets the next one start its blocks at once; the next one then
// waits until all kernels before it have ended.
// - Before its wait a kernel writes nothing. It reads only packed weights and data that the host knows to be unwritten
//   or settled (Call::is_untouched, Call::is_settled).
// - A kernel that does not wait is launched without overlap: later kernels would take its end for the end of the
//   kernels before it.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The first statement of a kernel that does no work before its inputs are ready.
__device__ inline void take_turn() {
    let_next_start();
    wait_for_inputs();
}

// Byte `i` of `word`, minus `zero` (a whole number), as a float. A byte in the low bits of the float 2^23 adds its
// value.
__device__ __forceinline__ float byte_as_float(u32 word, int i, float zero = 0.0f) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 | i)) - (8388608.0f + zero);
}

// Offsets of an operand's elements from its first one, in elements. The host has merged axes that are contiguous with
// each other. rank 0 means a gap-free operand.
struct Strides {
    u64 rank;
    u64 extent[8];
    u64 stride[8];
    __device__ u64 at(u64 i) const {
        if (rank == 0) return i;
        u64 place = 0;
        for (int axis = (int)rank - 1; axis > 0; --axis) {
            place += (i % extent[axis]) * stride[axis];
            i /= extent[axis];
        }
        return place + i * stride[0];
    }
};
static_assert(sizeof(Strides) == 17 * sizeof(u64), "words of a parameter");

// The first wrong value that a launch finds: the number of the header with which it reports, the kernel's number, the
// kind of error, and two numbers for the message. It is in the host's memory, which the host reads after the launch.
struct Wrong {
    u32 header;
    u32 kernel;
    u32 what;
    u32 number;
    u32 bound;
};

// The header of reports, on the device. Kernels race for `is_taken`. The host posts a new header before a launch if the
// old one may be taken, or leads to another launch's report.
struct Fault {
    u32 is_taken;
    u32 header;
    volatile Wrong* told;
};

__device__ inline void report(Fault* fault, u32 kernel, u32 what, u32 number, u32 bound) {
    if (atomicCAS(&fault->is_taken, 0u, 1u) != 0u) return;
    volatile Wrong* told = fault->told;
    told->kernel = kernel;
    told->what = what;
    told->number = number;
    told->bound = bound;
    told->header = fault->header;
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Sum over a warp, the same bits in every lane.
__device__ inline float warp_sum(float x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
__device__ inline float warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// Sum over a block of a multiple of 32 threads, at most 1024. `shared` holds 33 floats.
__device__ inline float block_sum(float x, float* shared) {
    x = warp_sum(x);
    const int warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        float y = threadIdx.x < warps ? shared[threadIdx.x] : 0.0f;
        y = warp_sum(y);
        if (threadIdx.x == 0) shared[32] = y;
    }
    __syncthreads();
    const float total = shared[32];
    __syncthreads();
    return total;
}

// The type in which pages keep keys and values: codes (KV_BITS), f16 (KV_F16) or f32.
#pragma once
#include "paged.cuh"

#if KV_BITS
#include "kv_coded.cuh"
typedef u8 kv_t;
#elif KV_F16
typedef f16 kv_t;
#else
typedef float kv_t;
#endif

// Loads and stores with the meaning that the protocol leans on.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "plan.h"

#ifdef MOELAB_EMULATE
#include "emulate.h"
#else
#define MOELAB_DYNAMIC_SHARED(name) extern __shared__ int32_t name[]
#endif

namespace moelab {

using u64 = unsigned long long;

// Sixteen bytes are written and read as one. A line is twelve bytes and the number of the exchange they belong to.
struct alignas(16) Line {
  uint32_t word[3], tag;
};

#ifndef MOELAB_EMULATE
__device__ __forceinline__ uint4 load_whole(const void* p) {
  u64 a, b;
  asm volatile("{.reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v;}"
               : "=l"(a), "=l"(b)
               : "l"(p)
               : "memory");
  return {(uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b, (uint32_t)(b >> 32)};
}

__device__ __forceinline__ void store_whole(void* p, const uint4& v) {
  const u64 a = (u64)v.y << 32 | v.x, b = (u64)v.w << 32 | v.z;
  asm volatile("{.reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v;}" ::"l"(p), "l"(a), "l"(b)
               : "memory");
}

__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// Release at system scope: all that this thread wrote, or saw written through a barrier of its warp or block, is
// visible at the peer to whoever acquires the flag.
__device__ __forceinline__ void store_release(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u64 load_relaxed(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ void wait_for_grid_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_grid_in() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

// A unit travels inverted: zero is what stands where nothing has come. Sixteen bytes of ones, which are NaN in every
// format of values, would look so; their last value goes as the NaN of the other sign. With `flip` zero it travels as
// it is, and sixteen zeros, which no packed scales are, end in the least scale that there is.
__device__ __forceinline__ void send_unit(void* p, uint4 v, uint32_t flip = 0xffffffffu) {
  v = {v.x ^ flip, v.y ^ flip, v.z ^ flip, v.w ^ flip};
  if ((v.x | v.y | v.z | v.w) == 0) v.w = flip ? 0x80000000u : 0x01000000u;
  store_whole(p, v);
}
__device__ __forceinline__ bool has_come(const uint4& raw) { return (raw.x | raw.y | raw.z | raw.w) != 0; }
__device__ __forceinline__ uint4 upright(const uint4& raw, uint32_t flip = 0xffffffffu) {
  return {raw.x ^ flip, raw.y ^ flip, raw.z ^ flip, raw.w ^ flip};
}
__device__ __forceinline__ void clear_unit(void* p) { store_whole(p, uint4{}); }

// What peers wrote while the kernel runs is read from the L2: the L1 may hold the line of an earlier exchange.
__device__ __forceinline__ uint4 load_fresh(const uint4* p) { return __ldcg(p); }

}  // namespace moelab

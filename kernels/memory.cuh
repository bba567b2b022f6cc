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

// Twelve bytes and the number of the exchange that they belong to, written and read as one.
struct alignas(16) Line {
  uint32_t word[3], tag;
};

#ifndef MOELAB_EMULATE
__device__ __forceinline__ Line load_line(const Line* p) {
  u64 a, b;
  asm volatile("{.reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v;}"
               : "=l"(a), "=l"(b)
               : "l"(p)
               : "memory");
  return {{(uint32_t)a, (uint32_t)(a >> 32), (uint32_t)b}, (uint32_t)(b >> 32)};
}

__device__ __forceinline__ void store_line(Line* p, uint32_t x, uint32_t y, uint32_t z, uint32_t tag) {
  const u64 a = (u64)y << 32 | x, b = (u64)tag << 32 | z;
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

// What peers wrote while the kernel runs is read from the L2: the L1 may hold the line of an earlier exchange.
__device__ __forceinline__ uint4 load_fresh(const uint4* p) { return __ldcg(p); }

}  // namespace moelab

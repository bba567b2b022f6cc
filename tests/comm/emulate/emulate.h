// The few things of CUDA that the kernels use, on the CPU: a block is a thread of the operating system, its threads are
// fibers that change over at barriers. Blocks really run at once, so lines, flags, waits and fused halves are exercised;
// what is not is the GPU's memory order (x86 hides a missing fence) and its speed.
//
// What a kernel must not lean on is made bad: shared memory starts with nonsense, and a block falls behind at random.
#pragma once
#include <cuda_runtime.h>
#include <emmintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

#undef __shared__
#define __shared__ static thread_local
#undef __noinline__
#define __noinline__ __attribute__((noinline))
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#define MOELAB_DYNAMIC_SHARED(name) int32_t* const name = emulate::dynamic_shared()

namespace emulate {
uint3 thread();
uint3 block();
dim3 grid();
dim3 threads();
void pause();  // between two looks of a wait
void block_barrier();
int block_reduce(int predicate, bool all);
void warp_barrier();
uint64_t* warp_exchange(uint64_t value);  // the 32 values, until this lane's next exchange
int32_t* dynamic_shared();
}  // namespace emulate

#define threadIdx (emulate::thread())
#define blockIdx (emulate::block())
#define gridDim (emulate::grid())
#define blockDim (emulate::threads())

inline void __syncthreads() { emulate::block_barrier(); }
inline int __syncthreads_and(int p) { return emulate::block_reduce(p, true); }
inline int __syncthreads_or(int p) { return emulate::block_reduce(p, false); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulate::warp_barrier(); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { T v; __builtin_memcpy(&v, const_cast<const T*>(p), sizeof v); return v; }
template <class A, class B> auto min(A a, B b) { return a < b ? a : b; }
template <class A, class B> auto max(A a, B b) { return a > b ? a : b; }
template <class T> T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }
template <class T> T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
template <class T> T atomicCAS(T* p, T was, T v) {
  __atomic_compare_exchange_n(p, &was, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return was;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline int warp_lane() { return threadIdx.x % 32; }
inline unsigned __ballot_sync(unsigned, int p) {
  uint64_t* v = emulate::warp_exchange(p != 0);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (unsigned)v[i] << i;
  return bits;
}
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, p) == 0xffffffffu; }
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
template <class T> uint64_t as_bits(T value) { uint64_t bits = 0; memcpy(&bits, &value, sizeof value); return bits; }
template <class T> T from_bits(uint64_t bits) { T value; memcpy(&value, &bits, sizeof value); return value; }
template <class T> unsigned __match_any_sync(unsigned, T value) {
  uint64_t* v = emulate::warp_exchange(as_bits(value));
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (unsigned)(v[i] == as_bits(value)) << i;
  return bits;
}
template <class T> T __shfl_sync(unsigned, T value, int from) {
  return from_bits<T>(emulate::warp_exchange(as_bits(value))[from & 31]);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int d) {
  return from_bits<T>(emulate::warp_exchange(as_bits(value))[warp_lane() ^ d]);
}
template <class T> T __shfl_up_sync(unsigned, T value, int d) {
  const int lane = warp_lane();
  return from_bits<T>(emulate::warp_exchange(as_bits(value))[lane >= d ? lane - d : lane]);
}
template <class T> T __shfl_down_sync(unsigned, T value, int d) {
  const int lane = warp_lane();
  return from_bits<T>(emulate::warp_exchange(as_bits(value))[lane + d < 32 ? lane + d : lane]);
}

namespace moelab {
using u64 = unsigned long long;
// 16 bytes as one access: an aligned movdqa is single on processors with AVX. In assembly, since a compiler is free to
// take an intrinsic apart.
inline uint4 load_whole(const void* p) {
  emulate::pause();
  __m128i v;
  asm volatile("movdqa %1, %0" : "=x"(v) : "m"(*static_cast<const __m128i*>(p)) : "memory");
  uint4 u;
  memcpy(&u, &v, sizeof u);
  return u;
}
inline void store_whole(void* p, const uint4& u) {
  __m128i v;
  memcpy(&v, &u, sizeof v);
  asm volatile("movdqa %1, %0" : "=m"(*static_cast<__m128i*>(p)) : "x"(v) : "memory");
}
u64 now_ns();
inline u64 load_acquire(const u64* p) { emulate::pause(); return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_release(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline u64 load_relaxed(const u64* p) { emulate::pause(); return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void store_relaxed(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void wait_for_grid_before() {}
inline void let_next_grid_in() {}
}  // namespace moelab

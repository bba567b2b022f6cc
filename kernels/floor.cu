// A flag there and back, a kernel that does nothing, stores to a peer: see floor.h.
#include "floor.h"
#include "memory.cuh"

namespace moelab {
namespace {

constexpr int kFlagStride = 16;  // words: flags stand 128 bytes apart, so that no two share a line
constexpr int kMostRanks = 1024;

// state: {epoch, failure}, aligned to 16 bytes. An epoch rises by one in every launch, so nothing is cleared and graphs
// replay. A wait that outlasts its limit writes 1 + the peer that did not come, and later launches return at once.
__global__ void flag_kernel(u64* const* windows, int rank, int ranks, u64* state, u64 timeout_ns) {
  const int peer = threadIdx.x;
  const bool mine = peer < ranks && peer != rank;
  // All loads go out before the first of them is looked at: one latency, not three.
  const ulonglong2 known = __ldcg((const ulonglong2*)state);
  u64* const own = windows[rank];
  u64* const theirs = mine ? windows[peer] : own;
  const u64 epoch = known.x + 1;
  if (known.y) return;
  if (mine) {
    store_release(theirs + rank * kFlagStride, epoch);
    const u64 start = now_ns();
    for (int polls = 1; load_acquire(own + peer * kFlagStride) < epoch; ++polls)
      if (polls % 64 == 0 && now_ns() - start > timeout_ns) {
        store_relaxed(state + 1, 1 + peer);
        break;
      }
  }
  __syncthreads();
  if (threadIdx.x == 0) store_relaxed(state, epoch);
}

__global__ void empty_kernel() {}

// 16 bytes a thread and store, eight in flight; the values come from a register, so only the way out is measured.
__global__ void __launch_bounds__(512) stores_kernel(uint4* target, int64_t units) {
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  const uint4 value = make_uint4(blockIdx.x, threadIdx.x, 0, 0);
  int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + 7 * step < units; at += 8 * step)
#pragma unroll
    for (int i = 0; i < 8; ++i) target[at + i * step] = value;
  for (; at < units; at += step) target[at] = value;
}

}  // namespace
}  // namespace moelab

#define MOELAB_EXPORT extern "C" __attribute__((visibility("default")))

MOELAB_EXPORT int moelab_floor_flag(uint64_t* const* windows, int rank, int ranks, uint64_t* state,
                                    uint64_t timeout_ns, void* stream) {
  if (ranks < 1 || ranks > moelab::kMostRanks || rank < 0 || rank >= ranks) return cudaErrorInvalidValue;
  moelab::flag_kernel<<<1, (ranks + 31) / 32 * 32, 0, (cudaStream_t)stream>>>(
      (moelab::u64* const*)windows, rank, ranks, (moelab::u64*)state, timeout_ns);
  return cudaGetLastError();
}

MOELAB_EXPORT int moelab_floor_empty(int blocks, int threads, void* stream) {
  moelab::empty_kernel<<<blocks, threads, 0, (cudaStream_t)stream>>>();
  return cudaGetLastError();
}

MOELAB_EXPORT int moelab_floor_stores(uint8_t* target, int64_t bytes, int blocks, void* stream) {
  if (bytes % 16 || blocks < 1) return cudaErrorInvalidValue;
  moelab::stores_kernel<<<blocks, 512, 0, (cudaStream_t)stream>>>((uint4*)target, bytes / 16);
  return cudaGetLastError();
}

// Which kernel a shape and a call ask for, and how it is launched.
#pragma once
#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "kernels.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace moelab {

struct Kernel {
  const void* function;
  int threads;
  size_t shared;
};

template <class Ranks, class Y, int kReturns, bool kPackets>
const void* pick_combine(int halves) {
#define MOELAB_PICK(h)                                                              \
  case h:                                                                           \
    if constexpr (kPackets) return (const void*)combine_by_packets<Ranks, h, Y, kReturns>; \
    else return (const void*)combine_by_flags<Ranks, h, Y, kReturns>;
  switch (halves) { MOELAB_PICK(1) MOELAB_PICK(2) MOELAB_PICK(3) }
#undef MOELAB_PICK
  return nullptr;
}

template <class Ranks, class Y, bool kPackets>
const void* pick_combine(int returns, int halves) {
  switch (returns) {
    case MOELAB_RETURN_ROWS: return pick_combine<Ranks, Y, MOELAB_RETURN_ROWS, kPackets>(halves);
    case MOELAB_RETURN_F32: return pick_combine<Ranks, Y, MOELAB_RETURN_F32, kPackets>(halves);
    case MOELAB_RETURN_Y: return pick_combine<Ranks, Y, MOELAB_RETURN_Y, kPackets>(halves);
  }
  return nullptr;
}

template <class Ranks, bool kPackets>
const void* pick_dispatch(int halves, bool quantize) {
#define MOELAB_PICK(h, q)                                                       \
  case h << 1 | q:                                                              \
    if constexpr (kPackets) return (const void*)dispatch_by_packets<Ranks, h, q>; \
    else return (const void*)dispatch_by_flags<Ranks, h, q>;
  switch (halves << 1 | (quantize && halves & MOELAB_SEND)) {
    MOELAB_PICK(1, 0) MOELAB_PICK(1, 1) MOELAB_PICK(2, 0) MOELAB_PICK(3, 0) MOELAB_PICK(3, 1)
  }
#undef MOELAB_PICK
  return nullptr;
}

template <class Ranks>
Kernel pick(const Plan& p, int what, int halves, bool quantize) {
  const MoelabShape& s = p.shape;
  const bool packets = s.protocol == MOELAB_PACKETS, wide = s.payload == MOELAB_F32;
  if (what == MOELAB_DISPATCH) {
    const size_t shared = halves & MOELAB_RECV ? 4 * ((size_t)(s.dp + 1) * p.local_experts + s.dp) : 0;
    if constexpr (!Ranks::Link::remote)
      if (packets) return {pick_dispatch<Ranks, true>(halves, quantize), kDispatchThreads, shared};
    return {pick_dispatch<Ranks, false>(halves, quantize), kFlagThreads, shared};
  }
  if constexpr (!Ranks::Link::remote)
    if (packets) return {pick_combine<Ranks, __nv_bfloat16, true>(s.returns, halves), kCombineThreads, 0};
  const void* f = wide ? pick_combine<Ranks, float, false>(s.returns, halves)
                       : pick_combine<Ranks, __nv_bfloat16, false>(s.returns, halves);
  return {f, kFlagThreads, 0};
}

inline int prepare(const Kernel& k) {
  if (k.function == nullptr) return cudaErrorInvalidValue;
  if (k.shared <= 12 * 1024) return 0;  // with what is static, within 48 KiB
  return cudaFuncSetAttribute(k.function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)k.shared);
}

// Blocks of it that are on the current GPU at once, or -cudaError_t. Asked for in every launch, answered from memory.
inline int most_blocks(const Kernel& k) {
  static std::mutex one;
  static std::map<std::tuple<int, const void*, size_t>, int> known;
  int device, sms, each;
  if (cudaError_t e = cudaGetDevice(&device)) return -e;
  const std::lock_guard<std::mutex> guard(one);
  int& blocks = known[{device, k.function, k.shared}];
  if (blocks > 0) return blocks;
  if (int e = prepare(k)) return -e;
  if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return -e;
  if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, k.function, k.threads, k.shared)) return -e;
  return blocks = sms * each;
}

template <class Ranks>
int launch(const Kernel& k, const Plan& plan, const Ranks& ranks, int grid, bool cooperative, bool early,
           void* stream) {
  if (int e = prepare(k)) return e;
  cudaLaunchAttribute attribute = {};
  if (cooperative) attribute.id = cudaLaunchAttributeCooperative, attribute.val.cooperative = 1;
  else
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization,
    attribute.val.programmaticStreamSerializationAllowed = early;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid), config.blockDim = dim3(k.threads), config.dynamicSmemBytes = k.shared;
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = &attribute, config.numAttrs = 1;
  void* arguments[] = {const_cast<Plan*>(&plan), const_cast<Ranks*>(&ranks)};
  return cudaLaunchKernelExC(&config, k.function, arguments);
}

// A block for each piece of work that there can be, as far as they fit; one more writes the header.
inline int choose_blocks(const Plan& p, const Kernel& k, int what) {
  int64_t pieces = (int64_t)p.per_source * p.ranks;
  if (p.shape.protocol != MOELAB_PACKETS) pieces = (pieces + k.threads / 32 - 1) / (k.threads / 32);
  else pieces *= what == MOELAB_DISPATCH ? p.dispatch_parts : p.combine_parts;
  const int fit = most_blocks(k);
  return (int)std::min<int64_t>({pieces + 1, fit, MOELAB_MOST_BLOCKS});
}

template <class Link>
int launch_one(const Plan& p, const MoelabCall& call, const Link& link, int what, int halves, int blocks, bool early,
               void* stream) {
  for (const int64_t stride : {call.ids_stride[0], call.ids_stride[1], call.weights_stride[0], call.weights_stride[1]})
    if (stride > INT32_MAX / 8 || stride < -(INT32_MAX / 8)) return cudaErrorInvalidValue;
  const One<Link> one{call, link};
  const Kernel k = pick<One<Link>>(p, what, halves, call.quantize);
  if (blocks == 0) blocks = choose_blocks(p, k, what);
  if (blocks < 0) return -blocks;
  if (blocks == 0 || blocks > MOELAB_MOST_BLOCKS) return cudaErrorInvalidConfiguration;
  return launch(k, p, one, blocks, false, early, stream);
}

// In portable.cu.
int launch_puts(const Plan& p, const MoelabCall& call, int what, int halves, int blocks, bool early, void* stream);
int most_blocks_puts(const Plan& p, int what, int halves, bool quantize);

}  // namespace moelab

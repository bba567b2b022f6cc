// The kernels, the same for every link.
#pragma once
#include "flag_outputs.cuh"

namespace moelab {

// One rank: the whole grid, its call by value. Many: `blocks` each, their calls in device memory.
template <class Link_>
struct One {
  using Link = Link_;
  MoelabCall call;
  Link link;
  __device__ Rank<Link> rank(const Plan& plan) const {
    return {plan, call, link, (int)blockIdx.x, (int)gridDim.x, 0, 0, 0, 0, 0, nullptr, false};
  }
};
template <class Link_>
struct Many {
  using Link = Link_;
  const MoelabCall* calls;
  int blocks;
  Link link;
  __device__ Rank<Link> rank(const Plan& plan) const {
    return {plan, calls[blockIdx.x / blocks], link, (int)blockIdx.x % blocks, blocks, 0, 0, 0, 0, 0, nullptr, false};
  }
};

template <class Ranks, int kHalves, bool kQuantize>
__global__ void __launch_bounds__(kDispatchThreads, 4)
    dispatch_by_packets(const __grid_constant__ Plan plan, const __grid_constant__ Ranks ranks) {
  auto r = ranks.rank(plan);
  r.begin(kHalves & MOELAB_SEND);
  if constexpr (kHalves & MOELAB_SEND) {
    const int n = r.tokens_to_send();
    if (r.block == r.blocks - 1 && !send_header(r, n)) return;
    if (!send_packets<typename Ranks::Link, kQuantize>(r, n)) return;
    if (plan.shape.tp > 1) r.remember_home(n, r.block, r.blocks);
    if (r.block == 0 && threadIdx.x == 0) *r.tokens() = n;
  }
  if constexpr (kHalves & MOELAB_RECV) {
    r.settle(false);
    receive_packets(r);
  }
}

template <class Ranks, int kHalves, class Y, int kReturns>
__global__ void __launch_bounds__(kCombineThreads, 4)
    combine_by_packets(const __grid_constant__ Plan plan, const __grid_constant__ Ranks ranks) {
  auto r = ranks.rank(plan);
  r.begin(false);
  // What the second half begins with is asked for before the first.
  const int n = *r.tokens(), first = r.block / plan.combine_parts;
  const Entry home = first < plan.shape.max_tokens ? home_of(r, first) : Entry{kNowhere, 0.f};
  if constexpr (kHalves & MOELAB_SEND) {
    if (r.block == r.blocks - 1) {
      r.settle(false);
      r.entered_by_me();
    }
    return_packets<typename Ranks::Link, Y, kReturns>(r);
  }
  r.settle(false);
  if constexpr (kHalves & MOELAB_RECV)
    if (gather_packets<typename Ranks::Link, Y, kReturns>(r, n, home)) r.end_exchange();
}

// With send_blocks, the first blocks only send while the others only receive.
template <class Link>
__device__ int sending_blocks(const Rank<Link>& r, int halves) {
  return halves == MOELAB_FUSED && r.call.send_blocks < r.blocks ? r.call.send_blocks : 0;
}

template <class Ranks, int kHalves, bool kQuantize>
__global__ void __launch_bounds__(kFlagThreads, 1)
    dispatch_by_flags(const __grid_constant__ Plan plan, const __grid_constant__ Ranks ranks) {
  auto r = ranks.rank(plan);
  r.begin(kHalves & MOELAB_SEND);
  r.settle(kHalves & MOELAB_SEND);
  if (__syncthreads_or(r.bad)) return;
  const int split = sending_blocks(r, kHalves);
  if constexpr (kHalves & MOELAB_SEND)
    if (!split || r.block < split) {
      const int n = r.tokens_to_send();
      send_flagged<typename Ranks::Link, kQuantize>(r, n, r.block, split ? split : r.blocks);
      r.remember_home(n, r.block, split ? split : r.blocks);
      if (r.block == 0 && threadIdx.x == 0) *r.tokens() = n;
    }
  if constexpr (kHalves & MOELAB_RECV)
    if (!split || r.block >= split) receive_flagged(r, r.block - split, r.blocks - split);
}

template <class Ranks, int kHalves, class Y, int kReturns>
__global__ void __launch_bounds__(kFlagThreads, 1)
    combine_by_flags(const __grid_constant__ Plan plan, const __grid_constant__ Ranks ranks) {
  auto r = ranks.rank(plan);
  r.begin(false);
  r.settle(false);
  if (__syncthreads_or(r.bad)) return;
  const int split = sending_blocks(r, kHalves);
  if constexpr (kHalves & MOELAB_SEND)
    if (!split || r.block < split)
      return_flagged<typename Ranks::Link, Y, kReturns>(r, r.block, split ? split : r.blocks);
  if constexpr (kHalves & MOELAB_RECV) {
    if (!split || r.block >= split)
      if (!gather_flagged<typename Ranks::Link, Y, kReturns>(r, r.block - split, r.blocks - split)) return;
    r.end_exchange();
  }
}

}  // namespace moelab

// One rank in one launch: where its memory is, which exchange it is in, and how it waits.
//
// An exchange has a number, its *epoch*, counted from 1 in the state of each rank's slot; combine_recv leaves it there.
// No flag is ever cleared: what stands in memory belongs to the exchange whose number stands beside it.
#pragma once
#include "memory.cuh"

namespace moelab {

enum Half : uint32_t { kDispatchSend = 1, kDispatchRecv = 2, kCombineRecv = 4 };

// At the end of a window, 64 bits each. `aborted_by` is 1 + the rank that gave up first, as its peers are told.
struct Errors {
  u64 failed, aborted_by, told;
};

struct Entry {
  uint32_t where;
  float weight;
};

// Every window can be stored to. A link that puts has `remote` true; see portable.cu.
struct DirectLink {
  static constexpr bool remote = false;
  __device__ static u64 look(const u64* flag, u64) { return load_acquire(flag); }
};

template <class Link>
struct Rank {
  const Plan& plan;
  const MoelabCall& call;
  const Link& link;
  int block, blocks;
  u64 epoch;
  bool bad;  // this thread has seen a failure; its block leaves as one at the next barrier that asks

  template <class T>
  __device__ static T* at(uint8_t* base, int64_t offset) {
    return reinterpret_cast<T*>(base + offset);
  }
  __device__ uint8_t* slot_of(int rank) const {
    uint8_t* window = reinterpret_cast<uint8_t*>(__ldg(reinterpret_cast<const u64*>(call.windows) + rank));
    return window == nullptr ? nullptr : window + call.slot * plan.slot_bytes;
  }
  __device__ uint8_t* mine() const { return call.window + call.slot * plan.slot_bytes; }
  __device__ uint8_t* state() const { return call.state + call.slot * plan.state_slot_bytes; }
  __device__ Errors* errors() const { return at<Errors>(call.window, plan.error); }
  __device__ uint32_t tag() const { return (uint32_t)epoch; }
  __device__ bool sweeps() const { return epoch % kSweep == 0; }

  __device__ u64* epochs() const { return at<u64>(state(), 0); }
  __device__ int32_t* tokens() const { return at<int32_t>(state(), kStateTokens); }
  __device__ int32_t* most() const { return at<int32_t>(state(), kStateMost); }
  __device__ uint32_t* ticket() const { return at<uint32_t>(state(), kStateTicket); }
  __device__ int32_t* tokens_of() const { return at<int32_t>(state(), plan.tokens_of); }
  __device__ Entry* home(int64_t token) const { return at<Entry>(state(), plan.home) + token * plan.shape.top_k; }
  __device__ Entry* arrived(int64_t at_) const { return at<Entry>(state(), plan.arrived) + at_ * plan.shape.top_k; }
  __device__ int32_t* lane(int64_t at_) const { return at<int32_t>(state(), plan.lane) + at_; }
  __device__ Line* header(uint8_t* slot, int from) const {
    return at<Line>(slot, plan.header) + (int64_t)from * plan.header_lines;
  }
  __device__ Line* entry(uint8_t* slot, int64_t at_) const { return at<Line>(slot, plan.entry) + at_ * plan.entry_lines; }
  __device__ int source_tokens(int tokens, int rank) const {  // of a group's tokens, those that this rank sends
    const int tp = plan.shape.tp, first = rank % tp;
    return tokens > first ? (tokens - first + tp - 1) / tp : 0;
  }

  // Everything at the start asks memory at once; `bad` is looked at where the block meets first.
  __device__ void begin(bool sends) {
    wait_for_grid_before();
    let_next_grid_in();
    epoch = epochs()[block] + 1;
    bad = false;
    if (threadIdx.x == 0) bad = broken(kDispatchSend);
    if (sends)  // the one barrier: every rank has ended reading what the last exchange of this slot brought it
      for (int q = threadIdx.x; q < plan.ranks && !bad; q += blockDim.x)
        bad = !wait(at<u64>(mine(), plan.entered) + q, epoch - 1, kDispatchSend, q);
  }

  __device__ void entered_by_me() const {  // the kernel before this one has read all; stream order is enough
    for (int q = threadIdx.x; q < plan.ranks; q += blockDim.x) {
      if (uint8_t* slot = slot_of(q)) store_relaxed(at<u64>(slot, plan.entered) + call.rank, epoch);
      else if constexpr (Link::remote) link.signal(*this, q, plan.entered + 8 * call.rank);
    }
  }

  __device__ void end_exchange() const {
    for (int i = block + threadIdx.x * blocks; i < MOELAB_MOST_BLOCKS; i += blocks * blockDim.x) epochs()[i] = epoch;
  }

  // True once the flag has reached `goal`; false when time is up or somebody has given up.
  __device__ bool wait(const u64* flag, u64 goal, Half half, int peer) const {
    return wait_for([&](u64& seen) { return (seen = link.look(flag, goal)) >= goal; }, goal, half, peer);
  }
  __device__ bool wait(const Line* line, Line& got, Half half, int peer) const {
    return wait_for([&](u64& seen) { return seen = (got = load_line(line)).tag, got.tag == tag(); }, epoch, half, peer);
  }

  template <class Look>
  __device__ bool wait_for(Look&& look, u64 expected, Half half, int peer) const {
    u64 seen;
    if (look(seen)) return true;
#ifdef MOELAB_BREAK_WAIT
    return true;  // for the tests, which must notice
#endif
    const u64 start = now_ns();
    for (int poll = 1;; ++poll) {
      if (look(seen)) return true;
      if (poll % 64) continue;
      if (broken(half)) return false;
      if (now_ns() - start > call.timeout_ns) {
        give_up(half, peer, expected, seen);
        return false;
      }
    }
  }

  __device__ bool broken(Half half) const {
    const u64 failed = load_relaxed(&errors()->failed), by = load_relaxed(&errors()->aborted_by);
    if (failed) return true;
    if (by && atomicCAS(&errors()->told, 0ull, 1ull) == 0ull) tell_host(2, half, (int)by - 1, epoch, 0);
    return by != 0;
  }

  __device__ void give_up(Half half, int peer, u64 expected, u64 seen) const {
    if (atomicCAS(&errors()->failed, 0ull, 1ull) != 0ull) return;
    if (atomicCAS(&errors()->told, 0ull, 1ull) == 0ull) tell_host(1, half, peer, expected, seen);
    for (int q = 0; q < plan.ranks; ++q) {
      uint8_t* slot = q == call.rank ? nullptr : slot_of(q);
      if (slot != nullptr)
        store_relaxed(&at<Errors>(slot - call.slot * plan.slot_bytes, plan.error)->aborted_by, 1ull + call.rank);
    }
  }

  __device__ void tell_host(int failed, Half half, int peer, u64 expected, u64 seen) const {
    u64* host = reinterpret_cast<u64*>(call.host_error);
    if (host == nullptr) return;
    store_relaxed(host + MOELAB_E_HALF, half);
    store_relaxed(host + MOELAB_E_PEER, peer);
    store_relaxed(host + MOELAB_E_EXPECTED, expected);
    store_relaxed(host + MOELAB_E_SEEN, seen);
    store_release(host + MOELAB_E_FAILED, failed);
  }
  __device__ void input_error(int word) const {
    if (call.host_error != nullptr) store_relaxed(reinterpret_cast<u64*>(call.host_error) + word, 1);
  }

  __device__ int64_t load_id(int64_t token, int k) const {
    const int64_t i = token * call.ids_stride[0] + k * call.ids_stride[1];
    return call.ids_bytes == 8 ? __ldg(static_cast<const long long*>(call.ids) + i)
                               : __ldg(static_cast<const int*>(call.ids) + i);
  }
  __device__ float load_weight(int64_t token, int k) const {
    return __ldg(call.weights + token * call.weights_stride[0] + k * call.weights_stride[1]);
  }

  // T, or what the device says; more than fit are cut off and noted.
  __device__ int tokens_to_send() const {
    const int most = min(call.tokens, plan.shape.max_tokens);
    int n = call.num_tokens == nullptr ? call.tokens : *call.num_tokens;
    if (n < 0 || n > most) {
      if (block == 0 && threadIdx.x == 0) input_error(MOELAB_E_BAD_COUNT);
      n = n < 0 ? 0 : most;
    }
    return n;
  }
  // The part of the state that the way home needs, since the caller may overwrite ids and weights.
  __device__ void remember_home(int n, int part, int parts) const {
    const int K = plan.shape.top_k;
    for (int i = part * blockDim.x + threadIdx.x; i < n * K; i += parts * blockDim.x) {
      const int64_t e = load_id(i / K, i % K);
      const bool legal = e >= 0 && e < plan.shape.experts;
      if (!legal && e != -1) input_error(MOELAB_E_BAD_IDS);
      home(i / K)[i % K] = {legal ? (uint32_t)e : kNowhere, legal ? load_weight(i / K, i % K) : 0.f};
    }
    if (part == 0 && threadIdx.x == 0) *tokens() = n;
  }
};

}  // namespace moelab

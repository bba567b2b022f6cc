// One rank in one launch: where its memory is, which exchange it is in, and how it waits.
//
// An exchange has a number, its *epoch*, counted from 1 in the state of each rank's slot; combine_recv leaves it there.
// What stands in a window belongs to the exchange whose number stands beside it, or is zero once it has been read.
//
// Why nothing is read too early. A reader looks at each 16 bytes (packets), or acquires a flag that was released behind
// what it stands for (flags), or sees the signal of the same put (puts).
//
// Why nothing is overwritten too early. n is the exchange before; s and d are any ranks, the same one too.
// | memory                           | is rewritten by       | after it has seen        | which implies              |
// |----------------------------------|-----------------------|--------------------------|----------------------------|
// | at d: header, entries, tokens and| s, dispatch_send(n+1) | entered(n) of every rank,| d has ended                |
// |   their flags                    |                       |   each warp by itself    |   dispatch_recv(n)         |
// | at s: outputs and their flags    | d, combine_send(n+1)  | headers(n+1) of all ranks| each, every TP rank too,   |
// |                                  |                       |                          |   has ended combine_recv(n)|
// | at s: entered[d]                 | d, combine_send(n+1)  | headers(n+1) of all ranks| s has seen entered(n); a   |
// |                                  |                       |                          |   late warp sees n+1, >= n |
// | at s: outbox of notice and tokens| s, dispatch_send(n+1) | entered(n) of every rank | the signals were seen, so  |
// |                                  |                       |                          |   all had been delivered   |
// | at d: outbox of outputs          | d, combine_send(n+1)  | headers(n+1) of all ranks| likewise, in combine_recv(n)|
// The zero that a reader leaves is performed at the end of its kernel, which comes before the entered or header that
// lets the peer store there again, and lands where the peer's store will land. `entered` may leave at the start of
// combine_send, since the kernel before it did the reading; in a launch that fused dispatch_recv with combine_send
// it could not. The one wait that nothing else implies is that for `entered`, since a rank that got nothing from s
// sends it nothing either: it is the only barrier, waited for when the slot's next exchange begins, where it is
// oldest.
//
// Assumed: stores land at any time and in any order, also after their kernel; 16 bytes land as one; a release, or
// the signal of a put, lands behind its data; between two kernels of a stream the first one's loads have returned
// and its stores to its own memory are performed; no store is made before the branch that it depends on is decided.
// tests/comm/protocol.py goes through every interleaving of small models under these, and finds the fault when a
// safeguard is taken out.
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
  __device__ static u64 look(const u64* flag, u64, bool) { return load_acquire(flag); }
  // Where nothing is read behind the flag, and only stores wait for it.
  __device__ static u64 peek(const u64* flag, u64, bool) { return load_relaxed(flag); }
  __device__ static void tell(u64*, u64, int) {}  // a peer that is not mapped
};

template <class Link>
struct Rank;

// What a wait waits for: a flag of at least `goal` (kPeek: of which only stores depend), a line of that number, any
// unit.
enum What : int { kFlag, kPeek, kLine, kUnit };

// Waiting and failing are apart from the kernels, whose own instructions are fetched the faster the fewer they are.
static __device__ void tell_host(const MoelabCall& call, int failed, Half half, int peer, u64 expected, u64 seen) {
  u64* host = reinterpret_cast<u64*>(call.host_error);
  if (host == nullptr) return;
  store_relaxed(host + MOELAB_E_HALF, half);
  store_relaxed(host + MOELAB_E_PEER, peer);
  store_relaxed(host + MOELAB_E_EXPECTED, expected);
  store_relaxed(host + MOELAB_E_SEEN, seen);
  store_release(host + MOELAB_E_FAILED, failed);
}

static __device__ Errors* errors_of(const Plan& plan, uint8_t* window) {
  return reinterpret_cast<Errors*>(window + plan.error);
}

// Whether this rank or, as it has told us, another has given up.
static __device__ __noinline__ bool broken_rank(const Plan& plan, const MoelabCall& call, u64 epoch, Half half) {
  Errors* e = errors_of(plan, call.window);
  const u64 failed = load_relaxed(&e->failed), by = load_relaxed(&e->aborted_by);
  if (by && !failed && atomicCAS(&e->told, 0ull, 1ull) == 0ull) tell_host(call, 2, half, (int)by - 1, epoch, 0);
  return (failed | by) != 0;
}

template <class Link>
__device__ __noinline__ void give_up(const Plan& plan, const MoelabCall& call, const Link& link, Half half, int peer,
                                     u64 expected, u64 seen) {
  Errors* e = errors_of(plan, call.window);
  if (atomicCAS(&e->failed, 0ull, 1ull) != 0ull) return;
  if (atomicCAS(&e->told, 0ull, 1ull) == 0ull) tell_host(call, 1, half, peer, expected, seen);
#pragma unroll 1
  for (int q = 0; q < plan.ranks; ++q) {
    if (q == call.rank) continue;
    if (call.windows[q] != nullptr) {
      store_relaxed(&errors_of(plan, call.windows[q])->aborted_by, 1ull + call.rank);
    } else {
      link.tell(&e->aborted_by, 1ull + call.rank, q);
    }
  }
}

// The line or unit that has come, or {1} for a flag; {0}, or a line of another number, when time is up or somebody has
// given up.
template <class Link>
__device__ __noinline__ uint4 wait_long(const Plan& plan, const MoelabCall& call, const Link& link, u64 epoch,
                                        const void* where, What what, u64 goal, Half half, int peer) {
  const u64 start = now_ns();
#pragma unroll 1
  for (int poll = 1;; ++poll) {
    uint4 got{};
    u64 seen = 0;
    if (what == kFlag || what == kPeek) {
      const u64* flag = static_cast<const u64*>(where);
      const bool mapped = call.windows[peer] != nullptr;
      seen = what == kFlag ? link.look(flag, goal, mapped) : link.peek(flag, goal, mapped);
      if (seen >= goal) return {1, 0, 0, 0};
    } else {
      got = load_whole(where);
      seen = what == kLine ? got.w : 0;
      if (what == kLine ? got.w == (uint32_t)goal : has_come(got)) return got;
    }
    if (poll % 64) continue;
    if (broken_rank(plan, call, epoch, half)) return {0, 0, 0, what == kLine ? ~(uint32_t)goal : 0};
    if (now_ns() - start > call.timeout_ns) {
      give_up(plan, call, link, half, peer, goal, seen);
      return {0, 0, 0, what == kLine ? ~(uint32_t)goal : 0};
    }
  }
}
template <class Link>
__device__ uint4 keep_waiting(const Rank<Link>& r, const void* where, What what, u64 goal, Half half, int peer) {
  return wait_long(r.plan, r.call, r.link, r.epoch, where, what, goal, half, peer);
}
template <class Link>
__device__ bool broken(const Rank<Link>& r, Half half) {
  return broken_rank(r.plan, r.call, r.epoch, half);
}

template <class Link>
struct Rank {
  const Plan& plan;
  const MoelabCall& call;
  const Link& link;
  int block, blocks;
  u64 epoch, window_of;  // window_of: lane q has rank q's window, or null
  u64 failure, entered;  // as begin found them
  int64_t slot_offset;
  uint8_t* own_state;
  bool bad;              // this thread has seen a failure; its block leaves as one at the next barrier that asks

  template <class T>
  __device__ static T* at(uint8_t* base, int64_t offset) {
    return reinterpret_cast<T*>(base + offset);
  }
  __device__ uint8_t* slot_of(int rank) const {
    uint8_t* window = reinterpret_cast<uint8_t*>(__ldg(reinterpret_cast<const u64*>(call.windows) + rank));
    return window == nullptr ? nullptr : window + slot_offset;
  }
  // Of a whole warp, for one rank or for one that each lane names; asks no memory for the first 32 ranks.
  __device__ uint8_t* peer_slot(int rank) const {
    if (plan.ranks > 32) return slot_of(rank);
    return reinterpret_cast<uint8_t*>(__shfl_sync(0xffffffffu, window_of, rank & 31)) + slot_offset;
  }
  __device__ uint8_t* mine() const { return call.window + slot_offset; }
  __device__ uint8_t* state() const { return own_state; }
  __device__ Errors* errors() const { return at<Errors>(call.window, plan.error); }
  __device__ uint32_t tag() const { return (uint32_t)epoch; }

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
  __device__ uint4* entry(uint8_t* slot, uint32_t at_, int part) const {
    return at<uint4>(slot, plan.entry) + (at_ * plan.dispatch_parts + part) * plan.entry_units;
  }
  __device__ int rank_of(int expert) const {
    return plan.local_shift >= 0 ? expert >> plan.local_shift : expert / plan.local_experts;
  }
  __device__ int group_of(int rank) const { return plan.shape.tp == 1 ? rank : rank / plan.shape.tp; }
  __device__ int tp_rank(int rank) const { return plan.shape.tp == 1 ? 0 : rank % plan.shape.tp; }
  __device__ int source_tokens(int tokens, int rank) const {  // of a group's tokens, those that this rank sends
    const int tp = plan.shape.tp, first = tp_rank(rank);
    return tp == 1 ? tokens : tokens > first ? (tokens - first + tp - 1) / tp : 0;
  }

  // What a launch begins with is asked for by `begin` and looked at by `settle`, so that a kernel can ask for more in
  // between. Both are for every warp by itself, and `bad` is one for a warp. A kernel that sends waits for the one
  // barrier before it stores anything to a peer: that every rank has ended reading what the last exchange of this slot
  // brought it.
  __device__ void begin(bool sends) {
    wait_for_grid_before();
    let_next_grid_in();
    const int lane = threadIdx.x % 32;
    slot_offset = call.slot * plan.slot_bytes, own_state = call.state + call.slot * plan.state_slot_bytes;
    window_of = lane < plan.ranks ? __ldg(reinterpret_cast<const u64*>(call.windows) + lane) : 0;
    epoch = epochs()[block] + 1;
    failure = load_relaxed(&errors()->failed) | load_relaxed(&errors()->aborted_by);
    entered = sends && lane < plan.ranks ? link.peek(at<u64>(mine(), plan.entered) + lane, 1, window_of != 0) : ~0ull;
    bad = false;
  }
  __device__ void settle(bool sends) {
    const int lane = threadIdx.x % 32;
    const u64 last = epoch - 1;
    bad = failure != 0 && broken(*this, kDispatchSend);
    if (sends) {
      const u64* flags = at<u64>(mine(), plan.entered);
      bad |= entered < last && keep_waiting(*this, flags + lane, kPeek, last, kDispatchSend, lane).x == 0;
#pragma unroll 1
      for (int q = lane + 32; q < plan.ranks && !bad; q += 32)
        bad = keep_waiting(*this, flags + q, kPeek, last, kDispatchSend, q).x == 0;
      entered = ~0ull;
    }
    bad = __any_sync(0xffffffffu, bad);
  }

  // By a block, its second warp first. The kernel before this one has read all that came, and cleared it where the
  // peers' next stores will arrive: nothing is left to release.
  __device__ void entered_by_me() const {
#pragma unroll 1
    for (int q = ((int)threadIdx.x + blockDim.x - 32) % blockDim.x; q < plan.ranks; q += blockDim.x) {
      if (uint8_t* slot = slot_of(q)) store_relaxed(at<u64>(slot, plan.entered) + call.rank, epoch);
      else if constexpr (Link::remote) link.signal(*this, q, plan.entered + 8 * call.rank);
    }
  }

  __device__ void end_exchange() const {
#pragma unroll 1
    for (int i = block + threadIdx.x * blocks; i < MOELAB_MOST_BLOCKS; i += blocks * blockDim.x) epochs()[i] = epoch;
  }

  // True once it has come; false when time is up or somebody has given up.
  __device__ bool wait_flag(const u64* flag, Half half, int peer) const {
#ifdef MOELAB_BREAK_WAIT
    return true;  // for the tests, which must notice
#endif
    return link.look(flag, epoch, slot_of(peer) != nullptr) >= epoch ||
           keep_waiting(*this, flag, kFlag, epoch, half, peer).x != 0;
  }
  __device__ bool wait_line(const Line* line, uint4& got, Half half, int peer) const {
    got = load_whole(line);
#ifdef MOELAB_BREAK_WAIT
    return true;
#endif
    if (got.w != tag()) got = keep_waiting(*this, line, kLine, epoch, half, peer);
    return got.w == tag();
  }
  // For a unit of which a first look is at hand.
  __device__ bool wait_unit(const uint4* unit, uint4& raw, Half half, int peer) const {
#ifdef MOELAB_BREAK_WAIT
    return true;
#endif
    if (!has_come(raw)) raw = keep_waiting(*this, unit, kUnit, epoch, half, peer);
    return has_come(raw);
  }

  __device__ void input_error(int word) const {
    if (call.host_error != nullptr) store_relaxed(reinterpret_cast<u64*>(call.host_error) + word, 1);
  }

  // The expert, -1 for nowhere, -2 for what is neither. Strides in bytes fit 32 bits (launch.cuh).
  __device__ int load_id(int token, int k) const {
    const bool wide = call.ids_bytes == 8;
    const int row = (int)call.ids_stride[0] * call.ids_bytes, column = (int)call.ids_stride[1] * call.ids_bytes;
    const char* p = static_cast<const char*>(call.ids) + (int64_t)token * row + (int64_t)k * column;
    const int low = __ldg(reinterpret_cast<const int*>(p));
    const int high = wide ? __ldg(reinterpret_cast<const int*>(p) + 1) : low >> 31;
    return expert(low, high);
  }
  __device__ int expert(int low, int high) const {
    return (unsigned)low < (unsigned)plan.shape.experts && high == 0 ? low : (low & high) == -1 ? -1 : -2;
  }
  __device__ float load_weight(int token, int k) const {
    return __ldg(call.weights + (int64_t)token * (int)call.weights_stride[0] +
                 (int64_t)k * (int)call.weights_stride[1]);
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
#pragma unroll 1
    for (int i = part * blockDim.x + threadIdx.x; i < n * K; i += parts * blockDim.x) {
      const int t = i / K, k = i - t * K, e = load_id(t, k);
      if (e == -2) input_error(MOELAB_E_BAD_IDS);
      home(t)[k] = {e < 0 ? kNowhere : (uint32_t)e, e < 0 ? 0.f : load_weight(t, k)};
    }
  }
};

}  // namespace moelab

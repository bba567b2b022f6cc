// NVSHMEM: peers that share memory are stored to as in exchange.cu, all others (windows[q] null) are reached by
// put-with-signal. Setting all of windows[] but one's own to null forces the puts, also over NVLink.
//
// Windows lie in the symmetric heap. A put leaves after its call has returned: it reads from the outbox, which plan.h
// puts into the window, and rank.cuh's barrier keeps from being overwritten too early. Neither quiet nor fence is used:
// a signal is delivered after its own data, and no message depends on another.
//
// That one rank puts to another has to hold both ways: a notice that is put has one flag, one that is stored has
// several.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "launch.cuh"

namespace moelab {

struct PutLink {
  static constexpr bool remote = true;

  // For a peer that is put to, NVSHMEM's own test: when it succeeds it also does what a transport needs for the data to
  // be visible (a plain fetch of the signal does not). One that is mapped stores its flags as everywhere.
  __device__ static u64 look(const u64* flag, u64 goal, bool mapped) {
    if (mapped) return load_acquire(flag);
    uint64_t* signal = const_cast<uint64_t*>(reinterpret_cast<const uint64_t*>(flag));
    if (nvshmem_uint64_test(signal, NVSHMEM_CMP_GE, goal)) {
      __threadfence_system();
      return goal;
    }
    const u64 seen = load_relaxed(flag);
    return seen < goal ? seen : goal - 1;  // it came between the two looks: the next one is NVSHMEM's
  }
  __device__ static u64 peek(const u64* flag, u64 goal, bool mapped) {
    return mapped ? load_relaxed(flag) : look(flag, goal, false);
  }

  // By the warp that puts: what its lanes, or others behind a barrier, wrote must be there for the NIC.
  __device__ static void before_puts() {
    __threadfence_system();
    __syncwarp();
  }

  // One warp: bytes at `from` of our slot to `to` of the peer's, then its flag. All offsets are within a slot.
  template <class Rank>
  __device__ static void put_warp(const Rank& r, int peer, int64_t to, int64_t from, int64_t bytes, int64_t flag) {
    uint8_t* slot = r.mine();
    nvshmemx_putmem_signal_nbi_warp(slot + to, slot + from, bytes, reinterpret_cast<uint64_t*>(slot + flag), r.epoch,
                                    NVSHMEM_SIGNAL_SET, peer);
  }

  template <class Rank>
  __device__ static void signal(const Rank& r, int peer, int64_t flag) {
    nvshmemx_signal_op(reinterpret_cast<uint64_t*>(r.mine() + flag), r.epoch, NVSHMEM_SIGNAL_SET, peer);
  }

  // The word that stands at `ours` in the peer's window, behind nothing and waited for by nobody.
  __device__ static void tell(u64* ours, u64 value, int peer) {
    nvshmemx_signal_op(reinterpret_cast<uint64_t*>(ours), value, NVSHMEM_SIGNAL_SET, peer);
  }

  // By all threads of a notifying block: the last of these blocks sends whole notices, with their first flag.
  template <class Rank>
  __device__ static void put_notices(const Rank& r, int n) {
    __shared__ bool last;
    const Plan& p = r.plan;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicInc(r.ticket(), p.notice_blocks - 1) == (unsigned)p.notice_blocks - 1;
      __threadfence();
    }
    __syncthreads();
    if (!last) return;
    const int64_t entries = 8 * (int64_t)r.source_tokens(n, r.call.rank) * p.shape.top_k;
    before_puts();
    for (int q = threadIdx.x / 32; q < p.ranks; q += blockDim.x / 32)
      if (r.slot_of(q) == nullptr)
        put_warp(r, q, p.header + r.call.rank * p.notice_bytes, p.out_notice + q * p.notice_bytes,
                 round_up(p.notice_entries + entries, 16),
                 p.notice_flag + 8 * (int64_t)r.call.rank * p.notice_blocks);
  }
};

int launch_puts(const Plan& p, const MoelabCall& call, int what, int halves, int blocks, bool early, void* stream) {
  return launch_one(p, call, PutLink{}, what, halves, blocks, early, stream);
}
int most_blocks_puts(const Plan& p, int what, int halves, bool quantize) {
  return most_blocks(pick<One<PutLink>>(p, what, halves, quantize));
}

__global__ void rank_on_device(int32_t* rank) { *rank = nvshmem_my_pe(); }

}  // namespace moelab

EXPORT int moelab_nvshmem_init(const void* uid, int rank, int ranks) {
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_uniqueid_t id = *static_cast<const nvshmemx_uniqueid_t*>(uid);
  static_assert(sizeof id == 128, "the unique id has another size");
  nvshmemx_set_attr_uniqueid_args(rank, ranks, &id, &attributes);
  return nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
}

EXPORT void moelab_nvshmem_finalize() { nvshmem_finalize(); }

EXPORT int moelab_nvshmem_device_rank(int32_t* rank, void* stream) {
  moelab::rank_on_device<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(rank);
  return cudaGetLastError();
}

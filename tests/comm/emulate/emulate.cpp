// The C interface of exchange.h, of the same kernels, on the CPU: see emulate.h. Built by g++ with CUDA's headers.
#define MOELAB_EMULATE 1
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "kernels.cuh"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace moelab;

// --- fibers: what swapcontext does, without its system call for the signal mask ----------------------------------------
extern "C" void emulate_switch(void** save, void* load);
asm(R"(
.globl emulate_switch
.hidden emulate_switch
.type emulate_switch, @function
emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulate_switch, .-emulate_switch
)");

namespace emulate {
namespace {
constexpr int kMostThreads = 512;
static_assert(kDispatchThreads <= kMostThreads && kCombineThreads <= kMostThreads && kFlagThreads <= kMostThreads);
#ifdef MOELAB_BREAK_WAIT
constexpr u64 kNeverNs = 1'000'000'000;
#else
constexpr u64 kNeverNs = 60'000'000'000;  // longer than any wait of a test
#endif
constexpr size_t kStack = 64 * 1024, kShared = 64 * 1024;

struct Barrier {
  int arrived = 0, turn = 0;
};
struct Block {
  uint3 index;
  dim3 grid;
  int threads, current = 0, left;
  void* stack[kMostThreads];
  void* main;
  bool done[kMostThreads] = {};
  std::unique_ptr<char[]> stacks;
  std::unique_ptr<int32_t[]> shared{new int32_t[kShared / 4]};
  int all[2], any[2];
  Barrier barrier, warps[kMostThreads / 32];
  uint64_t values[kMostThreads / 32][2][32];
  int parity[kMostThreads] = {};
  unsigned random;
  bool stuck = false;
  void (*body)(const void*);
  const void* argument;
};
thread_local Block* me;

void change_over() {
  Block& b = *me;
  const int from = b.current;
  int to = from;
  do to = to + 1 == b.threads ? 0 : to + 1;
  while (b.done[to] && to != from);
  if (to == from) return;
  b.current = to;
  emulate_switch(&b.stack[from], b.stack[to]);
}
unsigned draw(Block& b) {
  b.random ^= b.random << 13, b.random ^= b.random >> 17, b.random ^= b.random << 5;
  return b.random;
}
// A thread that has ended counts as arrived, as it does on a GPU.
void arrive(Barrier& barrier, int first, int count) {
  Block& b = *me;
  const int turn = barrier.turn;
  ++barrier.arrived;
  const u64 since = b.stuck ? 0 : now_ns();
  for (unsigned tries = 1;; ++tries) {
    if (barrier.turn != turn || b.stuck) return;
    // Threads that went different ways never meet; on a GPU they hang. Here they go on and the launch fails.
    if (tries % 4096 == 0 && now_ns() - since > kNeverNs) b.stuck = true;
    int gone = 0;
    for (int i = first; i < first + count; ++i) gone += b.done[i];
    if (barrier.arrived + gone == count) {
      // Now and then a block falls behind, so that a wait that is missing is missed.
      if (count == b.threads && draw(b) % 16 == 0) usleep(draw(b) % 300);
      barrier.arrived = 0;
      ++barrier.turn;
      return;
    }
    change_over();
  }
}
void start() {
  Block& b = *me;
  b.body(b.argument);
  b.done[b.current] = true;
  void* dead;
  if (--b.left == 0) emulate_switch(&dead, b.main);
  int to = b.current;
  do to = to + 1 == b.threads ? 0 : to + 1;
  while (b.done[to]);
  b.current = to;
  emulate_switch(&dead, b.stack[to]);
}
std::atomic<unsigned> launches{2463534242u};

void run_block(int index, int grid, int threads, void (*body)(const void*), const void* argument,
               std::atomic<int>* failed) {
  auto block = std::make_unique<Block>();
  me = block.get();
  Block& b = *me;
  b.index = {(unsigned)index, 0, 0}, b.grid = dim3(grid), b.threads = b.left = threads;
  b.body = body, b.argument = argument, b.random = launches.fetch_add(0x9e3779b9u) | 1u;
  b.stacks.reset(new char[kStack * threads]);
  memset(b.shared.get(), 0xA5, kShared);
  for (int i = 0; i < threads; ++i) {
    // As emulate_switch leaves it: six registers, where to return to, and the stack as after a call.
    void** top = reinterpret_cast<void**>(b.stacks.get() + (i + 1) * kStack);
    top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(start);
    for (int r = 0; r < 6; ++r) *--top = nullptr;
    b.stack[i] = top;
  }
  emulate_switch(&b.main, b.stack[0]);
  *failed |= b.stuck;
}

template <class F>
void call(const void* f) { (*static_cast<const F*>(f))(); }
template <class F>
int run(int grid, int threads, const F& kernel) {
  std::vector<std::thread> blocks;
  std::atomic<int> failed{0};
  for (int i = 0; i < grid; ++i) blocks.emplace_back(run_block, i, grid, threads, call<F>, &kernel, &failed);
  for (auto& block : blocks) block.join();
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}
}  // namespace

uint3 thread() { return {(unsigned)me->current, 0, 0}; }
uint3 block() { return me->index; }
dim3 grid() { return me->grid; }
dim3 threads() { return dim3(me->threads); }
int32_t* dynamic_shared() { return me->shared.get(); }
void pause() {
  // One warp may wait for what another of its block has still to send.
  const unsigned some = draw(*me);
  if (some % 64 == 0) sched_yield();
  if (some % 4 == 0) change_over();
}
void block_barrier() { arrive(me->barrier, 0, me->threads); }
int block_reduce(int predicate, bool all) {
  Block& b = *me;
  const int slot = b.barrier.turn & 1;
  if (b.barrier.arrived == 0) b.all[slot] = 1, b.any[slot] = 0;
  b.all[slot] &= predicate != 0, b.any[slot] |= predicate != 0;
  block_barrier();
  return all ? b.all[slot] : b.any[slot];
}
void warp_barrier() { arrive(me->warps[me->current / 32], me->current / 32 * 32, 32); }
uint64_t* warp_exchange(uint64_t value) {
  Block& b = *me;
  const int i = b.current, w = i / 32, parity = b.parity[i] ^= 1;
  b.values[w][parity][i % 32] = value;
  warp_barrier();
  return b.values[w][parity];
}
}  // namespace emulate

moelab::u64 moelab::now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// --- which kernel: as in launch.cuh -----------------------------------------------------------------------------------
template <int kHalves, class Ranks>
static int dispatch(const Plan& p, const Ranks& ranks, int grid, bool quantize) {
  const bool packets = p.shape.protocol == MOELAB_PACKETS;
  const int threads = packets ? kDispatchThreads : kFlagThreads;
  if (quantize && kHalves & MOELAB_SEND)
    return emulate::run(grid, threads, [&] {
      packets ? dispatch_by_packets<Ranks, kHalves, true>(p, ranks) : dispatch_by_flags<Ranks, kHalves, true>(p, ranks);
    });
  return emulate::run(grid, threads, [&] {
    packets ? dispatch_by_packets<Ranks, kHalves, false>(p, ranks) : dispatch_by_flags<Ranks, kHalves, false>(p, ranks);
  });
}

template <int kHalves, class Y, int kReturns, class Ranks>
static int combine(const Plan& p, const Ranks& ranks, int grid) {
  if constexpr (sizeof(Y) == 2)
    if (p.shape.protocol == MOELAB_PACKETS)
      return emulate::run(grid, kCombineThreads, [&] { combine_by_packets<Ranks, kHalves, Y, kReturns>(p, ranks); });
  return emulate::run(grid, kFlagThreads, [&] { combine_by_flags<Ranks, kHalves, Y, kReturns>(p, ranks); });
}
template <int kHalves, class Y, class Ranks>
static int combine(const Plan& p, const Ranks& ranks, int grid) {
  switch (p.shape.returns) {
    case MOELAB_RETURN_ROWS: return combine<kHalves, Y, MOELAB_RETURN_ROWS>(p, ranks, grid);
    case MOELAB_RETURN_F32: return combine<kHalves, Y, MOELAB_RETURN_F32>(p, ranks, grid);
  }
  return combine<kHalves, Y, MOELAB_RETURN_Y>(p, ranks, grid);
}
template <int kHalves, class Ranks>
static int run(const Plan& p, const Ranks& ranks, int what, int grid, bool quantize) {
  if (what == MOELAB_DISPATCH) return dispatch<kHalves>(p, ranks, grid, quantize);
  return p.shape.payload == MOELAB_F32 ? combine<kHalves, float>(p, ranks, grid)
                                       : combine<kHalves, __nv_bfloat16>(p, ranks, grid);
}
template <class Ranks>
static int run(const Plan& p, const Ranks& ranks, int what, int halves, int grid, bool quantize) {
  if (p.shape.protocol == MOELAB_PUTS) return cudaErrorNotSupported;
  switch (halves) {
    case MOELAB_SEND: return run<MOELAB_SEND>(p, ranks, what, grid, quantize);
    case MOELAB_RECV: return run<MOELAB_RECV>(p, ranks, what, grid, quantize);
    case MOELAB_FUSED: return run<MOELAB_FUSED>(p, ranks, what, grid, quantize);
  }
  return cudaErrorInvalidValue;
}

EXPORT const char* moelab_a2a_sizes(const MoelabShape* shape, int64_t sizes[4]) {
  Plan p;
  if (const char* why = make_plan(*shape, p)) return why;
  const int64_t s[4] = {p.window_bytes, p.state_bytes, p.slot_bytes, p.capacity};
  for (int i = 0; i < 4; ++i) sizes[i] = s[i];
  return nullptr;
}
EXPORT void moelab_a2a_struct_bytes(int64_t bytes[2]) {
  bytes[0] = sizeof(MoelabShape), bytes[1] = sizeof(MoelabCall);
}
EXPORT int moelab_a2a_most_blocks(const MoelabShape*, int, int, int) { return 64; }

EXPORT int moelab_a2a_launch(const MoelabShape* shape, const MoelabCall* call, int what, int halves, int blocks, int,
                             void*) {
  Plan p;
  if (make_plan(*shape, p) || blocks < 0 || blocks > MOELAB_MOST_BLOCKS) return cudaErrorInvalidValue;
  // The halves of an exchange need not have as many blocks each.
  if (blocks == 0) blocks = 1 + (call->slot + what + halves) % 3;
  return run(p, One<DirectLink>{*call, {}}, what, halves, blocks, call->quantize);
}
EXPORT int moelab_a2a_launch_virtual(const MoelabShape* shape, const MoelabCall* calls, int what, int halves, int blocks,
                                     int quantize, int, void*) {
  Plan p;
  if (make_plan(*shape, p) || blocks < 1 || blocks > MOELAB_MOST_BLOCKS) return cudaErrorInvalidValue;
  return run(p, Many<DirectLink>{calls, blocks, {}}, what, halves, blocks * p.ranks, quantize);
}

EXPORT int moelab_nvshmem_init(const void*, int, int) { return 1; }
EXPORT void moelab_nvshmem_finalize() {}
EXPORT int moelab_nvshmem_device_rank(int32_t*, void*) { return cudaErrorNotSupported; }
EXPORT const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }
EXPORT void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) { *major = *minor = *patch = 0; }

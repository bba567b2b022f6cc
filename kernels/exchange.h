// The C interface of the library, over plain memory that the caller allocates and lends. Nothing here allocates or
// synchronises. Every function that returns int returns 0 or a cudaError_t.
//
// A rank owns a *window*, which its peers write to and which every rank that can maps (NVSHMEM's heap, cudaIpc, or all
// windows in one process), and a *state*, which nobody else sees. Both start as zeros; nothing else is initialised.
//
// Symbols: R = dp*tp ranks, L = E/R local experts, T tokens of a DP group in one exchange, M the most of them, K top_k,
// H hidden, S = ceil(H/128) scales of an FP8 row.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MOELAB_BF16 = 0, MOELAB_FP8 = 1, MOELAB_F32 = 2, MOELAB_F16 = 3 };  // F16: outputs only
enum { MOELAB_EXPERT_PADDED = 0, MOELAB_CONTIGUOUS_128 = 1 };
enum { MOELAB_SCALES_ROW = 0, MOELAB_SCALES_COLUMN = 1, MOELAB_SCALES_UE8M0 = 2 };
// What an expert's rank returns: each row; or one partial sum for a token, in float32 or rounded to the outputs' dtype.
enum { MOELAB_RETURN_ROWS = 0, MOELAB_RETURN_F32 = 1, MOELAB_RETURN_Y = 2 };
// How data says that it has come: in every 16 bytes (all peers mapped, M <= MOELAB_MOST_PACKETS, outputs not F32);
// by a flag for each token; by NVSHMEM signals to the peers that are not mapped and flags to the others.
enum { MOELAB_PACKETS = 0, MOELAB_FLAGS = 1, MOELAB_PUTS = 2 };
enum { MOELAB_MOST_PACKETS = 512, MOELAB_MOST_BLOCKS = 1024 };  // of a rank's launch
enum { MOELAB_DISPATCH = 0, MOELAB_COMBINE = 1 };
enum { MOELAB_SEND = 1, MOELAB_RECV = 2, MOELAB_FUSED = 3 };  // fused: both halves in one launch

// What all ranks agree on.
typedef struct {
  int32_t dp, tp, experts, top_k, hidden, max_tokens;
  int32_t payload, layout, scales, returns, slots, protocol;
} MoelabShape;

// One exchange of one rank; each half reads its part. Pointers are device memory, but for `host_error`.
typedef struct {
  uint8_t* const* windows;  // device array [R]: rank r's window as mapped here, or null (MOELAB_PUTS); never changes
  uint8_t* window;          // this rank's own, windows[rank]
  uint8_t* state;
  uint64_t* host_error;  // mapped host memory, 8 words of zeros, or null: the error record, when there is one
  int32_t rank, slot;
  // dispatch_send
  const uint8_t* x;  // [T, H] of the payload's dtype, or bf16 with `quantize`; rows aligned to 16 bytes
  int64_t x_stride;  // bytes
  const void* ids;   // [T, K] int32 or int64
  int64_t ids_stride[2];  // elements
  const float* weights;   // [T, K]
  int64_t weights_stride[2];
  const float* scales;    // [T, S]
  int64_t scales_stride[2];
  const int32_t* num_tokens;  // how many of the T tokens count; or null: all
  int32_t tokens, ids_bytes, has_work, quantize;
  // dispatch_recv
  uint8_t* rows;
  void* row_scales;
  int32_t* counts;    // [L]
  int32_t* starts;    // [L], contiguous layout
  int32_t* all_idle;  // 0 or 1
  // combine
  const uint8_t* y;
  void* out;           // [T, H], contiguous
  int32_t out_dtype;   // BF16, F32, F16
  int32_t send_blocks;  // fused with flags: how many blocks only send while the others only receive; 0: each does both
  uint64_t timeout_ns;  // of each wait
} MoelabCall;

// The words of an error record. failed: 1 a wait outlasted its limit, 2 a peer gave up first (peer says which).
// half: 2 dispatch_recv, 4 combine_recv, 1 dispatch_send (waiting for the peer to end the last exchange of the slot).
// Input errors (bad_ids, bad_count) are masked or clamped on the device and are not fatal.
enum { MOELAB_E_FAILED, MOELAB_E_HALF, MOELAB_E_PEER, MOELAB_E_EXPECTED, MOELAB_E_SEEN, MOELAB_E_BAD_IDS,
       MOELAB_E_BAD_COUNT, MOELAB_E_WORDS = 8 };

// sizes: {window bytes, state bytes, bytes of a window's slot, rows of the contiguous layout}.
// Returns null, or why the kernels do not serve the shape.
const char* moelab_a2a_sizes(const MoelabShape* shape, int64_t sizes[4]);
// {sizeof MoelabShape, sizeof MoelabCall}, for a caller that lays them out itself.
void moelab_a2a_struct_bytes(int64_t bytes[2]);
// The most blocks of this launch that are on the current GPU at once. A launch that receives must fit as a whole, since
// its blocks wait for others. Negative: -cudaError_t.
int moelab_a2a_most_blocks(const MoelabShape* shape, int what, int halves, int quantize);
// blocks: 0 lets the library choose. early: programmatic dependent launch. stream: cudaStream_t.
int moelab_a2a_launch(const MoelabShape* shape, const MoelabCall* call, int what, int halves, int blocks, int early,
                      void* stream);
// All ranks in one cooperative launch on one GPU, `blocks` (at least 1) each; calls: device memory [R]. quantize and
// out_dtype are one for all of them. What does not fit fails instead of hanging.
int moelab_a2a_launch_virtual(const MoelabShape* shape, const MoelabCall* calls, int what, int halves, int blocks,
                              int quantize, int out_dtype, void* stream);

// NVSHMEM. The device half of it is linked into this library, so it is initialised here, also where the process has
// initialised NVSHMEM before (the second initialisation only counts, and fills this library's copy of the device
// state). Collective. uid: 128 bytes, the same on every rank.
int moelab_nvshmem_init(const void* uid, int rank, int ranks);
void moelab_nvshmem_finalize(void);
// Writes this rank's number, as a kernel of this library sees it, to device memory.
int moelab_nvshmem_device_rank(int32_t* rank, void* stream);

#ifdef __cplusplus
}
#endif

// What all ranks agree on, and where everything stands in memory. No CUDA in it: the host asks for sizes with it.
//
// Symbols: R = dp*tp ranks, L = E/R local experts, M max_tokens of a DP group, Q = ceil(M/tp) tokens one rank sends at
// most, K top_k, H hidden, S = ceil(H/128) scales of an FP8 row. A unit is 16 bytes; a row's *image* is its values and
// behind them its scales, float32 or, for UE8M0, four to a word as they will be used.
//
// A *window* holds per slot what others write; with packets:
//   header[R]      from each rank, in lines: has_work, tokens, rows of its DP group for each local expert [L]
//   entry[R][Q][P] from each rank for each of its tokens: [K] of {where, weight}, for each part of it
//   staged[R][Q]   a token's image, once per destination rank
//   returned[M][C] outputs on their way home; lane k of K (rows) or the c-th distinct rank (partial sums)
//   entered[R]     epoch: that rank has ended reading what was dispatched to it (the one barrier)
// with flags:
//   notice[R]      header and entries, and notice_flag[R][N], an epoch by each of the N blocks that write a notice
//   staged[R][Q], returned[M][C] and a flag (epoch) for each; entered[R]
// and, once, the error words. Where some peer is put to instead of stored to, an outbox follows: what is to be sent, in
// this rank's own window.
//
// With packets every 16 bytes say themselves that they have come (memory.cuh). A *line* of a header, which all blocks
// of the receiver read and every exchange writes anew, is 12 bytes and the low 32 bits of the epoch. All else is read
// by one thread, and zero again once that has read it: a *unit* travels inverted, so that zero means that nothing is
// there (packed scales, of which zero is none, travel as they are).
//
// The *state* of a rank, which nobody else sees, holds per slot: epochs[MOST_BLOCKS], the number of the last finished
// exchange, one copy for each block; tokens, most, ticket; tokens_of[R]; home[M][K] {id, weight}; arrived[R][Q][K]
// {flat row, weight}, lane[R][Q].
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "exchange.h"

#ifdef __CUDACC__
#define MOELAB_BOTH __host__ __device__
#else
#define MOELAB_BOTH
#endif

namespace moelab {

#ifdef MOELAB_EMULATE
constexpr int kDispatchThreads = 128, kCombineThreads = 64, kFlagThreads = 64;
#else
// 7168 FP8 values are 448 units, an output of 7168 bfloat16 values 896. With packets a thread has one of them, and a
// block a part of a token; a part of a dispatched token is a multiple of 128 units, whose scales are whole units.
constexpr int kDispatchThreads = 256, kCombineThreads = 224, kFlagThreads = 512;
#endif
constexpr int kMaxTopK = 32;         // one lane of a warp for each expert of a token
constexpr int kMaxHeaderExperts = 2048;  // counted in the shared memory of one block (packets)
constexpr int kMaxPairs = 8192;          // (token, expert) pairs of a group, kept in shared memory (packets)
constexpr int kNoticeWords = 4096;   // of shared memory for token bits in a notifying block: 16 KiB, 8 KiB of prefixes
constexpr int kPositionBits = 20;    // of an entry; the rest names the local expert
constexpr uint32_t kNowhere = 0xffffffffu;
constexpr uint32_t kForeign = 0x80000000u;  // with the destination rank in the low bits

struct Plan {
  MoelabShape shape;
  int32_t ranks, local_experts, local_shift, per_source, scales_per_row, scale_words;  // local_shift: log2, or -1
  // What a unit of scales is inverted with on its way: where scales are bytes, ones are one NaN of many.
  uint32_t scale_flip;
  int32_t row_units, image_units, staged_units;  // values of a row; with scales; rounded up to lines of 128 bytes
  int32_t y_bytes, y_units;                       // of an output value; of an output row
  int32_t returned_units, lanes;
  int32_t header_lines, entry_units, dispatch_parts, combine_parts;  // packets
  int32_t warp_tokens, k_reciprocal;  // tokens whose experts fill a warp; lane / top_k is lane * k_reciprocal >> 16
  int32_t notice_blocks, notice_experts, notice_stride;               // flags
  int32_t expert_rows, capacity, matrix_rows, column_rows;
  int64_t staged_bytes, returned_bytes, notice_bytes, notice_entries;
  // Offsets in a slot of the window, and its size.
  int64_t header, entry, staged, returned, entered;
  int64_t notice_flag, staged_flag, returned_flag, out_notice, out_staged, out_returned;
  int64_t slot_bytes, error, window_bytes;
  // Offsets in a slot of the state, and its size.
  int64_t tokens_of, home, arrived, lane, state_slot_bytes, state_bytes;
};

constexpr int64_t kStateTokens = 8 * MOELAB_MOST_BLOCKS, kStateMost = kStateTokens + 4, kStateTicket = kStateTokens + 8;

MOELAB_BOTH inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// nullptr, or why the kernels do not serve the shape.
inline const char* make_plan(const MoelabShape& s, Plan& p) {
  p = Plan{};
  p.shape = s;
  if (s.dp < 1 || s.tp < 1 || s.experts < 1 || s.top_k < 1 || s.hidden < 1 || s.max_tokens < 1 || s.slots < 1)
    return "a size is less than 1";
  p.ranks = s.dp * s.tp;
  if (s.experts % p.ranks) return "experts do not divide over the ranks";
  p.local_experts = s.experts / p.ranks;
  p.local_shift = -1;
  for (int i = 0; i < 31; ++i)
    if (p.local_experts == 1 << i) p.local_shift = i;
  if (p.local_experts >= (1 << (31 - kPositionBits)) - 1) return "more than 2046 local experts";
  if (s.top_k > kMaxTopK || s.top_k > s.experts) return "top_k is more than 32 or than the experts";
  if (s.max_tokens > 65504) return "max_tokens is more than 65504";
  if (s.protocol == MOELAB_PACKETS) {
    if (s.max_tokens > MOELAB_MOST_PACKETS) return "packets serve at most 512 tokens";
    if (s.payload == MOELAB_F32) return "packets carry bfloat16 outputs only";
    if (s.experts > kMaxHeaderExperts) return "packets serve at most 2048 experts";
    if (s.max_tokens * s.top_k > kMaxPairs) return "packets serve at most 8192 experts of all tokens of a group";
  }
  p.per_source = (s.max_tokens + s.tp - 1) / s.tp;
  const int value_bytes = s.payload == MOELAB_FP8 ? 1 : s.payload == MOELAB_BF16 ? 2 : 4;
  if (s.hidden * value_bytes % 16) return "a row is not a multiple of 16 bytes";
  p.scales_per_row = s.payload == MOELAB_FP8 ? (s.hidden + 127) / 128 : 0;
  p.row_units = s.hidden * value_bytes / 16;
  p.scale_words = s.scales == MOELAB_SCALES_UE8M0 ? (p.scales_per_row + 3) / 4 : p.scales_per_row;
  p.image_units = p.row_units + (p.scale_words + 3) / 4;
  p.scale_flip = s.scales == MOELAB_SCALES_UE8M0 ? 0 : 0xffffffffu;
  p.y_bytes = s.payload == MOELAB_F32 ? 4 : 2;
  p.y_units = s.hidden * p.y_bytes / 16;
  const int distinct = p.ranks < s.top_k ? p.ranks : s.top_k;
  p.lanes = s.returns == MOELAB_RETURN_ROWS ? s.top_k : distinct;
  p.returned_units = s.hidden * (s.returns == MOELAB_RETURN_F32 ? 4 : p.y_bytes) / 16;
  const bool packets = s.protocol == MOELAB_PACKETS;
  p.staged_units = (int32_t)round_up(p.image_units, 8);
  p.staged_bytes = 16 * (int64_t)p.staged_units;
  p.returned_bytes = 16 * (int64_t)p.returned_units;
  p.header_lines = (p.local_experts + 4) / 3;
  p.entry_units = (s.top_k + 1) / 2;
  p.dispatch_parts = (p.row_units + kDispatchThreads - 1) / kDispatchThreads;
  p.combine_parts = (p.returned_units + kCombineThreads - 1) / kCombineThreads;
  p.warp_tokens = 32 / s.top_k;
  p.k_reciprocal = (65536 + s.top_k - 1) / s.top_k;

  p.notice_stride = ((s.max_tokens + 31) / 32) | 1;  // odd: threads that walk experts side by side meet no bank twice
  p.notice_experts = kNoticeWords / p.notice_stride;
  // Each block looks at all ids, so only many tokens are spread over many.
  const int spread = s.max_tokens > 1024 ? (s.experts + 63) / 64 : s.experts;
  if (p.notice_experts > spread) p.notice_experts = spread;
  if (p.notice_experts > kFlagThreads) p.notice_experts = kFlagThreads;
  p.notice_blocks = (s.experts + p.notice_experts - 1) / p.notice_experts;
  p.notice_entries = round_up(8 + 4 * (int64_t)p.local_experts, 16);
  p.notice_bytes = round_up(p.notice_entries + 8 * (int64_t)p.per_source * s.top_k, 128);

  p.expert_rows = s.dp * s.max_tokens;
  const int most = s.top_k < p.local_experts ? s.top_k : p.local_experts;
  const int64_t worst = ((int64_t)p.expert_rows * most + 127 * (int64_t)p.local_experts) / 128 * 128;
  const int64_t padded = p.local_experts * round_up(p.expert_rows, 128);
  const int64_t capacity = worst < padded ? worst : padded;
  if (capacity > INT32_MAX || (int64_t)p.local_experts * p.expert_rows > INT32_MAX) return "more than 2^31 rows";
  p.capacity = (int32_t)capacity;
  p.matrix_rows = s.layout == MOELAB_EXPERT_PADDED ? p.expert_rows : p.capacity;
  p.column_rows = (int32_t)round_up(p.matrix_rows, 4);

  const int64_t slots_in = (int64_t)p.ranks * p.per_source, slots_home = (int64_t)s.max_tokens * p.lanes;
  int64_t at = 0;
  const auto take = [&at](int64_t bytes) {
    const int64_t here = at;
    at = round_up(at + bytes, 128);
    return here;
  };
  p.entered = take(8 * (int64_t)p.ranks);
  if (packets) {
    p.header = take(16 * (int64_t)p.ranks * p.header_lines);
    p.entry = take(16 * slots_in * p.entry_units * p.dispatch_parts);
  } else {
    p.header = take(p.ranks * p.notice_bytes);
    p.notice_flag = take(8 * (int64_t)p.ranks * p.notice_blocks);
    p.staged_flag = take(8 * slots_in);
    p.returned_flag = take(8 * slots_home);
  }
  p.staged = take(slots_in * p.staged_bytes);
  p.returned = take(slots_home * p.returned_bytes);
  if (s.protocol == MOELAB_PUTS) {
    const int out_lanes = s.returns == MOELAB_RETURN_ROWS ? most : 1;
    p.out_notice = take(p.ranks * p.notice_bytes);
    p.out_staged = take(p.per_source * p.staged_bytes);
    p.out_returned = take(slots_in * out_lanes * p.returned_bytes);
  }
  p.slot_bytes = at;
  if (packets && at > UINT32_MAX) return "a slot for packets is more than 4 GiB";
  p.error = s.slots * p.slot_bytes;
  p.window_bytes = p.error + 128;

  at = kStateTokens + 128;
  p.tokens_of = take(4 * (int64_t)p.ranks);
  p.home = take(8 * (int64_t)s.max_tokens * s.top_k);
  p.arrived = take(8 * slots_in * s.top_k);
  p.lane = take(4 * slots_in);
  p.state_slot_bytes = at;
  p.state_bytes = s.slots * at;
  return nullptr;
}

}  // namespace moelab

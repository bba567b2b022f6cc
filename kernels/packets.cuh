// Dispatch by packets: no flag is set and none awaited, since every 16 bytes say themselves that they have come. What
// is sent has come when it is seen, one flight after it was stored, and the sender waits for nothing.
#pragma once
#include "rows.cuh"

namespace moelab {

// Tells every rank how many rows of our group each of its experts gets. One block; a warp takes as many tokens at a
// time as fit it with all their experts, so that an expert named twice is seen there. False: leave.
template <class Link>
__device__ bool send_header(Rank<Link>& r, int n) {
  __shared__ uint32_t rows_of[kMaxHeaderExperts];
  constexpr int kPasses = 4;
  const Plan& p = r.plan;
  const int K = p.shape.top_k, L = p.local_experts, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int each = p.warp_tokens, step = each * blockDim.x / 32;
  const int mine = lane * p.k_reciprocal >> 16, k = lane - mine * K;
#pragma unroll 1
  for (int t0 = 0; t0 < max(n, 1); t0 += kPasses * step) {
    int expert[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int t = t0 + i * step + warp * each + mine;
      expert[i] = mine < each && t < n ? r.load_id(t, k) : -1;
    }
    if (t0 == 0) {  // while the first are on their way
#pragma unroll 1
      for (int e = threadIdx.x; e < p.shape.experts; e += blockDim.x) rows_of[e] = 0;
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (t0 + i * step >= n) break;
      const unsigned same = __match_any_sync(0xffffffffu, expert[i] < 0 ? -1 : mine << 16 | expert[i]);
      if (expert[i] >= 0 && __ffs(same) - 1 == lane) atomicAdd(&rows_of[expert[i]], 1u);
    }
  }
  r.settle(true);
  if (__syncthreads_or(r.bad)) return false;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.ranks * p.header_lines; i += blockDim.x) {
    const int q = i / p.header_lines, line = i - q * p.header_lines;
    uint32_t word[3];
#pragma unroll
    for (int b = 0; b < 3; ++b) {
      const int w = 3 * line + b;
      word[b] = w == 0 ? r.call.has_work : w == 1 ? n : w - 2 < L ? rows_of[q * L + w - 2] : 0;
    }
    store_whole(r.header(r.slot_of(q), r.call.rank) + line, {word[0], word[1], word[2], r.tag()});
  }
  return true;
}

// A piece of work: a part of token j of the d-th rank from some first one on. A rank has plan.ranks * per_source *
// parts.
struct Piece {
  int d, j, part;
  __device__ Piece(const Plan& p, int number, int parts) {
    const int token = parts == 1 ? number : number / parts;
    part = number - token * parts, d = 0, j = token;
#pragma unroll 1
    while (j >= p.per_source) j -= p.per_source, ++d;
  }
  template <class Link>
  __device__ int rank(const Rank<Link>& r, int first) const {
    const int s = r.call.rank + first + d;
    return s < r.plan.ranks ? s : s - r.plan.ranks;
  }
};

// A part of a token to each distinct rank, by every warp for itself; then, since they take longer to find, the token's
// places among its experts' rows, to every rank. A place is the number of earlier tokens of the group with that expert:
// no atomic hands it out, so the order of rows is always the same. False: leave.
template <class Link, bool kQuantize>
__device__ bool send_packets(Rank<Link>& r, int n) {
  __shared__ uint4 pairs_of_eight[kMaxPairs / 8 + 1];
  __shared__ uint32_t place_of[kMaxTopK];
  __shared__ float scale_of[kQuantize ? kDispatchThreads / 8 : 1];
  const Plan& p = r.plan;
  const MoelabCall& c = r.call;
  const int K = p.shape.top_k, me = c.rank, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint16_t* const pairs = reinterpret_cast<uint16_t*>(pairs_of_eight);
  const int count = r.source_tokens(n, me) * p.dispatch_parts, tp_rank = r.tp_rank(me);
#pragma unroll 1
  for (int number = r.block; number < count; number += r.blocks) {
    const Piece piece(p, number, p.dispatch_parts);
    const int t = piece.j * p.shape.tp + tp_rank, unit = piece.part * kDispatchThreads + threadIdx.x;
    const uint4* x = reinterpret_cast<const uint4*>(c.x + t * c.x_stride);
    const bool valid = unit < p.row_units;
    uint4 in[2] = {};
    if (valid) in[0] = __ldg(x + (kQuantize ? 2 : 1) * unit);
    if (kQuantize && valid) in[1] = __ldg(x + 2 * unit + 1);
    const int e = lane < K ? r.load_id(t, lane) : -1;
    const float weight = lane < K ? r.load_weight(t, lane) : 0.f;
    // The part's scale units are for its last threads, which are the idlest.
    const int part_scales = p.shape.scales == MOELAB_SCALES_UE8M0 ? kDispatchThreads / 128 : kDispatchThreads / 32;
    const int at_scale = kDispatchThreads - 1 - (int)threadIdx.x, scale = piece.part * part_scales + at_scale;
    const bool scaled = at_scale < part_scales && p.row_units + scale < p.image_units;
    uint4 scales{};
    if (!kQuantize && scaled)
      scales = scale_unit(p, c.scales + t * c.scales_stride[0], c.scales_stride[1], scale, p.scales_per_row);
    // The experts of the tokens before ours, each once for a token; a warp takes as many tokens as fit it, and as many
    // times that as hide the latency of one.
    const int theirs = lane * p.k_reciprocal >> 16, their_k = lane - theirs * K;
    constexpr int kPasses = 4;
#pragma unroll 1
    for (int t0 = warp * p.warp_tokens; t0 < t; t0 += kPasses * kDispatchThreads / 32 * p.warp_tokens) {
      int id[kPasses];
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int other = t0 + i * (kDispatchThreads / 32) * p.warp_tokens + theirs;
        id[i] = theirs < p.warp_tokens && other < t ? r.load_id(other, their_k) : -3;
      }
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int other = t0 + i * (kDispatchThreads / 32) * p.warp_tokens + theirs;
        const unsigned with = __match_any_sync(0xffffffffu, id[i] < 0 ? -1 : theirs << 16 | id[i]);
        if (id[i] != -3) pairs[other * K + their_k] = id[i] >= 0 && __ffs(with) - 1 == lane ? id[i] : 0xffff;
      }
    }
    if (threadIdx.x < 8) pairs[t * K + threadIdx.x] = 0xffff;
    r.settle(true);

    const int rank = e < 0 ? -1 : r.rank_of(e);
    const unsigned same = __match_any_sync(0xffffffffu, rank);
    const unsigned leaders = __ballot_sync(0xffffffffu, rank >= 0 && __ffs(same) - 1 == lane);
    const u64 target = (u64)(r.template at<uint4>(r.peer_slot(max(rank, 0)), p.staged) +
                             (uint32_t)(me * p.per_source + piece.j) * p.staged_units);
    uint4 v = in[0];
    if constexpr (kQuantize) {
      float of_block;
      v = quantize16(in, p.shape.scales == MOELAB_SCALES_UE8M0, of_block);
      if (threadIdx.x % 8 == 0) scale_of[threadIdx.x / 8] = of_block;
      __syncthreads();
      const int first = piece.part * (kDispatchThreads / 8);
      if (scaled) scales = scale_unit(p, scale_of, 1, at_scale, p.scales_per_row - first);
    }
#pragma unroll 1
    for (unsigned left = r.bad ? 0 : leaders; left; left &= left - 1) {
      uint4* to = reinterpret_cast<uint4*>(__shfl_sync(0xffffffffu, target, __ffs(left) - 1));
      if (valid) send_unit(to + unit, v);
      if (scaled) send_unit(to + p.row_units + scale, scales, p.scale_flip);
    }
    if (p.shape.tp == 1 && piece.part == 0 && threadIdx.x < K) {
      if (e == -2) r.input_error(MOELAB_E_BAD_IDS);
      r.home(t)[lane] = {e < 0 ? kNowhere : (uint32_t)e, e < 0 ? 0.f : weight};
    }

    if (__syncthreads_or(r.bad)) return false;
    // A warp to one of the experts: who has it before us?
#pragma unroll 1
    for (int m = warp; m < K; m += kDispatchThreads / 32) {
      const uint32_t mine = __shfl_sync(0xffffffffu, e, m);
      int places = 0;
#pragma unroll 1
      for (int v = lane; 8 * v < t * K; v += 32) {
        const uint4 eight = pairs_of_eight[v];
        const uint32_t two[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) places += ((two[w] & 0xffffu) == mine) + (two[w] >> 16 == mine);
      }
      for (int d = 16; d; d /= 2) places += __shfl_xor_sync(0xffffffffu, places, d);
      if (lane == 0) place_of[m] = places;
    }
    __syncthreads();
    const uint32_t place = lane < K ? place_of[lane] : 0;
#pragma unroll 1
    for (int q = warp; q < p.ranks; q += kDispatchThreads / 32) {
      const uint32_t where = e < 0 ? kNowhere
                             : rank == q ? (uint32_t)(e - q * p.local_experts) << kPositionBits | place
                                         : kForeign | (uint32_t)rank;
      const uint32_t bits = e < 0 ? 0 : __float_as_uint(weight);
      uint4 entries;
      entries.x = __shfl_sync(0xffffffffu, where, 2 * lane);
      entries.y = __shfl_sync(0xffffffffu, bits, 2 * lane);
      entries.z = __shfl_sync(0xffffffffu, where, 2 * lane + 1);
      entries.w = __shfl_sync(0xffffffffu, bits, 2 * lane + 1);
      uint8_t* slot = r.peer_slot(q);
      if (lane < p.entry_units) send_unit(r.entry(slot, me * p.per_source + piece.j, piece.part) + lane, entries);
    }
    __syncthreads();  // the places are counted anew
  }
  return true;
}

template <class Link>
__device__ void receive_packets(Rank<Link>& r) {
  MOELAB_DYNAMIC_SHARED(first);  // [dp + 1][L], then tokens of each group [dp]
  const Plan& p = r.plan;
  const int K = p.shape.top_k, L = p.local_experts, R = p.ranks, dp = p.shape.dp, tp = p.shape.tp;
  const int lane = threadIdx.x % 32, parts = p.dispatch_parts;
  int32_t* tokens = first + (dp + 1) * L;
  uint8_t* slot = r.mine();
  const bool tells = r.block == r.blocks - 1;
  uint32_t work = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < dp * p.header_lines && !r.bad; i += kDispatchThreads) {
    const int g = i / p.header_lines, line = i - g * p.header_lines;
    uint4 v;
    r.bad = !r.wait_line(r.header(slot, g * tp) + line, v, kDispatchRecv, g * tp);
    const uint32_t word[3] = {v.x, v.y, v.z};
#pragma unroll
    for (int b = 0; b < 3; ++b) {
      const int w = 3 * line + b;
      if (w == 0) work |= word[b];
      else if (w == 1) tokens[g] = word[b];
      else if (w - 2 < L) first[g * L + w - 2] = word[b];
    }
  }
#pragma unroll 1
  // The other ranks of every group too have ended their last exchange.
  for (int q = threadIdx.x; tp > 1 && q < R && !r.bad; q += kDispatchThreads) {
    uint4 v;
    if (q % tp) r.bad = !r.wait_line(r.header(slot, q), v, kDispatchRecv, q);
  }
  if (__syncthreads_or(r.bad)) return;
  const bool found = tells || p.shape.layout == MOELAB_CONTIGUOUS_128;
  if (found) find_rows(p, r.call, first, tells);
  if (tells) {
    const int busy = __syncthreads_or(work != 0);
#pragma unroll 1
    for (int s = threadIdx.x; s < R; s += kDispatchThreads)
      r.tokens_of()[s] = r.source_tokens(tokens[r.group_of(s)], s);
    if (threadIdx.x == 0) *r.call.all_idle = !busy;
  }
#pragma unroll 1
  for (int number = r.block; number < R * p.per_source * parts; number += r.blocks) {
    const Piece piece(p, number, parts);
    const int s = piece.rank(r, 0);
    if (piece.j >= r.source_tokens(tokens[r.group_of(s)], s)) continue;
    const uint32_t at = s * p.per_source + piece.j;
    const int unit = piece.part * kDispatchThreads + threadIdx.x;
    const int part_scales = p.shape.scales == MOELAB_SCALES_UE8M0 ? kDispatchThreads / 128 : kDispatchThreads / 32;
    const int at_scale = kDispatchThreads - 1 - (int)threadIdx.x, scale = piece.part * part_scales + at_scale;
    const bool valid = unit < p.row_units, scaled = at_scale < part_scales && p.row_units + scale < p.image_units;
    uint4* staged = r.template at<uint4>(slot, p.staged) + at * p.staged_units;
    // Asked for before it is known whether they come.
    uint4 *entries = r.entry(slot, at, piece.part) + lane, raw{}, entry{};
    if (lane < p.entry_units) entry = load_whole(entries);
    if (valid) raw = load_whole(staged + unit);
    bool ok = lane >= p.entry_units || r.wait_unit(entries, entry, kDispatchRecv, s);
    ok = __all_sync(0xffffffffu, ok);
    const uint4 u = upright(entry);
    // Lane k's words are half of the unit that lane k / 2 has.
    const uint32_t a = __shfl_sync(0xffffffffu, u.x, lane / 2), b = __shfl_sync(0xffffffffu, u.y, lane / 2);
    const uint32_t c = __shfl_sync(0xffffffffu, u.z, lane / 2), d = __shfl_sync(0xffffffffu, u.w, lane / 2);
    Entry mine{kNowhere, 0.f};
    if (lane < K && ok) mine = {lane % 2 ? c : a, __uint_as_float(lane % 2 ? d : b)};
    const Place place = locate(r, first, found, s, mine);
    const unsigned rows = __ballot_sync(0xffffffffu, place.here);
    if (rows) {
      if (valid) ok &= r.wait_unit(staged + unit, raw, kDispatchRecv, s);
      const uint4 v = upright(raw);
      // An expert named twice is one row, written twice.
#pragma unroll 1
      for (unsigned left = rows; left; left &= left - 1) {
        uint4* to = reinterpret_cast<uint4*>(__shfl_sync(0xffffffffu, (u64)place.values, __ffs(left) - 1));
        if (valid && ok) to[unit] = v;
      }
      if (kDispatchThreads - 32 * (int)(threadIdx.x / 32) <= part_scales + 31) {  // a warp with scales
        uint4 words{};
        if (scaled) words = load_whole(staged + p.row_units + scale);
        if (scaled) ok &= r.wait_unit(staged + p.row_units + scale, words, kDispatchRecv, s);
#pragma unroll 1
        for (unsigned left = rows; left; left &= left - 1) {
          uint32_t* to = reinterpret_cast<uint32_t*>(__shfl_sync(0xffffffffu, (u64)place.scales, __ffs(left) - 1));
          if (scaled && ok) write_scales(p, to, scale, upright(words, p.scale_flip));
        }
        if (scaled) clear_unit(staged + p.row_units + scale);
      }
      if (valid) clear_unit(staged + unit);
    }
    if (threadIdx.x < 32 && piece.part == 0) remember_arrival(r, at, mine, place);
    if (__syncthreads_or(!ok)) return;
    if (threadIdx.x < p.entry_units) clear_unit(entries);  // every warp has read them
  }
}

}  // namespace moelab

// Dispatch by packets: no flag is set and none awaited, since every 16 bytes say themselves to which exchange they
// belong. What is sent has come when it is seen, one flight after it was stored, and the sender waits for nothing.
#pragma once
#include "rows.cuh"

namespace moelab {

__device__ __forceinline__ void store_group(Line* packet, int groups, int i, const uint4 u[3], uint32_t tag) {
#pragma unroll
  for (int p = 0; p < 3; ++p) store_line(packet + p * groups + i, u[p].x, u[p].y, u[p].z, tag);
  store_line(packet + 3 * groups + i, u[0].w, u[1].w, u[2].w, tag);
}

// Four loads in flight; what has not come is waited for.
template <class Link>
__device__ __forceinline__ bool load_group(const Rank<Link>& r, const Line* packet, int groups, int i, uint4 u[3],
                                           Half half, int peer) {
  Line v[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) v[p] = load_line(packet + p * groups + i);
  bool ok = true;
#pragma unroll
  for (int p = 0; p < 4; ++p)
    if (v[p].tag != r.tag()) ok &= r.wait(packet + p * groups + i, v[p], half, peer);
#pragma unroll
  for (int p = 0; p < 3; ++p) u[p] = {v[p].word[0], v[p].word[1], v[p].word[2], v[3].word[p]};
  return ok;
}

// Nothing came here in an exchange that sweeps: no later exchange may take what stands here for its own.
template <class Link>
__device__ void sweep(const Rank<Link>& r, Line* lines, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) store_line(lines + i, 0, 0, 0, r.tag() ^ 0x80000000u);
}

// Tells every rank how many rows of our group each of its experts gets. One block.
template <class Link>
__device__ void send_header(const Rank<Link>& r, int n) {
  __shared__ uint32_t rows_of[kMaxHeaderExperts];
  const Plan& p = r.plan;
  const int K = p.shape.top_k, L = p.local_experts;
  for (int e = threadIdx.x; e < p.shape.experts; e += blockDim.x) rows_of[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n * K; i += blockDim.x) {
    const int t = i / K, k = i % K;
    const int64_t e = r.load_id(t, k);
    bool counts = e >= 0 && e < p.shape.experts;
    for (int other = 0; other < k && counts; ++other) counts = r.load_id(t, other) != e;
    if (counts) atomicAdd(&rows_of[e], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.ranks * p.header_lines; i += blockDim.x) {
    const int q = i / p.header_lines, line = i % p.header_lines;
    uint32_t word[3];
#pragma unroll
    for (int b = 0; b < 3; ++b) {
      const int w = 3 * line + b;
      word[b] = w == 0 ? r.call.has_work : w == 1 ? n : w - 2 < L ? rows_of[q * L + w - 2] : 0;
    }
    store_line(r.header(r.slot_of(q), r.call.rank) + line, word[0], word[1], word[2], r.tag());
  }
}

// The block's tokens: values to each distinct rank; then, since they take longer to find, the token's places among its
// experts' rows, to every rank. A place is the number of earlier tokens of the group with that expert: no atomic hands it
// out, so the order of rows is always the same. False: leave.
template <class Link, bool kQuantize>
__device__ bool send_packets(Rank<Link>& r, int n) {
  __shared__ uint8_t* target[kMaxTopK];
  __shared__ int targets;
  __shared__ int expert_of[kMaxTopK];
  __shared__ uint32_t place_of[kMaxTopK];
  __shared__ float weight_of[kMaxTopK], scale_of[kQuantize ? kMaxScales : 1];
  const Plan& p = r.plan;
  const MoelabCall& c = r.call;
  const int K = p.shape.top_k, L = p.local_experts, tp = p.shape.tp, me = c.rank, lane = threadIdx.x % 32;
  const int count = r.source_tokens(n, me), G = p.value_groups;
  for (int j = r.block; j < count; j += r.blocks) {
    const int t = j * tp + me % tp;
    uint4 in[3][kQuantize ? 2 : 1];
    const auto load = [&](int i) {
#pragma unroll
      for (int q = 0; q < 3; ++q)
#pragma unroll
        for (int h = 0; h < (kQuantize ? 2 : 1); ++h)
          in[q][h] = i < G && q * G + i < p.row_units
                         ? __ldg(reinterpret_cast<const uint4*>(c.x + t * c.x_stride) + (kQuantize ? 2 : 1) * (q * G + i) + h)
                         : uint4{};
    };
    load(threadIdx.x);
    if (threadIdx.x < 32) {
      const int64_t id = lane < K ? r.load_id(t, lane) : -1;
      const int e = id >= 0 && id < p.shape.experts ? (int)id : -1, rank = e < 0 ? -1 : e / L;
      const unsigned same = __match_any_sync(0xffffffffu, rank);
      const bool leads = rank >= 0 && __ffs(same) - 1 == lane;
      const unsigned leaders = __ballot_sync(0xffffffffu, leads);
      if (leads)
        target[__popc(leaders & ((1u << lane) - 1))] =
            r.slot_of(rank) + p.staged + ((int64_t)me * p.per_source + j) * p.staged_bytes;
      if (lane == 0) targets = __popc(leaders);
      if (lane < K) expert_of[lane] = e, place_of[lane] = 0, weight_of[lane] = e < 0 ? 0.f : r.load_weight(t, lane);
    }
    if (__syncthreads_or(r.bad)) return false;
    for (int i0 = 0; i0 < G; i0 += blockDim.x) {
      const int i = i0 + threadIdx.x;
      if (i0) load(i);
      uint4 u[3];
#pragma unroll
      for (int q = 0; q < 3; ++q) {
        if constexpr (kQuantize) {
          float scale;
          u[q] = quantize16(in[q], p.shape.scales == MOELAB_SCALES_UE8M0, scale);
          if (i < G && i % 8 == 0 && (q * G + i) / 8 < p.scales_per_row) scale_of[(q * G + i) / 8] = scale;
        } else {
          u[q] = in[q][0];
        }
      }
      if (i < G)
        for (int q = 0; q < targets; ++q) store_group(reinterpret_cast<Line*>(target[q]), G, i, u, r.tag());
    }
    if (kQuantize) __syncthreads();
    const float* scales = kQuantize ? scale_of : c.scales + t * c.scales_stride;
    for (int i = (int)blockDim.x - 1 - (int)threadIdx.x; i < p.scale_groups; i += blockDim.x) {  // the idlest threads
      uint4 u[3];
#pragma unroll
      for (int q = 0; q < 3; ++q) u[q] = load_scales(scales, q * p.scale_groups + i, p.scales_per_row);
      for (int q = 0; q < targets; ++q)
        store_group(reinterpret_cast<Line*>(target[q]) + 4 * G, p.scale_groups, i, u, r.tag());
    }

    uint32_t places = 0;  // of lane k's expert, as this warp counts
    for (int first = 0; first < t; first += blockDim.x) {
      const int other = first + threadIdx.x;
      uint32_t hits = 0;
      for (int k = 0; k < K && other < t; ++k) {
        const int e = (int)r.load_id(other, k);
        for (int mine = 0; mine < K; ++mine) hits |= (uint32_t)(e == expert_of[mine]) << mine;
      }
      for (int k = 0; k < K; ++k) {
        const unsigned with = __ballot_sync(0xffffffffu, hits >> k & 1);
        if (lane == k) places += __popc(with);
      }
    }
    if (places) atomicAdd(&place_of[lane], places);
    __syncthreads();
    for (int i = threadIdx.x; i < p.ranks * p.entry_lines; i += blockDim.x) {
      const int q = i / p.entry_lines, line = i % p.entry_lines;
      uint32_t word[3];
#pragma unroll
      for (int b = 0; b < 3; ++b) {
        const int k = (3 * line + b) / 2, e = k < K ? expert_of[k] : -1;
        if ((3 * line + b) % 2) word[b] = k < K ? __float_as_uint(weight_of[k]) : 0;
        else if (e < 0) word[b] = kNowhere;
        else word[b] = e / L == q ? (uint32_t)(e % L) << kPositionBits | place_of[k] : kForeign | (uint32_t)(e / L);
      }
      store_line(r.entry(r.slot_of(q), (int64_t)me * p.per_source + j) + line, word[0], word[1], word[2], r.tag());
    }
    __syncthreads();  // the lists are written anew
  }
  return true;
}

// One warp: lane k's entry, of the 2·K words that came in lines.
__device__ __forceinline__ Entry entry_of(const Line& v, int K) {
  const int lane = threadIdx.x % 32, where = 2 * lane, weight = where + 1;
  uint32_t word[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int w = h ? weight : where, from = w / 3 % 32;
    const uint32_t a = __shfl_sync(0xffffffffu, v.word[0], from), b = __shfl_sync(0xffffffffu, v.word[1], from),
                   c = __shfl_sync(0xffffffffu, v.word[2], from);
    word[h] = w % 3 == 0 ? a : w % 3 == 1 ? b : c;
  }
  return lane < K ? Entry{word[0], __uint_as_float(word[1])} : Entry{kNowhere, 0.f};
}

template <class Link>
__device__ bool receive_packets(Rank<Link>& r) {
  MOELAB_DYNAMIC_SHARED(first);  // [dp + 1][L], then tokens of each group [dp]
  __shared__ int32_t matrix_of[kMaxTopK], row_of[kMaxTopK];
  __shared__ int arrives;
  const Plan& p = r.plan;
  const int K = p.shape.top_k, L = p.local_experts, R = p.ranks, dp = p.shape.dp, tp = p.shape.tp;
  int32_t* tokens = first + (dp + 1) * L;
  uint8_t* slot = r.mine();
  const bool tells = r.block == r.blocks - 1;
  uint32_t work = 0;
  for (int i = threadIdx.x; i < dp * p.header_lines && !r.bad; i += blockDim.x) {
    const int g = i / p.header_lines, line = i % p.header_lines;
    Line v;
    r.bad = !r.wait(r.header(slot, g * tp) + line, v, kDispatchRecv, g * tp);
#pragma unroll
    for (int b = 0; b < 3; ++b) {
      const int w = 3 * line + b;
      if (w == 0) work |= v.word[b];
      else if (w == 1) tokens[g] = v.word[b];
      else if (w - 2 < L) first[g * L + w - 2] = v.word[b];
    }
  }
  for (int q = threadIdx.x; q < R && !r.bad; q += blockDim.x) {  // that these too have ended their last exchange
    Line v;
    if (q % tp) r.bad = !r.wait(r.header(slot, q), v, kDispatchRecv, q);
  }
  if (__syncthreads_or(r.bad)) return false;
  find_rows(r, first, tells);
  int most = 0;
  for (int g = 0; g < dp; ++g) most = max(most, r.source_tokens(tokens[g], 0));
  if (tells) {
    const int busy = __syncthreads_or(work != 0);
    for (int s = threadIdx.x; s < R; s += blockDim.x) r.tokens_of()[s] = r.source_tokens(tokens[s / tp], s);
    if (threadIdx.x == 0) *r.call.all_idle = !busy, *r.most() = most;
  }
  const int64_t items = (int64_t)(r.sweeps() ? p.per_source : most) * R;
  for (int64_t item = r.block; item < items; item += r.blocks) {
    const int s = item % R, j = item / R;
    const int64_t at = (int64_t)s * p.per_source + j;
    Line* staged = r.template at<Line>(slot, p.staged + at * p.staged_bytes);
    if (j >= r.source_tokens(tokens[s / tp], s)) {
      if (r.sweeps()) sweep(r, staged, p.staged_bytes / 16), sweep(r, r.entry(slot, at), p.entry_lines);
      continue;
    }
    if (threadIdx.x < 32) {
      Line v{};
      if (threadIdx.x < p.entry_lines && !r.bad) r.bad = !r.wait(r.entry(slot, at) + threadIdx.x, v, kDispatchRecv, s);
      const Arrival a = arrive(r, first, s, at, entry_of(v, K));
      const unsigned below = (1u << threadIdx.x) - 1;
      if (a.rows >> threadIdx.x & 1)
        matrix_of[__popc(a.rows & below)] = a.matrix, row_of[__popc(a.rows & below)] = a.row;
      if (threadIdx.x == 0) arrives = __popc(a.rows);
    }
    if (__syncthreads_or(r.bad)) return false;
    const int rows = arrives, G = p.value_groups;
    for (int i = threadIdx.x; i < (rows ? G + p.scale_groups : 0); i += blockDim.x) {
      const bool scales = i >= G;
      const int groups = scales ? p.scale_groups : G, group = scales ? i - G : i;
      uint4 u[3];
      if (!load_group(r, staged + (scales ? 4 * G : 0), groups, group, u, kDispatchRecv, s)) r.bad = true;
      for (int k = 0; k < rows && !r.bad; ++k) {
        const int64_t row = row_of[k], matrix = matrix_of[k];
#pragma unroll
        for (int q = 0; q < 3; ++q) {
          const int unit = (scales ? p.row_units : 0) + q * groups + group;
          if (unit < (scales ? p.image_units : p.row_units)) write_unit(r, matrix, row, unit, u[q]);
        }
      }
    }
    if (!rows && r.sweeps()) sweep(r, staged, p.staged_bytes / 16);
    if (__syncthreads_or(r.bad)) return false;  // the lists are written anew
  }
  return true;
}

}  // namespace moelab

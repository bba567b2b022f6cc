// Dispatch by flags, for many tokens or peers that are put to: plain stores, then one flag for each token, released. A
// warp carries a token, so that each SM has many on their way, and where one waits for its release the others go on.
#pragma once
#include "rows.cuh"

namespace moelab {

constexpr int kAtOnce = 8;  // units a lane has in flight

// A block takes some experts. A bit for each (expert, token) gives counts and the place of a token among its
// expert's, in token order and with no atomic that hands out places, so the order of rows is always the same.
template <class Link>
__device__ void notify(const Rank<Link>& r, int n, int part) {
  __shared__ uint32_t bits[kNoticeWords];
  __shared__ uint16_t before[kNoticeWords];
  __shared__ uint32_t rows_of[kFlagThreads];
  const Plan& p = r.plan;
  const int K = p.shape.top_k, L = p.local_experts, tp = p.shape.tp, me = r.call.rank;
  const int first = part * p.notice_experts, experts = min(p.notice_experts, p.shape.experts - first);
  const int stride = p.notice_stride, words = (n + 31) / 32;
  for (int i = threadIdx.x; i < experts * stride; i += blockDim.x) bits[i] = 0;
  __syncthreads();
  // Most pairs (t, k) are not ours: each block looks at all, so they are asked for 16 bytes and many at a time where
  // the caller's ids are dense. What costs is left to `act`.
  const auto try_pair = [&](int i, int e, auto&& act) {
    if (e >= first ? e < first + experts : part == 0) act(i, e);
  };
  const auto for_pairs = [&](auto&& act) {
    const MoelabCall& c = r.call;
    const bool wide = c.ids_bytes == 8;
    const bool dense = c.ids_stride[1] == 1 && c.ids_stride[0] == K && (u64)c.ids % 16 == 0;
    const int each = wide ? 2 : 4, vectors = dense ? n * K / each : 0;
#pragma unroll 1
    for (int v0 = threadIdx.x; v0 < vectors; v0 += kAtOnce * blockDim.x) {
      uint4 raw[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (v0 + u * blockDim.x < vectors) raw[u] = __ldg(static_cast<const uint4*>(c.ids) + v0 + u * blockDim.x);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = (v0 + u * blockDim.x) * each;
        if (v0 + u * blockDim.x >= vectors) break;
        try_pair(i, r.expert(raw[u].x, wide ? raw[u].y : (int)raw[u].x >> 31), act);
        try_pair(i + 1, wide ? r.expert(raw[u].z, raw[u].w) : r.expert(raw[u].y, (int)raw[u].y >> 31), act);
        if (wide) continue;
        try_pair(i + 2, r.expert(raw[u].z, (int)raw[u].z >> 31), act);
        try_pair(i + 3, r.expert(raw[u].w, (int)raw[u].w >> 31), act);
      }
    }
#pragma unroll 1
    for (int i = vectors * each + threadIdx.x; i < n * K; i += blockDim.x) try_pair(i, r.load_id(i / K, i % K), act);
  };
  for_pairs([&](int i, int e) {
    const int t = i / K;
    if (e >= 0) atomicOr(&bits[(e - first) * stride + t / 32], 1u << t % 32);
  });
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int expert = threadIdx.x / 32; expert < experts; expert += blockDim.x / 32) {
    uint32_t total = 0;
    for (int w0 = 0; w0 < words; w0 += 32) {
      const int w = w0 + lane;
      const uint32_t here = w < words ? __popc(bits[expert * stride + w]) : 0;
      uint32_t up_to = here;
      for (int d = 1; d < 32; d *= 2) {
        const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, d);
        if (lane >= d) up_to += other;
      }
      if (w < words) before[expert * stride + w] = total + up_to - here;
      total += __shfl_sync(0xffffffffu, up_to, 31);
    }
    if (lane == 0) rows_of[expert] = total;
  }
  __syncthreads();

  const auto notice_at = [&](int q) {  // where rank q's copy of our notice is written
    uint8_t* slot = r.slot_of(q);
    return slot != nullptr ? slot + p.header + me * p.notice_bytes : r.mine() + p.out_notice + q * p.notice_bytes;
  };
  for_pairs([&](int i, int e) {
    const int t = i / K, k = i - t * K;
    if (t % tp != r.tp_rank(me)) return;
    Entry entry{kNowhere, 0.f};
    int to = -1;
    uint32_t local = kNowhere;
    if (e >= 0) {
      const int at = (e - first) * stride + t / 32;
      const uint32_t place = before[at] + __popc(bits[at] & ((1u << t % 32) - 1));
      to = r.rank_of(e);
      local = (uint32_t)(e - to * L) << kPositionBits | place;
      entry = {kForeign | (uint32_t)to, r.load_weight(t, k)};
    }
    const int64_t offset = p.notice_entries + 8 * ((int64_t)(t / tp) * K + k);
    for (int q = 0; q < p.ranks; ++q)
      *r.template at<Entry>(notice_at(q), offset) = {q == to ? local : entry.where, entry.weight};
  });
  for (int i = threadIdx.x; i < experts; i += blockDim.x) {
    const int e = first + i;
    r.template at<uint32_t>(notice_at(e / L), 8)[e % L] = rows_of[i];
  }
  if (part == 0)
    for (int q = threadIdx.x; q < p.ranks; q += blockDim.x) {
      r.template at<int32_t>(notice_at(q), 0)[0] = r.call.has_work;
      r.template at<int32_t>(notice_at(q), 0)[1] = n;
    }
  __syncthreads();
  for (int q = threadIdx.x; q < p.ranks; q += blockDim.x)
    if (uint8_t* slot = r.slot_of(q))
      store_release(r.template at<u64>(slot, p.notice_flag) + me * p.notice_blocks + part, r.epoch);
  if constexpr (Link::remote) r.link.put_notices(r, n);
  __syncthreads();
}

// A warp to a token. `warp` of `warps` that send.
template <class Link, bool kQuantize>
__device__ void send_tokens(const Rank<Link>& r, int n, int warp, int warps) {
  const Plan& p = r.plan;
  const MoelabCall& c = r.call;
  const int K = p.shape.top_k, tp = p.shape.tp, me = c.rank, lane = threadIdx.x % 32;
  const int count = r.source_tokens(n, me);
  for (int j = warp; j < count; j += warps) {
    const int t = j * tp + r.tp_rank(me), e = lane < K ? r.load_id(t, lane) : -1, rank = e < 0 ? -1 : r.rank_of(e);
    const unsigned same = __match_any_sync(0xffffffffu, rank);
    const bool leads = rank >= 0 && __ffs(same) - 1 == lane;
    const int64_t row = p.staged + ((int64_t)me * p.per_source + j) * p.staged_bytes;
    uint8_t* slot = leads ? r.slot_of(rank) : nullptr;
    const unsigned put = __ballot_sync(0xffffffffu, leads && slot == nullptr);
    // Who is put to gets it from the outbox, which the first of them stands for.
    u64 target = leads ? (u64)(slot != nullptr ? slot + row : r.mine() + p.out_staged + j * p.staged_bytes) : 0;
    const unsigned targets =
        __ballot_sync(0xffffffffu, leads && (slot != nullptr || __ffs(put) - 1 == lane));
    const auto write = [&](int unit, const uint4& value) {
      for (unsigned left = targets; left; left &= left - 1) {
        uint4* to = reinterpret_cast<uint4*>(__shfl_sync(0xffffffffu, target, __ffs(left) - 1));
        if (unit < p.image_units) to[unit] = value;
      }
    };
    const uint4* x = reinterpret_cast<const uint4*>(c.x + t * c.x_stride);
    [[maybe_unused]] uint4 four{};
    if constexpr (kQuantize) {
      for (int i0 = 0; i0 < p.row_units; i0 += 32) {
        const int i = i0 + lane;
        uint4 in[2] = {};
        if (i < p.row_units) in[0] = __ldg(x + 2 * i), in[1] = __ldg(x + 2 * i + 1);
        float scale;
        const bool packed = p.shape.scales == MOELAB_SCALES_UE8M0;
        const uint4 unit = quantize16(in, packed, scale);
        write(i < p.row_units ? i : p.image_units, unit);
        // The scales of these four blocks are a unit or, packed, a word, of which lane 0 puts four together.
        uint32_t word[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) word[b] = __float_as_uint(__shfl_sync(0xffffffffu, scale, 8 * b));
        if (!packed) {
          write(lane == 0 ? p.row_units + i0 / 32 : p.image_units, {word[0], word[1], word[2], word[3]});
        } else {
          const int words = i0 / 32;  // before this one
          uint32_t all = 0;
#pragma unroll
          for (int b = 0; b < 4; ++b)
            if (4 * words + b < p.scales_per_row) all |= (word[b] >> 23 & 255u) << 8 * b;
          if (words % 4 == 0) four = {all, 0, 0, 0};
          else if (words % 4 == 1) four.y = all;
          else if (words % 4 == 2) four.z = all;
          else four.w = all;
          const bool full = words % 4 == 3 || i0 + 32 >= p.row_units;
          write(lane == 0 && full ? p.row_units + words / 4 : p.image_units, four);
        }
      }
    } else {
      for (int i0 = lane; i0 < p.row_units + lane; i0 += 32 * kAtOnce) {
        uint4 in[kAtOnce];
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a)
          if (i0 + 32 * a < p.row_units) in[a] = __ldg(x + i0 + 32 * a);
        for (unsigned left = targets; left; left &= left - 1) {
          uint4* to = reinterpret_cast<uint4*>(__shfl_sync(0xffffffffu, target, __ffs(left) - 1));
#pragma unroll
          for (int a = 0; a < kAtOnce; ++a)
            if (i0 + 32 * a < p.row_units) to[i0 + 32 * a] = in[a];
        }
      }
      for (int i = lane; i - lane < p.image_units - p.row_units; i += 32) {
        uint4 scales{};
        if (i < p.image_units - p.row_units)
          scales = scale_unit(p, c.scales + t * c.scales_stride[0], c.scales_stride[1], i, p.scales_per_row);
        write(p.row_units + i, scales);
      }
    }
    __syncwarp();
    if (leads && slot != nullptr)
      store_release(r.template at<u64>(slot, p.staged_flag) + (int64_t)me * p.per_source + j, r.epoch);
    if constexpr (Link::remote) {
      if (put) r.link.before_puts();
      for (unsigned left = put; left; left &= left - 1)
        r.link.put_warp(r, __shfl_sync(0xffffffffu, rank, __ffs(left) - 1), row, p.out_staged + j * p.staged_bytes,
                        16 * p.image_units, p.staged_flag + 8 * ((int64_t)me * p.per_source + j));
    }
  }
}

// Of `blocks`, the first write notices and then send like all others.
template <class Link, bool kQuantize>
__device__ void send_flagged(const Rank<Link>& r, int n, int block, int blocks) {
  for (int part = block; part < r.plan.notice_blocks; part += blocks) notify(r, n, part);
  const int warps = blockDim.x / 32;
  send_tokens<Link, kQuantize>(r, n, threadIdx.x / 32 * blocks + (blocks - 1 - block), warps * blocks);
}

template <class Link>
__device__ bool receive_flagged(Rank<Link>& r, int block, int blocks) {
  MOELAB_DYNAMIC_SHARED(first);  // [dp + 1][L]
  const Plan& p = r.plan;
  const int K = p.shape.top_k, L = p.local_experts, R = p.ranks, dp = p.shape.dp, tp = p.shape.tp;
  const int lane = threadIdx.x % 32;
  uint8_t* slot = r.mine();
  const bool tells = block == 0;
  for (int i = threadIdx.x; i < R * p.notice_blocks && !r.bad; i += blockDim.x) {
    const int from = i / p.notice_blocks;
    // A notice that was put came whole, with its first flag.
    if (Link::remote && r.slot_of(from) == nullptr && i % p.notice_blocks) continue;
    r.bad = !r.wait_flag(r.template at<u64>(slot, p.notice_flag) + i, kDispatchRecv, from);
  }
  if (__syncthreads_or(r.bad)) return false;
  const auto notice = [&](int s) { return r.template at<int32_t>(slot, p.header + s * p.notice_bytes); };
  for (int i = threadIdx.x; i < dp * L; i += blockDim.x) first[i] = __ldcg(notice(i / L * tp) + 2 + i % L);
  __syncthreads();
  find_rows(p, r.call, first, tells);
  int most = 0;
  for (int g = 0; g < dp; ++g) most = max(most, r.source_tokens(__ldcg(notice(g * tp) + 1), 0));
  if (tells) {
    int busy = 0;
    for (int s = threadIdx.x; s < R; s += blockDim.x) {
      busy |= __ldcg(notice(s));
      r.tokens_of()[s] = r.source_tokens(__ldcg(notice(s) + 1), s);
    }
    busy = __syncthreads_or(busy);
    if (threadIdx.x == 0) *r.call.all_idle = !busy, *r.most() = most;
  }
  const int warps = blockDim.x / 32;
  for (int64_t item = threadIdx.x / 32 * blocks + block; item < (int64_t)most * R; item += warps * blocks) {
    const int s = item % R, j = item / R;
    const int64_t at = (int64_t)s * p.per_source + j;
    if (j >= r.source_tokens(__ldcg(notice(s) + 1), s)) continue;
    u64 raw = kNowhere;
    if (lane < K)
      raw = __ldcg(reinterpret_cast<const u64*>(reinterpret_cast<uint8_t*>(notice(s)) + p.notice_entries) +
                   (int64_t)j * K + lane);
    const Entry entry{(uint32_t)raw, __uint_as_float(raw >> 32)};
    const Place place = locate(r, first, true, s, entry);
    remember_arrival(r, at, entry, place);
    const unsigned rows = __ballot_sync(0xffffffffu, place.here);
    if (rows == 0) continue;
    bool ok = true;
    if (lane == 0) ok = r.wait_flag(r.template at<u64>(slot, p.staged_flag) + at, kDispatchRecv, s);
    ok = __all_sync(0xffffffffu, ok);
    __syncwarp();  // a vote orders nothing: what lane 0 acquired is now every lane's
    if (!ok) {
      r.bad = true;
      break;
    }
    const uint4* staged = r.template at<uint4>(slot, p.staged + at * p.staged_bytes);
    for (int i0 = lane; i0 < p.row_units + lane; i0 += 32 * kAtOnce) {
      uint4 in[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (i0 + 32 * u < p.row_units) in[u] = load_fresh(staged + i0 + 32 * u);
      for (unsigned left = rows; left; left &= left - 1) {
        uint4* to = reinterpret_cast<uint4*>(__shfl_sync(0xffffffffu, (u64)place.values, __ffs(left) - 1));
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u)
          if (i0 + 32 * u < p.row_units) to[i0 + 32 * u] = in[u];
      }
    }
    for (int i = p.row_units + lane; i - lane < p.image_units; i += 32) {
      uint4 scales{};
      if (i < p.image_units) scales = load_fresh(staged + i);
      for (unsigned left = rows; left; left &= left - 1) {
        uint32_t* to = reinterpret_cast<uint32_t*>(__shfl_sync(0xffffffffu, (u64)place.scales, __ffs(left) - 1));
        if (i < p.image_units) write_scales(p, to, i - p.row_units, scales);
      }
    }
  }
  return !__syncthreads_or(r.bad);
}

}  // namespace moelab

// The way home by flags: a warp carries a token.
#pragma once
#include "flags.cuh"
#include "outputs.cuh"

namespace moelab {

template <class Link, class Y, int kReturns>
__device__ void return_flagged(Rank<Link>& r, int block, int blocks) {
  using P = Part<Y, kReturns>;
  const Plan& p = r.plan;
  const int R = p.ranks, tp = p.shape.tp, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (block == 0) r.entered_by_me();
  const int64_t items = (int64_t)*r.most() * R;
  for (int64_t item = threadIdx.x / 32 * blocks + block; item < items; item += warps * blocks) {
    const int s = item % R, j = item / R;
    if (j >= r.tokens_of()[s]) continue;
    const int64_t at = (int64_t)s * p.per_source + j, token = (int64_t)j * tp + s % tp;
    const Term term = term_of<kReturns>(r, at);
    if (term.counts == 0) continue;
    const int home = s / tp * tp;  // first rank of the token's group: all of its ranks get the results
    const int out_lanes = kReturns == MOELAB_RETURN_ROWS ? min(p.shape.top_k, p.local_experts) : 1;
    int message = 0;
    for (unsigned left = term.counts; left; left &= left - 1, ++message) {
      const int from = __ffs(left) - 1, to_lane = __shfl_sync(0xffffffffu, term.lane, from);
      const int64_t offset = p.returned + (token * p.lanes + to_lane) * p.returned_bytes;
      const int64_t flag = p.returned_flag + 8 * (token * p.lanes + to_lane);
      const int64_t box = p.out_returned + (at * out_lanes + message) * p.returned_bytes;
      const auto write = [&](int unit, const uint4& value) {
        bool put = false;
        for (int q = home; q < home + tp; ++q) {
          if (uint8_t* slot = r.slot_of(q)) reinterpret_cast<uint4*>(slot + offset)[unit] = value;
          else put = true;
        }
        if (Link::remote && put) reinterpret_cast<uint4*>(r.mine() + box)[unit] = value;
      };
      if constexpr (kReturns == MOELAB_RETURN_ROWS) {
        const uint32_t row = __shfl_sync(0xffffffffu, term.row, from);
        const uint4* y = reinterpret_cast<const uint4*>(r.call.y) + (int64_t)row * p.y_units;
        for (int i0 = lane; i0 < p.y_units; i0 += 32 * kAtOnce) {
          uint4 in[kAtOnce];
#pragma unroll
          for (int u = 0; u < kAtOnce; ++u)
            if (i0 + 32 * u < p.y_units) in[u] = __ldg(y + i0 + 32 * u);
#pragma unroll
          for (int u = 0; u < kAtOnce; ++u)
            if (i0 + 32 * u < p.y_units) write(i0 + 32 * u, in[u]);
        }
      } else {
        constexpr int kUnits = 2;
        for (int i0 = lane; i0 < p.returned_units + lane; i0 += 32 * kUnits) {
          float sum[kUnits][P::kValues] = {};
          for (unsigned terms = term.counts; terms;) {
            typename P::Raw raw[4][kUnits];
            float weight[4];
            bool some[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              some[k] = terms != 0;
              const int source = some[k] ? __ffs(terms) - 1 : 0;
              terms &= terms - 1;
              const uint32_t row = __shfl_sync(0xffffffffu, term.row, source);
              weight[k] = __shfl_sync(0xffffffffu, term.weight, source);
#pragma unroll
              for (int u = 0; u < kUnits; ++u)
                if (some[k] && i0 + 32 * u < p.returned_units)
                  raw[k][u] = __ldg(reinterpret_cast<const typename P::Raw*>(r.call.y) +
                                    (int64_t)row * p.returned_units + i0 + 32 * u);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
              for (int u = 0; u < kUnits; ++u)
                if (some[k] && i0 + 32 * u < p.returned_units) P::add(sum[u], raw[k][u], weight[k]);
          }
#pragma unroll
          for (int u = 0; u < kUnits; ++u)
            if (i0 + 32 * u < p.returned_units) write(i0 + 32 * u, P::pack(sum[u]));
        }
      }
      __syncwarp();
      if (lane < tp)
        if (uint8_t* slot = r.slot_of(home + lane)) store_release(r.template at<u64>(slot, flag), r.epoch);
      if constexpr (Link::remote) {
        r.link.before_puts();
        for (int q = home; q < home + tp; ++q)
          if (r.slot_of(q) == nullptr) r.link.put_warp(r, q, offset, box, p.returned_bytes, flag);
      }
      if (kReturns != MOELAB_RETURN_ROWS) break;  // one message for all terms
    }
  }
}

template <class Link, class Y, int kReturns>
__device__ bool gather_flagged(Rank<Link>& r, int block, int blocks) {
  using P = Part<Y, kReturns>;
  const Plan& p = r.plan;
  const int n = *r.tokens(), lane = threadIdx.x % 32, warps = blockDim.x / 32;
  uint8_t* slot = r.mine();
  for (int64_t t = threadIdx.x / 32 * blocks + block; t < n && !r.bad; t += warps * blocks) {
    const Coming coming = coming_of<kReturns>(r, home_of(r, t));
    bool ok = true;
    if (coming.counts >> lane & 1) {
      const u64* flag = r.template at<u64>(slot, p.returned_flag) + t * p.lanes + coming.lane;
      ok = r.wait_flag(flag, kCombineRecv, coming.rank);
    }
    r.bad |= !__all_sync(0xffffffffu, ok);
    __syncwarp();  // a vote orders nothing: what some lanes acquired is now every lane's
    if (r.bad) break;
    const uint4* parts = r.template at<uint4>(slot, p.returned + t * p.lanes * p.returned_bytes);
    constexpr int kUnits = 4;
    for (int i0 = lane; i0 < p.returned_units + lane; i0 += 32 * kUnits) {
      float sum[kUnits][P::kValues] = {};
      for (unsigned left = coming.counts; left;) {
        uint4 raw[2][kUnits];
        float weight[2];
        bool some[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          some[k] = left != 0;
          const int source = some[k] ? __ffs(left) - 1 : 0;
          left &= left - 1;
          const int from = __shfl_sync(0xffffffffu, coming.lane, source);
          weight[k] = __shfl_sync(0xffffffffu, coming.weight, source);
#pragma unroll
          for (int u = 0; u < kUnits; ++u)
            if (some[k] && i0 + 32 * u < p.returned_units)
              raw[k][u] = load_fresh(parts + (int64_t)from * p.returned_units + i0 + 32 * u);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int u = 0; u < kUnits; ++u)
            if (some[k] && i0 + 32 * u < p.returned_units) P::gather(sum[u], raw[k][u], weight[k]);
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        if (i0 + 32 * u < p.returned_units)
          store_out<P::kValues>(r.call.out, r.call.out_dtype, t * p.shape.hidden + (int64_t)(i0 + 32 * u) * P::kValues,
                                sum[u]);
    }
  }
  return !__syncthreads_or(r.bad);
}

}  // namespace moelab

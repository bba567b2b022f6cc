// The way home: what a token's experts made, weighted and summed. Three ways, `returns`:
//   rows   every row as it is; the source weights and sums in order of k. Bit for bit moelab.ops.reduce.
//   f32    the expert's rank weights and sums its rows in order of k, in float32; the source adds the ranks' sums in
//          order of first appearance. Other brackets, no other rounding: within 1 ulp of the output.
//   y      likewise, with the rank's sum rounded to the outputs' dtype: rounds twice, held to 8 * 2^-8 in bfloat16.
#pragma once
#include <type_traits>

#include "packets.cuh"

namespace moelab {

__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float as_float(float v) { return v; }
template <class T>
__device__ __forceinline__ T rounded(float v) {
  if constexpr (sizeof(T) == 4) return v;
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(v);
  else return __float2bfloat16_rn(v);
}

// N values, stored by 16 bytes or, where they are fewer, by 8.
template <class T, int N>
__device__ __forceinline__ void store_values(T* target, const float* v) {
  struct alignas(N * sizeof(T) > 16 ? 16 : N * sizeof(T)) {
    T t[N];
  } packed;
#pragma unroll
  for (int i = 0; i < N; ++i) packed.t[i] = rounded<T>(v[i]);
  constexpr int kStep = sizeof(packed) > 16 ? 16 : sizeof(packed);
#pragma unroll
  for (int i = 0; i < (int)sizeof(packed) / kStep; ++i) {
    if constexpr (kStep == 16) reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(&packed)[i];
    else reinterpret_cast<uint2*>(target)[i] = reinterpret_cast<const uint2*>(&packed)[i];
  }
}
template <int N>
__device__ __forceinline__ void store_out(void* out, int dtype, int64_t at, const float* v) {
  if (dtype == MOELAB_BF16) store_values<__nv_bfloat16, N>(static_cast<__nv_bfloat16*>(out) + at, v);
  else if (dtype == MOELAB_F32) store_values<float, N>(static_cast<float*>(out) + at, v);
  else store_values<__half, N>(static_cast<__half*>(out) + at, v);
}

// What travels for a token: Y itself, or sums of it.
template <class Y, int kReturns>
struct Part {
  using T = std::conditional_t<kReturns == MOELAB_RETURN_F32, float, Y>;
  static constexpr int kValues = 16 / sizeof(T);  // of a unit
  using Raw = std::conditional_t<(kValues * sizeof(Y) < 16), uint2, uint4>;  // as many values of Y

  __device__ __forceinline__ static void add(float* sum, const Raw& raw, float weight) {
    const Y* v = reinterpret_cast<const Y*>(&raw);
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, as_float(v[i])));
  }
  // At home: rows are weighted, partial sums are added.
  __device__ __forceinline__ static void gather(float* sum, const uint4& raw, float weight) {
    const T* v = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      sum[i] = __fadd_rn(sum[i], kReturns == MOELAB_RETURN_ROWS ? __fmul_rn(weight, as_float(v[i])) : as_float(v[i]));
  }
  __device__ __forceinline__ static uint4 pack(const float* sum) {
    uint4 unit;
    store_values<T, kValues>(reinterpret_cast<T*>(&unit), sum);
    return unit;
  }
};

// What a token brought here, as the lanes of a warp see it: lane k has the row and weight of its k-th expert, and the
// lane in which that, or the sum, goes home.
struct Term {
  uint32_t row;
  float weight;
  int lane;
  unsigned counts;  // which lanes k are terms
};
template <int kReturns, class Link>
__device__ __forceinline__ Term term_of(const Rank<Link>& r, int64_t at) {
  const int lane = threadIdx.x % 32;
  Entry entry{kNowhere, 0.f};
  if (lane < r.plan.shape.top_k) entry = r.arrived(at)[lane];
  const int home = kReturns == MOELAB_RETURN_ROWS ? lane : *r.lane(at);
  const unsigned same = __match_any_sync(0xffffffffu, entry.where);
  // A partial sum adds an expert named twice with both weights; as a row it goes home once.
  const bool counts = entry.where != kNowhere && (kReturns != MOELAB_RETURN_ROWS || __ffs(same) - 1 == lane);
  return {entry.where, entry.weight, home, __ballot_sync(0xffffffffu, counts)};
}

// What comes home for a token: lane k's weight, where it stands, and from which rank.
struct Coming {
  float weight;
  int lane, rank;
  unsigned counts;
};
template <class Link>
__device__ __forceinline__ Entry home_of(const Rank<Link>& r, int64_t token) {
  const int lane = threadIdx.x % 32;
  return lane < r.plan.shape.top_k ? r.home(token)[lane] : Entry{kNowhere, 0.f};
}
template <int kReturns, class Link>
__device__ __forceinline__ Coming coming_of(const Rank<Link>& r, const Entry& entry) {
  const int lane = threadIdx.x % 32, id = (int)entry.where, rank = id < 0 ? -1 : r.rank_of(id);
  const unsigned same = __match_any_sync(0xffffffffu, kReturns == MOELAB_RETURN_ROWS ? id : rank);
  const int leader = __ffs(same) - 1;
  const unsigned leaders = __ballot_sync(0xffffffffu, id >= 0 && leader == lane);
  const bool counts = id >= 0 && (kReturns == MOELAB_RETURN_ROWS || leader == lane);
  const int at = kReturns == MOELAB_RETURN_ROWS ? leader : __popc(leaders & ((1u << lane) - 1));
  return {entry.weight, at, rank, __ballot_sync(0xffffffffu, counts)};
}

// --- by packets ---------------------------------------------------------------------------------------------------
// Every warp for itself: a thread has one unit of a part of a token, and all of its rows in flight. Tokens of other
// ranks come first: what travels to them is on its way while our own are summed.
template <class Link, class Y, int kReturns>
__device__ void return_packets(Rank<Link>& r) {
  using P = Part<Y, kReturns>;
  using Raw = typename P::Raw;
  constexpr int kAtOnce = kReturns == MOELAB_RETURN_ROWS ? 1 : 8;
  const Plan& p = r.plan;
  const int tp = p.shape.tp, units = p.returned_units, parts = p.combine_parts;
#pragma unroll 1
  for (int number = r.block; number < p.ranks * p.per_source * parts; number += r.blocks) {
    const Piece piece(p, number, parts);
    const int s = piece.rank(r, tp == 1 ? 1 : 0), unit = piece.part * kCombineThreads + threadIdx.x;
    const uint32_t at = s * p.per_source + piece.j;
    const int there = r.tokens_of()[s];
    const Term term = term_of<kReturns>(r, at);
    r.settle(false);
    if (r.bad) return;
    if (piece.j >= there || term.counts == 0) continue;
    const u64 row = (u64)(reinterpret_cast<const Raw*>(r.call.y) + (int64_t)term.row * units);
    const int group = r.group_of(s), token = tp == 1 ? piece.j : piece.j * tp + s - group * tp;
    unsigned left = term.counts;
#pragma unroll 1
    while (left) {  // a message: of one row, or of all
      const int lane = __shfl_sync(0xffffffffu, term.lane, __ffs(left) - 1);
      float sum[P::kValues] = {};
      uint4 v;
#pragma unroll 1
      do {
        Raw raw[kAtOnce];
        const unsigned some = left;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const Raw* y = reinterpret_cast<const Raw*>(__shfl_sync(0xffffffffu, row, left ? __ffs(left) - 1 : 0));
          raw[k] = left && unit < units ? __ldg(y + unit) : Raw{};
          left &= left - 1;
        }
        if constexpr (kReturns == MOELAB_RETURN_ROWS) {
          v = raw[0];
          break;
        } else {
          unsigned terms = some;
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
            const float weight = __shfl_sync(0xffffffffu, term.weight, terms ? __ffs(terms) - 1 : 0);
            if (terms) P::add(sum, raw[k], weight);
            terms &= terms - 1;
          }
        }
      } while (left);
      if constexpr (kReturns != MOELAB_RETURN_ROWS) v = P::pack(sum);
      // To all ranks of the token's group.
#pragma unroll 1
      for (int q = 0; q < tp; ++q) {
        uint4* to = r.template at<uint4>(r.peer_slot(group * tp + q), p.returned);
        to += (uint32_t)(token * p.lanes + lane) * units;
        if (unit < units) send_unit(to + unit, v);
      }
    }
  }
}

// A token of ours; `home` is that of the block's first. False when something did not come.
template <class Link, class Y, int kReturns>
__device__ bool gather_packets(const Rank<Link>& r, int n, Entry home) {
  using P = Part<Y, kReturns>;
  constexpr int kAtOnce = 2;
  const Plan& p = r.plan;
  const int units = p.returned_units, parts = p.combine_parts;
  bool ok = !r.bad;
#pragma unroll 1
  for (int number = r.block; number < n * parts && ok; number += r.blocks) {
    const int t = number / parts, unit = (number - t * parts) * kCombineThreads + threadIdx.x;
    if (number != r.block) home = home_of(r, t);
    const Coming coming = coming_of<kReturns>(r, home);
    uint4* slots = r.template at<uint4>(r.mine(), p.returned) + (uint32_t)(t * p.lanes) * units + unit;
    float sum[P::kValues] = {};
#pragma unroll 1
    for (unsigned left = coming.counts; left;) {
      uint4 raw[kAtOnce];
      const unsigned some = left;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int lane = __shfl_sync(0xffffffffu, coming.lane, left ? __ffs(left) - 1 : 0);
        if (left && unit < units) raw[k] = load_whole(slots + lane * units);
        left &= left - 1;
      }
      unsigned terms = some;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int from = terms ? __ffs(terms) - 1 : 0, lane = __shfl_sync(0xffffffffu, coming.lane, from);
        const int rank = __shfl_sync(0xffffffffu, coming.rank, from);
        const float weight = __shfl_sync(0xffffffffu, coming.weight, from);
        if (terms && unit < units) {
          ok &= r.wait_unit(slots + lane * units, raw[k], kCombineRecv, rank);
          P::gather(sum, upright(raw[k]), weight);
        }
        terms &= terms - 1;
      }
    }
    if (unit < units && ok)
      store_out<P::kValues>(r.call.out, r.call.out_dtype, (int64_t)t * p.shape.hidden + unit * P::kValues, sum);
    // At the end, since as a row an expert named twice is two terms.
#pragma unroll 1
    for (unsigned left = coming.counts; left; left &= left - 1) {
      const int lane = __shfl_sync(0xffffffffu, coming.lane, __ffs(left) - 1);
      if (unit < units) clear_unit(slots + lane * units);
    }
    ok = __all_sync(0xffffffffu, ok);
  }
  return !__syncthreads_or(!ok);
}

}  // namespace moelab

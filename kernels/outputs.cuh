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

// What a token brought here, as the lanes of a warp see it: lane i < messages has the row and weight of the i-th term,
// and the lane it goes home in.
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
template <int kReturns, class Link>
__device__ __forceinline__ Coming coming_of(const Rank<Link>& r, int64_t token) {
  const int lane = threadIdx.x % 32;
  Entry entry{kNowhere, 0.f};
  if (lane < r.plan.shape.top_k) entry = r.home(token)[lane];
  const int id = (int)entry.where, rank = id < 0 ? -1 : id / r.plan.local_experts;
  const unsigned same = __match_any_sync(0xffffffffu, kReturns == MOELAB_RETURN_ROWS ? id : rank);
  const int leader = __ffs(same) - 1;
  const unsigned leaders = __ballot_sync(0xffffffffu, id >= 0 && leader == lane);
  const bool counts = id >= 0 && (kReturns == MOELAB_RETURN_ROWS || leader == lane);
  const int at = kReturns == MOELAB_RETURN_ROWS ? leader : __popc(leaders & ((1u << lane) - 1));
  return {entry.weight, at, rank, __ballot_sync(0xffffffffu, counts)};
}

// --- by packets ---------------------------------------------------------------------------------------------------
template <class Link, class Y, int kReturns>
__device__ bool return_packets(Rank<Link>& r) {
  using P = Part<Y, kReturns>;
  __shared__ uint32_t row_of[kMaxTopK];
  __shared__ int lane_of[kMaxTopK], terms_here;
  __shared__ float weight_of[kMaxTopK];
  const Plan& p = r.plan;
  const int R = p.ranks, tp = p.shape.tp, G = p.returned_groups;
  if (r.block == r.blocks - 1 && !r.bad) r.entered_by_me();
  const int64_t items = (int64_t)*r.most() * R;
  for (int64_t item = r.block; item < items; item += r.blocks) {
    const int s = item % R, j = item / R;
    const int64_t at = (int64_t)s * p.per_source + j, token = (int64_t)j * tp + s % tp;
    if (threadIdx.x < 32) {
      const bool there = j < r.tokens_of()[s];
      Term term = term_of<kReturns>(r, at);
      if (!there) term.counts = 0;
      if (term.counts >> threadIdx.x & 1) {
        const int i = __popc(term.counts & ((1u << threadIdx.x) - 1));
        row_of[i] = term.row, weight_of[i] = term.weight, lane_of[i] = term.lane;
      }
      if (threadIdx.x == 0) terms_here = __popc(term.counts);
    }
    if (__syncthreads_or(r.bad)) return false;
    const int terms = terms_here, messages = kReturns == MOELAB_RETURN_ROWS ? terms : min(terms, 1);
    const int home = s / tp * tp;  // first rank of the token's group: all of its ranks get the results
    for (int m = 0; m < messages; ++m) {
      const int first = kReturns == MOELAB_RETURN_ROWS ? m : 0, last = kReturns == MOELAB_RETURN_ROWS ? m + 1 : terms;
      const int64_t offset = p.returned + (token * p.lanes + lane_of[m]) * p.returned_bytes;
      for (int i = threadIdx.x; i < G; i += blockDim.x) {
        uint4 u[3];
        if constexpr (kReturns == MOELAB_RETURN_ROWS) {
          const uint4* y = reinterpret_cast<const uint4*>(r.call.y) + (int64_t)row_of[m] * p.y_units;
#pragma unroll
          for (int q = 0; q < 3; ++q) u[q] = q * G + i < p.returned_units ? __ldg(y + q * G + i) : uint4{};
        } else {
          float sum[3][P::kValues] = {};
          for (int k0 = first; k0 < last; k0 += 4) {
            typename P::Raw raw[4][3];
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
              for (int q = 0; q < 3; ++q)
                if (k0 + k < last && q * G + i < p.returned_units)
                  raw[k][q] = __ldg(reinterpret_cast<const typename P::Raw*>(r.call.y) +
                                    (int64_t)row_of[k0 + k] * p.returned_units + q * G + i);
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
              for (int q = 0; q < 3; ++q)
                if (k0 + k < last && q * G + i < p.returned_units) P::add(sum[q], raw[k][q], weight_of[k0 + k]);
          }
#pragma unroll
          for (int q = 0; q < 3; ++q) u[q] = P::pack(sum[q]);
        }
        for (int q = home; q < home + tp; ++q)
          store_group(reinterpret_cast<Line*>(r.slot_of(q) + offset), G, i, u, r.tag());
      }
    }
    __syncthreads();  // the lists are written anew
  }
  return true;
}

template <class Link, class Y, int kReturns>
__device__ bool gather_packets(Rank<Link>& r) {
  using P = Part<Y, kReturns>;
  __shared__ int lane_of[kMaxTopK], rank_of[kMaxTopK], terms_here;
  __shared__ float weight_of[kMaxTopK];
  const Plan& p = r.plan;
  const int n = *r.tokens(), G = p.returned_groups;
  for (int t = r.block; t < (r.sweeps() ? p.shape.max_tokens : n); t += r.blocks) {
    if (threadIdx.x < 32) {
      Coming coming = coming_of<kReturns>(r, t);
      if (t >= n) coming.counts = 0;
      if (coming.counts >> threadIdx.x & 1) {
        const int i = __popc(coming.counts & ((1u << threadIdx.x) - 1));
        lane_of[i] = coming.lane, rank_of[i] = coming.rank, weight_of[i] = coming.weight;
      }
      if (threadIdx.x == 0) terms_here = __popc(coming.counts);
    }
    if (__syncthreads_or(r.bad)) return false;
    const int terms = terms_here;
    Line* parts = r.template at<Line>(r.mine(), p.returned + (int64_t)t * p.lanes * p.returned_bytes);
    for (int i = threadIdx.x; i < (t < n ? G : 0); i += blockDim.x) {
      float sum[3][P::kValues] = {};
#pragma unroll 2
      for (int k = 0; k < terms; ++k) {
        uint4 u[3];
        const Line* part = parts + lane_of[k] * (p.returned_bytes / 16);
        if (!load_group(r, part, G, i, u, kCombineRecv, rank_of[k])) r.bad = true;
#pragma unroll
        for (int q = 0; q < 3; ++q) P::gather(sum[q], u[q], weight_of[k]);
      }
#pragma unroll
      for (int q = 0; q < 3; ++q)
        if (q * G + i < p.returned_units && !r.bad)
          store_out<P::kValues>(r.call.out, r.call.out_dtype,
                                (int64_t)t * p.shape.hidden + (int64_t)(q * G + i) * P::kValues, sum[q]);
    }
    if (r.sweeps())
      for (int lane = 0; lane < p.lanes; ++lane) {
        bool came = false;
        for (int k = 0; k < terms; ++k) came |= lane_of[k] == lane;
        if (!came) sweep(r, parts + lane * (p.returned_bytes / 16), p.returned_bytes / 16);
      }
    if (__syncthreads_or(r.bad)) return false;  // the lists are written anew
  }
  return !__syncthreads_or(r.bad);
}

}  // namespace moelab

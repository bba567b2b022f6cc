// Where a token's rows go on the expert's side, and what is written there.
#pragma once
#include "rank.cuh"

namespace moelab {

// From rows of each (group, local expert) in `first` [dp][L]: where each group's rows of an expert begin, behind those
// of the groups before it, and in first[dp*L + e] where the expert's segment begins in its matrix. A block; one of a
// rank's blocks (`tells`) also writes counts and starts.
static __device__ __noinline__ void find_rows(const Plan& p, const MoelabCall& call, int32_t* first, bool tells) {
  const int L = p.local_experts, dp = p.shape.dp;
  int32_t* total = first + dp * L;
  for (int e = threadIdx.x; e < L; e += blockDim.x) {
    int32_t sum = 0;
    for (int g = 0; g < dp; ++g) {
      const int32_t rows = first[g * L + e];
      first[g * L + e] = sum;
      sum += rows;
    }
    if (tells) call.counts[e] = sum;
    total[e] = p.shape.layout == MOELAB_CONTIGUOUS_128 ? sum : 0;
  }
  __syncthreads();
  if (p.shape.layout != MOELAB_CONTIGUOUS_128) return;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int32_t start = 0;
    for (int e0 = 0; e0 < L; e0 += 32) {
      const int e = e0 + lane;
      const int32_t padded = e < L ? (total[e] + 127) / 128 * 128 : 0;
      int32_t up_to = padded;
      for (int d = 1; d < 32; d *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, up_to, d);
        if (lane >= d) up_to += other;
      }
      if (e < L) {
        if (tells) call.starts[e] = start + up_to - padded;
        total[e] = start + up_to - padded;
      }
      start += __shfl_sync(0xffffffffu, up_to, 31);
    }
  }
  __syncthreads();
}

// Where a lane's expert wants the token, if it is one of ours.
struct Place {
  bool here;
  int32_t flat;      // row of all matrices, -1 where not here
  uint4* values;
  uint32_t* scales;  // its first word; the next is a column further
};

// found: `first` is what find_rows made of the counts, and not the counts themselves, which are enough for the padded
// layout.
template <class Link>
__device__ Place locate(const Rank<Link>& r, const int32_t* first, bool found, int from, const Entry& entry) {
  const Plan& p = r.plan;
  Place a{entry.where < kForeign, -1, nullptr, nullptr};
  if (a.here) {
    const int e = entry.where >> kPositionBits, group = r.group_of(from), L = p.local_experts;
    int row = entry.where & ((1u << kPositionBits) - 1);
    if (found) row += first[p.shape.dp * L + e] + first[group * L + e];
    else
#pragma unroll 1
      for (int g = 0; g < group; ++g) row += first[g * L + e];
    const int matrix = p.shape.layout == MOELAB_EXPERT_PADDED ? e : 0;
    a.flat = matrix * p.matrix_rows + row;
    a.values = reinterpret_cast<uint4*>(r.call.rows) + (int64_t)a.flat * p.row_units;
    a.scales = static_cast<uint32_t*>(r.call.row_scales) +
               (p.shape.scales == MOELAB_SCALES_ROW ? (int64_t)a.flat * p.scale_words
                                                    : (int64_t)(matrix * p.scale_words) * p.column_rows + row);
  }
  return a;
}

// What the way home of a token of another rank needs.
template <class Link>
__device__ void remember_arrival(const Rank<Link>& r, uint32_t at, const Entry& entry, const Place& place) {
  const int lane = threadIdx.x % 32;
  const int rank = place.here ? r.call.rank : entry.where == kNowhere ? -1 : (int)(entry.where & ~kForeign);
  const unsigned same = __match_any_sync(0xffffffffu, rank);
  const unsigned leaders = __ballot_sync(0xffffffffu, rank >= 0 && __ffs(same) - 1 == lane);
  const unsigned mine = __ballot_sync(0xffffffffu, place.here);
  if (lane < r.plan.shape.top_k) r.arrived(at)[lane] = {(uint32_t)place.flat, entry.weight};
  // Among the token's distinct ranks, in order of k, which are we?
  if (lane == 0) *r.lane(at) = mine ? __popc(leaders & ((1u << (__ffs(mine) - 1)) - 1)) : -1;
}

// A unit of scale words to where it belongs.
__device__ __forceinline__ void write_scales(const Plan& p, uint32_t* scales, int unit, const uint4& v) {
  const int step = p.shape.scales == MOELAB_SCALES_ROW ? 1 : p.column_rows, left = p.scale_words - 4 * unit;
  scales += (int64_t)4 * unit * step;
  scales[0] = v.x;
  if (left > 1) scales[step] = v.y;
  if (left > 2) scales[2 * (int64_t)step] = v.z;
  if (left > 3) scales[3 * (int64_t)step] = v.w;
}

// 16 e4m3 values of 32 bytes of bfloat16, of 128 that eight neighbouring threads hold, and the block's scale: the
// formula of moelab/ops/quantize.py.
__device__ inline uint4 quantize16(const uint4 in[2], bool power_of_two, float& scale) {
  const __nv_bfloat16* v = reinterpret_cast<const __nv_bfloat16*>(in);
  float f[16];
  uint32_t amax = 0;  // as bits: infinity above every number, NaN above it
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    f[i] = __bfloat162float(v[i]);
    amax = max(amax, __float_as_uint(f[i]) & 0x7fffffffu);
  }
  for (int d = 4; d; d /= 2) amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, d));
  uint32_t bits = __float_as_uint(__fdiv_rn(fmaxf(__uint_as_float(amax), 1e-4f), 448.f));
  if (power_of_two) bits = ((bits >> 23) + ((bits & 0x7fffffu) != 0)) << 23;
  if (amax >= 0x7f800000u) bits = 0x7fc00000u;
  scale = __uint_as_float(bits);
  const float inverse = __fdiv_rn(1.f, scale);
  uint4 result;
  uint16_t* packed = reinterpret_cast<uint16_t*>(&result);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    packed[i] = __nv_cvt_float2_to_fp8x2(
        make_float2(__fmul_rn(f[2 * i], inverse), __fmul_rn(f[2 * i + 1], inverse)), __NV_SATFINITE, __NV_E4M3);
  return result;
}

// A unit of scale words, from float32 scales of which there are `count`, `stride` apart; what lies beyond the last is
// zero.
__device__ __forceinline__ uint4 scale_unit(const Plan& p, const float* scales, int64_t stride, int unit, int count) {
  const bool packed = p.shape.scales == MOELAB_SCALES_UE8M0;
  uint32_t words[4] = {};
#pragma unroll 1
  for (int i = 0; i < (packed ? 4 : 1); ++i)  // packed: the i-th byte of each word
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int s = packed ? 4 * (4 * unit + b) + i : 4 * unit + b;
      if (s >= count) continue;
      const uint32_t bits = __float_as_uint(scales[s * stride]);
      words[b] |= packed ? (bits >> 23 & 255u) << 8 * i : bits;
    }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace moelab

// Where a token's rows go on the expert's side, and what is written there.
#pragma once
#include "rank.cuh"

namespace moelab {

// From rows of each (group, local expert) in `first` [dp][L]: where each group's rows of an expert begin, behind those
// of the groups before it, and in first[dp*L + e] where the expert's segment begins in its matrix. A block; one of a
// rank's blocks (`tells`) also writes counts and starts.
template <class Link>
__device__ void find_rows(const Rank<Link>& r, int32_t* first, bool tells) {
  const Plan& p = r.plan;
  const int L = p.local_experts, dp = p.shape.dp;
  int32_t* total = first + dp * L;
  for (int e = threadIdx.x; e < L; e += blockDim.x) {
    int32_t sum = 0;
    for (int g = 0; g < dp; ++g) {
      const int32_t rows = first[g * L + e];
      first[g * L + e] = sum;
      sum += rows;
    }
    if (tells) r.call.counts[e] = sum;
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
        if (tells) r.call.starts[e] = start + up_to - padded;
        total[e] = start + up_to - padded;
      }
      start += __shfl_sync(0xffffffffu, up_to, 31);
    }
  }
  __syncthreads();
}

// A token's rows here, as the lanes of a warp see them.
struct Arrival {
  unsigned rows;   // lanes that lead a row: an expert named twice is one row
  int32_t matrix;  // of this lane's expert, 0 when contiguous
  int32_t row;
  bool here;
};

// One warp: lane k's entry of token j of rank `from`. Keeps what the way home needs in the state.
template <class Link>
__device__ Arrival arrive(const Rank<Link>& r, const int32_t* first, int from, int64_t at, Entry entry) {
  const Plan& p = r.plan;
  const int lane = threadIdx.x % 32, L = p.local_experts, K = p.shape.top_k;
  Arrival a{0, 0, 0, entry.where < kForeign};
  const int rank = a.here ? r.call.rank : entry.where == kNowhere ? -1 : (int)(entry.where & ~kForeign);
  const unsigned same_rank = __match_any_sync(0xffffffffu, rank);
  const unsigned leaders = __ballot_sync(0xffffffffu, rank >= 0 && __ffs(same_rank) - 1 == lane);
  const unsigned same_row = __match_any_sync(0xffffffffu, entry.where);
  a.rows = __ballot_sync(0xffffffffu, a.here && __ffs(same_row) - 1 == lane);
  const unsigned mine = __ballot_sync(0xffffffffu, a.here);
  int32_t flat = -1;
  if (a.here) {
    const int e = entry.where >> kPositionBits;
    a.row = first[p.shape.dp * L + e] + first[from / p.shape.tp * L + e] +
            (int32_t)(entry.where & ((1u << kPositionBits) - 1));
    if (p.shape.layout == MOELAB_EXPERT_PADDED) a.matrix = e;
    flat = a.matrix * p.matrix_rows + a.row;
  }
  if (lane < K) r.arrived(at)[lane] = {(uint32_t)flat, entry.weight};
  // Among the token's distinct ranks, in order of k, which are we?
  if (lane == 0) *r.lane(at) = mine ? __popc(leaders & ((1u << (__ffs(mine) - 1)) - 1)) : -1;
  return a;
}

// Four float32 scales 4*i … 4*i + 3 of a row, in the format asked for.
template <class Link>
__device__ void write_scales(const Rank<Link>& r, int64_t matrix, int64_t row, int i, const uint4& raw) {
  const Plan& p = r.plan;
  const uint32_t bits[4] = {raw.x, raw.y, raw.z, raw.w};
  const int S = p.scales_per_row;
  if (p.shape.scales == MOELAB_SCALES_UE8M0) {
    uint32_t packed = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b)
      if (4 * i + b < S) packed |= (bits[b] >> 23 & 255u) << 8 * b;
    static_cast<uint32_t*>(r.call.row_scales)[(matrix * p.scale_columns + i) * p.column_rows + row] = packed;
    return;
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const int s = 4 * i + b;
    if (s >= S) break;
    const int64_t at = p.shape.scales == MOELAB_SCALES_ROW ? (matrix * p.matrix_rows + row) * S + s
                                                           : (matrix * p.scale_columns + s) * p.column_rows + row;
    static_cast<uint32_t*>(r.call.row_scales)[at] = bits[b];
  }
}

// A unit of a row's image, once to every one of its rows.
template <class Link>
__device__ __forceinline__ void write_unit(const Rank<Link>& r, int64_t matrix, int64_t row, int unit,
                                           const uint4& value) {
  if (unit < r.plan.row_units)
    reinterpret_cast<uint4*>(r.call.rows)[(matrix * r.plan.matrix_rows + row) * r.plan.row_units + unit] = value;
  else write_scales(r, matrix, row, unit - r.plan.row_units, value);
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

// Four scales of a caller's token, those beyond the last as zeros.
__device__ __forceinline__ uint4 load_scales(const float* scales, int i, int S) {
  uint32_t bits[4] = {};
#pragma unroll
  for (int b = 0; b < 4; ++b)
    if (4 * i + b < S) bits[b] = __float_as_uint(scales[4 * i + b]);
  return {bits[0], bits[1], bits[2], bits[3]};
}

}  // namespace moelab

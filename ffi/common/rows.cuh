// Rows of activations as warps hold them: lane i has columns 2i and 2i + 1 of a block of at most 64, lanes beyond the
// block hold zeros; and 16 rows of 16 columns as an MMA leaves them.
//
// Bits: sums of squares in the order of cpu/phases.h SumOfSquares; a block is a leaf.
#pragma once

#include "common/math.h"
#include "common/ptx.cuh"

namespace musejax {

inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

struct Two {
  float a, b;
};

__device__ __forceinline__ uint32_t PackBf16(float a, float b) { return ptx::CvtRnBf16x2(a, b); }
__device__ __forceinline__ Two Unpack(uint32_t r) { return {FromBf16(uint16_t(r)), FromBf16(uint16_t(r >> 16))}; }
__device__ __forceinline__ Two Rounded(Two v) { return Unpack(PackBf16(v.a, v.b)); }

// The sum over a block's columns, in all lanes: 16-column trees (8, 4, 2, 1), ascending from +0.
template <int kWidth>
__device__ __forceinline__ float LeafSum(Two v) {
#pragma unroll
  for (int x = 4; x; x /= 2) {
    v.a = v.a + __shfl_xor_sync(kAllLanes, v.a, x);
    v.b = v.b + __shfl_xor_sync(kAllLanes, v.b, x);
  }
  const float tree = v.a + v.b;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth / 16; ++i) sum = sum + __shfl_sync(kAllLanes, tree, 8 * i);
  return sum;
}
template <int kWidth>
__device__ __forceinline__ float LeafSquares(Two v) {
  return LeafSum<kWidth>({v.a * v.a, v.b * v.b});
}

// 1 / sqrt(mean + eps), as cpu/norm.cc RmsNorm.
__device__ __forceinline__ float Rstd(float sum, int width, float eps) {
  return 1.0f / sqrtf(sum / float(width) + eps);
}

// ---- sums of MMAs ----

inline constexpr int kPartialStride = 20;  // floats between rows of a partial: stores of fragments meet no bank twice
inline constexpr int kPartialFloats = 16 * kPartialStride;

// Sums of a range as an MMA leaves them -> partial [row][column].
__device__ __forceinline__ void StoreSums(float* partial, const float (&d)[2][4], int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[(n * 8 + 2 * t + i % 2) * kPartialStride + g + i / 2 * 8] = d[n][i];
}

}  // namespace musejax

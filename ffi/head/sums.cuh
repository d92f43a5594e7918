// The sums of cpu/norm.cc made by a block of whole warps, in the same order: leaves of 64 columns, in a leaf trees of
// 16 columns (8, 4, 2, 1); trees, leaves and slices ascending from +0. A missing column or tree adds +0, which changes
// no bit of a sum that began with +0.
#pragma once

#include "common/layout.h"

namespace musejax::head {

inline constexpr int kMaxLeaves = 1024;  // of which the sums lie in shared memory at once

struct LeafSums {
  float leaf[kMaxLeaves];
  float slice[kSlices];
  float total;
};

// leaf[i] = the sum of the columns of leaf i, for i < count. leaf_at(i): its first column and the end of its columns,
// at most kLeaf. A warp takes several leaves at a time, so that their loads are on their way together.
template <typename LeafAt, typename Value>
__device__ __forceinline__ void SumLeaves(float* leaf, int count, const LeafAt& leaf_at, const Value& value) {
  constexpr int kBatch = 4;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int first = threadIdx.x / 32; first < count; first += kBatch * warps) {
    float v[kBatch][2];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const longlong2 columns = leaf_at(first + b * warps);
        const int64_t column = columns.x + 32 * half + lane;
        v[b][half] = first + b * warps < count && column < columns.y ? value(column) : 0.0f;
      }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int apart = 8; apart; apart /= 2)
#pragma unroll
        for (float& x : v[b]) x = x + __shfl_xor_sync(~0u, x, apart);
      float sum = 0.0f;
#pragma unroll
      for (int tree = 0; tree < 4; ++tree) sum = sum + __shfl_sync(~0u, v[b][tree / 2], tree % 2 * 16);
      if (lane == 0 && first + b * warps < count) leaf[first + b * warps] = sum;
    }
  }
}

// TreeSum of value(0) .. value(width - 1), in all threads. All threads call it.
template <typename Value>
__device__ float BlockTreeSum(LeafSums& shared, int64_t width, const Value& value) {
  const int64_t leaves = Padded(width, kLeaf) / kLeaf;
  float total = 0.0f;  // thread 0
  for (int64_t first = 0; first < leaves; first += kMaxLeaves) {
    const int count = int(leaves - first < kMaxLeaves ? leaves - first : kMaxLeaves);
    __syncthreads();
    const auto leaf_at = [&](int i) {
      const int64_t begin = (first + i) * kLeaf;
      return longlong2{begin, begin + kLeaf < width ? begin + kLeaf : width};
    };
    SumLeaves(shared.leaf, count, leaf_at, value);
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < count; ++i) total = total + shared.leaf[i];
  }
  if (threadIdx.x == 0) shared.total = total;
  __syncthreads();
  return shared.total;
}

// SumOfSquares of value(0) .. value(width - 1), of kSlices slices, in all threads. All threads call it. At most
// kMaxLeaves leaves, which any width that bindings/model.h lets pass has.
template <typename Value>
__device__ float BlockSumOfSquares(LeafSums& shared, int64_t width, const Value& value) {
  const int64_t slice = width / kSlices;
  const int leaves = int(Padded(slice, kLeaf) / kLeaf);
  const auto leaf_at = [&](int i) {
    const int64_t end = (i / leaves + 1) * slice, begin = end - slice + i % leaves * kLeaf;
    return longlong2{begin, begin + kLeaf < end ? begin + kLeaf : end};
  };
  __syncthreads();
  SumLeaves(shared.leaf, int(kSlices) * leaves, leaf_at, [&](int64_t column) {
    const float x = value(column);
    return x * x;
  });
  __syncthreads();
  if (threadIdx.x < kSlices) {
    float sum = 0.0f;
    for (int i = 0; i < leaves; ++i) sum = sum + shared.leaf[threadIdx.x * leaves + i];
    shared.slice[threadIdx.x] = sum;
  }
  __syncthreads();
  float total = 0.0f;
  for (int s = 0; s < kSlices; ++s) total = total + shared.slice[s];
  return total;
}

// 1 / rms, as RmsNorm of cpu/norm.cc.
__device__ __forceinline__ float ReciprocalRms(float sum_of_squares, int64_t width, float eps) {
  return 1.0f / sqrtf(sum_of_squares / float(width) + eps);
}

}  // namespace musejax::head

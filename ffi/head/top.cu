// The largest logits of each (slice, row): one block each. Every thread keeps the best of its columns; a round takes
// the best of all threads, and only the thread that had it looks for its next one.
//
// Order: larger values first, a NaN as -infinity, equal values by lower id. So the answer does not depend on who holds
// which column.
#include <cstdint>

#include "head/head.h"

namespace musejax::head {
namespace {

constexpr int kThreads = 1024;
constexpr int32_t kNoColumn = INT32_MAX;

struct Candidate {
  float value;
  int32_t column;
};

__device__ __forceinline__ float MinusInfinity() { return __int_as_float(int(0xFF800000u)); }
__device__ __forceinline__ Candidate None() { return {MinusInfinity(), kNoColumn}; }

__device__ __forceinline__ bool Before(Candidate a, Candidate b) {
  return a.value > b.value || (a.value == b.value && a.column < b.column);
}

// The best of this thread's columns that come after `last`.
__device__ __forceinline__ Candidate NextOfThread(const float* __restrict__ x, int32_t columns, Candidate last) {
  Candidate best = None();
#pragma unroll 8
  for (int32_t i = int32_t(threadIdx.x); i < columns; i += kThreads) {
    const float v = x[i];
    const Candidate c = {v == v ? v : MinusInfinity(), i};
    if (Before(last, c) && Before(c, best)) best = c;
  }
  return best;
}

__device__ __forceinline__ Candidate BestOfWarp(Candidate c) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2) {
    const Candidate other = {__shfl_xor_sync(~0u, c.value, apart), __shfl_xor_sync(~0u, c.column, apart)};
    if (Before(other, c)) c = other;
  }
  return c;
}

// In all threads.
__device__ __forceinline__ Candidate BestOfBlock(Candidate c) {
  __shared__ Candidate warps[kThreads / 32];
  c = BestOfWarp(c);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = c;
  __syncthreads();
  c = BestOfWarp(warps[threadIdx.x % 32]);
  __syncthreads();
  return c;
}

__global__ void __launch_bounds__(kThreads)
    HeadTopKernel(const float* __restrict__ raw, const int32_t* begin, int64_t n, int64_t count, int64_t num_tokens,
                  int64_t vocab, int64_t top, float* values, int32_t* ids) {
  static_assert(kThreads == 32 * 32, "BestOfBlock: a warp reads what each warp found");
  const int64_t task = blockIdx.x, first = (*begin + task / count) * n, left = num_tokens - first;
  const int32_t columns = int32_t(left < 0 ? 0 : left < n ? left : n);
  const float* x = raw + task * n;
  Candidate mine = NextOfThread(x, columns, {-MinusInfinity(), -1});
  for (int64_t rank = 0; rank < top; ++rank) {
    const Candidate best = BestOfBlock(mine);
    if (threadIdx.x == 0) {
      values[task * top + rank] = best.value;
      ids[task * top + rank] = int32_t(best.column == kNoColumn ? vocab : first + best.column);
    }
    if (best.column == mine.column && best.column != kNoColumn) mine = NextOfThread(x, columns, best);
  }
}

}  // namespace

cudaError_t HeadTop(cudaStream_t stream, const Model& m, const float* raw, const int32_t* begin, int64_t slices,
                    int64_t count, int64_t num_tokens, int64_t top, float* values, int32_t* ids) {
  const int64_t tasks = slices * count;
  if (tasks)
    HeadTopKernel<<<unsigned(tasks), kThreads, 0, stream>>>(raw, begin, m.vocab / kSlices, count, num_tokens, m.vocab,
                                                            top, values, ids);
  return cudaGetLastError();
}

}  // namespace musejax::head

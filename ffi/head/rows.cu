// Kernels of a few rows and no weights: one block a row, or one thread a value.
#include "common/math.h"
#include "head/head.h"
#include "head/sums.cuh"

namespace musejax::head {
namespace {

constexpr int kThreads = 256, kRowThreads = 1024;

// Blocks of kThreads for n values, enough to fill a GPU; loops take the rest.
int BlocksFor(int64_t n) {
  const int64_t blocks = Padded(n, kThreads) / kThreads;
  return int(blocks < 4096 ? blocks : 4096);
}

// Runs body(i) for i < n, over the whole grid.
template <typename Body>
__device__ __forceinline__ void ForEach(int64_t n, const Body& body) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) body(i);
}

__device__ __forceinline__ float SoftcapOf(const Model& m, float raw) {
  return m.softcap * Tanh(raw * m.output_multiplier / m.softcap);
}

__global__ void AnglesKernel(const int32_t* positions, const float* inv_freq, int64_t n, int64_t rows, int64_t half,
                             float* cos_sin) {
  ForEach(n, [&](int64_t i) {
    const int64_t j = i % half, row = i / half;  // of all thetas
    float* out = cos_sin + row * 2 * half + j;
    CosSin(float(positions[row % rows]) * inv_freq[row / rows * half + j], out, out + half);
  });
}

__global__ void __launch_bounds__(kRowThreads) EmbedNormKernel(const Model m, const bf16* rows, float* stream) {
  __shared__ LeafSums shared;
  const int64_t row = blockIdx.x, count = gridDim.x, width = m.shape.hidden, slice = m.shape.hidden_slice();
  const auto value = [&](int64_t i) { return FromBf16(rows[(i / slice * count + row) * slice + i % slice]); };
  const float scale = ReciprocalRms(BlockSumOfSquares(shared, width, value), width, m.rms_eps);
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) stream[row * width + i] = RoundBf16(value(i) * scale);
}

__global__ void __launch_bounds__(kRowThreads)
    HeadSumsKernel(const Model m, const float* __restrict__ raw, const float* largest, const int32_t* begin,
                   int64_t count, int64_t num_tokens, float* sums) {
  __shared__ LeafSums shared;
  const int64_t task = blockIdx.x, n = m.vocab / kSlices, first = (*begin + task / count) * n;
  const float top = SoftcapOf(m, largest[task % count]);
  const float sum = BlockTreeSum(
      shared, n, [&](int64_t i) { return first + i < num_tokens ? Exp(SoftcapOf(m, raw[task * n + i]) - top) : 0.0f; });
  if (threadIdx.x == 0) sums[task] = sum;
}

__global__ void LogProbabilityKernel(const Model m, const float* raw, const float* largest, const float* sums,
                                     int64_t count, float* logprobs) {
  ForEach(count, [&](int64_t row) {
    float total = 0.0f;
    for (int64_t s = 0; s < kSlices; ++s) total = total + sums[s * count + row];
    logprobs[row] = SoftcapOf(m, raw[row]) - SoftcapOf(m, largest[row]) - Log(total);
  });
}

__global__ void SoftcapKernel(const Model m, const float* raw, int64_t n, float* logits) {
  ForEach(n, [&](int64_t i) { logits[i] = SoftcapOf(m, raw[i]); });
}

}  // namespace

cudaError_t Angles(cudaStream_t stream, const int32_t* positions, const float* inv_freq, int64_t thetas, int64_t rows,
                   int64_t half, float* cos_sin) {
  const int64_t n = thetas * rows * half;
  if (n) AnglesKernel<<<BlocksFor(n), kThreads, 0, stream>>>(positions, inv_freq, n, rows, half, cos_sin);
  return cudaGetLastError();
}

cudaError_t EmbedNorm(cudaStream_t stream, const Model& m, const bf16* rows, int64_t count, float* out) {
  if (count) EmbedNormKernel<<<unsigned(count), kRowThreads, 0, stream>>>(m, rows, out);
  return cudaGetLastError();
}

cudaError_t HeadSums(cudaStream_t stream, const Model& m, const float* raw, const float* largest, const int32_t* begin,
                     int64_t slices, int64_t count, int64_t num_tokens, float* sums) {
  const int64_t tasks = slices * count;
  if (tasks)
    HeadSumsKernel<<<unsigned(tasks), kRowThreads, 0, stream>>>(m, raw, largest, begin, count, num_tokens, sums);
  return cudaGetLastError();
}

cudaError_t LogProbability(cudaStream_t stream, const Model& m, const float* raw, const float* largest,
                           const float* sums, int64_t count, float* logprobs) {
  if (count) LogProbabilityKernel<<<BlocksFor(count), kThreads, 0, stream>>>(m, raw, largest, sums, count, logprobs);
  return cudaGetLastError();
}

cudaError_t Softcap(cudaStream_t stream, const Model& m, const float* raw, int64_t n, float* logits) {
  if (n) SoftcapKernel<<<BlocksFor(n), kThreads, 0, stream>>>(m, raw, n, logits);
  return cudaGetLastError();
}

}  // namespace musejax::head

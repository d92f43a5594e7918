// NVFP4 activations in registers: cpu/quantize.cc, operation by operation. Rows go to the grid of E2M1 values times
// E4M3 block scales; grid values have at most 6 significant bits, so bf16 holds them.
#pragma once

#include "common/nvfp4.h"
#include "layer/rows.cuh"

namespace musejax::layer {

// A block of 16 values, N of them in each of 16 / N neighbouring lanes -> their grid values. By whole warps.
template <int N>
__device__ __forceinline__ void QuantizeBlock(float (&x)[N], float encode) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) most = LargerAbs(most, x[i]);
#pragma unroll
  for (int lanes = 1; lanes < kBlock / N; lanes *= 2) most = LargerAbs(most, __shfl_xor_sync(kAllLanes, most, lanes));
  const float scale = RoundE4m3(encode * (most * kSixth));
  const float step = scale * (1.0f / encode);
  const float inverse = scale > 0.0f ? 1.0f / step : 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = RoundE2m1(x[i] * inverse) * scale;
}

// The largest magnitude that any lane has. In all lanes.
__device__ __forceinline__ float LargestOfLanes(float most) {
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) most = LargerAbs(most, __shfl_xor_sync(kAllLanes, most, lanes));
  return most;
}

// The largest of n input scales: static activations have one number a layer, as engines do. In all lanes.
inline __device__ __noinline__ float LargestScale(const float* scales, int n) {
  float most = __ldg(scales);
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < n; i += 32) {
    const float x = __ldg(scales + i);
    most = x > most ? x : most;
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const float x = __shfl_xor_sync(kAllLanes, most, lanes);
    most = x > most ? x : most;
  }
  return most;
}

// Whether the experts of the layer at hand take activations in this form.
template <typename S>
__device__ __forceinline__ bool Takes(const Context<S>& c, Activations form) {
  return c.arrays().nvfp4 && c.pass().model.activations == form;
}

}  // namespace musejax::layer

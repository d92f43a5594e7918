// NVFP4 activations in registers: cpu/quantize.cc, operation by operation. Rows go to the grid of E2M1 values times
// E4M3 block scales; grid values have at most 6 significant bits, so bf16 holds them.
#pragma once

#include "layer/rows.cuh"

namespace musejax::layer {

inline constexpr float kSixth = float(1.0 / 6.0), kGridRange = float(1.0 / (6.0 * 448.0));
inline constexpr float kTiny = 0x1p-100f;  // rows below it count as zeros: their scales could be subnormal numbers

// The larger of `most` and |x|; NaN if either is, so the order of a chain of these does not matter.
MUSEJAX_FN float LargerAbs(float most, float x) {
  const float a = fabsf(x);
  return a > most || a != a ? a : most;
}

// Nearest E4M3 value of x >= 0, ties to even, at most 448.
MUSEJAX_FN float RoundE4m3(float x) {
  if (x > 448.0f) x = 448.0f;
  if (x < 0.015625f) {  // below 2^-6: multiples of 2^-9
    const float magic = 12582912.0f;
    return ((x * 512.0f + magic) - magic) * (1.0f / 512);
  }
  const uint32_t u = Bits(x);
  return x == x ? Bits((u + 0x7FFFF + (u >> 20 & 1)) & 0xFFF00000u) : x;
}

// Nearest E2M1 value, ties to the even code, at most 6.
MUSEJAX_FN float RoundE2m1(float x) {
  const float a = fabsf(x);
  const float v = a > 5.0f     ? 6.0f
                  : a >= 3.5f  ? 4.0f
                  : a > 2.5f   ? 3.0f
                  : a >= 1.75f ? 2.0f
                  : a > 1.25f  ? 1.5f
                  : a >= 0.75f ? 1.0f
                  : a > 0.25f  ? 0.5f
                               : 0.0f;
  return copysignf(v, x);
}

// Decode and encode scale of a row of per-token activations from its largest magnitude; a dead row's values become 0.
struct RowScale {
  float decode, encode;
  bool dead;
};
MUSEJAX_FN RowScale PerTokenScale(float most) {
  const bool dead = most < kTiny;
  const float decode = dead ? 0.0f : most * kGridRange;
  return {decode, 1.0f / (dead ? 1.0f : decode), dead};
}

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

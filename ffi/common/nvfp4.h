// NVFP4 activations, for host and device: the grid of E2M1 values times E4M3 block scales, and the scale of a row. No
// libm; IEEE operations in one order, so bits do not depend on the compiler.
#pragma once

#include <cmath>

#include "common/math.h"

namespace musejax {

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

}  // namespace musejax

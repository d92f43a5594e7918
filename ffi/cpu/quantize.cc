#include "cpu/quantize.h"

#include <cmath>

#include "common/layout.h"
#include "common/math.h"

namespace musejax {
namespace {

constexpr float kSixth = float(1.0 / 6.0), kRange = float(1.0 / (6.0 * 448.0));
constexpr float kTiny = 0x1p-100f;  // rows below it count as zeros: their scales could be subnormal numbers

float MaxAbs(const float* x, int64_t n) {  // NaN if any is
  float most = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float a = fabsf(x[i]);
    most = a > most || a != a ? a : most;
  }
  return most;
}

// Nearest E4M3 value of x >= 0, ties to even, at most 448.
float RoundE4m3(float x) {
  if (x > 448.0f) x = 448.0f;
  if (x < 0.015625f) {  // below 2^-6: multiples of 2^-9
    const float magic = 12582912.0f;
    return ((x * 512.0f + magic) - magic) * (1.0f / 512);
  }
  const uint32_t u = Bits(x);
  return x == x ? Bits((u + 0x7FFFF + (u >> 20 & 1)) & 0xFFF00000u) : x;
}

// Nearest E2M1 value, ties to the even code, at most 6.
float RoundE2m1(float x) {
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

}  // namespace

void QuantizeBlocks(const float* x, int64_t n, float encode, float* grid) {
  for (int64_t first = 0; first < n; first += kBlock) {
    const float scale = RoundE4m3(encode * (MaxAbs(x + first, kBlock) * kSixth));
    const float step = scale * (1.0f / encode);
    const float inverse = scale > 0.0f ? 1.0f / step : 0.0f;
    for (int64_t i = first; i < first + kBlock; ++i) grid[i] = RoundE2m1(x[i] * inverse) * scale;
  }
}

RowScale PerTokenScale(const float* x, int64_t n) {
  const float most = MaxAbs(x, n);
  const bool dead = most < kTiny;
  const float decode = dead ? 0.0f : most * kRange;
  return {decode, 1.0f / (dead ? 1.0f : decode), dead};
}

}  // namespace musejax

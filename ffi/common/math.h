// exp, sigmoid, silu, tanh, log, sine and cosine, rounding to bf16: the only ones on the bitwise path, for host and
// device, scalar and vector, with the same operations in the same order everywhere. No libm; IEEE add, multiply, fmaf,
// divide and square root only, so bits do not depend on compiler, width or threads. NaN stays NaN.
//
// Exp, Sigmoid and Silu are templates: V is float or a vector type that has the primitives of the first section
// (cpu/simd.h). tests/test_math.py states their errors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace musejax {

// ---- primitives for float ----
MUSEJAX_FN float Bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
MUSEJAX_FN uint32_t Bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
MUSEJAX_FN float Set(float, float x) { return x; }
MUSEJAX_FN float Add(float a, float b) { return a + b; }
MUSEJAX_FN float Sub(float a, float b) { return a - b; }
MUSEJAX_FN float Mul(float a, float b) { return a * b; }
MUSEJAX_FN float Div(float a, float b) { return a / b; }
MUSEJAX_FN float Fma(float a, float b, float c) { return fmaf(a, b, c); }
MUSEJAX_FN float Clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
MUSEJAX_FN float ZeroBelow(float x, float bound, float value) { return x < bound ? 0.0f : value; }
// n integral, -126 to 127. Adding 1.5 * 2^23 leaves n in the low bits of the sum.
MUSEJAX_FN float PowerOfTwo(float n) { return Bits((Bits(n + 12582912.0f) << 23) + 0x3F800000u); }

// ---- bf16 ----
MUSEJAX_FN float FromBf16(uint16_t h) { return Bits(uint32_t(h) << 16); }
// Nearest, ties to even; NaN stays NaN.
MUSEJAX_FN uint16_t ToBf16(float f) {
  const uint32_t u = Bits(f);
  if ((u & 0x7FFFFFFF) > 0x7F800000) return uint16_t(u >> 16 | 0x40);
  return uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
MUSEJAX_FN float RoundBf16(float f) { return FromBf16(ToBf16(f)); }

// ---- functions ----
// e^x: 0 below -87.3, the largest finite power at 88.3 and above.
template <typename V>
MUSEJAX_FN V Exp(V x) {
  const auto c = [&](float value) { return Set(x, value); };
  const V y = Clamp(x, -87.3f, 88.3f);
  const V magic = c(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V n = Sub(Add(Mul(y, c(1.44269504f)), magic), magic);
  const V r = Fma(n, c(1.90465421e-9f), Fma(n, c(-0.693147182f), y));  // y - n ln 2, in two parts
  V p = c(1.0f / 5040);
  p = Fma(p, r, c(1.0f / 720));
  p = Fma(p, r, c(1.0f / 120));
  p = Fma(p, r, c(1.0f / 24));
  p = Fma(p, r, c(1.0f / 6));
  p = Fma(p, r, c(0.5f));
  p = Fma(p, Mul(r, r), r);
  return ZeroBelow(x, -87.3f, Mul(Add(p, c(1.0f)), PowerOfTwo(n)));
}

// 0 below -88.3, where Exp has no larger powers to give: else Silu would not tend to 0.
template <typename V>
MUSEJAX_FN V Sigmoid(V x) {
  const V one = Set(x, 1.0f);
  return ZeroBelow(x, -88.3f, Div(one, Add(one, Exp(Sub(Set(x, 0.0f), x)))));
}

template <typename V>
MUSEJAX_FN V Silu(V x) {
  return Mul(x, Sigmoid(x));
}

MUSEJAX_FN float Tanh(float x) {
  const float a = fabsf(x);
  float t;
  if (a < 0.5f) {  // odd Taylor series
    const float z = a * a;
    float p = -929569.0f / 638512875.0f;
    p = fmaf(p, z, 21844.0f / 6081075.0f);
    p = fmaf(p, z, -1382.0f / 155925.0f);
    p = fmaf(p, z, 62.0f / 2835.0f);
    p = fmaf(p, z, -17.0f / 315.0f);
    p = fmaf(p, z, 2.0f / 15.0f);
    p = fmaf(p, z, -1.0f / 3.0f);
    t = fmaf(p * z, a, a);
  } else {
    t = 1.0f - 2.0f / (Exp(2.0f * a) + 1.0f);
  }
  return copysignf(t, x);
}

// Natural logarithm of a normal number; NaN for others but 0 and infinity, which are not asked for.
MUSEJAX_FN float Log(float x) {
  if (!(x > 0.0f) || Bits(x) >= 0x7F800000) return Bits(0x7FC00000u);
  const uint32_t u = Bits(x) + (0x3F800000 - 0x3F3504F3);  // mantissa into [sqrt 1/2, sqrt 2)
  const float e = float(int32_t(u >> 23) - 127);
  const float m = Bits((u & 0x7FFFFF) + 0x3F3504F3);
  const float s = (m - 1.0f) / (m + 1.0f), z = s * s;
  float p = 2.0f / 9;
  p = fmaf(p, z, 2.0f / 7);
  p = fmaf(p, z, 2.0f / 5);
  p = fmaf(p, z, 2.0f / 3);
  return fmaf(e, 0.693147182f, fmaf(e, -1.90465421e-9f, fmaf(p * z, s, 2.0f * s)));
}

// Cosine and sine of position * inv_freq, the product rounded to float32 as in the model, the rest in double.
MUSEJAX_FN void CosSin(float angle, float* cosine, float* sine) {
  const double x = angle;
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const double n = (x * 0.63661977236758134 + magic) - magic;
  const double r = fma(-n, 6.123233995736766e-17, fma(-n, 1.5707963267948966, x)), z = r * r;
  double s = -1.0 / 39916800, c = 1.0 / 479001600;  // Taylor series, |r| <= pi / 4
  s = fma(s, z, 1.0 / 362880);
  s = fma(s, z, -1.0 / 5040);
  s = fma(s, z, 1.0 / 120);
  s = fma(s, z, -1.0 / 6);
  s = fma(s * z, r, r);
  c = fma(c, z, -1.0 / 3628800);
  c = fma(c, z, 1.0 / 40320);
  c = fma(c, z, -1.0 / 720);
  c = fma(c, z, 1.0 / 24);
  c = fma(c, z, -0.5);
  c = fma(c, z, 1.0);
  const int quadrant = int(int64_t(n) & 3);
  const double even = quadrant & 1 ? s : c, odd = quadrant & 1 ? c : s;
  *cosine = float(quadrant == 1 || quadrant == 2 ? -even : even);
  *sine = float(quadrant >= 2 ? -odd : odd);
}

}  // namespace musejax

// Sixteen floats: the primitives of common/math.h, and what the kernels need besides, three times: AVX-512, AVX2 and
// plain C++. Included by kernels_*.cc only, each compiled for one instruction set and in a namespace of its own, so
// that the linker cannot mix them. All three give the same bits: lane by lane the same IEEE operations.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/math.h"

#if defined(__AVX512F__)
#define MUSEJAX_ISA avx512
#include <immintrin.h>
#elif defined(__AVX2__)
#define MUSEJAX_ISA avx2
#include <immintrin.h>
#else
#define MUSEJAX_ISA scalar
#endif

namespace musejax::MUSEJAX_ISA {

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};
inline F16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void Store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 Set(F16, float x) { return {_mm512_set1_ps(x)}; }
inline F16 Add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 Sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 Mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 Div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 Fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// min and max return their second operand if one is NaN.
inline F16 Clamp(F16 x, float low, float high) {
  return {_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), x.v))};
}
inline F16 ZeroBelow(F16 x, float bound, F16 value) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_NLT_UQ), value.v)};
}
inline F16 PowerOfTwo(F16 n) {
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvttps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
inline F16 RoundBf16(F16 a) {
  const __m512i u = _mm512_castps_si512(a.v), one = _mm512_set1_epi32(1), top = _mm512_set1_epi32(int(0xFFFF0000u));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
  const __m512i near = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_mask_mov_epi32(near, nan, quiet), top))};
}
// 16 consecutive bf16; and the even or the odd ones of 32.
inline F16 LoadBf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
inline void LoadPairs(const uint8_t* p, F16* even, F16* odd) {
  const __m512i w = _mm512_loadu_si512(p);
  even->v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  odd->v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(int(0xFFFF0000u))));
}
// Four floats, four times.
inline F16 Repeat4(const float* p) { return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))}; }

// The codes of 16 words: value[2r + h] is register r, half h.
inline void UnpackCodes(const uint8_t* p, F16* value) {
  const __m512i w = _mm512_loadu_si512(p), sign = _mm512_set1_epi32(int(0x80000000u));
  const __m512i mask = _mm512_set1_epi32(int(0x81C081C0u));
  const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, .5f, 1, 1.5f, 2, 3, 4, 6);
  const __m512i x[4] = {_mm512_and_si512(w, mask),
                        _mm512_ternarylogic_epi32(w, _mm512_slli_epi32(w, 6), mask, 0x28),  // (a ^ b) & c
                        _mm512_ternarylogic_epi32(w, _mm512_ror_epi32(w, 4), mask, 0x28),
                        _mm512_ternarylogic_epi32(_mm512_slli_epi32(w, 2), _mm512_srli_epi32(w, 6), mask, 0x28)};
  for (int r = 0; r < 4; ++r) {
    const __m512 low = _mm512_permutexvar_ps(_mm512_srli_epi32(x[r], 6), table);  // takes the index's low four bits
    const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(x[r], 22), table);
    value[2 * r].v = _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(_mm512_castps_si512(low), _mm512_slli_epi32(x[r], 16), sign, 0xF8));  // a | (b & c)
    value[2 * r + 1].v = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(high), x[r], sign, 0xF8));
  }
}

// One step of the tree of ReduceLanes: the sums of lanes i and i + D of each group of 2D, of a and of b, in one vector.
inline F16 Pair8(F16 a, F16 b) {
  return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE))};
}
inline F16 Pair4(F16 a, F16 b) {
  return {_mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x88), _mm512_shuffle_f32x4(a.v, b.v, 0xDD))};
}
inline F16 Pair2(F16 a, F16 b) {
  return {_mm512_add_ps(_mm512_shuffle_ps(a.v, b.v, 0x44), _mm512_shuffle_ps(a.v, b.v, 0xEE))};
}
inline F16 Pair1(F16 a, F16 b) {
  return {_mm512_add_ps(_mm512_shuffle_ps(a.v, b.v, 0x88), _mm512_shuffle_ps(a.v, b.v, 0xDD))};
}
inline F16 Permute(F16 a, const int32_t* from) { return {_mm512_permutexvar_ps(_mm512_loadu_si512(from), a.v)}; }

#else

struct F16 {
  float v[16];
};
#define MUSEJAX_LANES for (int i = 0; i < 16; ++i)
inline F16 Load(const float* p) {
  F16 a;
  memcpy(a.v, p, 64);
  return a;
}
inline void Store(float* p, F16 a) { memcpy(p, a.v, 64); }
inline F16 Set(F16, float x) {
  F16 a;
  MUSEJAX_LANES a.v[i] = x;
  return a;
}
inline F16 Add(F16 a, F16 b) {
  MUSEJAX_LANES a.v[i] += b.v[i];
  return a;
}
inline F16 Sub(F16 a, F16 b) {
  MUSEJAX_LANES a.v[i] -= b.v[i];
  return a;
}
inline F16 Mul(F16 a, F16 b) {
  MUSEJAX_LANES a.v[i] *= b.v[i];
  return a;
}
inline F16 Div(F16 a, F16 b) {
  MUSEJAX_LANES a.v[i] /= b.v[i];
  return a;
}
inline F16 Fma(F16 a, F16 b, F16 c) {
#if defined(__AVX2__)
  for (int i = 0; i < 16; i += 8)
    _mm256_storeu_ps(c.v + i,
                     _mm256_fmadd_ps(_mm256_loadu_ps(a.v + i), _mm256_loadu_ps(b.v + i), _mm256_loadu_ps(c.v + i)));
#else
  MUSEJAX_LANES c.v[i] = fmaf(a.v[i], b.v[i], c.v[i]);
#endif
  return c;
}
inline F16 Clamp(F16 x, float low, float high) {
  MUSEJAX_LANES x.v[i] = musejax::Clamp(x.v[i], low, high);
  return x;
}
inline F16 ZeroBelow(F16 x, float bound, F16 value) {
  MUSEJAX_LANES value.v[i] = musejax::ZeroBelow(x.v[i], bound, value.v[i]);
  return value;
}
inline F16 PowerOfTwo(F16 n) {
  MUSEJAX_LANES n.v[i] = n.v[i] == n.v[i] ? musejax::PowerOfTwo(n.v[i]) : n.v[i];
  return n;
}
inline F16 RoundBf16(F16 a) {
  MUSEJAX_LANES a.v[i] = musejax::RoundBf16(a.v[i]);
  return a;
}
inline F16 LoadBf16(const uint16_t* p) {
  F16 a;
  MUSEJAX_LANES a.v[i] = FromBf16(p[i]);
  return a;
}
inline void LoadPairs(const uint8_t* p, F16* even, F16* odd) {
  uint32_t w[16];
  memcpy(w, p, 64);
  MUSEJAX_LANES even->v[i] = Bits(w[i] << 16);
  MUSEJAX_LANES odd->v[i] = Bits(w[i] & 0xFFFF0000u);
}
inline F16 Repeat4(const float* p) {
  F16 a;
  MUSEJAX_LANES a.v[i] = p[i % 4];
  return a;
}
inline void UnpackCodes(const uint8_t* p, F16* value) {
  static constexpr float kTable[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  uint32_t words[16];
  memcpy(words, p, 64);
  MUSEJAX_LANES {
    const uint32_t w = words[i];
    const uint32_t x[4] = {w, w ^ w << 6, w ^ (w >> 4 | w << 28), w << 2 ^ w >> 6};
    for (int r = 0; r < 4; ++r) {
      value[2 * r].v[i] = Bits(Bits(kTable[x[r] >> 6 & 7]) | (x[r] << 16 & 0x80000000u));
      value[2 * r + 1].v[i] = Bits(Bits(kTable[x[r] >> 22 & 7]) | (x[r] & 0x80000000u));
    }
  }
}
template <int D>
inline F16 PairLanes(F16 a, F16 b) {
  // Lanes as the AVX-512 shuffles leave them: D = 8, 4 keep groups of four in order, a's first; D = 2, 1 work inside
  // them.
  F16 out;
  if (D >= 4) {
    for (int q = 0; q < 4; ++q)
      for (int i = 0; i < 4; ++i) {
        const F16& s = q < 2 ? a : b;
        const int first = D == 8 ? q % 2 : q % 2 * 2;
        out.v[4 * q + i] = s.v[4 * first + i] + s.v[4 * first + i + D];
      }
  } else {
    for (int q = 0; q < 16; q += 4)
      for (int i = 0; i < 4; ++i) {
        const F16& s = i < 2 ? a : b;
        const int first = q + (D == 2 ? i % 2 : i % 2 * 2);
        out.v[q + i] = s.v[first] + s.v[first + D];
      }
  }
  return out;
}
inline F16 Pair8(F16 a, F16 b) { return PairLanes<8>(a, b); }
inline F16 Pair4(F16 a, F16 b) { return PairLanes<4>(a, b); }
inline F16 Pair2(F16 a, F16 b) { return PairLanes<2>(a, b); }
inline F16 Pair1(F16 a, F16 b) { return PairLanes<1>(a, b); }
inline F16 Permute(F16 a, const int32_t* from) {
  F16 out;
  MUSEJAX_LANES out.v[i] = a.v[from[i]];
  return out;
}
#undef MUSEJAX_LANES

#endif

inline F16 Zero() { return Set(F16{}, 0.0f); }

}  // namespace musejax::MUSEJAX_ISA

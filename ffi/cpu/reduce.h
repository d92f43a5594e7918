// Sums that several kernels make, for one instruction set (simd.h).
#pragma once

#include "cpu/simd.h"

namespace musejax::MUSEJAX_ISA {

// -> lane i = sum of all lanes of acc[i]: lanes i and i + 8, i + 4, i + 2, i + 1.
inline F16 ReduceLanes(const F16* acc) {
  // Lane 4 k + 0, 1, 2, 3 of the reduced vector holds rows k, k + 4, k + 8, k + 12.
  constexpr int32_t kRows16[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  F16 quarter[4];
  for (int i = 0; i < 4; ++i)
    quarter[i] = Pair4(Pair8(acc[4 * i], acc[4 * i + 1]), Pair8(acc[4 * i + 2], acc[4 * i + 3]));
  return Permute(Pair1(Pair2(quarter[0], quarter[1]), Pair2(quarter[2], quarter[3])), kRows16);
}

// Numerators of one head, c values, and the denominator behind them.
template <int C>
struct Weighted {
  F16 value[C / 16];
  float weight;
  void Clear() {
    for (F16& v : value) v = Zero();
    weight = 0.0f;
  }
  void operator+=(const Weighted& other) {
    for (int i = 0; i < C / 16; ++i) value[i] = Add(value[i], other.value[i]);
    weight += other.weight;
  }
};

}  // namespace musejax::MUSEJAX_ISA

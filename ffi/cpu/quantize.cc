#include "cpu/quantize.h"

#include "common/layout.h"

namespace musejax {
namespace {

float MaxAbs(const float* x, int64_t n) {  // NaN if any is
  float most = 0.0f;
  for (int64_t i = 0; i < n; ++i) most = LargerAbs(most, x[i]);
  return most;
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

RowScale PerTokenScale(const float* x, int64_t n) { return PerTokenScale(MaxAbs(x, n)); }

}  // namespace musejax

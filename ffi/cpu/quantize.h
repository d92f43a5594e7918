// NVFP4 activations: rows to the grid of E2M1 values times E4M3 block scales, every operation rounded to float32.
#pragma once

#include <cstdint>

namespace musejax {

// x[i] -> its grid value e2m1 * e4m3, for n columns (a multiple of 16), given the decode scale d and its reciprocal as
// the encoder computes it. Blocks with NaN become NaN.
void QuantizeBlocks(const float* x, int64_t n, float encode, float* grid);
// Decode scale of a row for per-token activations, and its encode scale: amax / 2688, or 0 and 1 for a dead row, whose
// values become 0.
struct RowScale {
  float decode, encode;
  bool dead;
};
RowScale PerTokenScale(const float* x, int64_t n);

}  // namespace musejax

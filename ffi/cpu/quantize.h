// NVFP4 activations: rows to the grid of E2M1 values times E4M3 block scales, every operation rounded to float32.
#pragma once

#include <cstdint>

#include "common/nvfp4.h"

namespace musejax {

// x[i] -> its grid value e2m1 * e4m3, for n columns (a multiple of 16), given the decode scale d and its reciprocal as
// the encoder computes it. Blocks with NaN become NaN.
void QuantizeBlocks(const float* x, int64_t n, float encode, float* grid);
// Of a row of n values.
RowScale PerTokenScale(const float* x, int64_t n);

}  // namespace musejax

// MUSEJAX_FN: a function for host and device alike, in headers that both compilers read; and the least of them.
#pragma once

#if defined(__CUDACC__)
#define MUSEJAX_FN __host__ __device__ inline
#else
#define MUSEJAX_FN inline
#endif

namespace musejax {

MUSEJAX_FN constexpr int Min(int a, int b) { return a < b ? a : b; }
MUSEJAX_FN constexpr int Max(int a, int b) { return a > b ? a : b; }

}  // namespace musejax

// MUSEJAX_FN: a function for host and device alike, in headers that both compilers read.
#pragma once

#if defined(__CUDACC__)
#define MUSEJAX_FN __host__ __device__ inline
#else
#define MUSEJAX_FN inline
#endif

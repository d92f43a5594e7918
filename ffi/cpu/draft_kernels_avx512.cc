// The drafter's kernels for avx512; CMakeLists.txt sets the instruction set of this file.
#include "cpu/draft_kernels_impl.h"

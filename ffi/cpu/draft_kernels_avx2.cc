// The drafter's kernels for avx2; CMakeLists.txt sets the instruction set of this file.
#include "cpu/draft_kernels_impl.h"

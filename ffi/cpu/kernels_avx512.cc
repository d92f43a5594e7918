// The kernels for avx512; CMakeLists.txt sets the instruction set of this file.
#include "cpu/kernels_impl.h"

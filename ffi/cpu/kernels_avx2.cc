// The kernels for avx2; CMakeLists.txt sets the instruction set of this file.
#include "cpu/kernels_impl.h"

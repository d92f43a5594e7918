// The kernels for scalar; CMakeLists.txt sets the instruction set of this file.
#include "cpu/kernels_impl.h"

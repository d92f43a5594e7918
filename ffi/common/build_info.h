// How this library was built, as text that a handler copies out: one "key=value" a line, padded with
// zeros to kBuildInfoBytes. musejax/ffi.py reads it. CMake defines MUSEJAX_COMPILER and
// MUSEJAX_CUDA_ARCHS (of the CUDA library built along with this one; empty: none).
#pragma once

#include "common/version.h"

namespace musejax {
inline constexpr int kBuildInfoBytes = 512;  // the size that musejax/ffi.py asks for
}

#define MUSEJAX_QUOTE_(x) #x
#define MUSEJAX_QUOTE(x) MUSEJAX_QUOTE_(x)

// The FFI API numbers are arguments, since only the caller includes the framework's headers.
#define MUSEJAX_BUILD_INFO(ffi_major, ffi_minor)                              \
  "version=" MUSEJAX_VERSION                                                  \
  "\nabi=" MUSEJAX_QUOTE(MUSEJAX_ABI)                                         \
  "\nffi_api=" MUSEJAX_QUOTE(ffi_major) "." MUSEJAX_QUOTE(ffi_minor)          \
  "\ncompiler=" MUSEJAX_COMPILER "\ncuda_archs=" MUSEJAX_CUDA_ARCHS "\n"

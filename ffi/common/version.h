// Version of the compiled library. The text is the project's version, handed over by CMake from
// pyproject.toml. The ABI number counts changes of what Python and the library must agree on beyond
// it: target names, operand order, attributes, buffer layouts. Raise it here and in musejax/ffi.py
// together; loading refuses any other pair.
#pragma once

#ifndef MUSEJAX_VERSION
#error "MUSEJAX_VERSION is defined by CMakeLists.txt, from pyproject.toml"
#endif

#define MUSEJAX_ABI 7  // a macro, for build_info.h joins it into a literal

namespace musejax {
inline constexpr char kVersion[] = MUSEJAX_VERSION;
inline constexpr int kAbi = MUSEJAX_ABI;
}  // namespace musejax

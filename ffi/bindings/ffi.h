// What every handler file needs of XLA's FFI: the namespace alias and checks that answer with our
// error texts. Free of Python, so nvcc and C++ tests can include it.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "common/check.h"
#include "xla/ffi/api/ffi.h"

namespace musejax {
namespace ffi = xla::ffi;

// Success, or an error that names the operation, both shapes and the argument.
template <typename Buffer>
ffi::Error ExpectShape(std::string_view operation, std::string_view argument, const Buffer& buffer,
                       std::initializer_list<int64_t> expected) {
  const auto got = buffer.dimensions();
  if (std::equal(got.begin(), got.end(), expected.begin(), expected.end())) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(Mismatch(operation, argument, ShapeText(expected.begin(), expected.size()),
                                              ShapeText(got.begin(), got.size())));
}

}  // namespace musejax

// Error texts in one form: "OPERATION: expected X, got Y (argument Z)". Plain C++: the callers turn
// the text into the error type of their framework.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

namespace musejax {

// "[2,16]", the way shapes stand in messages; "[]" for a scalar.
inline std::string ShapeText(const int64_t* dims, size_t rank) {
  std::ostringstream out;
  out << '[';
  for (size_t i = 0; i < rank; ++i) out << (i ? "," : "") << dims[i];
  out << ']';
  return out.str();
}

template <typename Expected, typename Got>
std::string Mismatch(std::string_view operation, std::string_view argument, const Expected& expected,
                     const Got& got) {
  std::ostringstream out;
  out << operation << ": expected " << expected << ", got " << got << " (argument " << argument << ")";
  return out.str();
}

}  // namespace musejax

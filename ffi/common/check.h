// Error texts in one form: "OPERATION: expected X, got Y (argument Z)". Plain C++: the callers turn
// the text into the error type of their framework.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace musejax {

// A part of a message: text as it is, whole numbers in decimal.
template <typename T>
std::string MessageText(const T& part) {
  if constexpr (std::is_integral_v<T>)
    return std::to_string(part);
  else
    return std::string(part);
}

// "[2,16]", the way shapes stand in messages; "[]" for a scalar.
inline std::string ShapeText(const int64_t* dims, size_t rank) {
  std::string out = "[";
  for (size_t i = 0; i < rank; ++i) out += (i ? "," : "") + std::to_string(dims[i]);
  return out + "]";
}

template <typename Expected, typename Got>
std::string Mismatch(std::string_view operation, std::string_view argument, const Expected& expected, const Got& got) {
  return MessageText(operation) + ": expected " + MessageText(expected) + ", got " + MessageText(got) + " (argument " +
         MessageText(argument) + ")";
}

}  // namespace musejax

// What marks the state of a pass that gave up waiting: then it means nothing, and no pass goes on from it.
#pragma once

#include <cstdint>

namespace musejax {

inline constexpr int32_t kGaveUp = -1;  // in the place of accepted rows; GAVE_UP in musejax/kernels/cache.py
// What is expected instead, and what follows the number in a message.
inline constexpr char kNotGivenUp[] = "at least 0 accepted rows";
inline constexpr char kGaveUpText[] = ", the state of a pass that gave up: start anew from the prompt";

}  // namespace musejax

// Random words by position, the same on host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/host_device.h"

namespace musejax::bench {

// A word that depends on every bit of the seed and the position.
MUSEJAX_FN uint32_t Random(uint32_t seed, uint64_t position) {
  uint64_t x = position + (static_cast<uint64_t>(seed) << 32 | 0x9E3779B9u);
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>((x ^ x >> 31) >> 16);
}

}  // namespace musejax::bench

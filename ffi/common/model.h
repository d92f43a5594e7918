// Sizes and constants of a model, and how its experts are run, for every platform.
#pragma once

#include "common/layout.h"

namespace musejax {

enum class Activations : int64_t { kBf16 = 0, kStatic = 1, kPerToken = 2 };

// Sizes and constants of a model, and how experts are run; decoded from the attribute `model`.
struct Model {
  Shape shape;
  int64_t top_k, vocab;
  float rms_eps, post_eps, route_eps, attention_scale, output_multiplier, softcap, gate_temperature, gate_floor,
      routed_scale;
  int64_t combine_groups;  // 0: flat; R: ep(R)
  Activations activations;
};

}  // namespace musejax

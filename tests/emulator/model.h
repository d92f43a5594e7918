// The model as musejax's tests hand it over with ctypes.
#pragma once

#include <map>
#include <vector>

#include "common/model.h"

// What a rank keeps from launch to launch, as on a GPU: frames are used again under new tags.
struct EmulatedWorkspace {
  std::vector<uint8_t> frames;
  std::vector<uint32_t> epochs;
};

// By the numbers that a launch's size and place are told by.
inline std::map<std::vector<int>, EmulatedWorkspace> workspaces;

// integers: hidden, heads, kv_heads, head_dim, moe_hidden, moe_inner, experts, top_k, vocab, combine_groups,
// activations. floats: rms_eps, ..., routed_scale as in ModelAttribute.
inline musejax::Model ModelOf(const int64_t* integers, const float* floats) {
  musejax::Model m{};
  m.shape = {integers[0], integers[1], integers[2], integers[3], integers[4], integers[5], integers[6]};
  m.top_k = integers[7], m.vocab = integers[8], m.combine_groups = integers[9];
  m.activations = musejax::Activations(integers[10]);
  m.rms_eps = floats[0], m.post_eps = floats[1], m.route_eps = floats[2], m.attention_scale = floats[3];
  m.output_multiplier = floats[4], m.softcap = floats[5], m.gate_temperature = floats[6], m.gate_floor = floats[7];
  m.routed_scale = floats[8];
  return m;
}

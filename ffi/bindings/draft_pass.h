// What handlers of a drafter on the CPU take: whole numbers, weights, rings.
#pragma once

#include "bindings/draft_model.h"
#include "cpu/draft.h"

namespace musejax {

inline void RequireRows(Operands& io, const std::string& name, int64_t count) {
  io.Require(count >= 1 && count <= kMaxRows, name, "1 to 16 rows", count);
}

inline int64_t TakeInteger(Operands& io, const std::string& name, int64_t low, int64_t high) {
  const int32_t* value = io.In<int32_t>(name, {});
  if (!value) return 0;
  io.Require(*value >= low && *value <= high, name, std::to_string(low) + " to " + std::to_string(high), *value);
  return *value;
}

inline int64_t TakeLength(Operands& io) { return TakeInteger(io, "length", 0, INT32_MAX - kMaxRows); }

// Operands dense, small of one layer.
inline DraftWeights TakeWeights(Operands& io, const DraftModel& m, int64_t slices, int64_t begin,
                                const std::string& layer) {
  DraftWeights w{};
  w.slices = slices, w.begin = begin;
  w.dense = io.In<uint8_t>(layer + "dense", {slices, DraftDenseLayout(m.shape).bytes});
  w.small = io.In<float>(layer + "small", {DraftSmallLayout(m.shape).count});
  return w;
}

// Rings of every layer, bf16 [layers, heads here, slots, c] twice: operands, or operands updated in place.
inline std::vector<DraftKeys> TakeKeys(Operands& io, const DraftModel& m, size_t index, int64_t slices, bool in_place) {
  const int64_t layers = io.Size(index, 0), heads = slices * m.shape.kv_slice(), slots = io.Size(index, 2);
  const int64_t c = m.shape.head_dim;
  const auto take = [&](const char* name) {
    return in_place ? io.InOut<bf16>(name, {layers, heads, slots, c})
                    : const_cast<bf16*>(io.In<bf16>(name, {layers, heads, slots, c}));  // phases of a block only read
  };
  bf16 *keys = take("keys"), *values = take("values");
  io.Require(layers >= 1 && slots >= 1, "keys", "at least one layer and one slot", slots);
  std::vector<DraftKeys> out;
  for (int64_t i = 0; i < layers && io.ok(); ++i)
    out.push_back({keys + i * heads * slots * c, values + i * heads * slots * c, heads, slots});
  return out;
}

inline std::vector<DraftWeights> TakeLayers(Operands& io, const DraftModel& m, size_t n, int64_t slices) {
  std::vector<DraftWeights> out;
  for (size_t i = 0; i < n && io.ok(); ++i)
    out.push_back(TakeWeights(io, m, slices, 0, "layers[" + std::to_string(i) + "]."));
  return out;
}

}  // namespace musejax

// What handlers of a pass on the CPU take: rows, keys and values, weights.
#pragma once

#include "bindings/model.h"
#include "common/pass_state.h"
#include "cpu/layer.h"

namespace musejax {

// The operands of TakeRowArrays, and what they hold.
inline void TakeRows(Operands& io, int64_t count, Rows* rows, Accepted* accepted) {
  const auto [parents, state, path, mark] = TakeRowArrays(io, count);
  if (!io.ok()) return;
  rows->count = int(count), rows->length = state[0], rows->valid = state[1], accepted->count = state[2];
  io.Require(state[2] >= 0, "state[2]", kNotGivenUp, std::to_string(state[2]) + kGaveUpText);
  io.Require(state[0] >= 0, "state[0]", "a length of at least 0", state[0]);
  io.Require(state[1] >= 0 && state[1] <= count, "state[1]", "at most the number of rows", state[1]);
  io.Require(state[2] <= kMaxRows && state[2] <= state[0], "state[2]",
             "at most 16 accepted rows and the length", state[2]);
  for (int64_t i = 0; i < kMaxRows; ++i) {
    accepted->path[i] = path[i];
    io.Require(i >= accepted->count || (path[i] >= 0 && path[i] < kMaxRows), "path", "rows 0 to 15", path[i]);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t parent = parents[i];
    io.Require(parent >= -1 && parent < i, "parents", "-1 or an earlier row", parent);
    if (!io.ok()) return;
    rows->parent[i] = parent;
    rows->depth[i] = parent < 0 ? 0 : rows->depth[parent] + 1;
  }
}

// Operands of one layer's keys and values, updated in place: cache [heads, slots, c] twice, flight [heads, 16, c]
// twice.
inline LayerKeys TakeKeys(Operands& io, const Model& m, int64_t heads, int64_t slots, int64_t window, const Rows& rows,
                          const std::string& layer) {
  const int64_t c = m.shape.head_dim;
  LayerKeys kv;
  kv.keys = io.InOut<bf16>(layer + "keys", {heads, slots, c});
  kv.values = io.InOut<bf16>(layer + "values", {heads, slots, c});
  kv.flight_keys = io.InOut<bf16>(layer + "flight_keys", {heads, kMaxRows, c});
  kv.flight_values = io.InOut<bf16>(layer + "flight_values", {heads, kMaxRows, c});
  kv.heads = heads, kv.slots = slots, kv.window = window;
  if (io.ok())
    io.Require(slots > 0 && (rows.length <= slots || (window > 0 && window <= slots)), layer + "keys",
               "a slot for each of " + std::to_string(rows.length) + " positions, or for a window of " +
                   std::to_string(window),
               slots);
  return kv;
}

// Operands dense, experts, small of one layer, of `slices` slices and `experts` experts.
inline LayerWeights TakeWeights(Operands& io, const Model& m, bool nvfp4, int64_t slices, const std::string& layer) {
  LayerWeights w{};
  w.nvfp4 = nvfp4, w.slices = slices, w.expert_begin = 0, w.expert_count = m.shape.experts;
  w.dense = io.In<uint8_t>(layer + "dense", {slices, DenseLayout(m.shape).bytes});
  w.experts = io.In<uint8_t>(layer + "experts", {slices, m.shape.experts, ExpertLayout(m.shape, nvfp4).bytes});
  w.small = io.In<float>(layer + "small", {SmallCount(m, nvfp4)});
  return w;
}

}  // namespace musejax

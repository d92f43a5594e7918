// What every handler of a pass decodes: the attribute `model` and the operands that describe the rows.
#pragma once

#include "bindings/operands.h"
#include "cpu/layer.h"

namespace musejax {

// Members of the attribute `model`, all of them, by name; musejax/kernels/attributes.py writes it.
struct ModelAttribute {
  int64_t hidden, heads, kv_heads, head_dim, moe_hidden, moe_inner, experts, top_k, vocab, combine_groups, activations;
  float rms_eps, post_eps, route_eps, attention_scale, output_multiplier, softcap, gate_temperature, gate_floor,
      routed_scale;
};

inline Model ToModel(const ModelAttribute& a, Operands& io) {
  const Shape s{a.hidden, a.heads, a.kv_heads, a.head_dim, a.moe_hidden, a.moe_inner, a.experts};
  const auto whole = [&](const char* name, int64_t k) {
    io.Require(k > 0 && k % 128 == 0 && (k <= kChunk || k % kChunk == 0) && k <= 16384, name,
               "a multiple of 128 up to 1024, or of 1024 up to 16384", k);
  };
  whole("model.hidden", a.hidden), whole("model.heads * head_dim", a.heads * a.head_dim);
  whole("model.moe_hidden", a.moe_hidden), whole("model.moe_inner", a.moe_inner);
  const bool power = a.head_dim == 16 || a.head_dim == 32 || a.head_dim == 64 || a.head_dim == 128;
  io.Require(power, "model.head_dim", "16, 32, 64 or 128", a.head_dim);
  io.Require(a.heads % kSlices == 0 && a.kv_heads > 0 && a.kv_heads % kSlices == 0 && a.heads % a.kv_heads == 0,
             "model.kv_heads", "multiples of 8 that divide heads", a.kv_heads);
  io.Require(a.experts % kSlices == 0, "model.experts", "a multiple of 8", a.experts);
  io.Require(a.vocab % kSlices == 0, "model.vocab", "a multiple of 8", a.vocab);
  io.Require(a.top_k >= 1 && a.top_k <= a.experts, "model.top_k", "1 to the number of experts", a.top_k);
  io.Require(a.combine_groups >= 0 && (a.combine_groups == 0 || a.experts % a.combine_groups == 0),
             "model.combine_groups", "0 or a divisor of the number of experts", a.combine_groups);
  io.Require(a.activations >= 0 && a.activations <= 2, "model.activations", "0, 1 or 2", a.activations);
  return {s,
          a.top_k,
          a.vocab,
          a.rms_eps,
          a.post_eps,
          a.route_eps,
          a.attention_scale,
          a.output_multiplier,
          a.softcap,
          a.gate_temperature,
          a.gate_floor,
          a.routed_scale,
          a.combine_groups,
          Activations(a.activations)};
}

// Operands: parents i32 [rows]; state i32 [3] = (stored positions, valid rows, accepted rows); path i32 [16].
inline void TakeRows(Operands& io, int64_t count, Rows* rows, Accepted* accepted) {
  const int32_t* parents = io.In<int32_t>("parents", {count});
  const int32_t* state = io.In<int32_t>("state", {3});
  const int32_t* path = io.In<int32_t>("path", {kMaxRows});
  io.Require(count >= 1 && count <= kMaxRows, "parents", "1 to 16 rows", count);
  if (!io.ok()) return;
  rows->count = int(count), rows->length = state[0], rows->valid = state[1], accepted->count = state[2];
  io.Require(state[0] >= 0, "state[0]", "a length of at least 0", state[0]);
  io.Require(state[1] >= 0 && state[1] <= count, "state[1]", "at most the number of rows", state[1]);
  io.Require(state[2] >= 0 && state[2] <= kMaxRows && state[2] <= state[0], "state[2]",
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

inline int64_t SmallCount(const Model& m, bool nvfp4) { return SmallLayout(m.shape, nvfp4).count; }

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

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    musejax::ModelAttribute, xla::ffi::StructMember<int64_t>("hidden"), xla::ffi::StructMember<int64_t>("heads"),
    xla::ffi::StructMember<int64_t>("kv_heads"), xla::ffi::StructMember<int64_t>("head_dim"),
    xla::ffi::StructMember<int64_t>("moe_hidden"), xla::ffi::StructMember<int64_t>("moe_inner"),
    xla::ffi::StructMember<int64_t>("experts"), xla::ffi::StructMember<int64_t>("top_k"),
    xla::ffi::StructMember<int64_t>("vocab"), xla::ffi::StructMember<int64_t>("combine_groups"),
    xla::ffi::StructMember<int64_t>("activations"), xla::ffi::StructMember<float>("rms_eps"),
    xla::ffi::StructMember<float>("post_eps"), xla::ffi::StructMember<float>("route_eps"),
    xla::ffi::StructMember<float>("attention_scale"), xla::ffi::StructMember<float>("output_multiplier"),
    xla::ffi::StructMember<float>("softcap"), xla::ffi::StructMember<float>("gate_temperature"),
    xla::ffi::StructMember<float>("gate_floor"), xla::ffi::StructMember<float>("routed_scale"));

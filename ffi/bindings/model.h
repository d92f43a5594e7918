// What every handler of a pass decodes, on any platform: the attribute `model`, and the arrays that describe the rows.
#pragma once

#include "bindings/operands.h"
#include "common/model.h"

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

inline int64_t SmallCount(const Model& m, bool nvfp4) { return SmallLayout(m.shape, nvfp4).count; }

// Operands of every pass: parents i32 [rows]; state i32 [3] = (stored positions, valid rows, accepted rows); path i32
// [16]. What they hold can be checked only where the host can read them (pass.h). A negative number of accepted rows is
// kGaveUp.
struct RowArrays {
  const int32_t *parents, *state, *path;
  int32_t* mark;  // state[2] as a result, if there is one
};

// in_place: the state is also the next result.
inline RowArrays TakeRowArrays(Operands& io, int64_t count, bool in_place = false) {
  RowArrays rows{};
  rows.parents = io.In<int32_t>("parents", {count});
  if (int32_t* state = in_place ? io.InOut<int32_t>("state", {3}) : nullptr)
    rows.state = state, rows.mark = state + 2;
  else if (!in_place)
    rows.state = io.In<int32_t>("state", {3});
  rows.path = io.In<int32_t>("path", {kMaxRows});
  io.Require(count >= 1 && count <= kMaxRows, "parents", "1 to 16 rows", count);
  return rows;
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

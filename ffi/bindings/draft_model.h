// What every handler of a drafter decodes, on any platform: the attribute `model`.
#pragma once

#include "bindings/operands.h"
#include "common/draft_model.h"

namespace musejax {

// Members of the attribute `model`, all of them, by name; musejax/kernels/draft_calls.py writes it.
struct DraftAttribute {
  int64_t hidden, heads, kv_heads, head_dim, inner, taps, conv_groups, rank, vocab, window, candidates;
  float eps, attention_scale, output_multiplier, softcap, embedding_scale;
};

inline DraftModel ToModel(const DraftAttribute& a, Operands& io) {
  const DraftShape s{a.hidden, a.heads, a.kv_heads, a.head_dim, a.inner, a.taps, a.conv_groups, a.rank};
  const auto whole = [&](const char* name, int64_t k) {
    io.Require(k > 0 && k % 128 == 0 && (k <= kChunk || k % kChunk == 0), name,
               "a multiple of 128 up to 1024, or of 1024", k);
  };
  whole("model.hidden", a.hidden), whole("model.heads * head_dim", a.heads * a.head_dim);
  whole("model.inner", a.inner), whole("model.taps * hidden", a.taps * a.hidden);
  const bool power = a.head_dim == 16 || a.head_dim == 32 || a.head_dim == 64 || a.head_dim == 128;
  io.Require(power, "model.head_dim", "16, 32, 64 or 128", a.head_dim);
  io.Require(a.heads % kSlices == 0 && a.kv_heads > 0 && a.kv_heads % kSlices == 0 && a.heads % a.kv_heads == 0,
             "model.kv_heads", "multiples of 8 that divide heads", a.kv_heads);
  io.Require(a.conv_groups >= 0 && a.conv_groups % kSlices == 0 && (!a.conv_groups || a.hidden % a.conv_groups == 0),
             "model.conv_groups", "a multiple of 8 that divides hidden, or 0", a.conv_groups);
  io.Require(a.rank >= 0 && a.rank % 16 == 0, "model.rank", "a multiple of 16, or 0", a.rank);
  io.Require(a.vocab > 0 && a.vocab % kSlices == 0, "model.vocab", "a multiple of 8", a.vocab);
  io.Require(a.window >= 1, "model.window", "at least 1", a.window);
  io.Require(a.candidates >= 1 && a.candidates <= a.vocab / kSlices, "model.candidates",
             "1 to the vocabulary of a slice", a.candidates);
  return {s,         a.vocab,          a.window, a.candidates, a.eps, a.attention_scale, a.output_multiplier,
          a.softcap, a.embedding_scale};
}

}  // namespace musejax

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    musejax::DraftAttribute, xla::ffi::StructMember<int64_t>("hidden"), xla::ffi::StructMember<int64_t>("heads"),
    xla::ffi::StructMember<int64_t>("kv_heads"), xla::ffi::StructMember<int64_t>("head_dim"),
    xla::ffi::StructMember<int64_t>("inner"), xla::ffi::StructMember<int64_t>("taps"),
    xla::ffi::StructMember<int64_t>("conv_groups"), xla::ffi::StructMember<int64_t>("rank"),
    xla::ffi::StructMember<int64_t>("vocab"), xla::ffi::StructMember<int64_t>("window"),
    xla::ffi::StructMember<int64_t>("candidates"), xla::ffi::StructMember<float>("eps"),
    xla::ffi::StructMember<float>("attention_scale"), xla::ffi::StructMember<float>("output_multiplier"),
    xla::ffi::StructMember<float>("softcap"), xla::ffi::StructMember<float>("embedding_scale"));

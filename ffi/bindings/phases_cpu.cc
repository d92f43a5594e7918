// Targets of single phases on the CPU: what several devices run with all-gathers between, and what begins and ends a
// pass. Each is the function of cpu/phases.h of the same name. Arrays with a slice axis have the slices (or heads) of
// this device as results and all of them as operands; weights have the slices of this device.
#include "bindings/pass.h"
#include "common/math.h"
#include "cpu/thread_pool.h"

namespace musejax {
namespace {

using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;

// musejax_angles: positions i32 [rows], inv_freq f32 [thetas, c/2] -> cos_sin f32 [thetas, rows, 2, c/2].
ffi::Error Angles(Args args, Rets rets) {
  Operands io("angles", args, rets);
  const int64_t count = io.Size(0, 0), thetas = io.Size(1, 0), half = io.Size(1, 1);
  const int32_t* positions = io.In<int32_t>("positions", {count});
  const float* inv_freq = io.In<float>("inv_freq", {thetas, half});
  float* out = io.Out<float>("cos_sin", {thetas, count, 2, half});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  for (int64_t i = 0; i < thetas * count; ++i, out += 2 * half)
    for (int64_t j = 0; j < half; ++j)
      CosSin(float(positions[i % count]) * inv_freq[i / count * half + j], out + j, out + half + j);
  return ffi::Error::Success();
}

// musejax_embed_norm: rows bf16 [8, rows, hidden/8] of the embedding -> stream f32 [rows, hidden].
ffi::Error EmbedNormHandler(Args args, Rets rets, ModelAttribute attribute) {
  Operands io("embed_norm", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 1);
  const bf16* rows = io.In<bf16>("rows", {kSlices, count, m.shape.hidden_slice()});
  float* stream = io.Out<float>("stream", {count, m.shape.hidden});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  EmbedNorm(m, rows, int(count), stream);
  return ffi::Error::Success();
}

// A layer's dense weights and its small arrays, of the slices of this device.
LayerWeights TakeDense(Operands& io, const Model& m, bool nvfp4, int64_t slices) {
  LayerWeights w{};
  w.nvfp4 = nvfp4, w.slices = slices;
  w.dense = io.In<uint8_t>("dense", {slices, DenseLayout(m.shape).bytes});
  w.small = io.In<float>("small", {SmallCount(m, nvfp4)});
  return w;
}

// musejax_attn_in: stream, cos_sin f32 [rows, 2, c/2] (or [0, 2, c/2]: no rotation), parents, state, path, dense,
// small, keys, values, flight_keys, flight_values -> q, gate of the heads here, and the four arrays in place.
ffi::Error AttnInHandler(Args args, Rets rets, ModelAttribute attribute, bool nvfp4, int64_t window) {
  Operands io("attn_in", args, rets);
  const Model m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const Shape& s = m.shape;
  const int64_t count = io.Size(0, 0), slices = io.Size(5, 0), angles = io.Size(1, 0);
  const float* stream = io.In<float>("stream", {count, s.hidden});
  const float* cos_sin = io.In<float>("cos_sin", {angles ? count : 0, 2, s.head_dim / 2});
  Rows rows{};
  Accepted accepted{};
  TakeRows(io, count, &rows, &accepted);
  const LayerWeights w = TakeDense(io, m, nvfp4, slices);
  bf16* q = io.Out<bf16>("q", {slices * s.heads_slice(), count, s.head_dim});
  bf16* gate = io.Out<bf16>("gate", {slices * s.heads_slice(), count, s.head_dim});
  const LayerKeys kv = TakeKeys(io, m, slices * s.kv_slice(), io.Size(7, 1), window, rows, "");
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  AttnIn(m, w, stream, angles ? cos_sin : nullptr, rows, accepted, kv, q, gate);
  return ffi::Error::Success();
}

// musejax_attention: q, gate of the heads here, parents, state, path, keys, values, flight_keys, flight_values -> o of
// the heads here; the four arrays come back unchanged, in place, so that no later write can overtake the reading.
ffi::Error AttentionHandler(Args args, Rets rets, ModelAttribute attribute, int64_t window) {
  Operands io("attention", args, rets);
  const Model m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const Shape& s = m.shape;
  const int64_t heads = io.Size(0, 0), count = io.Size(0, 1), kv_heads = io.Size(5, 0);
  const bf16* q = io.In<bf16>("q", {heads, count, s.head_dim});
  const bf16* gate = io.In<bf16>("gate", {heads, count, s.head_dim});
  io.Require(heads == kv_heads * (s.heads / s.kv_heads), "q", "the heads that share the key/value heads here", heads);
  Rows rows{};
  Accepted accepted{};
  TakeRows(io, count, &rows, &accepted);
  bf16* o = io.Out<bf16>("o", {heads, count, s.head_dim});
  const LayerKeys kv = TakeKeys(io, m, kv_heads, io.Size(5, 1), window, rows, "");
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  Attention(m, kv, rows, q, gate, o);
  return ffi::Error::Success();
}

// musejax_attn_out: o bf16 [heads, rows, c], dense, small -> a bf16 [slices here, rows, hidden/8].
ffi::Error AttnOutHandler(Args args, Rets rets, ModelAttribute attribute, bool nvfp4) {
  Operands io("attn_out", args, rets);
  const Model m = ToModel(attribute, io);
  const Shape& s = m.shape;
  const int64_t count = io.Size(0, 1), slices = io.Size(1, 0);
  const bf16* o = io.In<bf16>("o", {s.heads, count, s.head_dim});
  const LayerWeights w = TakeDense(io, m, nvfp4, slices);
  bf16* a = io.Out<bf16>("a", {slices, count, s.hidden_slice()});
  io.Require(count <= kMaxRows, "o", "at most 16 rows", count);
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  AttnOut(m, w, o, int(count), a);
  return ffi::Error::Success();
}

// musejax_pool: stream, a [8, rows, hidden/8], dense, small -> stream with the attention branch, p [slices here, rows,
// moe_hidden/8], scores f32 [slices here, rows, experts/8].
ffi::Error PoolHandler(Args args, Rets rets, ModelAttribute attribute, bool nvfp4) {
  Operands io("pool", args, rets);
  const Model m = ToModel(attribute, io);
  const Shape& s = m.shape;
  const int64_t count = io.Size(0, 0), slices = io.Size(2, 0);
  float* stream = io.InOut<float>("stream", {count, s.hidden});
  const bf16* a = io.In<bf16>("a", {kSlices, count, s.hidden_slice()});
  const LayerWeights w = TakeDense(io, m, nvfp4, slices);
  bf16* p = io.Out<bf16>("p", {slices, count, s.moe_slice()});
  float* scores = io.Out<float>("scores", {slices, count, s.experts_slice()});
  io.Require(count <= kMaxRows, "stream", "at most 16 rows", count);
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  AddAttention(m, w.small, nvfp4, a, int(count), stream);
  Pool(m, w, stream, int(count), p, scores);
  return ffi::Error::Success();
}

// Experts of this device: some slices of all of them (decode), or all slices of some (score): begin i32 [] is the
// first.
LayerWeights TakeExperts(Operands& io, const Model& m, bool nvfp4, int64_t slices, int64_t experts) {
  LayerWeights w{};
  w.nvfp4 = nvfp4, w.slices = slices, w.expert_count = experts;
  w.experts = io.In<uint8_t>("experts", {slices, experts, ExpertLayout(m.shape, nvfp4).bytes});
  w.small = io.In<float>("small", {SmallCount(m, nvfp4)});
  const int32_t* begin = io.In<int32_t>("begin", {});
  if (begin) {
    w.expert_begin = *begin;
    io.Require(*begin >= 0 && *begin + experts <= m.shape.experts, "begin", "a block of the model's experts", *begin);
  }
  return w;
}

// musejax_experts_up: p [8, rows, moe_hidden/8], scores [8, rows, experts/8], parents, state, path, experts, small,
// begin
// -> c bf16 [slices here, rows * k, moe_inner/8], ids i32 [rows, k], weights f32 [rows, k].
ffi::Error ExpertsUpHandler(Args args, Rets rets, ModelAttribute attribute, bool nvfp4) {
  Operands io("experts_up", args, rets);
  const Model m = ToModel(attribute, io);
  const Shape& s = m.shape;
  const int64_t count = io.Size(0, 1), slices = io.Size(5, 0), experts = io.Size(5, 1);
  const bf16* p = io.In<bf16>("p", {kSlices, count, s.moe_slice()});
  const float* scores = io.In<float>("scores", {kSlices, count, s.experts_slice()});
  Rows rows{};
  Accepted accepted{};
  TakeRows(io, count, &rows, &accepted);
  const LayerWeights w = TakeExperts(io, m, nvfp4, slices, experts);
  bf16* c = io.Out<bf16>("c", {slices, count * m.top_k, s.inner_slice()});
  int32_t* ids = io.Out<int32_t>("ids", {count, m.top_k});
  float* weights = io.Out<float>("weights", {count, m.top_k});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  Route(m, w.small, nvfp4, scores, rows, ids, weights);
  ExpertsUp(m, w, p, ids, int(count), c);
  return ffi::Error::Success();
}

// musejax_experts_down: c [8, rows * k, moe_inner/8], ids, experts, small, begin -> y bf16 [slices here, rows * k,
// moe_hidden/8].
ffi::Error ExpertsDownHandler(Args args, Rets rets, ModelAttribute attribute, bool nvfp4) {
  Operands io("experts_down", args, rets);
  const Model m = ToModel(attribute, io);
  const Shape& s = m.shape;
  const int64_t count = io.Size(1, 0), slices = io.Size(2, 0), experts = io.Size(2, 1);
  const bf16* c = io.In<bf16>("c", {kSlices, count * m.top_k, s.inner_slice()});
  const int32_t* ids = io.In<int32_t>("ids", {count, m.top_k});
  const LayerWeights w = TakeExperts(io, m, nvfp4, slices, experts);
  bf16* y = io.Out<bf16>("y", {slices, count * m.top_k, s.moe_slice()});
  io.Require(count <= kMaxRows, "ids", "at most 16 rows", count);
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  ExpertsDown(m, w, c, ids, int(count), y);
  return ffi::Error::Success();
}

// musejax_combine: y [8, rows * k, moe_hidden/8], ids, weights, small -> m bf16 [rows, moe_hidden].
ffi::Error CombineHandler(Args args, Rets rets, ModelAttribute attribute, bool nvfp4) {
  Operands io("combine", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(1, 0);
  const bf16* y = io.In<bf16>("y", {kSlices, count * m.top_k, m.shape.moe_slice()});
  const int32_t* ids = io.In<int32_t>("ids", {count, m.top_k});
  const float* weights = io.In<float>("weights", {count, m.top_k});
  const float* small = io.In<float>("small", {SmallCount(m, nvfp4)});
  bf16* out = io.Out<bf16>("m", {count, m.shape.moe_hidden});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  Combine(m, small, nvfp4, y, ids, weights, int(count), out);
  return ffi::Error::Success();
}

// musejax_combine_partials: y [8, rows * k, moe_hidden/8], ids, weights, small, begin -> partials bf16 [groups, rows,
// moe_hidden] of the owner groups whose experts begin at `begin`. musejax_combine_gathered: partials of all groups -> m
// bf16 [rows, moe_hidden].
ffi::Error CombinePartialsHandler(Args args, Rets rets, ModelAttribute attribute, bool nvfp4, int64_t groups) {
  Operands io("combine_partials", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(1, 0);
  io.Require(m.combine_groups > 0 && groups > 0 && groups <= m.combine_groups, "groups", "owner groups of ep(R)",
             groups);
  if (!io.ok()) return io.error();
  const bf16* y = io.In<bf16>("y", {kSlices, count * m.top_k, m.shape.moe_slice()});
  const int32_t* ids = io.In<int32_t>("ids", {count, m.top_k});
  const float* weights = io.In<float>("weights", {count, m.top_k});
  LayerWeights w{};
  w.nvfp4 = nvfp4;
  w.small = io.In<float>("small", {SmallCount(m, nvfp4)});
  const int32_t* begin = io.In<int32_t>("begin", {});
  const int64_t owned = groups * (m.shape.experts / m.combine_groups);
  if (begin)
    io.Require(*begin >= 0 && *begin + owned <= m.shape.experts, "begin", "a block of the model's experts", *begin);
  bf16* partials = io.Out<bf16>("partials", {groups, count, m.shape.moe_hidden});
  if (ffi::Error error = io.error(); error.failure()) return error;
  w.expert_begin = *begin, w.expert_count = owned;
  IeeeArithmetic ieee;
  CombinePartials(m, w, y, ids, weights, int(count), partials);
  return ffi::Error::Success();
}

ffi::Error CombineGatheredHandler(Args args, Rets rets, ModelAttribute attribute) {
  Operands io("combine_gathered", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 1);
  const bf16* partials = io.In<bf16>("partials", {m.combine_groups, count, m.shape.moe_hidden});
  bf16* out = io.Out<bf16>("m", {count, m.shape.moe_hidden});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  CombineGathered(m, partials, int(count), out);
  return ffi::Error::Success();
}

// musejax_unpool: m bf16 [rows, moe_hidden], dense, small -> f bf16 [slices here, rows, hidden/8].
ffi::Error UnpoolHandler(Args args, Rets rets, ModelAttribute attribute, bool nvfp4) {
  Operands io("unpool", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 0), slices = io.Size(1, 0);
  const bf16* in = io.In<bf16>("m", {count, m.shape.moe_hidden});
  const LayerWeights w = TakeDense(io, m, nvfp4, slices);
  bf16* f = io.Out<bf16>("f", {slices, count, m.shape.hidden_slice()});
  io.Require(count <= kMaxRows, "m", "at most 16 rows", count);
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  Unpool(m, w, in, int(count), f);
  return ffi::Error::Success();
}

// musejax_add_ffn: stream, f [8, rows, hidden/8], small -> stream with the FFN branch.
ffi::Error AddFfnHandler(Args args, Rets rets, ModelAttribute attribute, bool nvfp4) {
  Operands io("add_ffn", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 0);
  float* stream = io.InOut<float>("stream", {count, m.shape.hidden});
  const bf16* f = io.In<bf16>("f", {kSlices, count, m.shape.hidden_slice()});
  const float* small = io.In<float>("small", {SmallCount(m, nvfp4)});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  AddFfn(m, small, nvfp4, f, int(count), stream);
  return ffi::Error::Success();
}

// Operand begin i32 []: the first of this device's slices of the vocabulary.
const int32_t* TakeBegin(Operands& io, int64_t slices) {
  const int32_t* begin = io.In<int32_t>("begin", {});
  if (begin) io.Require(*begin >= 0 && *begin + slices <= kSlices, "begin", "a block of the 8 slices", *begin);
  return begin;
}

// musejax_head: stream, final_norm bf16 [hidden], lm_head u8 [slices here, bytes], begin i32 [] (first slice here) ->
// raw logits f32 [slices here, rows, vocab/8], and of each slice the largest: values f32, ids i32 [slices here, rows,
// top].
ffi::Error HeadHandler(Args args, Rets rets, ModelAttribute attribute, int64_t num_tokens, int64_t top) {
  Operands io("head", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 0), slices = io.Size(2, 0), n = m.vocab / kSlices;
  io.Require(top >= 1 && top <= n, "top", "1 to the vocabulary of a slice", top);
  const float* stream = io.In<float>("stream", {count, m.shape.hidden});
  const bf16* norm = io.In<bf16>("final_norm", {m.shape.hidden});
  const uint8_t* lm_head = io.In<uint8_t>("lm_head", {slices, HeadBytes(m.vocab, m.shape.hidden)});
  const int32_t* begin = TakeBegin(io, slices);
  float* raw = io.Out<float>("raw", {slices, count, n});
  float* values = io.Out<float>("values", {slices, count, top});
  int32_t* ids = io.Out<int32_t>("ids", {slices, count, top});
  io.Require(count <= kMaxRows, "stream", "at most 16 rows", count);
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  Head(m, stream, norm, lm_head, slices, int(count), raw);
  HeadTop(m, raw, *begin, slices, int(count), num_tokens, top, values, ids);
  return ffi::Error::Success();
}

// musejax_head_sums: raw, largest f32 [rows], begin -> sums f32 [slices here, rows].
ffi::Error HeadSumsHandler(Args args, Rets rets, ModelAttribute attribute, int64_t num_tokens) {
  Operands io("head_sums", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t slices = io.Size(0, 0), count = io.Size(0, 1);
  const float* raw = io.In<float>("raw", {slices, count, m.vocab / kSlices});
  const float* largest = io.In<float>("largest", {count});
  const int32_t* begin = TakeBegin(io, slices);
  float* sums = io.Out<float>("sums", {slices, count});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  HeadSums(m, raw, largest, *begin, slices, int(count), num_tokens, sums);
  return ffi::Error::Success();
}

// musejax_logprob: raw logits of chosen tokens f32 [rows], largest [rows], sums [8, rows] -> log-probabilities f32
// [rows].
ffi::Error LogprobHandler(Args args, Rets rets, ModelAttribute attribute) {
  Operands io("logprob", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 0);
  const float* raw = io.In<float>("raw", {count});
  const float* largest = io.In<float>("largest", {count});
  const float* sums = io.In<float>("sums", {kSlices, count});
  float* out = io.Out<float>("logprobs", {count});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  for (int64_t row = 0; row < count; ++row) out[row] = LogProbability(m, raw[row], largest[row], sums + row, count);
  return ffi::Error::Success();
}

// musejax_softcap: raw f32 [n] -> logits f32 [n].
ffi::Error SoftcapHandler(Args args, Rets rets, ModelAttribute attribute) {
  Operands io("softcap", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t n = io.Size(0, 0);
  const float* raw = io.In<float>("raw", {n});
  float* out = io.Out<float>("logits", {n});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  for (int64_t i = 0; i < n; ++i) out[i] = Softcap(m, raw[i]);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace musejax

#define MUSEJAX_BIND xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets()
#define MUSEJAX_BIND_MODEL MUSEJAX_BIND.Attr<musejax::ModelAttribute>("model")
#define MUSEJAX_BIND_LAYER MUSEJAX_BIND_MODEL.Attr<bool>("nvfp4")

XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAnglesCpu, musejax::Angles, MUSEJAX_BIND);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxEmbedNormCpu, musejax::EmbedNormHandler, MUSEJAX_BIND_MODEL);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAttnInCpu, musejax::AttnInHandler, MUSEJAX_BIND_LAYER.Attr<int64_t>("window"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAttentionCpu, musejax::AttentionHandler,
                              MUSEJAX_BIND_MODEL.Attr<int64_t>("window"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAttnOutCpu, musejax::AttnOutHandler, MUSEJAX_BIND_LAYER);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxPoolCpu, musejax::PoolHandler, MUSEJAX_BIND_LAYER);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxExpertsUpCpu, musejax::ExpertsUpHandler, MUSEJAX_BIND_LAYER);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxExpertsDownCpu, musejax::ExpertsDownHandler, MUSEJAX_BIND_LAYER);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxCombineCpu, musejax::CombineHandler, MUSEJAX_BIND_LAYER);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxCombinePartialsCpu, musejax::CombinePartialsHandler,
                              MUSEJAX_BIND_LAYER.Attr<int64_t>("groups"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxCombineGatheredCpu, musejax::CombineGatheredHandler, MUSEJAX_BIND_MODEL);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxUnpoolCpu, musejax::UnpoolHandler, MUSEJAX_BIND_LAYER);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAddFfnCpu, musejax::AddFfnHandler, MUSEJAX_BIND_LAYER);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxHeadCpu, musejax::HeadHandler,
                              MUSEJAX_BIND_MODEL.Attr<int64_t>("num_tokens").Attr<int64_t>("top"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxHeadSumsCpu, musejax::HeadSumsHandler,
                              MUSEJAX_BIND_MODEL.Attr<int64_t>("num_tokens"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxLogprobCpu, musejax::LogprobHandler, MUSEJAX_BIND_MODEL);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxSoftcapCpu, musejax::SoftcapHandler, MUSEJAX_BIND_MODEL);

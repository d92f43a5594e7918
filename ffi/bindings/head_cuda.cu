// Targets of head/head.h on CUDA: names, operands, results, attributes and checks of phases_cpu.cc. Only what operands
// hold is not checked, for it lies in device memory: `begin` must be a block of the 8 slices.
#include "bindings/cuda.h"
#include "bindings/model.h"
#include "head/head.h"

namespace musejax {
namespace {

using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;
using head::bf16;

// musejax_angles: positions i32 [rows], inv_freq f32 [thetas, c/2] -> cos_sin f32 [thetas, rows, 2, c/2].
ffi::Error Angles(cudaStream_t stream, Args args, Rets rets) {
  Operands io("angles", args, rets);
  const int64_t count = io.Size(0, 0), thetas = io.Size(1, 0), half = io.Size(1, 1);
  const int32_t* positions = io.In<int32_t>("positions", {count});
  const float* inv_freq = io.In<float>("inv_freq", {thetas, half});
  float* out = io.Out<float>("cos_sin", {thetas, count, 2, half});
  if (ffi::Error error = io.error(); error.failure()) return error;
  return Launched("angles", head::Angles(stream, positions, inv_freq, thetas, count, half, out));
}

// musejax_embed_norm: rows bf16 [8, rows, hidden/8] of the embedding -> stream f32 [rows, hidden].
ffi::Error EmbedNorm(cudaStream_t stream, Args args, Rets rets, ModelAttribute attribute) {
  Operands io("embed_norm", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 1);
  const bf16* rows = io.In<bf16>("rows", {kSlices, count, m.shape.hidden_slice()});
  float* out = io.Out<float>("stream", {count, m.shape.hidden});
  if (ffi::Error error = io.error(); error.failure()) return error;
  return Launched("embed_norm", head::EmbedNorm(stream, m, rows, count, out));
}

// musejax_head: stream, final_norm bf16 [hidden], lm_head u8 [slices here, bytes], begin i32 [] (first slice here) ->
// raw logits f32 [slices here, rows, vocab/8], and of each slice the largest: values f32, ids i32 [slices here, rows,
// top].
ffi::Error Head(cudaStream_t on, Args args, Rets rets, ModelAttribute attribute, int64_t num_tokens, int64_t top) {
  Operands io("head", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 0), slices = io.Size(2, 0), n = m.vocab / kSlices;
  io.Require(top >= 1 && top <= n, "top", "1 to the vocabulary of a slice", top);
  const float* stream = io.In<float>("stream", {count, m.shape.hidden});
  const bf16* norm = io.In<bf16>("final_norm", {m.shape.hidden});
  const uint8_t* lm_head = io.In<uint8_t>("lm_head", {slices, HeadBytes(m.vocab, m.shape.hidden)});
  const int32_t* begin = io.In<int32_t>("begin", {});
  float* raw = io.Out<float>("raw", {slices, count, n});
  float* values = io.Out<float>("values", {slices, count, top});
  int32_t* ids = io.Out<int32_t>("ids", {slices, count, top});
  io.Require(count <= kMaxRows, "stream", "at most 16 rows", count);
  if (ffi::Error error = io.error(); error.failure()) return error;
  // `values` has room for a float a row, and is written only when those are no longer needed.
  const cudaError_t error = head::Head(on, m, stream, norm, lm_head, slices, count, values, raw);
  if (error != cudaSuccess) return Launched("head", error);
  return Launched("head", head::HeadTop(on, m, raw, begin, slices, count, num_tokens, top, values, ids));
}

// musejax_head_sums: raw, largest f32 [rows], begin -> sums f32 [slices here, rows].
ffi::Error HeadSums(cudaStream_t stream, Args args, Rets rets, ModelAttribute attribute, int64_t num_tokens) {
  Operands io("head_sums", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t slices = io.Size(0, 0), count = io.Size(0, 1);
  const float* raw = io.In<float>("raw", {slices, count, m.vocab / kSlices});
  const float* largest = io.In<float>("largest", {count});
  const int32_t* begin = io.In<int32_t>("begin", {});
  float* sums = io.Out<float>("sums", {slices, count});
  if (ffi::Error error = io.error(); error.failure()) return error;
  return Launched("head_sums", head::HeadSums(stream, m, raw, largest, begin, slices, count, num_tokens, sums));
}

// musejax_logprob: raw logits of chosen tokens f32 [rows], largest [rows], sums [8, rows] -> log-probabilities f32
// [rows].
ffi::Error Logprob(cudaStream_t stream, Args args, Rets rets, ModelAttribute attribute) {
  Operands io("logprob", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 0);
  const float* raw = io.In<float>("raw", {count});
  const float* largest = io.In<float>("largest", {count});
  const float* sums = io.In<float>("sums", {kSlices, count});
  float* out = io.Out<float>("logprobs", {count});
  if (ffi::Error error = io.error(); error.failure()) return error;
  return Launched("logprob", head::LogProbability(stream, m, raw, largest, sums, count, out));
}

// musejax_softcap: raw f32 [n] -> logits f32 [n].
ffi::Error Softcap(cudaStream_t stream, Args args, Rets rets, ModelAttribute attribute) {
  Operands io("softcap", args, rets);
  const Model m = ToModel(attribute, io);
  const int64_t n = io.Size(0, 0);
  const float* raw = io.In<float>("raw", {n});
  float* out = io.Out<float>("logits", {n});
  if (ffi::Error error = io.error(); error.failure()) return error;
  return Launched("softcap", head::Softcap(stream, m, raw, n, out));
}

}  // namespace
}  // namespace musejax

#define MUSEJAX_BIND xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets()
#define MUSEJAX_BIND_MODEL MUSEJAX_BIND.Attr<musejax::ModelAttribute>("model")
#define MUSEJAX_TRAITS {xla::ffi::Traits::kCmdBufferCompatible}

XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAnglesCuda, musejax::Angles, MUSEJAX_BIND, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxEmbedNormCuda, musejax::EmbedNorm, MUSEJAX_BIND_MODEL, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxHeadCuda, musejax::Head,
                              MUSEJAX_BIND_MODEL.Attr<int64_t>("num_tokens").Attr<int64_t>("top"), MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxHeadSumsCuda, musejax::HeadSums, MUSEJAX_BIND_MODEL.Attr<int64_t>("num_tokens"),
                              MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxLogprobCuda, musejax::Logprob, MUSEJAX_BIND_MODEL, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxSoftcapCuda, musejax::Softcap, MUSEJAX_BIND_MODEL, MUSEJAX_TRAITS);

// Target musejax_layers on the CPU: consecutive decoder layers of one pass on one device, the boundary of the
// megakernel.
//
//   stream f32 [rows, hidden], q, gate bf16 [heads, rows, c], cos_sin f32 [thetas, rows, 2, c/2], parents, state, path
//   (pass.h), then per layer: dense u8 [8, bytes], experts u8 [8, E, bytes], small f32 [n], keys, values bf16
//   [kv_heads, slots, c], flight_keys, flight_values bf16 [kv_heads, 16, c]
//   -> stream, q, gate, state, ids i32 [layers, rows, top_k], taps f32 [layers tapped, rows, hidden], and the four
//   arrays of keys and values of each layer, in place. On CUDA a pass that gave up leaves kGaveUp in state[2], with
//   which the next one is refused.
//
// Attributes: model; first, last (cpu/layer.h); per layer window (0: full), theta (index into cos_sin, -1: no
// rotation), nvfp4 (0 or 1), tap (0 or 1); devices, none or one: on CUDA, the ordinals of those that share the layers.
#include "bindings/pass.h"
#include "cpu/thread_pool.h"

namespace musejax {
namespace {

constexpr size_t kLayerOperands = 7, kLayersAfter = 7;

ffi::Error Layers(ffi::RemainingArgs args, ffi::RemainingRets rets, ModelAttribute attribute, bool first, bool last,
                  ffi::Span<const int64_t> window, ffi::Span<const int64_t> theta, ffi::Span<const int64_t> nvfp4,
                  ffi::Span<const int64_t> tap, ffi::Span<const int64_t> devices) {
  Operands io("layers", args, rets);
  const Model m = ToModel(attribute, io);
  const Shape& s = m.shape;
  const int64_t n = int64_t(window.size()), count = io.Size(0, 0), thetas = io.Size(3, 0);
  io.Require(n >= 1 && theta.size() == window.size() && nvfp4.size() == window.size() && tap.size() == window.size(),
             "window, theta, nvfp4, tap", "one entry a layer", n);
  io.Require(devices.size() <= 1, "devices", "one CPU device", devices.size());
  if (!io.ok()) return io.error();

  const float* stream = io.In<float>("stream", {count, s.hidden});
  const bf16* q = io.In<bf16>("q", {s.heads, count, s.head_dim});
  const bf16* gate = io.In<bf16>("gate", {s.heads, count, s.head_dim});
  const float* cos_sin = io.In<float>("cos_sin", {thetas, count, 2, s.head_dim / 2});
  Rows rows{};
  Accepted accepted{};
  TakeRows(io, count, &rows, &accepted);
  float* stream_out = io.Out<float>("stream", {count, s.hidden});
  bf16* q_out = io.Out<bf16>("q", {s.heads, count, s.head_dim});
  bf16* gate_out = io.Out<bf16>("gate", {s.heads, count, s.head_dim});
  int32_t* state_out = io.Out<int32_t>("state", {3});
  int32_t* ids = io.Out<int32_t>("ids", {n, count, m.top_k});
  const int64_t tapped = n - std::count(tap.begin(), tap.end(), 0);
  io.Require(last || tap[n - 1] == 0, "tap", "0 for a layer that does not run whole", tap[n - 1]);
  float* taps = io.Out<float>("taps", {tapped, count, s.hidden});
  std::vector<Layer> layers;
  for (int64_t i = 0; i < n && io.ok(); ++i) {
    const std::string name = "layers[" + std::to_string(i) + "].";
    io.Require(theta[i] >= -1 && theta[i] < thetas, "theta", "an index into cos_sin, or -1", theta[i]);
    Layer layer;
    layer.weights = TakeWeights(io, m, nvfp4[i] != 0, kSlices, name);
    layer.kv = TakeKeys(io, m, s.kv_heads, io.Size(kLayersAfter + kLayerOperands * i + 3, 1), window[i], rows, name);
    layer.tap = tap[i] != 0;
    layer.cos_sin = theta[i] < 0 ? nullptr : cos_sin + theta[i] * count * s.head_dim;
    layers.push_back(layer);
  }
  if (ffi::Error error = io.error(); error.failure()) return error;

  IeeeArithmetic ieee;
  if (stream != stream_out) std::copy_n(stream, count * s.hidden, stream_out);
  if (q != q_out) std::copy_n(q, count * s.q_width(), q_out);
  if (gate != gate_out) std::copy_n(gate, count * s.q_width(), gate_out);
  state_out[0] = int32_t(rows.length), state_out[1] = int32_t(rows.valid), state_out[2] = int32_t(accepted.count);
  std::fill_n(ids, n * count * m.top_k, int32_t(s.experts));
  RunLayers(m, layers.data(), int(n), first, last, rows, accepted, stream_out, q_out, gate_out, ids, taps);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace musejax

XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxLayersCpu, musejax::Layers,
                              xla::ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<musejax::ModelAttribute>("model")
                                  .Attr<bool>("first")
                                  .Attr<bool>("last")
                                  .Attr<xla::ffi::Span<const int64_t>>("window")
                                  .Attr<xla::ffi::Span<const int64_t>>("theta")
                                  .Attr<xla::ffi::Span<const int64_t>>("nvfp4")
                                  .Attr<xla::ffi::Span<const int64_t>>("tap")
                                  .Attr<xla::ffi::Span<const int64_t>>("devices"));

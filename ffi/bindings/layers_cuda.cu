// Target musejax_layers on CUDA: operands, results and attributes as in layers_cpu.cc, one launch of the layer kernel;
// and with several `devices` one on each: `dense`, `experts`, q, gate, keys and values are those of the device's slices,
// and the kernels exchange what they have finished while they run.
// And musejax_layers_looped, for measurements: some of 8 / slices ranks, the others sending a rank its own slices; the
// state is no result.
//
// What operands hold is not checked, for it lies in device memory; but for a state of a pass that gave up, which the
// kernel refuses. That, or a wait inside the kernel that did not end, is reported by layer_error() of the module, and
// on one device by the next call.
#include <algorithm>

#include "bindings/cuda.h"
#include "bindings/model.h"
#include "layer/context.cuh"
#include "layer/layer.h"

namespace musejax {
namespace {

using bf16 = uint16_t;
using layer::PassParams;
using Numbers = ffi::Span<const int64_t>;

constexpr size_t kLayerOperands = 7, kLayersAfter = 7;

struct LayerLists {
  Numbers window, theta, nvfp4, tap;
};

// Operands of one layer, of `slices` slices.
layer::LayerArrays TakeLayer(Operands& io, const Model& m, int64_t slices, size_t i, const LayerLists& lists) {
  const Shape& s = m.shape;
  const std::string name = "layers[" + std::to_string(i) + "].";
  const bool nvfp4 = lists.nvfp4[i] != 0;
  layer::LayerArrays out{};
  out.dense = io.In<uint8_t>(name + "dense", {slices, DenseLayout(s).bytes});
  out.experts = io.In<uint8_t>(name + "experts", {slices, s.experts, ExpertLayout(s, nvfp4).bytes});
  out.small = io.In<float>(name + "small", {SmallCount(m, nvfp4)});
  const int64_t heads = s.kv_slice() * slices, slots = io.Size(kLayersAfter + kLayerOperands * i + 3, 1);
  out.keys = io.InOut<bf16>(name + "keys", {heads, slots, s.head_dim});
  out.values = io.InOut<bf16>(name + "values", {heads, slots, s.head_dim});
  out.flight_keys = io.InOut<bf16>(name + "flight_keys", {heads, kMaxRows, s.head_dim});
  out.flight_values = io.InOut<bf16>(name + "flight_values", {heads, kMaxRows, s.head_dim});
  out.slots = int(slots), out.window = int(lists.window[i]), out.nvfp4 = nvfp4;
  io.Require(slots > 0 && lists.window[i] <= slots, name + "keys", "a slot for each position of the window", slots);
  return out;
}

// Ordinals of the ranks' devices; none given: the device at hand.
layer::Devices DevicesOf(Numbers given, int here) {
  return given.size() ? layer::Devices(given.begin(), given.end()) : layer::Devices{here};
}

ffi::Error Run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, const ModelAttribute& attribute,
               bool first, bool last, const LayerLists& lists, Numbers given, bool looped) {
  if (const std::string text = ReportedBefore(given); !text.empty()) return ffi::Error::Internal(text);
  Operands io("layers", args, rets, CopyOn(stream));
  PassParams pass{};
  pass.model = ToModel(attribute, io);
  const Model& m = pass.model;
  const Shape& s = m.shape;
  const int64_t n = int64_t(lists.window.size()), count = io.Size(0, 0), thetas = io.Size(3, 0);
  const int64_t slices = io.Size(kLayersAfter, 0), ranks = std::max<int64_t>(1, int64_t(given.size()));
  io.Require(n >= 1 && n <= layer::kMaxLayers && lists.theta.size() == size_t(n) && lists.nvfp4.size() == size_t(n) &&
                 lists.tap.size() == size_t(n),
             "window, theta, nvfp4, tap", "one entry for each of 1 to 64 layers", n);
  io.Require(slices >= 1 && slices <= kSlices && kSlices % slices == 0, "dense", "1, 2, 4 or 8 slices", slices);
  io.Require(looped ? slices * ranks <= kSlices : slices * ranks == kSlices, "devices",
             "8 slices on all devices together", slices * ranks);
  if (!io.ok()) return io.error();
  const layer::Instance* instance = layer::FindInstance(s, m.top_k, slices);
  io.Require(instance != nullptr, "model", "sizes that the library was compiled for (layer_instances())",
             "hidden " + std::to_string(s.hidden) + ", " + std::to_string(slices) + " slices");
  if (!io.ok()) return io.error();

  const int64_t heads = s.heads_slice() * slices;
  pass.stream = io.InOut<float>("stream", {count, s.hidden});
  pass.q = io.InOut<bf16>("q", {heads, count, s.head_dim});
  pass.gate = io.InOut<bf16>("gate", {heads, count, s.head_dim});
  const float* cos_sin = io.In<float>("cos_sin", {thetas, count, 2, s.head_dim / 2});
  const RowArrays rows = TakeRowArrays(io, count, !looped);
  pass.ids = io.Out<int32_t>("ids", {n, count, m.top_k});
  int64_t tapped = 0;
  for (const int64_t tap : lists.tap) tapped += tap != 0;
  io.Require(last || lists.tap[n - 1] == 0, "tap", "0 for a layer that does not run whole", lists.tap[n - 1]);
  float* taps = io.Out<float>("taps", {tapped, count, s.hidden});
  int64_t slots = 0;
  for (int64_t i = 0; i < n && io.ok(); ++i) {
    io.Require(lists.theta[i] >= -1 && lists.theta[i] < thetas, "theta", "an index into cos_sin, or -1",
               lists.theta[i]);
    layer::LayerArrays& layer = pass.layers[i] = TakeLayer(io, m, slices, size_t(i), lists);
    layer.cos_sin = lists.theta[i] < 0 ? nullptr : cos_sin + lists.theta[i] * count * s.head_dim;
    if (lists.tap[i]) layer.tap = taps, taps += count * s.hidden;
    slots = std::max<int64_t>(slots, layer.slots);
  }
  if (ffi::Error error = io.error(); error.failure()) return error;

  try {
    int here = 0;
    if (const cudaError_t error = cudaGetDevice(&here); error != cudaSuccess) return Launched("layers", error);
    const layer::Devices devices = DevicesOf(given, here);
    const int rank = int(std::find(devices.begin(), devices.end(), here) - devices.begin());
    if (rank == int(devices.size()))
      return ffi::Error::InvalidArgument("layers: expected to run on one of the devices given, got device " +
                                         std::to_string(here) + " (argument devices)");
    const std::vector<layer::Workspace>& all = layer::WorkspacesOf(*instance, slots, devices);
    const layer::Workspace& w = all[rank];
    pass.count_layers = int(n), pass.first = first, pass.last = last, pass.rows = int(count);
    pass.parents = rows.parents, pass.state = rows.state, pass.path = rows.path, pass.mark = rows.mark;
    pass.schedule = w.schedule, pass.frames = w.frames, pass.epochs = w.epochs, pass.abort = w.abort;
    pass.max_units = w.max_units, pass.rank = rank;
    pass.stamps = w.stamps, pass.error = comm::Errors(), pass.budget = w.budget;
    std::vector<uint8_t*> frames;
    for (const layer::Workspace& each : all) frames.push_back(each.frames);
    pass.exchange = comm::ExchangeOf(frames, rank, slices);
    return Launched("layers", instance->launch(pass, w.blocks, stream));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

ffi::Error Layers(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ModelAttribute model,
                  bool first, bool last, Numbers window, Numbers theta, Numbers nvfp4, Numbers tap, Numbers devices) {
  return Run(stream, args, rets, model, first, last, {window, theta, nvfp4, tap}, devices, false);
}
ffi::Error LayersLooped(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ModelAttribute model,
                        bool first, bool last, Numbers window, Numbers theta, Numbers nvfp4, Numbers tap,
                        Numbers devices) {
  return Run(stream, args, rets, model, first, last, {window, theta, nvfp4, tap}, devices, true);
}

auto Binding() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ModelAttribute>("model")
      .Attr<bool>("first")
      .Attr<bool>("last")
      .Attr<Numbers>("window")
      .Attr<Numbers>("theta")
      .Attr<Numbers>("nvfp4")
      .Attr<Numbers>("tap")
      .Attr<Numbers>("devices");
}

}  // namespace
}  // namespace musejax

XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxLayersCuda, musejax::Layers, musejax::Binding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxLayersLoopedCuda, musejax::LayersLooped, musejax::Binding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

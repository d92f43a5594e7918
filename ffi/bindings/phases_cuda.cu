// Targets of a layer's phases on CUDA: names, operands, results, attributes and checks of phases_cpu.cc, each one
// launch of layer/phases.h. Sizes are those of which there is a phases_*.cu: nano and MINI of all slices, the released
// model of one. Phases with weights, or with keys, run for so many slices; the others for any.
//
// What operands hold is not checked, for it lies in device memory: `begin` must be a block of the model's experts, and
// the ids of a row must be distinct. A wait that did not end is reported as in layers_cuda.cu.
#include "bindings/cuda.h"
#include "bindings/model.h"
#include "layer/phases.h"

namespace musejax {
namespace {

using bf16 = uint16_t;
using layer::LayerArrays;
using layer::PhaseLaunch;
using layer::PhaseParams;

// What a handler fills in, and how it ends.
struct Launcher {
  cudaStream_t stream;
  const char* operation;
  Operands io;
  Model m;
  PhaseParams p{};

  Launcher(cudaStream_t on, const char* name, PhaseLaunch phase, ffi::RemainingArgs args, ffi::RemainingRets rets,
           const ModelAttribute& attribute)
      : stream(on), operation(name), io(name, args, rets, CopyOn(on)), m(ToModel(attribute, io)) {
    p.phase = phase, p.model = m, p.count_layers = 1;
  }
  LayerArrays& arrays() { return p.layers[0]; }
  const Shape& shape() const { return m.shape; }

  void Rows(int64_t count) {
    p.rows = int(count);
    io.Require(count >= 1 && count <= kMaxRows, "rows", "1 to 16", count);
  }
  void RowState() {
    const auto [parents, state, path, mark] = TakeRowArrays(io, p.rows);
    p.parents = parents, p.state = state, p.path = path;
  }
  void Dense(int64_t slices) { arrays().dense = io.In<uint8_t>("dense", {slices, DenseLayout(shape()).bytes}); }
  void Experts(int64_t slices, int64_t experts) {
    arrays().experts = io.In<uint8_t>("experts", {slices, experts, ExpertLayout(shape(), arrays().nvfp4).bytes});
    io.Require(experts >= 1 && experts <= shape().experts, "experts", "1 to the model's experts", experts);
    p.experts = int(experts);
  }
  void Small(bool nvfp4) { arrays().small = io.In<float>("small", {SmallCount(m, nvfp4)}); }
  void Begin() { p.begin = io.In<int32_t>("begin", {}); }
  void Chosen() { p.chosen = io.In<int32_t>("ids", {p.rows, m.top_k}); }
  void Weights() { p.weights = io.In<float>("weights", {p.rows, m.top_k}); }
  // The last operands and results of their phases.
  void Keys(int64_t heads, int64_t slots, int64_t window) {
    const int64_t c = shape().head_dim;
    arrays().keys = io.InOut<bf16>("keys", {heads, slots, c});
    arrays().values = io.InOut<bf16>("values", {heads, slots, c});
    arrays().flight_keys = io.InOut<bf16>("flight_keys", {heads, kMaxRows, c});
    arrays().flight_values = io.InOut<bf16>("flight_values", {heads, kMaxRows, c});
    arrays().slots = int(slots), arrays().window = int(window);
    io.Require(slots > 0 && window <= slots, "keys", "a slot for each position of the window", slots);
  }

  // slices: of weights or heads here; 0: the phase has none.
  ffi::Error Launch(int64_t slices) {
    if (ffi::Error error = io.error(); error.failure()) return error;
    if (const std::string text = comm::ErrorText(); !text.empty()) return ffi::Error::Internal(text);
    const layer::Instance* instance = nullptr;
    for (int64_t s = slices ? slices : 1; !instance && s <= (slices ? slices : kSlices); s *= 2)
      if (instance = layer::FindInstance(m.shape, m.top_k, s); instance && !instance->launch_phase) instance = nullptr;
    io.Require(instance != nullptr, "model",
               "sizes that the library was compiled for, phase by phase: nano or MINI with 8 slices, the released model "
               "with 1",
               "hidden " + std::to_string(m.shape.hidden) + ", " + std::to_string(slices) + " slices");
    if (!io.ok()) return io.error();
    try {
      int here = 0;
      if (const cudaError_t error = cudaGetDevice(&here); error != cudaSuccess) return Launched(operation, error);
      const layer::Workspace& w = layer::WorkspacesOf(*instance, arrays().slots, {here}).front();
      p.schedule = w.schedule, p.frames = w.frames, p.epochs = w.epochs, p.abort = w.abort, p.budget = w.budget;
      p.max_units = w.max_units, p.error = comm::Errors();
      p.exchange.count = 1, p.exchange.frames[0] = w.frames;
      return Launched(operation, instance->launch_phase(p, w.blocks, stream));
    } catch (const std::exception& error) {
      return ffi::Error::Internal(error.what());
    }
  }
};

using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;

// musejax_attn_in: stream, cos_sin f32 [rows, 2, c/2] (or [0, 2, c/2]: no rotation), parents, state, path, dense,
// small, keys, values, flight_keys, flight_values -> q, gate of the heads here, and the four arrays in place.
ffi::Error AttnIn(cudaStream_t on, Args args, Rets rets, ModelAttribute model, bool nvfp4, int64_t window) {
  Launcher x(on, "attn_in", PhaseLaunch::kAttnIn, args, rets, model);
  const Shape& s = x.shape();
  const int64_t angles = x.io.Size(1, 0), slices = x.io.Size(5, 0);
  x.Rows(x.io.Size(0, 0));
  x.p.first = true, x.arrays().nvfp4 = nvfp4;
  x.p.stream = const_cast<float*>(x.io.In<float>("stream", {x.p.rows, s.hidden}));  // only read
  const float* cos_sin = x.io.In<float>("cos_sin", {angles ? x.p.rows : 0, 2, s.head_dim / 2});
  x.arrays().cos_sin = angles ? cos_sin : nullptr;
  x.RowState(), x.Dense(slices), x.Small(nvfp4);
  x.p.q = x.io.Out<bf16>("q", {slices * s.heads_slice(), x.p.rows, s.head_dim});
  x.p.gate = x.io.Out<bf16>("gate", {slices * s.heads_slice(), x.p.rows, s.head_dim});
  x.Keys(slices * s.kv_slice(), x.io.Size(7, 1), window);
  return x.Launch(slices);
}

// musejax_attention: q, gate of the heads here, parents, state, path, keys, values, flight_keys, flight_values -> o of
// the heads here; the four arrays come back unchanged, in place.
ffi::Error Attention(cudaStream_t on, Args args, Rets rets, ModelAttribute model, int64_t window) {
  Launcher x(on, "attention", PhaseLaunch::kAttention, args, rets, model);
  if (!x.io.ok()) return x.io.error();
  const Shape& s = x.shape();
  const int64_t heads = x.io.Size(0, 0), kv_heads = x.io.Size(5, 0);
  x.Rows(x.io.Size(0, 1));
  x.p.q = const_cast<bf16*>(x.io.In<bf16>("q", {heads, x.p.rows, s.head_dim}));
  x.p.gate = const_cast<bf16*>(x.io.In<bf16>("gate", {heads, x.p.rows, s.head_dim}));
  x.io.Require(heads == kv_heads * (s.heads / s.kv_heads), "q", "the heads that share the key/value heads here", heads);
  x.io.Require(kv_heads % s.kv_slice() == 0, "keys", "the heads of whole slices", kv_heads);
  x.RowState();
  x.p.out = x.io.Out<bf16>("o", {heads, x.p.rows, s.head_dim});
  x.Keys(kv_heads, x.io.Size(5, 1), window);
  return x.Launch(kv_heads / s.kv_slice());
}

// musejax_attn_out: o bf16 [heads, rows, c], dense, small -> a bf16 [slices here, rows, hidden/8].
ffi::Error AttnOut(cudaStream_t on, Args args, Rets rets, ModelAttribute model, bool nvfp4) {
  Launcher x(on, "attn_out", PhaseLaunch::kAttnOut, args, rets, model);
  const Shape& s = x.shape();
  const int64_t slices = x.io.Size(1, 0);
  x.Rows(x.io.Size(0, 1));
  x.arrays().nvfp4 = nvfp4;
  x.p.in = x.io.In<bf16>("o", {s.heads, x.p.rows, s.head_dim});
  x.Dense(slices), x.Small(nvfp4);
  x.p.out = x.io.Out<bf16>("a", {slices, x.p.rows, s.hidden_slice()});
  return x.Launch(slices);
}

// musejax_pool: stream, a [8, rows, hidden/8], dense, small -> stream with the attention branch, p [slices here, rows,
// moe_hidden/8], scores f32 [slices here, rows, experts/8].
ffi::Error Pool(cudaStream_t on, Args args, Rets rets, ModelAttribute model, bool nvfp4) {
  Launcher x(on, "pool", PhaseLaunch::kPool, args, rets, model);
  const Shape& s = x.shape();
  const int64_t slices = x.io.Size(2, 0);
  x.Rows(x.io.Size(0, 0));
  x.arrays().nvfp4 = nvfp4;
  x.p.stream = x.io.InOut<float>("stream", {x.p.rows, s.hidden});
  x.p.in = x.io.In<bf16>("a", {kSlices, x.p.rows, s.hidden_slice()});
  x.Dense(slices), x.Small(nvfp4);
  x.p.out = x.io.Out<bf16>("p", {slices, x.p.rows, s.moe_slice()});
  x.p.scores_out = x.io.Out<float>("scores", {slices, x.p.rows, s.experts_slice()});
  return x.Launch(slices);
}

// musejax_experts_up: p [8, rows, moe_hidden/8], scores [8, rows, experts/8], parents, state, path, experts, small,
// begin -> c bf16 [slices here, rows * k, moe_inner/8], ids i32 [rows, k], weights f32 [rows, k].
ffi::Error ExpertsUp(cudaStream_t on, Args args, Rets rets, ModelAttribute model, bool nvfp4) {
  Launcher x(on, "experts_up", PhaseLaunch::kExpertsUp, args, rets, model);
  const Shape& s = x.shape();
  const int64_t slices = x.io.Size(5, 0), k = x.m.top_k;
  x.Rows(x.io.Size(0, 1));
  x.arrays().nvfp4 = nvfp4;
  x.p.in = x.io.In<bf16>("p", {kSlices, x.p.rows, s.moe_slice()});
  x.p.scores = x.io.In<float>("scores", {kSlices, x.p.rows, s.experts_slice()});
  x.RowState(), x.Experts(slices, x.io.Size(5, 1)), x.Small(nvfp4), x.Begin();
  x.p.out = x.io.Out<bf16>("c", {slices, x.p.rows * k, s.inner_slice()});
  x.p.ids = x.io.Out<int32_t>("ids", {x.p.rows, k});
  x.p.weights_out = x.io.Out<float>("weights", {x.p.rows, k});
  return x.Launch(slices);
}

// musejax_experts_down: c [8, rows * k, moe_inner/8], ids, experts, small, begin -> y bf16 [slices here, rows * k,
// moe_hidden/8].
ffi::Error ExpertsDown(cudaStream_t on, Args args, Rets rets, ModelAttribute model, bool nvfp4) {
  Launcher x(on, "experts_down", PhaseLaunch::kExpertsDown, args, rets, model);
  const Shape& s = x.shape();
  const int64_t slices = x.io.Size(2, 0), k = x.m.top_k;
  x.Rows(x.io.Size(1, 0));
  x.arrays().nvfp4 = nvfp4;
  x.p.in = x.io.In<bf16>("c", {kSlices, x.p.rows * k, s.inner_slice()});
  x.Chosen(), x.Experts(slices, x.io.Size(2, 1)), x.Small(nvfp4), x.Begin();
  x.p.out = x.io.Out<bf16>("y", {slices, x.p.rows * k, s.moe_slice()});
  return x.Launch(slices);
}

// musejax_combine: y [8, rows * k, moe_hidden/8], ids, weights, small -> m bf16 [rows, moe_hidden].
ffi::Error Combine(cudaStream_t on, Args args, Rets rets, ModelAttribute model, bool nvfp4) {
  Launcher x(on, "combine", PhaseLaunch::kCombine, args, rets, model);
  const Shape& s = x.shape();
  x.Rows(x.io.Size(1, 0));
  x.arrays().nvfp4 = nvfp4;
  x.p.in = x.io.In<bf16>("y", {kSlices, x.p.rows * x.m.top_k, s.moe_slice()});
  x.Chosen(), x.Weights(), x.Small(nvfp4);
  x.p.out = x.io.Out<bf16>("m", {x.p.rows, s.moe_hidden});
  return x.Launch(0);
}

// musejax_combine_partials: y [8, rows * k, moe_hidden/8], ids, weights, small, begin -> partials bf16 [groups, rows,
// moe_hidden] of the owner groups whose experts begin at `begin`. musejax_combine_gathered: partials of all groups -> m
// bf16 [rows, moe_hidden].
ffi::Error CombinePartials(cudaStream_t on, Args args, Rets rets, ModelAttribute model, bool nvfp4, int64_t groups) {
  Launcher x(on, "combine_partials", PhaseLaunch::kCombinePartials, args, rets, model);
  const Shape& s = x.shape();
  x.Rows(x.io.Size(1, 0));
  x.io.Require(x.m.combine_groups > 0 && groups > 0 && groups <= x.m.combine_groups, "groups", "owner groups of ep(R)",
               groups);
  x.arrays().nvfp4 = nvfp4, x.p.groups = int(groups);
  x.p.in = x.io.In<bf16>("y", {kSlices, x.p.rows * x.m.top_k, s.moe_slice()});
  x.Chosen(), x.Weights(), x.Small(nvfp4), x.Begin();
  x.p.out = x.io.Out<bf16>("partials", {groups, x.p.rows, s.moe_hidden});
  return x.Launch(0);
}

ffi::Error CombineGathered(cudaStream_t on, Args args, Rets rets, ModelAttribute model) {
  Launcher x(on, "combine_gathered", PhaseLaunch::kCombineGathered, args, rets, model);
  x.Rows(x.io.Size(0, 1));
  x.p.in = x.io.In<bf16>("partials", {x.m.combine_groups, x.p.rows, x.shape().moe_hidden});
  x.p.out = x.io.Out<bf16>("m", {x.p.rows, x.shape().moe_hidden});
  return x.Launch(0);
}

// musejax_unpool: m bf16 [rows, moe_hidden], dense, small -> f bf16 [slices here, rows, hidden/8].
ffi::Error Unpool(cudaStream_t on, Args args, Rets rets, ModelAttribute model, bool nvfp4) {
  Launcher x(on, "unpool", PhaseLaunch::kUnpool, args, rets, model);
  const int64_t slices = x.io.Size(1, 0);
  x.Rows(x.io.Size(0, 0));
  x.arrays().nvfp4 = nvfp4;
  x.p.in = x.io.In<bf16>("m", {x.p.rows, x.shape().moe_hidden});
  x.Dense(slices), x.Small(nvfp4);
  x.p.out = x.io.Out<bf16>("f", {slices, x.p.rows, x.shape().hidden_slice()});
  return x.Launch(slices);
}

// musejax_add_ffn: stream, f [8, rows, hidden/8], small -> stream with the FFN branch.
ffi::Error AddFfn(cudaStream_t on, Args args, Rets rets, ModelAttribute model, bool nvfp4) {
  Launcher x(on, "add_ffn", PhaseLaunch::kAddFfn, args, rets, model);
  x.Rows(x.io.Size(0, 0));
  x.arrays().nvfp4 = nvfp4;
  x.p.stream = x.io.InOut<float>("stream", {x.p.rows, x.shape().hidden});
  x.p.in = x.io.In<bf16>("f", {kSlices, x.p.rows, x.shape().hidden_slice()});
  x.Small(nvfp4);
  return x.Launch(0);
}

}  // namespace
}  // namespace musejax

#define MUSEJAX_BIND xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets()
#define MUSEJAX_BIND_MODEL MUSEJAX_BIND.Attr<musejax::ModelAttribute>("model")
#define MUSEJAX_BIND_LAYER MUSEJAX_BIND_MODEL.Attr<bool>("nvfp4")
#define MUSEJAX_TRAITS {xla::ffi::Traits::kCmdBufferCompatible}

XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAttnInCuda, musejax::AttnIn, MUSEJAX_BIND_LAYER.Attr<int64_t>("window"),
                              MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAttentionCuda, musejax::Attention, MUSEJAX_BIND_MODEL.Attr<int64_t>("window"),
                              MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAttnOutCuda, musejax::AttnOut, MUSEJAX_BIND_LAYER, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxPoolCuda, musejax::Pool, MUSEJAX_BIND_LAYER, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxExpertsUpCuda, musejax::ExpertsUp, MUSEJAX_BIND_LAYER, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxExpertsDownCuda, musejax::ExpertsDown, MUSEJAX_BIND_LAYER, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxCombineCuda, musejax::Combine, MUSEJAX_BIND_LAYER, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxCombinePartialsCuda, musejax::CombinePartials,
                              MUSEJAX_BIND_LAYER.Attr<int64_t>("groups"), MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxCombineGatheredCuda, musejax::CombineGathered, MUSEJAX_BIND_MODEL, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxUnpoolCuda, musejax::Unpool, MUSEJAX_BIND_LAYER, MUSEJAX_TRAITS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxAddFfnCuda, musejax::AddFfn, MUSEJAX_BIND_LAYER, MUSEJAX_TRAITS);

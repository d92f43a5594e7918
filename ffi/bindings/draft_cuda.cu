// Targets of a DFlash drafter on the GPU: a whole pass, a whole commit, and the tree. Operands as on the CPU
// (draft_cpu.cc); with several devices each one's own slices and heads, and the kernels exchange what they have
// finished while they run. Those that end in _looped are for measurements: some of 8 / slices ranks, the others sending
// a rank its own slices.
//
// What operands hold is not checked, for it lies in device memory. A wait inside a kernel that did not end is reported
// by layer_error() of the module, and on one device by the next call. The layers' launches after it are refused
// (layers_cuda.cu), so that no state comes of a draft on which ranks may not agree; a commit leaves rings that may make
// later guesses worse, but no token wrong.
#include <algorithm>

#include "bindings/cuda.h"
#include "bindings/draft_model.h"
#include "comm/errors.h"
#include "draft/context.cuh"
#include "draft/draft.h"

namespace musejax {
namespace {

using bf16 = uint16_t;
using Numbers = ffi::Span<const int64_t>;
using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;

// Rings and weights of all layers, the operands from `index` on; rings updated in place, or only read.
void TakeLayers(Operands& io, draft::Launch& p, size_t index, bool in_place) {
  const DraftShape& s = p.model.shape;
  const int64_t n = io.Size(index, 0), heads = p.slices * s.kv_slice(), slots = io.Size(index, 2), c = s.head_dim;
  const auto take = [&](const char* name) {
    return in_place ? io.InOut<bf16>(name, {n, heads, slots, c})
                    : const_cast<bf16*>(io.In<bf16>(name, {n, heads, slots, c}));
  };
  bf16 *keys = take("keys"), *values = take("values");
  io.Require(slots >= 1, "keys", "at least one slot", slots);
  const char* refusal = draft::Refusal(p.model, n);
  io.Require(!*refusal, "model", std::string(refusal),
             std::to_string(n) + " layers, " + std::to_string(p.model.candidates) + " candidates, a vocabulary of " +
                 std::to_string(p.model.vocab));
  for (int64_t i = 0; i < n && io.ok(); ++i) {
    const std::string layer = "layers[" + std::to_string(i) + "].";
    p.layer[i].dense = io.In<uint8_t>(layer + "dense", {p.slices, DraftDenseLayout(s).bytes});
    p.layer[i].small = io.In<float>(layer + "small", {DraftSmallLayout(s).count});
    p.layer[i].keys = keys + i * heads * slots * c, p.layer[i].values = values + i * heads * slots * c;
  }
  p.layers = int(n), p.slots = int(slots);
}

void RequireSlices(Operands& io, int64_t slices, Numbers devices, bool looped) {
  const int64_t ranks = std::max<int64_t>(1, int64_t(devices.size()));
  io.Require(slices >= 1 && slices <= kSlices && kSlices % slices == 0, "dense", "1, 2, 4 or 8 slices", slices);
  io.Require(looped ? slices * ranks <= kSlices : slices * ranks == kSlices, "devices",
             "8 slices on all devices together", slices * ranks);
}

// Workspace, exchange and rank of this device; then launch(its blocks).
template <typename LaunchKernel>
ffi::Error OnRank(draft::Launch& p, Numbers given, const LaunchKernel& launch) {
  try {
    int here = 0;
    if (const cudaError_t error = cudaGetDevice(&here); error != cudaSuccess) return Launched("draft", error);
    const std::vector<int> devices = given.size() ? std::vector<int>(given.begin(), given.end()) : std::vector{here};
    const int rank = int(std::find(devices.begin(), devices.end(), here) - devices.begin());
    if (rank == int(devices.size()))
      return ffi::Error::InvalidArgument("draft: expected to run on one of the devices given, got device " +
                                         std::to_string(here) + " (argument devices)");
    const std::vector<draft::Workspace>& all = draft::WorkspacesOf(p.model, p.slices, p.slots, devices);
    const draft::Workspace& w = all[rank];
    std::vector<uint8_t*> frames;
    for (const draft::Workspace& each : all) frames.push_back(each.frames);
    p.exchange = comm::ExchangeOf(frames, rank, p.slices);
    p.at = draft::Frames(p.model, p.slices, p.slots);
    p.rank = rank, p.ranks = int(devices.size());
    p.passed = static_cast<comm::Passed*>(w.passed), p.abort = w.abort, p.budget = w.budget;
    p.error = comm::Errors();
    return Launched("draft", launch(w.blocks));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

ffi::Error RunDraft(cudaStream_t stream, Args args, Rets rets, DraftAttribute attribute, int64_t num_tokens,
                    Numbers devices, bool looped) {
  if (const std::string text = ReportedBefore(devices); !text.empty()) return ffi::Error::Internal(text);
  Operands io("draft", args, rets, CopyOn(stream));
  draft::DraftParams p{};
  p.model = ToModel(attribute, io);
  const DraftModel& m = p.model;
  const DraftShape& s = m.shape;
  const int64_t slices = io.Size(0, 0), rows = io.Size(0, 1), codes = s.rank ? m.vocab : 0, most = m.candidates;
  RequireSlices(io, slices, devices, looped);
  io.Require(rows >= 2 && rows <= kMaxRows, "rows", "an anchor and 1 to 15 drafted positions", rows);
  if (!io.ok()) return io.error();
  p.slices = int(slices), p.rows = int(rows);
  p.embedded = io.In<bf16>("rows", {slices, rows, s.hidden_slice()});
  p.cos_sin = io.In<float>("cos_sin", {rows, 2, s.head_dim / 2});
  p.anchor = io.In<int32_t>("anchor", {}), p.length = io.In<int32_t>("length", {});
  p.norm = io.In<float>("norm", {s.hidden});
  p.lm_head = io.In<uint8_t>("lm_head", {slices, HeadBytes(m.vocab, s.hidden)});
  p.selector = io.In<uint8_t>("selector", {slices, SelectorBytes(s)});
  p.predecessor = io.In<bf16>("predecessor", {codes, s.rank});
  p.successor = io.In<bf16>("successor", {codes, s.rank});
  TakeLayers(io, p, 9, false);
  p.num_tokens = int(std::min(num_tokens, m.vocab));
  p.tokens = io.Out<int32_t>("tokens", {rows - 1, most});
  p.scores = io.Out<float>("scores", {rows - 1, most, most});
  p.coverage = io.Out<float>("coverage", {rows - 1});
  if (ffi::Error error = io.error(); error.failure()) return error;
  return OnRank(p, devices, [&](int blocks) { return draft::LaunchDraft(p, blocks, stream); });
}

ffi::Error RunCommit(cudaStream_t stream, Args args, Rets rets, DraftAttribute attribute, Numbers devices,
                     bool looped) {
  if (const std::string text = ReportedBefore(devices); !text.empty()) return ffi::Error::Internal(text);
  Operands io("draft_commit", args, rets, CopyOn(stream));
  draft::CommitParams p{};
  p.model = ToModel(attribute, io);
  const DraftShape& s = p.model.shape;
  const int64_t rows = io.Size(0, 0), slices = io.Size(4, 0);
  RequireSlices(io, slices, devices, looped);
  io.Require(rows >= 1 && rows <= kMaxRows, "taps", "1 to 16 rows", rows);
  if (!io.ok()) return io.error();
  p.slices = int(slices), p.rows = int(rows);
  p.taps = io.In<float>("taps", {rows, s.taps_width()});
  p.cos_sin = io.In<float>("cos_sin", {rows, 2, s.head_dim / 2});
  p.start = io.In<int32_t>("start", {}), p.count = io.In<int32_t>("count", {});
  p.fc = io.In<uint8_t>("fc", {slices, FcBytes(s)});
  p.hidden_norm = io.In<float>("hidden_norm", {s.hidden});
  TakeLayers(io, p, 6, true);
  if (ffi::Error error = io.error(); error.failure()) return error;
  return OnRank(p, devices, [&](int blocks) { return draft::LaunchCommit(p, blocks, stream); });
}

ffi::Error Draft(cudaStream_t stream, Args args, Rets rets, DraftAttribute model, int64_t num_tokens, Numbers devices) {
  return RunDraft(stream, args, rets, model, num_tokens, devices, false);
}
ffi::Error DraftLooped(cudaStream_t stream, Args args, Rets rets, DraftAttribute model, int64_t num_tokens,
                       Numbers devices) {
  return RunDraft(stream, args, rets, model, num_tokens, devices, true);
}
ffi::Error Commit(cudaStream_t stream, Args args, Rets rets, DraftAttribute model, Numbers devices) {
  return RunCommit(stream, args, rets, model, devices, false);
}
ffi::Error CommitLooped(cudaStream_t stream, Args args, Rets rets, DraftAttribute model, Numbers devices) {
  return RunCommit(stream, args, rets, model, devices, true);
}

ffi::Error Tree(cudaStream_t stream, Args args, Rets rets, int64_t width, int64_t spine, float tau) {
  Operands io("draft_tree", args, rets, CopyOn(stream));
  draft::TreeParams p{};
  const int64_t positions = io.Size(1, 0), candidates = io.Size(1, 1), nodes = io.ResultSize(0, 0);
  io.Require(positions >= 1 && candidates >= 1 && candidates <= draft::kMaxCandidates, "tokens",
             "at least one position and 1 to 16 candidates", candidates);
  io.Require(nodes >= 1 && nodes <= draft::kMaxNodes, "tokens", "1 to 32 nodes", nodes);
  io.Require(width >= 1, "width", "at least 1", width);
  io.Require(spine >= 0, "spine", "0 or more", spine);
  io.Require(tau > 0.0f, "tau", "a number above 0", std::to_string(tau));
  p.anchor = io.In<int32_t>("anchor", {});
  p.tokens = io.In<int32_t>("tokens", {positions, candidates});
  p.scores = io.In<float>("scores", {positions, candidates, candidates});
  p.coverage = io.In<float>("coverage", {positions});
  p.out_tokens = io.Out<int32_t>("tokens", {nodes}), p.parents = io.Out<int32_t>("parents", {nodes});
  p.depth = io.Out<int32_t>("depth", {nodes}), p.ancestors = io.Out<int32_t>("ancestors", {nodes});
  p.cum = io.Out<float>("cum", {nodes});
  if (ffi::Error error = io.error(); error.failure()) return error;
  p.positions = int(positions), p.candidates = int(candidates), p.nodes = int(nodes);
  p.width = int(std::min<int64_t>(width, candidates)), p.spine = int(std::min<int64_t>(spine, positions)), p.tau = tau;
  return Launched("draft_tree", draft::LaunchTree(p, stream));
}

auto Binding() {
  return xla::ffi::Ffi::Bind()
      .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets();
}
auto DraftBinding() {
  return Binding().Attr<DraftAttribute>("model").Attr<int64_t>("num_tokens").Attr<Numbers>("devices");
}
auto CommitBinding() { return Binding().Attr<DraftAttribute>("model").Attr<Numbers>("devices"); }
auto TreeBinding() { return Binding().Attr<int64_t>("width").Attr<int64_t>("spine").Attr<float>("tau"); }

}  // namespace
}  // namespace musejax

#define MUSEJAX_GRAPH {xla::ffi::Traits::kCmdBufferCompatible}
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftCuda, musejax::Draft, musejax::DraftBinding(), MUSEJAX_GRAPH);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftLoopedCuda, musejax::DraftLooped, musejax::DraftBinding(), MUSEJAX_GRAPH);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftCommitCuda, musejax::Commit, musejax::CommitBinding(), MUSEJAX_GRAPH);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftCommitLoopedCuda, musejax::CommitLooped, musejax::CommitBinding(),
                              MUSEJAX_GRAPH);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftTreeCuda, musejax::Tree, musejax::TreeBinding(), MUSEJAX_GRAPH);

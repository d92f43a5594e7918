// Targets of a DFlash drafter on one CPU device, the boundary of the CUDA kernels: musejax_draft, musejax_draft_commit
// and musejax_draft_tree (cpu/draft.h). Attribute devices: on CUDA, the ordinals of those that share the drafter, each
// of which then has some of the 8 slices; none here.
#include "bindings/draft_pass.h"
#include "cpu/thread_pool.h"

namespace musejax {
namespace {

using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;
using Numbers = ffi::Span<const int64_t>;

void RequireOneDevice(Operands& io, Numbers devices) {
  io.Require(devices.size() == 0, "devices", "none on a CPU", devices.size());
}

// musejax_draft: rows bf16 [8, t, hidden/8] of the embedding, the anchor's first, cos_sin f32 [t, 2, c/2], anchor i32
// [], length i32 [] (positions in the rings), norm f32 [hidden], lm_head u8 [8, bytes], selector u8 [8, bytes],
// predecessor, successor bf16 [vocab, rank] ([0, 0] in DFlash 1), keys, values bf16 [layers, kv_heads, slots, c], then
// dense, small of each layer -> tokens i32 [q, candidates], scores f32 [q, candidates, candidates], coverage f32 [q],
// q = t - 1. Attribute num_tokens: ids from here on are no candidates.
ffi::Error DraftHandler(Args args, Rets rets, DraftAttribute attribute, int64_t num_tokens, Numbers devices) {
  Operands io("draft", args, rets);
  const DraftModel m = ToModel(attribute, io);
  RequireOneDevice(io, devices);
  if (!io.ok()) return io.error();
  const DraftShape& s = m.shape;
  const int64_t count = io.Size(0, 1), q = count - 1, most = m.candidates, codes = s.rank ? m.vocab : 0;
  io.Require(count >= 2 && count <= kMaxRows, "rows", "an anchor and 1 to 15 drafted positions", count);
  const bf16* rows = io.In<bf16>("rows", {kSlices, count, s.hidden_slice()});
  const float* cos_sin = io.In<float>("cos_sin", {count, 2, s.head_dim / 2});
  const int64_t anchor = TakeInteger(io, "anchor", 0, m.vocab - 1), length = TakeLength(io);
  DraftEnd end{};
  end.norm = io.In<float>("norm", {s.hidden});
  end.lm_head = io.In<uint8_t>("lm_head", {kSlices, HeadBytes(m.vocab, s.hidden)});
  end.selector = io.In<uint8_t>("selector", {kSlices, SelectorBytes(s)});
  end.predecessor = io.In<bf16>("predecessor", {codes, s.rank});
  end.successor = io.In<bf16>("successor", {codes, s.rank});
  const std::vector<DraftKeys> keys = TakeKeys(io, m, 9, kSlices, false);
  const std::vector<DraftWeights> layers = TakeLayers(io, m, keys.size(), kSlices);
  DraftGuesses out{};
  out.tokens = io.Out<int32_t>("tokens", {q, most});
  out.scores = io.Out<float>("scores", {q, most, most});
  out.coverage = io.Out<float>("coverage", {q});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  Draft(m, layers.data(), keys.data(), int(layers.size()), end, rows, cos_sin, int32_t(anchor), length, int(count),
        num_tokens, out);
  return ffi::Error::Success();
}

// musejax_draft_commit: taps f32 [rows, taps * hidden], cos_sin f32 [rows, 2, c/2], start i32 [] (position of row 0),
// count i32 [] (rows that matter), fc u8 [8, bytes], hidden_norm f32 [hidden], keys, values bf16 [layers, kv_heads,
// slots, c], then dense, small of each layer -> keys, values in place.
ffi::Error CommitHandler(Args args, Rets rets, DraftAttribute attribute, Numbers devices) {
  Operands io("draft_commit", args, rets);
  const DraftModel m = ToModel(attribute, io);
  RequireOneDevice(io, devices);
  if (!io.ok()) return io.error();
  const int64_t rows = io.Size(0, 0);
  RequireRows(io, "taps", rows);
  const float* taps = io.In<float>("taps", {rows, m.shape.taps_width()});
  const float* cos_sin = io.In<float>("cos_sin", {rows, 2, m.shape.head_dim / 2});
  const int64_t start = TakeInteger(io, "start", 0, INT32_MAX - kMaxRows), count = TakeInteger(io, "count", 0, rows);
  const uint8_t* fc = io.In<uint8_t>("fc", {kSlices, FcBytes(m.shape)});
  const float* norm = io.In<float>("hidden_norm", {m.shape.hidden});
  const std::vector<DraftKeys> keys = TakeKeys(io, m, 6, kSlices, true);
  const std::vector<DraftWeights> layers = TakeLayers(io, m, keys.size(), kSlices);
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftCommit(m, layers.data(), keys.data(), int(layers.size()), fc, norm, taps, cos_sin, start, int(rows),
              int(count));
  return ffi::Error::Success();
}

// musejax_draft_tree: anchor i32 [], tokens i32 [q, a], scores f32 [q, a, a], coverage f32 [q] -> tokens, parents,
// depth, ancestors i32 [nodes] (ancestors: the bits of uint32), cum f32 [nodes], 1 to 32 nodes. Attributes: width,
// children a node may have, a or more for all; spine, nodes that follow the greedy chain; tau.
ffi::Error TreeHandler(Args args, Rets rets, int64_t width, int64_t spine, float tau) {
  Operands io("draft_tree", args, rets);
  const int64_t q = io.Size(1, 0), a = io.Size(1, 1), nodes = io.ResultSize(0, 0);
  const int32_t* anchor = io.In<int32_t>("anchor", {});
  DraftTreeInput in{};
  in.depths = q, in.candidates = a;
  in.tokens = io.In<int32_t>("tokens", {q, a});
  io.Require(q >= 1 && a >= 1, "tokens", "at least one position and one candidate", q * a);
  in.scores = io.In<float>("scores", {q, a, a});
  in.coverage = io.In<float>("coverage", {q});
  io.Require(nodes >= 1 && nodes <= kMaxNodes, "nodes", "1 to 32", nodes);
  io.Require(width >= 1, "width", "at least 1", width);
  io.Require(spine >= 0, "spine", "at least 0", spine);
  io.Require(tau > 0, "tau", "a number above 0", std::to_string(tau));
  DraftTreeNodes out{};
  out.tokens = io.Out<int32_t>("tokens", {nodes});
  out.parents = io.Out<int32_t>("parents", {nodes});
  out.depth = io.Out<int32_t>("depth", {nodes});
  out.ancestors = reinterpret_cast<uint32_t*>(io.Out<int32_t>("ancestors", {nodes}));
  out.cum = io.Out<float>("cum", {nodes});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  in.anchor = *anchor;
  DraftTree(in, tau, width, spine, int(nodes), out);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace musejax

#define MUSEJAX_BIND xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets()

XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftCpu, musejax::DraftHandler,
                              MUSEJAX_BIND.Attr<musejax::DraftAttribute>("model")
                                  .Attr<int64_t>("num_tokens")
                                  .Attr<xla::ffi::Span<const int64_t>>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MusejaxDraftCommitCpu, musejax::CommitHandler,
    MUSEJAX_BIND.Attr<musejax::DraftAttribute>("model").Attr<xla::ffi::Span<const int64_t>>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftTreeCpu, musejax::TreeHandler,
                              MUSEJAX_BIND.Attr<int64_t>("width").Attr<int64_t>("spine").Attr<float>("tau"));

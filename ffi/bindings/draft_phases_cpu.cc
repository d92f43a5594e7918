// Targets of the phases of a DFlash drafter, for one CPU device of several: the functions of cpu/draft.h of the same
// names. Arrays with a slice axis have the slices (or heads) of this device as results and all of them as operands;
// weights have the slices of this device. rows: 1 to 16 of a block or of a pass; stream: bf16 [8, rows, hidden/8];
// delta: f32 [8, rows, 4 groups/8], no groups in DFlash 1; begin: i32 [], the first slice here; length: i32 [],
// positions in the rings before the block.
#include "bindings/draft_pass.h"
#include "cpu/thread_pool.h"

namespace musejax {
namespace {

using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;

const bf16* TakeStream(Operands& io, const DraftModel& m, int64_t count) {
  RequireRows(io, "stream", count);
  return io.In<bf16>("stream", {kSlices, count, m.shape.hidden_slice()});
}

const float* TakeDelta(Operands& io, const DraftModel& m, int64_t count) {
  return io.In<float>("delta", {kSlices, count, m.shape.delta_rows()});
}

int64_t TakeBegin(Operands& io, int64_t slices) { return TakeInteger(io, "begin", 0, kSlices - slices); }

// musejax_draft_fc: taps f32 [rows, taps * hidden], count i32 [] (rows that matter), fc u8 [slices here, bytes] -> ctx
// bf16 [slices here, rows, hidden/8].
ffi::Error FcHandler(Args args, Rets rets, DraftAttribute attribute) {
  Operands io("draft_fc", args, rets);
  const DraftModel m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const int64_t rows = io.Size(0, 0), slices = io.Size(2, 0);
  RequireRows(io, "taps", rows);
  const float* taps = io.In<float>("taps", {rows, m.shape.taps_width()});
  const int64_t count = TakeInteger(io, "count", 0, rows);
  const uint8_t* fc = io.In<uint8_t>("fc", {slices, FcBytes(m.shape)});
  bf16* ctx = io.Out<bf16>("ctx", {slices, rows, m.shape.hidden_slice()});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftFc(m, fc, slices, taps, int(rows), int(count), ctx);
  return ffi::Error::Success();
}

// musejax_draft_context: ctx bf16 [8, rows, hidden/8], cos_sin f32 [rows, 2, c/2], start i32 [] (position of row 0),
// count i32 [], hidden_norm f32 [hidden], keys, values bf16 [layers, heads here, slots, c], then dense, small of each
// layer -> keys, values in place.
ffi::Error ContextHandler(Args args, Rets rets, DraftAttribute attribute) {
  Operands io("draft_context", args, rets);
  const DraftModel m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const int64_t rows = io.Size(0, 1), slices = io.Size(7, 0);
  RequireRows(io, "ctx", rows);
  const bf16* ctx = io.In<bf16>("ctx", {kSlices, rows, m.shape.hidden_slice()});
  const float* cos_sin = io.In<float>("cos_sin", {rows, 2, m.shape.head_dim / 2});
  const int64_t start = TakeInteger(io, "start", 0, INT32_MAX - kMaxRows), count = TakeInteger(io, "count", 0, rows);
  const float* norm = io.In<float>("hidden_norm", {m.shape.hidden});
  const std::vector<DraftKeys> keys = TakeKeys(io, m, 5, slices, true);
  const std::vector<DraftWeights> layers = TakeLayers(io, m, keys.size(), slices);
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftContext(m, layers.data(), keys.data(), int(layers.size()), norm, ctx, cos_sin, start, int(rows), int(count));
  return ffi::Error::Success();
}

// musejax_draft_embed: rows bf16 [8, rows, hidden/8] of the embedding -> stream.
ffi::Error EmbedHandler(Args args, Rets rets, DraftAttribute attribute) {
  Operands io("draft_embed", args, rets);
  const DraftModel m = ToModel(attribute, io);
  const int64_t count = io.Size(0, 1);
  const bf16* rows = io.In<bf16>("rows", {kSlices, count, m.shape.hidden_slice()});
  bf16* stream = io.Out<bf16>("stream", {kSlices, count, m.shape.hidden_slice()});
  RequireRows(io, "rows", count);
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftEmbed(m, rows, int(count), stream);
  return ffi::Error::Success();
}

// musejax_draft_delta: stream, dense, small -> delta of the slices here. Attribute mlp: of the FFN's convolution, else
// of the attention's.
ffi::Error DeltaHandler(Args args, Rets rets, DraftAttribute attribute, bool mlp) {
  Operands io("draft_delta", args, rets);
  const DraftModel m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const int64_t count = io.Size(0, 1), slices = io.Size(1, 0);
  const bf16* stream = TakeStream(io, m, count);
  const DraftWeights w = TakeWeights(io, m, slices, 0, "");
  float* delta = io.Out<float>("delta", {slices, count, m.shape.delta_rows()});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftDelta(m, w, mlp ? Sublayer::kMlp : Sublayer::kAttention, stream, int(count), delta);
  return ffi::Error::Success();
}

// musejax_draft_attention: stream, delta, cos_sin f32 [rows, 2, c/2], length, dense, small, keys, values [layers, heads
// here, slots, c] -> o bf16 [query heads here, rows, c]. Attribute layer: whose keys.
ffi::Error AttentionHandler(Args args, Rets rets, DraftAttribute attribute, int64_t layer) {
  Operands io("draft_attention", args, rets);
  const DraftModel m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const DraftShape& s = m.shape;
  const int64_t count = io.Size(0, 1), slices = io.Size(4, 0);
  const bf16* stream = TakeStream(io, m, count);
  const float* delta = TakeDelta(io, m, count);
  const float* cos_sin = io.In<float>("cos_sin", {count, 2, s.head_dim / 2});
  const int64_t length = TakeLength(io);
  const DraftWeights w = TakeWeights(io, m, slices, 0, "");
  const std::vector<DraftKeys> keys = TakeKeys(io, m, 6, slices, false);
  io.Require(layer >= 0 && layer < io.Size(6, 0), "layer", "a layer of the rings", layer);
  bf16* o = io.Out<bf16>("o", {slices * s.heads_slice(), count, s.head_dim});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftAttention(m, w, keys[layer], stream, delta, cos_sin, length, int(count), o);
  return ffi::Error::Success();
}

// musejax_draft_attn_out: o bf16 [heads, rows, c], stream, delta, begin, dense, small -> stream after attention, the
// slices here.
ffi::Error AttnOutHandler(Args args, Rets rets, DraftAttribute attribute) {
  Operands io("draft_attn_out", args, rets);
  const DraftModel m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const DraftShape& s = m.shape;
  const int64_t count = io.Size(1, 1), slices = io.Size(4, 0);
  const bf16* o = io.In<bf16>("o", {s.heads, count, s.head_dim});
  const bf16* stream = TakeStream(io, m, count);
  const float* delta = TakeDelta(io, m, count);
  const int64_t begin = TakeBegin(io, slices);
  const DraftWeights w = TakeWeights(io, m, slices, begin, "");
  bf16* out = io.Out<bf16>("stream", {slices, count, s.hidden_slice()});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftAttnOut(m, w, o, stream, delta, int(count), out);
  return ffi::Error::Success();
}

// musejax_draft_up: stream, delta, dense, small -> act bf16 [slices here, rows, inner/8].
ffi::Error UpHandler(Args args, Rets rets, DraftAttribute attribute) {
  Operands io("draft_up", args, rets);
  const DraftModel m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const int64_t count = io.Size(0, 1), slices = io.Size(2, 0);
  const bf16* stream = TakeStream(io, m, count);
  const float* delta = TakeDelta(io, m, count);
  const DraftWeights w = TakeWeights(io, m, slices, 0, "");
  bf16* act = io.Out<bf16>("act", {slices, count, m.shape.inner_slice()});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftUp(m, w, stream, delta, int(count), act);
  return ffi::Error::Success();
}

// musejax_draft_down: act bf16 [8, rows, inner/8], stream, delta, begin, dense, small -> stream after the FFN, the
// slices here.
ffi::Error DownHandler(Args args, Rets rets, DraftAttribute attribute) {
  Operands io("draft_down", args, rets);
  const DraftModel m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const int64_t count = io.Size(1, 1), slices = io.Size(4, 0);
  const bf16* act = io.In<bf16>("act", {kSlices, count, m.shape.inner_slice()});
  const bf16* stream = TakeStream(io, m, count);
  const float* delta = TakeDelta(io, m, count);
  const int64_t begin = TakeBegin(io, slices);
  const DraftWeights w = TakeWeights(io, m, slices, begin, "");
  bf16* out = io.Out<bf16>("stream", {slices, count, m.shape.hidden_slice()});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftDown(m, w, act, stream, delta, int(count), out);
  return ffi::Error::Success();
}

// musejax_draft_head: stream, norm f32 [hidden], lm_head u8 [slices here, bytes], selector u8 [slices here, bytes],
// begin -> values f32, ids i32 [slices here, rows - 1, candidates], sums f32 [slices here, rows - 1], gate f32 [slices
// here, rows - 1, rank/8], of the rows after the anchor. Attribute num_tokens: ids from here on are no candidates.
ffi::Error HeadHandler(Args args, Rets rets, DraftAttribute attribute, int64_t num_tokens) {
  Operands io("draft_head", args, rets);
  const DraftModel m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const DraftShape& s = m.shape;
  const int64_t count = io.Size(0, 1), slices = io.Size(2, 0), rows = count - 1, most = m.candidates;
  const bf16* stream = TakeStream(io, m, count);
  io.Require(count >= 2, "stream", "an anchor and a drafted position", count);
  const float* norm = io.In<float>("norm", {s.hidden});
  const uint8_t* lm_head = io.In<uint8_t>("lm_head", {slices, HeadBytes(m.vocab, s.hidden)});
  const uint8_t* selector = io.In<uint8_t>("selector", {slices, SelectorBytes(s)});
  const int64_t begin = TakeBegin(io, slices);
  DraftTop top{};
  top.values = io.Out<float>("values", {slices, rows, most});
  top.ids = io.Out<int32_t>("ids", {slices, rows, most});
  top.sums = io.Out<float>("sums", {slices, rows});
  float* gate = io.Out<float>("gate", {slices, rows, s.rank_slice()});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftHead(m, norm, lm_head, selector, begin, slices, stream, int(count), num_tokens, top, gate);
  return ffi::Error::Success();
}

// musejax_draft_lattice: values, ids, sums, gate of all slices, predecessor, successor bf16 [vocab, rank], anchor i32
// [] -> tokens i32 [rows, candidates], scores f32 [rows, candidates, candidates], coverage f32 [rows].
ffi::Error LatticeHandler(Args args, Rets rets, DraftAttribute attribute) {
  Operands io("draft_lattice", args, rets);
  const DraftModel m = ToModel(attribute, io);
  if (!io.ok()) return io.error();
  const int64_t rows = io.Size(0, 1), most = m.candidates, rank = m.shape.rank, codes = rank ? m.vocab : 0;
  RequireRows(io, "values", rows);
  DraftTop top{};  // only read
  top.values = const_cast<float*>(io.In<float>("values", {kSlices, rows, most}));
  top.ids = const_cast<int32_t*>(io.In<int32_t>("ids", {kSlices, rows, most}));
  top.sums = const_cast<float*>(io.In<float>("sums", {kSlices, rows}));
  const float* gate = io.In<float>("gate", {kSlices, rows, m.shape.rank_slice()});
  const bf16* predecessor = io.In<bf16>("predecessor", {codes, rank});
  const bf16* successor = io.In<bf16>("successor", {codes, rank});
  const int64_t anchor = TakeInteger(io, "anchor", 0, m.vocab - 1);
  int32_t* tokens = io.Out<int32_t>("tokens", {rows, most});
  float* scores = io.Out<float>("scores", {rows, most, most});
  float* coverage = io.Out<float>("coverage", {rows});
  if (ffi::Error error = io.error(); error.failure()) return error;
  IeeeArithmetic ieee;
  DraftLattice(m, top, gate, predecessor, successor, int32_t(anchor), int(rows), tokens, scores, coverage);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace musejax

#define MUSEJAX_BIND_DRAFT xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<musejax::DraftAttribute>("model")

XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftFcCpu, musejax::FcHandler, MUSEJAX_BIND_DRAFT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftContextCpu, musejax::ContextHandler, MUSEJAX_BIND_DRAFT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftEmbedCpu, musejax::EmbedHandler, MUSEJAX_BIND_DRAFT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftDeltaCpu, musejax::DeltaHandler, MUSEJAX_BIND_DRAFT.Attr<bool>("mlp"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftAttentionCpu, musejax::AttentionHandler,
                              MUSEJAX_BIND_DRAFT.Attr<int64_t>("layer"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftAttnOutCpu, musejax::AttnOutHandler, MUSEJAX_BIND_DRAFT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftUpCpu, musejax::UpHandler, MUSEJAX_BIND_DRAFT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftDownCpu, musejax::DownHandler, MUSEJAX_BIND_DRAFT);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftHeadCpu, musejax::HeadHandler,
                              MUSEJAX_BIND_DRAFT.Attr<int64_t>("num_tokens"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxDraftLatticeCpu, musejax::LatticeHandler, MUSEJAX_BIND_DRAFT);

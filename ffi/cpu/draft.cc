// A drafter's passes on one device: the phases one after the other.
#include "cpu/draft.h"

namespace musejax {
namespace {

// All layers; stream in place.
void RunLayers(const DraftModel& m, const DraftWeights* layers, const DraftKeys* keys, int n, const float* cos_sin,
               int64_t length, int count, bf16* stream) {
  const DraftShape& s = m.shape;
  std::vector<float> delta(kSlices * count * s.delta_rows());
  std::vector<bf16> o(count * s.q_width()), act(count * s.inner), next(count * s.hidden);
  for (int i = 0; i < n; ++i) {
    const DraftWeights& w = layers[i];
    DraftDelta(m, w, Sublayer::kAttention, stream, count, delta.data());
    DraftAttention(m, w, keys[i], stream, delta.data(), cos_sin, length, count, o.data());
    DraftAttnOut(m, w, o.data(), stream, delta.data(), count, next.data());
    DraftDelta(m, w, Sublayer::kMlp, next.data(), count, delta.data());
    DraftUp(m, w, next.data(), delta.data(), count, act.data());
    DraftDown(m, w, act.data(), next.data(), delta.data(), count, stream);
  }
}

}  // namespace

void Draft(const DraftModel& m, const DraftWeights* layers, const DraftKeys* keys, int n, const DraftEnd& end,
           const bf16* rows, const float* cos_sin, int32_t anchor, int64_t length, int count, int64_t num_tokens,
           const DraftGuesses& out) {
  const int64_t q = count - 1, most = m.candidates;
  std::vector<bf16> stream(count * m.shape.hidden);
  DraftEmbed(m, rows, count, stream.data());
  RunLayers(m, layers, keys, n, cos_sin, length, count, stream.data());

  std::vector<float> values(kSlices * q * most), sums(kSlices * q), gate(q * m.shape.rank);
  std::vector<int32_t> ids(kSlices * q * most);
  const DraftTop top{values.data(), ids.data(), sums.data()};
  DraftHead(m, end.norm, end.lm_head, end.selector, 0, kSlices, stream.data(), count, num_tokens, top, gate.data());
  DraftLattice(m, top, gate.data(), end.predecessor, end.successor, anchor, int(q), out.tokens, out.scores,
               out.coverage);
}

void DraftCommit(const DraftModel& m, const DraftWeights* layers, const DraftKeys* keys, int n, const uint8_t* fc,
                 const float* hidden_norm, const float* taps, const float* cos_sin, int64_t start, int rows,
                 int count) {
  std::vector<bf16> ctx(rows * m.shape.hidden);
  DraftFc(m, fc, kSlices, taps, rows, count, ctx.data());
  DraftContext(m, layers, keys, n, hidden_norm, ctx.data(), cos_sin, start, rows, count);
}

}  // namespace musejax

#include "cpu/layer.h"

namespace musejax {
namespace {

// From the attention of a layer to its residual.
void RunLayer(const Model& m, const Layer& layer, const Rows& rows, float* stream, const bf16* q, const bf16* gate,
              int32_t* ids) {
  const Shape& s = m.shape;
  const LayerWeights& w = layer.weights;
  const int count = rows.count;
  const int64_t pairs = count * m.top_k;

  std::vector<bf16> o(count * s.q_width()), a(count * s.hidden), p(count * s.moe_hidden), c(pairs * s.moe_inner),
      y(pairs * s.moe_hidden), pooled(count * s.moe_hidden);
  std::vector<float> scores(count * s.experts), weights(pairs);

  Attention(m, layer.kv, rows, q, gate, o.data());
  AttnOut(m, w, o.data(), count, a.data());
  AddAttention(m, w.small, w.nvfp4, a.data(), count, stream);

  Pool(m, w, stream, count, p.data(), scores.data());
  Route(m, w.small, w.nvfp4, scores.data(), rows, ids, weights.data());
  ExpertsUp(m, w, p.data(), ids, count, c.data());
  ExpertsDown(m, w, c.data(), ids, count, y.data());
  Combine(m, w.small, w.nvfp4, y.data(), ids, weights.data(), count, pooled.data());
  Unpool(m, w, pooled.data(), count, a.data());
  AddFfn(m, w.small, w.nvfp4, a.data(), count, stream);
}

}  // namespace

void RunLayers(const Model& m, const Layer* layers, int n, bool first, bool last, const Rows& rows,
               const Accepted& accepted, float* stream, bf16* q, bf16* gate, int32_t* ids, float* taps) {
  const auto attn_in = [&](const Layer& layer) {
    AttnIn(m, layer.weights, stream, layer.cos_sin, rows, accepted, layer.kv, q, gate);
  };
  if (first) attn_in(layers[0]);
  for (int i = 0; i < n; ++i) {
    if (i + 1 == n && !last) break;
    RunLayer(m, layers[i], rows, stream, q, gate, ids + i * rows.count * m.top_k);
    if (layers[i].tap) taps = std::copy_n(stream, rows.count * m.shape.hidden, taps);
    if (i + 1 < n) attn_in(layers[i + 1]);
  }
}

}  // namespace musejax

// Pooler and router from the same normed rows; then the choice of experts.
#include <limits>

#include "common/math.h"
#include "cpu/phases.h"

namespace musejax {

void Pool(const Model& m, const LayerWeights& w, const float* stream, int count, bf16* p, float* scores) {
  const Shape& s = m.shape;
  const int64_t k = s.hidden, n = s.moe_slice(), experts = s.experts_slice();
  const DenseLayout at(s);
  const float* gamma = w.small + SmallLayout(s, w.nvfp4).ffn_norm;
  float* x = Scratch<float, 6>(count * k);
  float* fragments = Scratch<float, 2>(count * DenseFragment(k));
  ParallelFor(count, count * k * 16, [&](int64_t row) {
    CentredNorm(stream + row * k, gamma, k, m.rms_eps, x + row * k);
    MakeDenseFragment(x + row * k, k, fragments + row * DenseFragment(k));
  });
  DenseGemm(
      w.dense + at.pooler, at.bytes, w.slices, n, k, fragments, count,
      [&](int64_t slice, int64_t column, int row, float sum) { p[(slice * count + row) * n + column] = ToBf16(sum); });
  const Kernels& kernels = ActiveKernels();
  ParallelFor(w.slices * count, w.slices * count * experts * k * 4, [&](int64_t task) {
    float* out = scores + task * experts;
    const float* router = reinterpret_cast<const float*>(w.dense + task / count * at.bytes + at.router);
    kernels.router(router, experts, k, x + task % count * k, out);
    for (int64_t e = 0; e < experts; ++e) out[e] = Sigmoid(out[e] * m.output_multiplier);
  });
}

void Route(const Model& m, const float* small, bool nvfp4, const float* scores, const Rows& rows, int32_t* ids,
           float* weights) {
  const int64_t experts = m.shape.experts, slice = m.shape.experts_slice(), k = m.top_k;
  const float* bias = small + SmallLayout(m.shape, nvfp4).router_bias;
  for (int row = 0; row < rows.count; ++row) {
    const auto score = [&](int64_t e) { return scores[(e / slice * rows.count + row) * slice + e % slice]; };
    std::vector<float> biased(experts);
    for (int64_t e = 0; e < experts; ++e) {
      const float b = score(e) + bias[e];
      biased[e] = b == b ? b : -std::numeric_limits<float>::infinity();  // NaN ranks last
    }
    std::vector<bool> taken(experts);
    float total = 0.0f;
    for (int64_t j = 0; j < k; ++j) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e)
        if (!taken[e] && (best < 0 || biased[e] > biased[best])) best = e;  // ties stay with the lower id
      taken[best] = true;
      ids[row * k + j] = int32_t(best);
      total += weights[row * k + j] = score(best);
    }
    for (int64_t j = 0; j < k; ++j) {
      weights[row * k + j] = weights[row * k + j] / (total + m.route_eps) * m.routed_scale;
      if (row >= rows.valid) ids[row * k + j] = int32_t(experts), weights[row * k + j] = 0.0f;
    }
  }
}

}  // namespace musejax

// From expert rows back to the hidden width: post-expert norm of each slot, weighted sum in a stated order, unpooler.
#include "common/math.h"
#include "cpu/phases.h"

namespace musejax {
namespace {

// Sum over slots, in slot order, of weight * normed row, of the experts in [begin, end): sum[moe_hidden].
void WeightedSum(const Model& m, const float* gamma, const bf16* y, const int32_t* ids, const float* weights, int count,
                 int row, int64_t begin, int64_t end, float* sum) {
  const int64_t width = m.shape.moe_hidden, k = m.top_k;
  float* z = Scratch<float, 9>(width);
  std::fill_n(sum, width, 0.0f);
  for (int64_t pair = row * k; pair < (row + 1) * k; ++pair) {
    if (ids[pair] < begin || ids[pair] >= end) continue;
    GatherRow(y, kSlices, int(count * k), m.shape.moe_slice(), int(pair), z);
    for (int64_t i = 0; i < width; ++i) z[i] = RoundBf16(z[i] * RoundBf16(1.0f + gamma[i]));
    RmsNorm(z, width, kSlices, m.post_eps, z);
    for (int64_t i = 0; i < width; ++i) sum[i] += weights[pair] * z[i];
  }
}

const float* Gamma(const Model& m, const float* small, bool nvfp4) {
  return small + SmallLayout(m.shape, nvfp4).post_expert_norm;
}

}  // namespace

void CombinePartials(const Model& m, const LayerWeights& w, const bf16* y, const int32_t* ids, const float* weights,
                     int count, bf16* partials) {
  const int64_t width = m.shape.moe_hidden, size = m.shape.experts / m.combine_groups;
  const int64_t groups = w.expert_count / size;
  ParallelFor(groups * count, count * m.top_k * width * 32, [&](int64_t task) {
    float* sum = Scratch<float, 10>(width);
    const int64_t begin = w.expert_begin + task / count * size;
    WeightedSum(m, Gamma(m, w.small, w.nvfp4), y, ids, weights, count, int(task % count), begin, begin + size, sum);
    for (int64_t i = 0; i < width; ++i) partials[task * width + i] = ToBf16(sum[i]);
  });
}

void CombineGathered(const Model& m, const bf16* partials, int count, bf16* out) {
  const int64_t n = count * m.shape.moe_hidden;
  for (int64_t i = 0; i < n; ++i) {
    float total = 0.0f;
    for (int64_t g = 0; g < m.combine_groups; ++g) total += FromBf16(partials[g * n + i]);
    out[i] = ToBf16(total);
  }
}

void Combine(const Model& m, const float* small, bool nvfp4, const bf16* y, const int32_t* ids, const float* weights,
             int count, bf16* out) {
  const int64_t width = m.shape.moe_hidden, groups = m.combine_groups ? m.combine_groups : 1;
  const int64_t size = m.shape.experts / groups;
  ParallelFor(count, count * m.top_k * width * 32, [&](int64_t row) {
    float* sum = Scratch<float, 10>(2 * width);
    float* total = sum + width;
    std::fill_n(total, width, 0.0f);
    for (int64_t g = 0; g < groups; ++g) {
      WeightedSum(m, Gamma(m, small, nvfp4), y, ids, weights, count, int(row), g * size, (g + 1) * size, sum);
      if (m.combine_groups) RoundRow(sum, width);
      for (int64_t i = 0; i < width; ++i) total[i] += sum[i];
    }
    for (int64_t i = 0; i < width; ++i) out[row * width + i] = ToBf16(total[i]);
  });
}

void Unpool(const Model& m, const LayerWeights& w, const bf16* in, int count, bf16* f) {
  const Shape& s = m.shape;
  const int64_t k = s.moe_hidden, n = s.hidden_slice();
  float* fragments = Scratch<float, 2>(count * DenseFragment(k));
  for (int row = 0; row < count; ++row) {
    float* x = Scratch<float, 3>(k);
    GatherRow(in, 1, count, k, row, x);
    MakeDenseFragment(x, k, fragments + row * DenseFragment(k));
  }
  DenseGemm(
      w.dense + DenseLayout(s).unpooler, DenseLayout(s).bytes, w.slices, n, k, fragments, count,
      [&](int64_t slice, int64_t column, int row, float sum) { f[(slice * count + row) * n + column] = ToBf16(sum); });
}

}  // namespace musejax

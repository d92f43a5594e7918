// Out of attention: the output projection.
#include "common/math.h"
#include "cpu/phases.h"

namespace musejax {

void AttnOut(const Model& m, const LayerWeights& w, const bf16* o, int count, bf16* a) {
  const Shape& s = m.shape;
  const int64_t k = s.q_width(), n = s.hidden_slice();
  float* fragments = Scratch<float, 2>(count * DenseFragment(k));
  ParallelFor(count, count * k * 16, [&](int64_t row) {
    float* x = Scratch<float, 3>(k);
    GatherRow(o, s.heads, count, s.head_dim, int(row), x);
    MakeDenseFragment(x, k, fragments + row * DenseFragment(k));
  });
  DenseGemm(
      w.dense + DenseLayout(s).out, DenseLayout(s).bytes, w.slices, n, k, fragments, count,
      [&](int64_t slice, int64_t column, int row, float sum) { a[(slice * count + row) * n + column] = ToBf16(sum); });
}

}  // namespace musejax

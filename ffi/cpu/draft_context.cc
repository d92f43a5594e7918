// Context of a drafter: tapped features of committed positions -> keys and values of every layer, into the rings.
#include "common/math.h"
#include "cpu/draft.h"

namespace musejax {

void DraftFc(const DraftModel& m, const uint8_t* fc, int64_t slices, const float* taps, int rows, int count,
             bf16* ctx) {
  const DraftShape& s = m.shape;
  const int64_t k = s.taps_width(), n = s.hidden_slice();
  float *columns = Aligned<20>(k * kMaxRows), *rounded = Scratch<float, 21>(count * k);
  for (int64_t i = 0; i < count * k; ++i) rounded[i] = RoundBf16(taps[i]);
  ActiveDraftKernels().columns(rounded, count, k, columns);
  std::fill_n(ctx, slices * rows * n, bf16(0));
  if (!count) return;
  DraftGemm(fc, FcBytes(s), slices, n, 0, n, k, columns, count,
            [&](int64_t slice, int64_t column, int row, const float* sums, int64_t some) {
              for (int64_t i = 0; i < some; ++i) ctx[(slice * rows + row) * n + column + i] = ToBf16(sums[i]);
            });
}

void DraftContext(const DraftModel& m, const DraftWeights* layers, const DraftKeys* keys, int n,
                  const float* hidden_norm, const bf16* ctx, const float* cos_sin, int64_t start, int rows, int count) {
  if (!count) return;
  const DraftShape& s = m.shape;
  const DraftDenseLayout at(s);
  const DraftSmallLayout small(s);
  const int64_t c = s.head_dim, k = s.hidden, width = 2 * s.kv_rows(), groups = s.kv_slice();
  float *columns = Aligned<20>(k * kMaxRows), *x = Scratch<float, 21>(count * k);
  for (int row = 0; row < count; ++row) DraftNorm(m, ctx, hidden_norm, rows, row, x + row * k);
  ActiveDraftKernels().columns(x, count, k, columns);
  for (int i = 0; i < n; ++i) {
    const DraftWeights& w = layers[i];
    const DraftKeys& kv = keys[i];
    float* kv_rows = Scratch<float, 22>(w.slices * count * width);  // [slices][rows][k | v]
    DraftGemm(w.dense + at.qkv, at.bytes, w.slices, s.qkv_rows(), s.q_rows(), width, k, columns, count,
              DraftRows(kv_rows, count, width));
    const int64_t first = std::max<int64_t>(0, count - kv.slots);
    ParallelFor(w.slices * count, w.slices * count * width * 16, [&](int64_t task) {
      const int64_t slice = task / count, row = task % count, slot = (start + row) % kv.slots;
      if (row < first) return;
      const float* x = kv_rows + task * width;
      for (int64_t h = 0; h < groups; ++h) {
        const int64_t to = ((slice * groups + h) * kv.slots + slot) * c;
        float key[kMaxHeadDim];
        DraftTurn(m, x + h * c, w.small + small.k_norm, cos_sin + row * c, key);
        for (int64_t j = 0; j < c; ++j) kv.keys[to + j] = ToBf16(key[j]);
        for (int64_t j = 0; j < c; ++j) kv.values[to + j] = ToBf16(x[(groups + h) * c + j]);
      }
    });
  }
}

}  // namespace musejax

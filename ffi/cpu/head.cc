// The end of a pass: final norm, LM head, the largest logits, and log-probabilities in float32.
#include <limits>

#include "common/math.h"
#include "cpu/phases.h"

namespace musejax {

void Head(const Model& m, const float* stream, const bf16* final_norm, const uint8_t* lm_head, int64_t slices,
          int count, float* raw) {
  const int64_t k = m.shape.hidden, n = m.vocab / kSlices;
  float* fragments = Scratch<float, 2>(count * DenseFragment(k));
  ParallelFor(count, count * k * 16, [&](int64_t row) {
    float* x = Scratch<float, 3>(k);
    for (int64_t i = 0; i < k; ++i) x[i] = RoundBf16(stream[row * k + i]);
    RmsNorm(x, k, kSlices, m.rms_eps, x);
    for (int64_t i = 0; i < k; ++i) x[i] = RoundBf16(x[i] * FromBf16(final_norm[i]));  // a plain gain: no 1 +
    MakeDenseFragment(x, k, fragments + row * DenseFragment(k));
  });
  DenseGemm(lm_head, HeadBytes(m.vocab, k), slices, n, k, fragments, count,
            [&](int64_t slice, int64_t column, int row, float sum) { raw[(slice * count + row) * n + column] = sum; });
}

void HeadTop(const Model& m, const float* raw, int64_t slice_begin, int64_t slices, int count, int64_t num_tokens,
             int64_t top, float* values, int32_t* ids) {
  const int64_t n = m.vocab / kSlices;
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  ParallelFor(slices * count, slices * count * n * 4, [&](int64_t task) {
    const int64_t first = (slice_begin + task / count) * n;
    const float* x = raw + task * n;
    float* best = values + task * top;
    int32_t* id = ids + task * top;
    int64_t found = 0;
    for (int64_t i = 0; i < n && first + i < num_tokens; ++i) {
      const float v = x[i] == x[i] ? x[i] : kNone;
      if (found == top && !(v > best[top - 1])) continue;  // an earlier, lower id stays ahead of an equal one
      int64_t at = found < top ? found++ : top - 1;
      for (; at > 0 && v > best[at - 1]; --at) best[at] = best[at - 1], id[at] = id[at - 1];
      best[at] = v, id[at] = int32_t(first + i);
    }
    for (; found < top; ++found) best[found] = kNone, id[found] = int32_t(m.vocab);
  });
}

float Softcap(const Model& m, float raw) { return m.softcap * Tanh(raw * m.output_multiplier / m.softcap); }

void HeadSums(const Model& m, const float* raw, const float* largest, int64_t slice_begin, int64_t slices, int count,
              int64_t num_tokens, float* sums) {
  const int64_t n = m.vocab / kSlices;
  ParallelFor(slices * count, slices * count * n * 32, [&](int64_t task) {
    const int64_t first = (slice_begin + task / count) * n;
    float* terms = Scratch<float, 11>(n);
    const float top = Softcap(m, largest[task % count]);
    for (int64_t i = 0; i < n; ++i) terms[i] = first + i < num_tokens ? Exp(Softcap(m, raw[task * n + i]) - top) : 0.0f;
    sums[task] = TreeSum(terms, n);
  });
}

float LogProbability(const Model& m, float raw, float largest, const float* sums, int64_t stride) {
  float total = 0.0f;
  for (int64_t s = 0; s < kSlices; ++s) total += sums[s * stride];
  return Softcap(m, raw) - Softcap(m, largest) - Log(total);
}

}  // namespace musejax

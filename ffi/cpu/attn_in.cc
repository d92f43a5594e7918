// Into attention: accepted rows to the cache, norm, QKV and gate projection, QK norm, rotary, keys and values in
// flight.
#include <cstring>

#include "common/math.h"
#include "cpu/phases.h"

namespace musejax {
namespace {

void StoreAccepted(const Rows& rows, const Accepted& accepted, int64_t c, const LayerKeys& kv) {
  for (int64_t h = 0; h < kv.heads; ++h)
    for (int i = 0; i < accepted.count; ++i) {
      const int64_t from = (h * kMaxRows + accepted.path[i]) * c;
      const int64_t to = (h * kv.slots + (rows.length - accepted.count + i) % kv.slots) * c;
      memcpy(kv.keys + to, kv.flight_keys + from, c * sizeof(bf16));
      memcpy(kv.values + to, kv.flight_values + from, c * sizeof(bf16));
    }
}

// r(rms(x)), then rotated: pairs (i, i + c / 2).
void NormAndRotate(const Model& m, const float* x, const float* cos_sin, bf16* out) {
  const int64_t c = m.shape.head_dim, half = c / 2;
  float y[256];
  RmsNorm(x, c, 1, m.rms_eps, y);
  RoundRow(y, c);
  for (int64_t i = 0; i < half && cos_sin; ++i) {
    const float cosine = cos_sin[i], sine = cos_sin[half + i], a = y[i], b = y[half + i];
    y[i] = fmaf(a, cosine, -(b * sine));
    y[half + i] = fmaf(b, cosine, a * sine);
  }
  for (int64_t i = 0; i < c; ++i) out[i] = ToBf16(y[i]);
}

}  // namespace

void AttnIn(const Model& m, const LayerWeights& w, const float* stream, const float* cos_sin, const Rows& rows,
            const Accepted& accepted, const LayerKeys& kv, bf16* q, bf16* gate) {
  const Shape& s = m.shape;
  const int64_t c = s.head_dim, width = s.qkvg_rows(), heads = s.heads_slice(), groups = s.kv_slice();
  const int count = rows.count;
  StoreAccepted(rows, accepted, c, kv);

  const float* gamma = w.small + SmallLayout(s, w.nvfp4).input_norm;
  float* fragments = Scratch<float, 2>(count * DenseFragment(s.hidden));
  ParallelFor(count, count * s.hidden * 16, [&](int64_t row) {
    float* x = Scratch<float, 3>(s.hidden);
    CentredNorm(stream + row * s.hidden, gamma, s.hidden, m.rms_eps, x);
    MakeDenseFragment(x, s.hidden, fragments + row * DenseFragment(s.hidden));
  });
  float* qkvg = Scratch<float, 4>(w.slices * count * width);  // [slices][rows][q | k | v | gate]
  DenseGemm(w.dense + DenseLayout(s).qkvg, DenseLayout(s).bytes, w.slices, width, s.hidden, fragments, count,
            [&](int64_t slice, int64_t column, int row, float sum) {
              qkvg[(slice * count + row) * width + column] = RoundBf16(sum);
            });

  ParallelFor(w.slices * count, w.slices * count * width * 16, [&](int64_t task) {
    const int64_t slice = task / count, row = task % count;
    const float* x = qkvg + task * width;
    const float* angles = cos_sin ? cos_sin + row * c : nullptr;
    for (int64_t h = 0; h < heads; ++h, x += c)
      NormAndRotate(m, x, angles, q + ((slice * heads + h) * count + row) * c);
    for (int64_t h = 0; h < groups; ++h, x += c)
      if (row < rows.valid) NormAndRotate(m, x, angles, kv.flight_keys + ((slice * groups + h) * kMaxRows + row) * c);
    for (int64_t h = 0; h < groups; ++h, x += c)
      for (int64_t i = 0; i < c && row < rows.valid; ++i)
        kv.flight_values[((slice * groups + h) * kMaxRows + row) * c + i] = ToBf16(x[i]);
    for (int64_t h = 0; h < heads; ++h, x += c)
      for (int64_t i = 0; i < c; ++i) gate[((slice * heads + h) * count + row) * c + i] = ToBf16(x[i]);
  });
}

}  // namespace musejax

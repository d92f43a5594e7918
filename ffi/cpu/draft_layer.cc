// The block through a drafter layer, but for attention: embedding, norms, convolutions and their coefficients, output
// projections with the residual, FFN.
#include "common/math.h"
#include "cpu/draft.h"

namespace musejax {
namespace {

int64_t BaseOf(const DraftShape& s, Sublayer which, int side) {
  const DraftSmallLayout at(s);
  return (which == Sublayer::kAttention ? at.attention_conv : at.mlp_conv) + side * kConvTaps * s.hidden;
}

// Convolution of one side over the columns of one slice of a row; delta of all slices, before null: zeros.
void Convolve(const DraftShape& s, const float* base, const float* delta, int64_t slice, int side, int count,
              int64_t row, const float* x, const float* before, float* out) {
  const int64_t n = s.hidden_slice(), groups = s.groups_slice(), group = n / groups;
  const float* of_row = delta + (slice * count + row) * s.delta_rows() + side * kConvTaps * groups;
  float* spread = Scratch<float, 29>(kConvTaps * n);  // a coefficient for each column
  for (int64_t i = 0; i < kConvTaps * groups; ++i) std::fill_n(spread + i * group, group, of_row[i]);
  ActiveDraftKernels().two_taps(base + slice * n, s.hidden, spread, x, before, n, out);
}

// The end of a sublayer: y = r(x W^T), convolution side 1, stream + it. x gathered, `parts` parts of k / parts columns.
void Project(const DraftModel& m, const DraftWeights& w, Sublayer which, int64_t section, const bf16* x, int64_t parts,
             int64_t k, const bf16* stream, const float* delta, int count, bf16* out) {
  const DraftShape& s = m.shape;
  const int64_t n = s.hidden_slice();
  float *columns = Aligned<20>(k * kMaxRows), *rows = Scratch<float, 21>(count * k);
  for (int row = 0; row < count; ++row) GatherRow(x, parts, count, k / parts, row, rows + row * k);
  ActiveDraftKernels().columns(rows, count, k, columns);
  float* y = Scratch<float, 22>(w.slices * count * n);  // [slices][rows][columns]
  DraftGemm(w.dense + section, DraftDenseLayout(s).bytes, w.slices, n, 0, n, k, columns, count,
            [&](int64_t slice, int64_t column, int row, const float* sums, int64_t some) {
              float* to = y + (slice * count + row) * n + column;
              for (int64_t i = 0; i < some; ++i) to[i] = RoundBf16(sums[i]);
            });
  ParallelFor(w.slices * count, w.slices * count * n * 16, [&](int64_t task) {
    const int64_t slice = w.begin + task / count, row = task % count;
    float* z = Scratch<float, 23>(n);
    const float* own = y + task * n;
    if (s.conv_groups)
      Convolve(s, w.small + BaseOf(s, which, 1), delta, slice, 1, count, row, own, row ? own - n : nullptr, z);
    const float* branch = s.conv_groups ? z : own;
    const bf16* before = stream + (slice * count + row) * n;
    for (int64_t i = 0; i < n; ++i) out[task * n + i] = ToBf16(FromBf16(before[i]) + branch[i]);
  });
}

}  // namespace

void DraftEmbed(const DraftModel& m, const bf16* rows, int count, bf16* stream) {
  for (int64_t i = 0; i < count * m.shape.hidden; ++i) stream[i] = ToBf16(FromBf16(rows[i]) * m.embedding_scale);
}

void DraftNorm(const DraftModel& m, const bf16* x, const float* gamma, int rows, int row, float* out) {
  const int64_t width = m.shape.hidden;
  GatherRow(x, kSlices, rows, m.shape.hidden_slice(), row, out);
  ActiveDraftKernels().norm(out, gamma, width, kSlices, m.eps, true, out);
}

void DraftDelta(const DraftModel& m, const DraftWeights& w, Sublayer which, const bf16* stream, int count,
                float* delta) {
  const DraftShape& s = m.shape;
  if (!s.conv_groups) return;
  const int64_t k = s.hidden, n = s.delta_rows();
  const DraftDenseLayout at(s);
  const DraftSmallLayout small(s);
  const bool first = which == Sublayer::kAttention;
  float *columns = Aligned<20>(k * kMaxRows), *rows = Scratch<float, 21>(count * k);
  ParallelFor(count, count * k * 32, [&](int64_t row) {
    DraftNorm(m, stream, w.small + (first ? small.input_norm : small.post_norm), count, int(row), rows + row * k);
  });
  ActiveDraftKernels().columns(rows, count, k, columns);
  DraftGemm(w.dense + (first ? at.attention_conv : at.mlp_conv), at.bytes, w.slices, n, 0, n, k, columns, count,
            DraftRows(delta, count, n));
}

void DraftInput(const DraftModel& m, const DraftWeights& w, Sublayer which, const bf16* stream, const float* delta,
                int count, float* columns) {
  const DraftShape& s = m.shape;
  const int64_t width = s.hidden, n = s.hidden_slice();
  const DraftSmallLayout small(s);
  const float* gamma = w.small + (which == Sublayer::kAttention ? small.input_norm : small.post_norm);
  float *x = Scratch<float, 24>(count * width), *u = Scratch<float, 21>(count * width);
  ParallelFor(count, count * width * 32,
              [&](int64_t row) { DraftNorm(m, stream, gamma, count, int(row), x + row * width); });
  if (s.conv_groups)
    ParallelFor(count, count * width * 32, [&](int64_t row) {
      const float *own = x + row * width, *before = row ? own - width : nullptr;
      for (int64_t slice = 0; slice < kSlices; ++slice)
        Convolve(s, w.small + BaseOf(s, which, 0), delta, slice, 0, count, row, own + slice * n,
                 before ? before + slice * n : nullptr, u + row * width + slice * n);
    });
  ActiveDraftKernels().columns(s.conv_groups ? u : x, count, width, columns);
}

void DraftAttnOut(const DraftModel& m, const DraftWeights& w, const bf16* o, const bf16* stream, const float* delta,
                  int count, bf16* out) {
  const DraftShape& s = m.shape;
  Project(m, w, Sublayer::kAttention, DraftDenseLayout(s).out, o, s.heads, s.q_width(), stream, delta, count, out);
}

void DraftUp(const DraftModel& m, const DraftWeights& w, const bf16* stream, const float* delta, int count, bf16* act) {
  const DraftShape& s = m.shape;
  const DraftDenseLayout at(s);
  const int64_t k = s.hidden, n = s.inner_slice(), size = w.slices * count * n;
  float* columns = Aligned<20>(k * kMaxRows);
  DraftInput(m, w, Sublayer::kMlp, stream, delta, count, columns);
  float* gate = Scratch<float, 22>(2 * size);  // [slices][rows][columns], then up
  float* up = gate + size;
  DraftGemm(w.dense + at.gate_up, at.bytes, w.slices, 2 * n, 0, 2 * n, k, columns, count,
            [&](int64_t slice, int64_t column, int row, const float* sums, int64_t) {
              const int64_t first = (slice * count + row) * n + column / 2;
              std::copy_n(sums, 8, gate + first), std::copy_n(sums + 8, 8, up + first);
            });
  const Kernels& kernels = ActiveKernels();
  ParallelFor(w.slices * count, size * 32, [&](int64_t task) {
    float* x = gate + task * n;
    kernels.swiglu(x, up + task * n, n, x);
    for (int64_t i = 0; i < n; ++i) act[task * n + i] = ToBf16(x[i]);
  });
}

void DraftDown(const DraftModel& m, const DraftWeights& w, const bf16* act, const bf16* stream, const float* delta,
               int count, bf16* out) {
  const DraftShape& s = m.shape;
  Project(m, w, Sublayer::kMlp, DraftDenseLayout(s).down, act, kSlices, s.inner, stream, delta, count, out);
}

}  // namespace musejax

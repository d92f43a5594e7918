// Norms and residual gates: the arithmetic between GEMMs that is per row.
#include "common/math.h"
#include "cpu/phases.h"
#include "cpu/thread_pool.h"

namespace musejax {
namespace {

float TreeOf16(const float* x) {
  float v[8];
  for (int i = 0; i < 8; ++i) v[i] = x[i] + x[i + 8];
  for (int half = 4; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
  return v[0];
}

}  // namespace

float TreeSum(const float* x, int64_t width) {
  float total = 0.0f;
  for (int64_t leaf = 0; leaf < width; leaf += kLeaf) {
    float sum = 0.0f;
    for (int64_t i = leaf; i < leaf + kLeaf && i < width; i += 16) {
      float group[16] = {};
      for (int64_t j = 0; j < 16 && i + j < width; ++j) group[j] = x[i + j];
      sum += TreeOf16(group);
    }
    total += sum;
  }
  return total;
}

float SumOfSquares(const float* x, int64_t width, int64_t slices) {
  float* squares = Scratch<float, 0>(width);
  const int64_t slice = width / slices;
  for (int64_t i = 0; i < width; ++i) squares[i] = x[i] * x[i];
  float total = 0.0f;
  for (int64_t s = 0; s < slices; ++s) total += TreeSum(squares + s * slice, slice);
  return total;
}

void RmsNorm(const float* x, int64_t width, int64_t slices, float eps, float* y) {
  const float mean = SumOfSquares(x, width, slices) / float(width);
  const float scale = 1.0f / sqrtf(mean + eps);
  for (int64_t i = 0; i < width; ++i) y[i] = x[i] * scale;
}

void CentredNorm(const float* x, const float* gamma, int64_t width, float eps, float* y) {
  RmsNorm(x, width, kSlices, eps, y);
  for (int64_t i = 0; i < width; ++i) y[i] = RoundBf16(y[i] * RoundBf16(1.0f + gamma[i]));
}

void GatherRow(const bf16* x, int64_t slices, int count, int64_t width, int row, float* out) {
  for (int64_t s = 0; s < slices; ++s)
    for (int64_t i = 0; i < width; ++i) out[s * width + i] = FromBf16(x[(s * count + row) * width + i]);
}

void RoundRow(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = RoundBf16(x[i]);
}

void EmbedNorm(const Model& m, const bf16* rows, int count, float* stream) {
  const int64_t width = m.shape.hidden;
  ParallelFor(count, count * width * 16, [&](int64_t row) {
    float* out = stream + row * width;
    GatherRow(rows, kSlices, count, m.shape.hidden_slice(), int(row), out);
    RmsNorm(out, width, kSlices, m.rms_eps, out);
    RoundRow(out, width);
  });
}

namespace {

// S = alpha S + beta r(n); alpha and beta from the published gate.
void GatedResidual(const Model& m, const float* gate, const float* n, float* stream) {
  for (int64_t i = 0; i < m.shape.hidden; ++i) {
    const float u = gate[i] / m.gate_temperature;
    const float beta = Sigmoid(u), square = Sigmoid(-u) * (1.0f + beta);
    const float alpha = sqrtf(square < m.gate_floor ? m.gate_floor : square);
    stream[i] = fmaf(alpha, stream[i], beta * RoundBf16(n[i]));
  }
}

void AddBranch(const Model& m, const float* gate, const float* gamma, const bf16* branch, int count, float* stream) {
  const int64_t width = m.shape.hidden;
  ParallelFor(count, count * width * 64, [&](int64_t row) {
    float* n = Scratch<float, 1>(width);
    GatherRow(branch, kSlices, count, m.shape.hidden_slice(), int(row), n);
    if (gamma)
      for (int64_t i = 0; i < width; ++i) n[i] = RoundBf16(n[i] * RoundBf16(1.0f + gamma[i]));
    RmsNorm(n, width, kSlices, m.post_eps, n);
    GatedResidual(m, gate, n, stream + row * width);
  });
}

}  // namespace

void AddAttention(const Model& m, const float* small, bool nvfp4, const bf16* a, int count, float* stream) {
  AddBranch(m, small + SmallLayout(m.shape, nvfp4).attention_residual_gate, nullptr, a, count, stream);
}

void AddFfn(const Model& m, const float* small, bool nvfp4, const bf16* f, int count, float* stream) {
  const SmallLayout at(m.shape, nvfp4);
  AddBranch(m, small + at.ffn_residual_gate, small + at.post_ffn_norm, f, count, stream);
}

}  // namespace musejax

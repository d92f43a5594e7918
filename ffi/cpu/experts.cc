// Routed experts: GEMM1 with SwiGLU and, if wanted, quantisation; GEMM2. A task is one 16-row tile of one expert's
// slice times all rows that chose the expert, so each weight is read once.
#include "common/math.h"
#include "cpu/phases.h"
#include "cpu/quantize.h"

namespace musejax {
namespace {

// A (row, slot) that chose an expert.
struct Hit {
  int32_t expert;
  std::vector<int32_t> pairs;  // row * top_k + slot, ascending
};

// Experts chosen by some row and present here, ascending; more than 16 pairs of one (ids that repeat) come as several.
std::vector<Hit> HitsOf(const Model& m, const LayerWeights& w, const int32_t* ids, int count) {
  std::vector<Hit> hits;
  for (int64_t e = w.expert_begin; e < w.expert_begin + w.expert_count; ++e)
    for (int64_t pair = 0; pair < count * m.top_k; ++pair) {
      if (ids[pair] != e) continue;
      if (hits.empty() || hits.back().expert != e || hits.back().pairs.size() == kMaxRows)
        hits.push_back({int32_t(e), {}});
      hits.back().pairs.push_back(int32_t(pair));
    }
  return hits;
}

// All tiles of one matrix of all hit experts. `finish(slice, tile, expert, pair, sums of the 16 tile rows)`.
template <typename Finish>
void ExpertGemm(const Model& m, const LayerWeights& w, const std::vector<Hit>& hits, bool up,
                const float* const* fragments, const Finish& finish) {
  const ExpertLayout at(m.shape, w.nvfp4);
  const int64_t k = up ? m.shape.moe_hidden : m.shape.moe_inner;
  const int64_t tiles = (up ? 2 * m.shape.inner_slice() : m.shape.moe_slice()) / kTile;
  const int64_t tile_bytes = w.nvfp4 ? Nvfp4TileBytes(k) : Bf16Bytes(kTile, k);
  const Kernels& kernels = ActiveKernels();
  const int64_t tasks = int64_t(hits.size()) * w.slices * tiles;
  ParallelFor(tasks, tasks * tile_bytes, [&](int64_t task) {
    const Hit& hit = hits[task / (w.slices * tiles)];
    const int64_t slice = task / tiles % w.slices, tile = task % tiles;
    const uint8_t* expert = w.experts + (slice * w.expert_count + hit.expert - w.expert_begin) * at.bytes;
    const uint8_t* weights = expert + (up ? at.gate_up : at.down) + tile * tile_bytes;
    const float* x[kMaxRows];
    const int n = int(hit.pairs.size());
    for (int i = 0; i < n; ++i) x[i] = fragments[hit.pairs[i]];
    float sums[kMaxRows * kTile];
    if (w.nvfp4)
      kernels.nvfp4_tile(weights, k, x, n, sums);
    else
      kernels.bf16_tile(weights, kTile * Chunk(k) * 2, k, x, n, sums);
    for (int i = 0; i < n; ++i) finish(slice, tile, hit.expert, hit.pairs[i], sums + i * kTile);
  });
}

// What a GEMM of an NVFP4 expert multiplies, in place of the row x of n values; returns the factor of its accumulators.
float QuantizeRow(Activations mode, float input_scale, int64_t n, float* x) {
  if (mode == Activations::kBf16) return 1.0f;
  if (mode == Activations::kStatic) {
    QuantizeBlocks(x, n, 1.0f / input_scale, x);
    return input_scale;
  }
  const RowScale scale = PerTokenScale(x, n);
  if (scale.dead)
    std::fill_n(x, n, 0.0f);
  else
    QuantizeBlocks(x, n, scale.encode, x);
  return scale.decode;
}

void MakeFragment(bool nvfp4, const float* x, int64_t k, float* fragment) {
  nvfp4 ? MakeNvfp4Fragment(x, k, fragment) : MakeDenseFragment(x, k, fragment);
}

float MaxOf(const float* x, int64_t n) {
  float most = x[0];
  for (int64_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

}  // namespace

void ExpertsUp(const Model& m, const LayerWeights& w, const bf16* p, const int32_t* ids, int count, bf16* c) {
  const Shape& s = m.shape;
  const SmallLayout at(s, w.nvfp4);
  const int64_t k = s.moe_hidden, width = s.inner_slice(), pairs = count * m.top_k;
  const bool is_static = w.nvfp4 && m.activations == Activations::kStatic;
  // Input scales are one number a layer: the largest over experts, as engines do.
  const float in = is_static ? MaxOf(w.small + at.gate_up_input_scale, 2 * s.experts) : 1.0f;
  const float out = is_static ? MaxOf(w.small + at.down_input_scale, s.experts) : 1.0f;

  float* fragments = Scratch<float, 2>(count * DenseFragment(k));
  float factor[kMaxRows];
  ParallelFor(count, count * k * 32, [&](int64_t row) {
    float* h = Scratch<float, 3>(k);
    GatherRow(p, kSlices, count, s.moe_slice(), int(row), h);
    CentredNorm(h, w.small + at.expert_norm, k, m.rms_eps, h);
    factor[row] = w.nvfp4 ? QuantizeRow(m.activations, in, k, h) : 1.0f;
    MakeFragment(w.nvfp4, h, k, fragments + row * DenseFragment(k));
  });
  std::vector<const float*> x(pairs);
  for (int64_t pair = 0; pair < pairs; ++pair) x[pair] = fragments + pair / m.top_k * DenseFragment(k);

  // A tile holds 8 gate rows and the 8 up rows that belong to them.
  float* gate = Scratch<float, 7>(2 * w.slices * pairs * width);
  float* up = gate + w.slices * pairs * width;
  const std::vector<Hit> hits = HitsOf(m, w, ids, count);
  ExpertGemm(m, w, hits, true, x.data(),
             [&](int64_t slice, int64_t tile, int64_t expert, int64_t pair, const float* sums) {
               const float* global = w.small + at.gate_up_global + 2 * expert;
               const float d = factor[pair / m.top_k];
               const float of_gate = w.nvfp4 ? d * global[0] : 1.0f, of_up = w.nvfp4 ? d * global[1] : 1.0f;
               const int64_t first = (slice * pairs + pair) * width + tile * 8;
               for (int i = 0; i < 8; ++i) gate[first + i] = sums[i] * of_gate, up[first + i] = sums[8 + i] * of_up;
             });

  std::vector<bool> here(pairs);
  for (const Hit& hit : hits)
    for (int32_t pair : hit.pairs) here[pair] = true;
  const Kernels& kernels = ActiveKernels();
  ParallelFor(w.slices * pairs, w.slices * pairs * width * 16, [&](int64_t task) {
    if (!here[task % pairs]) return void(std::fill_n(c + task * width, width, bf16(0)));
    float* act = gate + task * width;
    kernels.swiglu(act, up + task * width, width, act);
    if (is_static) QuantizeBlocks(act, width, 1.0f / out, act);
    for (int64_t i = 0; i < width; ++i) c[task * width + i] = ToBf16(act[i]);
  });
}

void ExpertsDown(const Model& m, const LayerWeights& w, const bf16* c, const int32_t* ids, int count, bf16* y) {
  const Shape& s = m.shape;
  const SmallLayout at(s, w.nvfp4);
  const int64_t k = s.moe_inner, width = s.moe_slice(), pairs = count * m.top_k;
  const std::vector<Hit> hits = HitsOf(m, w, ids, count);
  std::vector<int32_t> wanted;
  for (const Hit& hit : hits) wanted.insert(wanted.end(), hit.pairs.begin(), hit.pairs.end());

  float* fragments = Scratch<float, 8>(pairs * DenseFragment(k));
  std::vector<float> factor(pairs);
  std::vector<const float*> x(pairs);
  ParallelFor(int64_t(wanted.size()), int64_t(wanted.size()) * k * 32, [&](int64_t i) {
    const int64_t pair = wanted[i];
    float* row = Scratch<float, 3>(k);
    GatherRow(c, kSlices, int(pairs), s.inner_slice(), int(pair), row);
    factor[pair] = 1.0f;
    if (w.nvfp4 && m.activations == Activations::kStatic)
      factor[pair] = MaxOf(w.small + at.down_input_scale, s.experts);  // ExpertsUp has quantised
    else if (w.nvfp4)
      factor[pair] = QuantizeRow(m.activations, 1.0f, k, row);
    float* fragment = fragments + pair * DenseFragment(k);
    MakeFragment(w.nvfp4, row, k, fragment);
    x[pair] = fragment;
  });
  std::fill_n(y, w.slices * pairs * width, bf16(0));
  ExpertGemm(m, w, hits, false, x.data(),
             [&](int64_t slice, int64_t tile, int64_t expert, int64_t pair, const float* sums) {
               const float scale = w.nvfp4 ? factor[pair] * w.small[at.down_global + expert] : 1.0f;
               bf16* out = y + (slice * pairs + pair) * width + tile * kTile;
               for (int i = 0; i < kTile; ++i) out[i] = ToBf16(sums[i] * scale);
             });
}

}  // namespace musejax

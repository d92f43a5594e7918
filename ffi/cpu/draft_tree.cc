// From a lattice to a verification tree: the likeliest prefixes, best first.
#include <limits>

#include "common/math.h"
#include "cpu/draft.h"

namespace musejax {
namespace {

constexpr float kClosed = -1e30f;  // a child that cannot be taken; what is not above half of it counts as closed

bool IsOpen(float x) { return x > kClosed / 2; }

// Log-probabilities of the children of a node.
void LogProbs(const float* row, float tau, float coverage, int64_t n, float* out) {
  float largest = -std::numeric_limits<float>::infinity(), sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) out[i] = row[i] / tau, largest = out[i] > largest ? out[i] : largest;
  for (int64_t i = 0; i < n; ++i) out[i] -= largest, sum += Exp(out[i]);
  const float log_sum = Log(sum);
  for (int64_t i = 0; i < n; ++i) out[i] = (out[i] - log_sum) + coverage;
}

// Whether fewer than `width` entries stand before entry i, the first of equals first.
bool IsAmongBest(const float* row, int64_t n, int64_t i, int64_t width) {
  int64_t ahead = 0;
  for (int64_t j = 0; j < n; ++j) ahead += row[j] > row[i] || (row[j] == row[i] && j < i);
  return ahead < width;
}

// Scores of the children of a node at `depth` that is candidate `rank` there.
void Children(const DraftTreeInput& in, float tau, int64_t width, int64_t depth, int64_t rank, float cum, float* open) {
  const int64_t n = in.candidates;
  std::fill_n(open, n, kClosed);
  if (depth == in.depths) return;
  float* row = Scratch<float, 30>(n);
  LogProbs(in.scores + (depth * n + rank) * n, tau, in.coverage[depth], n, row);
  for (int64_t i = 0; i < n; ++i) row[i] = IsOpen(row[i]) ? row[i] : kClosed;
  for (int64_t i = 0; i < n; ++i)
    if (IsOpen(row[i]) && IsAmongBest(row, n, i, width)) open[i] = cum + row[i];
}

}  // namespace

void DraftTree(const DraftTreeInput& in, float tau, int64_t width, int64_t spine, int nodes,
               const DraftTreeNodes& out) {
  const int64_t a = in.candidates;
  float* open = Scratch<float, 31>(nodes * a);
  out.tokens[0] = in.anchor, out.parents[0] = -1, out.depth[0] = 0, out.ancestors[0] = 1, out.cum[0] = 0.0f;
  Children(in, tau, width, 0, 0, 0.0f, open);
  for (int n = 1; n < nodes; ++n) {
    float *last = open + (n - 1) * a, *end = open + n * a;
    const bool forced = n <= std::min(spine, in.depths) && IsOpen(*std::max_element(last, end));
    float* const best = std::max_element(forced ? last : open, end);  // the first of equals
    const int64_t parent = (best - open) / a, rank = (best - open) % a;
    const float cum = *best;
    if (IsOpen(cum)) {
      out.parents[n] = int32_t(parent), out.depth[n] = out.depth[parent] + 1, out.cum[n] = cum;
      out.tokens[n] = in.tokens[out.depth[parent] * a + rank];
      out.ancestors[n] = out.ancestors[parent] | 1u << n;
      Children(in, tau, width, out.depth[n], rank, cum, end);
    } else {
      out.tokens[n] = 0, out.parents[n] = -1, out.depth[n] = 0, out.ancestors[n] = 1u << n, out.cum[n] = 0.0f;
      std::fill_n(end, a, kClosed);
    }
    *best = kClosed;
  }
}

}  // namespace musejax

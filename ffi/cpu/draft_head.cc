// The end of a draft: final norm, LM head, candidates of every drafted position, and how likely one follows another.
#include <limits>

#include "common/math.h"
#include "cpu/draft.h"

namespace musejax {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// The candidates found so far, best first; equal values stay in the order in which they came.
struct Best {
  float* values;
  int32_t* ids;
  int64_t most, found = 0;

  bool Full() const { return found == most; }
  void Offer(float value, int32_t id) {
    const float v = value == value ? value : kNone;
    if (Full() && !(v > values[most - 1])) return;
    int64_t at = Full() ? most - 1 : found++;
    for (; at > 0 && v > values[at - 1]; --at) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = v, ids[at] = id;
  }
};

}  // namespace

void DraftHead(const DraftModel& m, const float* norm, const uint8_t* lm_head, const uint8_t* selector, int64_t begin,
               int64_t slices, const bf16* stream, int count, int64_t num_tokens, const DraftTop& top, float* gate) {
  const DraftShape& s = m.shape;
  const int64_t k = s.hidden, n = m.vocab / kSlices, stride = Padded(n, kTile), most = m.candidates;
  const int rows = count - 1;
  const DraftKernels& kernels = ActiveDraftKernels();
  float *columns = Aligned<20>(k * kMaxRows), *x = Scratch<float, 21>(rows * k);
  for (int row = 0; row < rows; ++row) DraftNorm(m, stream, norm, count, row + 1, x + row * k);
  kernels.columns(x, rows, k, columns);
  float* logits = Scratch<float, 22>(slices * rows * stride);
  DraftGemm(lm_head, HeadBytes(m.vocab, k), slices, stride, 0, stride, k, columns, rows,
            DraftRows(logits, rows, stride));
  if (s.rank)
    DraftGemm(selector, SelectorBytes(s), slices, s.rank_slice(), 0, s.rank_slice(), k, columns, rows,
              DraftRows(gate, rows, s.rank_slice()));
  ParallelFor(slices * rows, slices * rows * n * 32, [&](int64_t task) {
    const int64_t first = (begin + task / rows) * n, valid = std::clamp<int64_t>(num_tokens - first, 0, n);
    float* x = logits + task * stride;
    kernels.softcap(x, stride, m.output_multiplier, m.softcap);
    Best best{top.values + task * most, top.ids + task * most, most};
    int64_t i = 0;
    for (; i < valid && !best.Full(); ++i) best.Offer(x[i], int32_t(first + i));
    for (; (i = kernels.next_above(x, i, valid, best.values[most - 1])) < valid; ++i)
      best.Offer(x[i], int32_t(first + i));
    while (!best.Full()) best.Offer(kNone, int32_t(m.vocab));
    float* terms = Scratch<float, 23>(stride);
    kernels.exp_below(x, stride, best.values[0], terms);
    std::fill_n(terms + valid, stride - valid, 0.0f);
    top.sums[task] = TreeSum(terms, n);
  });
}

void DraftLattice(const DraftModel& m, const DraftTop& top, const float* gate, const bf16* predecessor,
                  const bf16* successor, int32_t anchor, int rows, int32_t* tokens, float* scores, float* coverage) {
  const int64_t most = m.candidates, rank = m.shape.rank;
  std::vector<float> unary(rows * most);
  for (int64_t row = 0; row < rows; ++row) {
    Best best{unary.data() + row * most, tokens + row * most, most};
    for (int64_t slice = 0; slice < kSlices; ++slice)  // ids ascend with the slices, so ties stay in order
      for (int64_t i = 0; i < most; ++i)
        best.Offer(top.values[(slice * rows + row) * most + i], top.ids[(slice * rows + row) * most + i]);
    const float largest = best.values[0];
    float all = 0.0f, kept = 0.0f;
    for (int64_t slice = 0; slice < kSlices; ++slice) {
      const int64_t at = slice * rows + row;
      all += top.sums[at] * Exp(top.values[at * most] - largest);
    }
    for (int64_t i = 0; i < most; ++i) kept += Exp(best.values[i] - largest);
    coverage[row] = Log(kept) - Log(all);
  }
  if (!rank) {
    for (int64_t i = 0; i < rows * most; ++i) std::copy_n(&unary[i / most * most], most, scores + i * most);
    return;
  }
  const DraftKernels& kernels = ActiveDraftKernels();
  const auto row_of = [&](const bf16* codebook, int32_t token) {
    return codebook + std::min<int64_t>(token, m.vocab - 1) * rank;  // no token: its score is -inf whatever is read
  };
  ParallelFor(rows, rows * most * most * rank, [&](int64_t row) {
    float* joined = Scratch<float, 24>(rank);
    const int64_t slice = m.shape.rank_slice();
    for (int64_t r = 0; r < rank; ++r) joined[r] = gate[(r / slice * rows + row) * slice + r % slice];
    for (int64_t p = 0; p < most; ++p) {
      const bf16* before = row_of(predecessor, row ? tokens[(row - 1) * most + p] : anchor);
      for (int64_t c = 0; c < most; c += 16) {
        const bf16* after[16];
        const int n = int(std::min<int64_t>(16, most - c));
        for (int i = 0; i < n; ++i) after[i] = row_of(successor, tokens[row * most + c + i]);
        kernels.pair_scores(before, joined, after, n, rank, &unary[row * most + c],
                            scores + (row * most + p) * most + c);
      }
    }
  });
}

}  // namespace musejax

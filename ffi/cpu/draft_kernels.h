// The drafter's inner loops, built for three instruction sets with the same bits, beside those of kernels.h.
#pragma once

#include <cstdint>

namespace musejax {

// What the rows of a block see through one key/value head.
struct DraftSeen {
  const uint16_t *keys, *values;              // bf16 [slots, c]; position p < length lies in slot p % slots
  const uint16_t *block_keys, *block_values;  // bf16 [rows, c]; position length + i is row i
  int64_t slots, length;
};

// One query of c values: sees positions first .. last.
struct DraftQuery {
  const float* q;
  int64_t first, last;
  float* out;  // [c], rounded to bf16
};

inline constexpr int kMaxQueries = 16;  // of one call of attend
// Scores that one call of attend keeps, for positions first .. last of all its queries together.
constexpr int64_t DraftScores(int64_t first, int64_t last) { return kMaxQueries * ((last / 16 - first / 16 + 1) * 16); }

struct DraftKernels {
  // Rows [n][k] -> columns [k][16], zeros behind the n rows; k a multiple of 16.
  void (*columns)(const float* rows, int n, int64_t k, float* columns);
  // A 16-row weight tile times columns [k][16]: out[row of the columns][row of the tile] = the sums over K, and bits,
  // of bf16_tile (kernels.h). Rows of the columns are the lanes, so no sum crosses lanes.
  void (*bf16_tile)(const uint8_t* w, int64_t chunk_stride, int64_t k, const float* columns, float* out);
  // y = (x / rms(x)) gamma, by the reciprocal root, the sum of squares as SumOfSquares (phases.h); `rounded` to bf16 or
  // not. A slice is a multiple of 16 columns.
  void (*norm)(const float* x, const float* gamma, int64_t width, int64_t slices, float eps, bool rounded, float* y);
  // Pairs (i, i + c / 2) turned by cos_sin [2][c / 2], two products and their sum; rounded to bf16; in place.
  void (*rotate)(float* x, int c, const float* cos_sin);
  // y = r((base + delta)[tap 0] x + (base + delta)[tap 1] before), n columns: two products and their sum; before null:
  // zeros. base [tap][stride], delta [tap][n].
  void (*two_taps)(const float* base, int64_t stride, const float* delta, const float* x, const float* before,
                   int64_t n, float* y);
  // softmax(q k^T scale) v of up to kMaxQueries queries: probabilities exp(score - largest) in float32. Sums go by
  // absolute position, blocks, chunks and groups of layout.h, each ascending from +0; scores: DraftScores values.
  void (*attend)(const DraftQuery* queries, int n, int c, float scale, const DraftSeen& see, float* scores);
  // Logits in place of n raw ones, n a multiple of 16: cap tanh(x multiplier / cap); cap 0: x multiplier.
  void (*softcap)(float* x, int64_t n, float multiplier, float cap);
  // exp(x - largest) of n values, n a multiple of 16.
  void (*exp_below)(const float* x, int64_t n, float largest, float* out);
  // The first i in from .. n - 1 with x[i] > bound, n if there is none.
  int64_t (*next_above)(const float* x, int64_t from, int64_t n, float bound);
  // out[c] = unary[c] + sum over r of (before[r] gate[r]) after[c][r], c below `count` <= 16, r below rank, a multiple
  // of 16: lanes r % 16, each by fmaf ascending from +0, then as ReduceLanes.
  void (*pair_scores)(const uint16_t* before, const float* gate, const uint16_t* const* after, int count, int64_t rank,
                      const float* unary, float* out);
};

// Those of the instruction set that ActiveKernels has.
const DraftKernels& ActiveDraftKernels();

}  // namespace musejax

// The phases of a pass on the CPU, in the order of the megakernel; one file each, named like the kernel's phases.
//
// Activations that devices exchange lie slice by slice, [slices][rows][columns of a slice], or head by head. A phase
// computes the `slices` slices of weights it is given into an array of that many slices, and reads whole (gathered)
// arrays of kSlices slices: so the same functions run one device, or one of several with all-gathers between, and give
// the same bits. Each element is one sum over K made in one place; row i depends on no other row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/layout.h"
#include "common/model.h"
#include "cpu/kernels.h"

namespace musejax {

using bf16 = uint16_t;

// Weights of a layer as one device holds them: from its first slice (and first expert) on.
struct LayerWeights {
  const uint8_t *dense, *experts;
  const float* small;
  bool nvfp4;
  int64_t slices;                      // of dense and experts here
  int64_t expert_begin, expert_count;  // experts here; expert_count also is the stride of a slice in `experts`
};

// The rows of a pass: a tree of tokens after `length` stored positions; a chain is the tree in which every row's parent
// is the row before it. Rows from `valid` on are padding.
struct Rows {
  int count, valid;
  int64_t length;
  int parent[kMaxRows];  // -1 for a root
  int depth[kMaxRows];
  int64_t position(int row) const { return length + depth[row]; }
};

// Keys and values of one layer, `heads` of them here: cache [heads][slots][c], rows in flight [heads][kMaxRows][c].
struct LayerKeys {
  bf16 *keys, *values, *flight_keys, *flight_values;
  int64_t heads, slots, window;  // window 0: full attention
};

// Which rows of the last pass to store: rows path[0 .. count) go to positions length - count .. length - 1.
struct Accepted {
  int count;
  int path[kMaxRows];
};

// norm.cc: S = r(rms(embedding row)).
void EmbedNorm(const Model&, const bf16* rows, int count, float* stream);
// norm.cc: S = alpha S + beta n, with n the normed attention branch a, or the input-scaled, normed FFN branch f.
void AddAttention(const Model&, const float* small, bool nvfp4, const bf16* a, int count, float* stream);
void AddFfn(const Model&, const float* small, bool nvfp4, const bf16* f, int count, float* stream);

// attn_in.cc: stores accepted rows in the cache; then x = r(rms(S) g) -> q, k, v, gate; QK norm, rotary (cos_sin
// [rows][2][c/2], null: none); k, v into flight. q and gate: [heads][rows][c] of the heads here.
void AttnIn(const Model&, const LayerWeights&, const float* stream, const float* cos_sin, const Rows&, const Accepted&,
            const LayerKeys&, bf16* q, bf16* gate);
// attention.cc: attention over cache and flight, output norm, gate -> o [heads here][rows][c].
void Attention(const Model&, const LayerKeys&, const Rows&, const bf16* q, const bf16* gate, bf16* o);
// attn_out.cc: a = r(o Wo^T).
void AttnOut(const Model&, const LayerWeights&, const bf16* o, int count, bf16* a);
// router.cc: x = r(rms(S) g) -> p = r(x Wpool^T), scores = sigmoid(x Wr^T multiplier), both of the slices here.
void Pool(const Model&, const LayerWeights&, const float* stream, int count, bf16* p, float* scores);
// router.cc: top-k by biased score of gathered scores -> ids [rows][k] (experts in padding rows), weights [rows][k].
void Route(const Model&, const float* small, bool nvfp4, const float* scores, const Rows&, int32_t* ids,
           float* weights);
// experts.cc: h = r(rms(p) g), quantised as `activations` says -> c = silu(gate) up, [slices][rows * k][columns],
// rounded to bf16, or with kStatic quantised: values of the grid. Rows of experts that are elsewhere, and padding:
// zeros.
void ExpertsUp(const Model&, const LayerWeights&, const bf16* p, const int32_t* ids, int count, bf16* c);
// experts.cc: y = r(c Wdown^T) of every (row, slot); c gathered.
void ExpertsDown(const Model&, const LayerWeights&, const bf16* c, const int32_t* ids, int count, bf16* y);
// combine.cc: the weighted sum of owner group g's normed slots, rounded: partials [groups][rows][moe_hidden], of the
// groups whose experts begin in [expert_begin, + expert_count). y gathered over slices.
void CombinePartials(const Model&, const LayerWeights&, const bf16* y, const int32_t* ids, const float* weights,
                     int count, bf16* partials);
// combine.cc: m = r(sum over slots) (flat) or r(sum over gathered partials of all groups); m [rows][moe_hidden].
void Combine(const Model&, const float* small, bool nvfp4, const bf16* y, const int32_t* ids, const float* weights,
             int count, bf16* m);
void CombineGathered(const Model&, const bf16* partials, int count, bf16* m);
// combine.cc: f = r(m Wunpool^T).
void Unpool(const Model&, const LayerWeights&, const bf16* m, int count, bf16* f);

// head.cc: x = r(rms(r(S)) g) -> raw logits [slices][rows][vocab / kSlices].
void Head(const Model&, const float* stream, const bf16* final_norm, const uint8_t* lm_head, int64_t slices, int count,
          float* raw);
// head.cc: the `top` largest raw logits below token id `num_tokens` and their ids, per slice [slices][rows][top]; ties
// to the lower id, NaN last. The first slice here is `slice_begin`.
void HeadTop(const Model&, const float* raw, int64_t slice_begin, int64_t slices, int count, int64_t num_tokens,
             int64_t top, float* values, int32_t* ids);
// head.cc: cap tanh(raw multiplier / cap).
float Softcap(const Model&, float raw);
// head.cc: sum over each slice of exp(logit - logit of `largest`) below num_tokens, [slices][rows]; then
// log-probability of a raw logit from all slices' sums.
void HeadSums(const Model&, const float* raw, const float* largest, int64_t slice_begin, int64_t slices, int count,
              int64_t num_tokens, float* sums);
float LogProbability(const Model&, float raw, float largest, const float* sums, int64_t stride);

// ---- what several phases share ----
// The sum of squares of `width` columns, slice after slice: leaves of 64 columns, in a leaf groups of 16 columns summed
// as a tree (8, 4, 2, 1); groups, leaves and slices each added in ascending order from +0.
float SumOfSquares(const float* x, int64_t width, int64_t slices);
// The same order for a sum of values.
float TreeSum(const float* x, int64_t width);
// x / rms(x), by the reciprocal root: y[i] = x[i] * (1 / sqrt(mean + eps)).
void RmsNorm(const float* x, int64_t width, int64_t slices, float eps, float* y);
// r(rms(x) r(1 + gamma)) over kSlices slices.
void CentredNorm(const float* x, const float* gamma, int64_t width, float eps, float* y);
// One row of a gathered array [kSlices][count][width] as float32 [kSlices * width].
void GatherRow(const bf16* x, int64_t slices, int count, int64_t width, int row, float* out);
// y = r(x) for floats kept as floats.
void RoundRow(float* x, int64_t n);

// Rows times a bf16 weight of N rows, chunk-major: task-parallel over slices and tiles. `store(slice, column, row,
// sum)`. fragments: [count][DenseFragment(k)].
template <typename Store>
void DenseGemm(const uint8_t* w, int64_t slice_bytes, int64_t slices, int64_t n, int64_t k, const float* fragments,
               int count, const Store& store);

}  // namespace musejax

#include "cpu/gemm.h"

// The phases of a DFlash drafter on the CPU. As in phases.h, arrays that devices exchange lie slice by slice or head by
// head; a phase computes the `slices` slices of weights it is given and reads whole (gathered) arrays of kSlices
// slices, so that one device and several with all-gathers between give the same bits.
//
// All rows of a block, anchor first, stand at positions length, length + 1, ...; activations are rounded to bf16 at the
// points DRAFT_POINTS of musejax/speculation/draft.py, and probabilities are float32. stream: bf16 [kSlices][rows]
// [hidden / kSlices]. delta: the coefficients of a sublayer's convolution, f32 [kSlices][rows][delta_rows], of all
// slices; not looked at in DFlash 1.
#pragma once

#include "common/draft_model.h"
#include "cpu/draft_kernels.h"
#include "cpu/phases.h"
#include "cpu/thread_pool.h"

namespace musejax {

// Weights of a drafter layer as one device holds them: `slices` of them, from slice `begin` on.
struct DraftWeights {
  const uint8_t* dense;
  const float* small;
  int64_t slices, begin;
};

inline constexpr int64_t kMaxHeadDim = 128;

enum class Sublayer { kAttention, kMlp };

// Context keys and values of one layer, of the heads here: rings [heads][slots][c] in which position p has slot
// p % slots.
struct DraftKeys {
  bf16 *keys, *values;
  int64_t heads, slots;
};

// ---- context ----
// draft_context.cc: ctx = r(taps fc^T) of the slices here, [slices][rows][hidden / kSlices]; taps [rows][taps_width].
// Only the first `count` rows are looked at; the others are 0.
void DraftFc(const DraftModel&, const uint8_t* fc, int64_t slices, const float* taps, int rows, int count, bf16* ctx);
// draft_context.cc: keys and values of all layers from gathered ctx: hidden_norm, projections, head norm, rotation
// (cos_sin [rows][2][c/2]). Row i < count goes to position start + i; those that later ones of this call overwrite are
// left out.
void DraftContext(const DraftModel&, const DraftWeights* layers, const DraftKeys* keys, int n, const float* hidden_norm,
                  const bf16* ctx, const float* cos_sin, int64_t start, int rows, int count);

// ---- block ----
// draft_layer.cc: stream = r(embedding row * scale).
void DraftEmbed(const DraftModel&, const bf16* rows, int count, bf16* stream);
// draft_layer.cc: delta = n K^T of the slices here, n = r(rms(stream) g).
void DraftDelta(const DraftModel&, const DraftWeights&, Sublayer, const bf16* stream, int count, float* delta);
// draft_attention.cc: n, convolution side 0, q, k, v, head norms, rotation (cos_sin [rows][2][c/2]), attention of the
// heads here over `length` context positions and the block -> o [heads here][rows][c].
void DraftAttention(const DraftModel&, const DraftWeights&, const DraftKeys&, const bf16* stream, const float* delta,
                    const float* cos_sin, int64_t length, int count, bf16* o);
// draft_layer.cc: y = r(o Wo^T), convolution side 1, stream + y: the slices here of the stream, into `out`.
void DraftAttnOut(const DraftModel&, const DraftWeights&, const bf16* o, const bf16* stream, const float* delta,
                  int count, bf16* out);
// draft_layer.cc: n, convolution side 0, act = r(silu(gate) up), [slices][rows][inner / kSlices].
void DraftUp(const DraftModel&, const DraftWeights&, const bf16* stream, const float* delta, int count, bf16* act);
// draft_layer.cc: y = r(act Wdown^T), convolution side 1, stream + y, as DraftAttnOut; act gathered.
void DraftDown(const DraftModel&, const DraftWeights&, const bf16* act, const bf16* stream, const float* delta,
               int count, bf16* out);

// ---- candidates: rows 1 .. count - 1 of the block, here 0 .. count - 2 ----
// What the LM head says of each slice and row.
struct DraftTop {
  float* values;  // [slices][rows][candidates]: largest unary logits, ties to the lower id, NaN as -inf
  int32_t* ids;   // [slices][rows][candidates]; vocab where a slice has fewer ids below num_tokens
  float* sums;    // [slices][rows]: sum of exp(logit - values[..][0]) below num_tokens
};
// draft_head.cc: h = r(rms(stream) g), logits of the slices here with multiplier and softcap; gate = h W^T, f32
// [slices][rows][rank / kSlices].
void DraftHead(const DraftModel&, const float* norm, const uint8_t* lm_head, const uint8_t* selector, int64_t begin,
               int64_t slices, const bf16* stream, int count, int64_t num_tokens, const DraftTop& top, float* gate);
// draft_head.cc: from all slices' tops and gate, both gathered: tokens [rows][candidates], coverage [rows] (log of the
// candidates' share), scores [rows][candidates][candidates] after each candidate of the row before (row 0: the anchor).
void DraftLattice(const DraftModel&, const DraftTop& top, const float* gate, const bf16* predecessor,
                  const bf16* successor, int32_t anchor, int rows, int32_t* tokens, float* scores, float* coverage);

// ---- whole passes on one device, of all slices; the bits of the phases one after the other ----
// What follows the layers. predecessor, successor: [vocab][rank].
struct DraftEnd {
  const float* norm;
  const uint8_t *lm_head, *selector;
  const bf16 *predecessor, *successor;
};
// Results of DraftLattice.
struct DraftGuesses {
  int32_t* tokens;
  float *scores, *coverage;
};
// draft.cc: from embedding rows [kSlices][count][hidden / kSlices] to the lattice of the rows after the anchor.
void Draft(const DraftModel&, const DraftWeights* layers, const DraftKeys* keys, int n, const DraftEnd&,
           const bf16* rows, const float* cos_sin, int32_t anchor, int64_t length, int count, int64_t num_tokens,
           const DraftGuesses&);
// draft.cc: DraftFc, then DraftContext.
void DraftCommit(const DraftModel&, const DraftWeights* layers, const DraftKeys* keys, int n, const uint8_t* fc,
                 const float* hidden_norm, const float* taps, const float* cos_sin, int64_t start, int rows,
                 int count);

// ---- tree ----
inline constexpr int kMaxNodes = 32;  // ancestors are bits

// What DraftLattice makes: tokens [depths][candidates], scores [depths][candidates][candidates], coverage [depths].
struct DraftTreeInput {
  int32_t anchor;
  const int32_t* tokens;
  const float *scores, *coverage;
  int64_t depths, candidates;
};
// [nodes] each. In padding, which comes last: 0, -1, 0, the node's own bit, 0.
struct DraftTreeNodes {
  int32_t *tokens, *parents, *depth;
  uint32_t* ancestors;
  float* cum;
};
// draft_tree.cc: build_tree of musejax/speculation/tree.py, of conditional_logprobs. Node 0 is the anchor; nodes - 1
// times, the likeliest open child becomes a node, the first of equals by parent and then candidate. Nodes 1 ..
// min(spine, depths) are children of the node before, where that has an open one. A node at depth d that is candidate p
// there (the root: 0, 0) has the children of which row = scores[d][p] speaks, none if d = depths. Their
// log-probabilities, in float32 and in this order, with Exp and Log of common/math.h:
//   x_i = row_i / tau; largest = max x_i; sum = Exp(x_i - largest), added by ascending i from +0
//   logprob_i = ((x_i - largest) - Log(sum)) + coverage[d]
// A NaN in a row makes all of them NaN. Open are the `width` largest, the first of equals, as far as they are above
// -5e29 (NaN and -inf are not); their scores are cum of the node + logprob_i, and one is taken only above -5e29.
void DraftTree(const DraftTreeInput&, float tau, int64_t width, int64_t spine, int nodes, const DraftTreeNodes&);

// ---- what several phases share ----
// draft_layer.cc: one row of r(rms(x) gamma) for gathered x [kSlices][rows][hidden / kSlices], as float32 [hidden].
void DraftNorm(const DraftModel&, const bf16* x, const float* gamma, int rows, int row, float* out);
// draft_layer.cc: the input of a sublayer, as columns [hidden][kMaxRows]: n, then convolution side 0.
void DraftInput(const DraftModel&, const DraftWeights&, Sublayer, const bf16* stream, const float* delta, int count,
                float* columns);
// draft_attention.cc: r(rotated(rms(x) gamma)) of one head, as float32.
void DraftTurn(const DraftModel&, const float* x, const float* gamma, const float* cos_sin, float* out);

// Scratch<float, Use> that begins a cache line.
template <int Use>
float* Aligned(int64_t n) {
  const auto at = reinterpret_cast<uintptr_t>(Scratch<float, Use>(n + 16));
  return reinterpret_cast<float*>((at + 63) / 64 * 64);
}

// Columns [k][kMaxRows] (DraftKernels::columns) of `count` rows times a bf16 weight: rows begin .. begin + n - 1 of the
// `all` rows of a slice, begin at a tile. Task-parallel over slices and tiles; the bits of DenseGemm (phases.h).
// `store(slice, column, row, sums, columns)` gets up to 16 columns at a time, the first one counted from begin.
template <typename Store>
void DraftGemm(const uint8_t* w, int64_t slice_bytes, int64_t slices, int64_t all, int64_t begin, int64_t n, int64_t k,
               const float* columns, int count, const Store& store) {
  const int64_t tiles = Padded(n, kTile) / kTile, tile_bytes = kTile * Chunk(k) * 2;
  const int64_t stride = Padded(all, kTile) / kTile * tile_bytes;
  const DraftKernels& kernels = ActiveDraftKernels();
  ParallelFor(slices * tiles, slices * tiles * kTile * k * 16, [&](int64_t task) {
    const int64_t slice = task / tiles, tile = task % tiles, left = n - tile * kTile;
    float sums[kMaxRows * kTile];
    kernels.bf16_tile(w + slice * slice_bytes + (begin / kTile + tile) * tile_bytes, stride, k, columns, sums);
    for (int row = 0; row < count; ++row)
      store(slice, tile * kTile, row, sums + row * kTile, left < kTile ? left : kTile);
  });
}
// A store that makes [slices][rows][columns].
inline auto DraftRows(float* out, int rows, int64_t columns) {
  return [=](int64_t slice, int64_t column, int row, const float* sums, int64_t n) {
    std::copy_n(sums, n, out + (slice * rows + row) * columns + column);
  };
}

}  // namespace musejax

// Compile-time sizes of a model as one rank sees it, and the constants of the layer kernel that follow from them.
//
// A rank owns kSlicesHere consecutive slices of kSlices. Activations travel in blocks of at most 64 columns, never
// wider than a slice, so that a block is a leaf of every sum of squares (common/layout.h).
#pragma once

#include "common/layout.h"

namespace musejax::layer {

inline constexpr int kRows = int(kMaxRows);
// Warp 0 streams, warps 1 to 3 add partials, the others multiply, one for each range of K.
inline constexpr int kWarps = 12;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kMmaWarps = int(kRanges), kFirstMmaWarp = kWarps - kMmaWarps;
inline constexpr int kDenseGemms = 5;         // of a layer: enum Dense in dense.cuh
inline constexpr int kRowWarps = kWarps - 1;  // all but the streaming warp run row tasks
inline constexpr int kStages = 3;             // each takes its 36 KB from L1, and a fourth costs more there than it gains
inline constexpr int kStageBytes = 36864;     // one NVFP4 tile of K = 4096, or 16 rows x 1,024 of bf16

MUSEJAX_FN constexpr int Clamp(int x, int low, int high) { return Min(Max(x, low), high); }

// A bf16 row of `width` columns in MMA operand order: for each t of 4, width / 8 registers in tagged words of three.
MUSEJAX_FN constexpr int RecordRegisters(int width) { return width / 8; }
MUSEJAX_FN constexpr int RecordWords(int width) { return (RecordRegisters(width) + 2) / 3; }

template <int kHidden_, int kHeads_, int kKvHeads_, int kHeadDim_, int kMoe_, int kInner_, int kExperts_, int kTopK_,
          int kSlicesHere_>
struct Sizes {
  static constexpr int kHidden = kHidden_, kHeads = kHeads_, kKvHeads = kKvHeads_, kHeadDim = kHeadDim_, kMoe = kMoe_,
                       kInner = kInner_, kExperts = kExperts_, kTopK = kTopK_, kSlicesHere = kSlicesHere_;
  static constexpr Shape kShape{kHidden, kHeads, kKvHeads, kHeadDim, kMoe, kInner, kExperts};
  static constexpr int kRanks = int(kSlices) / kSlicesHere;

  static constexpr int kGroup = kHeads / kKvHeads;  // query heads of one key head
  static constexpr int kHeadsHere = kHeads / int(kSlices) * kSlicesHere;
  static constexpr int kKvHere = kKvHeads / int(kSlices) * kSlicesHere;
  static constexpr int kQWidth = kHeads * kHeadDim;

  static constexpr int kHiddenBlock = Min(64, kHidden / int(kSlices));
  static constexpr int kHiddenBlocks = kHidden / kHiddenBlock;  // of the whole model
  static constexpr int kHiddenBlocksHere = kHiddenBlocks / kRanks;
  static constexpr int kMoeBlock = Min(64, kMoe / int(kSlices));
  static constexpr int kMoeBlocks = kMoe / kMoeBlock;
  static constexpr int kMoeBlocksHere = kMoeBlocks / kRanks;

  static constexpr int kExpertsHere = kExperts / kRanks;  // router columns of this rank's slices
  static constexpr int kPairs = kRows * kTopK;            // (row, slot)
  static constexpr int kInnerTiles = kInner / 16;         // 16-column blocks of an expert's inner width, whole model
  static constexpr int kInnerTilesHere = kInnerTiles / kRanks;
  static constexpr int kMoeTilesHere = kMoe / 16 / kRanks;
  static constexpr int kUpUnits = kInnerTilesHere, kDownUnits = (kMoeTilesHere + 1) / 2;  // of a visit (experts.cuh)

  static_assert(kHeadDim == 64, "a head is one block of 64 columns");
  static_assert(kQWidth >= 512 && kHidden % 128 == 0 && kMoe % 128 == 0 && kInner % 128 == 0, "see bindings/pass.h");
  static_assert(kGroup <= kMmaWarps, "attention gives each query head of a group a warp");
  static_assert(kTopK <= 8 && kExperts <= 256, "a row's choices fit a byte each, experts one thread each");
  static_assert(kInnerTilesHere % 2 == 0 || kInner / int(kSlices) == 16, "expert units are pairs of tiles");
};

}  // namespace musejax::layer

// Which blocks of positions an attention unit holds, and the order in which sums are added: one definition for the
// producer, the MMA warps, the mergers and the tests.
//
// Of the positions a row sees, the cache holds those below `stored`. Blocks of 16 below stored / 16 are history: units,
// attended to by all rows together. The blocks from there to the row's own are its tail, attended to row by row. A unit
// is a chunk; a long history starts with units of whole groups, up to the group that holds the first tail block.
#pragma once

#include "common/layout.h"

namespace musejax::layer {

inline constexpr int kBlockKeys = int(kKeyBlock);
inline constexpr int kChunkBlocks = int(kKeyChunk / kKeyBlock);
inline constexpr int kGroupBlocks = int(kKeyGroup / kKeyBlock);
inline constexpr int kStageBlocks = 8;   // keys and values of as many blocks share a stage of the ring
inline constexpr int kMostChunks = 128;  // a history of more chunks is given out in groups
// Tail blocks of a row: it has at most 16 positions that the cache lacks, and at most 16 in this pass.
inline constexpr int kTailBlocks = (2 * int(kMaxRows) + kBlockKeys - 2) / kBlockKeys + 1;

// Blocks begin .. end - 1; block b holds positions 16 b .. 16 b + 15.
struct Blocks {
  int begin, end;
};

// The first position that a row at `position` sees; window 0: all.
MUSEJAX_FN int FirstSeen(int position, int window) { return window && position >= window ? position - window + 1 : 0; }

// Units of one key head.
struct History {
  Blocks blocks;  // seen by some row; end also is the first tail block
  int units, group_units, first_group, first_chunk;

  MUSEJAX_FN Blocks BlocksOf(int unit) const {
    const int single = unit - group_units;
    const int begin = single < 0 ? (first_group + unit) * kGroupBlocks : (first_chunk + single) * kChunkBlocks;
    const int end = begin + (single < 0 ? kGroupBlocks : kChunkBlocks);
    return {begin < blocks.begin ? blocks.begin : begin, end < blocks.end ? end : blocks.end};
  }
  // Where the blocks of item i of a row's sums end: its units, then its tail blocks.
  MUSEJAX_FN int EndOf(int item) const { return item < units ? BlocksOf(item).end : blocks.end + item - units + 1; }
  MUSEJAX_FN int TailsTo(int position) const { return position / kBlockKeys - blocks.end + 1; }
};

// Rows stand at `length` and beyond, one of them at length. More than max_units would not fit the frames.
MUSEJAX_FN History HistoryOf(int length, int stored, int window, int max_units) {
  const int end = stored / kBlockKeys, seen = FirstSeen(length, window) / kBlockKeys, begin = seen < end ? seen : end;
  History h{{begin, end}, 0, 0, begin / kGroupBlocks, begin / kChunkBlocks};
  if (begin == end) return h;
  const int last_chunk = (end - 1) / kChunkBlocks;
  if (last_chunk - h.first_chunk >= kMostChunks) {
    h.group_units = end / kGroupBlocks - h.first_group;
    h.first_chunk = end / kGroupBlocks * (kGroupBlocks / kChunkBlocks);
  }
  h.units = h.group_units + last_chunk + 1 - h.first_chunk;
  if (h.units > max_units) h.units = max_units;
  return h;
}

// The most units that a layer of this many slots can have.
MUSEJAX_FN constexpr int MaxUnits(int slots) {
  const int chunks = slots / int(kKeyChunk) + 2, groups = slots / int(kKeyGroup) + 2 + kGroupBlocks / kChunkBlocks;
  return chunks <= kMostChunks ? chunks : groups < kMostChunks ? kMostChunks : groups;
}

// Calls stage(blocks) for the parts of `blocks` that share a stage, in order.
template <typename Stage>
MUSEJAX_FN void ForStages(Blocks blocks, const Stage& stage) {
  for (int begin = blocks.begin; begin < blocks.end;) {
    const int next = (begin / kStageBlocks + 1) * kStageBlocks, end = next < blocks.end ? next : blocks.end;
    stage(Blocks{begin, end});
    begin = end;
  }
}

MUSEJAX_FN bool EndsChunk(int end) { return end % kChunkBlocks == 0; }
MUSEJAX_FN bool EndsGroup(int end) { return end % kGroupBlocks == 0; }

// N sums over a row's items: blocks to chunks to groups to the total, each added in ascending order from +0.
template <int N>
struct LevelSums {
  float chunk[N] = {}, group[N] = {}, total[N] = {};

  // A part of a chunk, a chunk or a group, and whether it ends a chunk and a group.
  MUSEJAX_FN void Add(const float (&item)[N], bool ends_chunk, bool ends_group) {
    for (int i = 0; i < N; ++i) chunk[i] = chunk[i] + item[i];
    if (ends_chunk) Flush(chunk, group);
    if (ends_group) Flush(group, total);
  }
  MUSEJAX_FN void End() { Flush(chunk, group), Flush(group, total); }

  MUSEJAX_FN static void Flush(float (&from)[N], float (&to)[N]) {
    for (int i = 0; i < N; ++i) to[i] = to[i] + from[i], from[i] = 0.0f;
  }
};

}  // namespace musejax::layer

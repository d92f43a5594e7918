// What a thread of the layer kernel knows: the pass, the layer at hand, who it is, and the frames.
//
// A frame is a global array of tagged words through which phases hand values on, one set for even and one for odd
// epochs. Lemma (reuse): an SM gives its credit of epoch e, and its sums of squares for z, after all of its warps have
// ended epoch e - 1. It goes on when it has seen those of all SMs: the credit of an SM that owns nothing of S, credit or
// sums of one that does. So who writes a word of epoch e knows that all SMs have ended e - 1, and who gives a credit of
// epoch e that all have ended e - 2; nobody can still wait for a word of epoch e - 2 that is being overwritten. The
// first epoch of a launch needs no credits for that: the launch before has ended.
//
// Credits stay on their GPU; between ranks the rows themselves are the credit. A rank writes words of epoch e to
// another after it has added f of e - 1, of which the other's part was made by SMs that had seen all credits of e - 1:
// all of its SMs had ended e - 2. Where launches are cut, an epoch of heads alone lies between. Then the first words to
// arrive are o of e + 1, while the other may be in e - 1; but its words of o in e - 1 have all been read, for f of
// e - 1 came of them, and words of any later frame are made of o of e + 1 from all ranks, of the other's next launch.
#pragma once

#include "comm/exchange.h"
#include "common/model.h"
#include "common/pass_state.h"
#include "layer/partition.h"
#include "layer/sizes.h"
#include "layer/words.cuh"

namespace musejax::layer {

// One layer's arrays, as the FFI call brings them.
struct LayerArrays {
  const uint8_t *dense, *experts;
  const float *small, *cos_sin;  // cos_sin: [rows][2][c/2], null without rotation
  uint16_t *keys, *values, *flight_keys, *flight_values;
  int slots, window;
  float* tap;  // [rows][hidden], or null
  bool nvfp4;
};

inline constexpr int kMaxLayers = 64;

using comm::Exchange;

// What a launch is given, but for the layers' arrays; every SM keeps it in shared memory.
struct Pass {
  Model model;
  int count_layers;
  bool first, last;  // as cpu/layer.h
  int rows;          // of the arrays below, 1 to 16
  const int32_t *parents, *state, *path;
  int32_t* mark;       // set to kGaveUp if the launch gives up: state[2], or null
  float* stream;       // [rows][hidden], in and out
  uint16_t *q, *gate;  // [heads here][rows][c]
  int32_t* ids;        // [layers][rows][k]
  // workspace
  const int32_t* schedule;  // [blocks][kDenseGemms][2]: units begin .. end - 1 of each
  uint8_t* frames;          // of this rank
  uint32_t* epochs;         // [blocks]
  uint32_t* abort;
  const uint32_t* budget;  // of a wait, in 1,024 ns; in device memory, for a graph keeps its launches' parameters
  ErrorBlock* error;
  int rank, max_units;  // max_units: attention units of one key head that the frames hold
  Exchange exchange;
  uint64_t* stamps;  // [blocks][warps][layers][kStamps], of a build with MUSEJAX_LAYER_STAMPS; null: none wanted
};

// An SM's copy in shared memory, its part of the schedule, and whether it must not run the layers.
struct BlockPass : Pass {
  UnitSpan dense[kDenseGemms];
  bool refused;
};

inline constexpr int kPassBytes = 512;  // that it takes in shared memory
static_assert(sizeof(BlockPass) <= kPassBytes && sizeof(Pass) % 8 == 0, "see kPassBytes");

struct PassParams : Pass {
  LayerArrays layers[kMaxLayers];
};

inline constexpr int kPairWords = 8;  // of a row in a 16-column tile of partial sums

// Byte offsets of the frames of one parity.
template <typename S>
struct Frames {
  static __host__ __device__ constexpr int64_t Record(int64_t rows, int width) {
    return rows * 4 * RecordWords(width) * 16;
  }
  static __host__ __device__ constexpr int64_t Partial(int64_t columns, int64_t k) {
    return columns / 16 * (k / Chunk(k)) * kRows * kPairWords * 16;
  }
  // Rows and their sums of squares that all ranks see
  static constexpr int64_t o = 0;                                                         // [heads][row] of 64
  static constexpr int64_t a = o + Record(S::kHeads * kRows, 64);                         // [hidden blocks][row]
  static constexpr int64_t f = a + Record(S::kHiddenBlocks * kRows, S::kHiddenBlock);     // [hidden blocks][row]
  static constexpr int64_t p = f + Record(S::kHiddenBlocks * kRows, S::kHiddenBlock);     // [moe blocks][row]
  static constexpr int64_t m = p + Record(S::kMoeBlocks * kRows, S::kMoeBlock);           // [moe blocks][row]
  static constexpr int64_t c = m + Record(S::kMoeBlocks * kRows, S::kMoeBlock);           // [inner tiles][pair] of 16
  static constexpr int64_t sums_a = c + Record(int64_t(S::kInnerTiles) * S::kPairs, 16);  // f32 [row][hidden blocks]
  static constexpr int64_t sums_f = sums_a + 8 * kRows * S::kHiddenBlocks;                // f32 [row][hidden blocks]
  static constexpr int64_t sums_p = sums_f + 8 * kRows * S::kHiddenBlocks;                // f32 [row][moe blocks]
  static constexpr int64_t sums_y = sums_p + 8 * kRows * S::kMoeBlocks;                   // f32 [pair][moe blocks]
  static constexpr int64_t scores = sums_y + 8 * int64_t(S::kPairs) * S::kMoeBlocks;      // f32 [row][experts]
  // This rank's own
  static constexpr int64_t x = scores + 8 * kRows * S::kExperts;                       // [hidden blocks][row]
  static constexpr int64_t z = x + Record(S::kHiddenBlocks * kRows, S::kHiddenBlock);  // [hidden blocks][row]
  static constexpr int64_t h = z + Record(S::kHiddenBlocks * kRows, S::kHiddenBlock);  // [moe blocks][row]
  static constexpr int64_t y = h + Record(S::kMoeBlocks * kRows, S::kMoeBlock);        // [moe tiles here][pair] of 16
  static constexpr int64_t q = y + Record(int64_t(S::kMoeTilesHere) * S::kPairs, 16);  // [heads here][row] of 64
  static constexpr int64_t k = q + Record(S::kHeadsHere * kRows, 64);                  // [kv here][row] of 64
  static constexpr int64_t v = k + Record(S::kKvHere * kRows, 64);                     // [kv here][row] of 64
  static constexpr int64_t gate = v + Record(S::kKvHere * kRows, 64);                  // 8 B [heads here][row][32]
  static constexpr int64_t sums_x = gate + 8 * S::kHeadsHere * kRows * 32;             // f32 [row][hidden blocks]
  static constexpr int64_t sums_z = sums_x + 8 * kRows * S::kHiddenBlocks;             // f32 [row][hidden blocks]
  static constexpr int64_t maxima_h = sums_z + 8 * kRows * S::kHiddenBlocks;           // f32 [row][moe blocks]
  static constexpr int64_t decode_h = maxima_h + 8 * kRows * S::kMoeBlocks;            // f32 [row]
  static constexpr int64_t maxima_c = decode_h + 8 * kRows;                            // f32 [pair][8 inner tiles]
  static constexpr int64_t decode_c = maxima_c + int64_t(S::kPairs) * S::kInnerTiles;  // f32 [pair]
  static constexpr int64_t quantised_c = decode_c + 8 * S::kPairs;                     // as c
  static constexpr int64_t credits = quantised_c + Record(int64_t(S::kInnerTiles) * S::kPairs, 16);  // [1024 SMs]
  static constexpr int64_t choices = credits + 16 * 1024;  // expert and weight of each pair
  // Partial sums of dense GEMMs: [16-column tile here][chunk][row][8 words of two columns, as row tasks take them]
  static constexpr int64_t part_qkvg = choices + 16 * S::kPairs;
  static constexpr int64_t part_out = part_qkvg + Partial(S::kShape.qkvg_rows() * S::kSlicesHere, S::kHidden);
  static constexpr int64_t part_pool = part_out + Partial(S::kHidden / S::kRanks, S::kQWidth);
  static constexpr int64_t part_router = part_pool + Partial(S::kMoe / S::kRanks, S::kHidden);
  static constexpr int64_t part_unpool =
      part_router + Partial(Padded(S::kExperts / kSlices, 16) * S::kSlicesHere, S::kHidden);
  // Attention: blocks near the end of each row, then units of history (their number depends on the context)
  static constexpr int64_t tail = part_unpool + Partial(S::kHidden / S::kRanks, S::kMoe);  // [heads here][row][3][t][6]
  static constexpr int64_t units =
      tail + int64_t(S::kHeadsHere) * kRows * 3 * 4 * 6 * 16;  // [unit][heads here][row][t][6]
  static constexpr int64_t unit_bytes = int64_t(S::kHeadsHere) * kRows * 4 * 6 * 16;
  static __host__ __device__ constexpr int64_t Bytes(int max_units) {
    return Padded(units + unit_bytes * max_units, kAlign);
  }
};

// The dense GEMMs, in the order of a layer, from its heads on.
enum class Dense : int { kQkvg, kOut, kRouter, kPooler, kUnpooler };
__device__ __forceinline__ Dense NextDense(Dense which) { return Dense((int(which) + 1) % kDenseGemms); }

// Tells the compiler, in a function that is not inlined, that an argument lies in shared memory.
template <typename T>
__device__ __forceinline__ void InShared(const T& x) {
  __builtin_assume(__isShared(&x));
}

// One a warp, in shared memory: the little L1 that the ring leaves is no place for a stack.
template <typename S>
struct Context {
  using F = Frames<S>;
  const LayerArrays* layers;  // of the launch's parameters
  Waiter waiter;
  LayerArrays at_hand[2];       // of the layer at hand, and of the next or the one before
  int warp, block, blocks;      // this SM, and how many there are
  int valid, length, accepted;  // of the pass: rows that count, positions before it, rows of the last pass to store
  int layer;                    // index in `layers`
  uint32_t epoch;               // tag of the layer at hand
  bool moved;                   // its accepted rows are in the cache already, and its new rows in flight
  Dense gemm;                   // that the warp is at

  // The block's copy, first in shared memory.
  __device__ __forceinline__ const BlockPass& pass() const {
    return *reinterpret_cast<const BlockPass*>(ptx::DynamicShared());
  }
  __device__ __forceinline__ int lane() const { return int(threadIdx.x % 32); }
  __device__ __forceinline__ const LayerArrays& arrays() const { return at_hand[layer % 2]; }
  // Where the frames of this epoch begin.
  __device__ __forceinline__ int64_t Parity() const { return epoch & 1 ? F::Bytes(pass().max_units) : 0; }
  __device__ __forceinline__ uint8_t* Frame(int64_t offset) const { return pass().frames + Parity() + offset; }

  // The arrays of a layer, for NextLayer to find; ahead of time, since they come from far away. By the whole warp.
  __device__ __forceinline__ void Fetch(int of_layer) {
    constexpr int kPieces = int(sizeof(LayerArrays) / 8);
    static_assert(sizeof(LayerArrays) % 8 == 0 && kPieces <= 32, "a lane each");
    if (of_layer < pass().count_layers && lane() < kPieces)
      reinterpret_cast<uint64_t*>(&at_hand[of_layer % 2])[lane()] =
          reinterpret_cast<const uint64_t*>(layers + of_layer)[lane()];
    __syncwarp();
  }
  // Goes on to the next layer: what is written from here on belongs to the next epoch. By the whole warp, after Fetch.
  __device__ __forceinline__ void NextLayer() {
    __syncwarp();
    if (lane() == 0) layer = layer + 1, epoch = epoch + 1, moved = false;
    __syncwarp();
  }

  // Goes on to the next GEMM. By the whole warp.
  __device__ __forceinline__ void Next(Dense next) {
    __syncwarp();
    if (lane() == 0) gemm = next;
    __syncwarp();
  }

  // Tasks of one warp each, shared among the row warps of all SMs: neighbours go to different SMs. Warp `first` of each
  // comes first: an MMA warp, since they are done with a GEMM before its sums are added, or warp 1, which is not.
  template <typename Task>
  __device__ __forceinline__ void ForTasks(int n, const Task& task, int first = kFirstMmaWarp) const {
#pragma unroll 1
    for (int i = FirstTask(first); i < n; i += TaskStride()) task(i);
  }
  // The same among few SMs, the last ones, which have the least to multiply: `each` warps of an SM, from warp `first` on.
  template <typename Task>
  __device__ __forceinline__ void ForTasksOfLast(int n, int each, const Task& task, int first) const {
    const int some = Min((n + each - 1) / each, blocks), turn = Turn(first);
    if (block < blocks - some || turn >= each) return;
#pragma unroll 1
    for (int i = blocks - 1 - block + some * turn; i < n; i += some * each) task(i);
  }
  __device__ __forceinline__ int FirstTask(int first = kFirstMmaWarp) const { return block + blocks * Turn(first); }
  // Of a row warp: its number if warp `first` is 0.
  __device__ __forceinline__ int Turn(int first = kFirstMmaWarp) const {
    return (warp + kRowWarps - first) % kRowWarps;
  }
  __device__ __forceinline__ int TaskStride() const { return blocks * kRowWarps; }
};

inline constexpr int kContextsAt = kPassBytes, kContextBytes = 256;  // in shared memory, one a warp

// The warp's context, found anew: what lives as long as a pointer to it is kept on the stack, and comes back late at the
// start of each phase.
template <typename S>
__device__ __forceinline__ Context<S>& Anew() {
  static_assert(sizeof(Context<S>) <= kContextBytes, "see kContextBytes");
  return *reinterpret_cast<Context<S>*>(ptx::DynamicShared() + kContextsAt + ptx::ThreadOfBlock() / 32 * kContextBytes);
}

inline constexpr int kStamps = 32;

// Notes `value` at `at` of this warp and the layer at hand, for scripts/timeline.py; nothing in other builds.
template <typename S>
__device__ __forceinline__ void Note(const Context<S>& c, int at, uint64_t value) {
#if defined(MUSEJAX_LAYER_STAMPS)
  if (c.lane() != 0 || !c.pass().stamps) return;
  c.pass().stamps[((int64_t(c.block) * kWarps + c.warp) * kMaxLayers + c.layer) * kStamps + at] = value;
#endif
}
// The time at point `at` (Point in layer.cuh).
template <typename S>
__device__ __forceinline__ void Stamp(const Context<S>& c, int at) {
#if defined(MUSEJAX_LAYER_STAMPS)
  Note(c, at, ptx::GlobalTimer());
#endif
}

// Calls put(frames of this epoch, slice) for every rank that is to see a value of local slice `slice_here`. What does
// not depend on the rank is worked out before, for a store ends what the compiler knows of memory.
template <typename S, typename Put>
__device__ __forceinline__ void ForRanks(const Context<S>& c, int slice_here, const Put& put) {
  const Exchange& to = c.pass().exchange;
  const int count = to.count;
  const int64_t parity = c.Parity();
#pragma unroll 1
  for (int r = 0; r < count; ++r) put(to.frames[r] + parity, to.first_slice[r] + slice_here);
}

// Where the small arrays of the layer at hand lie.
template <typename S>
__device__ __forceinline__ SmallLayout SmallOf(bool nvfp4) {
  constexpr SmallLayout kNvfp4(S::kShape, true), kBf16(S::kShape, false);
  return nvfp4 ? kNvfp4 : kBf16;
}
template <typename S>
__device__ __forceinline__ SmallLayout SmallOf(const Context<S>& c) {
  return SmallOf<S>(c.arrays().nvfp4);
}

}  // namespace musejax::layer

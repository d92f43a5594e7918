// What a thread of a drafter's kernels knows: the launch, who it is, the frames, and the barrier between supersteps.
//
// A frame is a global array. A superstep reads what those before it wrote; a barrier of this rank ends it, or, where it
// wrote into other ranks' frames, one of all ranks. Lemma (reuse): between the last reading of an array that other
// ranks write and the next writing lies a barrier of all ranks. x and squares are written at the ends of sublayers,
// and last read in the GEMM (of the head: the candidates) after it, which ends before the exchange of o, act or the
// tops; delta and o are written after an exchange of x that all their readers have passed; act after one of delta or
// x; tops and gate after many. The context arrays belong to the launches that commit: the first barrier of such a
// launch, before which nothing is sent, is one of all ranks.
#pragma once

#include "comm/barrier.cuh"
#include "common/draft_model.h"

namespace musejax::draft {

using comm::Scope;

inline constexpr int kRows = int(kMaxRows);
inline constexpr int kWarps = 16, kThreads = 32 * kWarps;
inline constexpr int kMaxLayers = 16;
inline constexpr int kMaxCandidates = 16;  // of a position
inline constexpr int kPiece = 32;          // positions of an attention unit
inline constexpr int kSegment = 256;       // columns of the head that a warp looks through
inline constexpr int kMaxSegments = 256;   // of a slice

// Numbers of phases in error reports (comm/errors.cu).
enum Phase : int { kBlock = comm::kDraftPhases, kCandidates, kContext };

MUSEJAX_FN constexpr int CeilDiv(int64_t n, int64_t unit) { return int((n + unit - 1) / unit); }

// Leaves of a sum of squares in a slice.
MUSEJAX_FN constexpr int LeavesOf(const DraftModel& m) { return CeilDiv(m.shape.hidden_slice(), kLeaf); }
MUSEJAX_FN constexpr int SegmentsOf(const DraftModel& m) { return CeilDiv(m.vocab / kSlices, kSegment); }
// Pieces that hold the positions which a block sees, at most.
MUSEJAX_FN constexpr int PiecesOf(int64_t slots) { return CeilDiv(slots + kRows, kPiece) + 1; }

// Byte offsets of the frames of a rank of `slices` slices. Rows are kRows everywhere.
struct Frames {
  // all ranks write
  int64_t x, squares;                               // bf16 [8][row][hidden/8], f32 [row][8][leaves]
  int64_t ctx, ctx_squares;                         // the same, of a commit
  int64_t delta;                                    // f32 [8][row][delta_rows]
  int64_t o, act;                                   // bf16 [heads][row][c], [8][row][inner/8]
  int64_t top_values, top_ids, top_sums, gate;      // [8][row][kMaxCandidates], [8][row], f32 [8][row][rank/8]
  // this rank's own
  int64_t q, k, v;                                  // bf16 [heads here][row][c]
  int64_t part, part_most, part_sum;                // f32 [heads here][piece][row][c], [heads here][piece][row]
  int64_t found, found_sums;                        // Ranked [slice][row][segment][16], f32 [slice][row][segment]
  int64_t partial;                                  // f32 [tile][chunk][row][16], see gemm.cuh
  int64_t bytes;

  Frames() = default;
  MUSEJAX_FN Frames(const DraftModel& m, int64_t slices, int64_t slots) {
    const DraftShape& s = m.shape;
    const int64_t heads = slices * s.heads_slice(), kv = slices * s.kv_slice(), pieces = PiecesOf(slots);
    int64_t at = comm::kBarrierBytes;
    const auto take = [&](int64_t size) {
      const int64_t begin = at;
      at += Padded(size, kAlign);
      return begin;
    };
    x = take(2 * kRows * s.hidden), squares = take(4 * kRows * kSlices * LeavesOf(m));
    ctx = take(2 * kRows * s.hidden), ctx_squares = take(4 * kRows * kSlices * LeavesOf(m));
    delta = take(4 * kSlices * kRows * s.delta_rows());
    o = take(2 * kRows * s.q_width()), act = take(2 * kRows * s.inner);
    top_values = take(4 * kSlices * kRows * kMaxCandidates), top_ids = take(4 * kSlices * kRows * kMaxCandidates);
    top_sums = take(4 * kSlices * kRows), gate = take(4 * kRows * s.rank);
    q = take(2 * heads * kRows * s.head_dim), k = take(2 * kv * kRows * s.head_dim);
    v = take(2 * kv * kRows * s.head_dim);
    part = take(4 * heads * pieces * kRows * s.head_dim);
    part_most = take(4 * heads * pieces * kRows), part_sum = take(4 * heads * pieces * kRows);
    found = take(8 * slices * kRows * SegmentsOf(m) * kMaxCandidates);
    found_sums = take(4 * slices * kRows * SegmentsOf(m));
    const auto sums = [&](int64_t rows, int64_t width) {
      return slices * Padded(rows, kTile) * kRows * 4 * (width / Chunk(width));
    };
    const auto larger = [](int64_t a, int64_t b) { return a > b ? a : b; };
    int64_t most = sums(m.vocab / kSlices, s.hidden) + sums(s.rank_slice(), s.hidden);
    most = larger(most, kMaxLayers * sums(2 * s.kv_rows(), s.hidden));
    most = larger(larger(most, sums(s.qkv_rows(), s.hidden)), sums(2 * s.inner_slice(), s.hidden));
    most = larger(larger(most, sums(s.hidden_slice(), s.inner)), sums(s.hidden_slice(), s.q_width()));
    most = larger(larger(most, sums(s.hidden_slice(), s.taps_width())), sums(s.delta_rows(), s.hidden));
    partial = take(most);
    bytes = at;
  }
};

struct LayerArrays {
  const uint8_t* dense;
  const float* small;
  uint16_t *keys, *values;  // rings [heads here][slots][c]: position p has slot p % slots
};

// What both launches are given; every block keeps it in shared memory.
struct Launch {
  DraftModel model;
  Frames at;
  comm::Exchange exchange;
  int rank, ranks, slices;  // ranks: those that run
  int layers, rows, slots;  // rows: of the block, or of a commit
  comm::Passed* passed;     // [blocks]
  uint32_t* abort;
  const uint32_t* budget;  // of a wait, in 1,024 ns
  comm::ErrorBlock* error;
  const float* cos_sin;  // [rows][2][c/2]
  LayerArrays layer[kMaxLayers];
};

// A block through all layers, and its candidates.
struct DraftParams : Launch {
  const uint16_t* embedded;  // [slices here][rows][hidden/8]
  const int32_t *anchor, *length;
  const float* norm;
  const uint8_t *lm_head, *selector;
  const uint16_t *predecessor, *successor;  // [vocab][rank]
  int num_tokens;
  int32_t* tokens;   // [rows - 1][candidates]
  float* scores;     // [rows - 1][candidates][candidates]
  float* coverage;   // [rows - 1]
};

// Tapped features of committed positions into the rings.
struct CommitParams : Launch {
  const float* taps;  // [rows][taps * hidden]
  const int32_t *start, *count;
  const uint8_t* fc;
  const float* hidden_norm;
};

__device__ __forceinline__ int Warp() { return int(threadIdx.x) / 32; }
__device__ __forceinline__ int Lane() { return int(threadIdx.x) % 32; }

// Of a block, in shared memory: on the stack of each thread it would take the place of everything else in L1.
struct Context {
  Launch p;
  comm::Waiter waiter;
  comm::Barrier barrier;

  template <typename T>
  __device__ T* Frame(int64_t offset) const {
    return reinterpret_cast<T*>(p.exchange.frames[p.rank] + offset);
  }
  // task(i) for i = 0 .. n - 1, each by one warp of the grid.
  template <typename Task>
  __device__ void ForTasks(int n, const Task& task) const {
    for (int i = Warp() * int(gridDim.x) + int(blockIdx.x); i < n; i += kWarps * int(gridDim.x)) task(i);
  }
  // body(frames, slice there) for every rank that gets the finished values of a slice here.
  template <typename Body>
  __device__ void ForRanks(int slice, const Body& body) const {
    for (int r = 0; r < p.exchange.count; ++r) body(p.exchange.frames[r], p.exchange.first_slice[r] + slice);
  }
};

}  // namespace musejax::draft

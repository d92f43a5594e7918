// Row tasks: one warp and one row of a block of at most 64 columns (common/rows.cuh). All between GEMMs is made of these.
#pragma once

#include "common/rows.cuh"
#include "layer/context.cuh"

namespace musejax::layer {

// The sum of squares of a row from the sums of its kLeaves leaves, kEach of them in a lane from Mine() on: inside each
// of 8 slices ascending from +0, then the slices. In all lanes. A slice's leaves lie in 4 neighbouring lanes, which
// pass its sum on; or one a lane.
template <int kLeaves>
struct Leaves {
  static constexpr int kLanes = kLeaves >= 32 ? 4 : 1, kEach = kLeaves / int(kSlices) / kLanes;
  static constexpr bool kSideBySide = kEach % 2 == 0;
  static __device__ __forceinline__ int Lane() { return threadIdx.x % (kLanes * int(kSlices)); }
  static __device__ __forceinline__ int Mine() { return Lane() * kEach; }

  static __device__ __forceinline__ float Sum(const float* leaf) {
    float slice = 0.0f, total = 0.0f;
#pragma unroll
    for (int turn = 0; turn < kLanes; ++turn) {
      if (turn > 0) {
        const float before = __shfl_up_sync(kAllLanes, slice, 1);
        if (Lane() % kLanes == turn) slice = before;
      }
      if (Lane() % kLanes == turn)
#pragma unroll
        for (int i = 0; i < kEach; ++i) slice = slice + leaf[i];
    }
#pragma unroll
    for (int s = 0; s < kSlices; ++s) total = total + __shfl_sync(kAllLanes, slice, s * kLanes + kLanes - 1);
    return total;
  }
};

inline __device__ __noinline__ float SigmoidOf(float x) { return Sigmoid(x); }

// ---- records: a row of a block in MMA operand order --------------------------------------------------------------
//
// Of 16 columns, t (of 4) holds 2t, 2t + 1 in its even and 2t + 8, 2t + 9 in its odd register. Words of t lie together:
// word w of t is at [t][w].

template <int kWidth>
__device__ __forceinline__ Word* RecordAt(uint8_t* frame, int64_t row) {
  return reinterpret_cast<Word*>(frame) + row * 4 * RecordWords(kWidth);
}

// Of a row that lies two columns a lane: the word that this lane (below 4 RecordWords) publishes.
template <int kWidth>
__device__ __forceinline__ Word RecordWord(uint32_t columns, uint32_t tag) {
  constexpr int kWords = RecordWords(kWidth), kRegs = RecordRegisters(kWidth);
  const int lane = threadIdx.x % 32, t = lane / kWords % 4, first = lane % kWords * 3;
  uint32_t r[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int reg = first + i < kRegs ? first + i : 0;
    r[i] = __shfl_sync(kAllLanes, columns, reg * 4 + t);  // that lane's two columns are register reg of t
  }
  return MakeWord(r[0], r[1], r[2], tag);
}
template <int kWidth>
__device__ __forceinline__ void PublishRecord(Word* record, const Word& word) {
  const int lane = threadIdx.x % 32;
  if (lane < 4 * RecordWords(kWidth)) ptx::StRelaxed<Scope::kSys>(record + lane, word);
}

// The same row two columns a lane, from the words that lanes receive at WordOfLane.
template <int kWidth>
__device__ __forceinline__ const Word* WordOfLane(const Word* record) {
  return record + Min(int(threadIdx.x % 32), 4 * RecordWords(kWidth) - 1);
}
template <int kWidth>
__device__ __forceinline__ uint32_t ColumnsOf(const Word& word) {
  constexpr int kWords = RecordWords(kWidth);
  const int lane = threadIdx.x % 32, reg = lane / 4, from = lane % 4 * kWords + reg / 3;
  const uint32_t r0 = __shfl_sync(kAllLanes, Register(word, 0), from);
  const uint32_t r1 = __shfl_sync(kAllLanes, Register(word, 1), from);
  const uint32_t r2 = __shfl_sync(kAllLanes, Register(word, 2), from);
  const uint32_t out = reg % 3 == 0 ? r0 : reg % 3 == 1 ? r1 : r2;
  return lane < kWidth / 2 ? out : 0;
}

}  // namespace musejax::layer

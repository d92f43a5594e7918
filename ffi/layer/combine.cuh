// From expert rows to m: post-expert norm of each slot and the weighted sum in the order the model states.
//
// A task is one row of one block of m here. The slots' norms need sums of squares over all slices, so a warp publishes
// those of all its tasks before it waits for any. Padding rows get zeros.
//
// Bits: as cpu/combine.cc Combine.
#pragma once

#include <climits>

#include "layer/route.cuh"

namespace musejax::layer {

template <typename S>
struct CombineTask {
  static constexpr int kBlocks = S::kMoeBlocks / int(kSlices);  // of a slice
  int row, slice, block;                                        // slice here, block in it
  __device__ explicit CombineTask(int task)
      : row(task % kRows), slice(task / kRows / kBlocks), block(task / kRows % kBlocks) {}
};

// z = r(y r(1 + gamma)) of all slots of a row, two columns a lane.
template <typename S>
__device__ __forceinline__ void ReceiveSlots(Context<S>& c, const CombineTask<S>& task, uint32_t (&z)[S::kTopK]) {
  constexpr int kWidth = S::kMoeBlock, kTiles = kWidth / 16;
  const int block = task.slice * CombineTask<S>::kBlocks + task.block;
  const float* gamma = c.arrays().small + SmallOf(c).post_expert_norm;
  const Two gain = Centred(Columns<kWidth>(gamma, c.pass().rank * S::kMoeBlocksHere + block, c.lane()));
  // Of 16 columns, lanes 0 to 3 want the even registers of words 0 to 3, lanes 4 to 7 the odd ones.
  const int tile = block * kTiles + c.lane() / 8 % kTiles;
  const Word* first = RecordAt<16>(c.Frame(Frames<S>::y), tile * S::kPairs + task.row * S::kTopK) + c.lane() % 4;
  Word w[S::kTopK];
  Receive<Scope::kGpu>(c.waiter, c.epoch, [&](int slot) { return first + slot * 4; }, w);
#pragma unroll
  for (int slot = 0; slot < S::kTopK; ++slot) {
    const Two y = Unpack(c.lane() / 4 % 2 ? Register(w[slot], 1) : Register(w[slot], 0));
    z[slot] = c.lane() < kWidth / 2 ? PackBf16(y.a * gain.a, y.b * gain.b) : 0;
  }
}

template <typename S>
__device__ __forceinline__ void PublishSlotSums(const Context<S>& c, const CombineTask<S>& task,
                                                const uint32_t (&z)[S::kTopK]) {
  float mine = 0.0f;  // of slot `lane`
#pragma unroll
  for (int slot = 0; slot < S::kTopK; ++slot) {
    const float leaf = LeafSquares<S::kMoeBlock>(Unpack(z[slot]));
    if (c.lane() == slot) mine = leaf;
  }
  if (c.lane() >= S::kTopK) return;
  const int pair = task.row * S::kTopK + c.lane();
  ForRanks(c, task.slice, [&](uint8_t* frames, int slice) {
    uint64_t* sums = reinterpret_cast<uint64_t*>(c.FrameOf(frames, Frames<S>::sums_y));
    PublishFloat<Scope::kSys>(sums + pair * S::kMoeBlocks + slice * CombineTask<S>::kBlocks + task.block, mine,
                              c.epoch);
  });
}

// 1 / rms of each slot of a row, in all lanes. The totals of four slots are made at a time, lane % 8 a slice of one.
template <typename S>
__device__ __forceinline__ void SlotRstds(Context<S>& c, int row, float (&rstd)[S::kTopK]) {
  constexpr int kEach = S::kMoeBlocks / int(kSlices), kFours = (S::kTopK + 3) / 4;
  static_assert(kEach % 2 == 0 || kFours == 1, "ReceiveFloats takes pairs side by side");
  const uint64_t* sums = reinterpret_cast<const uint64_t*>(c.Frame(Frames<S>::sums_y));
  float leaf[kFours * kEach];
  ReceiveFloats(
      c.waiter, c.epoch,
      [&](int i) {
        const int slot = Min(i / kEach * 4 + c.lane() / 8, S::kTopK - 1);
        return sums + (row * S::kTopK + slot) * S::kMoeBlocks + c.lane() % 8 * kEach + i % kEach;
      },
      leaf);
  __syncwarp();
#pragma unroll
  for (int four = 0; four < kFours; ++four) {
    float slice = 0.0f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) slice = slice + leaf[four * kEach + i];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) total = total + __shfl_sync(kAllLanes, slice, c.lane() / 8 * 8 + s);
    const float mine = Rstd(total, S::kMoe, c.pass().model.post_eps);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (four * 4 + i < S::kTopK) rstd[four * 4 + i] = __shfl_sync(kAllLanes, mine, 8 * i);
  }
}

// The weighted sum of normed slots n: flat, or owner group by owner group, each rounded. Groups without a slot would
// add +0 to a sum that is never -0, so only the others are visited, ascending.
template <typename S>
__device__ __forceinline__ Two WeightedSum(const Context<S>& c, const RouteShared& route, int row,
                                           const Two (&n)[S::kTopK]) {
  const int groups = int(c.pass().model.combine_groups), size = S::kExperts / (groups ? groups : 1);
  const int owner = route.ids[row][c.lane() % S::kTopK] / size;
  int group[S::kTopK];
#pragma unroll
  for (int slot = 0; slot < S::kTopK; ++slot) group[slot] = __shfl_sync(kAllLanes, owner, slot);
  Two total = {0.0f, 0.0f};
#pragma unroll 1
  for (int last = -1;;) {
    int next = INT_MAX;
#pragma unroll
    for (int slot = 0; slot < S::kTopK; ++slot)
      if (group[slot] > last) next = Min(next, group[slot]);
    if (next == INT_MAX) return total;
    Two sum = {0.0f, 0.0f};
#pragma unroll
    for (int slot = 0; slot < S::kTopK; ++slot) {
      if (group[slot] != next) continue;
      const float weight = route.weights[row][slot];
      sum = {sum.a + weight * n[slot].a, sum.b + weight * n[slot].b};
    }
    if (groups) sum = Rounded(sum);
    total = {total.a + sum.a, total.b + sum.b};
    last = next;
  }
}

// One block of m, to all ranks.
template <typename S>
__device__ __noinline__ void FinishCombine(Context<S>& c, const RouteShared& route, const CombineTask<S>& task,
                                           const uint32_t (&z)[S::kTopK]) {
  InShared(c);
  InShared(route);
  constexpr int kWidth = S::kMoeBlock;
  Two m = {0.0f, 0.0f};
  if (task.row < c.valid) {
    float rstd[S::kTopK];
    SlotRstds(c, task.row, rstd);
    Two n[S::kTopK];
#pragma unroll
    for (int slot = 0; slot < S::kTopK; ++slot) {
      const Two x = Unpack(z[slot]);
      n[slot] = {x.a * rstd[slot], x.b * rstd[slot]};
    }
    m = WeightedSum(c, route, task.row, n);
  }
  const Word word = RecordWord<kWidth>(PackBf16(m.a, m.b), c.epoch);
  ForRanks(c, task.slice, [&](uint8_t* frames, int slice) {
    const int block = slice * CombineTask<S>::kBlocks + task.block;
    PublishRecord<kWidth>(RecordAt<kWidth>(c.FrameOf(frames, Frames<S>::m), block * kRows + task.row), word);
  });
}

// Row warps, after ExpertSums. A warp's tasks pass twice, the last one that published its sums first, so that a warp
// with one task keeps its slots in registers.
template <typename S>
__device__ __noinline__ void CombineExperts(Context<S>& c, RouteShared& route) {
  InShared(c);
  InShared(route);
  const int begin = c.block + c.blocks * (c.warp - 1), stride = c.blocks * kRowWarps;
  const int tasks = S::kMoeBlocksHere * kRows;
  const int mine = begin < tasks ? (tasks - begin + stride - 1) / stride : 0;
  uint32_t z[S::kTopK] = {};
#pragma unroll 1
  for (int step = 0; step < 2 * mine; ++step) {
    const bool finish = step >= mine;
    const CombineTask<S> task(begin + stride * (finish ? step - mine : mine - 1 - step));
    if (step != mine && task.row < c.valid) ReceiveSlots(c, task, z);
    if (finish)
      FinishCombine(c, route, task, z);
    else if (task.row < c.valid)
      PublishSlotSums(c, task, z);
  }
}

}  // namespace musejax::layer

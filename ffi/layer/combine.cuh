// From expert rows to m: post-expert norm of each slot and the weighted sum in the order the model states.
//
// A task is one row of one block of m here. The slots' norms need sums of squares over all slices, so a warp publishes
// those of all its tasks before it waits for any. Padding rows get zeros.
//
// Bits: as cpu/combine.cc Combine.
#pragma once

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

// The leaf sums of squares of up to 8 slots, each as LeafSquares, slot `lane` % 8 in a lane. At each step of the trees
// a lane keeps half of the slots and hands the sums of the others on, so that all slots take few shuffles.
template <int kWidth, int kSlots>
__device__ __forceinline__ float LeavesOfSlots(const uint32_t (&z)[kSlots]) {
  const int lane = threadIdx.x % 32;
  Two v[8];
#pragma unroll
  for (int slot = 0; slot < 8; ++slot) {
    const Two x = Unpack(slot < kSlots ? z[slot < kSlots ? slot : 0] : 0);
    v[slot] = {x.a * x.a, x.b * x.b};
  }
#pragma unroll
  for (int x = 4; x; x /= 2) {
    const bool upper = lane & x;
#pragma unroll
    for (int slot = 0; slot < x; ++slot) {
      const Two keep = upper ? v[slot + x] : v[slot], give = upper ? v[slot] : v[slot + x];
      v[slot] = {keep.a + __shfl_xor_sync(kAllLanes, give.a, x), keep.b + __shfl_xor_sync(kAllLanes, give.b, x)};
    }
  }
  const float tree = v[0].a + v[0].b;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth / 16; ++i) sum = sum + __shfl_sync(kAllLanes, tree, 8 * i + lane % 8);
  return sum;
}

template <typename S>
__device__ __forceinline__ void PublishSlotSums(const Context<S>& c, const CombineTask<S>& task,
                                                const uint32_t (&z)[S::kTopK]) {
  const float mine = LeavesOfSlots<S::kMoeBlock>(z);
  if (c.lane() >= S::kTopK) return;
  const int pair = task.row * S::kTopK + c.lane();
  const uint32_t tag = c.epoch;
  ForRanks(c, task.slice, [&](uint8_t* frames, int slice) {
    uint64_t* sums = reinterpret_cast<uint64_t*>(frames + Frames<S>::sums_y);
    PublishFloat<Scope::kSys>(sums + pair * S::kMoeBlocks + slice * CombineTask<S>::kBlocks + task.block, mine, tag);
  });
}

// 1 / rms of slot `lane` of a row. The totals of four slots are made at a time, lane % 8 a slice of one.
template <typename S>
__device__ __forceinline__ float SlotRstds(Context<S>& c, int row) {
  constexpr int kEach = S::kMoeBlocks / int(kSlices), kFours = (S::kTopK + 3) / 4;
  const uint64_t* sums = reinterpret_cast<const uint64_t*>(c.Frame(Frames<S>::sums_y));
  float leaf[kFours * kEach], total[kFours] = {};
  ReceiveFloats<kEach % 2 == 0>(
      c.waiter, c.epoch,
      [&](int i) {
        const int slot = Min(i / kEach * 4 + c.lane() / 8, S::kTopK - 1);
        return sums + (row * S::kTopK + slot) * S::kMoeBlocks + c.lane() % 8 * kEach + i % kEach;
      },
      leaf);
#pragma unroll
  for (int four = 0; four < kFours; ++four) {
    float slice = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) slice = slice + leaf[four * kEach + i];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) total[four] = total[four] + __shfl_sync(kAllLanes, slice, c.lane() / 8 * 8 + s);
  }
  float mine = __shfl_sync(kAllLanes, total[0], c.lane() % 4 * 8);
  if constexpr (kFours == 2) {
    const float other = __shfl_sync(kAllLanes, total[1], c.lane() % 4 * 8);
    if (c.lane() / 4 % 2) mine = other;
  }
  return Rstd(mine, S::kMoe, c.pass().model.post_eps);
}

// The order in which a row's slots are added, by (owner group, slot): in lane `slot` the slot's place and its group.
struct SlotOrder {
  int place, group;
};
template <typename S>
__device__ __forceinline__ SlotOrder OrderOfSlots(const Context<S>& c, const RouteShared& route, int row) {
  const int groups = int(c.pass().model.combine_groups), size = S::kExperts / (groups ? groups : 1);
  SlotOrder mine{0, route.ids[row][c.lane() % S::kTopK] / size};
#pragma unroll
  for (int slot = 0; slot < S::kTopK; ++slot) {
    const int group = __shfl_sync(kAllLanes, mine.group, slot);
    mine.place += group < mine.group || (group == mine.group && slot < c.lane());
  }
  if (c.lane() >= S::kTopK) mine.place = -1;
  return mine;
}

// The weighted sum of normed slots: flat, or owner group by owner group, each rounded.
//   rstd: of slot `lane`
template <typename S>
__device__ __forceinline__ Two WeightedSum(const Context<S>& c, const RouteShared& route, const SlotOrder& order,
                                           int row, const uint32_t (&z)[S::kTopK], float rstd) {
  const bool grouped = c.pass().model.combine_groups != 0;
  Two total = {0.0f, 0.0f}, sum = {0.0f, 0.0f};
  const auto flush = [&] {
    if (grouped) sum = Rounded(sum);
    total = {total.a + sum.a, total.b + sum.b}, sum = {0.0f, 0.0f};
  };
  int last = -1;
#pragma unroll 1
  for (int place = 0; place < S::kTopK; ++place) {
    const int slot = __ffs(int(__ballot_sync(kAllLanes, order.place == place))) - 1;
    const int group = __shfl_sync(kAllLanes, order.group, slot);
    const float scale = __shfl_sync(kAllLanes, rstd, slot), weight = route.weights[row][slot & (kMostSlots - 1)];
    uint32_t columns = z[0];
#pragma unroll
    for (int i = 1; i < S::kTopK; ++i) columns = slot == i ? z[i] : columns;
    if (place > 0 && group != last) flush();
    last = group;
    const Two x = Unpack(columns);
    sum = {sum.a + weight * (x.a * scale), sum.b + weight * (x.b * scale)};
  }
  flush();
  return total;
}

// One block of m, to all ranks.
template <typename S>
__device__ __forceinline__ void FinishCombine(Context<S>& c, const RouteShared& route, const CombineTask<S>& task,
                                              const SlotOrder& order, const uint32_t (&z)[S::kTopK]) {
  constexpr int kWidth = S::kMoeBlock;
  Two m = {0.0f, 0.0f};
  if (task.row < c.valid) m = WeightedSum(c, route, order, task.row, z, SlotRstds(c, task.row));
  const Word word = RecordWord<kWidth>(PackBf16(m.a, m.b), c.epoch);
  ForRanks(c, task.slice, [&](uint8_t* frames, int slice) {
    const int block = slice * CombineTask<S>::kBlocks + task.block;
    PublishRecord<kWidth>(RecordAt<kWidth>(frames + Frames<S>::m, block * kRows + task.row), word);
  });
}

// Row warps, after ExpertSums. A warp's tasks pass twice, the last one that published its sums first, so that a warp
// with one task keeps its slots in registers.
template <typename S>
__device__ __noinline__ void CombineExperts(Context<S>&, RouteShared& route) {
  Context<S>& c = Anew<S>();
  InShared(route);
  const int begin = c.FirstTask(), stride = c.TaskStride(), tasks = S::kMoeBlocksHere * kRows;
  const int mine = begin < tasks ? (tasks - begin + stride - 1) / stride : 0;
  uint32_t z[S::kTopK] = {};
#pragma unroll 1
  for (int step = 0; step < 2 * mine; ++step) {
    const bool finish = step >= mine;
    const CombineTask<S> task(begin + stride * (finish ? step - mine : mine - 1 - step));
    const SlotOrder order = OrderOfSlots(c, route, task.row);
    if (step != mine && task.row < c.valid) ReceiveSlots(c, task, z);
    if (finish)
      FinishCombine(c, route, task, order, z);
    else if (task.row < c.valid)
      PublishSlotSums(c, task, z);
  }
}

}  // namespace musejax::layer

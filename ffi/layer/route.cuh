// Routing inside the kernel: every SM makes the choices of all rows and the list of expert visits for itself, from the
// router's scores, so that nothing is exchanged; and the norm of the rows that the experts multiply.
//
// Bits: ids, weights and rows are those of cpu/router.cc Route and of cpu/experts.cc ExpertsUp.
#pragma once

#include "layer/partition.h"
#include "layer/quantize.cuh"
#include "layer/residual.cuh"
#include "layer/stream.cuh"

namespace musejax::layer {

inline constexpr int kMostExperts = 256, kMostSlots = 8;

// Reuse: choices and visits are written anew after scores of the next layer, which every pair of this layer has gone
// into; only warp 0 may lag behind, so it says when it has taken the list.
struct RouteShared {
  uint64_t listed, taken;  // mbarriers, one arrival a list each: the list is made; warp 0 has read it
  Visit visits[kRows * kMostSlots];
  float weights[kRows][kMostSlots];
  float maxima[2][2][kMmaWarps][kVisitPairs];  // [up, down][visit % 2][MMA warp][column], for per-token activations
  uint32_t hits[2][kMostExperts];              // [list % 2][expert]: rows that chose it, a bit each
  int16_t ids[kRows][kMostSlots];              // the number of experts in padding rows
  int visit_count, lists;                      // visits of the list; lists made in this launch
};
static_assert(sizeof(RouteShared) <= 6144, "see sizes in layer.cuh");

// By all threads, before a block barrier.
__device__ inline void InitRoute(RouteShared& route) {
  for (int i = threadIdx.x; i < 2 * kMostExperts; i += kThreads) route.hits[i / kMostExperts][i % kMostExperts] = 0;
  if (threadIdx.x != 0) return;
  route.visit_count = route.lists = 0;
  ptx::MbarrierInit(&route.listed, 1), ptx::MbarrierInit(&route.taken, 1);
  ptx::FenceMbarrierInit();
}

// ---- choices ----

struct Choice {
  int expert;
  float weight;
};

// Positive, and in the order in which biased scores rank: NaN as -infinity, -0 as +0.
__device__ __forceinline__ uint32_t RankOf(float biased) {
  const uint32_t u = biased == biased ? Bits(biased + 0.0f) : 0xFF800000u;
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The choices of one row, slot j in lane j. Whatever the scores, experts are distinct and exist.
template <typename S>
__device__ Choice ChooseForRow(Context<S>& c, int row) {
  constexpr int kEach = (S::kExperts + 31) / 32;  // experts of a lane
  const Model& m = c.pass().model;
  const float* bias = c.arrays().small + SmallOf(c).router_bias;
  // Experts of a lane, ascending: two side by side in each 64, or one in each 32.
  const auto number = [&](int i) { return kEach % 2 == 0 ? 2 * c.lane() + i % 2 + i / 2 * 64 : c.lane() + 32 * i; };
  const auto expert = [&](int i) { return Min(number(i), S::kExperts - 1); };
  float score[kEach];
  uint32_t rank[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) rank[i] = Bits(__ldg(bias + expert(i)));
  const uint64_t* scores = reinterpret_cast<const uint64_t*>(c.Frame(Frames<S>::scores)) + row * S::kExperts;
  ReceiveFloats(c.waiter, c.epoch, [&](int i) { return scores + expert(i); }, score);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    rank[i] = number(i) < S::kExperts ? RankOf(score[i] + Bits(rank[i])) : 0;  // 0: not to be had

  Choice mine{S::kExperts, 0.0f};
  float total = 0.0f;
#pragma unroll 1
  for (int slot = 0; slot < S::kTopK; ++slot) {
    uint32_t best = 0, at = ~0u;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (rank[i] > best) best = rank[i], at = number(i);
    const uint32_t top = __reduce_max_sync(kAllLanes, best);
    const int id = int(__reduce_min_sync(kAllLanes, best == top ? at : ~0u));  // ties: the lower id
    float taken = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (number(i) == id) rank[i] = 0, taken = score[i];
    taken = __shfl_sync(kAllLanes, taken, kEach % 2 == 0 ? id % 64 / 2 : id % 32);
    total = total + taken;
    if (c.lane() == slot) mine = {id, taken};
  }
  mine.weight = mine.weight / (total + m.route_eps) * m.routed_scale;
  return mine;
}

// Row warps of every SM: ids and weights of all rows into `route`, and of the pass into pass.ids. Then ListVisits.
template <typename S>
__device__ __noinline__ void ChooseExperts(Context<S>& c, RouteShared& route) {
  InShared(c);
  InShared(route);
#pragma unroll 1
  for (int row = c.warp - 1; row < kRows; row += kRowWarps) {
    Choice choice{S::kExperts, 0.0f};
    if (row < c.valid) choice = ChooseForRow(c, row);
    if (c.lane() >= S::kTopK) continue;
    route.ids[row][c.lane()] = int16_t(choice.expert);
    route.weights[row][c.lane()] = choice.weight;
    if (row < c.valid) atomicOr(&route.hits[route.lists % 2][choice.expert], 1u << row);
    if (row < c.pass().rows && row % c.blocks == c.block)
      c.pass().ids[(int64_t(c.layer) * c.pass().rows + row) * S::kTopK + c.lane()] = choice.expert;
  }
  __syncwarp();
}

// ---- visits ----

// The first warps, one thread a pair.
template <typename S>
__device__ void WriteVisits(Context<S>& c, RouteShared& route, int list) {
  constexpr int kWords = (S::kExperts + 31) / 32;
  const uint32_t* hits = route.hits[list % 2];
  VisitMasks<kWords> masks;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int visits = VisitsOf(hits[32 * i + c.lane()]);
    masks.one[i] = __ballot_sync(kAllLanes, visits >= 1), masks.two[i] = __ballot_sync(kAllLanes, visits >= 2);
  }
  WaitBarrier(c.waiter, &route.taken, (list + 1) % 2);
  const int pair = threadIdx.x - 32, row = pair / S::kTopK;
  const int expert = pair < S::kPairs ? route.ids[row][pair % S::kTopK] : S::kExperts;
  if (expert < S::kExperts) {
    const PairPlace place = PlaceOf(hits[expert], row);
    Visit& visit = route.visits[VisitsBelow(masks, expert) + place.visit];
    visit.pairs[place.column] = uint8_t(pair);
    if (place.column == 0) visit.expert = int16_t(expert), visit.count = int16_t(place.count);
  }
  if (pair == 0) route.visit_count = VisitsBelow(masks, 32 * kWords);
}

// Row warps, after ChooseExperts: the list of visits, and `listed` (phase n is list n of the launch) for warp 0.
template <typename S>
__device__ __noinline__ void ListVisits(Context<S>& c, RouteShared& route) {
  InShared(c);
  InShared(route);
  const int list = route.lists;
  ptx::BarSync(1, 32 * kRowWarps);
  const int thread = threadIdx.x - 32;
  if (32 * (c.warp - 1) < S::kPairs) WriteVisits(c, route, list);
  for (int i = thread; i < kMostExperts; i += 32 * kRowWarps) route.hits[(list + 1) % 2][i] = 0;
  if (thread == 0) route.lists = list + 1;
  ptx::BarSync(1, 32 * kRowWarps);
  if (thread == 0) ptx::MbarrierArrive(&route.listed);
}

// ---- the experts' input ----

// Row warps: h = r(rms(p) r(1 + gamma)), or with static activations its grid values, for this rank.
template <typename S>
__device__ __noinline__ void NormExperts(Context<S>& c) {
  InShared(c);
  constexpr int kWidth = S::kMoeBlock;
  using F = Frames<S>;
  const float* small = c.arrays().small;
  const SmallLayout at = SmallOf(c);
  const bool is_static = Takes(c, Activations::kStatic);
  const float input = is_static ? LargestScale(small + at.gate_up_input_scale, 2 * S::kExperts) : 1.0f;
  c.ForTasks(S::kMoeBlocks * kRows, [&](int task) {
    const int row = task % kRows, block = task / kRows;
    const Two gain = Centred(Columns<kWidth>(small + at.expert_norm, block, c.lane()));
    const Two p = Unpack(ReceiveColumns<kWidth>(c.waiter, RecordAt<kWidth>(c.Frame(F::p), task), c.epoch));
    const uint64_t* leaves = reinterpret_cast<const uint64_t*>(c.Frame(F::sums_p)) + row * S::kMoeBlocks;
    const float rstd = RstdOfLeaves<S::kMoeBlocks>(c.waiter, c.epoch, leaves, S::kMoe, c.pass().model.rms_eps);
    const Two rounded = Rounded({p.a * rstd * gain.a, p.b * rstd * gain.b});
    float h[2] = {rounded.a, rounded.b};
    if (is_static) QuantizeBlock(h, 1.0f / input);
    PublishRecord<kWidth>(RecordAt<kWidth>(c.Frame(F::h), task), RecordWord<kWidth>(PackBf16(h[0], h[1]), c.epoch));
  });
}

}  // namespace musejax::layer

// Routing inside the kernel: every rank makes the choices of all rows for itself, from the router's scores, and every
// SM the list of expert visits; and the norm of the rows that the experts multiply.
//
// Bits: ids, weights and rows are those of cpu/router.cc Route and of cpu/experts.cc ExpertsUp.
#pragma once

#include "layer/partition.h"
#include "layer/quantize.cuh"
#include "layer/residual.cuh"
#include "layer/stream.cuh"

namespace musejax::layer {

inline constexpr int kMostExperts = 256, kMostSlots = 8;

// Reuse: choices and visits are written anew after choices of the next layer, which every pair of this layer has gone
// into; only warp 0 may lag behind, so it says when it has taken the list.
struct RouteShared {
  uint64_t listed, taken;  // mbarriers, one arrival a list each: the list is made; warp 0 has read it
  Visit visits[kRows * kMostSlots];
  float weights[kRows][kMostSlots];
  uint32_t hits[2][kMostExperts];              // [list % 2][expert]: rows that chose it, a bit each
  int16_t ids[kRows][kMostSlots];              // the number of experts in padding rows
  UnitSpan spans[2];                           // [up, down]: this SM's units of the list
  int lists;                                   // made in this launch
};
static_assert(sizeof(RouteShared) <= 6144, "see sizes in layer.cuh");

// By all threads, before a block barrier.
__device__ inline void InitRoute(RouteShared& route) {
  for (int i = threadIdx.x; i < 2 * kMostExperts; i += kThreads) route.hits[i / kMostExperts][i % kMostExperts] = 0;
  if (threadIdx.x != 0) return;
  route.lists = 0;
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

// The best of experts kFirst to kFirst + kCount - 1 of a lane, the first of equals; a tree, for the sake of latency.
struct BestExpert {
  uint32_t rank;
  int at;
  float score;
};
template <int kFirst, int kCount, int kEach>
__device__ __forceinline__ BestExpert BestOf(const uint32_t (&rank)[kEach], const float (&score)[kEach]) {
  if constexpr (kCount == 1) {
    return {rank[kFirst], kFirst, score[kFirst]};
  } else {
    const BestExpert a = BestOf<kFirst, kCount / 2>(rank, score);
    const BestExpert b = BestOf<kFirst + kCount / 2, kCount - kCount / 2>(rank, score);
    return b.rank > a.rank ? b : a;
  }
}

// Of a row that chooses among kEach experts a lane.
template <typename S>
inline constexpr int kExpertsOfLane = (S::kExperts + 31) / 32;
template <typename S>
__device__ __forceinline__ int ExpertOfLane(int i) {
  return Min(int(threadIdx.x % 32) * kExpertsOfLane<S> + i, S::kExperts - 1);
}

// The choices of a row, slot j in lane j. Whatever the scores, experts are distinct and exist.
template <typename S>
__device__ __forceinline__ Choice ChooseForRow(const Context<S>& c, const float (&score)[kExpertsOfLane<S>],
                                               const float (&bias)[kExpertsOfLane<S>]) {
  constexpr int kEach = kExpertsOfLane<S>;
  const Model& m = c.pass().model;
  const int first = c.lane() * kEach;
  uint32_t rank[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)  // 0: not to be had
    rank[i] = first + i < S::kExperts ? RankOf(score[i] + bias[i]) : 0;

  Choice mine = {};
  float total = 0.0f;
#pragma unroll 1
  for (int slot = 0; slot < S::kTopK; ++slot) {
    // Ties go to the lower id: inside a lane to the first, among lanes to the lowest.
    const BestExpert best = BestOf<0, kEach>(rank, score);
    const uint32_t top = __reduce_max_sync(kAllLanes, best.rank);
    const int winner = (__ffs(int(__ballot_sync(kAllLanes, best.rank == top))) - 1) & 31;
    const float taken = __shfl_sync(kAllLanes, best.score, winner);
    const int id = Min(__shfl_sync(kAllLanes, first + best.at, winner), S::kExperts - 1);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (first + i == id) rank[i] = 0;
    total = total + taken;
    if (c.lane() == slot) mine = {id, taken};
  }
  mine.weight = mine.weight / (total + m.route_eps) * m.routed_scale;
  return mine;
}

// For each row one warp of this rank, on SMs that have little else to do: ids and weights to all SMs, and ids into
// pass.ids. If every SM chose for itself, all of them would read all scores, which takes longer than this way round.
template <typename S>
__device__ __noinline__ void ChooseExperts(const Context<S>&) {
  const Context<S>& c = Anew<S>();
  constexpr int kEach = kExpertsOfLane<S>, kChoosers = 4;  // of an SM: its last warps
  c.ForTasksOfLast(kRows, kChoosers, [&](int row) {
    if (row >= c.pass().rows) return;
    Choice choice{S::kExperts, 0.0f};
    if (row < c.valid) {
      float score[kEach], bias[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        bias[i] = __ldg(c.arrays().small + SmallOf(c).router_bias + ExpertOfLane<S>(i));
      const uint64_t* scores = reinterpret_cast<const uint64_t*>(c.Frame(Frames<S>::scores)) + row * S::kExperts;
      ReceiveFloats<kEach % 2 == 0>(
          c.waiter, c.epoch, [&](int i) { return scores + ExpertOfLane<S>(i); }, score);
      choice = ChooseForRow(c, score, bias);
    }
    if (c.lane() >= S::kTopK) return;
    const int pair = row * S::kTopK + c.lane();
    if (row < c.valid)
      Publish<Scope::kGpu>(reinterpret_cast<Word*>(c.Frame(Frames<S>::choices)) + pair, uint32_t(choice.expert),
                           __float_as_uint(choice.weight), 0, c.epoch);
    c.pass().ids[int64_t(c.layer) * c.pass().rows * S::kTopK + pair] = choice.expert;
  }, kWarps - kChoosers);
}

// ---- visits: by warps that do not multiply, a thread a pair ----

__device__ __forceinline__ void AwaitListers() { ptx::BarSync(3, 32 * kAdders); }

// The choice of a pair, in the list that comes next; `expert` of S::kExperts: none.
template <typename S>
__device__ __forceinline__ void TakeChoice(RouteShared& route, int pair, int expert, float weight) {
  const int row = pair / S::kTopK, slot = pair % S::kTopK;
  const bool chosen = uint32_t(expert) < uint32_t(S::kExperts);
  route.ids[row][slot] = int16_t(chosen ? expert : S::kExperts);
  route.weights[row][slot] = chosen ? weight : 0.0f;
  if (chosen) atomicOr(&route.hits[route.lists % 2][expert], 1u << row);
}

// Choices of all rows, those of padding none.
template <typename S>
__device__ __forceinline__ void ReceiveChoices(const Context<S>& c, RouteShared& route) {
  constexpr int kThreadsHere = 32 * kAdders, kEach = (S::kPairs + kThreadsHere - 1) / kThreadsHere;
  const int first = int(threadIdx.x) - 32, pairs = c.valid * S::kTopK;
  const Word* choices = reinterpret_cast<const Word*>(c.Frame(Frames<S>::choices));
  Word w[kEach];
  Receive<Scope::kGpu>(
      c.waiter, c.epoch, [&](int i) { return choices + Min(first + i * kThreadsHere, pairs - 1); }, w, pairs > 0);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int pair = first + i * kThreadsHere;
    if (pair < S::kPairs)
      TakeChoice<S>(route, pair, pair < pairs ? int(Register(w[i], 0)) : S::kExperts,
                    __uint_as_float(Register(w[i], 1)));
  }
}

template <typename S>
__device__ __forceinline__ void WriteVisits(const Context<S>& c, RouteShared& route, int list) {
  constexpr int kWords = (S::kExperts + 31) / 32;
  const uint32_t* hits = route.hits[list % 2];
  VisitMasks<kWords> masks;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int visits = VisitsOf(hits[32 * i + c.lane()]);
    masks.one[i] = __ballot_sync(kAllLanes, visits >= 1), masks.two[i] = __ballot_sync(kAllLanes, visits >= 2);
  }
  WaitBarrier(c.waiter, &route.taken, (list + 1) % 2);
#pragma unroll 1
  for (int pair = int(threadIdx.x) - 32; pair < S::kPairs; pair += 32 * kAdders) {
    const int row = pair / S::kTopK, expert = route.ids[row][pair % S::kTopK];
    if (expert >= S::kExperts) continue;
    const PairPlace place = PlaceOf(hits[expert], row);
    Visit& visit = route.visits[VisitsBelow(masks, expert) + place.visit];
    visit.pairs[place.column] = uint8_t(pair);
    if (place.column == 0) visit.expert = int16_t(expert), visit.count = int16_t(place.count);
  }
  if (c.warp == 1 && c.lane() < 2)
    route.spans[c.lane()] = UnitRange(VisitsBelow(masks, 32 * kWords), c.lane() ? S::kDownUnits : S::kUpUnits, c.block,
                                      c.blocks);
}

// After choices were taken; tells warp 0 by `listed` (phase n is list n of the launch). Other warps: AwaitList.
template <typename S>
__device__ __forceinline__ void ListVisits(const Context<S>& c, RouteShared& route) {
  const int list = route.lists, thread = int(threadIdx.x) - 32;
  AwaitListers();
  WriteVisits(c, route, list);
  for (int i = thread; i < kMostExperts; i += 32 * kAdders) route.hits[(list + 1) % 2][i] = 0;
  if (thread == 0) route.lists = list + 1;
  AwaitListers();
  if (thread == 0) ptx::MbarrierArrive(&route.listed);
}

// The visits of all rows' choices. By all row warps, of which those that multiply have nothing to do.
template <typename S>
__device__ __noinline__ void ListChoices(const Context<S>&, RouteShared& route) {
  const Context<S>& c = Anew<S>();
  InShared(route);
  if (c.warp >= kFirstMmaWarp) return;
  ReceiveChoices(c, route);
  ListVisits(c, route);
}
__device__ __forceinline__ void AwaitList() { ptx::BarSync(1, 32 * kRowWarps); }

// ---- the experts' input ----

// Two columns a lane of h = r(rms(p) r(1 + gamma)); task: block * kRows + row.
template <typename S>
__device__ __forceinline__ Two NormedColumns(const Context<S>& c, int task) {
  constexpr int kWidth = S::kMoeBlock;
  using F = Frames<S>;
  using L = Leaves<S::kMoeBlocks>;
  const int row = task % kRows, block = task / kRows;
  const Two gain = Centred(Columns<kWidth>(c.arrays().small + SmallOf(c).expert_norm, block, c.lane()));
  const Word* record = WordOfLane<kWidth>(RecordAt<kWidth>(c.Frame(F::p), task));
  const uint64_t* leaves = reinterpret_cast<const uint64_t*>(c.Frame(F::sums_p)) + row * S::kMoeBlocks + L::Mine();
  Word word[1];
  float leaf[L::kEach];
  ReceiveBoth<L::kSideBySide>(
      c.waiter, c.epoch, [&](int) { return record; }, word, [&](int i) { return leaves + i; }, leaf);
  const Two p = Unpack(ColumnsOf<kWidth>(word[0]));
  const float rstd = Rstd(L::Sum(leaf), S::kMoe, c.pass().model.rms_eps);
  return Rounded({p.a * rstd * gain.a, p.b * rstd * gain.b});
}

// The scales of a row from the largest magnitudes of its parts.
template <int kParts, typename S>
__device__ __forceinline__ RowScale ReceiveRowScale(const Context<S>& c, const uint64_t* maxima) {
  constexpr int kEach = (kParts + 31) / 32;
  float of_part[kEach], most = 0.0f;
  ReceiveFloats<false>(
      c.waiter, c.epoch, [&](int i) { return maxima + Min(c.lane() * kEach + i, kParts - 1); }, of_part);
#pragma unroll
  for (int i = 0; i < kEach; ++i) most = LargerAbs(most, of_part[i]);
  return PerTokenScale(LargestOfLanes(most));
}

// Of a task (NormedColumns), to this rank.
template <typename S>
__device__ __forceinline__ void PublishH(const Context<S>& c, int task, const float (&h)[2]) {
  constexpr int kWidth = S::kMoeBlock;
  PublishRecord<kWidth>(RecordAt<kWidth>(c.Frame(Frames<S>::h), task),
                        RecordWord<kWidth>(PackBf16(h[0], h[1]), c.epoch));
}

// Row warps: h = r(rms(p) r(1 + gamma)), or with static activations its grid values, for this rank.
template <typename S>
__device__ __noinline__ void NormExperts(Context<S>&) {
  Context<S>& c = Anew<S>();
  const bool is_static = Takes(c, Activations::kStatic);
  const float input =
      is_static ? LargestScale(c.arrays().small + SmallOf(c).gate_up_input_scale, 2 * S::kExperts) : 1.0f;
  c.ForTasks(S::kMoeBlocks * kRows, [&](int task) {
    const Two normed = NormedColumns(c, task);
    float h[2] = {normed.a, normed.b};
    if (is_static) QuantizeBlock(h, 1.0f / input);
    PublishH(c, task, h);
  });
}

// The same with per-token activations. A row's scale needs its largest magnitude, so all tasks publish that of their
// block, in the first of two passes, before any of them waits for the others'.
template <typename S>
__device__ __noinline__ void NormExpertsPerToken(Context<S>&, bool first) {
  Context<S>& c = Anew<S>();
  using F = Frames<S>;
  c.ForTasks(S::kMoeBlocks * kRows, [&](int task) {
    const int row = task % kRows, block = task / kRows;
    const Two normed = NormedColumns(c, task);
    uint64_t* maxima = reinterpret_cast<uint64_t*>(c.Frame(F::maxima_h)) + row * S::kMoeBlocks;
    if (first) {
      const float most = LargestOfLanes(LargerAbs(fabsf(normed.a), normed.b));
      if (c.lane() == 0) PublishFloat<Scope::kGpu>(maxima + block, most, c.epoch);
      return;
    }
    const RowScale scale = ReceiveRowScale<S::kMoeBlocks>(c, maxima);
    float h[2] = {normed.a, normed.b};
    QuantizeBlock(h, scale.encode);
    if (scale.dead) h[0] = h[1] = 0.0f;
    if (block == 0 && c.lane() == 0)
      PublishFloat<Scope::kGpu>(reinterpret_cast<uint64_t*>(c.Frame(F::decode_h)) + row, scale.decode, c.epoch);
    PublishH(c, task, h);
  });
}

// What UP waits for besides the list.
template <typename S>
__device__ __forceinline__ void BeforeUp(Context<S>& c) {
  if (Takes(c, Activations::kPerToken))
    NormExpertsPerToken(c, true), NormExpertsPerToken(c, false);
  else
    NormExperts(c);
}

}  // namespace musejax::layer

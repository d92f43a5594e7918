// The phases of a layer, each as a launch of its own: for several devices with all-gathers in between, for training's
// sharding, and to time the phases one by one. A launch is three steps:
//
//   1. operands, which are plain arrays, go into the frames that the phase reads
//   2. the phase, as the layer kernel runs it; warp 0 streams this phase's weights alone
//   3. results go from frames to plain arrays
//
// Bits: those of the layer kernel at the same point. An epoch is a launch; no launch of another layer or phase may run
// beside it on the same workspace.
#pragma once

#include "layer/layer.cuh"
#include "layer/phases.h"

namespace musejax::layer {

// ---- plain arrays ------------------------------------------------------------------------------------------------

// bf16 [parts][rows][width]: parts are slices, heads or groups. A block of kWidth columns lies in one part.
struct Plain {
  const uint16_t* data;
  int rows, width;

  template <int kWidth>
  __device__ __forceinline__ const uint32_t* At(int block, int row) const {
    const int each = width / kWidth;
    return reinterpret_cast<const uint32_t*>(data + (int64_t(block / each) * rows + row) * width +
                                             block % each * kWidth);
  }
};
struct PlainOut {
  uint16_t* data;
  int rows, width;

  template <int kWidth>
  __device__ __forceinline__ uint32_t* At(int block, int row) const {
    return const_cast<uint32_t*>(Plain{data, rows, width}.At<kWidth>(block, row));
  }
};

// A row of a block, two columns a lane; zeros beyond the block and the rows.
template <int kWidth>
__device__ __forceinline__ uint32_t LoadColumns(const Plain& x, int block, int row) {
  const int lane = threadIdx.x % 32;
  return lane < kWidth / 2 && row < x.rows ? x.At<kWidth>(block, row)[lane] : 0;
}
template <int kWidth>
__device__ __forceinline__ void StoreColumns(const PlainOut& x, int block, int row, uint32_t columns) {
  const int lane = threadIdx.x % 32;
  if (lane < kWidth / 2 && row < x.rows) x.At<kWidth>(block, row)[lane] = columns;
}

// ---- 1. operands -------------------------------------------------------------------------------------------------

template <int kWidth, typename S>
__device__ __forceinline__ void PublishRow(const Context<S>& c, int64_t frame, int record, uint32_t columns) {
  PublishRecord<kWidth>(RecordAt<kWidth>(c.Frame(frame), record), RecordWord<kWidth>(columns, c.epoch));
}

// All rows of x, `blocks` of columns, as records of a frame.
template <int kWidth, typename S>
__device__ __forceinline__ void PublishRows(const Context<S>& c, const Plain& x, int blocks, int64_t frame) {
  c.ForTasks(blocks * kRows,
             [&](int i) { PublishRow<kWidth>(c, frame, i, LoadColumns<kWidth>(x, i / kRows, i % kRows)); });
}

// The same, and the sums of squares of x, or of x r(1 + gamma).
template <int kWidth, typename S>
__device__ __forceinline__ void PublishSummed(const Context<S>& c, const Plain& x, int blocks, const float* gamma,
                                              int64_t frame, int64_t sums) {
  c.ForTasks(blocks * kRows, [&](int i) {
    const int row = i % kRows, block = i / kRows;
    const uint32_t columns = LoadColumns<kWidth>(x, block, row);
    PublishRow<kWidth>(c, frame, i, columns);
    Two v = Unpack(columns);
    if (gamma) {
      const Two gain = Centred(Columns<kWidth>(gamma, block, c.lane()));
      v = Rounded({v.a * gain.a, v.b * gain.b});
    }
    const float leaf = LeafSquares<kWidth>(v);
    if (c.lane() == 0)
      PublishFloat<Scope::kSys>(reinterpret_cast<uint64_t*>(c.Frame(sums)) + row * blocks + block, leaf, c.epoch);
  });
}

// scores: [kSlices][rows][experts of a slice]; zeros beyond the rows.
template <typename S>
__device__ __forceinline__ void PublishScores(const Context<S>& c, const float* scores) {
  constexpr int kEach = S::kExperts / int(kSlices);
  c.ForTasks(kRows, [&](int row) {
    uint64_t* to = reinterpret_cast<uint64_t*>(c.Frame(Frames<S>::scores)) + row * S::kExperts;
    const int rows = c.pass().rows;
    for (int e = c.lane(); e < S::kExperts; e += 32)
      PublishFloat<Scope::kSys>(to + e, row < rows ? scores[(e / kEach * rows + row) * kEach + e % kEach] : 0.0f,
                                c.epoch);
  });
}

// Calls task(tile, pair, t) for the words of a frame of 16-column records, [tiles][pair][t].
template <typename S, typename Task>
__device__ __forceinline__ void ForTileWords(const Context<S>& c, int tiles, const Task& task) {
  static_assert(S::kPairs % 8 == 0, "the 8 records of a warp share a tile");
  c.ForTasks(tiles * S::kPairs / 8, [&](int i) {
    const int record = i * 8 + c.lane() / 4;
    task(record / S::kPairs, record % S::kPairs, c.lane() % 4);
  });
}

// Activations of all pairs, for GEMM2.
template <typename S>
__device__ __forceinline__ void PublishInner(const Context<S>& c, const Plain& x) {
  ForTileWords(c, S::kInnerTiles, [&](int tile, int pair, int t) {
    if (pair >= x.rows) return;
    const uint32_t* from = x.At<16>(tile, pair) + t;
    Publish<Scope::kSys>(RecordAt<16>(c.Frame(Frames<S>::c), tile * S::kPairs + pair) + t, from[0], from[4], 0,
                         c.epoch);
  });
}

// ---- choices -----------------------------------------------------------------------------------------------------

// Calls task(pair) for all pairs, a thread each of warps 1 to `warps`.
template <typename S, typename Task>
__device__ __forceinline__ void ForPairs(int warps, const Task& task) {
  const int thread = int(threadIdx.x) - 32;
  if (thread < 32 * warps)
    for (int pair = thread; pair < S::kPairs; pair += 32 * warps) task(pair);
}

// As ReceiveChoices, of choices made before; ids outside the model choose nothing.
template <typename S>
__device__ __forceinline__ void TakeChoices(const Context<S>& c, RouteShared& route, const int32_t* ids,
                                            const float* weights) {
  const int pairs = c.pass().rows * S::kTopK;
  ForPairs<S>(kAdders, [&](int pair) {
    TakeChoice<S>(route, pair, pair < pairs ? ids[pair] : S::kExperts, pair < pairs && weights ? weights[pair] : 0.0f);
  });
}

// The visits of choices that were taken and whose experts are here; the others become those of padding. By all row
// warps, which then have the list.
template <typename S>
__device__ __forceinline__ void ListOwn(const Context<S>& c, RouteShared& route, int begin, int count) {
  const auto here = [&](int expert) { return expert >= begin && expert < begin + count; };
  if (c.warp < kFirstMmaWarp) {
    AwaitListers();  // all choices are there
    ForPairs<S>(kAdders, [&](int pair) {
      int16_t& id = route.ids[pair / S::kTopK][pair % S::kTopK];
      if (!here(id)) id = S::kExperts;
    });
    for (int expert = int(threadIdx.x) - 32; expert < S::kExperts; expert += 32 * kAdders)
      if (!here(expert)) route.hits[route.lists % 2][expert] = 0;
    ListVisits(c, route);
  }
  AwaitList();
}

// Weights of all rows, [rows][k], after the list.
template <typename S>
__device__ __forceinline__ void StoreWeights(const Context<S>& c, const RouteShared& route, float* weights) {
  if (c.block != 0) return;
  ForPairs<S>(kRowWarps, [&](int pair) {
    if (pair < c.pass().rows * S::kTopK) weights[pair] = route.weights[pair / S::kTopK][pair % S::kTopK];
  });
}

// ---- combine -----------------------------------------------------------------------------------------------------

// As ReceiveSlots, from all slices of y; zeros for slots of padding.
template <typename S>
__device__ __forceinline__ void LoadSlots(const Context<S>& c, const RouteShared& route, const Plain& y,
                                          const CombineTask<S>& task, uint32_t (&z)[S::kTopK]) {
  constexpr int kWidth = S::kMoeBlock;
  const int block = task.slice * CombineTask<S>::kBlocks + task.block;
  const Two gain = Centred(Columns<kWidth>(c.arrays().small + SmallOf(c).post_expert_norm, block, c.lane()));
#pragma unroll
  for (int slot = 0; slot < S::kTopK; ++slot) {
    const Two v = Unpack(LoadColumns<kWidth>(y, block, task.row * S::kTopK + slot));
    z[slot] = route.ids[task.row][slot] < S::kExperts ? PackBf16(v.a * gain.a, v.b * gain.b) : 0;
  }
}

// r(sum of the slots of one owner group), in slot order.
template <typename S>
__device__ __forceinline__ uint32_t PartialSum(const RouteShared& route, int group, const SlotOrder& order, int row,
                                               const uint32_t (&z)[S::kTopK], float rstd) {
  Two sum = {0.0f, 0.0f};
#pragma unroll
  for (int slot = 0; slot < S::kTopK; ++slot) {
    const float scale = __shfl_sync(kAllLanes, rstd, slot), weight = route.weights[row][slot];
    const Two x = Unpack(z[slot]);
    if (__shfl_sync(kAllLanes, order.group, slot) == group)
      sum = {sum.a + weight * (x.a * scale), sum.b + weight * (x.b * scale)};
  }
  return PackBf16(sum.a, sum.b);
}

// Rows of y [kSlices][pairs][width] -> m, or the partial sums of p.groups owner groups. All tasks publish their slots'
// sums before any waits.
template <typename S>
__device__ __forceinline__ void CombineRows(Context<S>& c, const RouteShared& route, const PhaseParams& p) {
  constexpr int kWidth = S::kMoeBlock, kTasks = S::kMoeBlocks * kRows;
  const Plain y{p.in, p.rows * S::kTopK, S::kMoe / int(kSlices)};
  const PlainOut out{p.out, p.rows, S::kMoe};
  uint32_t z[S::kTopK];
  c.ForTasks(kTasks, [&](int i) {
    const CombineTask<S> task(i);
    if (task.row >= p.rows) return;
    LoadSlots(c, route, y, task, z);
    PublishSlotSums(c, task, z);
  });
  const int first = p.groups ? Max(*p.begin, 0) / (S::kExperts / int(c.pass().model.combine_groups)) : 0;
  c.ForTasks(kTasks, [&](int i) {
    const CombineTask<S> task(i);
    if (task.row >= p.rows) return;
    LoadSlots(c, route, y, task, z);
    const SlotOrder order = OrderOfSlots(c, route, task.row);
    const float rstd = SlotRstds(c, task.row);
    const int block = i / kRows;
    if (!p.groups) {
      const Two m = WeightedSum(c, route, order, task.row, z, rstd);
      StoreColumns<kWidth>(out, block, task.row, PackBf16(m.a, m.b));
    }
    for (int g = 0; g < p.groups; ++g)
      StoreColumns<kWidth>(out, g * S::kMoeBlocks + block, task.row,
                           PartialSum<S>(route, first + g, order, task.row, z, rstd));
  });
}

// m = r(sum of the partial sums of all owner groups, ascending).
template <typename S>
__device__ __forceinline__ void AddPartials(const Context<S>& c, const PhaseParams& p) {
  constexpr int kWidth = S::kMoeBlock;
  c.ForTasks(S::kMoeBlocks * kRows, [&](int i) {
    const int block = i / kRows, row = i % kRows;
    Two total = {0.0f, 0.0f};
    for (int g = 0; g < p.model.combine_groups; ++g) {
      const Two x = Unpack(LoadColumns<kWidth>({p.in, p.rows, S::kMoe}, g * S::kMoeBlocks + block, row));
      total = {total.a + x.a, total.b + x.b};
    }
    StoreColumns<kWidth>({p.out, p.rows, S::kMoe}, block, row, PackBf16(total.a, total.b));
  });
}

// ---- 3. results --------------------------------------------------------------------------------------------------

// Records [block][row] of a frame, `blocks` of them.
template <int kWidth, typename S>
__device__ __forceinline__ void StoreRows(const Context<S>& c, int64_t frame, int blocks, const PlainOut& out) {
  c.ForTasks(blocks * kRows, [&](int i) {
    Word w[1];
    const Word* mine = WordOfLane<kWidth>(RecordAt<kWidth>(c.Frame(frame), i));
    Receive<Scope::kSys>(c.waiter, c.epoch, [&](int) { return mine; }, w);
    StoreColumns<kWidth>(out, i / kRows, i % kRows, ColumnsOf<kWidth>(w[0]));
  });
}

// Finished sums of a dense GEMM, rounded; [slices here][rows][columns of a slice].
template <Dense kWhich, int kWidth, typename S>
__device__ __forceinline__ void StoreDense(const Context<S>& c, uint16_t* to) {
  using D = DenseOf<S, kWhich>;
  constexpr int kBlocks = D::kColumns / kWidth;  // of a slice
  const PlainOut out{to, c.pass().rows, D::kColumns};
  c.ForTasks(S::kSlicesHere * kBlocks * kRows, [&](int i) {
    const int row = i % kRows, block = i / kRows;
    const Two v = FinishColumns<S, kWhich, kWidth>(c, block / kBlocks, block % kBlocks * kWidth / 16, row);
    StoreColumns<kWidth>(out, block, row, PackBf16(v.a, v.b));
  });
}

// [slices here][rows][experts of a slice]
template <typename S>
__device__ __forceinline__ void StoreScores(const Context<S>& c, float* to) {
  using D = DenseOf<S, Dense::kRouter>;
  const int rows = c.pass().rows;
  c.ForTasks(S::kSlicesHere * D::kTiles * kRows, [&](int i) {
    const int row = i % kRows, slice = i / kRows / D::kTiles, tile = i / kRows % D::kTiles;
    const Two v = FinishColumns<S, Dense::kRouter, 16>(c, slice, tile, row);
    const float score[2] = {SigmoidOf(v.a * c.pass().model.output_multiplier),
                            SigmoidOf(v.b * c.pass().model.output_multiplier)};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = tile * 16 + 2 * c.lane() + j;
      if (c.lane() < 8 && column < D::kColumns && row < rows)
        to[(slice * rows + row) * D::kColumns + column] = score[j];
    }
  });
}

// What an expert GEMM left of the pairs visited, zeros for all others; `tiles` of 16 columns.
template <typename S>
__device__ __forceinline__ void StoreTiles(const Context<S>& c, const RouteShared& route, int64_t frame, int tiles,
                                           const PlainOut& out) {
  ForTileWords(c, tiles, [&](int tile, int pair, int t) {
    const bool visited = route.ids[pair / S::kTopK][pair % S::kTopK] < S::kExperts;
    const Word* word = RecordAt<16>(c.Frame(frame), tile * S::kPairs + pair) + t;
    Word w[1];
    Receive<Scope::kSys>(c.waiter, c.epoch, [&](int) { return word; }, w, visited);
    if (pair >= out.rows) return;
    uint32_t* to = out.At<16>(tile, pair) + t;
    to[0] = Register(w[0], 0), to[4] = Register(w[0], 1);
  });
}

// ---- warps 1 to 11 -----------------------------------------------------------------------------------------------

template <typename S>
__device__ __forceinline__ void TakeOperands(Context<S>& c, Shared<S>& shared, const PhaseParams& p) {
  using F = Frames<S>;
  constexpr int kHidden = S::kHiddenBlock, kMoe = S::kMoeBlock;
  const SmallLayout at = SmallOf(c);
  const float* small = c.arrays().small;
  const Plain hidden{p.in, p.rows, S::kHidden / int(kSlices)};
  if (p.phase == PhaseLaunch::kAttnIn || p.phase == PhaseLaunch::kPool || p.phase == PhaseLaunch::kAddFfn)
    LoadStream(c, shared.residual);
  switch (p.phase) {
    case PhaseLaunch::kAttnIn:
      BeforeHeads(c, shared);
      break;
    case PhaseLaunch::kAttention:
      PublishHeads(c);
      break;
    case PhaseLaunch::kAttnOut:
      PublishRows<64>(c, {p.in, p.rows, S::kHeadDim}, S::kHeads, F::o);
      break;
    case PhaseLaunch::kPool:
      PublishSummed<kHidden>(c, hidden, S::kHiddenBlocks, nullptr, F::a, F::sums_a);
      AddBranch(c, shared.residual, small + at.attention_residual_gate, nullptr, F::a, F::sums_a);
      GiveCredit(c);  // for PublishNormed
      BeforeRouter(c, shared);
      break;
    case PhaseLaunch::kExpertsUp:
      PublishSummed<kMoe>(c, {p.in, p.rows, S::kMoe / int(kSlices)}, S::kMoeBlocks, nullptr, F::p, F::sums_p);
      PublishScores(c, p.scores);
      ChooseExperts(c);
      if (c.warp < kFirstMmaWarp) ReceiveChoices(c, shared.route);
      ListOwn(c, shared.route, *p.begin, p.experts);
      BeforeUp(c);
      break;
    case PhaseLaunch::kExpertsDown:
      PublishInner(c, {p.in, p.rows * S::kTopK, S::kInner / int(kSlices)});
      TakeChoices(c, shared.route, p.chosen, nullptr);
      ListOwn(c, shared.route, *p.begin, p.experts);
      break;
    case PhaseLaunch::kCombine:
    case PhaseLaunch::kCombinePartials:
      TakeChoices(c, shared.route, p.chosen, p.weights);
      ptx::BarSync(1, 32 * kRowWarps);
      break;
    case PhaseLaunch::kCombineGathered:
      break;
    case PhaseLaunch::kUnpool:
      PublishRows<kMoe>(c, {p.in, p.rows, S::kMoe}, S::kMoeBlocks, F::m);
      break;
    case PhaseLaunch::kAddFfn:
      PublishSummed<kHidden>(c, hidden, S::kHiddenBlocks, small + at.post_ffn_norm, F::f, F::sums_f);
      AddBranch(c, shared.residual, small + at.ffn_residual_gate, small + at.post_ffn_norm, F::f, F::sums_f);
      break;
  }
}

// The dense GEMMs of a phase: `first` and those that follow it.
struct PhaseGemms {
  Dense first;
  int count;
};
__device__ __forceinline__ PhaseGemms GemmsOf(PhaseLaunch phase) {
  return phase == PhaseLaunch::kAttnIn    ? PhaseGemms{Dense::kQkvg, 1}
         : phase == PhaseLaunch::kAttnOut ? PhaseGemms{Dense::kOut, 1}
         : phase == PhaseLaunch::kPool    ? PhaseGemms{Dense::kRouter, 2}
         : phase == PhaseLaunch::kUnpool  ? PhaseGemms{Dense::kUnpooler, 1}
                                          : PhaseGemms{Dense::kQkvg, 0};
}

template <typename S>
__device__ __forceinline__ void Multiply(Context<S>& c, Shared<S>& shared, const PhaseParams& p) {
  Consumer consumer;
  const PhaseGemms gemms = GemmsOf(p.phase);
#pragma unroll 1
  for (int i = 0; i < gemms.count; ++i) RunDense(c, consumer, Dense(int(gemms.first) + i));
  if (p.phase == PhaseLaunch::kAttention) BeforeOut(c, consumer);
  if (p.phase == PhaseLaunch::kExpertsUp || p.phase == PhaseLaunch::kExpertsDown) {
    const bool up = p.phase == PhaseLaunch::kExpertsUp;
    if (!up) BeforeDown(c);
    if (c.warp >= kFirstMmaWarp)
      ExpertUnits(c, shared.route, consumer, up);
    else
      ExpertSums(c, shared.route, consumer, up);
  }
  if (p.phase == PhaseLaunch::kCombine || p.phase == PhaseLaunch::kCombinePartials) CombineRows(c, shared.route, p);
  if (p.phase == PhaseLaunch::kCombineGathered) AddPartials(c, p);
}

template <typename S>
__device__ __forceinline__ void StoreResults(Context<S>& c, Shared<S>& shared, const PhaseParams& p) {
  using F = Frames<S>;
  const int pairs = p.rows * S::kTopK;
  switch (p.phase) {
    case PhaseLaunch::kAttnIn:
      FinishHeads(c, true);
      StoreKeys(c);
      break;
    case PhaseLaunch::kAttention:
      StoreRows<64>(c, F::o, S::kHeadsHere, {p.out, p.rows, S::kHeadDim});
      break;
    case PhaseLaunch::kAttnOut:
      StoreDense<Dense::kOut, S::kHiddenBlock>(c, p.out);
      break;
    case PhaseLaunch::kPool:
      StoreScores(c, p.scores_out);
      StoreDense<Dense::kPooler, S::kMoeBlock>(c, p.out);
      StoreStream(c, shared.residual, p.stream);
      break;
    case PhaseLaunch::kExpertsUp:
      StoreWeights(c, shared.route, p.weights_out);
      StoreTiles(c, shared.route, F::c, S::kInnerTilesHere, {p.out, pairs, S::kInner / int(kSlices)});
      break;
    case PhaseLaunch::kExpertsDown:
      StoreTiles(c, shared.route, F::y, S::kMoeTilesHere, {p.out, pairs, S::kMoe / int(kSlices)});
      break;
    case PhaseLaunch::kUnpool:
      StoreDense<Dense::kUnpooler, S::kHiddenBlock>(c, p.out);
      break;
    case PhaseLaunch::kAddFfn:
      StoreStream(c, shared.residual, p.stream);
      break;
    default:  // combining stores as it goes
      break;
  }
}

// ---- warp 0 ------------------------------------------------------------------------------------------------------

template <typename S>
__device__ __forceinline__ void StreamPhase(Context<S>& c, Shared<S>& shared, const PhaseParams& p) {
  Producer producer{{}, ptx::CreatePolicyEvictFirst()};
  const PhaseGemms gemms = GemmsOf(p.phase);
  if (p.phase == PhaseLaunch::kPool) PrefetchRouter(c);
#pragma unroll 1
  for (int i = 0; i < gemms.count; ++i)
    if (Dense(int(gemms.first) + i) != Dense::kRouter) StreamDense(c, producer, Dense(int(gemms.first) + i));
  if (p.phase == PhaseLaunch::kAttention) StreamHistory(c, producer);
  const bool up = p.phase == PhaseLaunch::kExpertsUp, experts = up || p.phase == PhaseLaunch::kExpertsDown;
  if (experts && __all_sync(kAllLanes, WaitBarrier(c.waiter, &shared.route.listed, 0))) {
    constexpr ExpertLayout kNvfp4(S::kShape, true), kBf16(S::kShape, false);
    // Visits name experts by their number in the model.
    if (c.lane() == 0) c.at_hand[0].experts -= *p.begin * (c.arrays().nvfp4 ? kNvfp4.bytes : kBf16.bytes);
    __syncwarp();
    if (up)
      StreamExperts<true>(c, shared.route, producer, p.experts);
    else
      StreamExperts<false>(c, shared.route, producer, p.experts);
  }
  producer.Drain();
}

// ---- the kernel --------------------------------------------------------------------------------------------------

// Whom error reports name; the phases of the layer kernel that are not here say it themselves.
__device__ __forceinline__ Phase ReportedAs(PhaseLaunch phase) {
  return phase == PhaseLaunch::kAttnOut       ? kAttentionOut
         : phase == PhaseLaunch::kPool        ? kPool
         : phase == PhaseLaunch::kExpertsUp   ? kUp
         : phase == PhaseLaunch::kExpertsDown ? kDown
         : phase == PhaseLaunch::kUnpool      ? kUnpool
         : phase == PhaseLaunch::kAddFfn      ? kUnpool
         : phase == PhaseLaunch::kAttnIn      ? kHeadsIn
         : phase == PhaseLaunch::kAttention   ? kAttention
                                              : kCombine;
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1) RunPhase(const __grid_constant__ PhaseParams params) {
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(ptx::DynamicShared());
  Context<S>& c = BeginPass(params, shared);
  c.waiter.At(0, c.warp > 0 ? ReportedAs(params.phase) : kStream);
  if (c.warp > 0) {
    TakeOperands(c, shared, params);
    Multiply(c, shared, params);
    StoreResults(c, shared, params);
  } else {
    StreamPhase(c, shared, params);
  }
  __syncwarp();
  if (c.lane() == 0) c.waiter.Report();
  if (threadIdx.x == 32) params.epochs[blockIdx.x] = c.epoch;
}

}  // namespace musejax::layer

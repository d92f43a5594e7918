// The layer kernel: consecutive decoder layers of one pass as one persistent launch, one block of 12 warps an SM.
//
//   warp 0        streams weights and history keys into the ring, in the order of use
//   warps 1 to 3  add the partial sums of the MMA warps
//   warps 4 to 11 multiply
//   warps 1 to 11 run the row tasks between the GEMMs
//
// A launch starts at the embedding (pass.first) or at the attention of its first layer, and ends after its last layer's
// residual (pass.last) or with the heads of its last layer, as cpu/layer.h says. Phases hand values on through tagged
// frames (context.cuh): there is no barrier over the grid, and no fence.
//
// Bits: those of the CPU twin up to the inner order of an MMA and the exponential of attention; the same for any number
// of rows, blocks, ranks, and for any split of the layers into launches.
#pragma once

#include "layer/combine.cuh"
#include "layer/experts.cuh"
#include "layer/residual.cuh"
#include "layer/route.cuh"

namespace musejax::layer {

template <typename S>
struct Shared {
  alignas(128) uint8_t pass[kPassBytes];
  uint8_t contexts[kWarps][kContextBytes];
  SharedBuffers buffers;
  RouteShared route;
  alignas(16) float residual[kResidualFloats<S>];
  Where where[kWarps];
};

// Numbers of phases in error reports; ErrorText (layer.cu) names them.
enum Phase : int { kHeadsIn, kAttention, kAttentionOut, kPool, kRouting, kUp, kDown, kCombine, kUnpool, kStream };

// Points of a layer that Stamp marks, in order of time.
namespace Point {
enum : int {
  kCredit,
  kSquaresZ,
  kCredits,
  kZ,
  kQkvgSums,
  kHeads,
  kHistory,
  kTail,
  kMerge,
  kOutSums,
  kA,
  kAddedA,
  kSquaresX,
  kX,
  kRouterSums,
  kScores,
  kPoolerSums,
  kP,
  kChosen,
  kListed,
  kH,
  kUpSums,
  kDownSums,
  kM,
  kUnpoolerSums,
  kF,
  kAddedF
};
}

// Parts of a layer's weight stream, in order of time. Warp 0 notes two numbers at the end of each: the time, and for
// how long the part had to wait, for a free stage of the ring or for the list of visits.
namespace Part {
enum : int { kKeys, kOutPooler, kList, kUp, kDown, kUnpooler, kQkvg };
}

// By all threads; ends with a block barrier.
template <typename S>
__device__ __forceinline__ Context<S>& BeginPass(const PassParams& params, Shared<S>& shared) {
  const int warp = threadIdx.x / 32, block = blockIdx.x;
  const int32_t* state = params.state;  // null in phases for which all rows are alike
  InitBuffers(shared.buffers);
  InitRoute(shared.route);
  for (int i = threadIdx.x; i < int(sizeof(Pass) / 8); i += kThreads)
    reinterpret_cast<uint64_t*>(shared.pass)[i] =
        reinterpret_cast<const uint64_t*>(static_cast<const Pass*>(&params))[i];
  if (threadIdx.x < kDenseGemms) {
    const int32_t* span = params.schedule + 2 * (block * kDenseGemms + threadIdx.x);
    reinterpret_cast<BlockPass*>(shared.pass)->dense[threadIdx.x] = {span[0], span[1]};
  }
  // Once an SM, for all of its warps: another one may give up meanwhile.
  if (threadIdx.x == kThreads - 1)
    reinterpret_cast<BlockPass*>(shared.pass)->refused = (state && state[2] < 0) || *params.abort;
  Context<S>& c = *reinterpret_cast<Context<S>*>(shared.contexts[warp]);
  if (threadIdx.x % 32 == 0) {
    shared.where[warp] = {params.error, params.abort, *params.budget, params.rank, block, warp};
    new (&c) Context<S>{params.layers,
                        {&shared.where[warp]},
                        {},
                        warp,
                        block,
                        int(gridDim.x),
                        state ? Clamp(state[1], 0, params.rows) : params.rows,
                        state ? Max(state[0], 0) : 0,
                        state ? Clamp(state[2], 0, Min(kRows, Max(state[0], 0))) : 0,
                        0,
                        params.epochs[block] + 1,
                        !params.first,
                        params.first ? Dense::kQkvg : Dense::kOut};
  }
  __syncthreads();
  c.Fetch(0);
  return c;
}

template <typename S>
__device__ __forceinline__ bool RunsWhole(const Context<S>& c) {
  return c.pass().last || c.layer + 1 < c.pass().count_layers;
}

// ---- warp 0 ----

template <typename S>
__device__ __forceinline__ void EndPart(const Context<S>& c, Producer& producer, int part) {
  Stamp(c, 2 * part);
  Note(c, 2 * part + 1, producer.blocked);
  producer.blocked = 0;
}

template <typename S>
__device__ void Stream(Context<S>& c, Shared<S>& shared) {
  Producer producer{{}, ptx::CreatePolicyEvictFirst()};
  c.waiter.At(c.layer, kStream);
  PrefetchSmall(c, 0);
  bool ahead = c.pass().first;  // the heads of the layer at hand are not streamed yet
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (ahead) StreamDense(c, producer, Dense::kQkvg);
    EndPart(c, producer, Part::kQkvg);
    if (!RunsWhole(c)) break;
    const bool more = c.layer + 1 < c.pass().count_layers;
    c.Fetch(c.layer + 1);
    PrefetchRouter(c);
    if (more) PrefetchSmall(c, c.layer + 1);
    StreamHistory(c, producer);
    EndPart(c, producer, Part::kKeys);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) StreamDense(c, producer, i ? Dense::kPooler : Dense::kOut);
    EndPart(c, producer, Part::kOutPooler);
    if (!__all_sync(kAllLanes, WaitBarrier(c.waiter, &shared.route.listed, n & 1))) break;
    EndPart(c, producer, Part::kList);
    StreamExperts<true>(c, shared.route, producer);
    EndPart(c, producer, Part::kUp);
    StreamExperts<false>(c, shared.route, producer);
    EndPart(c, producer, Part::kDown);
    StreamDense(c, producer, Dense::kUnpooler);
    EndPart(c, producer, Part::kUnpooler);
    if (!more) break;
    c.NextLayer();
    ahead = true;
  }
  producer.Drain();
}

// ---- warps 1 to 11 ----
//
// A layer is five dense GEMMs with something before and after each. They pass through one loop, so that the GEMMs' code
// is there once: an SM caches about 128 KB of instructions, and what does not stay there comes anew in every layer.

// S -> z, for the heads of the layer at hand.
template <typename S>
__device__ __forceinline__ void BeforeHeads(Context<S>& c, Shared<S>& shared) {
  using F = Frames<S>;
  c.waiter.At(c.layer, kHeadsIn);
  GiveCredit(c);
  Stamp(c, Point::kCredit);
  PublishSquares(c, shared.residual, F::sums_z);
  Stamp(c, Point::kSquaresZ);
  AwaitCredits(c);
  Stamp(c, Point::kCredits);
  PublishNormed(c, shared.residual, c.arrays().small + SmallOf(c).input_norm, F::sums_z, F::z);
  Stamp(c, Point::kZ);
}

// Heads -> o.
template <typename S>
__device__ __forceinline__ void BeforeOut(Context<S>& c, Consumer& consumer) {
  c.waiter.At(c.layer, kAttention);
  if (c.warp >= kFirstMmaWarp) AttendHistory(c, consumer);
  Stamp(c, Point::kHistory);
  AttendTail(c);
  Stamp(c, Point::kTail);
  MergeAttention(c);
  Stamp(c, Point::kMerge);
  c.waiter.At(c.layer, kAttentionOut);
}

// S -> x.
template <typename S>
__device__ __forceinline__ void BeforeRouter(Context<S>& c, Shared<S>& shared) {
  using F = Frames<S>;
  c.waiter.At(c.layer, kPool);
  PublishSquares(c, shared.residual, F::sums_x);
  Stamp(c, Point::kSquaresX);
  PublishNormed(c, shared.residual, c.arrays().small + SmallOf(c).ffn_norm, F::sums_x, F::x);
  Stamp(c, Point::kX);
}

// p and scores -> m, by the experts.
template <typename S>
__device__ __forceinline__ void AfterPooler(Shared<S>& shared, Consumer& consumer) {
  {
    Context<S>& c = Anew<S>();
    FinishPooler(c);
    Stamp(c, Point::kP);
    c.waiter.At(c.layer, kRouting);
    ChooseExperts(c);
    Stamp(c, Point::kChosen);
    ListChoices(c, shared.route);
    Stamp(c, Point::kListed);
    BeforeUp(c);
    Stamp(c, Point::kH);
    AwaitList();  // every row's attention is over
  }
#pragma unroll 1
  for (int down = 0; down < 2; ++down) {
    Context<S>& c = Anew<S>();
    c.waiter.At(c.layer, down ? kDown : kUp);
    if (down) BeforeDown(c);
    if (c.warp >= kFirstMmaWarp)
      ExpertUnits(c, shared.route, consumer, !down);
    else
      ExpertSums(c, shared.route, consumer, !down);
    Stamp(Anew<S>(), down ? Point::kDownSums : Point::kUpSums);
  }
  Context<S>& c = Anew<S>();
  c.waiter.At(c.layer, kCombine);
  StoreKeys(c);
  CombineExperts(c, shared.route);
  Stamp(c, Point::kM);
  c.waiter.At(c.layer, kUnpool);
}

// The branch of attention (kOut) or of the experts (kUnpooler) -> S.
template <bool kExperts, typename S>
__device__ __forceinline__ void AfterBranch(Context<S>& c, Shared<S>& shared) {
  using F = Frames<S>;
  const SmallLayout at = SmallOf(c);
  const float* small = c.arrays().small;
  const float* gamma = kExperts ? small + at.post_ffn_norm : nullptr;
  const int64_t rows = kExperts ? F::f : F::a, sums = kExperts ? F::sums_f : F::sums_a;
  FinishBranch(c, kExperts ? F::part_unpool : F::part_out,
               kExperts ? DenseOf<S, Dense::kUnpooler>::kChunks : DenseOf<S, Dense::kOut>::kChunks, gamma, rows, sums);
  Stamp(c, kExperts ? Point::kF : Point::kA);
  AddBranch(c, shared.residual, small + (kExperts ? at.ffn_residual_gate : at.attention_residual_gate), gamma, rows,
            sums);
  Stamp(c, kExperts ? Point::kAddedF : Point::kAddedA);
  if (kExperts && c.arrays().tap) StoreStream(c, shared.residual, c.arrays().tap);
}

template <typename S>
__device__ __forceinline__ void Before(Shared<S>& shared, Consumer& consumer) {
  Context<S>& c = Anew<S>();
  const Dense which = c.gemm;
  if (which == Dense::kQkvg) BeforeHeads(c, shared);
  if (which == Dense::kOut) BeforeOut(c, consumer);
  if (which == Dense::kRouter) BeforeRouter(c, shared);
}

template <typename S>
__device__ __forceinline__ void After(Shared<S>& shared, Consumer& consumer) {
  Context<S>& c = Anew<S>();
  Stamp(c, c.gemm == Dense::kQkvg     ? Point::kQkvgSums
           : c.gemm == Dense::kOut    ? Point::kOutSums
           : c.gemm == Dense::kRouter ? Point::kRouterSums
           : c.gemm == Dense::kPooler ? Point::kPoolerSums
                                      : Point::kUnpoolerSums);
  if (c.gemm == Dense::kQkvg) {
    FinishHeads(c, !RunsWhole(c));
    Stamp(c, Point::kHeads);
  } else if (c.gemm == Dense::kRouter) {
    FinishRouter(c);
    Stamp(c, Point::kScores);
  } else if (c.gemm == Dense::kPooler) {
    AfterPooler(shared, consumer);
  } else if (c.gemm == Dense::kOut) {
    c.Fetch(c.layer + 1);
    AfterBranch<false>(c, shared);
  } else {
    AfterBranch<true>(c, shared);
  }
}

template <typename S>
__device__ __forceinline__ void RunRows(Context<S>& begin, Shared<S>& shared) {
  Consumer consumer;
  LoadStream(begin, shared.residual);
  if (!begin.pass().first) GiveCredit(begin), PublishHeads(begin);  // every epoch has its credits
  if (begin.pass().first || RunsWhole(begin)) {
#pragma unroll 1
    for (;;) {
      Before(shared, consumer);
      RunDense(Anew<S>(), consumer, Anew<S>().gemm);
      After(shared, consumer);
      Context<S>& c = Anew<S>();
      if (c.gemm == Dense::kQkvg && !RunsWhole(c)) break;
      if (c.gemm == Dense::kUnpooler) {
        if (c.layer + 1 == c.pass().count_layers) break;
        c.NextLayer();
      }
      c.Next(NextDense(c.gemm));
    }
  }
  Context<S>& end = Anew<S>();
  if (!end.pass().last) StoreKeys(end);
  StoreStream(end, shared.residual, end.pass().stream);
}

// The kernel's body. A launch gives up where a wait does not end, and all of it at once where the pass before it, or
// anything else on this device, gave up: then it publishes nothing, so that other ranks give up as well. Either way it
// marks its state, and only its epochs go on.
template <typename S>
__device__ __forceinline__ void RunLayers(const PassParams& params) {
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(ptx::DynamicShared());
  Context<S>& c = BeginPass(params, shared);
  if (c.pass().refused)
    c.waiter.Refuse(c.block + c.warp == 0);
  else if (c.warp > 0)
    RunRows(c, shared);
  else
    Stream(c, shared);
  __syncwarp();
  if (c.lane() == 0) {
    c.waiter.Report();
    if (c.waiter.Aborted() && params.mark) *params.mark = kGaveUp;
  }
  if (threadIdx.x == 32) params.epochs[blockIdx.x] = c.epoch + (params.count_layers - 1 - c.layer);
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1) Layers(const __grid_constant__ PassParams params) {
  RunLayers<S>(params);
}

}  // namespace musejax::layer

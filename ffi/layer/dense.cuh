// Dense GEMMs of a layer: attention output, pooler and router, unpooler, and QKV with the gate.
//
// A unit is 16 output columns (a row tile of the weight) times one chunk of K, for all 16 rows; units are numbered
// chunk by chunk, and an SM runs a contiguous part of each GEMM, so that it reads few activations. Which part, the
// schedule says (Pass::schedule), made and checked by musejax/kernels/schedule.py. An MMA warp takes one of the 8
// ranges of the chunk; an adding warp adds the ranges ascending and publishes the chunk's sum; a row task adds the
// chunks ascending. So an element has the bits of one sum over K in a fixed order, whoever ran which unit.
//
// The GEMMs share their code, since an SM caches few instructions: what differs is data (DenseJob).
#pragma once

#include <array>

#include "layer/rows.cuh"
#include "layer/stream.cuh"

namespace musejax::layer {

template <typename S, Dense kWhich>
struct DenseOf {
  using F = Frames<S>;
  static constexpr bool kIsRouter = kWhich == Dense::kRouter;
  static constexpr int kK = kWhich == Dense::kOut ? S::kQWidth : kWhich == Dense::kUnpooler ? S::kMoe : S::kHidden;
  static constexpr int kColumns = kWhich == Dense::kQkvg     ? int(S::kShape.qkvg_rows())
                                  : kWhich == Dense::kPooler ? S::kMoe / int(kSlices)
                                  : kIsRouter                ? S::kExperts / int(kSlices)
                                                             : S::kHidden / int(kSlices);  // of a slice
  static constexpr int kTiles = (kColumns + 15) / 16;                                      // of a slice
  static constexpr int kChunkK = int(Chunk(kK)), kChunks = kK / kChunkK, kRangeK = int(Range(kK));
  static constexpr int kSteps = kRangeK / 16;  // MMA steps of a warp in a unit
  static constexpr int kUnits = kChunks * S::kSlicesHere * kTiles;
  static constexpr int kUnitBytes = 16 * kChunkK * 2;

  // The input: records of kBlock columns.
  static constexpr int kBlock = kWhich == Dense::kOut        ? 64
                                : kWhich == Dense::kUnpooler ? S::kMoeBlock
                                                             : S::kHiddenBlock;
  static constexpr int64_t kInput = kWhich == Dense::kOut        ? F::o
                                    : kWhich == Dense::kUnpooler ? F::m
                                    : kWhich == Dense::kQkvg     ? F::z
                                                                 : F::x;
  static constexpr int64_t kPartial = kWhich == Dense::kQkvg     ? F::part_qkvg
                                      : kWhich == Dense::kOut    ? F::part_out
                                      : kWhich == Dense::kPooler ? F::part_pool
                                      : kIsRouter                ? F::part_router
                                                                 : F::part_unpool;
  static constexpr DenseLayout kLayout{S::kShape};
  static constexpr int64_t kSection = kWhich == Dense::kQkvg     ? kLayout.qkvg
                                      : kWhich == Dense::kOut    ? kLayout.out
                                      : kWhich == Dense::kPooler ? kLayout.pooler
                                      : kIsRouter                ? kLayout.router
                                                                 : kLayout.unpooler;
  static constexpr int64_t kSliceBytes = kLayout.bytes;
  static_assert(kRangeK % kBlock == 0, "a warp's range is made of whole records");
  static_assert(kUnitBytes <= kStageBytes, "a unit is one stage of the ring");
};

// Units of each GEMM, of one rank.
template <typename S>
inline constexpr std::array<int, kDenseGemms> kDenseUnits = {
    DenseOf<S, Dense::kQkvg>::kUnits, DenseOf<S, Dense::kOut>::kUnits, DenseOf<S, Dense::kRouter>::kUnits,
    DenseOf<S, Dense::kPooler>::kUnits, DenseOf<S, Dense::kUnpooler>::kUnits};

// One GEMM of the layer at hand, for one SM.
struct DenseJob {
  int begin, end;             // units of this SM
  int slices, tiles, chunks;  // unit = (chunk * slices + slice) * tiles + tile
  const uint8_t* weights;     // the section in the first slice
  int64_t slice_bytes;
  const Word* input;  // records, row by row of each block
  Word* partial;      // [slice][tile][chunk][row][8 words]
  uint32_t epoch;

  __device__ __forceinline__ int ChunkOf(int u) const { return u / (slices * tiles); }
  // The unit's place among tiles of all slices here.
  __device__ __forceinline__ int TileOf(int u) const { return u - ChunkOf(u) * slices * tiles; }
  // Where the unit's `bytes` of weights are.
  __device__ __forceinline__ const uint8_t* WeightsOf(int u, int bytes) const {
    const int at = TileOf(u), slice = at / tiles;
    return weights + slice * slice_bytes + int64_t(ChunkOf(u) * tiles + at - slice * tiles) * bytes;
  }
};

// pick(d) of the GEMM asked for, d an empty DenseOf<S, ...>.
template <typename S, typename Pick>
__device__ __forceinline__ auto OfDense(Dense which, const Pick& pick) {
  return which == Dense::kQkvg     ? pick(DenseOf<S, Dense::kQkvg>{})
         : which == Dense::kOut    ? pick(DenseOf<S, Dense::kOut>{})
         : which == Dense::kPooler ? pick(DenseOf<S, Dense::kPooler>{})
         : which == Dense::kRouter ? pick(DenseOf<S, Dense::kRouter>{})
                                   : pick(DenseOf<S, Dense::kUnpooler>{});
}

template <typename S>
__device__ __forceinline__ DenseJob JobOf(const Context<S>& c, Dense which) {
  const UnitSpan span = c.pass().dense[int(which)];
  return {
      span.begin,
      span.end,
      S::kSlicesHere,
      OfDense<S>(which, [](auto d) { return decltype(d)::kTiles; }),
      OfDense<S>(which, [](auto d) { return decltype(d)::kChunks; }),
      c.arrays().dense + OfDense<S>(which, [](auto d) { return int64_t(decltype(d)::kSection); }),
      DenseLayout(S::kShape).bytes,
      reinterpret_cast<const Word*>(c.Frame(OfDense<S>(which, [](auto d) { return int64_t(decltype(d)::kInput); }))),
      reinterpret_cast<Word*>(c.Frame(OfDense<S>(which, [](auto d) { return int64_t(decltype(d)::kPartial); }))),
      c.epoch};
}

// ---- warp 0 ----

template <typename S>
__device__ __forceinline__ void StreamDense(const Context<S>& c, Producer& producer, Dense which) {
  const DenseJob job = JobOf(c, which);
  const int bytes = OfDense<S>(which, [](auto d) { return decltype(d)::kUnitBytes; });
  ForAddresses(
      job.begin, job.end, [&](int u) { return job.WeightsOf(u, bytes); },
      [&](const uint8_t* from) { producer.Push(c.waiter, from, bytes); });
}

// Into L2, what does not pass the ring: this SM's router weights, and its share of the small arrays of a layer.
template <typename S>
__device__ __forceinline__ void PrefetchRouter(const Context<S>& c) {
  using D = DenseOf<S, Dense::kRouter>;
  const DenseJob job = JobOf(c, Dense::kRouter);
#pragma unroll 1
  for (int i = job.begin * int(kRanges) + c.lane(); i < job.end * int(kRanges); i += 32) {
    const int u = i / int(kRanges), range = job.ChunkOf(u) * int(kRanges) + i % int(kRanges);
    const int at = job.TileOf(u), slice = at / D::kTiles, row = at % D::kTiles * 16;
    const float* rows = reinterpret_cast<const float*>(job.weights + slice * job.slice_bytes) +
                        (range * D::kColumns + row) * D::kRangeK;
    ptx::CpAsyncBulkPrefetchL2(rows, Min(16, D::kColumns - row) * D::kRangeK * 4);
  }
}
template <typename S>
__device__ __forceinline__ void PrefetchSmall(const Context<S>& c, int layer) {
  const LayerArrays& arrays = c.layers[layer];
  const int pieces = int(SmallOf<S>(arrays.nvfp4).count / 4);  // of 16 bytes
  const int begin = pieces * c.block / c.blocks, end = pieces * (c.block + 1) / c.blocks;
  if (end > begin && c.lane() == 0) ptx::CpAsyncBulkPrefetchL2(arrays.small + 4 * begin, 16 * (end - begin));
}

// ---- MMA warps ----

// B operands of all 16 rows for a range that begins at record `first`: b[step] = rows 0 to 7 (two registers), rows 8 to
// 15.
template <int kSteps, int kBlock>
__device__ __forceinline__ void LoadRows(Waiter waiter, uint32_t epoch, const Word* first, int lane,
                                         uint32_t (&b)[kSteps][4]) {
  constexpr int kWords = RecordWords(kBlock), kBlocks = kSteps * 16 / kBlock, kRegs = RecordRegisters(kBlock);
  const Word* mine = first + (lane / 4 * 4 + lane % 4) * kWords;
  AwaitOne(waiter, epoch, mine + (kBlocks - 1) * kRows * 4 * kWords + 8 * 4 * kWords);
  Word w[kBlocks * 2 * kWords];
  Receive<Scope::kSys>(
      waiter, epoch,
      [&](int i) { return mine + (i / kWords / 2 * kRows + i / kWords % 2 * 8) * 4 * kWords + i % kWords; }, w);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < kRegs; ++r)
        b[block * (kRegs / 2) + r / 2][half * 2 + r % 2] = Register(w[(block * 2 + half) * kWords + r / 3], r % 3);
}

// Something of every load, for Consumer::Release.
template <int kSteps>
__device__ __forceinline__ uint32_t Loaded(const uint4 (&w)[kSteps]) {
  uint32_t all = 0;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) all |= w[j].w;
  return all;
}

// A range of a stage, given back by done(something of every load) once it is in registers.
template <int kSteps, typename Done>
__device__ __forceinline__ void MultiplyBf16(const uint8_t* tiles, const uint32_t (&b)[kSteps][4], float (&d)[2][4],
                                             const Done& done) {
  uint4 w[kSteps];
#pragma unroll
  for (int j = 0; j < kSteps; ++j) w[j] = *reinterpret_cast<const uint4*>(tiles + j * 512);
  done(Loaded(w));
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const uint32_t a[4] = {w[j].x, w[j].y, w[j].z, w[j].w};
    ptx::MmaM16N8K16Bf16(d[0], a, b[j][0], b[j][1]);
    ptx::MmaM16N8K16Bf16(d[1], a, b[j][2], b[j][3]);
  }
}

// Of the MMA warp at hand its range of a unit's input.
template <int kSteps, int kBlock>
__device__ __forceinline__ const Word* RangeOf(const DenseJob& job, int u) {
  const int warp = int(threadIdx.x / 32) - kFirstMmaWarp;
  return job.input + (job.ChunkOf(u) * kMmaWarps + warp) * (kSteps * 16 / kBlock) * kRows * 4 * RecordWords(kBlock);
}

// The units of a GEMM but the router's.
template <int kSteps, int kBlock, typename S>
__device__ __forceinline__ void DenseUnits(const Context<S>& c, Consumer& consumer, Dense which) {
  const DenseJob job = JobOf(c, which);
  const Waiter waiter = c.waiter;
  const int thread = ptx::ThreadOfBlock(), warp = thread / 32 - kFirstMmaWarp, lane = thread % 32;
  for (int u = job.begin; u < job.end;) {
    const int end = Min(job.end, (job.ChunkOf(u) + 1) * job.slices * job.tiles);
    uint32_t b[kSteps][4];
    LoadRows<kSteps, kBlock>(waiter, job.epoch, RangeOf<kSteps, kBlock>(job, u), lane, b);
#pragma unroll 1
    for (; u < end; ++u) {
      float d[2][4] = {};
      const uint8_t* stage = consumer.Wait(waiter);
      MultiplyBf16(stage + warp * kSteps * 512 + lane * 16, b, d, [&](uint32_t loaded) { consumer.Release(loaded); });
      StoreSums(consumer.Enter(waiter, warp), d, lane);
      consumer.Leave();
      consumer.NextUnit();
    }
  }
}

// ---- the router ----
//
// Its weights are float32: each is the exact sum of three bf16 numbers, so three MMAs a step. They do not pass the
// ring; an SM has a unit or none, whose weights a warp loads before it waits for its input.

// A warp's range of a unit.
template <int kSteps, int kSliceRows>
struct RouterWeights {
  float2 w[kSteps][4];

  // range: [kSliceRows][kSteps * 16]; rows beyond are zeros
  __device__ __forceinline__ void Load(const float* range, int first_row, int lane) {
    const int row = first_row + lane / 4, column = 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        w[j][r] = {0.0f, 0.0f};
        if (kSliceRows % 16 == 0 || row + r % 2 * 8 < kSliceRows)
          w[j][r] = __ldg(
              reinterpret_cast<const float2*>(range + (row + r % 2 * 8) * kSteps * 16 + column + 16 * j + r / 2 * 8));
      }
  }
  __device__ __forceinline__ void Multiply(const uint32_t (&b)[kSteps][4], float (&d)[2][4]) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j)
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        uint32_t a[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          a[r] = PackBf16(w[j][r].x, w[j][r].y);
          const Two taken = Unpack(a[r]);
          w[j][r] = {w[j][r].x - taken.a, w[j][r].y - taken.b};
        }
        ptx::MmaM16N8K16Bf16(d[0], a, b[j][0], b[j][1]);
        ptx::MmaM16N8K16Bf16(d[1], a, b[j][2], b[j][3]);
      }
  }
};

template <typename S>
__device__ __forceinline__ void RouterUnits(const Context<S>& c, Consumer& consumer) {
  using D = DenseOf<S, Dense::kRouter>;
  const DenseJob job = JobOf(c, Dense::kRouter);
  const Waiter waiter = c.waiter;
  const int thread = ptx::ThreadOfBlock(), warp = thread / 32 - kFirstMmaWarp, lane = thread % 32;
#pragma unroll 1
  for (int u = job.begin; u < job.end; ++u) {
    const int at = job.TileOf(u), slice = at / D::kTiles, range = job.ChunkOf(u) * kMmaWarps + warp;
    const float* of_slice = reinterpret_cast<const float*>(job.weights + slice * job.slice_bytes);
    RouterWeights<D::kSteps, D::kColumns> weights;
    weights.Load(of_slice + range * D::kColumns * D::kRangeK, (at - slice * D::kTiles) * 16, lane);
    uint32_t b[D::kSteps][4];
    LoadRows<D::kSteps, D::kBlock>(waiter, job.epoch, RangeOf<D::kSteps, D::kBlock>(job, u), lane, b);
    float d[2][4] = {};
    weights.Multiply(b, d);
    StoreSums(consumer.Enter(waiter, warp), d, lane);
    consumer.Leave();
    consumer.NextUnit();
  }
}

// ---- adding warps ----

template <typename S>
__device__ __forceinline__ void DenseSums(const Context<S>& c, Consumer& consumer, Dense which) {
  const DenseJob job = JobOf(c, which);
  const Waiter waiter = c.waiter;
  const int lane = threadIdx.x % 32, row = lane / 2, half = lane % 2;
#pragma unroll 1
  for (int u = job.begin; u < job.end; ++u, consumer.NextUnit()) {
    if (!consumer.Mine()) continue;
    const float (*ranges)[kPartialFloats] = consumer.Take(waiter);
    float sum[8] = {};
#pragma unroll
    for (int r = 0; r < kRanges; ++r) {
      const float4* x = reinterpret_cast<const float4*>(&ranges[r][row * kPartialStride + half * 8]);
      const float4 low = x[0], high = x[1];
      sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
      sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
    }
    consumer.Clear();
    Word* to = job.partial + ((job.TileOf(u) * job.chunks + job.ChunkOf(u)) * kRows + row) * kPairWords + half * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      Publish<Scope::kGpu>(to + i, __float_as_uint(sum[2 * i]), __float_as_uint(sum[2 * i + 1]), 0, job.epoch);
  }
}

// Where the GEMMs' shapes are alike, as in the released model, they share one copy of the code.
template <typename S>
__device__ __forceinline__ void RunDense(const Context<S>& c, Consumer& consumer, Dense which) {
  using Out = DenseOf<S, Dense::kOut>;
  using Hidden = DenseOf<S, Dense::kQkvg>;
  using Moe = DenseOf<S, Dense::kUnpooler>;
  constexpr bool kOutAlike = Out::kSteps == Hidden::kSteps && Out::kBlock == Hidden::kBlock;
  constexpr bool kMoeAlike = Moe::kSteps == Hidden::kSteps && Moe::kBlock == Hidden::kBlock;
  if (c.warp < kFirstMmaWarp)
    DenseSums(c, consumer, which);
  else if (which == Dense::kRouter)
    RouterUnits(c, consumer);
  else if (!kOutAlike && which == Dense::kOut)
    DenseUnits<Out::kSteps, Out::kBlock>(c, consumer, which);
  else if (!kMoeAlike && which == Dense::kUnpooler)
    DenseUnits<Moe::kSteps, Moe::kBlock>(c, consumer, which);
  else
    DenseUnits<Hidden::kSteps, Hidden::kBlock>(c, consumer, which);
}

// ---- row tasks ----

// Finished sums of one row of kWidth columns, two columns a lane.
//   first: partial of the row in the first of its tiles, chunk 0
template <int kWidth>
__device__ __noinline__ Two FinishColumns(Waiter waiter, uint32_t epoch, const Word* first, int chunks) {
  constexpr int kMost = 8;
  const int lane = Min(int(threadIdx.x % 32), kWidth / 2 - 1);
  const Word* mine = first + lane / kPairWords * chunks * kRows * kPairWords + lane % kPairWords;
  AwaitOne(waiter, epoch, mine + (chunks - 1) * kRows * kPairWords);
  Word w[kMost];
  Receive<Scope::kGpu>(waiter, epoch, [&](int i) { return mine + Min(i, chunks - 1) * kRows * kPairWords; }, w);
  Two sum = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kMost; ++i)
    if (i < chunks)
      sum = {sum.a + __uint_as_float(Register(w[i], 0)), sum.b + __uint_as_float(Register(w[i], 1))};
  return threadIdx.x % 32 < kWidth / 2 ? sum : Two{0.0f, 0.0f};
}

// The same from column tile `tile` of a slice here on.
template <typename S, Dense kWhich, int kWidth>
__device__ __forceinline__ Two FinishColumns(const Context<S>& c, int slice, int tile, int row) {
  using D = DenseOf<S, kWhich>;
  static_assert(D::kChunks <= 8, "FinishColumns receives up to 8 chunks");
  const Word* first = reinterpret_cast<const Word*>(c.Frame(D::kPartial)) +
                      ((slice * D::kTiles + tile) * D::kChunks * kRows + row) * kPairWords;
  return FinishColumns<kWidth>(c.waiter, c.epoch, first, D::kChunks);
}

}  // namespace musejax::layer

// Routed experts: GEMM1 with SwiGLU and, for static activations, quantisation; GEMM2.
//
// A unit is two consecutive 16-row weight tiles of one visit, of the slices here one after the other; SMs take units in
// contiguous parts (partition.h). The 8 columns of its MMAs are the visit's pairs, held in registers while the visit
// lasts. UP: a tile has 8 gate rows and their 8 up rows, so a unit is one block of 16 inner columns, one block of
// quantisation, and lies in one slice. DOWN: two tiles of 16 columns of y; the last unit may have one.
//
// Sums over K: an MMA warp takes one range of each pass, an adding warp adds ranges ascending and passes ascending from
// +0 (common/layout.h). NVFP4 has one pass, bf16 a pass for each chunk. Stages: pass by pass, tile by tile.
//
// Bits: as cpu/experts.cc, except for the inner order of a range.
#pragma once

#include "layer/route.cuh"

namespace musejax::layer {

// Codes come out of their words times 2^-126 and scales times 2^107; sums are as much too small.
inline constexpr float kNvfp4Power = 0x1p19f;

template <typename S, bool kUp>
struct ExpertOf {
  using F = Frames<S>;
  static constexpr int kK = kUp ? S::kMoe : S::kInner;
  static constexpr int kTiles = (kUp ? 2 * S::kInner : S::kMoe) / int(kSlices) / 16;  // of a slice
  static constexpr int kTilesHere = kTiles * S::kSlicesHere, kUnits = kUp ? S::kUpUnits : S::kDownUnits;
  static_assert(kUnits == (kTilesHere + 1) / 2, "a unit is two tiles");

  // The input: records of kWidth columns, kCount of them side by side.
  static constexpr int kWidth = kUp ? S::kMoeBlock : 16, kCount = kUp ? kRows : S::kPairs;
  static constexpr Scope kScope = kUp ? Scope::kGpu : Scope::kSys;
  static_assert(!kUp || kTiles % 2 == 0, "a unit of gate and up lies in one slice");
};

// How a form of weight is passed over: kCount passes of kPassK columns, kActive warps each a range of kRangeK.
template <int kK, bool kNvfp4>
struct PassOf {
  static constexpr int kPassK = kNvfp4 ? kK : int(Chunk(kK)), kCount = kK / kPassK;
  static constexpr int kRangeK = int(kNvfp4 ? Nvfp4Range(kK) : Range(kK)), kActive = kPassK / kRangeK;
  static constexpr int kBytes = int(kNvfp4 ? Nvfp4TileBytes(kK) : 16 * kPassK * 2);  // of a tile
  static constexpr int kPassRegisters = kRangeK / 8, kRegisters = kCount * kPassRegisters;
  static_assert(kActive <= kMmaWarps, "each range of K has its warp");
  static_assert(kBytes <= kStageBytes, "a pass of a tile is one stage of the ring");
};

// Place of a unit: tiles first .. first + count - 1 of those here.
template <typename E>
struct ExpertUnit {
  int visit, first, count;
  __device__ explicit ExpertUnit(int u)
      : visit(u / E::kUnits), first(u % E::kUnits * 2), count(Min(2, E::kTilesHere - first)) {}
};

// ---- warp 0 ----

// Where a tile of those here of an expert lies; `experts` of a slice are in memory.
template <bool kUp, bool kNvfp4, typename S>
__device__ __forceinline__ const uint8_t* ExpertTile(const uint8_t* weights, int experts, int expert, int tile) {
  using E = ExpertOf<S, kUp>;
  using P = PassOf<E::kK, kNvfp4>;
  constexpr ExpertLayout kLayout(S::kShape, kNvfp4);
  return weights + (kUp ? kLayout.gate_up : kLayout.down) +
         (int64_t(tile / E::kTiles) * experts + expert) * kLayout.bytes +
         int64_t(tile % E::kTiles * P::kCount) * P::kBytes;
}

template <bool kUp, bool kNvfp4, typename S>
__device__ void StreamUnits(Context<S>& c, const RouteShared& route, Producer& producer, int experts) {
  using E = ExpertOf<S, kUp>;
  using P = PassOf<E::kK, kNvfp4>;
  const uint8_t* weights = c.arrays().experts;
  const UnitSpan span = route.spans[!kUp];
  // The tiles of a unit lie together, but for those of two slices.
  const auto tile_of = [&](int u, int i) {
    const ExpertUnit<E> at(u);
    return ExpertTile<kUp, kNvfp4, S>(weights, experts, route.visits[at.visit].expert, at.first + Min(i, at.count - 1));
  };
  constexpr bool kAlways = E::kTiles % 2 == 0;  // a unit has two tiles of one slice
  int u = span.begin;
  ForAddresses(
      span.begin, span.end, [&](int i) { return tile_of(i, 0); },
      [&](const uint8_t* first) {
        const int tiles = kAlways ? 2 : ExpertUnit<E>(u).count;
        const uint8_t* second = kAlways ? first + P::kCount * P::kBytes : tile_of(u, 1);
        ++u;
#pragma unroll 1
        for (int i = 0; i < P::kCount * tiles; ++i)
          producer.Push(c.waiter, (i % tiles ? second : first) + i / tiles * P::kBytes, P::kBytes);
      });
}

// After `listed`: UP, then DOWN, which gives the list back. experts: of a slice, in memory.
template <bool kUp, typename S>
__device__ void StreamExperts(Context<S>& c, RouteShared& route, Producer& producer, int experts = S::kExperts) {
  if (c.arrays().nvfp4)
    StreamUnits<kUp, true>(c, route, producer, experts);
  else
    StreamUnits<kUp, false>(c, route, producer, experts);
  if (!kUp && c.lane() == 0) ptx::MbarrierArrive(&route.taken);
}

// ---- MMA warps ----

// Operand registers of this warp's ranges, pass by pass: column lane / 4 is a pair of the visit, or
// its first one again, whose sums nobody takes.
//   input: frame of the records
template <bool kUp, bool kNvfp4, typename S>
__device__ __forceinline__ void LoadPairs(Context<S>& c, int64_t input, const Visit& visit,
                                          uint32_t (&b)[PassOf<ExpertOf<S, kUp>::kK, kNvfp4>::kRegisters]) {
  using E = ExpertOf<S, kUp>;
  using P = PassOf<E::kK, kNvfp4>;
  constexpr int kWords = RecordWords(E::kWidth), kRegs = RecordRegisters(E::kWidth);
  constexpr int kOfPass = P::kRangeK / E::kWidth, kRecords = P::kCount * kOfPass;
  constexpr int kBatch = Min(kRecords, kWords == 1 ? 16 : 4);  // records on their way at once
  static_assert(P::kRangeK % E::kWidth == 0 && kRecords % kBatch == 0, "a warp's range is made of whole records");
  const int warp = c.warp - kFirstMmaWarp, column = c.lane() / 4;
  const int pair = visit.pairs[column < visit.count ? column : 0];
  const Word* mine = RecordAt<E::kWidth>(c.Frame(input), warp * kOfPass * E::kCount + (kUp ? pair / S::kTopK : pair)) +
                     c.lane() % 4 * kWords;
  if (warp >= P::kActive) {
#pragma unroll
    for (int r = 0; r < P::kRegisters; ++r) b[r] = 0;
    return;
  }
#pragma unroll
  for (int first = 0; first < kRecords; first += kBatch) {
    Word w[kBatch * kWords];
    Receive<E::kScope>(
        c.waiter, c.epoch,
        [&](int i) {
          const int record = first + i / kWords;
          const int64_t block = record / kOfPass * P::kActive * kOfPass + record % kOfPass;
          return mine + block * E::kCount * 4 * kWords + i % kWords;
        },
        w);
#pragma unroll
    for (int i = 0; i < kBatch * kRegs; ++i)
      b[first * kRegs + i] = Register(w[i / kRegs * kWords + i % kRegs / 3], i % kRegs % 3);
  }
}

// The first kStep registers go behind the others: so the code of a step or pass is there once, since registers have no
// index at run time. After a whole turn all are where they were.
template <int kStep, int kRegisters>
__device__ __forceinline__ void Rotate(uint32_t (&b)[kRegisters]) {
  static_assert(kRegisters % kStep == 0, "whole steps");
  if constexpr (kStep < kRegisters) {
    uint32_t first[kStep];
#pragma unroll
    for (int r = 0; r < kStep; ++r) first[r] = b[r];
#pragma unroll
    for (int r = 0; r < kRegisters; ++r) b[r] = r + kStep < kRegisters ? b[r + kStep] : first[r + kStep - kRegisters];
  }
}

// Per-token activations: the decode scale of the lane's column.
template <typename S>
__device__ __forceinline__ float ReceiveDecode(const Context<S>& c, const Visit& visit, bool up) {
  using F = Frames<S>;
  const int column = c.lane() / 4, pair = visit.pairs[column < visit.count ? column : 0];
  const uint64_t* scales = reinterpret_cast<const uint64_t*>(c.Frame(up ? F::decode_h : F::decode_c));
  const uint64_t* at = scales + (up ? pair / S::kTopK : pair);
  float decode[1];
  ReceiveFloats<false>(
      c.waiter, c.epoch, [&](int) { return at; }, decode);
  return decode[0];
}

// d += 16 columns of an NVFP4 tile times b0, b1. Scales of rows 0 to 7 and 8 to 15 are in half kHalf.
template <int kHalf>
__device__ __forceinline__ void MultiplyCodes(float (&d)[4], uint32_t w, uint32_t upper, uint32_t lower, uint32_t b0,
                                              uint32_t b1) {
  constexpr uint32_t kMask = 0x81C081C0u;  // sign, and the bits where exponent and fraction of a bf16 meet
  const uint32_t a[4] = {ptx::MulBf16x2<kHalf>(w & kMask, upper), ptx::MulBf16x2<kHalf>((w ^ w << 6) & kMask, lower),
                         ptx::MulBf16x2<kHalf>((w ^ __funnelshift_r(w, w, 4)) & kMask, upper),
                         ptx::MulBf16x2<kHalf>((w << 2 ^ w >> 6) & kMask, lower)};
  ptx::MmaM16N8K16Bf16(d, a, b0, b1);
}

// Scale fields of steps 0 and 1 of a word -> bf16 in its halves. Steps 2 and 3: the same of the bytes swapped.
__device__ __forceinline__ uint32_t ScalesOf(uint32_t w) { return ptx::AndOr(w, 0x0FF00FF0u, 0x70007000u); }
__device__ __forceinline__ uint32_t LaterScalesOf(uint32_t w) { return ScalesOf(__byte_perm(w, 0, 0x2301)); }

// Part of a range of an NVFP4 row tile, in registers: 16 x 64 codes and their scales, kEach times.
template <int kK>
struct Nvfp4Part {
  static constexpr int kTiles = PassOf<kK, true>::kRangeK / 64;  // of 16 x 64 codes, in a range
  static constexpr int kEach = kTiles % 2 == 0 ? kTiles / 2 : kTiles, kParts = kTiles / kEach;
  uint4 codes[kEach];
  uint2 scales[kEach];

  __device__ __forceinline__ void Load(const uint8_t* stage, int range, int lane, int part) {
    const int first = range * kTiles + part * kEach;
    const uint8_t* code = stage + first * 512 + lane * 16;
    const uint8_t* scale = stage + kK / 64 * 512 + first * 64 + lane / 4 * 8;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      scales[i] = *reinterpret_cast<const uint2*>(scale + i * 64);
      codes[i] = *reinterpret_cast<const uint4*>(code + i * 512);
    }
  }
  // Something of every load, for Consumer::Release.
  __device__ __forceinline__ uint32_t Loaded() const {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) all |= codes[i].w | scales[i].y;
    return all;
  }

  // d and later: sums of steps 0 and 2, and of 1 and 3, of each 64 columns; the range's sum is d + later.
  //   b: of this part
  __device__ __forceinline__ void Multiply(const uint32_t* b, float (&d)[4], float (&later)[4]) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i, b += 8) {
      const uint32_t upper = ScalesOf(scales[i].x), lower = ScalesOf(scales[i].y);
      const uint32_t later_upper = LaterScalesOf(scales[i].x), later_lower = LaterScalesOf(scales[i].y);
      MultiplyCodes<0>(d, codes[i].x, upper, lower, b[0], b[1]);
      MultiplyCodes<1>(later, codes[i].y, upper, lower, b[2], b[3]);
      MultiplyCodes<0>(d, codes[i].z, later_upper, later_lower, b[4], b[5]);
      MultiplyCodes<1>(later, codes[i].w, later_upper, later_lower, b[6], b[7]);
    }
  }
};

// Sums of a tile -> partial [tile][column][tile row]. d[r]: tile row lane / 4 + 8 (r / 2), column 2 (lane % 4) + r % 2.
__device__ __forceinline__ void StoreTile(float* partial, int tile, int lane, const float (&d)[4]) {
  float* to = partial + (tile * kVisitPairs + lane % 4 * 2) * kPartialStride + lane / 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) to[r % 2 * kPartialStride + r / 2 * 8] = d[r];
}

// Behind column g's first 16 sums of the first MMA warp lies the pair's decode scale, so that it travels with them.
__device__ __forceinline__ int DecodeAt(int column) { return column * kPartialStride + 16; }

// `tiles` NVFP4 tiles of a visit, two a unit. Weights are loaded a part ahead, so that a warp has something to multiply
// while they come.
template <int kK>
__device__ __forceinline__ void MultiplyNvfp4Tiles(Waiter waiter, Consumer& consumer, int tiles, int warp, int lane,
                                                   const uint32_t (&b)[PassOf<kK, true>::kRegisters], float decode) {
  using Part = Nvfp4Part<kK>;
  Part parts[2];
  const uint8_t* stage = consumer.Wait(waiter);
  parts[0].Load(stage, warp, lane, 0);
  float* partial = nullptr;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    float d[4] = {}, later[4] = {};
#pragma unroll
    for (int i = 0; i < Part::kParts; ++i) {
      const bool last = i + 1 == Part::kParts;
      Part &now = parts[i % 2], &next = parts[(i + 1) % Part::kParts % 2];
      if (last && Part::kParts == 1) now.Multiply(b + i * 8 * Part::kEach, d, later);
      if (last) consumer.Release(now.Loaded());
      if (last && tile + 1 < tiles) stage = consumer.Wait(waiter);
      if (!last || tile + 1 < tiles) next.Load(stage, warp, lane, (i + 1) % Part::kParts);
      if (Part::kParts > 1) now.Multiply(b + i * 8 * Part::kEach, d, later);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) d[r] = d[r] + later[r];
    if (tile % 2 == 0) partial = consumer.Enter(waiter, warp);
    StoreTile(partial, tile % 2, lane, d);
    if (tile % 2 == 0 && tile + 1 < tiles) continue;
    if (warp == 0 && lane % 4 == 0) partial[DecodeAt(lane / 4)] = decode;
    consumer.Leave();
    consumer.NextUnit();
  }
}

// The same of bf16 tiles, pass by pass of each unit; a pass of a tile is a stage.
template <int kK>
__device__ __forceinline__ void MultiplyBf16Tiles(Waiter waiter, Consumer& consumer, int tiles, int warp, int lane,
                                                  uint32_t (&b)[PassOf<kK, false>::kRegisters]) {
  using P = PassOf<kK, false>;
  constexpr int kSteps = P::kRangeK / 16;
#pragma unroll 1
  for (int begin = 0; begin < tiles; begin += 2, consumer.NextUnit()) {
#pragma unroll 1
    for (int pass = 0; pass < P::kCount; ++pass) {
      float* partial = nullptr;
#pragma unroll 1
      for (int tile = 0; tile < Min(2, tiles - begin); ++tile) {
        const uint8_t* from = consumer.Wait(waiter) + warp * kSteps * 512 + lane * 16;
        uint4 w[kSteps];
        float d[4] = {};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) w[i] = *reinterpret_cast<const uint4*>(from + i * 512);
        consumer.Release(Loaded(w));
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const uint32_t a[4] = {w[i].x, w[i].y, w[i].z, w[i].w};
          ptx::MmaM16N8K16Bf16(d, a, b[2 * i], b[2 * i + 1]);
        }
        if (tile == 0) partial = consumer.Enter(waiter, warp);
        StoreTile(partial, tile, lane, d);
      }
      consumer.Leave();
      Rotate<P::kPassRegisters>(b);
    }
  }
}

// Of a warp that has no range of K: the same stages, and nothing for the adding warps.
__device__ __forceinline__ void PassOver(Waiter waiter, Consumer& consumer, int tiles, int warp, int passes) {
#pragma unroll 1
  for (int begin = 0; begin < tiles; begin += 2, consumer.NextUnit()) {
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      for (int tile = begin; tile < Min(begin + 2, tiles); ++tile) consumer.Wait(waiter), consumer.Release();
      consumer.Enter(waiter, warp), consumer.Leave();
    }
  }
}

// Of a unit; divisors are constants, so that it takes no division.
template <typename S>
__device__ __forceinline__ int VisitOf(int u, bool up) {
  return up ? u / ExpertOf<S, true>::kUnits : u / ExpertOf<S, false>::kUnits;
}

// UP and DOWN share the code of their MMAs.
template <bool kNvfp4, typename S>
__device__ __forceinline__ void MultiplyVisits(Context<S>& c, RouteShared& route, Consumer& consumer, bool up) {
  using F = Frames<S>;
  using Up = ExpertOf<S, true>;
  using Down = ExpertOf<S, false>;
  static_assert(Up::kK == Down::kK, "both GEMMs of an expert have the same K");
  using P = PassOf<Up::kK, kNvfp4>;
  const int units = up ? Up::kUnits : Down::kUnits, tiles_here = up ? Up::kTilesHere : Down::kTilesHere;
  const UnitSpan span = route.spans[!up];
  const int warp = c.warp - kFirstMmaWarp, lane = c.lane();
  const bool per_token = kNvfp4 && Takes(c, Activations::kPerToken);
  const Waiter waiter = c.waiter;
#pragma unroll 1
  for (int u = span.begin; u < span.end;) {
    const int visit = VisitOf<S>(u, up), end = Min(span.end, (visit + 1) * units);
    const int tiles = Min(2 * (end - u), tiles_here - 2 * (u - visit * units));
    u = end;
    uint32_t b[P::kRegisters];
    float decode = 1.0f;
    if (up)
      LoadPairs<true, kNvfp4>(c, F::h, route.visits[visit], b);
    else
      LoadPairs<false, kNvfp4>(c, per_token ? F::quantised_c : F::c, route.visits[visit], b);
    if (per_token) decode = ReceiveDecode(c, route.visits[visit], up);
    if (warp >= P::kActive)
      PassOver(waiter, consumer, tiles, warp, P::kCount);
    else if constexpr (kNvfp4)
      MultiplyNvfp4Tiles<Up::kK>(waiter, consumer, tiles, warp, lane, b, decode);
    else
      MultiplyBf16Tiles<Up::kK>(waiter, consumer, tiles, warp, lane, b);
  }
}

template <typename S>
__device__ __forceinline__ void ExpertUnits(Context<S>& c, RouteShared& route, Consumer& consumer, bool up) {
  if (c.arrays().nvfp4)
    MultiplyVisits<true>(c, route, consumer, up);
  else
    MultiplyVisits<false>(c, route, consumer, up);
}

// ---- between UP and DOWN ----

// Row warps: per-token activations of DOWN, c on its grid, for this rank, a pair and 8 blocks of 16 columns a task, in
// two passes as NormExpertsPerToken. Here once, and not at each visit: columns of a visit are mostly empty, and many
// SMs visit an expert.
template <typename S>
__device__ __noinline__ void QuantizeInner(Context<S>&, bool first) {
  Context<S>& c = Anew<S>();
  using F = Frames<S>;
  constexpr int kTiles = 8, kParts = S::kInnerTiles / kTiles;
  static_assert(S::kInnerTiles % kTiles == 0, "a lane has a word of a task");
  c.ForTasks(c.valid * S::kTopK * kParts, [&](int task) {
    const int pair = task / kParts, part = task % kParts;
    const int64_t at = (int64_t(part * kTiles + c.lane() / 4) * S::kPairs + pair) * 4 + c.lane() % 4;
    const Word* from = reinterpret_cast<const Word*>(c.Frame(F::c)) + at;
    Word w[1];
    Receive<Scope::kSys>(c.waiter, c.epoch, [&](int) { return from; }, w);
    const Two even = Unpack(Register(w[0], 0)), odd = Unpack(Register(w[0], 1));
    float x[4] = {even.a, even.b, odd.a, odd.b};
    uint64_t* maxima = reinterpret_cast<uint64_t*>(c.Frame(F::maxima_c)) + pair * kParts;
    if (first) {
      const float most = LargestOfLanes(LargerAbs(LargerAbs(fabsf(x[0]), x[1]), LargerAbs(fabsf(x[2]), x[3])));
      if (c.lane() == 0) PublishFloat<Scope::kGpu>(maxima + part, most, c.epoch);
      return;
    }
    const RowScale scale = ReceiveRowScale<kParts>(c, maxima);
    QuantizeBlock(x, scale.encode);
    if (scale.dead) x[0] = x[1] = x[2] = x[3] = 0.0f;
    if (part == 0 && c.lane() == 0)
      PublishFloat<Scope::kGpu>(reinterpret_cast<uint64_t*>(c.Frame(F::decode_c)) + pair, scale.decode, c.epoch);
    Publish<Scope::kGpu>(reinterpret_cast<Word*>(c.Frame(F::quantised_c)) + at, PackBf16(x[0], x[1]),
                         PackBf16(x[2], x[3]), 0, c.epoch);
  });
}

// What DOWN waits for besides c.
template <typename S>
__device__ __forceinline__ void BeforeDown(Context<S>& c) {
  if (Takes(c, Activations::kPerToken)) QuantizeInner(c, true), QuantizeInner(c, false);
}

// ---- adding warps ----

// Sums over K of a unit: of each tile rows 2t, 2t + 1, 2t + 8, 2t + 9 (t = lane % 4) of column lane / 4, and the
// column's decode scale if its activations are per token.
struct TileSums {
  float tile[2][4];
  float decode;
};

// passes of `active` ranges each.
__device__ __forceinline__ TileSums AddPasses(Waiter waiter, Consumer& consumer, int passes, int active, int lane) {
  const int column = lane / 4, t = lane % 4;
  TileSums sums = {};
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const float (*ranges)[kPartialFloats] = consumer.Take(waiter);
    float chunk[2][4] = {};
#pragma unroll
    for (int range = 0; range < kMmaWarps; ++range)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        if (range >= active) continue;
        const float* x = ranges[range] + (tile * kVisitPairs + column) * kPartialStride + 2 * t;
        const float2 low = *reinterpret_cast<const float2*>(x), high = *reinterpret_cast<const float2*>(x + 8);
        chunk[tile][0] += low.x, chunk[tile][1] += low.y, chunk[tile][2] += high.x, chunk[tile][3] += high.y;
      }
    sums.decode = ranges[0][DecodeAt(column)];
    consumer.Clear();
#pragma unroll
    for (int i = 0; i < 8; ++i) sums.tile[i / 4][i % 4] += chunk[i / 4][i % 4];
  }
  return sums;
}

// c = silu(gate) up of 16 inner columns of a pair, to all ranks. Tile rows 0 to 7 are gate, 8 to 15 up.
//   encode: of static activations, whose grid values c takes; 0 for the others
template <typename S>
__device__ __forceinline__ void FinishUp(const Context<S>& c, const Visit& visit, int unit, const TileSums& sums,
                                         float of_gate, float of_up, float encode) {
  constexpr int kBlocks = S::kInnerTiles / int(kSlices);  // of a slice
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = Silu(sums.tile[i / 2][i % 2] * of_gate) * (sums.tile[i / 2][i % 2 + 2] * of_up);
  if (encode != 0.0f) QuantizeBlock(x, encode);
  const int column = c.lane() / 4;
  if (column >= visit.count) return;
  const uint32_t even = PackBf16(x[0], x[1]), odd = PackBf16(x[2], x[3]);
  const int record = unit % kBlocks * S::kPairs + visit.pairs[column], t = c.lane() % 4;
  const uint32_t tag = c.epoch;
  ForRanks(c, unit / kBlocks, [&](uint8_t* frames, int slice) {
    Word* to = RecordAt<16>(frames + Frames<S>::c, slice * kBlocks * S::kPairs + record) + t;
    Publish<Scope::kSys>(to, even, odd, 0, tag);
  });
}

// y = r(sum scale) of 16 columns of a pair for each tile, for this rank.
template <typename S>
__device__ __forceinline__ void FinishDown(const Context<S>& c, const Visit& visit, int first, int count,
                                           const TileSums& sums, float scale) {
  const int column = c.lane() / 4;
  if (column >= visit.count) return;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    if (tile >= count) return;
    const float* x = sums.tile[tile];
    Publish<Scope::kGpu>(
        RecordAt<16>(c.Frame(Frames<S>::y), (first + tile) * S::kPairs + visit.pairs[column]) + c.lane() % 4,
        PackBf16(x[0] * scale, x[1] * scale), PackBf16(x[2] * scale, x[3] * scale), 0, c.epoch);
  }
}

template <typename S>
__device__ __forceinline__ void ExpertSums(Context<S>& c, RouteShared& route, Consumer& consumer, bool up) {
  using Up = ExpertOf<S, true>;
  using Down = ExpertOf<S, false>;
  using Nvfp4 = PassOf<Up::kK, true>;
  using Bf16 = PassOf<Up::kK, false>;
  const bool nvfp4 = c.arrays().nvfp4, is_static = Takes(c, Activations::kStatic);
  const bool per_token = Takes(c, Activations::kPerToken);
  const float* small = c.arrays().small;
  const SmallLayout at = SmallOf(c);
  float decode = 1.0f, encode = 0.0f;
  if (is_static) {
    const float into_down = LargestScale(small + at.down_input_scale, S::kExperts);
    decode = up ? LargestScale(small + at.gate_up_input_scale, 2 * S::kExperts) : into_down;
    encode = 1.0f / into_down;
  }
  const Waiter waiter = c.waiter;
  const int units = up ? Up::kUnits : Down::kUnits, lane = c.lane();
  const UnitSpan span = route.spans[!up];
#pragma unroll 1
  for (int u = span.begin; u < span.end; ++u, consumer.NextUnit()) {
    if (!consumer.Mine()) continue;
    const int number = VisitOf<S>(u, up), unit = u - number * units;
    const Visit& visit = route.visits[number];
    float global[2] = {1.0f, 1.0f};
    if (nvfp4 && up) global[0] = __ldg(small + at.gate_up_global + 2 * visit.expert);
    if (nvfp4 && up) global[1] = __ldg(small + at.gate_up_global + 2 * visit.expert + 1);
    if (nvfp4 && !up) global[0] = __ldg(small + at.down_global + visit.expert);
    const TileSums sums =
        AddPasses(waiter, consumer, nvfp4 ? Nvfp4::kCount : Bf16::kCount, nvfp4 ? Nvfp4::kActive : Bf16::kActive, lane);
    const float d = per_token ? sums.decode : decode, power = nvfp4 ? kNvfp4Power : 1.0f;
    if (up)
      FinishUp(c, visit, unit, sums, d * global[0] * power, d * global[1] * power, encode);
    else
      FinishDown(c, visit, 2 * unit, Min(2, Down::kTilesHere - 2 * unit), sums, d * global[0] * power);
  }
}

}  // namespace musejax::layer

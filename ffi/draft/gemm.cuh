// A GEMM over 16 rows: units of 16 output columns (a row tile of the weight) times one chunk of K, numbered chunk by
// chunk, of which a block runs a contiguous part. 8 warps multiply, each one range of the chunk; sums of ranges are
// added ascending here, and those of chunks by whoever reads the result (Finished). So an element has the bits of one
// sum over K in a fixed order, whoever ran which unit.
//
// Weights pass a ring in shared memory, of which each thread fills and reads its own 16-byte places. The first units
// are asked for (Start) before the barrier at which the input becomes whole, for weights depend on nothing; and those
// of GEMMs to come are brought into L2 while nobody multiplies (Prefetch).
#pragma once

#include "draft/context.cuh"

namespace musejax::draft {

inline constexpr int kMultipliers = int(kRanges);  // warps
inline constexpr int kDepth = 5;                   // units in the ring
inline constexpr int kMaxSteps = int(kChunk / kRanges / 16);
inline constexpr int kPrefetched = 8;  // units of a block that Prefetch asks for, at most

// A chunk of the input as operands of MMAs: [range][step][lane] of four registers, rows 0 to 7 (two), rows 8 to 15.
using Operands = uint4[kRanges][kMaxSteps][32];

struct Shared {
  uint4 ring[kDepth][kRanges][kMaxSteps * 32];
  union {
    Operands input;
    alignas(16) uint8_t any[40960];  // of phases between GEMMs
  };
  float sums[2][kRanges][kPartialFloats];
  float rstd[kRows];
  comm::Where where;
};

struct Gemm {
  const uint8_t* weights;  // the section in the first slice here
  int64_t slice_bytes;
  int k, slices;
  int first, tiles, all;  // row tiles of a slice: the first one, how many, and how many a chunk of the section has
  float* partial;         // [slice][tile][chunk][row][16]

  __device__ Gemm(const uint8_t* weights, int64_t slice_bytes, int64_t k, int64_t all_rows, int64_t first_row,
                  int64_t rows, int slices, float* partial)
      : weights(weights),
        slice_bytes(slice_bytes),
        k(int(k)),
        slices(slices),
        first(int(first_row / kTile)),
        tiles(CeilDiv(rows, kTile)),
        all(CeilDiv(all_rows, kTile)),
        partial(partial) {}
  __device__ int ChunkK() const { return int(Chunk(k)); }
  __device__ int Chunks() const { return k / ChunkK(); }
  __device__ int Units() const { return Chunks() * slices * tiles; }
  __device__ int Begin() const { return int(int64_t(Units()) * blockIdx.x / gridDim.x); }
  __device__ int End() const { return int(int64_t(Units()) * (blockIdx.x + 1) / gridDim.x); }
  __device__ int ChunkOf(int unit) const { return unit / (slices * tiles); }
  __device__ const uint8_t* WeightsOf(int unit) const {
    const int at = unit % (slices * tiles), slice = at / tiles, tile = first + at % tiles;
    return weights + slice * slice_bytes + (int64_t(ChunkOf(unit)) * all + tile) * kTile * ChunkK() * 2;
  }
  __device__ float* SumsOf(int unit) const {
    return partial + (int64_t(unit % (slices * tiles)) * Chunks() + ChunkOf(unit)) * (kRows * 16);
  }
  // Where sums of another GEMM may begin.
  __device__ float* Behind() const { return partial + int64_t(slices) * tiles * Chunks() * (kRows * 16); }

  // Of a slice, columns `column` and the next (column even) of a row and of the row before it, all chunks added.
  template <int kCount>
  __device__ __forceinline__ void Finished(int slice, int column, int row, Two (&out)[kCount]) const {
    const float* sums = partial + ((int64_t(slice) * tiles + column / 16) * Chunks() * kRows + row) * 16 + column % 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = {0.0f, 0.0f};
#pragma unroll 12
    for (int chunk = 0; chunk < Chunks(); ++chunk) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(sums + (chunk * kRows - i) * 16);
        out[i].a += x.x, out[i].b += x.y;
      }
    }
  }
  __device__ __forceinline__ Two Finished(int slice, int column, int row) const {
    Two out[1];
    Finished(slice, column, row, out);
    return out[0];
  }
};

// What a GEMM multiplies, made on the way into shared memory: bf16 rows, or float32 ones rounded; normed where `gamma`
// is not null; then through side 0 of a convolution where `base` is not null.
struct Input {
  const uint16_t* rows;  // [part][kRows][width]
  int width;
  const float* floats = nullptr;   // instead of rows: [count][k]
  const float* squares = nullptr;  // f32 [row][8][leaves], of rows
  const float* gamma = nullptr;
  const float* base = nullptr;  // [tap][hidden]
  int count;                    // rows; the others are zeros
};

// 1 / rms of every row, into shared memory; a warp has a row. Needs a block barrier after it.
__device__ __forceinline__ void NormRows(const Context& c, const float* squares) {
  constexpr int kAtOnce = 16;
  const int leaves = LeavesOf(c.p.model);
  const float* of = squares + (c.warp * int(kSlices) + c.lane % int(kSlices)) * leaves;
  float slice = 0.0f, total = 0.0f;
  for (int begin = 0; begin < leaves; begin += kAtOnce) {
    float leaf[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) leaf[i] = begin + i < leaves ? of[begin + i] : 0.0f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) slice += leaf[i];
  }
  for (int s = 0; s < int(kSlices); ++s) total += __shfl_sync(kAllLanes, slice, s);
  if (c.lane == 0) c.shared.rstd[c.warp] = Rstd(total, int(c.p.model.shape.hidden), c.p.model.eps);
}

// Base kernel [tap][hidden] of a side of a convolution, of two columns: for the row itself and for the one before.
struct Taps {
  Two own, before;
};
__device__ __forceinline__ Taps TapsOf(const DraftShape& s, const float* base, int column) {
  const float2 own = *reinterpret_cast<const float2*>(base + column);
  const float2 before = *reinterpret_cast<const float2*>(base + s.hidden + column);
  return {{own.x, own.y}, {before.x, before.y}};
}
// Where the coefficients of two columns, `column` of a slice and the next, are in every row for side `side`.
struct Deltas {
  const float* first;  // of row 0
  int a, b, groups, stride;
  __device__ __forceinline__ Deltas(const Context& c, int side, int slice, int column) {
    const DraftShape& s = c.p.model.shape;
    groups = int(s.groups_slice()), stride = int(s.delta_rows());
    const int size = int(s.hidden_slice()) / groups;
    a = column / size, b = (column + 1) / size;
    first = c.Frame<const float>(c.p.at.delta) + slice * kRows * stride + side * 2 * groups;
  }
  __device__ __forceinline__ Taps Of(int row) const {
    const float* of = first + row * stride;
    return {{of[a], of[b]}, {of[groups + a], of[groups + b]}};
  }
};
// Two columns through a convolution; before: those of the row before, zeros for the first.
__device__ __forceinline__ Two Convolved(const Taps& base, const Taps& delta, Two own, Two before) {
  return Rounded({(base.own.a + delta.own.a) * own.a + (base.before.a + delta.before.a) * before.a,
                  (base.own.b + delta.own.b) * own.b + (base.before.b + delta.before.b) * before.b});
}

// Chunk `chunk` of the input, columns 2i and 2i + 1 by thread i. By all threads, between block barriers. What comes
// from far away is asked for first, all of it.
__device__ __forceinline__ void LoadInput(const Context& c, const Input& in, int k, int chunk) {
  constexpr int kAtOnce = 8;  // rows whose coefficients are asked for at a time
  const int chunk_k = int(Chunk(k)), column = 2 * int(threadIdx.x), at = chunk * chunk_k + column;
  const bool mine = column < chunk_k;
  const int part = mine && !in.floats ? at / in.width : 0, within = mine && !in.floats ? at % in.width : at;
  uint32_t x[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    x[row] = 0;
    if (!mine || row >= in.count) continue;
    if (in.floats) {
      const float2 v = *reinterpret_cast<const float2*>(in.floats + int64_t(row) * k + at);
      x[row] = PackBf16(v.x, v.y);
    } else {
      x[row] = *reinterpret_cast<const uint32_t*>(in.rows + (int64_t(part) * kRows + row) * in.width + within);
    }
  }
  Two gain{1.0f, 1.0f};
  Taps base{};
  if (mine && in.gamma) gain = {in.gamma[at], in.gamma[at + 1]};
  if (mine && in.base) base = TapsOf(c.p.model.shape, in.base, at);
  if (in.gamma) NormRows(c, in.squares);
  __syncthreads();
  if (!mine) return;
  const int range_k = chunk_k / int(kRanges), range = column / range_k, step = column % range_k / 16, kk = column % 16;
  uint32_t* registers = reinterpret_cast<uint32_t*>(&c.shared.input[range][step][kk % 8 / 2]) + kk / 8;
  Two before{0.0f, 0.0f};
#pragma unroll
  for (int first = 0; first < kRows; first += kAtOnce) {
    Taps delta[kAtOnce] = {};
    if (in.base) {
      const Deltas deltas(c, 0, part, within);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < in.count) delta[i] = deltas.Of(first + i);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i;
      Two v = Unpack(x[row]);
      if (in.gamma) {
        const float rstd = c.shared.rstd[row];
        v = Rounded({v.a * rstd * gain.a, v.b * rstd * gain.b});
      }
      if (in.base) {
        const Two own = v;
        v = Convolved(base, delta[i], own, before);
        before = own;
      }
      registers[row % 8 * 16 + row / 8 * 2] = PackBf16(v.a, v.b);
    }
  }
}

// Asks for this thread's part of unit number `turn` of the block; a group, even if there is none.
__device__ __forceinline__ void Load(const Context& c, const Gemm& g, int turn) {
  const int unit = g.Begin() + turn, steps = g.ChunkK() / int(kRanges) / 16;
  if (unit < g.End()) {
    const uint4* from = reinterpret_cast<const uint4*>(g.WeightsOf(unit)) + c.warp * steps * 32 + c.lane;
    uint4* to = c.shared.ring[turn % kDepth][c.warp] + c.lane;
#pragma unroll
    for (int j = 0; j < kMaxSteps; ++j)
      if (j < steps) ptx::CpAsync16(to + j * 32, from + j * 32);
  }
  ptx::CpAsyncCommit();
}

// Asks for the first units of a GEMM, which is the next one to be multiplied.
__device__ __forceinline__ void Start(const Context& c, const Gemm& g) {
  if (c.warp < kMultipliers)
    for (int turn = 0; turn < kDepth; ++turn) Load(c, g, turn);
}

// Brings the block's first units into L2; by one warp.
__device__ __forceinline__ void Prefetch(const Context& c, const Gemm& g) {
  const int unit = g.Begin() + c.lane;
  if (c.warp == kWarps - 1 && c.lane < kPrefetched && unit < g.End())
    ptx::CpAsyncBulkPrefetchL2(g.WeightsOf(unit), uint32_t(kTile) * g.ChunkK() * 2);
}

// Sums of one unit. By a warp that multiplies.
__device__ __forceinline__ void MultiplyUnit(const Context& c, const Gemm& g, int turn) {
  const int steps = g.ChunkK() / int(kRanges) / 16;
  float (*sums)[kPartialFloats] = c.shared.sums[turn % 2];
  const uint4* weights = c.shared.ring[turn % kDepth][c.warp] + c.lane;
  float d[2][4] = {};
  ptx::CpAsyncWait<kDepth - 1>();
#pragma unroll
  for (int j = 0; j < kMaxSteps; ++j) {
    if (j >= steps) break;
    const uint4 w = weights[j * 32], b = c.shared.input[c.warp][j][c.lane];
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
    ptx::MmaM16N8K16Bf16(d[0], a, b.x, b.y);
    ptx::MmaM16N8K16Bf16(d[1], a, b.z, b.w);
  }
  StoreSums(sums[c.warp], d, c.lane);
  Load(c, g, turn + kDepth);
  ptx::BarSync(1, 32 * kMultipliers);  // by the next one but one these sums have been read
  const int i = int(threadIdx.x);
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kRanges; ++r) sum += sums[r][i / 16 * kPartialStride + i % 16];
  g.SumsOf(g.Begin() + turn)[i] = sum;
}

// All units of this block, after the barrier at hand; started before. By all threads.
__device__ __noinline__ void Multiply(Context& c, const Gemm& given, const Input& in) {
  const Gemm g = given;
  const int begin = g.Begin(), end = g.End();
  c.barrier.Wait();
  for (int unit = begin; unit < end;) {
    const int chunk = g.ChunkOf(unit), last = Min(end, (chunk + 1) * g.slices * g.tiles);
    __syncthreads();
    LoadInput(c, in, g.k, chunk);
    __syncthreads();
    if (c.warp < kMultipliers)
#pragma unroll 1
      for (int u = unit; u < last; ++u) MultiplyUnit(c, g, u - begin);
    unit = last;
  }
}

}  // namespace musejax::draft

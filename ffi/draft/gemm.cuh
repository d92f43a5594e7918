// A GEMM over 16 rows: units of 16 output columns (a row tile of the weight) times one chunk of K, numbered chunk by
// chunk, of which a block runs a part of one, two at a time by 8 warps each, a warp for each range of the chunk.
// Sums of ranges are added ascending here, and those of chunks by whoever reads the result (Finished). So an element
// has the bits of one sum over K in a fixed order, whoever ran which unit.
//
// Weights pass a ring in shared memory, of which each thread fills and reads its own 16-byte places. The first units
// are asked for (Start) before the barrier at which the input becomes whole, for weights depend on nothing; and those
// of GEMMs to come are brought into L2 while nobody multiplies (Prefetch).
#pragma once

#include "draft/context.cuh"

namespace musejax::draft {

inline constexpr int kTeams = kWarps / int(kRanges);  // units that are multiplied at a time
inline constexpr int kDepth = 2;                      // units of a team in the ring
inline constexpr int kMaxSteps = int(kChunk / kRanges / 16);
inline constexpr int kDenseGemms = 6;  // of a layer
inline constexpr int kPrefetched = 8;  // units of a block that Prefetch asks for, at most

// A chunk of the input as operands of MMAs: [range][step][lane] of four registers, rows 0 to 7 (two), rows 8 to 15.
using Operands = uint4[kRanges][kMaxSteps][32];

struct Gemm {
  const uint8_t* weights;  // the section in the first slice here
  int64_t slice_bytes;
  int k, chunk_k, chunks, slices;
  int first, tiles, all;  // row tiles of a slice: the first one, how many, and how many a chunk of the section has
  int begin, end;         // units of this block
  float* partial;         // [slice][tile][chunk][row][16]

  __device__ Gemm(const uint8_t* weights, int64_t slice_bytes, int64_t k, int64_t all_rows, int64_t first_row,
                  int64_t rows, int slices, float* partial)
      : weights(weights),
        slice_bytes(slice_bytes),
        k(int(k)),
        chunk_k(int(Chunk(k))),
        chunks(int(uint32_t(k) / uint32_t(chunk_k))),
        slices(slices),
        first(int(first_row / kTile)),
        tiles(CeilDiv(rows, kTile)),
        all(CeilDiv(all_rows, kTile)),
        partial(partial) {
    // Blocks are dealt out to chunks, so that each makes its input of one; if they are fewer, of several whole ones.
    const uint32_t each = uint32_t(slices) * tiles, blocks = gridDim.x, block = blockIdx.x, n = uint32_t(chunks);
    if (n <= blocks) {
      const uint32_t chunk = block * n / blocks, first_block = (chunk * blocks + n - 1) / n;
      const uint32_t of_chunk = ((chunk + 1) * blocks + n - 1) / n - first_block, i = block - first_block;
      begin = int(chunk * each + each * i / of_chunk), end = int(chunk * each + each * (i + 1) / of_chunk);
    } else {
      begin = int(block * n / blocks * each), end = int((block + 1) * n / blocks * each);
    }
  }
  __device__ __forceinline__ int Steps() const { return chunk_k / (int(kRanges) * 16); }
  __device__ __forceinline__ int TileBytes() const { return int(kTile) * chunk_k * 2; }
  // Where sums of another GEMM may begin.
  __device__ float* Behind() const { return partial + int64_t(slices) * tiles * chunks * (kRows * 16); }

  // Where the sums of columns `column` and the next (column even) of a slice and row are, of the first chunk.
  __device__ __forceinline__ const float* At(int slice, int column, int row) const {
    return partial + ((int64_t(slice) * tiles + column / 16) * chunks * kRows + row) * 16 + column % 16;
  }
  // Chunks added, for kCount of such places at once: what is asked for together comes at one time.
  template <int kCount, typename Place>
  __device__ __forceinline__ void Finished(const Place& place, Two (&out)[kCount]) const {
    constexpr int kAtOnce = 8;  // chunks
    const float* sums[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = place(i), out[i] = {0.0f, 0.0f};
    for (int begin = 0; begin < chunks; begin += kAtOnce) {
      float2 x[kAtOnce][kCount] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          if (begin + j < chunks) x[j][i] = *reinterpret_cast<const float2*>(sums[i] + (begin + j) * kRows * 16);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int i = 0; i < kCount; ++i) out[i].a += x[j][i].x, out[i].b += x[j][i].y;
    }
  }
  __device__ __forceinline__ Two Finished(int slice, int column, int row) const {
    Two out[1];
    Finished([&](int) { return At(slice, column, row); }, out);
    return out[0];
  }
};

// What a GEMM multiplies, made on the way into shared memory: bf16 rows, or float32 ones rounded; normed where `gamma`
// is not null; then, too, through side 0 of a convolution where `base` is not null.
struct Input {
  const uint16_t* rows;  // [part][kRows][width]
  int width;
  const float* floats = nullptr;   // instead of rows: [count][k]
  const float* squares = nullptr;  // f32 [row][8][leaves], of rows
  const float* gamma = nullptr;
  const float* base = nullptr;  // [tap][hidden]
  int count;                    // rows; the others are zeros
};

struct Shared {
  uint4 ring[kDepth][kWarps][kMaxSteps * 32];
  union {
    Operands input;
    alignas(16) uint8_t any[40960];  // of phases between GEMMs
  };
  float sums[kTeams][2][kRanges][kPartialFloats];
  float rstd[kRows];
  comm::Where where;
  alignas(8) uint8_t context[sizeof(Context)];
  alignas(8) uint8_t gemm[sizeof(Gemm)], input_of[sizeof(Input)];  // at hand
  alignas(8) uint8_t gemms[2][kDenseGemms + 2][sizeof(Gemm)];      // of even and odd layers; then the head's
};
// Found anew at each use, so that the compiler sees which memory it is.
__device__ __forceinline__ Shared& OfBlock() { return *reinterpret_cast<Shared*>(ptx::DynamicShared()); }
__device__ __forceinline__ Context& TheContext() { return *reinterpret_cast<Context*>(OfBlock().context); }
// The GEMM at hand: the one multiplied last.
__device__ __forceinline__ Gemm& TheGemm() { return *reinterpret_cast<Gemm*>(OfBlock().gemm); }
__device__ __forceinline__ Input& TheInput() { return *reinterpret_cast<Input*>(OfBlock().input_of); }

// 1 / rms of every row, into shared memory; a warp has a row. Needs a block barrier after it.
__device__ __forceinline__ void NormRows(const Context& c, const float* squares) {
  constexpr int kAtOnce = 16;
  const int leaves = LeavesOf(c.p.model);
  const float* of = squares + (Warp() * int(kSlices) + Lane() % int(kSlices)) * leaves;
  float slice = 0.0f, total = 0.0f;
  for (int begin = 0; begin < leaves; begin += kAtOnce) {
    float leaf[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) leaf[i] = begin + i < leaves ? of[begin + i] : 0.0f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) slice += leaf[i];
  }
  for (int s = 0; s < int(kSlices); ++s) total += __shfl_sync(kAllLanes, slice, s);
  if (Lane() == 0) OfBlock().rstd[Warp()] = Rstd(total, int(c.p.model.shape.hidden), c.p.model.eps);
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
// Where the coefficients of a column's group in a slice are in every row, for side `side`.
struct Deltas {
  const float* first;  // of row 0
  int groups, stride;
  __device__ __forceinline__ Deltas(const Context& c, int side, int slice, int column) {
    const DraftShape& s = c.p.model.shape;
    groups = int(s.groups_slice()), stride = int(s.delta_rows());
    first = c.Frame<const float>(c.p.at.delta) + slice * kRows * stride + side * 2 * groups +
            column / (int(s.hidden_slice()) / groups);
  }
  __device__ __forceinline__ float Own(int row) const { return first[row * stride]; }
  __device__ __forceinline__ float Before(int row) const { return first[row * stride + groups]; }
};
// Two columns of a group through a convolution; before: those of the row before, zeros for the first.
__device__ __forceinline__ Two Convolved(const Taps& base, float delta_own, float delta_before, Two own, Two before) {
  return Rounded({(base.own.a + delta_own) * own.a + (base.before.a + delta_before) * before.a,
                  (base.own.b + delta_own) * own.b + (base.before.b + delta_before) * before.b});
}

// Chunk `chunk` of the input, columns 2i and 2i + 1 by thread i. By all threads, between block barriers. What comes
// from far away is asked for first, all of it and without conditions; rows that are not there are taken out at the end.
__device__ __forceinline__ void LoadInput(const Context& c, const Gemm& g, int chunk) {
  const Input in = TheInput();
  const int chunk_k = g.chunk_k, column = 2 * int(threadIdx.x), at = chunk * chunk_k + column;
  const bool mine = column < chunk_k, convolved = in.base != nullptr;
  uint32_t x[kRows];
  float own[kRows], before[kRows];
  Two gain{1.0f, 1.0f};
  Taps base{};
  if (mine && in.floats) {
    const float* from = in.floats + at;
    const int64_t k = g.k;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float2 v = *reinterpret_cast<const float2*>(from + Max(Min(row, in.count - 1), 0) * k);
      x[row] = PackBf16(v.x, v.y);
    }
  } else if (mine) {
    const int part = at / in.width, within = at - part * in.width, stride = in.width / 2;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(in.rows + int64_t(part) * kRows * in.width + within);
#pragma unroll
    for (int row = 0; row < kRows; ++row) x[row] = from[row * stride];
    if (convolved) {
      const Deltas deltas(c, 0, part, within);
#pragma unroll
      for (int row = 0; row < kRows; ++row) own[row] = deltas.Own(row), before[row] = deltas.Before(row);
      base = TapsOf(c.p.model.shape, in.base, at);
    }
    if (in.gamma) gain = {in.gamma[at], in.gamma[at + 1]};
  }
  if (in.gamma) NormRows(c, in.squares);
  __syncthreads();
  if (!mine) return;
  const int range_k = chunk_k / int(kRanges), range = column / range_k, step = column % range_k / 16, kk = column % 16;
  uint32_t* registers = reinterpret_cast<uint32_t*>(&OfBlock().input[range][step][kk % 8 / 2]) + kk / 8;
  Two last{0.0f, 0.0f};
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    uint32_t out = x[row];
    if (in.gamma) {
      Two v = Unpack(out);
      const float rstd = OfBlock().rstd[row];
      v = Rounded({v.a * rstd * gain.a, v.b * rstd * gain.b});
      if (convolved) {
        const Two plain = v;
        v = Convolved(base, own[row], before[row], plain, last);
        last = plain;
      }
      out = PackBf16(v.a, v.b);
    }
    registers[row % 8 * 16 + row / 8 * 2] = row < in.count ? out : 0;
  }
}

__device__ __forceinline__ int Team() { return Warp() / int(kRanges); }

// A unit of a GEMM, known by its parts: a division would take longer than its product.
struct Unit {
  int number, chunk, slice, tile;
  __device__ __forceinline__ Unit(const Gemm& g, int number) : number(number), chunk(number / (g.slices * g.tiles)) {
    const int at = number - chunk * g.slices * g.tiles;
    slice = at / g.tiles, tile = at - slice * g.tiles;
  }
  __device__ __forceinline__ const uint8_t* Weights(const Gemm& g) const {
    return g.weights + slice * g.slice_bytes + (int64_t(chunk) * g.all + g.first + tile) * g.TileBytes();
  }
  __device__ __forceinline__ void Advance(const Gemm& g, int by) {
    number += by, tile += by;
    while (tile >= g.tiles) {
      tile -= g.tiles;
      if (++slice == g.slices) slice = 0, ++chunk;
    }
  }
};

// Asks for this thread's part of a unit, for place `place` of the ring; a group of copies, even if there is none.
__device__ __forceinline__ void Load(const Gemm& g, const Unit& unit, int place) {
  const int steps = g.Steps();
  if (unit.number < g.end) {
    const uint8_t* tile = unit.Weights(g);
    const uint4* from = reinterpret_cast<const uint4*>(tile) + Warp() % int(kRanges) * steps * 32 + Lane();
    uint4* to = OfBlock().ring[place][Warp()] + Lane();
#pragma unroll
    for (int j = 0; j < kMaxSteps; ++j)
      if (j < steps) ptx::CpAsync16(to + j * 32, from + j * 32);
  }
  ptx::CpAsyncCommit();
}

// Asks for the first units of a GEMM, which is the next one to be multiplied. given: in shared memory.
__device__ __noinline__ void Start(const Gemm* given) {
  const Gemm g = *given;
  Unit unit(g, g.begin + Team());
  for (int place = 0; place < kDepth; ++place, unit.Advance(g, kTeams)) Load(g, unit, place);
}

// Brings the block's first units into L2; by one warp.
__device__ __noinline__ void Prefetch(const Gemm* given) {
  const Gemm& g = *given;
  if (Warp() != kWarps - 1 || Lane() >= Min(kPrefetched, g.end - g.begin)) return;
  const Unit unit(g, g.begin + Lane());
  ptx::CpAsyncBulkPrefetchL2(unit.Weights(g), uint32_t(g.TileBytes()));
}

// Sums of a team's unit of the chunk at hand.
__device__ __forceinline__ void MultiplyUnit(const Gemm& g, int turn) {
  const int steps = g.Steps(), range = Warp() % int(kRanges);
  float (*sums)[kPartialFloats] = OfBlock().sums[Team()][turn % 2];
  const uint4* weights = OfBlock().ring[turn % kDepth][Warp()] + Lane();
  float d[2][4] = {};
#pragma unroll
  for (int j = 0; j < kMaxSteps; ++j) {
    if (j >= steps) break;
    const uint4 w = weights[j * 32], b = OfBlock().input[range][j][Lane()];
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
    ptx::MmaM16N8K16Bf16(d[0], a, b.x, b.y);
    ptx::MmaM16N8K16Bf16(d[1], a, b.z, b.w);
  }
  StoreSums(sums[range], d, Lane());
}
// Adds the ranges' sums. By the next turn but one these have been read.
__device__ __forceinline__ void AddRanges(const Gemm& g, const Unit& unit, int turn) {
  float (*sums)[kPartialFloats] = OfBlock().sums[Team()][turn % 2];
  const int i = int(threadIdx.x) % (32 * int(kRanges));
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < kRanges; ++r) sum += sums[r][i / 16 * kPartialStride + i % 16];
  const int64_t at = int64_t(unit.slice * g.tiles + unit.tile) * g.chunks + unit.chunk;
  g.partial[at * (kRows * 16) + i] = sum;
}

__device__ __noinline__ void MultiplyUnits() {
  __syncthreads();
  Unit mine(TheGemm(), TheGemm().begin + Team()), ahead = mine;
  ahead.Advance(TheGemm(), kDepth * kTeams);
  int turn = 0;
  for (int first = TheGemm().begin, chunk = Unit(TheGemm(), first).chunk; first < TheGemm().end; ++chunk) {
    __syncthreads();
    LoadInput(TheContext(), TheGemm(), chunk);
    __syncthreads();
    const Gemm g = TheGemm();  // not before: registers are what LoadInput needs
    first = Min(g.end, (chunk + 1) * g.slices * g.tiles);
#pragma unroll 1
    for (; mine.number < first; mine.Advance(g, kTeams), ahead.Advance(g, kTeams), ++turn) {
      ptx::CpAsyncWait<kDepth - 1>();
      MultiplyUnit(g, turn);
      Load(g, ahead, turn % kDepth);
      ptx::BarSync(1 + Team(), 32 * kRanges);
      AddRanges(g, mine, turn);
    }
  }
}

// All units of this block, which were started before; the input is whole. By all threads, after a block barrier.
__device__ __forceinline__ void Multiply(const Gemm& g, const Input& in) {
  if (threadIdx.x == 0) TheGemm() = g, TheInput() = in;
  MultiplyUnits();
}

}  // namespace musejax::draft

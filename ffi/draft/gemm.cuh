// A GEMM over 16 rows: units of 16 output columns (a row tile of the weight) times one chunk of K, numbered chunk by
// chunk, of which a block runs a contiguous part; two at a time, 8 warps each, a warp for each range of the chunk.
// Sums of ranges are added ascending here, and those of chunks by whoever reads the result (Finished), so an element
// has the bits of one sum over K in a fixed order, whoever ran which unit.
//
// Weights go from memory to registers, each read once, two units ahead; those of the first units before the barrier at
// which the input becomes whole, for weights depend on nothing.
#pragma once

#include "draft/context.cuh"

namespace musejax::draft {

inline constexpr int kPairs = kWarps / int(kRanges);  // units at a time
inline constexpr int kMaxSteps = int(kChunk / kRanges / 16);

// A chunk of the input as operands of MMAs: [range][step][lane] of four registers, rows 0 to 7 (two), rows 8 to 15.
using Operands = uint4[kRanges][kMaxSteps][32];

struct Shared {
  union {
    Operands input[2];  // of even and odd chunks
    uint8_t any[sizeof(Operands) * 2];
  };
  float sums[kPairs][2][kRanges][kPartialFloats];
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
  __device__ int ChunkOf(int unit) const { return unit / (slices * tiles); }
  __device__ const uint8_t* WeightsOf(int unit) const {
    const int at = unit % (slices * tiles), slice = at / tiles, tile = first + at % tiles;
    return weights + slice * slice_bytes + (int64_t(ChunkOf(unit)) * all + tile) * kTile * ChunkK() * 2;
  }
  __device__ float* SumsOf(int unit) const {
    return partial + (int64_t(unit % (slices * tiles)) * Chunks() + ChunkOf(unit)) * (kRows * 16);
  }
  // Behind the sums of this one.
  __device__ float* End() const { return partial + int64_t(slices) * tiles * Chunks() * (kRows * 16); }

  // Columns `column` and the next (column even) of a slice, all chunks added.
  __device__ Two Finished(int slice, int column, int row) const {
    const float* sums = partial + ((int64_t(slice) * tiles + column / 16) * Chunks() * kRows + row) * 16 + column % 16;
    Two out{0.0f, 0.0f};
#pragma unroll 8
    for (int chunk = 0; chunk < Chunks(); ++chunk) {
      const float2 x = *reinterpret_cast<const float2*>(sums + chunk * (kRows * 16));
      out.a += x.x, out.b += x.y;
    }
    return out;
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

// 1 / rms of every row, into shared memory; ends with a block barrier.
__device__ inline void NormRows(const Context& c, const float* squares) {
  const int leaves = LeavesOf(c.p.model);
  float slice = 0.0f, total = 0.0f;
  for (int i = 0; i < leaves; ++i) slice += squares[(c.warp * int(kSlices) + c.lane % int(kSlices)) * leaves + i];
  for (int s = 0; s < int(kSlices); ++s) total += __shfl_sync(kAllLanes, slice, s);
  if (c.lane == 0) c.shared.rstd[c.warp] = Rstd(total, int(c.p.model.shape.hidden), c.p.model.eps);
  __syncthreads();
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
// Two columns, `column` of a slice and the next, through side `side`; before: those of the row before, zeros for the
// first. A group's coefficients are its base kernels plus its delta.
__device__ __forceinline__ Two Convolved(const Context& c, const Taps& taps, int side, int slice, int column, int row,
                                         Two own, Two before) {
  const DraftShape& s = c.p.model.shape;
  const int groups = int(s.groups_slice()), size = int(s.hidden_slice()) / groups;
  const float* delta = c.Frame<const float>(c.p.at.delta) + (slice * kRows + row) * s.delta_rows() + side * 2 * groups;
  const int a = column / size, b = (column + 1) / size;
  return Rounded({(taps.own.a + delta[a]) * own.a + (taps.before.a + delta[groups + a]) * before.a,
                  (taps.own.b + delta[b]) * own.b + (taps.before.b + delta[groups + b]) * before.b});
}

// Chunk `chunk` of the input, columns 2i and 2i + 1 by thread i. By all threads; needs a block barrier after it.
__device__ __noinline__ void LoadInput(const Context& c, const Input& in, int k, int chunk, Operands& to) {
  const int chunk_k = int(Chunk(k)), column = 2 * int(threadIdx.x), at = chunk * chunk_k + column;
  if (column >= chunk_k) return;
  const int range_k = chunk_k / int(kRanges), range = column / range_k, step = column % range_k / 16, kk = column % 16;
  uint32_t* registers = reinterpret_cast<uint32_t*>(&to[range][step][kk % 8 / 2]) + kk / 8;
  const int part = in.floats ? 0 : at / in.width, within = in.floats ? at : at % in.width;
  const Two gain = in.gamma ? Two{in.gamma[at], in.gamma[at + 1]} : Two{1.0f, 1.0f};
  const Taps taps = in.base ? TapsOf(c.p.model.shape, in.base, at) : Taps{};
  Two before{0.0f, 0.0f};
#pragma unroll 4
  for (int row = 0; row < kRows; ++row) {
    Two v{0.0f, 0.0f};
    if (row < in.count) {
      if (in.floats) {
        const float2 x = *reinterpret_cast<const float2*>(in.floats + int64_t(row) * k + at);
        v = Rounded({x.x, x.y});
      } else {
        v = Unpack(*reinterpret_cast<const uint32_t*>(in.rows + (int64_t(part) * kRows + row) * in.width + within));
      }
      if (in.gamma) {
        const float rstd = c.shared.rstd[row];
        v = Rounded({v.a * rstd * gain.a, v.b * rstd * gain.b});
      }
      if (in.base) {
        const Two own = v;
        v = Convolved(c, taps, 0, part, within, row, own, before);
        before = own;
      }
    }
    registers[row % 8 * 16 + row / 8 * 2] = PackBf16(v.a, v.b);
  }
}

// All units of this block, after the barrier at hand. By all threads.
__device__ __noinline__ void Multiply(Context& c, const Gemm& g, const Input& in) {
  const int begin = int(int64_t(g.Units()) * blockIdx.x / gridDim.x);
  const int end = int(int64_t(g.Units()) * (blockIdx.x + 1) / gridDim.x);
  const int pair = c.warp / int(kRanges), range = c.warp % int(kRanges);
  const int steps = g.ChunkK() / int(kRanges) / 16, turns = CeilDiv(end - begin, kPairs);
  uint4 w[2][kMaxSteps];
  const auto load = [&](int turn, uint4 (&to)[kMaxSteps]) {
    const int unit = begin + turn * kPairs + pair;
    if (unit >= end) return;
    const uint4* from = reinterpret_cast<const uint4*>(g.WeightsOf(unit)) + range * steps * 32 + c.lane;
#pragma unroll
    for (int j = 0; j < kMaxSteps; ++j)
      if (j < steps) to[j] = ptx::LdNcNoAllocate(from + j * 32);
  };
  load(0, w[0]), load(1, w[1]);
  c.barrier.Wait();
  if (begin == end) return;
  if (in.gamma) NormRows(c, in.squares);
  int there = g.ChunkOf(begin) - 1;  // the last chunk of the input in shared memory
  const auto run = [&](int turn, uint4 (&weights)[kMaxSteps]) {
    const int first = begin + turn * kPairs, last = (first + kPairs < end ? first + kPairs : end) - 1;
    for (; there < g.ChunkOf(last); __syncthreads()) {
      __syncthreads();
      ++there;
      LoadInput(c, in, g.k, there, c.shared.input[there % 2]);
    }
    const int unit = first + pair;
    float (*sums)[kPartialFloats] = c.shared.sums[pair][turn % 2];
    if (unit < end) {
      const auto& rows = c.shared.input[g.ChunkOf(unit) % 2][range];
      float d[2][4] = {};
#pragma unroll
      for (int j = 0; j < kMaxSteps; ++j) {
        if (j >= steps) break;
        const uint32_t a[4] = {weights[j].x, weights[j].y, weights[j].z, weights[j].w};
        const uint4 b = rows[j][c.lane];
        ptx::MmaM16N8K16Bf16(d[0], a, b.x, b.y);
        ptx::MmaM16N8K16Bf16(d[1], a, b.z, b.w);
      }
      StoreSums(sums[range], d, c.lane);
    }
    load(turn + 2, weights);
    ptx::BarSync(1 + pair, 32 * kRanges);  // by the next one but one these sums have been read
    if (unit < end) {
      const int i = int(threadIdx.x) % (32 * int(kRanges));
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < kRanges; ++r) sum += sums[r][i / 16 * kPartialStride + i % 16];
      g.SumsOf(unit)[i] = sum;
    }
  };
#pragma unroll 1
  for (int turn = 0; turn < turns; turn += 2) {
    run(turn, w[0]);
    if (turn + 1 < turns) run(turn + 1, w[1]);
  }
}

}  // namespace musejax::draft

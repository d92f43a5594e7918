// Row tasks of a drafter, between its GEMMs: a warp has a row of a leaf (64 columns of a slice, or what is left of it)
// or of a head. Rounding points are DRAFT_POINTS of musejax/speculation/draft.py, as in cpu/draft.h.
#pragma once

#include "draft/gemm.cuh"

namespace musejax::draft {

// This lane's columns of a block of `width`: whether there are any.
__device__ __forceinline__ bool Has(int width) { return 2 * Lane() < width; }

struct RowOf {
  int slice, row, leaf, column, width;  // column: of the leaf's first, in the slice
};
// task(RowOf) for all leaves of `width` columns of the slices here, in `rows` rows.
template <typename Task>
__device__ __forceinline__ void ForLeaves(const Context& c, int64_t width, int rows, const Task& task) {
  const int leaves = CeilDiv(width, kLeaf);
  c.ForTasks(c.p.slices * leaves * rows, [&](int i) {
    const int leaf = i / rows % leaves, column = leaf * int(kLeaf), left = int(width) - column;
    task(RowOf{i / rows / leaves, i % rows, leaf, column, left < int(kLeaf) ? left : int(kLeaf)});
  });
}

// A leaf of the stream or of the context, with its sum of squares, to all ranks. v: bf16 values, zeros beyond the leaf.
__device__ __forceinline__ void SendRow(const Context& c, int64_t rows, int64_t squares, const RowOf& at, Two v) {
  const int64_t n = c.p.model.shape.hidden_slice();
  const float leaf = LeafSquares<64>(v);
  c.ForRanks(at.slice, [&](uint8_t* frames, int to) {
    uint16_t* row = reinterpret_cast<uint16_t*>(frames + rows) + (int64_t(to) * kRows + at.row) * n + at.column;
    if (Has(at.width)) reinterpret_cast<uint32_t*>(row)[Lane()] = PackBf16(v.a, v.b);
    float* sums = reinterpret_cast<float*>(frames + squares);
    if (Lane() == 0) sums[(at.row * int(kSlices) + to) * LeavesOf(c.p.model) + at.leaf] = leaf;
  });
}

// x = r(embedding * scale).
__device__ __noinline__ void Embed(const uint16_t* embedded) {
  const Context& c = TheContext();
  const int64_t n = c.p.model.shape.hidden_slice();
  const float scale = c.p.model.embedding_scale;
  ForLeaves(c, n, c.p.rows, [&](const RowOf& at) {
    const uint16_t* from = embedded + (int64_t(at.slice) * c.p.rows + at.row) * n + at.column;
    Two v{0.0f, 0.0f};
    if (Has(at.width)) v = Unpack(reinterpret_cast<const uint32_t*>(from)[Lane()]);
    SendRow(c, c.p.at.x, c.p.at.squares, at, Rounded({v.a * scale, v.b * scale}));
  });
}

// Context before its norm: r(sums), of `count` rows.
__device__ __noinline__ void FinishContext(int count) {
  const Context& c = TheContext();
  const Gemm g = TheGemm();
  ForLeaves(c, c.p.model.shape.hidden_slice(), count, [&](const RowOf& at) {
    Two v{0.0f, 0.0f};
    if (Has(at.width)) v = Rounded(g.Finished(at.slice, at.column + 2 * Lane(), at.row));
    SendRow(c, c.p.at.ctx, c.p.at.ctx_squares, at, v);
  });
}

// Float32 results [8][row][width] as they are, to all ranks: coefficients of convolutions, the selector's gate.
__device__ __noinline__ void FinishFloats(int64_t width, int first_row, int64_t frame) {
  const Context& c = TheContext();
  const Gemm g = TheGemm();
  ForLeaves(c, width, c.p.rows - first_row, [&](const RowOf& at) {
    if (!Has(at.width)) return;
    const Two v = g.Finished(at.slice, at.column + 2 * Lane(), at.row + first_row);
    c.ForRanks(at.slice, [&](uint8_t* frames, int to) {
      float* row = reinterpret_cast<float*>(frames + frame) + (int64_t(to) * kRows + at.row) * width + at.column;
      reinterpret_cast<float2*>(row)[Lane()] = {v.a, v.b};
    });
  });
}

// The end of a sublayer: y = r(sums), side 1 of the convolution where `base` is not null, x = r(x + it).
__device__ __noinline__ void FinishBranch(const float* base) {
  const Context& c = TheContext();
  const Gemm g = TheGemm();
  const DraftShape& s = c.p.model.shape;
  const int64_t n = s.hidden_slice();
  ForLeaves(c, n, c.p.rows, [&](const RowOf& at) {
    Two v{0.0f, 0.0f};
    if (Has(at.width)) {
      const int column = at.column + 2 * Lane(), slice = c.p.rank * c.p.slices + at.slice;
      const uint16_t* x = c.Frame<const uint16_t>(c.p.at.x) + (int64_t(slice) * kRows + at.row) * n + column;
      const Two stream = Unpack(*reinterpret_cast<const uint32_t*>(x));
      Two y;
      if (base) {
        const Taps taps = TapsOf(s, base + kConvTaps * s.hidden, int(slice * n) + column);
        const Deltas deltas(c, 1, slice, column);
        const float own = deltas.Own(at.row), before = deltas.Before(at.row);
        Two rows[2];  // this one and the one before
        g.Finished([&](int i) { return g.At(at.slice, column, Max(at.row - i, 0)); }, rows);
        y = Convolved(taps, own, before, Rounded(rows[0]), at.row ? Rounded(rows[1]) : Two{0.0f, 0.0f});
      } else {
        y = Rounded(g.Finished(at.slice, column, at.row));
      }
      v = Rounded({stream.a + y.a, stream.b + y.b});
    }
    SendRow(c, c.p.at.x, c.p.at.squares, at, v);
  });
}

// act = r(silu(gate) up), to all ranks. Tiles hold 8 gate columns, then the 8 of up.
__device__ __noinline__ void FinishUp() {
  const Context& c = TheContext();
  const Gemm g = TheGemm();
  const int64_t n = c.p.model.shape.inner_slice();
  ForLeaves(c, n, c.p.rows, [&](const RowOf& at) {
    if (!Has(at.width)) return;
    const int column = at.column + 2 * Lane(), packed = column / 8 * 16 + column % 8;
    Two x[2];  // gate, up
    g.Finished([&](int i) { return g.At(at.slice, packed + 8 * i, at.row); }, x);
    const uint32_t act = PackBf16(Silu(x[0].a) * x[1].a, Silu(x[0].b) * x[1].b);
    c.ForRanks(at.slice, [&](uint8_t* frames, int to) {
      uint16_t* row = reinterpret_cast<uint16_t*>(frames + c.p.at.act) + (int64_t(to) * kRows + at.row) * n + column;
      *reinterpret_cast<uint32_t*>(row) = act;
    });
  });
}

// A head's row: two columns a lane, and where it is wider than 64 columns the two that lie 64 behind them.
struct HeadRow {
  Two low, high;
};

__device__ __forceinline__ HeadRow FinishedHead(const Context& c, const Gemm& g, int slice, int column, int row) {
  const int width = int(c.p.model.shape.head_dim);
  Two x[2] = {};  // the lower 64 columns, the others
  if (width > 64)
    g.Finished([&](int i) { return g.At(slice, column + 64 * i + 2 * Lane(), row); }, x);
  else if (Has(width))
    x[0] = g.Finished(slice, column + 2 * Lane(), row);
  return {x[0], x[1]};
}

// r(rotated(rms(x) gamma)); pairs (i, i + c/2).
__device__ __forceinline__ HeadRow Turned(const Context& c, HeadRow x, const float* gamma, int row) {
  const int width = int(c.p.model.shape.head_dim), half = width / 2;
  float sum = LeafSquares<64>(x.low);
  if (width > 64) sum += LeafSquares<64>(x.high);
  const float rstd = Rstd(sum, width, c.p.model.eps);
  const auto normed = [&](Two v, int column) {
    return Two{v.a * rstd * gamma[column], v.b * rstd * gamma[column + 1]};
  };
  const float* angles = c.p.cos_sin + row * width;
  const auto turned = [&](Two low, Two high, int column, bool is_low) {
    const float *cosine = angles + column, *sine = angles + half + column;
    if (is_low)
      return Rounded({low.a * cosine[0] - high.a * sine[0], low.b * cosine[1] - high.b * sine[1]});
    return Rounded({high.a * cosine[0] + low.a * sine[0], high.b * cosine[1] + low.b * sine[1]});
  };
  const int column = Has(width) ? 2 * Lane() : 0;
  const Two low = normed(x.low, column);
  if (width > 64) {
    const Two high = normed(x.high, column + 64);
    return {turned(low, high, column, true), turned(low, high, column, false)};
  }
  const Two other = {__shfl_xor_sync(kAllLanes, low.a, width / 4), __shfl_xor_sync(kAllLanes, low.b, width / 4)};
  const bool is_low = column < half;
  return {turned(is_low ? low : other, is_low ? other : low, column % half, is_low), {0.0f, 0.0f}};
}

__device__ __forceinline__ void StoreHead(const Context& c, uint16_t* to, const HeadRow& x) {
  const int width = int(c.p.model.shape.head_dim);
  uint32_t* pairs = reinterpret_cast<uint32_t*>(to);
  if (Has(width)) pairs[Lane()] = PackBf16(x.low.a, x.low.b);
  if (width > 64) pairs[32 + Lane()] = PackBf16(x.high.a, x.high.b);
}

// q, k and v of the heads here.
__device__ __noinline__ void FinishHeads(const float* small) {
  const Context& c = TheContext();
  const Gemm g = TheGemm();
  const DraftShape& s = c.p.model.shape;
  const DraftSmallLayout at(s);
  const int q = int(s.heads_slice()), kv = int(s.kv_slice()), each = q + 2 * kv, width = int(s.head_dim);
  c.ForTasks(c.p.slices * each * c.p.rows, [&](int i) {
    const int row = i % c.p.rows, head = i / c.p.rows % each, slice = i / c.p.rows / each;
    const bool is_q = head < q, is_k = !is_q && head < q + kv;
    HeadRow x = FinishedHead(c, g, slice, head * width, row);
    x = is_q || is_k ? Turned(c, x, small + (is_q ? at.q_norm : at.k_norm), row) : x;
    const int number = is_q ? slice * q + head : slice * kv + head - (is_k ? q : q + kv);
    const int64_t frame = is_q ? c.p.at.q : is_k ? c.p.at.k : c.p.at.v;
    StoreHead(c, c.Frame<uint16_t>(frame) + (int64_t(number) * kRows + row) * width, x);
  });
}

// Keys and values of `count` committed rows of a layer into its rings; a row that a later one overwrites is left out.
__device__ __forceinline__ void FinishKeys(const Gemm& g, int number, int start, int count) {
  const Context& c = TheContext();
  const LayerArrays layer = c.p.layer[number];
  const DraftShape& s = c.p.model.shape;
  const DraftSmallLayout at(s);
  const int kv = int(s.kv_slice()), width = int(s.head_dim);
  c.ForTasks(c.p.slices * 2 * kv * count, [&](int i) {
    const int row = i % count, head = i / count % (2 * kv), slice = i / count / (2 * kv);
    if (row < count - c.p.slots) return;
    HeadRow x = FinishedHead(c, g, slice, head * width, row);
    if (head < kv) x = Turned(c, x, layer.small + at.k_norm, row);
    const int64_t number = slice * kv + head % kv, slot = (start + row) % c.p.slots;
    StoreHead(c, (head < kv ? layer.keys : layer.values) + (number * c.p.slots + slot) * width, x);
  });
}

}  // namespace musejax::draft

// The residual stream and what finishes the dense GEMMs: row tasks between the phases.
//
// S is held in shared memory: SM j owns block j of 64 columns (and j + blocks, ...), one warp a row, always the same.
// Bits: as cpu/norm.cc, cpu/attn_in.cc and cpu/router.cc, operation by operation.
#pragma once

#include "layer/attention.cuh"
#include "layer/dense.cuh"

namespace musejax::layer {

// Of S in one SM: a block of 64 columns; of narrower ones all there are.
template <typename S>
inline constexpr int kResidualFloats = S::kHiddenBlock == 64 ? kRows * 64 : 2048;

// A warp's rows of a block of S, side by side, so that one row's latencies hide the other's: `count` of them, 1 or 2;
// with one the second is the first again. s: where the lane's two columns of S are.
struct ResidualRows {
  int block, count, row[2];
  Two* s[2];
};

// Calls task(rows) for each block of S in this SM.
template <typename S, typename Task>
__device__ __forceinline__ void ForResidual(const Context<S>& c, float* residual, const Task& task) {
  static_assert(kRowWarps <= kRows && kRows <= 2 * kRowWarps, "a warp has one row or two");
  const int first = c.Turn(), count = first + kRowWarps < kRows ? 2 : 1, second = first + (count - 1) * kRowWarps;
  int owned = 0;
  for (int j = c.block; j < S::kHiddenBlocks; j += c.blocks, ++owned) {
    Two* block = reinterpret_cast<Two*>(residual + owned * kRows * S::kHiddenBlock) + c.lane();
    task(ResidualRows{
        j, count, {first, second}, {block + first * S::kHiddenBlock / 2, block + second * S::kHiddenBlock / 2}});
  }
}
template <typename S>
__device__ __forceinline__ Two ColumnsOfS(const Context<S>& c, const Two* s) {
  return c.lane() < S::kHiddenBlock / 2 ? *s : Two{0.0f, 0.0f};
}

// Two columns' parameters, 1 in lanes beyond the block.
template <int kWidth>
__device__ __forceinline__ Two Columns(const float* x, int block, int lane) {
  if (lane >= kWidth / 2) return {1.0f, 1.0f};
  const float2 v = __ldg(reinterpret_cast<const float2*>(x + block * kWidth) + lane);
  return {v.x, v.y};
}
__device__ __forceinline__ Two Centred(Two gamma) { return Rounded({1.0f + gamma.a, 1.0f + gamma.b}); }

template <typename S>
__device__ __noinline__ void LoadStream(const Context<S>&, float* residual) {
  const Context<S>& c = Anew<S>();
  ForResidual(c, residual, [&](const ResidualRows& rows) {
    for (int i = 0; i < rows.count; ++i) {
      if (c.lane() >= S::kHiddenBlock / 2) continue;
      const float* from = c.pass().stream + int64_t(rows.row[i]) * S::kHidden + rows.block * S::kHiddenBlock;
      *rows.s[i] = rows.row[i] < c.pass().rows ? reinterpret_cast<const Two*>(from)[c.lane()] : Two{0.0f, 0.0f};
    }
  });
}

template <typename S>
__device__ __noinline__ void StoreStream(const Context<S>&, float* residual, float* to) {
  const Context<S>& c = Anew<S>();
  ForResidual(c, residual, [&](const ResidualRows& rows) {
    for (int i = 0; i < rows.count; ++i)
      if (c.lane() < S::kHiddenBlock / 2 && rows.row[i] < c.pass().rows)
        reinterpret_cast<Two*>(to + int64_t(rows.row[i]) * S::kHidden + rows.block * S::kHiddenBlock)[c.lane()] =
            *rows.s[i];
  });
}

struct Gate {
  float alpha, beta;
};
__device__ __forceinline__ Gate GateOf(const Model& m, float published) {
  const float u = published / m.gate_temperature;
  const float beta = SigmoidOf(u), square = SigmoidOf(-u) * (1.0f + beta);
  return {sqrtf(square < m.gate_floor ? m.gate_floor : square), beta};
}

// Where the leaves of a warp's two rows are, 2 kEach of them, in a frame of sums of squares.
template <typename S>
struct ResidualLeaves {
  static constexpr int kEach = Leaves<S::kHiddenBlocks>::kEach;
  const uint64_t* mine[2];
  __device__ __forceinline__ ResidualLeaves(const Context<S>& c, int64_t sums, const ResidualRows& rows) {
    const uint64_t* all = reinterpret_cast<const uint64_t*>(c.Frame(sums)) + Leaves<S::kHiddenBlocks>::Mine();
    mine[0] = all + rows.row[0] * S::kHiddenBlocks, mine[1] = all + rows.row[1] * S::kHiddenBlocks;
  }
  __device__ __forceinline__ const uint64_t* At(int i) const { return (i < kEach ? mine[0] : mine[1]) + i % kEach; }
};

// S = alpha S + beta r(n), n the normed branch.
//   branch, sums: frames of the branch's rows and of the sums of squares of branch times gamma (null: of branch).
template <typename S>
__device__ __noinline__ void AddBranch(const Context<S>&, float* residual, const float* gate, const float* gamma,
                                       int64_t branch, int64_t sums) {
  const Context<S>& c = Anew<S>();
  using L = Leaves<S::kHiddenBlocks>;
  constexpr int kWidth = S::kHiddenBlock;
  const Model& m = c.pass().model;
  ForResidual(c, residual, [&](const ResidualRows& rows) {
    const Two g = Columns<kWidth>(gate, rows.block, c.lane());
    const Gate first = GateOf(m, g.a), second = GateOf(m, g.b);
    Two gain{1.0f, 1.0f};
    if (gamma) gain = Centred(Columns<kWidth>(gamma, rows.block, c.lane()));
    const ResidualLeaves<S> leaves(c, sums, rows);
    const Word* record = WordOfLane<kWidth>(RecordAt<kWidth>(c.Frame(branch), rows.block * kRows));
    Word w[2];
    float leaf[2 * L::kEach];
    AwaitOne(c.waiter, c.epoch, leaves.At(2 * L::kEach - 1));
    ReceiveBoth<L::kSideBySide>(
        c.waiter, c.epoch, [&](int i) { return record + (i ? rows.row[1] : rows.row[0]) * 4 * RecordWords(kWidth); }, w,
        [&](int i) { return leaves.At(i); }, leaf);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Two n = Unpack(ColumnsOf<kWidth>(w[i]));
      if (gamma) n = Rounded({n.a * gain.a, n.b * gain.b});
      const float rstd = Rstd(L::Sum(leaf + i * L::kEach), S::kHidden, m.post_eps);
      n = Rounded({n.a * rstd, n.b * rstd});
      const Two s = ColumnsOfS(c, rows.s[i]);
      if (i < rows.count && c.lane() < kWidth / 2)
        *rows.s[i] = {fmaf(first.alpha, s.a, first.beta * n.a), fmaf(second.alpha, s.b, second.beta * n.b)};
    }
  });
}

template <typename S>
__device__ __noinline__ void PublishSquares(const Context<S>&, float* residual, int64_t sums) {
  const Context<S>& c = Anew<S>();
  ForResidual(c, residual, [&](const ResidualRows& rows) {
    uint64_t* to = reinterpret_cast<uint64_t*>(c.Frame(sums)) + rows.block;
    float leaf[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) leaf[i] = LeafSquares<S::kHiddenBlock>(ColumnsOfS(c, rows.s[i]));
    const int row = c.lane() ? rows.row[1] : rows.row[0];
    if (c.lane() < rows.count)
      PublishFloat<Scope::kGpu>(to + row * S::kHiddenBlocks, c.lane() ? leaf[1] : leaf[0], c.epoch);
  });
}

// Where the credits of 32 SMs are, from SM `first` on; the last one's again beyond it.
template <typename S>
__device__ __forceinline__ const Word* CreditOfLane(const Context<S>& c, int first) {
  return reinterpret_cast<const Word*>(c.Frame(Frames<S>::credits)) + Min(first + c.lane(), c.blocks - 1);
}

// x = r(rms(S) r(1 + gamma)), published in frame `to`, when up to 32 SMs that own nothing of S have given their credits.
template <typename S>
__device__ __noinline__ void PublishNormed(const Context<S>&, float* residual, const float* gamma, int64_t sums,
                                           int64_t to) {
  const Context<S>& c = Anew<S>();
  using L = Leaves<S::kHiddenBlocks>;
  constexpr int kWidth = S::kHiddenBlock;
  ForResidual(c, residual, [&](const ResidualRows& rows) {
    const Two gain = Centred(Columns<kWidth>(gamma, rows.block, c.lane()));
    const ResidualLeaves<S> leaves(c, sums, rows);
    const Word* credit = CreditOfLane(c, S::kHiddenBlocks);
    Word credits[1], word[2];
    float leaf[2 * L::kEach];
    AwaitOne(c.waiter, c.epoch, leaves.At(2 * L::kEach - 1));
    ReceiveBoth<L::kSideBySide>(
        c.waiter, c.epoch, [&](int) { return credit; }, credits, [&](int i) { return leaves.At(i); }, leaf);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float rstd = Rstd(L::Sum(leaf + i * L::kEach), S::kHidden, c.pass().model.rms_eps);
      const Two v = ColumnsOfS(c, rows.s[i]);
      word[i] = RecordWord<kWidth>(PackBf16(v.a * rstd * gain.a, v.b * rstd * gain.b), c.epoch);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (i < rows.count)
        PublishRecord<kWidth>(RecordAt<kWidth>(c.Frame(to), rows.block * kRows + rows.row[i]), word[i]);
  });
}

// ---- credits: this SM has ended the epoch before ----

template <typename S>
__device__ __noinline__ void GiveCredit(const Context<S>&) {
  const Context<S>& c = Anew<S>();
  ptx::BarSync(1, 32 * kRowWarps);
  if (c.warp == 1 && c.lane() == 0)
    Publish<Scope::kGpu>(reinterpret_cast<Word*>(c.Frame(Frames<S>::credits)) + c.block, 0, 0, 0, c.epoch);
}
// Those of all SMs; where something of S is owned, those that PublishNormed does not see: it has the others' sums of
// squares, which are sent after their credits, and 32 more.
template <typename S>
__device__ __noinline__ void AwaitCredits(const Context<S>&) {
  const Context<S>& c = Anew<S>();
#pragma unroll 1
  for (int i = c.block < S::kHiddenBlocks ? S::kHiddenBlocks + 32 : 0; i < c.blocks; i += 32) {
    const Word* credit = CreditOfLane(c, i);
    Word w[1];
    Receive<Scope::kGpu>(c.waiter, c.epoch, [&](int) { return credit; }, w);
  }
}

// ---- ends of the dense GEMMs ----

// A branch back to the hidden width, attention's or the experts': rows and sums of squares to all ranks.
//   partial, chunks: the GEMM's partial frame and chunks of K
template <typename S>
__device__ __noinline__ void FinishBranch(const Context<S>&, int64_t partial, int chunks, const float* gamma,
                                          int64_t rows, int64_t sums) {
  const Context<S>& c = Anew<S>();
  constexpr int kWidth = S::kHiddenBlock, kBlocks = S::kHiddenBlocks / int(kSlices);  // of a slice
  c.ForTasks(S::kHiddenBlocksHere * kRows, [&](int task) {
    const int row = task % kRows, at = task / kRows, slice = at / kBlocks, block = at % kBlocks;
    const Word* first =
        reinterpret_cast<const Word*>(c.Frame(partial)) + (at * (kWidth / 16) * chunks * kRows + row) * kPairWords;
    Two gain{1.0f, 1.0f};  // before the wait, for it comes from far away
    if (gamma) gain = Centred(Columns<kWidth>(gamma, c.pass().rank * S::kHiddenBlocksHere + at, c.lane()));
    const Two v = Rounded(FinishColumns<kWidth>(c.waiter, c.epoch, first, chunks));
    const Two n = gamma ? Rounded({v.a * gain.a, v.b * gain.b}) : v;
    const Word word = RecordWord<kWidth>(PackBf16(v.a, v.b), c.epoch);
    const float leaf = LeafSquares<kWidth>(n);
    const uint32_t tag = c.epoch;
    ForRanks<S>(c, slice, [&](uint8_t* frames, int to) {
      const int j = to * kBlocks + block;
      PublishRecord<kWidth>(RecordAt<kWidth>(frames + rows, j * kRows + row), word);
      if (threadIdx.x % 32 == 0)
        PublishFloat<Scope::kSys>(reinterpret_cast<uint64_t*>(frames + sums) + row * S::kHiddenBlocks + j, leaf, tag);
    });
  });
}

template <typename S>
__device__ __noinline__ void FinishPooler(const Context<S>&) {
  const Context<S>& c = Anew<S>();
  constexpr int kWidth = S::kMoeBlock, kBlocks = S::kMoeBlocks / int(kSlices);
  c.ForTasks(S::kMoeBlocksHere * kRows, [&](int task) {
    const int row = task % kRows, slice = task / kRows / kBlocks, block = task / kRows % kBlocks;
    const Two v = Rounded(FinishColumns<S, Dense::kPooler, kWidth>(c, slice, block * kWidth / 16, row));
    const Word word = RecordWord<kWidth>(PackBf16(v.a, v.b), c.epoch);
    const float leaf = LeafSquares<kWidth>(v);
    const uint32_t tag = c.epoch;
    ForRanks<S>(c, slice, [&](uint8_t* frames, int to) {
      const int j = to * kBlocks + block;
      PublishRecord<kWidth>(RecordAt<kWidth>(frames + Frames<S>::p, j * kRows + row), word);
      if (threadIdx.x % 32 == 0)
        PublishFloat<Scope::kSys>(reinterpret_cast<uint64_t*>(frames + Frames<S>::sums_p) + row * S::kMoeBlocks + j,
                                  leaf, tag);
    });
  });
}

// By SMs that have nothing to do with the pooler, for its units come before the router's sums.
template <typename S>
__device__ __noinline__ void FinishRouter(const Context<S>&) {
  const Context<S>& c = Anew<S>();
  using D = DenseOf<S, Dense::kRouter>;
  c.ForTasksOfLast(S::kSlicesHere * D::kTiles * kRows, 8, [&](int task) {
    const int row = task % kRows, slice = task / kRows / D::kTiles, tile = task / kRows % D::kTiles;
    const Two v = FinishColumns<S, Dense::kRouter, 16>(c, slice, tile, row);
    const float score[2] = {SigmoidOf(v.a * c.pass().model.output_multiplier),
                            SigmoidOf(v.b * c.pass().model.output_multiplier)};
    const uint32_t tag = c.epoch;
    ForRanks<S>(c, slice, [&](uint8_t* frames, int to) {
      uint64_t* scores = reinterpret_cast<uint64_t*>(frames + Frames<S>::scores) + row * S::kExperts;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = tile * 16 + 2 * c.lane() + i;
        if (c.lane() < 8 && column < D::kColumns)
          PublishFloat<Scope::kSys>(scores + to * D::kColumns + column, score[i], tag);
      }
    });
  }, 1);
}

// Cosines and sines of a row's columns, two a lane; none for a layer without rotation and for padding.
struct Angles {
  bool there;
  float2 cosine, sine;
};
template <typename S>
__device__ __forceinline__ Angles AnglesOf(const Context<S>& c, int row) {
  const float* angles = c.arrays().cos_sin;
  if (!angles || row >= c.pass().rows) return {false, {}, {}};
  return {true, __ldg(reinterpret_cast<const float2*>(angles + row * 64) + c.lane() % 16),
          __ldg(reinterpret_cast<const float2*>(angles + row * 64 + 32) + c.lane() % 16)};
}

// r(rms(x)), then rotated: pairs (i, i + 32).
template <typename S>
__device__ __forceinline__ Two NormAndRotate(const Context<S>& c, Two x, const Angles& at) {
  const float rstd = Rstd(LeafSquares<64>(x), 64, c.pass().model.rms_eps);
  const Two y = Rounded({x.a * rstd, x.b * rstd});
  const Two other = {__shfl_xor_sync(kAllLanes, y.a, 16), __shfl_xor_sync(kAllLanes, y.b, 16)};
  if (!at.there) return y;
  if (c.lane() < 16)
    return {fmaf(y.a, at.cosine.x, -(other.a * at.sine.x)), fmaf(y.b, at.cosine.y, -(other.b * at.sine.y))};
  return {fmaf(y.a, at.cosine.x, other.a * at.sine.x), fmaf(y.b, at.cosine.y, other.b * at.sine.y)};
}

// Heads of the layer at hand: q, k, v and gate, for its attention; and in global memory if that is another launch's.
template <typename S>
__device__ __noinline__ void FinishHeads(const Context<S>&, bool leave) {
  const Context<S>& c = Anew<S>();
  constexpr int kQ = S::kHeads / int(kSlices), kKv = S::kKvHeads / int(kSlices), kEach = 2 * (kQ + kKv);
  using F = Frames<S>;
  c.ForTasks(S::kSlicesHere * kEach * kRows, [&](int task) {
    const int row = task % kRows, slice = task / kRows / kEach, head = task / kRows % kEach;
    const bool is_q = head < kQ, is_k = !is_q && head < kQ + kKv, is_gate = head >= kQ + 2 * kKv;
    Angles angles{};  // before the wait, for they come from far away
    if (is_q || is_k) angles = AnglesOf(c, row);
    const Two x = Rounded(FinishColumns<S, Dense::kQkvg, 64>(c, slice, head * 4, row));
    const Two y = is_q || is_k ? NormAndRotate(c, x, angles) : x;
    const uint32_t columns = PackBf16(y.a, y.b);
    if (is_gate || is_q) {
      const int h = slice * kQ + (is_q ? head : head - kQ - 2 * kKv);
      if (is_q)
        PublishPermuted<Scope::kGpu>(RecordAt<64>(c.Frame(F::q), h * kRows + row), columns, c.epoch);
      else
        ptx::StRelaxed<Scope::kGpu>(reinterpret_cast<uint64_t*>(c.Frame(F::gate)) + (h * kRows + row) * 32 + c.lane(),
                                    uint64_t(c.epoch) << 32 | columns);
      uint16_t* plain = is_q ? c.pass().q : c.pass().gate;
      if (leave && row < c.pass().rows)
        reinterpret_cast<uint32_t*>(plain + (int64_t(h) * c.pass().rows + row) * 64)[c.lane()] = columns;
    } else {
      const int h = slice * kKv + (is_k ? head - kQ : head - kQ - kKv);
      PublishPermuted<Scope::kGpu>(RecordAt<64>(c.Frame(is_k ? F::k : F::v), h * kRows + row), columns, c.epoch);
    }
  });
}

}  // namespace musejax::layer

// From the last layer's stream to the lattice: the best tokens of every drafted position, and how likely one follows
// another. Row t of the block, from 1 on, is drafted position t - 1.
//
// Logits are ranked by value, of equals the lower id first. A warp finds the best of a segment of columns, a block
// those of a slice, and the slices' are merged when all ranks have them.
#pragma once

#include "draft/rows.cuh"

namespace musejax::draft {

inline constexpr uint32_t kNoToken = 0x7FFFFFFF;  // what a slice has too few ids for

// A logit's place in the order: bits that ascend with the value, and the id. NaN ranks as -inf.
struct Ranked {
  uint32_t order, id;

  __device__ __forceinline__ static Ranked Of(float value, uint32_t id) {
    const uint32_t u = __float_as_uint((value == value ? value : -INFINITY) + 0.0f);
    return {u & 0x80000000u ? ~u : u | 0x80000000u, id};
  }
  __device__ __forceinline__ static Ranked None() { return {0, 0xFFFFFFFFu}; }
  __device__ __forceinline__ float Value() const {
    return __uint_as_float(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order);
  }
  __device__ __forceinline__ bool Before(const Ranked& x) const {
    return order > x.order || (order == x.order && id < x.id);
  }
};

// The first `count` of a warp's: lane i gets number i. first() gives a lane's first one, or None; take() removes it.
template <typename First, typename Take>
__device__ __forceinline__ Ranked Rank(int lane, int count, const First& first, const Take& take) {
  Ranked mine = Ranked::None(), own = first();
  for (int n = 0; n < count; ++n) {
    const uint32_t order = __reduce_max_sync(kAllLanes, own.order);
    const uint32_t id = __reduce_min_sync(kAllLanes, own.order == order ? own.id : 0xFFFFFFFFu);
    if (lane == n) mine = {order, id};
    const uint32_t winners = __ballot_sync(kAllLanes, own.order == order && own.id == id);
    if (lane == __ffs(int(winners)) - 1) take(), own = first();
  }
  return mine;
}

// Those that a lane has in registers.
template <int kCount>
struct Hand {
  Ranked left[kCount];

  // Odd-even transposition: the same comparisons in all lanes.
  __device__ __forceinline__ void Sort() {
#pragma unroll
    for (int round = 0; round < kCount; ++round)
#pragma unroll
      for (int j = 0; j < kCount / 2; ++j) {
        const int i = 2 * j + round % 2;
        if (i + 1 >= kCount) continue;
        const Ranked a = left[i], b = left[i + 1];
        const bool swap = b.Before(a);
        left[i] = swap ? b : a, left[i + 1] = swap ? a : b;
      }
  }
  __device__ __forceinline__ void Take() {
#pragma unroll
    for (int j = 0; j + 1 < kCount; ++j) left[j] = left[j + 1];
    left[kCount - 1] = Ranked::None();
  }
};
template <int kCount>
__device__ __forceinline__ Ranked RankHands(int count, Hand<kCount>& hand) {
  hand.Sort();
  return Rank(Lane(), count, [&] { return hand.left[0]; }, [&] { hand.Take(); });
}

// The best of the segments of all slices here.
__device__ __forceinline__ void FindCandidates(const Gemm& g, int num_tokens) {
  const Context& c = TheContext();
  constexpr int kEach = kSegment / 32;
  const DraftModel& m = c.p.model;
  const int segments = SegmentsOf(m), rows = c.p.rows - 1, width = int(m.vocab / kSlices);
  c.ForTasks(c.p.slices * segments * rows, [&](int i) {
    const int row = i % rows, segment = i / rows % segments, slice = i / rows / segments;
    const int first = (c.p.rank * c.p.slices + slice) * width;
    const int valid = Max(0, Min(num_tokens - first, width));
    Two raw[kEach / 2];
    g.Finished(
        [&](int j) {
          const int column = segment * kSegment + 64 * j + 2 * Lane();
          return g.At(slice, column < width ? column : 0, row + 1);
        },
        raw);
    float values[kEach];
    Hand<kEach> hand;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int column = segment * kSegment + 64 * (j / 2) + 2 * Lane() + j % 2;
      const float u = (j % 2 ? raw[j / 2].b : raw[j / 2].a) * m.output_multiplier;
      const float value = m.softcap == 0.0f ? u : m.softcap * Tanh(u / m.softcap);
      const bool real = column < valid;
      values[j] = real ? value : -INFINITY;
      hand.left[j] = real ? Ranked::Of(value, uint32_t(column)) : Ranked::Of(-INFINITY, kNoToken);
    }
    const Ranked best = RankHands(int(m.candidates), hand);
    const float top = __shfl_sync(kAllLanes, best.Value(), 0);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (top != -INFINITY) sum += Exp(values[j] - top);
    for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(kAllLanes, sum, x);
    const int64_t at = (int64_t(slice) * kRows + row) * segments + segment;
    if (Lane() < kMaxCandidates) c.Frame<Ranked>(c.p.at.found)[at * kMaxCandidates + Lane()] = best;
    if (Lane() == 0) c.Frame<float>(c.p.at.found_sums)[at] = sum;
  });
}

struct FoundShared {
  Ranked lists[kMaxSegments][kMaxCandidates];  // of each segment, in order
  uint8_t next[kMaxSegments];                  // the first of each that is left
};
static_assert(sizeof(FoundShared) <= sizeof(Shared::any), "it lies where GEMMs keep their input");

// The best of every slice here, and its sum of exp(logit - the best), to all ranks. By all threads.
__device__ __noinline__ void SendCandidates() {
  const Context& c = TheContext();
  const DraftModel& m = c.p.model;
  const int segments = SegmentsOf(m), rows = c.p.rows - 1, most = int(m.candidates);
  FoundShared& s = *reinterpret_cast<FoundShared*>(OfBlock().any);
  for (int task = blockIdx.x; task < c.p.slices * rows; task += gridDim.x) {
    const int row = task % rows, slice = task / rows;
    const int64_t first = (int64_t(slice) * kRows + row) * segments;
    __syncthreads();
    for (int i = threadIdx.x; i < segments * kMaxCandidates; i += kThreads)
      s.lists[0][i] = c.Frame<const Ranked>(c.p.at.found)[first * kMaxCandidates + i];
    for (int i = threadIdx.x; i < segments; i += kThreads) s.next[i] = 0;
    __syncthreads();
    if (Warp() != 0) continue;
    int from = 0;  // the segment of this lane's first one
    const auto first_left = [&] {
      Ranked best = Ranked::None();
      for (int i = Lane(); i < segments; i += 32) {
        const Ranked x = s.next[i] < most ? s.lists[i][s.next[i]] : Ranked::None();
        if (x.Before(best)) best = x, from = i;
      }
      return best;
    };
    const Ranked best = Rank(Lane(), most, first_left, [&] { ++s.next[from]; });
    const float top = __shfl_sync(kAllLanes, best.Value(), 0);
    float sum = 0.0f;
    for (int i = Lane(); i < segments; i += 32) {
      const float of = c.Frame<const float>(c.p.at.found_sums)[first + i], largest = s.lists[i][0].Value();
      if (largest != -INFINITY) sum += of * Exp(largest - top);
    }
    for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(kAllLanes, sum, x);
    c.ForRanks(slice, [&](uint8_t* frames, int to) {
      const int64_t at = int64_t(to) * kRows + row;
      const int32_t id = best.id >= kNoToken ? int32_t(m.vocab) : int32_t(best.id + to * (m.vocab / kSlices));
      if (Lane() < most) {
        reinterpret_cast<float*>(frames + c.p.at.top_values)[at * kMaxCandidates + Lane()] = best.Value();
        reinterpret_cast<int32_t*>(frames + c.p.at.top_ids)[at * kMaxCandidates + Lane()] = id;
      }
      if (Lane() == 0) reinterpret_cast<float*>(frames + c.p.at.top_sums)[at] = sum;
    });
  }
}

struct LatticeShared {
  uint32_t tokens[2][kMaxCandidates];  // of the position before, of this one
  float unary[kMaxCandidates];
};

// The best of all slices of a position; lane i gets number i. By one warp.
__device__ inline Ranked MergeSlices(const Context& c, int row) {
  constexpr int kEach = int(kSlices) * kMaxCandidates / 32;
  const int most = int(c.p.model.candidates);
  Hand<kEach> hand;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = j * 32 + Lane(), slice = i / kMaxCandidates, n = i % kMaxCandidates;
    const int64_t at = (int64_t(slice) * kRows + row) * kMaxCandidates + n;
    hand.left[j] = n < most ? Ranked::Of(c.Frame<const float>(c.p.at.top_values)[at],
                                         uint32_t(c.Frame<const int32_t>(c.p.at.top_ids)[at]))
                            : Ranked::None();
  }
  return RankHands(most, hand);
}

// Log of the candidates' share of all probability.
__device__ inline float CoverageOf(const Context& c, int row, const Ranked& best) {
  const float largest = __shfl_sync(kAllLanes, best.Value(), 0);
  const float mine = Exp(best.Value() - largest);
  float all = 0.0f, kept = 0.0f;
  for (int slice = 0; slice < int(kSlices); ++slice) {
    const int64_t at = int64_t(slice) * kRows + row;
    all += c.Frame<const float>(c.p.at.top_sums)[at] *
           Exp(c.Frame<const float>(c.p.at.top_values)[at * kMaxCandidates] - largest);
  }
  for (int i = 0; i < int(c.p.model.candidates); ++i) kept += __shfl_sync(kAllLanes, mine, i);
  return Log(kept) - Log(all);
}

// Scores of the candidates of a position after one of the position before.
__device__ inline void ScorePairs(const Context& c, const DraftParams& p, int row, int before, const LatticeShared& s) {
  const DraftModel& m = c.p.model;
  const int rank = int(m.shape.rank), slice = int(m.shape.rank_slice()), most = int(m.candidates);
  const auto of = [&](const uint16_t* codebook, uint32_t token) {
    // No token: its score is -inf whatever is read.
    return codebook + int64_t(Min(int(token), int(m.vocab) - 1)) * rank;
  };
  const uint32_t anchor = uint32_t(Max(*p.anchor, 0));
  const uint16_t* predecessor = of(p.predecessor, row ? s.tokens[0][before] : anchor);
  const float* gates = c.Frame<const float>(c.p.at.gate) + row * slice;
  float sums[kMaxCandidates] = {};
  for (int r = 2 * Lane(); r < rank; r += 64) {
    const float* gate = gates + int64_t(r / slice) * kRows * slice + r % slice;
    const Two of_before = Unpack(*reinterpret_cast<const uint32_t*>(predecessor + r));
    const Two gated{of_before.a * gate[0], of_before.b * gate[1]};
#pragma unroll
    for (int i = 0; i < kMaxCandidates; ++i) {
      if (i >= most) break;
      const Two after = Unpack(*reinterpret_cast<const uint32_t*>(of(p.successor, s.tokens[1][i]) + r));
      sums[i] = fmaf(gated.b, after.b, fmaf(gated.a, after.a, sums[i]));
    }
  }
  float mine = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxCandidates; ++i) {
    for (int x = 16; x; x /= 2) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], x);
    if (Lane() == i) mine = s.unary[i] + sums[i];
  }
  if (Lane() < most) p.scores[(int64_t(row) * most + before) * most + Lane()] = mine;
}

// Tokens, scores and coverage of every position; a block has a position. By all threads.
__device__ __noinline__ void MakeLattice(const DraftParams& p) {
  const Context& c = TheContext();
  LatticeShared& s = *reinterpret_cast<LatticeShared*>(OfBlock().any);
  const int most = int(c.p.model.candidates);
  for (int row = blockIdx.x; row < c.p.rows - 1; row += gridDim.x) {
    __syncthreads();
    if (Warp() < 2 && row + Warp() > 0) {
      const Ranked best = MergeSlices(c, row - 1 + Warp());
      if (Lane() < most) s.tokens[Warp()][Lane()] = best.id;
      if (Warp() == 1) {
        const float coverage = CoverageOf(c, row, best);
        if (Lane() < most) s.unary[Lane()] = best.Value(), p.tokens[row * most + Lane()] = int32_t(best.id);
        if (Lane() == 0) p.coverage[row] = coverage;
      }
    }
    __syncthreads();
    if (Warp() < most) ScorePairs(c, p, row, Warp(), s);
  }
}

}  // namespace musejax::draft

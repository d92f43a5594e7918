// From the last layer's stream to the lattice: the best tokens of every drafted position, and how likely one follows
// another. Row t of the block, from 1 on, is drafted position t - 1.
//
// Logits are ranked by 64-bit keys, the larger first, of equals the lower id: value, then id. A warp finds the best of
// a segment of columns, a block those of a slice, and the slices' are merged when all ranks have them.
#pragma once

#include "draft/rows.cuh"

namespace musejax::draft {

inline constexpr uint32_t kNoToken = 0x7FFFFFFF;  // what a slice has too few ids for

__device__ __forceinline__ uint64_t KeyOf(float value, uint32_t id) {
  const uint32_t u = __float_as_uint((value == value ? value : -INFINITY) + 0.0f);
  return uint64_t(u & 0x80000000u ? ~u : u | 0x80000000u) << 32 | ~id;
}
__device__ __forceinline__ float ValueOf(uint64_t key) {
  const uint32_t u = uint32_t(key >> 32);
  return __uint_as_float(u & 0x80000000u ? u & 0x7FFFFFFFu : ~u);
}
__device__ __forceinline__ uint32_t IdOf(uint64_t key) { return ~uint32_t(key); }

// The largest keys of a warp, ranked: lane i gets number i. largest() gives a lane's largest key, 0 for none;
// take() removes it.
template <typename Largest, typename Take>
__device__ __forceinline__ uint64_t Rank(int lane, int count, const Largest& largest, const Take& take) {
  uint64_t mine = 0;
  for (int n = 0; n < count; ++n) {
    const uint64_t own = largest();
    uint64_t best = own;
    for (int x = 16; x; x /= 2) {
      const uint64_t other = __shfl_xor_sync(kAllLanes, best, x);
      best = other > best ? other : best;
    }
    const int winner = __ffs(int(__ballot_sync(kAllLanes, own == best))) - 1;
    if (lane == winner) take();
    if (lane == n) mine = best;
  }
  return mine;
}

// The best of the segments of all slices here.
__device__ __noinline__ void FindCandidates(const Context& c, const Gemm& g, int num_tokens) {
  constexpr int kEach = kSegment / 32;
  const DraftModel& m = c.p.model;
  const int segments = SegmentsOf(m), rows = c.p.rows - 1, width = int(m.vocab / kSlices);
  c.ForTasks(c.p.slices * segments * rows, [&](int i) {
    const int row = i % rows, segment = i / rows % segments, slice = i / rows / segments;
    const int first = (c.p.rank * c.p.slices + slice) * width;
    const int valid = Max(0, Min(num_tokens - first, width));
    uint64_t keys[kEach];
    float values[kEach];
#pragma unroll
    for (int j = 0; j < kEach; j += 2) {
      const int column = segment * kSegment + 64 * (j / 2) + 2 * c.lane;
      const Two raw = column < width ? g.Finished(slice, column, row + 1) : Two{0.0f, 0.0f};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float u = (h ? raw.b : raw.a) * m.output_multiplier;
        values[j + h] = m.softcap == 0.0f ? u : m.softcap * Tanh(u / m.softcap);
        keys[j + h] = column + h < valid ? KeyOf(values[j + h], uint32_t(column + h)) : KeyOf(-INFINITY, kNoToken);
      }
    }
    uint64_t left[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) left[j] = keys[j];
    const auto largest = [&] {
      uint64_t most = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) most = left[j] > most ? left[j] : most;
      return most;
    };
    const auto take = [&] {
      const uint64_t most = largest();
      bool taken = false;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const bool is = !taken && left[j] == most;
        left[j] = is ? 0 : left[j], taken = taken || is;
      }
    };
    const uint64_t best = Rank(c.lane, int(m.candidates), largest, take);
    const float top = ValueOf(__shfl_sync(kAllLanes, best, 0));
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (IdOf(keys[j]) != kNoToken && top != -INFINITY) sum += Exp(values[j] - top);
    for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(kAllLanes, sum, x);
    const int64_t at = (int64_t(slice) * kRows + row) * segments + segment;
    if (c.lane < kMaxCandidates) c.Frame<uint64_t>(c.p.at.found)[at * kMaxCandidates + c.lane] = best;
    if (c.lane == 0) c.Frame<float>(c.p.at.found_sums)[at] = sum;
  });
}

// The best of every slice here, and its sum of exp(logit - the best), to all ranks. By all threads.
__device__ __noinline__ void SendCandidates(const Context& c) {
  const DraftModel& m = c.p.model;
  const int segments = SegmentsOf(m), rows = c.p.rows - 1, count = segments * kMaxCandidates;
  uint64_t* keys = reinterpret_cast<uint64_t*>(c.shared.any);
  for (int task = blockIdx.x; task < c.p.slices * rows; task += gridDim.x) {
    const int row = task % rows, slice = task / rows;
    const int64_t first = (int64_t(slice) * kRows + row) * segments;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads)
      keys[i] = c.Frame<const uint64_t>(c.p.at.found)[first * kMaxCandidates + i];
    __syncthreads();
    if (c.warp != 0) continue;
    int place = 0;
    const auto largest = [&] {
      uint64_t most = 0;
      for (int i = c.lane; i < count; i += 32)
        if (keys[i] > most) most = keys[i], place = i;
      return most;
    };
    // The sums first: ranking takes the keys away.
    const float top = [&] {
      float most = -INFINITY;
      for (int s = c.lane; s < segments; s += 32) most = fmaxf(most, ValueOf(keys[s * kMaxCandidates]));
      for (int x = 16; x; x /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, x));
      return most;
    }();
    float sum = 0.0f;
    for (int s = c.lane; s < segments; s += 32) {
      const float of = c.Frame<const float>(c.p.at.found_sums)[first + s], best = ValueOf(keys[s * kMaxCandidates]);
      if (best != -INFINITY) sum += of * Exp(best - top);
    }
    for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(kAllLanes, sum, x);
    __syncwarp();
    const uint64_t best = Rank(c.lane, int(m.candidates), largest, [&] { keys[place] = 0; });
    c.ForRanks(slice, [&](uint8_t* frames, int to) {
      const int64_t at = int64_t(to) * kRows + row;
      const int32_t id = IdOf(best) >= kNoToken ? int32_t(m.vocab) : int32_t(IdOf(best) + to * (m.vocab / kSlices));
      if (c.lane < int(m.candidates)) {
        reinterpret_cast<float*>(frames + c.p.at.top_values)[at * kMaxCandidates + c.lane] = ValueOf(best);
        reinterpret_cast<int32_t*>(frames + c.p.at.top_ids)[at * kMaxCandidates + c.lane] = id;
      }
      if (c.lane == 0) reinterpret_cast<float*>(frames + c.p.at.top_sums)[at] = sum;
    });
  }
}

struct LatticeShared {
  uint32_t tokens[2][kMaxCandidates];  // of the position before, of this one
  float unary[kMaxCandidates];
};

// The best of all slices of a position; lane i gets number i. By one warp.
__device__ inline uint64_t MergeSlices(const Context& c, int row) {
  constexpr int kEach = int(kSlices) * kMaxCandidates / 32;
  const int most = int(c.p.model.candidates);
  uint64_t left[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = j * 32 + c.lane, slice = i / kMaxCandidates, n = i % kMaxCandidates;
    const int64_t at = (int64_t(slice) * kRows + row) * kMaxCandidates + n;
    left[j] = n < most ? KeyOf(c.Frame<const float>(c.p.at.top_values)[at],
                               uint32_t(c.Frame<const int32_t>(c.p.at.top_ids)[at]))
                       : 0;
  }
  const auto largest = [&] {
    uint64_t best = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) best = left[j] > best ? left[j] : best;
    return best;
  };
  const auto take = [&] {
    const uint64_t best = largest();
    bool taken = false;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool is = !taken && left[j] == best;
      left[j] = is ? 0 : left[j], taken = taken || is;
    }
  };
  return Rank(c.lane, most, largest, take);
}

// Log of the candidates' share of all probability.
__device__ inline float CoverageOf(const Context& c, int row, uint64_t best) {
  const float largest = ValueOf(__shfl_sync(kAllLanes, best, 0));
  const float mine = Exp(ValueOf(best) - largest);
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
    return codebook + int64_t(Min(int(token), int(m.vocab) - 1)) * rank;  // no token: its score is -inf whatever is read
  };
  const uint32_t anchor = uint32_t(Max(*p.anchor, 0));
  const uint16_t* predecessor = of(p.predecessor, row ? s.tokens[0][before] : anchor);
  float mine = 0.0f;
  for (int after = 0; after < most; ++after) {
    const uint16_t* successor = of(p.successor, s.tokens[1][after]);
    float sum = 0.0f;
    for (int r = c.lane; r < rank; r += 32) {
      const float gate = c.Frame<const float>(c.p.at.gate)[(int64_t(r / slice) * kRows + row) * slice + r % slice];
      sum = fmaf(FromBf16(predecessor[r]) * gate, FromBf16(successor[r]), sum);
    }
    for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(kAllLanes, sum, x);
    if (c.lane == after) mine = s.unary[after] + sum;
  }
  if (c.lane < most) p.scores[(int64_t(row) * most + before) * most + c.lane] = mine;
}

// Tokens, scores and coverage of every position; a block has a position. By all threads.
__device__ __noinline__ void MakeLattice(const Context& c, const DraftParams& p) {
  LatticeShared& s = *reinterpret_cast<LatticeShared*>(c.shared.any);
  const int most = int(c.p.model.candidates);
  for (int row = blockIdx.x; row < c.p.rows - 1; row += gridDim.x) {
    __syncthreads();
    if (c.warp < 2 && row + c.warp > 0) {
      const uint64_t best = MergeSlices(c, row - 1 + c.warp);
      if (c.lane < most) s.tokens[c.warp][c.lane] = IdOf(best);
      if (c.warp == 1) {
        const float coverage = CoverageOf(c, row, best);
        if (c.lane < most) s.unary[c.lane] = ValueOf(best), p.tokens[row * most + c.lane] = int32_t(IdOf(best));
        if (c.lane == 0) p.coverage[row] = coverage;
      }
    }
    __syncthreads();
    if (c.warp < most) ScorePairs(c, p, row, c.warp, s);
  }
}

}  // namespace musejax::draft

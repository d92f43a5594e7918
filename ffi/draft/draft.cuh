// The two kernels of a drafter, each a persistent launch of one block of 16 warps an SM: a block of tokens through all
// layers to its lattice of candidates, and tapped features of committed positions into the rings.
//
// Supersteps alternate: all blocks multiply, then all finish what came of it, row by row. Barriers of all ranks end
// those whose results other ranks read; weights of the next GEMM are on their way meanwhile.
//
// Bits: the same for any number of blocks, ranks and rows beside a row's own; those of cpu/draft.h up to the inner
// order of an MMA, the order in which attention adds, and that of the candidates' sums.
#pragma once

#include "draft/attention.cuh"
#include "draft/candidates.cuh"

namespace musejax::draft {

// By all threads; ends with a block barrier.
__device__ inline Context Begin(const Launch& p, Phase phase) {
  Shared& shared = *reinterpret_cast<Shared*>(ptx::DynamicShared());
  const int warp = int(threadIdx.x) / 32;
  if (threadIdx.x == 0)
    shared.where = {p.error, p.abort, *p.budget, p.rank, int(blockIdx.x), warp, 0, int(phase)};
  __syncthreads();
  const comm::Waiter waiter{&shared.where};
  return {p,    shared, waiter, comm::Barrier(p.exchange, p.rank, p.ranks, waiter, p.passed[blockIdx.x]),
          warp, int(threadIdx.x) % 32};
}

__device__ inline void End(Context& c) {
  c.barrier.Wait();
  if (threadIdx.x != 0) return;
  c.waiter.Report();
  c.p.passed[blockIdx.x] = c.barrier.passed();
}

// ---- the GEMMs of layer i, in order; from the last layer's on the head ----

enum class Dense { kAttentionConv, kQkv, kOut, kMlpConv, kUp, kDown };

__device__ __forceinline__ Gemm GemmOf(const Context& c, int i, Dense which) {
  const DraftShape& s = c.p.model.shape;
  const DraftDenseLayout at(s);
  const auto gemm = [&](int64_t section, int64_t rows, int64_t k) {
    return Gemm(c.p.layer[i].dense + section, at.bytes, k, rows, 0, rows, c.p.slices, c.Frame<float>(c.p.at.partial));
  };
  switch (which) {
    case Dense::kAttentionConv: return gemm(at.attention_conv, s.delta_rows(), s.hidden);
    case Dense::kQkv: return gemm(at.qkv, s.qkv_rows(), s.hidden);
    case Dense::kOut: return gemm(at.out, s.hidden_slice(), s.q_width());
    case Dense::kMlpConv: return gemm(at.mlp_conv, s.delta_rows(), s.hidden);
    case Dense::kUp: return gemm(at.gate_up, 2 * s.inner_slice(), s.hidden);
    default: return gemm(at.down, s.hidden_slice(), s.inner);
  }
}
__device__ __forceinline__ Gemm HeadOf(const Context& c, const DraftParams& p) {
  const int64_t vocab = p.model.vocab / kSlices, k = p.model.shape.hidden;
  return Gemm(p.lm_head, HeadBytes(p.model.vocab, k), k, vocab, 0, vocab, p.slices, c.Frame<float>(p.at.partial));
}
// The first one of a sublayer.
__device__ __forceinline__ Gemm FirstOf(const Context& c, int i, bool mlp) {
  if (c.p.model.shape.conv_groups) return GemmOf(c, i, mlp ? Dense::kMlpConv : Dense::kAttentionConv);
  return GemmOf(c, i, mlp ? Dense::kUp : Dense::kQkv);
}

// ---- between GEMMs ----

// Ends a GEMM; what the next ones need comes into L2 meanwhile.
template <typename... Gemms>
__device__ __forceinline__ void EndMultiply(Context& c, const Gemms&... next) {
  c.barrier.Arrive(false);
  (Prefetch(c, next), ...);
  c.barrier.Wait();
}
// Ends a superstep that wrote to all ranks; the next GEMM's weights set out.
__device__ __forceinline__ void EndExchange(Context& c, const Gemm& next) {
  c.barrier.Arrive(true);
  Start(c, next);
}

__device__ __forceinline__ Input Stream(const Context& c, const float* gamma, const float* base = nullptr) {
  return {c.Frame<const uint16_t>(c.p.at.x), int(c.p.model.shape.hidden_slice()), nullptr,
          c.Frame<const float>(c.p.at.squares), gamma, base, c.p.rows};
}
__device__ __forceinline__ Input Rows(const Context& c, int64_t frame, int64_t width) {
  return {c.Frame<const uint16_t>(frame), int(width), nullptr, nullptr, nullptr, nullptr, c.p.rows};
}

// Coefficients of a sublayer's convolution, to all ranks; none in DFlash 1.
__device__ __forceinline__ void Coefficients(Context& c, const Gemm& g, const float* gamma, const Gemm& next) {
  const DraftShape& s = c.p.model.shape;
  if (!s.conv_groups) return;
  Multiply(c, g, Stream(c, gamma));
  EndMultiply(c, next);
  FinishFloats(c, g, s.delta_rows(), 0, c.p.at.delta);
  EndExchange(c, next);
}

__device__ __noinline__ void Attention(Context& c, int i, const Seen& see) {
  const DraftShape& s = c.p.model.shape;
  const DraftSmallLayout at(s);
  const LayerArrays& layer = c.p.layer[i];
  const float *gamma = layer.small + at.input_norm, *base = s.conv_groups ? layer.small + at.attention_conv : nullptr;
  const Gemm qkv = GemmOf(c, i, Dense::kQkv), out = GemmOf(c, i, Dense::kOut);
  Coefficients(c, GemmOf(c, i, Dense::kAttentionConv), gamma, qkv);
  Multiply(c, qkv, Stream(c, gamma, base));
  EndMultiply(c, out, FirstOf(c, i, true));
  FinishHeads(c, qkv, layer.small);
  EndMultiply(c, GemmOf(c, i, Dense::kUp));
  Attend(c, layer, see);
  c.barrier.Sync(false);
  MergePieces(c, see);
  EndExchange(c, out);
  Multiply(c, out, Rows(c, c.p.at.o, s.head_dim));
  EndMultiply(c, FirstOf(c, i, true));
  FinishBranch(c, out, base);
  EndExchange(c, FirstOf(c, i, true));
}

__device__ __noinline__ void Mlp(Context& c, int i, const Gemm& after) {
  const DraftShape& s = c.p.model.shape;
  const DraftSmallLayout at(s);
  const LayerArrays& layer = c.p.layer[i];
  const float *gamma = layer.small + at.post_norm, *base = s.conv_groups ? layer.small + at.mlp_conv : nullptr;
  const Gemm up = GemmOf(c, i, Dense::kUp), down = GemmOf(c, i, Dense::kDown);
  Coefficients(c, GemmOf(c, i, Dense::kMlpConv), gamma, up);
  Multiply(c, up, Stream(c, gamma, base));
  EndMultiply(c, down);
  FinishUp(c, up);
  EndExchange(c, down);
  Multiply(c, down, Rows(c, c.p.at.act, s.inner_slice()));
  EndMultiply(c, after);
  FinishBranch(c, down, base);
  EndExchange(c, after);
}

__device__ __noinline__ void Candidates(Context& c, const DraftParams& p) {
  const DraftShape& s = p.model.shape;
  const Gemm head = HeadOf(c, p);
  const Gemm selector(p.selector, SelectorBytes(s), s.hidden, s.rank_slice(), 0, s.rank_slice(), p.slices,
                      head.Behind());
  Multiply(c, head, Stream(c, p.norm));
  if (s.rank) {
    Start(c, selector);
    Multiply(c, selector, Stream(c, p.norm));
  }
  c.barrier.Sync(false);
  FindCandidates(c, head, p.num_tokens);
  if (s.rank) FinishFloats(c, selector, s.rank_slice(), 1, p.at.gate);
  c.barrier.Sync(false);
  SendCandidates(c);
  c.barrier.Sync(true);
  MakeLattice(c, p);
}

// ---- the kernels ----

__device__ __forceinline__ void RunDraft(const DraftParams& p) {
  Context c = Begin(p, kBlock);
  const Seen see(c, Max(*p.length, 0));
  Embed(c, p.embedded);
  EndExchange(c, FirstOf(c, 0, false));
#pragma unroll 1
  for (int i = 0; i < p.layers; ++i) {
    c.waiter.At(i, kBlock);
    Attention(c, i, see);
    Mlp(c, i, i + 1 < p.layers ? FirstOf(c, i + 1, false) : HeadOf(c, p));
  }
  c.waiter.At(p.layers, kCandidates);
  Candidates(c, p);
  End(c);
}

__device__ __forceinline__ void RunCommit(const CommitParams& p) {
  Context c = Begin(p, kContext);
  const DraftModel& m = p.model;
  const DraftShape& s = m.shape;
  const int start = Max(*p.start, 0), count = Min(Max(*p.count, 0), p.rows);
  const Gemm fc(p.fc, FcBytes(s), s.taps_width(), s.hidden_slice(), 0, s.hidden_slice(), p.slices,
                c.Frame<float>(p.at.partial));
  Start(c, fc);
  Multiply(c, fc, {nullptr, 0, p.taps, nullptr, nullptr, nullptr, count});
  c.barrier.Sync(true);  // all ranks have ended the launch before
  FinishContext(c, fc, count);
  const Input ctx{c.Frame<const uint16_t>(p.at.ctx), int(s.hidden_slice()), nullptr,
                  c.Frame<const float>(p.at.ctx_squares), p.hidden_norm, nullptr, count};
  const auto keys = [&](int i) {  // of layer i, behind those of the layers before it
    const int64_t rows = 2 * s.kv_rows();
    Gemm g(p.layer[i].dense + DraftDenseLayout(s).qkv, DraftDenseLayout(s).bytes, s.hidden, s.qkv_rows(), s.q_rows(),
           rows, p.slices, c.Frame<float>(p.at.partial));
    g.partial += i * (g.Behind() - g.partial);
    return g;
  };
  c.barrier.Arrive(true);
#pragma unroll 1
  for (int i = 0; i < p.layers; ++i) {
    Start(c, keys(i));
    Multiply(c, keys(i), ctx);
  }
  c.barrier.Sync(false);
  if (count)
#pragma unroll 1
    for (int i = 0; i < p.layers; ++i) FinishKeys(c, keys(i), p.layer[i], start, count);
  End(c);
}

__global__ void __launch_bounds__(kThreads, 1) Draft(const __grid_constant__ DraftParams params) { RunDraft(params); }
__global__ void __launch_bounds__(kThreads, 1) Commit(const __grid_constant__ CommitParams params) {
  RunCommit(params);
}

}  // namespace musejax::draft

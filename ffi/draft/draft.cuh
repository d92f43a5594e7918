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

// A GEMM of the layer's dense weights over the stream, or over what a phase made of it.
__device__ __forceinline__ Gemm Dense(const Context& c, const LayerArrays& layer, int64_t section, int64_t rows,
                                      int64_t k) {
  return Gemm(layer.dense + section, DraftDenseLayout(c.p.model.shape).bytes, k, rows, 0, rows, c.p.slices,
              c.Frame<float>(c.p.at.partial));
}
__device__ __forceinline__ Input Stream(const Context& c, const float* gamma, const float* base = nullptr) {
  return {c.Frame<const uint16_t>(c.p.at.x), int(c.p.model.shape.hidden_slice()), nullptr,
          c.Frame<const float>(c.p.at.squares), gamma, base, c.p.rows};
}

// Coefficients of a sublayer's convolution, to all ranks; none in DFlash 1.
__device__ inline void Coefficients(Context& c, const LayerArrays& layer, int64_t section, const float* gamma) {
  const DraftShape& s = c.p.model.shape;
  if (!s.conv_groups) return;
  const Gemm g = Dense(c, layer, section, s.delta_rows(), s.hidden);
  Multiply(c, g, Stream(c, gamma));
  c.barrier.Sync(false);
  FinishFloats(c, g, s.delta_rows(), 0, c.p.at.delta);
  c.barrier.Arrive(true);
}

__device__ inline void Attention(Context& c, const LayerArrays& layer, const Seen& see) {
  const DraftShape& s = c.p.model.shape;
  const DraftDenseLayout at(s);
  const DraftSmallLayout small(s);
  const float* gamma = layer.small + small.input_norm;
  const float* base = s.conv_groups ? layer.small + small.attention_conv : nullptr;
  Coefficients(c, layer, at.attention_conv, gamma);
  const Gemm qkv = Dense(c, layer, at.qkv, s.qkv_rows(), s.hidden);
  Multiply(c, qkv, Stream(c, gamma, base));
  c.barrier.Sync(false);
  FinishHeads(c, qkv, layer.small);
  c.barrier.Sync(false);
  Attend(c, layer, see);
  c.barrier.Sync(false);
  MergePieces(c, see);
  c.barrier.Arrive(true);
  const Gemm out = Dense(c, layer, at.out, s.hidden_slice(), s.q_width());
  Multiply(c, out, {c.Frame<const uint16_t>(c.p.at.o), int(s.head_dim), nullptr, nullptr, nullptr, nullptr, c.p.rows});
  c.barrier.Sync(false);
  FinishBranch(c, out, base);
  c.barrier.Arrive(true);
}

__device__ inline void Mlp(Context& c, const LayerArrays& layer) {
  const DraftShape& s = c.p.model.shape;
  const DraftDenseLayout at(s);
  const DraftSmallLayout small(s);
  const float* gamma = layer.small + small.post_norm;
  const float* base = s.conv_groups ? layer.small + small.mlp_conv : nullptr;
  Coefficients(c, layer, at.mlp_conv, gamma);
  const Gemm up = Dense(c, layer, at.gate_up, 2 * s.inner_slice(), s.hidden);
  Multiply(c, up, Stream(c, gamma, base));
  c.barrier.Sync(false);
  FinishUp(c, up);
  c.barrier.Arrive(true);
  const Gemm down = Dense(c, layer, at.down, s.hidden_slice(), s.inner);
  Multiply(c, down, {c.Frame<const uint16_t>(c.p.at.act), int(s.inner_slice()), nullptr, nullptr, nullptr, nullptr,
                     c.p.rows});
  c.barrier.Sync(false);
  FinishBranch(c, down, base);
  c.barrier.Arrive(true);
}

__device__ inline void Candidates(Context& c, const DraftParams& p) {
  const DraftModel& m = c.p.model;
  const DraftShape& s = m.shape;
  const int64_t vocab = m.vocab / kSlices;
  const Gemm head(p.lm_head, HeadBytes(m.vocab, s.hidden), s.hidden, vocab, 0, vocab, c.p.slices,
                  c.Frame<float>(c.p.at.partial));
  const Gemm selector(p.selector, SelectorBytes(s), s.hidden, s.rank_slice(), 0, s.rank_slice(), c.p.slices, head.End());
  Multiply(c, head, Stream(c, p.norm));
  if (s.rank) Multiply(c, selector, Stream(c, p.norm));
  c.barrier.Sync(false);
  FindCandidates(c, head, p.num_tokens);
  if (s.rank) FinishFloats(c, selector, s.rank_slice(), 1, c.p.at.gate);
  c.barrier.Sync(false);
  SendCandidates(c);
  c.barrier.Sync(true);
  MakeLattice(c, p);
}

__device__ inline void RunDraft(const DraftParams& p) {
  Context c = Begin(p, kBlock);
  const Seen see(c, Max(*p.length, 0));
  Embed(c, p.embedded);
  c.barrier.Arrive(true);
#pragma unroll 1
  for (int i = 0; i < p.layers; ++i) {
    c.waiter.At(i, kBlock);
    Attention(c, p.layer[i], see);
    Mlp(c, p.layer[i]);
  }
  c.waiter.At(p.layers, kCandidates);
  Candidates(c, p);
  End(c);
}

__device__ inline void RunCommit(const CommitParams& p) {
  Context c = Begin(p, kContext);
  const DraftModel& m = p.model;
  const DraftShape& s = m.shape;
  const int start = Max(*p.start, 0), count = Min(Max(*p.count, 0), p.rows);
  const Gemm fc(p.fc, FcBytes(s), s.taps_width(), s.hidden_slice(), 0, s.hidden_slice(), p.slices,
                c.Frame<float>(p.at.partial));
  Multiply(c, fc, {nullptr, 0, p.taps, nullptr, nullptr, nullptr, count});
  c.barrier.Sync(true);  // all ranks have ended the launch before
  FinishContext(c, fc, count);
  c.barrier.Arrive(true);
  const Input ctx{c.Frame<const uint16_t>(p.at.ctx), int(s.hidden_slice()), nullptr,
                  c.Frame<const float>(p.at.ctx_squares), p.hidden_norm, nullptr, count};
  const auto keys = [&](int i) {  // of layer i, behind those of the layers before it
    const int64_t rows = 2 * s.kv_rows();
    Gemm g(p.layer[i].dense + DraftDenseLayout(s).qkv, DraftDenseLayout(s).bytes, s.hidden, s.qkv_rows(), s.q_rows(),
           rows, p.slices, c.Frame<float>(p.at.partial));
    g.partial += i * (g.End() - g.partial);
    return g;
  };
#pragma unroll 1
  for (int i = 0; i < p.layers; ++i) Multiply(c, keys(i), ctx);
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

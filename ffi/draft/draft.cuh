// The two kernels of a drafter, each a persistent launch of one block of 16 warps an SM: a block of tokens through all
// layers to its lattice of candidates, and tapped features of committed positions into the rings.
//
// Supersteps alternate: all blocks multiply, then all finish what came of it, row by row. Barriers of all ranks end
// those whose results other ranks read; weights of the next GEMM are on their way meanwhile.
//
// Bits: the same for any number of blocks and ranks, and in every launch; of a committed row whatever the other rows
// are. Those of cpu/draft.h up to the inner order of an MMA, the order in which attention adds, and that of the
// candidates' sums.
#pragma once

#include "draft/attention.cuh"
#include "draft/candidates.cuh"

namespace musejax::draft {

// By all threads; ends with a block barrier.
__device__ __forceinline__ Context& Begin(const Launch& p, Phase phase) {
  Context& c = TheContext();
  for (int i = threadIdx.x; i < int(sizeof(Launch) / 8); i += kThreads)
    reinterpret_cast<uint64_t*>(&c.p)[i] = reinterpret_cast<const uint64_t*>(&p)[i];
  if (threadIdx.x == 0) {
    OfBlock().where = {p.error, p.abort, *p.budget, p.rank, int(blockIdx.x), 0, 0, int(phase)};
    c.waiter = {&OfBlock().where};
    c.barrier.Begin(&c.p.exchange, p.rank, p.ranks, c.waiter, p.passed[blockIdx.x]);
  }
  __syncthreads();
  return c;
}

__device__ __forceinline__ void End(const Context& c) {
  if (threadIdx.x != 0) return;
  c.waiter.Report();
  c.p.passed[blockIdx.x] = c.barrier.passed();
}

// ---- the GEMMs of layer i, in order; from the last layer's on the head ----

enum Dense : int { kAttentionConv, kQkv, kOut, kMlpConv, kUp, kDown, kHead, kSelector };

// In shared memory, made by MakeGemms while the layer before runs.
__device__ __forceinline__ Gemm& GemmOf(int i, Dense which) {
  return *reinterpret_cast<Gemm*>(OfBlock().gemms[i % 2][which]);
}
__device__ __noinline__ void PutGemm(Gemm* to, const uint8_t* weights, int64_t slice_bytes, int64_t k, int64_t all_rows,
                                     int64_t first_row, int64_t rows, int slices, float* partial) {
  *to = Gemm(weights, slice_bytes, k, all_rows, first_row, rows, slices, partial);
}
__device__ __forceinline__ void MakeGemms(const DraftParams& p, int i) {
  const DraftShape& s = p.model.shape;
  const DraftDenseLayout at(s);
  float* partial = TheContext().Frame<float>(p.at.partial);
  const auto put = [&](Dense which, int64_t section, int64_t rows, int64_t k) {
    PutGemm(&GemmOf(i, which), p.layer[i].dense + section, at.bytes, k, rows, 0, rows, p.slices, partial);
  };
  if (threadIdx.x != 0) return;
  if (i == p.layers) {
    const int64_t vocab = p.model.vocab / kSlices, rank = s.rank_slice();
    Gemm& head = GemmOf(i, kHead);
    PutGemm(&head, p.lm_head, HeadBytes(p.model.vocab, s.hidden), s.hidden, vocab, 0, vocab, p.slices, partial);
    PutGemm(&GemmOf(i, kSelector), p.selector, SelectorBytes(s), s.hidden, rank, 0, rank, p.slices, head.Behind());
  } else {
    put(kAttentionConv, at.attention_conv, s.delta_rows(), s.hidden);
    put(kQkv, at.qkv, s.qkv_rows(), s.hidden);
    put(kOut, at.out, s.hidden_slice(), s.q_width());
    put(kMlpConv, at.mlp_conv, s.delta_rows(), s.hidden);
    put(kUp, at.gate_up, 2 * s.inner_slice(), s.hidden);
    put(kDown, at.down, s.hidden_slice(), s.inner);
  }
}
// The first one of a sublayer; of what follows the last layer the head.
__device__ __forceinline__ const Gemm& FirstOf(const Context& c, int i, bool mlp) {
  if (i == c.p.layers) return GemmOf(i, kHead);
  if (c.p.model.shape.conv_groups) return GemmOf(i, mlp ? kMlpConv : kAttentionConv);
  return GemmOf(i, mlp ? kUp : kQkv);
}

// ---- between GEMMs ----
//
// Functions of their own, which find their arguments in shared memory: an SM caches about 128 KB of instructions, and a
// layer passes here 14 times.

__device__ __noinline__ void Arrive(bool all_ranks) { TheContext().barrier.Arrive(all_ranks); }
__device__ __noinline__ void Wait() { TheContext().barrier.Wait(); }
__device__ __forceinline__ void Sync(bool all_ranks) { Arrive(all_ranks), Wait(); }

// Ends a GEMM; what the next ones need comes into L2 meanwhile.
template <typename... Gemms>
__device__ __forceinline__ void EndMultiply(const Gemms&... next) {
  Arrive(false);
  (Prefetch(&next), ...);
  Wait();
}
// Ends a superstep that wrote to all ranks; the next GEMM's weights set out meanwhile.
__device__ __forceinline__ void EndExchange(const Gemm& next) {
  Arrive(true);
  Start(&next);
  Wait();
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
  Multiply(g, Stream(c, gamma));
  EndMultiply(next);
  FinishFloats(s.delta_rows(), 0, c.p.at.delta);
  EndExchange(next);
}

__device__ __noinline__ void Attention(int i, int length) {
  Context& c = TheContext();
  const DraftShape& s = c.p.model.shape;
  const DraftSmallLayout at(s);
  const LayerArrays& layer = c.p.layer[i];
  const float *gamma = layer.small + at.input_norm, *base = s.conv_groups ? layer.small + at.attention_conv : nullptr;
  const Gemm &qkv = GemmOf(i, kQkv), &out = GemmOf(i, kOut);
  Coefficients(c, GemmOf(i, kAttentionConv), gamma, qkv);
  Multiply(qkv, Stream(c, gamma, base));
  EndMultiply(out, FirstOf(c, i, true));
  FinishHeads(layer.small);
  EndMultiply(GemmOf(i, kUp));
  Attend(i, length);
  Sync(false);
  MergePieces(length);
  EndExchange(out);
  Multiply(out, Rows(c, c.p.at.o, s.head_dim));
  EndMultiply(FirstOf(c, i, true));
  FinishBranch(base);
  EndExchange(FirstOf(c, i, true));
}

__device__ __noinline__ void Mlp(int i) {
  Context& c = TheContext();
  const DraftShape& s = c.p.model.shape;
  const DraftSmallLayout at(s);
  const LayerArrays& layer = c.p.layer[i];
  const float *gamma = layer.small + at.post_norm, *base = s.conv_groups ? layer.small + at.mlp_conv : nullptr;
  const Gemm &up = GemmOf(i, kUp), &down = GemmOf(i, kDown);
  Coefficients(c, GemmOf(i, kMlpConv), gamma, up);
  Multiply(up, Stream(c, gamma, base));
  EndMultiply(down);
  FinishUp();
  EndExchange(down);
  Multiply(down, Rows(c, c.p.at.act, s.inner_slice()));
  EndMultiply(FirstOf(c, i + 1, false));
  FinishBranch(base);
  EndExchange(FirstOf(c, i + 1, false));
}

__device__ __noinline__ void Candidates(Context& c, const DraftParams& p) {
  const DraftShape& s = p.model.shape;
  const Gemm &head = GemmOf(p.layers, kHead), &selector = GemmOf(p.layers, kSelector);
  Multiply(head, Stream(c, p.norm));
  if (s.rank) {
    __syncthreads();
    Start(&selector);
    Multiply(selector, Stream(c, p.norm));
  }
  Sync(false);
  FindCandidates(head, p.num_tokens);
  if (s.rank) FinishFloats(s.rank_slice(), 1, p.at.gate);
  Sync(false);
  SendCandidates();
  Sync(true);
  MakeLattice(p);
}

// ---- the kernels ----

__device__ __forceinline__ void RunDraft(const DraftParams& p) {
  Context& c = Begin(p, kBlock);
  const int length = Max(*p.length, 0);
  MakeGemms(p, 0);
  Embed(p.embedded);
  EndExchange(FirstOf(c, 0, false));
#pragma unroll 1
  for (int i = 0; i < p.layers; ++i) {
    if (threadIdx.x == 0) c.waiter.At(i, kBlock);
    Attention(i, length);
    MakeGemms(p, i + 1);
    Mlp(i);
  }
  if (threadIdx.x == 0) c.waiter.At(p.layers, kCandidates);
  Candidates(c, p);
  End(c);
}

__device__ __forceinline__ void RunCommit(const CommitParams& p) {
  Context& c = Begin(p, kContext);
  const DraftModel& m = p.model;
  const DraftShape& s = m.shape;
  const int start = Max(*p.start, 0), count = Min(Max(*p.count, 0), p.rows);
  Gemm &fc = GemmOf(0, kAttentionConv), &keys = GemmOf(0, kQkv);
  if (threadIdx.x == 0)
    PutGemm(&fc, p.fc, FcBytes(s), s.taps_width(), s.hidden_slice(), 0, s.hidden_slice(), p.slices,
            c.Frame<float>(p.at.partial));
  __syncthreads();
  Start(&fc);
  Multiply(fc, {nullptr, 0, p.taps, nullptr, nullptr, nullptr, count});
  Sync(true);  // all ranks have ended the launch before
  FinishContext(count);
  const Input ctx{c.Frame<const uint16_t>(p.at.ctx), int(s.hidden_slice()), nullptr,
                  c.Frame<const float>(p.at.ctx_squares), p.hidden_norm, nullptr, count};
  const auto put = [&](int i) {  // keys of layer i, whose sums come behind those of the layers before it
    const int64_t rows = 2 * s.kv_rows();
    if (threadIdx.x == 0) {
      PutGemm(&keys, p.layer[i].dense + DraftDenseLayout(s).qkv, DraftDenseLayout(s).bytes, s.hidden, s.qkv_rows(),
              s.q_rows(), rows, p.slices, c.Frame<float>(p.at.partial));
      keys.partial += i * (keys.Behind() - keys.partial);
    }
    __syncthreads();
  };
  put(0);
  EndExchange(keys);
#pragma unroll 1
  for (int i = 0; i < p.layers; ++i) {
    if (i) put(i), Start(&keys);
    Multiply(keys, ctx);
  }
  Sync(false);
  if (count)
#pragma unroll 1
    for (int i = 0; i < p.layers; ++i, __syncthreads()) {
      put(i);
      FinishKeys(keys, i, start, count);
    }
  End(c);
}

__global__ void __launch_bounds__(kThreads, 1) Draft(const __grid_constant__ DraftParams params) { RunDraft(params); }
__global__ void __launch_bounds__(kThreads, 1) Commit(const __grid_constant__ CommitParams params) {
  RunCommit(params);
}

}  // namespace musejax::draft

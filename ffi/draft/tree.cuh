// From a lattice of candidates to a tree of guesses: cpu/draft.h DraftTree by one warp, the same bits.
#pragma once

#include "common/math.h"
#include "draft/context.cuh"
#include "draft/draft.h"

namespace musejax::draft {

inline constexpr float kClosed = -1e30f;  // of a child that cannot be taken; what is not above half of it, too

struct Node {
  int token, parent, depth, ancestors;
  float cum;
};

// Scores of the children of a node at `depth` that is candidate `rank` there: lane i has child i.
__device__ inline float ChildOf(const TreeParams& p, int depth, int rank, float cum) {
  const int lane = int(threadIdx.x), row = Min(depth, p.positions - 1);
  const bool there = lane < p.candidates;
  const float x = there ? p.scores[(row * p.candidates + rank) * p.candidates + lane] / p.tau : -INFINITY;
  float largest = x;
  for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, i));
  const float term = Exp(x - largest);
  float sum = 0.0f;
  for (int i = 0; i < p.candidates; ++i) sum += __shfl_sync(kAllLanes, term, i);
  const float logprob = (x - largest) - Log(sum) + p.coverage[row];
  const float value = there && logprob > kClosed / 2 ? logprob : kClosed;  // NaN and -inf are closed, too
  int ahead = 0;
  for (int i = 0; i < p.candidates; ++i) {
    const float other = __shfl_sync(kAllLanes, value, i);
    ahead += other > value || (other == value && i < lane);
  }
  return there && ahead < p.width && value > kClosed / 2 && depth < p.positions ? cum + value : kClosed;
}

// The best open child of nodes begin .. end - 1, of equals the first: its place in `open`. In all lanes.
__device__ inline int BestOpen(const float* open, int begin, int end, float* value) {
  float best = -INFINITY;
  int at = 0x7FFFFFFF;
  for (int i = begin + int(threadIdx.x); i < end; i += 32)
    if (open[i] > best) best = open[i], at = i;
  for (int x = 16; x; x /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, best, x);
    const int place = __shfl_xor_sync(kAllLanes, at, x);
    if (other > best || (other == best && place < at)) best = other, at = place;
  }
  *value = best;
  return at;
}

__device__ inline void RunTree(const TreeParams& p, Node* nodes, float* open) {
  const int lane = int(threadIdx.x), count = p.candidates, spine = Min(p.spine, p.positions);
  if (lane == 0) nodes[0] = {*p.anchor, -1, 0, 1, 0.0f};
  const float first = ChildOf(p, 0, 0, 0.0f);
  if (lane < count) open[lane] = first;
  __syncwarp();
  for (int n = 1; n < p.nodes; ++n) {
    float cum;
    int best = BestOpen(open, (n - 1) * count, n * count, &cum);
    if (!(n <= spine && cum > kClosed / 2)) best = BestOpen(open, 0, n * count, &cum);
    const bool found = cum > kClosed / 2;
    const int parent = best / count, rank = best % count, depth = nodes[parent].depth + 1;
    float child = ChildOf(p, depth, rank, cum);
    if (!found) child = kClosed;
    __syncwarp();
    if (lane == 0) {
      open[best] = kClosed;
      nodes[n] = found ? Node{p.tokens[(depth - 1) * count + rank], parent, depth,
                              nodes[parent].ancestors | int(1u << n), cum}
                       : Node{0, -1, 0, int(1u << n), 0.0f};
    }
    if (lane < count) open[n * count + lane] = child;
    __syncwarp();
  }
  for (int i = lane; i < p.nodes; i += 32) {
    p.out_tokens[i] = nodes[i].token, p.parents[i] = nodes[i].parent, p.depth[i] = nodes[i].depth;
    p.ancestors[i] = nodes[i].ancestors, p.cum[i] = nodes[i].cum;
  }
}

__global__ void __launch_bounds__(32, 1) Tree(const __grid_constant__ TreeParams params) {
  __shared__ Node nodes[kMaxNodes];
  __shared__ float open[kMaxNodes * 32];
  RunTree(params, nodes, open);
}

}  // namespace musejax::draft

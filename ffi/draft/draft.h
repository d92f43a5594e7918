// Host side of a drafter's kernels: their workspaces and their launches.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "common/draft_model.h"

namespace musejax::draft {

struct DraftParams;  // context.cuh
struct CommitParams;

// Why the kernels cannot run a drafter of these sizes; empty if they can.
const char* Refusal(const DraftModel& model, int64_t layers);

// What launches need beside their operands; one per sizes, slots and rank, kept for the life of the process. Frames are
// memory of their device in which the kernels of the other ranks write.
struct Workspace {
  uint8_t* frames;
  void* passed;  // comm::Passed [blocks]
  uint32_t *abort, *budget;
  int64_t bytes;  // of frames
  int device, blocks;
};
// Workspaces of all ranks, one a device (`devices`: ordinals in the order of the ranks, `slices` slices each). Those of
// several devices Connect makes, before the first launch; that of one is made on first use, not while a graph is
// captured.
// Throws std::runtime_error with the CUDA error, or if the devices are not connected.
const std::vector<Workspace>& WorkspacesOf(const DraftModel& model, int64_t slices, int64_t slots,
                                           const std::vector<int>& devices);
// Makes the workspaces of several devices, whose kernels may write each other's memory from then on.
// Throws std::invalid_argument or std::runtime_error.
void Connect(const DraftModel& model, int64_t slots, const std::vector<int>& devices);

cudaError_t LaunchDraft(const DraftParams& params, int blocks, cudaStream_t stream);
cudaError_t LaunchCommit(const CommitParams& params, int blocks, cudaStream_t stream);

// As layer::ResetAfterError and layer::WriteBudgets.
cudaError_t ResetAfterError();
cudaError_t WriteBudgets();

// ---- tree.cu ----

// A tree of `nodes` nodes from a lattice of `positions` positions; see cpu/draft.h DraftTree.
struct TreeParams {
  const int32_t *anchor, *tokens;
  const float *scores, *coverage;
  int positions, candidates, nodes, width, spine;
  float tau;
  int32_t *out_tokens, *parents, *depth, *ancestors;
  float* cum;
};
inline constexpr int kMaxNodes = 32;
cudaError_t LaunchTree(const TreeParams& params, cudaStream_t stream);

}  // namespace musejax::draft

// What kernels report of a wait that did not end, and how long a wait may take: of all kernels of this process.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace musejax::comm {

// Filled by the first warp whose wait expired; in host memory mapped to all devices.
struct ErrorBlock {
  uint32_t set;  // 0: no error; 1: claimed; 2: the rest is written
  int32_t rank, block, warp, layer, phase;
  uint32_t wanted, seen;
};
ErrorBlock* Errors();

// Numbers of phases in error reports: those of the layer kernel from 0, those of a drafter's from kDraftPhases; and of
// a launch that was refused for the state it was given.
inline constexpr int kDraftPhases = 10, kRefused = -1;

// Text of a reported error, empty if there is none. It stays until ResetAfterError of every kernel's header and
// ClearError; until then the state of a pass that failed means nothing.
std::string ErrorText();

// Whether somebody has given up on this device, in its memory, for all kernels there: launches of layers are refused
// from then on, until ClearError. Made on first use (not while a graph is captured).
// Throws std::runtime_error with the CUDA error.
uint32_t* AbortFlag(int device);

// The last step after an error, when the kernels have stopped and their workspaces are clear: forgets it on all devices.
cudaError_t ClearError();

// How long a wait of launches from now on may take, in nanoseconds (2 s at first); workspaces take it over with their
// kernel's WriteBudgets.
void SetSpinBudget(uint64_t ns);
uint64_t SpinBudget();

}  // namespace musejax::comm

// A phase of a layer as a launch of its own: what it is given, and its launch. Targets of the same names on the CPU:
// bindings/phases_cpu.cc.
#pragma once

#include "layer/context.cuh"
#include "layer/layer.h"

namespace musejax::layer {

enum class PhaseLaunch : int {
  kAttnIn,
  kAttention,
  kAttnOut,
  kPool,
  kExpertsUp,
  kExpertsDown,
  kCombine,
  kCombinePartials,
  kCombineGathered,
  kUnpool,
  kAddFfn
};

// One layer's arrays are layers[0]. Of the fields below a phase has those that its target has; arrays with a slice axis
// have the slices of this device as results, and all of them as operands.
struct PhaseParams : PassParams {
  PhaseLaunch phase;
  const uint16_t* in;  // o, a, p, c, y, partials, m or f
  uint16_t* out;       // o, a, p, c, y, partials, m or f
  const float *scores, *weights;
  float *scores_out, *weights_out;
  const int32_t *chosen, *begin;  // expert ids [rows][k]; the first expert here
  int experts, groups;            // experts here, of which layers[0].experts is made; owner groups here
};

// Launches a phase for a rank of S::kSlicesHere slices; made for each size in a file of its own, phases_*.cu.
template <typename S>
cudaError_t LaunchPhase(const PhaseParams& params, int blocks, cudaStream_t stream);

}  // namespace musejax::layer

// MUSEJAX_PHASES_INSTANCE(sizes...): compiles the phases as launches of their own for one set of sizes, those of
// an instance_*.cu. A size that lacks one of the two does not link.
#pragma once

#include "layer/phases.cuh"

namespace musejax::layer {

template <typename S>
cudaError_t LaunchPhase(const PhaseParams& params, int blocks, cudaStream_t stream) {
  static_assert(sizeof(PhaseParams) <= 32764, "kernel parameters");
  // Of the current device, so at every launch.
  const cudaError_t ready =
      cudaFuncSetAttribute(RunPhase<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared<S>)));
  if (ready != cudaSuccess) return ready;
  RunPhase<S><<<blocks, kThreads, sizeof(Shared<S>), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace musejax::layer

#define MUSEJAX_PHASES_INSTANCE(...)                                                    \
  template cudaError_t musejax::layer::LaunchPhase<musejax::layer::Sizes<__VA_ARGS__>>( \
      const musejax::layer::PhaseParams& params, int blocks, cudaStream_t stream);

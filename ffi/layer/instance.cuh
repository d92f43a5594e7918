// Compile the layer kernel for one set of sizes; layer.cu lists them.
//
//   MUSEJAX_LAYER_INSTANCE(name, sizes...)  with its phases as launches of their own, of a phases_*.cu
//   MUSEJAX_RANK_INSTANCE(name, sizes...)   without
#pragma once

#include "layer/layer.cuh"
#include "layer/layer.h"
#include "layer/phases.h"

namespace musejax::layer {

template <typename S>
int64_t FrameBytes(int max_units) {
  return Frames<S>::Bytes(max_units);
}

template <typename S>
int MinBlocks() {
  constexpr int kOwned = kResidualFloats<S> / (kRows * S::kHiddenBlock);  // blocks of S that fit in one SM
  return (S::kHiddenBlocks + kOwned - 1) / kOwned;
}

template <typename S>
cudaError_t Launch(const PassParams& pass, int blocks, cudaStream_t stream) {
  static_assert(sizeof(Shared<S>) <= 232448, "shared memory of an SM");
  static_assert(sizeof(PassParams) <= 32764, "kernel parameters");
  // Of the current device, so at every launch.
  const cudaError_t ready =
      cudaFuncSetAttribute(Layers<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared<S>)));
  if (ready != cudaSuccess) return ready;
  Layers<S><<<blocks, kThreads, sizeof(Shared<S>), stream>>>(pass);
  return cudaGetLastError();
}

template <typename S>
Instance MakeInstance(decltype(Instance::launch_phase) launch_phase) {
  return {S::kHidden, S::kHeads,      S::kKvHeads,    S::kHeadDim,   S::kMoe,   S::kInner,    S::kExperts,
          S::kTopK,   S::kSlicesHere, kDenseUnits<S>, FrameBytes<S>, Launch<S>, launch_phase, MinBlocks<S>};
}

}  // namespace musejax::layer

#define MUSEJAX_LAYER_INSTANCE(name, ...)                                                       \
  namespace musejax::layer {                                                                    \
  Instance name() { return MakeInstance<Sizes<__VA_ARGS__>>(LaunchPhase<Sizes<__VA_ARGS__>>); } \
  }
#define MUSEJAX_RANK_INSTANCE(name, ...)                                \
  namespace musejax::layer {                                            \
  Instance name() { return MakeInstance<Sizes<__VA_ARGS__>>(nullptr); } \
  }

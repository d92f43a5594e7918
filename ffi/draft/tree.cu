#include "draft/draft.h"
#include "draft/tree.cuh"

namespace musejax::draft {

cudaError_t LaunchTree(const TreeParams& params, cudaStream_t stream) {
  Tree<<<1, 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace musejax::draft

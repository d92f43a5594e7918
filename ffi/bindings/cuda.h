// What handlers of CUDA targets share: copies on the stream, and the error of a launch.
#pragma once

#include <cuda_runtime.h>

#include "bindings/operands.h"

namespace musejax {

// For Operands: buffers that XLA did not alias are copied in stream order, which a graph records.
inline Operands::Copy CopyOn(cudaStream_t stream) {
  return [stream](void* to, const void* from, size_t bytes) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream) == cudaSuccess;
  };
}

// Success, or the error of an operation's launches.
inline ffi::Error Launched(const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(operation) + ": launch failed: " + cudaGetErrorString(error));
}

}  // namespace musejax

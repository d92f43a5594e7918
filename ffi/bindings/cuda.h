// What handlers of CUDA targets share: copies on the stream, and the error of a launch.
#pragma once

#include <cuda_runtime.h>

#include "bindings/operands.h"
#include "comm/errors.h"

namespace musejax {

// For Operands: buffers that XLA did not alias are copied in stream order, which a graph records.
inline Operands::Copy CopyOn(cudaStream_t stream) {
  return [stream](void* to, const void* from, size_t bytes) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream) == cudaSuccess;
  };
}

// What kernels of this process have reported, for a call on these devices to fail with; empty if there are several: one
// of them would stop, and the others wait for it in their next collective. Kernels refuse there what is to be refused.
inline std::string ReportedBefore(ffi::Span<const int64_t> devices) {
  return devices.size() > 1 ? "" : comm::ErrorText();
}

// Success, or the error of an operation's launches.
inline ffi::Error Launched(const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(operation) + ": launch failed: " + cudaGetErrorString(error));
}

}  // namespace musejax

// Target musejax_build_info on CUDA: () -> u8[kBuildInfoBytes], the text of common/build_info.h as
// compiled into the device code, so that an answer proves that this GPU found code for itself.
#include <cuda_runtime.h>

#include "bindings/ffi.h"
#include "common/build_info.h"

namespace musejax {
namespace {

__device__ const char kText[kBuildInfoBytes] = MUSEJAX_BUILD_INFO(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);

__global__ void BuildInfoKernel(uint8_t* out) {
  for (int i = threadIdx.x; i < kBuildInfoBytes; i += blockDim.x) out[i] = static_cast<uint8_t>(kText[i]);
}

ffi::Error BuildInfo(cudaStream_t stream, ffi::ResultBuffer<ffi::U8> out) {
  if (ffi::Error error = ExpectShape("build_info", "out", *out, {kBuildInfoBytes}); error.failure()) return error;
  BuildInfoKernel<<<1, 128, 0, stream>>>(out->typed_data());
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    return ffi::Error::Internal(std::string("build_info: launch failed: ") + cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace musejax

XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxBuildInfoCuda, musejax::BuildInfo,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

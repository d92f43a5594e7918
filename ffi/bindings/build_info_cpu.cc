// Target musejax_build_info on the CPU: () -> u8[kBuildInfoBytes], the text of common/build_info.h.
#include <cstring>

#include "bindings/ffi.h"
#include "common/build_info.h"

namespace musejax {
namespace {

// The array has the result's size, so that the literal's end is padded with zeros; a longer literal
// does not compile.
constexpr char kText[kBuildInfoBytes] = MUSEJAX_BUILD_INFO(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);

ffi::Error BuildInfo(ffi::ResultBuffer<ffi::U8> out) {
  if (ffi::Error error = ExpectShape("build_info", "out", *out, {kBuildInfoBytes}); error.failure()) return error;
  std::memcpy(out->typed_data(), kText, kBuildInfoBytes);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace musejax

XLA_FFI_DEFINE_HANDLER_SYMBOL(MusejaxBuildInfoCpu, musejax::BuildInfo,
                              xla::ffi::Ffi::Bind().Ret<xla::ffi::Buffer<xla::ffi::U8>>());

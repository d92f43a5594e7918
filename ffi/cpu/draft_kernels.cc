// Which instruction set of the drafter's kernels runs.
#include "cpu/draft_kernels.h"

#include <string_view>

#include "cpu/kernels.h"

namespace musejax {

namespace scalar {
extern const DraftKernels kDraftKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const DraftKernels kDraftKernels;
}
namespace avx512 {
extern const DraftKernels kDraftKernels;
}
#endif

const DraftKernels& ActiveDraftKernels() {
#if defined(__x86_64__)
  const std::string_view name = ActiveKernels().name;
  if (name == "avx512") return avx512::kDraftKernels;
  if (name == "avx2") return avx2::kDraftKernels;
#endif
  return scalar::kDraftKernels;
}

}  // namespace musejax

#include "comm/errors.h"

#include <cuda_runtime.h>

#include <new>
#include <stdexcept>

#include "common/ptx.cuh"

namespace musejax::comm {
namespace {

uint64_t spin_budget_ns = ptx::kSpinBudgetNs;

// In the order of layer::Phase (layer/layer.cuh), then of draft::Phase (draft/context.cuh).
constexpr const char* kPhases[] = {"heads",    "attention",   "attention output", "pooler and router",
                                   "routing",  "expert up",   "expert down",      "combine",
                                   "unpooler", "weight stream", "draft block",    "draft candidates",
                                   "draft context"};

}  // namespace

ErrorBlock* Errors() {
  static ErrorBlock* const block = [] {
    void* memory = nullptr;
    const cudaError_t error =
        cudaHostAlloc(&memory, sizeof(ErrorBlock), cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess)
      throw std::runtime_error(std::string("errors: cudaHostAlloc failed: ") + cudaGetErrorString(error));
    return new (memory) ErrorBlock{};
  }();
  return block;
}

std::string ErrorText() {
  const volatile ErrorBlock* e = Errors();
  if (e->set != 2) return "";
  const int phase = e->phase;
  return std::string(phase < kDraftPhases ? "layers" : "draft") + ": a wait did not end within " +
         std::to_string(SpinBudget() / 1000000) + " ms: rank " + std::to_string(e->rank) + ", SM " +
         std::to_string(e->block) + ", warp " + std::to_string(e->warp) + ", layer " + std::to_string(e->layer) +
         ", phase " + kPhases[phase % (sizeof(kPhases) / sizeof(kPhases[0]))] + ", wanted " +
         std::to_string(e->wanted) + ", saw " + std::to_string(e->seen) +
         "; the state of this pass is lost, start anew from the prompt";
}

void ClearError() { Errors()->set = 0; }

void SetSpinBudget(uint64_t ns) { spin_budget_ns = ns; }
uint64_t SpinBudget() { return spin_budget_ns; }

}  // namespace musejax::comm

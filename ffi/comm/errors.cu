#include "comm/errors.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

#include "comm/current_device.h"
#include "common/check.h"
#include "common/pass_state.h"
#include "common/ptx.cuh"

namespace musejax::comm {
namespace {

uint64_t spin_budget_ns = ptx::kSpinBudgetNs;

std::mutex mutex;
std::map<int, uint32_t*> abort_flags;  // by device

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
  if (phase == kRefused) return Mismatch("layers", "state[2]", kNotGivenUp, std::to_string(kGaveUp) + kGaveUpText);
  return std::string(phase < kDraftPhases ? "layers" : "draft") + ": a wait did not end within " +
         std::to_string(SpinBudget() / 1000000) + " ms: rank " + std::to_string(e->rank) + ", SM " +
         std::to_string(e->block) + ", warp " + std::to_string(e->warp) + ", layer " + std::to_string(e->layer) +
         ", phase " + kPhases[phase % (sizeof(kPhases) / sizeof(kPhases[0]))] + ", wanted " +
         std::to_string(e->wanted) + ", saw " + std::to_string(e->seen) +
         "; the state of this pass is lost, start anew from the prompt";
}

uint32_t* AbortFlag(int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (abort_flags.count(device)) return abort_flags[device];
  const CurrentDevice before;
  uint32_t* flag = nullptr;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaMalloc(&flag, 4);
  if (error == cudaSuccess) error = cudaMemset(flag, 0, 4);
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("errors: cudaMalloc failed: ") + cudaGetErrorString(error));
  return abort_flags[device] = flag;
}

cudaError_t ClearError() {
  const CurrentDevice before;
  const std::lock_guard<std::mutex> lock(mutex);
  cudaError_t error = cudaSuccess;
  for (const auto& [device, flag] : abort_flags) {
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error == cudaSuccess) error = cudaMemset(flag, 0, 4);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
  }
  Errors()->set = 0;
  return error;
}

void SetSpinBudget(uint64_t ns) { spin_budget_ns = ns; }
uint64_t SpinBudget() { return spin_budget_ns; }

}  // namespace musejax::comm

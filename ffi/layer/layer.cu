#include <array>
#include <map>
#include <mutex>
#include <stdexcept>

#include "layer/attention_units.h"
#include "layer/context.cuh"
#include "layer/layer.h"

namespace musejax::layer {

Instance Mini();
Instance Nano();
Instance Muse8();

const std::vector<Instance>& Instances() {
  static const std::vector<Instance> all = {Mini(), Nano(), Muse8()};
  return all;
}

const Instance* FindInstance(const Shape& s, int64_t top_k, int64_t slices) {
  for (const Instance& i : Instances())
    if (i.hidden == s.hidden && i.heads == s.heads && i.kv_heads == s.kv_heads && i.head_dim == s.head_dim &&
        i.moe_hidden == s.moe_hidden && i.moe_inner == s.moe_inner && i.experts == s.experts && i.top_k == top_k &&
        i.slices == slices)
      return &i;
  return nullptr;
}

namespace {

std::mutex mutex;
std::map<std::array<int64_t, 3>, Workspace> workspaces;  // (device, instance, max_units)
uint64_t spin_budget_ns = ptx::kSpinBudgetNs;

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("layers: ") + what + " failed: " + cudaGetErrorString(error));
}

size_t FrameBytes(const Instance& instance, int max_units) { return 2 * size_t(instance.frame_bytes(max_units)); }

cudaError_t WriteBudget(const Workspace& w) {
  const uint32_t budget = uint32_t(spin_budget_ns >> 10);
  return cudaMemcpy(w.budget, &budget, 4, cudaMemcpyHostToDevice);
}

const Workspace* newest = nullptr;
size_t StampBytes(const Workspace& w) { return size_t(8) * w.blocks * kWarps * kMaxLayers * kStamps; }

}  // namespace

std::vector<uint64_t> Stamps() {
  if (!newest) return {};
  std::vector<uint64_t> out(StampBytes(*newest) / 8);
  Check(cudaMemcpy(out.data(), newest->stamps, StampBytes(*newest), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return out;
}

const Workspace& WorkspaceOf(const Instance& instance, int64_t slots) {
  const int64_t max_units = MaxUnits(int(slots));
  int device = 0;
  Check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, fresh] = workspaces.try_emplace({device, &instance - Instances().data(), max_units});
  Workspace& w = at->second;
  if (!fresh) return w;
  try {
    w.max_units = int(max_units);
    Check(cudaDeviceGetAttribute(&w.blocks, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    if (w.blocks < instance.min_blocks())
      throw std::runtime_error("layers: expected a GPU with at least " + std::to_string(instance.min_blocks()) +
                               " multiprocessors, got " + std::to_string(w.blocks));
    Check(cudaMalloc(&w.frames, FrameBytes(instance, w.max_units)), "cudaMalloc");
    Check(cudaMalloc(&w.epochs, 4 * (w.blocks + 2)), "cudaMalloc");
    w.abort = w.epochs + w.blocks, w.budget = w.abort + 1;
    Check(cudaMemset(w.frames, 0, FrameBytes(instance, w.max_units)), "cudaMemset");
    Check(cudaMemset(w.epochs, 0, 4 * (w.blocks + 1)), "cudaMemset");
    Check(WriteBudget(w), "cudaMemcpy");
#if defined(MUSEJAX_LAYER_STAMPS)
    Check(cudaMalloc(&w.stamps, StampBytes(w)), "cudaMalloc");
    newest = &w;
#endif
    Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  } catch (...) {
    workspaces.erase(at);
    throw;
  }
  return w;
}

ErrorBlock* Errors() {
  static ErrorBlock* const block = [] {
    void* memory = nullptr;
    Check(cudaHostAlloc(&memory, sizeof(ErrorBlock), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    return new (memory) ErrorBlock{};
  }();
  return block;
}

std::string ErrorText() {
  static const char* const kPhases[] = {"heads",    "attention",    "attention output", "pooler and router",
                                        "routing",  "expert up",    "expert down",      "combine",
                                        "unpooler", "weight stream"};
  const volatile ErrorBlock* e = Errors();
  if (e->set != 2) return "";
  return "layers: a wait did not end within " + std::to_string(SpinBudget() / 1000000) + " ms: rank " +
         std::to_string(e->rank) + ", SM " + std::to_string(e->block) + ", warp " + std::to_string(e->warp) +
         ", layer " + std::to_string(e->layer) + ", phase " + kPhases[e->phase % 10] + ", wanted " +
         std::to_string(e->wanted) + ", saw " + std::to_string(e->seen) +
         "; the state of this pass is lost, start anew from the prompt";
}

cudaError_t ResetAfterError() {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  for (auto& [key, w] : workspaces) {
    if (error != cudaSuccess || key[0] != device) continue;
    error = cudaMemset(w.frames, 0, FrameBytes(Instances()[key[1]], w.max_units));
    if (error == cudaSuccess) error = cudaMemset(w.epochs, 0, 4 * (w.blocks + 1));
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  Errors()->set = 0;
  return error;
}

cudaError_t SetSpinBudget(uint64_t ns) {
  const std::lock_guard<std::mutex> lock(mutex);
  spin_budget_ns = ns;
  for (const auto& [key, w] : workspaces)
    if (const cudaError_t error = WriteBudget(w); error != cudaSuccess) return error;
  return cudaSuccess;
}
uint64_t SpinBudget() { return spin_budget_ns; }

}  // namespace musejax::layer

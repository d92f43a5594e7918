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
std::map<std::array<int64_t, 3>, Workspace> workspaces;            // (device, instance, max_units)
std::map<std::array<int64_t, 2>, std::vector<int32_t>> schedules;  // (instance, blocks)
uint64_t spin_budget_ns = ptx::kSpinBudgetNs;

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("layers: ") + what + " failed: " + cudaGetErrorString(error));
}

cudaError_t WriteSchedule(const Workspace& w, const std::vector<int32_t>& spans) {
  return cudaMemcpy(w.schedule, spans.data(), 4 * spans.size(), cudaMemcpyHostToDevice);
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

void SetSchedule(int instance, int blocks, const std::vector<int32_t>& spans) {
  const auto require = [](bool fits, const std::string& what, const std::string& expected, const std::string& got) {
    if (!fits)
      throw std::invalid_argument("set_schedule: expected " + expected + ", got " + got + " (argument " + what + ")");
  };
  const auto text = [](int64_t x) { return std::to_string(x); };
  const int64_t count = int64_t(Instances().size()), numbers = int64_t(spans.size());
  require(instance >= 0 && instance < count, "instance", "0 to " + text(count - 1), text(instance));
  require(blocks >= 1 && numbers == int64_t(2) * kDenseGemms * blocks, "spans",
          text(2 * kDenseGemms) + " numbers for each of " + text(blocks) + " SMs", text(numbers));
  for (int64_t i = 0; i < numbers; i += 2) {
    const int64_t gemm = i / 2 % kDenseGemms, units = Instances()[instance].dense_units[gemm];
    require(0 <= spans[i] && spans[i] <= spans[i + 1] && spans[i + 1] <= units, "spans",
            "0 <= begin <= end <= " + text(units) + " for GEMM " + text(gemm) + " on SM " + text(i / 2 / kDenseGemms),
            text(spans[i]) + " and " + text(spans[i + 1]));
  }
  const std::lock_guard<std::mutex> lock(mutex);
  schedules[{instance, blocks}] = spans;
  for (const auto& [key, w] : workspaces)
    if (key[1] == instance && w.blocks == blocks) Check(WriteSchedule(w, spans), "cudaMemcpy");
}

std::vector<int> Multiprocessors() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) return {};
  std::vector<int> out(devices);
  for (int i = 0; i < devices; ++i)
    Check(cudaDeviceGetAttribute(&out[i], cudaDevAttrMultiProcessorCount, i), "cudaDeviceGetAttribute");
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
    const auto schedule = schedules.find({at->first[1], w.blocks});
    if (schedule == schedules.end())
      throw std::runtime_error("layers: expected a schedule of dense units for hidden " +
                               std::to_string(instance.hidden) + ", top_k " + std::to_string(instance.top_k) + ", " +
                               std::to_string(instance.slices) + " slices on " + std::to_string(w.blocks) +
                               " multiprocessors, got none: set_schedule registers one, musejax.ffi.library calls it");
    Check(cudaMalloc(&w.schedule, 4 * schedule->second.size()), "cudaMalloc");
    Check(cudaMalloc(&w.frames, FrameBytes(instance, w.max_units)), "cudaMalloc");
    Check(cudaMalloc(&w.epochs, 4 * (w.blocks + 2)), "cudaMalloc");
    w.abort = w.epochs + w.blocks, w.budget = w.abort + 1;
    Check(cudaMemset(w.frames, 0, FrameBytes(instance, w.max_units)), "cudaMemset");
    Check(cudaMemset(w.epochs, 0, 4 * (w.blocks + 1)), "cudaMemset");
    Check(WriteBudget(w), "cudaMemcpy");
    Check(WriteSchedule(w, schedule->second), "cudaMemcpy");
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

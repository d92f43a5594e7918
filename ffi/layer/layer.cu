#include <array>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "comm/current_device.h"
#include "comm/errors.h"
#include "comm/peers.h"
#include "layer/attention_units.h"
#include "layer/context.cuh"
#include "layer/layer.h"

namespace musejax::layer {

Instance Mini();
Instance Mini2();
Instance Mini4();
Instance Mini8();
Instance Nano();
Instance Nano2();
Instance Nano4();
Instance Nano8();
Instance Muse1();
Instance Muse2();
Instance Muse4();
Instance Muse8();

const std::vector<Instance>& Instances() {
  static const std::vector<Instance> all = {Mini(),  Mini2(), Mini4(), Mini8(), Nano(),  Nano2(),
                                            Nano4(), Nano8(), Muse1(), Muse2(), Muse4(), Muse8()};
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
struct Key {
  int instance, max_units;
  Devices devices;
  bool operator<(const Key& other) const {
    return std::tie(instance, max_units, devices) < std::tie(other.instance, other.max_units, other.devices);
  }
};
std::map<Key, std::vector<Workspace>> workspaces;  // of all ranks
std::map<std::array<int64_t, 2>, std::vector<int32_t>> schedules;  // (instance, blocks)

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("layers: ") + what + " failed: " + cudaGetErrorString(error));
}

cudaError_t WriteSchedule(const Workspace& w, const std::vector<int32_t>& spans) {
  return cudaMemcpy(w.schedule, spans.data(), 4 * spans.size(), cudaMemcpyHostToDevice);
}

size_t FrameBytes(const Instance& instance, int max_units) { return 2 * size_t(instance.frame_bytes(max_units)); }

cudaError_t WriteBudget(const Workspace& w) {
  const uint32_t budget = uint32_t(comm::SpinBudget() >> 10);
  return cudaMemcpy(w.budget, &budget, 4, cudaMemcpyHostToDevice);
}

const Workspace* newest = nullptr;
size_t StampBytes(const Workspace& w) { return size_t(8) * w.blocks * kWarps * kMaxLayers * kStamps; }

Workspace MakeWorkspace(const Instance& instance, int max_units, int device) {
  Workspace w{};
  w.device = device, w.max_units = max_units;
  Check(cudaSetDevice(device), "cudaSetDevice");
  Check(cudaDeviceGetAttribute(&w.blocks, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  if (w.blocks < instance.min_blocks())
    throw std::runtime_error("layers: expected a GPU with at least " + std::to_string(instance.min_blocks()) +
                             " multiprocessors, got " + std::to_string(w.blocks));
  const auto schedule = schedules.find({&instance - Instances().data(), w.blocks});
  if (schedule == schedules.end())
    throw std::runtime_error("layers: expected a schedule of dense units for hidden " +
                             std::to_string(instance.hidden) + ", top_k " + std::to_string(instance.top_k) + ", " +
                             std::to_string(instance.slices) + " slices on " + std::to_string(w.blocks) +
                             " multiprocessors, got none: set_schedule registers one, musejax.ffi.library calls it");
  Check(cudaMalloc(&w.schedule, 4 * schedule->second.size()), "cudaMalloc");
  Check(cudaMalloc(&w.frames, FrameBytes(instance, w.max_units)), "cudaMalloc");
  Check(cudaMalloc(&w.epochs, 4 * (w.blocks + 1)), "cudaMalloc");
  w.budget = w.epochs + w.blocks, w.abort = comm::AbortFlag(device);
  Check(cudaMemset(w.frames, 0, FrameBytes(instance, w.max_units)), "cudaMemset");
  Check(cudaMemset(w.epochs, 0, 4 * w.blocks), "cudaMemset");
  Check(WriteBudget(w), "cudaMemcpy");
  Check(WriteSchedule(w, schedule->second), "cudaMemcpy");
#if defined(MUSEJAX_LAYER_STAMPS)
  Check(cudaMalloc(&w.stamps, StampBytes(w)), "cudaMalloc");
#endif
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return w;
}

const std::vector<Workspace>& MakeWorkspaces(const Key& key) {
  const comm::CurrentDevice before;
  std::vector<Workspace> made;
  for (const int device : key.devices)
    made.push_back(MakeWorkspace(Instances()[key.instance], key.max_units, device));
  const std::vector<Workspace>& kept = workspaces[key] = std::move(made);
  newest = &kept.front();
  return kept;
}

// call(workspace, instance) for all there are.
template <typename Call>
void ForWorkspaces(const Call& call) {
  for (const auto& [key, ranks] : workspaces)
    for (const Workspace& w : ranks) call(w, key.instance);
}

}  // namespace

std::vector<uint64_t> Stamps() {
  if (!newest || !newest->stamps) return {};
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
  ForWorkspaces([&](const Workspace& w, int of) {
    if (of == instance && w.blocks == blocks) Check(WriteSchedule(w, spans), "cudaMemcpy");
  });
}

std::vector<int> Multiprocessors() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) return {};
  std::vector<int> out(devices);
  for (int i = 0; i < devices; ++i)
    Check(cudaDeviceGetAttribute(&out[i], cudaDevAttrMultiProcessorCount, i), "cudaDeviceGetAttribute");
  return out;
}

const std::vector<Workspace>& WorkspacesOf(const Instance& instance, int64_t slots, const Devices& devices) {
  const Key key{int(&instance - Instances().data()), MaxUnits(int(slots)), devices};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = workspaces.find(key);
  if (found != workspaces.end()) return found->second;
  if (devices.size() > 1)
    throw std::runtime_error("layers: expected devices that are connected for caches of " + std::to_string(slots) +
                             " slots, got others: connect does it, musejax.ffi.connect calls it");
  return MakeWorkspaces(key);
}

void Connect(int instance, int64_t slots, const Devices& devices) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument("connect: expected " + what); };
  if (instance < 0 || instance >= int(Instances().size())) refuse("a number of an instance (argument instance)");
  if (slots < 1) refuse("at least one slot (argument slots)");
  comm::RequirePeers("connect", devices, kSlices / Instances()[instance].slices);
  const Key key{instance, MaxUnits(int(slots)), devices};
  const std::lock_guard<std::mutex> lock(mutex);
  if (workspaces.count(key)) return;
  comm::AllowPeers(devices);
  MakeWorkspaces(key);
}

int ShiftEpochs(int instance, int device, uint32_t by) {
  if (instance < 0 || instance >= int(Instances().size()))
    throw std::invalid_argument("shift_epochs: expected a number of an instance, got " + std::to_string(instance) +
                                " (argument instance)");
  const std::lock_guard<std::mutex> lock(mutex);
  int shifted = 0;
  ForWorkspaces([&](const Workspace& w, int of) {
    if (of != instance || w.device != device) return;
    std::vector<uint32_t> epochs(w.blocks);
    Check(cudaMemcpy(epochs.data(), w.epochs, 4 * epochs.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (uint32_t& epoch : epochs) epoch += by;
    Check(cudaMemcpy(w.epochs, epochs.data(), 4 * epochs.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
    ++shifted;
  });
  return shifted;
}

cudaError_t ResetAfterError() {
  const comm::CurrentDevice before;
  const std::lock_guard<std::mutex> lock(mutex);
  cudaError_t error = cudaSuccess;
  const auto then = [&](cudaError_t next) { error = error == cudaSuccess ? next : error; };
  // No rank starts again before all of them have stopped.
  ForWorkspaces([&](const Workspace& w, int) { then(cudaSetDevice(w.device)), then(cudaDeviceSynchronize()); });
  ForWorkspaces([&](const Workspace& w, int instance) {
    then(cudaSetDevice(w.device));
    then(cudaMemset(w.frames, 0, FrameBytes(Instances()[instance], w.max_units)));
    then(cudaMemset(w.epochs, 0, 4 * w.blocks));
    then(cudaDeviceSynchronize());
  });
  return error;
}

cudaError_t WriteBudgets() {
  const std::lock_guard<std::mutex> lock(mutex);
  cudaError_t error = cudaSuccess;
  ForWorkspaces([&](const Workspace& w, int) { error = error == cudaSuccess ? WriteBudget(w) : error; });
  return error;
}

}  // namespace musejax::layer

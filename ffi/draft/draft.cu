#include "draft/draft.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "comm/current_device.h"
#include "comm/errors.h"
#include "comm/peers.h"
#include "draft/draft.cuh"

namespace musejax::draft {
namespace {

std::mutex mutex;
using Key = std::vector<int64_t>;  // sizes, slices, slots, devices
std::map<Key, std::vector<Workspace>> workspaces;

Key KeyOf(const DraftModel& m, int64_t slices, int64_t slots, const std::vector<int>& devices) {
  const DraftShape& s = m.shape;
  Key key{s.hidden,      s.heads, s.kv_heads, s.head_dim, s.inner, s.taps,
          s.conv_groups, s.rank,  m.vocab,    slices,     slots};
  key.insert(key.end(), devices.begin(), devices.end());
  return key;
}

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("draft: ") + what + " failed: " + cudaGetErrorString(error));
}

cudaError_t WriteBudget(const Workspace& w) {
  const uint32_t budget = uint32_t(comm::SpinBudget() >> 10);
  return cudaMemcpy(w.budget, &budget, 4, cudaMemcpyHostToDevice);
}

cudaError_t Clear(const Workspace& w) {
  cudaError_t error = cudaSetDevice(w.device);
  if (error == cudaSuccess) error = cudaMemset(w.frames, 0, comm::kBarrierBytes);
  if (error == cudaSuccess) error = cudaMemset(w.passed, 0, w.blocks * sizeof(comm::Passed));
  return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}

// Also loads the kernels: where a rank waits for another whose kernel is still to come, loading could wait, too.
void Prepare() {
  for (const auto& [kernel, what] : {std::pair(reinterpret_cast<const void*>(Draft), "loading the draft kernel"),
                                     std::pair(reinterpret_cast<const void*>(Commit), "loading the commit kernel")})
    Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared))), what);
}

Workspace MakeWorkspace(const Frames& frames, int device) {
  Workspace w{};
  w.device = device, w.bytes = frames.bytes;
  Check(cudaSetDevice(device), "cudaSetDevice");
  Check(cudaDeviceGetAttribute(&w.blocks, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  Prepare();
  Check(cudaMalloc(&w.frames, w.bytes), "cudaMalloc");
  Check(cudaMalloc(&w.passed, w.blocks * sizeof(comm::Passed)), "cudaMalloc");
  Check(cudaMalloc(&w.budget, 4), "cudaMalloc");
  w.abort = comm::AbortFlag(device);
  Check(cudaMemset(w.frames, 0, w.bytes), "cudaMemset");  // rows that are not there are read, and taken out later
  Check(WriteBudget(w), "cudaMemcpy");
  Check(Clear(w), "cudaMemset");
  return w;
}

const std::vector<Workspace>& MakeWorkspaces(const DraftModel& m, int64_t slices, int64_t slots,
                                             const std::vector<int>& devices) {
  const comm::CurrentDevice before;
  const Frames frames(m, slices, slots);
  std::vector<Workspace> made;
  for (const int device : devices) made.push_back(MakeWorkspace(frames, device));
  return workspaces[KeyOf(m, slices, slots, devices)] = std::move(made);
}

template <typename Call>
cudaError_t ForWorkspaces(const Call& call) {
  cudaError_t error = cudaSuccess;
  for (const auto& [key, ranks] : workspaces)
    for (const Workspace& w : ranks)
      if (error == cudaSuccess) error = call(w);
  return error;
}

// Attributes are of the current device, so at every launch.
template <typename Params>
cudaError_t LaunchKernel(void (*kernel)(Params), const Params& params, int blocks, cudaStream_t stream) {
  const cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared)));
  if (ready != cudaSuccess) return ready;
  kernel<<<blocks, kThreads, sizeof(Shared), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

const char* Refusal(const DraftModel& m, int64_t layers) {
  if (layers < 1 || layers > kMaxLayers) return "1 to 16 layers";
  if (m.candidates > kMaxCandidates) return "at most 16 candidates of a position";
  if (m.shape.conv_groups && m.shape.hidden / m.shape.conv_groups % 2) return "convolution groups of even size";
  if (SegmentsOf(m) > kMaxSegments) return "a vocabulary of at most 524,288";
  return "";
}

const std::vector<Workspace>& WorkspacesOf(const DraftModel& m, int64_t slices, int64_t slots,
                                           const std::vector<int>& devices) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = workspaces.find(KeyOf(m, slices, slots, devices));
  if (found != workspaces.end()) return found->second;
  if (devices.size() > 1)
    throw std::runtime_error("draft: expected devices that are connected for rings of " + std::to_string(slots) +
                             " slots, got others: connect_draft does it, musejax.ffi.connect_draft calls it");
  return MakeWorkspaces(m, slices, slots, devices);
}

void Connect(const DraftModel& m, int64_t slots, const std::vector<int>& devices) {
  if (slots < 1) throw std::invalid_argument("connect_draft: expected at least one slot (argument slots)");
  comm::RequirePeers("connect_draft", devices, kSlices);
  const int64_t slices = kSlices / int64_t(devices.size());
  const std::lock_guard<std::mutex> lock(mutex);
  if (workspaces.count(KeyOf(m, slices, slots, devices))) return;
  comm::AllowPeers(devices);
  MakeWorkspaces(m, slices, slots, devices);
}

cudaError_t LaunchDraft(const DraftParams& params, int blocks, cudaStream_t stream) {
  return LaunchKernel(Draft, params, blocks, stream);
}
cudaError_t LaunchCommit(const CommitParams& params, int blocks, cudaStream_t stream) {
  return LaunchKernel(Commit, params, blocks, stream);
}

cudaError_t ResetAfterError() {
  const comm::CurrentDevice before;
  const std::lock_guard<std::mutex> lock(mutex);
  // No rank starts again before all of them have stopped.
  const cudaError_t stopped = ForWorkspaces([](const Workspace& w) {
    const cudaError_t error = cudaSetDevice(w.device);
    return error == cudaSuccess ? cudaDeviceSynchronize() : error;
  });
  return stopped == cudaSuccess ? ForWorkspaces(Clear) : stopped;
}

cudaError_t WriteBudgets() {
  const std::lock_guard<std::mutex> lock(mutex);
  return ForWorkspaces(WriteBudget);
}

}  // namespace musejax::draft

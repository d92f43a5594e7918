// The list of groups, and what they share on the host.
#include <cstdarg>
#include <cstdio>

#include "bench/limits.h"
#include "bench/measure.h"
#include "bench/random.cuh"
#include "common/check.h"

namespace musejax::bench {
namespace {

struct Group {
  const char* name;
  void (*measure)(Bench&);
};
constexpr Group kGroups[] = {
    {"hbm", MeasureHbm},         {"l2", MeasureL2},         {"nvfp4", MeasureNvfp4}, {"barrier", MeasureBarrier},
    {"gather", MeasureGather},   {"tear", MeasureTear},     {"mma", MeasureMma},     {"fence", MeasureFence},
    {"cluster", MeasureCluster}, {"launch", MeasureLaunch}, {"peer", MeasurePeer},
};

struct FillArgs {
  uint32_t* words;
  size_t count;
  uint32_t seed;
};

__global__ void FillKernel(FillArgs a) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.count; i += step)
    a.words[i] = Random(a.seed, i);
}

}  // namespace

Bench::Bench(int device, std::vector<LimitRow>* rows) : device_(device), rows_(rows), failure_(1) {
  Check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  Check(cudaEventCreate(&begin_), "cudaEventCreate");
  Check(cudaEventCreate(&end_), "cudaEventCreate");
}

Bench::~Bench() {
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Bench::Finish() {
  Check(cudaStreamSynchronize(stream_), "kernel");
  const Failure f = failure_.Get()[0];
  if (f.taken == 0) return;
  const DeviceGuard guard(device_);
  failure_.Zero(stream_);
  Check(cudaStreamSynchronize(stream_), "cudaMemsetAsync");
  throw std::runtime_error(Format("device %d: waited 2 s for %s: block %u, thread %u, wanted %llu, seen %llu", device_,
                                  WaitName(f.wait), f.block, f.thread, static_cast<unsigned long long>(f.wanted),
                                  static_cast<unsigned long long>(f.seen)));
}

void FinishBoth(Bench& a, Bench& b) {
  for (const Bench* bench : {&a, &b}) Check(cudaStreamSynchronize(bench->stream()), "kernel");
  a.Finish();
  b.Finish();
}

void Bench::AddCount(const std::string& name, const std::string& what, uint64_t wrong, uint64_t tried, uint64_t seen,
                     const std::string& note) {
  const double count = static_cast<double>(wrong);
  std::string text =
      Format("of %.3g; a deliberate fault gave %.3g", static_cast<double>(tried), static_cast<double>(seen));
  if (!note.empty()) text += "; " + note;
  const bool ok = wrong == 0 && tried > 0 && seen > 0;
  Add({name, what, "wrong", count, count, count, 1, "0", text, ok ? LimitRow::Status::kOk : LimitRow::Status::kFailed});
}

void FillRandom(const Bench& bench, void* data, size_t bytes, uint32_t seed) {
  Launch(FillKernel, {bench.sms() * 2, 1024}, bench.stream(), {static_cast<uint32_t*>(data), bytes / 4, seed});
}

std::string Format(const char* format, ...) {
  char out[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(out, sizeof out, format, args);
  va_end(args);
  return out;
}

std::vector<LimitRow> MeasureLimits(int device, const std::vector<std::string>& groups) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    cudaGetLastError();
    throw std::runtime_error(std::string("bench limits: expected a GPU, got none: ") + cudaGetErrorString(error));
  }
  if (device < 0 || device >= count)
    throw std::invalid_argument(Mismatch("bench limits", "device", "0 to " + std::to_string(count - 1), device));
  std::vector<LimitRow> rows;
  const DeviceGuard guard(device);
  for (const std::string& name : groups) {
    const auto group = std::find_if(std::begin(kGroups), std::end(kGroups), [&](auto& g) { return name == g.name; });
    if (group == std::end(kGroups)) {
      std::string names;
      for (const Group& g : kGroups) names += (names.empty() ? "" : ", ") + std::string(g.name);
      throw std::invalid_argument(Mismatch("bench limits", "groups", "some of " + names, name));
    }
    try {
      Bench bench(device, &rows);
      group->measure(bench);
    } catch (const std::runtime_error& error) {
      rows.push_back({name, name, "", 0, 0, 0, 0, "", error.what(), LimitRow::Status::kFailed});
    }
  }
  return rows;
}

}  // namespace musejax::bench

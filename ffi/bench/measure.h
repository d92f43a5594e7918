// Host side of every measurement: device memory, launches, medians, and the rows they become.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/limits.h"
#include "bench/wait.cuh"

namespace musejax::bench {

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a later call, perhaps of another library, must not find it
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes a device current, and the former one again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    Check(cudaGetDevice(&former_), "cudaGetDevice");
    Check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() { cudaSetDevice(former_); }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  int former_ = 0;
};

// Device memory of the current device, zeroed.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    Check(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc");
    Check(cudaMemset(data_, 0, count * sizeof(T)), "cudaMemset");
    Check(cudaDeviceSynchronize(), "cudaMemset");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;

  T* data() const { return data_; }
  size_t size() const { return count_; }

  void Zero(cudaStream_t stream) const {
    Check(cudaMemsetAsync(data_, 0, count_ * sizeof(T), stream), "cudaMemsetAsync");
  }
  void Put(const std::vector<T>& values) const {
    Check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<T> Get(size_t first, size_t count) const {
    std::vector<T> out(count);
    Check(cudaMemcpy(out.data(), data_ + first, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return out;
  }
  std::vector<T> Get() const { return Get(0, count_); }

 private:
  T* data_ = nullptr;
  size_t count_;
};

struct Stat {
  double median = 0, low = 0, high = 0;
  int repeats = 0;
};

inline Stat Summarise(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {(values[(n - 1) / 2] + values[n / 2]) / 2, values.front(), values.back(), static_cast<int>(n)};
}

// amount / x of each value, such as microseconds -> TB/s.
inline Stat Rates(std::vector<double> values, double amount) {
  for (double& value : values) value = amount / value;
  return Summarise(std::move(values));
}

struct LaunchShape {
  int blocks, threads;
  size_t shared_bytes = 0;
  bool cooperative = false;  // refuses to start unless all blocks are resident at once: for blocks that wait for others
  int cluster = 1;
  bool programmatic = false;  // may start while the launch before it ends
};

// Launches a kernel of one argument, a struct.
template <typename Args>
void Launch(void (*kernel)(Args), const LaunchShape& shape, cudaStream_t stream, const Args& args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[3];
  config.attrs = attributes;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  };
  if (shape.cooperative) add(cudaLaunchAttributeCooperative).cooperative = 1;
  if (shape.programmatic)
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  if (shape.cluster > 1) {
    auto& dim = add(cudaLaunchAttributeClusterDimension).clusterDim;
    dim.x = shape.cluster, dim.y = 1, dim.z = 1;
  }
  Check(cudaLaunchKernelEx(&config, kernel, args), "launch");
}

// Allows a kernel this much dynamic shared memory, and loads it on the current device: left to its first launch, that
// may wait for a kernel that waits for this one.
template <typename Args>
void AllowShared(void (*kernel)(Args), int bytes) {
  const void* function = reinterpret_cast<const void*>(kernel);
  Check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  cudaFuncAttributes attributes;
  Check(cudaFuncGetAttributes(&attributes, function), "cudaFuncGetAttributes");
}

// One device during a measurement. Its members are used while it is the current device.
class Bench {
 public:
  Bench(int device, std::vector<LimitRow>* rows);
  ~Bench();
  Bench(const Bench&) = delete;

  int device() const { return device_; }
  int sms() const { return sms_; }
  cudaStream_t stream() const { return stream_; }
  Failure* failure() const { return failure_.data(); }

  // Waits for the stream; throws with who waited for what if a spin ran out of time.
  void Finish();

  // Times of launch(0), launch(1), ... in microseconds, between two events around each; `warm` more come first.
  template <typename F>
  std::vector<double> Time(int warm, int repeats, F launch) {
    std::vector<double> out;
    for (int i = 0; i < warm + repeats; ++i) {
      Check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
      launch(i);
      Check(cudaEventRecord(end_, stream_), "cudaEventRecord");
      Finish();
      float ms;
      Check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
      if (i >= warm) out.push_back(ms * 1e3);
    }
    return out;
  }

  void Add(LimitRow row) { rows_->push_back(std::move(row)); }
  void Add(const std::string& name, const std::string& what, const std::string& unit, const Stat& stat,
           const std::string& design, const std::string& note = "") {
    Add({name, what, unit, stat.median, stat.low, stat.high, stat.repeats, design, note, LimitRow::Status::kOk});
  }
  void Skip(const std::string& name, const std::string& what, const std::string& unit, const std::string& design,
            const std::string& why) {
    Add({name, what, unit, 0, 0, 0, 0, design, why, LimitRow::Status::kSkipped});
  }
  // A count of wrong results that must be 0, out of `tried`; `seen` of a deliberate fault must not be 0.
  void AddCount(const std::string& name, const std::string& what, uint64_t wrong, uint64_t tried, uint64_t seen,
                const std::string& note);

 private:
  int device_, sms_ = 0;
  std::vector<LimitRow>* rows_;
  DeviceArray<Failure> failure_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// Finish of two devices that use each other's memory: both have stopped before either throws.
void FinishBoth(Bench& a, Bench& b);

// The next GPU, if there is one that this one can exchange words with; peer access is then enabled both ways.
class PeerBench {
 public:
  explicit PeerBench(Bench& bench);

  Bench* get() const { return bench_.get(); }      // null: none
  const std::string& why() const { return why_; }  // what is missing, if so

 private:
  std::unique_ptr<Bench> bench_;
  std::string why_;
};

// Fills device memory with random words.
void FillRandom(const Bench& bench, void* data, size_t bytes, uint32_t seed);

// "%.2f" and the like.
std::string Format(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- the groups ----
void MeasureHbm(Bench& bench);
void MeasureL2(Bench& bench);
void MeasureNvfp4(Bench& bench);
void MeasureBarrier(Bench& bench);
void MeasureGather(Bench& bench);
void MeasureTear(Bench& bench);
void MeasureMma(Bench& bench);
void MeasureFence(Bench& bench);
void MeasureCluster(Bench& bench);
void MeasureLaunch(Bench& bench);
void MeasurePeer(Bench& bench);

}  // namespace musejax::bench

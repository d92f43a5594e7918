// Costs of single steps: store and fence (group fence), a cluster's barrier (cluster), an empty kernel in a CUDA graph
// (launch).
#include "bench/measure.h"
#include "bench/stream.cuh"

namespace musejax::bench {
namespace {

constexpr int kThreads = 384;
constexpr int kRepeats = 15;

// ---- fences ----

struct FenceArgs {
  uint32_t* dst;  // [blocks][64]: a block's store goes to a line of its own
  uint32_t rounds;
  uint64_t* elapsed;  // [blocks] ns
  StreamArgs stream;
  Failure* failure;
};

template <ptx::Scope kScope>
__global__ void __launch_bounds__(64, 1) FenceKernel(const __grid_constant__ FenceArgs a) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t full[kMaxDepth];
  __shared__ volatile int stop;
  if (threadIdx.x == 0) stop = 0;
  InitBarriers(full, kMaxDepth, 1);
  if (threadIdx.x == 0) StreamWeights(a.stream, ring, full, &stop, a.failure);
  if (threadIdx.x != 32) return;
  ptx::NanoSleep(20'000);  // until the stream runs
  const uint64_t begin = ptx::GlobalTimer();
  for (uint32_t round = 0; round < a.rounds; ++round) {
    ptx::StRelaxed<ptx::Scope::kGpu>(a.dst + blockIdx.x * 64, round);
    if constexpr (kScope == ptx::Scope::kGpu)
      __threadfence();
    else
      __threadfence_system();
  }
  a.elapsed[blockIdx.x] = ptx::GlobalTimer() - begin;
  stop = 1;
}

// Microseconds of a store and a fence: of each launch the median of the blocks.
Stat FenceCost(Bench& bench, void (*kernel)(FenceArgs), const StreamArgs& stream) {
  constexpr uint32_t kRounds = 500;
  const DeviceArray<uint32_t> dst(static_cast<size_t>(bench.sms()) * 64);
  const DeviceArray<uint64_t> elapsed(bench.sms());
  AllowShared(kernel, kRingBytes);
  std::vector<double> us;
  for (int i = 0; i <= kRepeats; ++i) {
    Launch(kernel, {bench.sms(), 64, kRingBytes}, bench.stream(),
           {dst.data(), kRounds, elapsed.data(), stream, bench.failure()});
    bench.Finish();
    std::vector<double> blocks;
    for (const uint64_t ns : elapsed.Get()) blocks.push_back(static_cast<double>(ns) * 1e-3 / kRounds);
    if (i > 0) us.push_back(Summarise(blocks).median);
  }
  return Summarise(us);
}

// ---- clusters ----

struct ClusterArgs {
  uint32_t rounds;
  uint64_t* elapsed;  // ns, of block 0
};

__global__ void __launch_bounds__(kThreads, 1) ClusterKernel(ClusterArgs a) {
  const uint64_t begin = ptx::GlobalTimer();
  for (uint32_t i = 0; i < a.rounds; ++i) {
    ptx::BarrierClusterArrive();
    ptx::BarrierClusterWait();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.elapsed = ptx::GlobalTimer() - begin;
}

// ---- launches ----

struct EmptyArgs {
  int* never;
};

template <bool kProgrammatic>
__global__ void __launch_bounds__(kThreads, 1) EmptyKernel(EmptyArgs a) {
  if constexpr (kProgrammatic) {
    ptx::GridDependencyLaunch();
    ptx::GridDependencyWait();
  }
  if (a.never != nullptr) *a.never = 1;
}

// A CUDA graph of what `record` launches on the stream.
class Graph {
 public:
  template <typename F>
  Graph(cudaStream_t stream, F record) {
    Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    record();
    Check(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    Check(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
  }
  ~Graph() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;

  void Launch(cudaStream_t stream) const { Check(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

Stat LaunchCost(Bench& bench, void (*kernel)(EmptyArgs), bool programmatic) {
  constexpr int kKernels = 64;
  AllowShared(kernel, 0);  // loads it before the capture
  const Graph graph(bench.stream(), [&] {
    for (int i = 0; i < kKernels; ++i)
      Launch(kernel, {bench.sms(), kThreads, 0, false, 1, programmatic}, bench.stream(), {nullptr});
  });
  std::vector<double> us = bench.Time(3, 2 * kRepeats, [&](int) { graph.Launch(bench.stream()); });
  for (double& value : us) value /= kKernels;
  return Summarise(us);
}

}  // namespace

void MeasureFence(Bench& bench) {
  const uint64_t block_bytes = 512ull * kStageBytes;
  const DeviceArray<uint8_t> weights(bench.sms() * block_bytes);
  const DeviceArray<StreamClock> clocks(bench.sms());
  FillRandom(bench, weights.data(), weights.size(), 10);
  const StreamArgs idle{weights.data(), block_bytes, 0, 0, clocks.data()};
  StreamArgs busy = idle;
  busy.depth = kStages, busy.bytes = kStageBytes;
  const std::string note = Format("%d KB in flight an SM", kRingBytes / 1'024);
  constexpr auto gpu = FenceKernel<ptx::Scope::kGpu>, sys = FenceKernel<ptx::Scope::kSys>;
  bench.Add("fence.gpu", "store and __threadfence", "us", FenceCost(bench, gpu, idle), "0.2");
  bench.Add("fence.gpu_stream", "the same beside a weight stream", "us", FenceCost(bench, gpu, busy), "5.2", note);
  bench.Add("fence.sys", "store and __threadfence_system", "us", FenceCost(bench, sys, idle), "0.7");
  bench.Add("fence.sys_stream", "the same beside a weight stream", "us", FenceCost(bench, sys, busy), "5.6", note);
}

void MeasureCluster(Bench& bench) {
  constexpr int kSize = 4;
  constexpr uint32_t kRounds = 1'000;
  const DeviceArray<uint64_t> elapsed(1);
  std::vector<double> us;
  for (int i = 0; i <= kRepeats; ++i) {
    LaunchShape shape{bench.sms() / kSize * kSize, kThreads};
    shape.cluster = kSize;
    Launch(ClusterKernel, shape, bench.stream(), {kRounds, elapsed.data()});
    bench.Finish();
    if (i > 0) us.push_back(static_cast<double>(elapsed.Get()[0]) * 1e-3 / kRounds);
  }
  bench.Add("cluster.sync", "barrier of a cluster of 4 blocks", "us", Summarise(us), "0.21");
}

void MeasureLaunch(Bench& bench) {
  bench.Add("launch.plain", "empty kernel in a CUDA graph", "us", LaunchCost(bench, EmptyKernel<false>, false), "0.66",
            "64 in a row");
  bench.Add("launch.programmatic", "the same, programmatic dependent launch", "us",
            LaunchCost(bench, EmptyKernel<true>, true), "0.59");
}

}  // namespace musejax::bench

// What it costs that all blocks of a grid meet: a barrier by an atomic counter, and a gather in which every block
// publishes tagged words and reads those of all blocks, alone and while a weight stream runs beside it.
#include <algorithm>
#include <string>

#include "bench/measure.h"
#include "bench/stream.cuh"

namespace musejax::bench {
namespace {

constexpr int kThreads = 384;
constexpr int kRepeats = 7;

struct BarrierArgs {
  uint32_t* counter;  // 0 before
  uint32_t rounds;
  uint64_t* elapsed;  // ns
  Failure* failure;
};

__global__ void __launch_bounds__(kThreads, 1) BarrierKernel(BarrierArgs a) {
  const uint64_t begin = ptx::GlobalTimer();
  for (uint32_t round = 1; round <= a.rounds; ++round) {
    bool late = false;
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::RedAddRelease<ptx::Scope::kGpu>(a.counter, 1);
      uint32_t seen = 0;
      late = !ptx::SpinUntil([&] {
        seen = ptx::LdAcquire<ptx::Scope::kGpu>(a.counter);
        return seen >= round * gridDim.x;
      });
      if (late) Report(a.failure, Wait::kBarrier, round * gridDim.x, seen);
    }
    if (__syncthreads_or(late)) return;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.elapsed = ptx::GlobalTimer() - begin;
}

constexpr uint32_t kFirstGatherWarp = 4, kGatherThreads = 256, kWarmRounds = 20;

struct GatherArgs {
  // [2][blocks][words], zeroed. A round's words go to the set of its parity. A block writes round r + 2 only after it
  // has read all of r + 1, which every block published after it had read all of r: no one loses unread words.
  ptx::Word* sets;
  uint32_t words, rounds;
  uint64_t* elapsed;  // ns, of block 0, without the warm rounds
  StreamArgs stream;
  Failure* failure;
};

__device__ void Gather(const GatherArgs& a, uint32_t thread) {
  const uint32_t count = gridDim.x * a.words;
  uint64_t begin = 0;
  for (uint32_t round = 1; round <= kWarmRounds + a.rounds; ++round) {
    if (round == kWarmRounds + 1) begin = ptx::GlobalTimer();
    ptx::Word* set = a.sets + (round & 1) * count;
    const uint32_t first = blockIdx.x * a.words;
    for (uint32_t i = thread; i < a.words; i += kGatherThreads)
      ptx::StRelaxed<ptx::Scope::kGpu>(set + first + i, RoundWord(first + i, round));
    const bool ok = PollWords<ptx::Scope::kGpu>(set, count, 0, round, thread, kGatherThreads, a.failure);
    if (ptx::BarRedOr(1, kGatherThreads, !ok)) return;
  }
  if (blockIdx.x == 0 && thread == 0) *a.elapsed = ptx::GlobalTimer() - begin;
}

__global__ void __launch_bounds__(kThreads, 1) GatherKernel(const __grid_constant__ GatherArgs a) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t full[kMaxDepth];
  __shared__ volatile int stop;
  if (threadIdx.x == 0) stop = 0;
  InitBarriers(full, kMaxDepth, 1);
  if (threadIdx.x == 0) StreamWeights(a.stream, ring, full, &stop, a.failure);
  if (threadIdx.x >= 32 * kFirstGatherWarp) {
    Gather(a, threadIdx.x - 32 * kFirstGatherWarp);
    if (threadIdx.x == 32 * kFirstGatherWarp) stop = 1;
  }
}

// TB/s of all blocks together, from the first one's begin to the last one's end.
double StreamRate(const std::vector<StreamClock>& clocks) {
  uint64_t begin = clocks[0].begin, end = 0, bytes = 0;
  for (const StreamClock& c : clocks) {
    begin = std::min(begin, c.begin);
    end = std::max(end, c.end);
    bytes += c.bytes;
  }
  return static_cast<double>(bytes) / static_cast<double>(end - begin) * 1e-3;
}

}  // namespace

void MeasureBarrier(Bench& bench) {
  constexpr uint32_t kRounds = 1'000;
  const DeviceArray<uint32_t> counter(1);
  const DeviceArray<uint64_t> elapsed(1);
  std::vector<double> us;
  for (int i = 0; i <= kRepeats; ++i) {
    counter.Zero(bench.stream());
    Launch(BarrierKernel, {bench.sms(), kThreads, 0, true}, bench.stream(),
           {counter.data(), kRounds, elapsed.data(), bench.failure()});
    bench.Finish();
    if (i > 0) us.push_back(static_cast<double>(elapsed.Get()[0]) * 1e-3 / kRounds);  // the first one loads the code
  }
  bench.Add("barrier.grid", Format("grid barrier, %d blocks, atomic counter", bench.sms()), "us", Summarise(us),
            "0.90");
}

void MeasureGather(Bench& bench) {
  constexpr uint32_t kRounds = 2'000, kMaxWords = 4;
  constexpr uint32_t kKilo = 1'024;
  const struct {
    uint32_t words, depth, bytes;
    const char* design;
  } cases[] = {
      {1, 0, 16, "0.8"},
      {4, 0, 16, "1.1"},
      {4, 2, 8 * kKilo, "1.4 at 2.9 TB/s"},
      {4, 4, 8 * kKilo, "2.0 at 4.2 TB/s"},
      {4, 1, kStageBytes, ""},
      {4, 6, 8 * kKilo, "2.2 to 3.0 at 4.3 TB/s"},
      {4, 10, 8 * kKilo, "2.9 to 4.8 at 4.3 TB/s"},
      {4, 10, 16 * kKilo, "10.2 at 4.3 TB/s"},
      {4, kStages, kStageBytes, ""},
  };
  const uint64_t block_bytes = 1'024ull * kStageBytes;
  const DeviceArray<uint8_t> weights(bench.sms() * block_bytes);
  const DeviceArray<ptx::Word> sets(2ull * bench.sms() * kMaxWords);
  const DeviceArray<uint64_t> elapsed(1);
  const DeviceArray<StreamClock> clocks(bench.sms());
  FillRandom(bench, weights.data(), weights.size(), 4);
  AllowShared(GatherKernel, kRingBytes);
  for (const auto& c : cases) {
    std::vector<double> us, rates;
    for (int i = 0; i <= kRepeats; ++i) {
      sets.Zero(bench.stream());
      const StreamArgs stream{weights.data(), block_bytes, c.depth, c.bytes, clocks.data()};
      Launch(GatherKernel, {bench.sms(), kThreads, kRingBytes, true}, bench.stream(),
             {sets.data(), c.words, kRounds, elapsed.data(), stream, bench.failure()});
      bench.Finish();
      if (i == 0) continue;
      us.push_back(static_cast<double>(elapsed.Get()[0]) * 1e-3 / kRounds);
      if (c.depth > 0) rates.push_back(StreamRate(clocks.Get()));
    }
    if (c.depth == 0) {
      bench.Add(Format("gather.idle_%u", c.words * 16),
                Format("grid gather, data as flag, %d x %u B", bench.sms(), c.words * 16), "us", Summarise(us),
                c.design);
    } else {
      const uint32_t kilo = c.depth * c.bytes / kKilo;
      bench.Add(Format("gather.stream_%u", kilo), Format("the same, %u KB of a stream in flight an SM", kilo), "us",
                Summarise(us), c.design,
                Format("stream %.2f TB/s, %u x %u bytes", Summarise(rates).median, c.depth, c.bytes));
    }
  }
}

}  // namespace musejax::bench

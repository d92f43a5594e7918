// Between two GPUs: a flag one way, and an exchange in which every block writes tagged words to the same block of the
// other GPU and waits for those that come back, alone and while weight streams run on both.
#include "bench/measure.h"
#include "bench/stream.cuh"

namespace musejax::bench {
namespace {

constexpr int kRepeats = 7;

struct FlagArgs {
  uint32_t* mine;   // in this GPU's memory, 0 before; the other GPU writes it
  uint32_t* other;  // the other GPU's
  uint32_t rounds;
  bool first;  // this side begins
  uint64_t* elapsed;
  Failure* failure;
};

__global__ void FlagKernel(FlagArgs a) {
  const uint64_t begin = ptx::GlobalTimer();
  for (uint32_t round = 1; round <= a.rounds; ++round) {
    if (a.first) ptx::StRelaxed<ptx::Scope::kSys>(a.other, round);
    uint32_t seen = 0;
    if (!ptx::SpinUntil([&] { return (seen = ptx::LdRelaxed<ptx::Scope::kSys>(a.mine)) == round; }))
      return Report(a.failure, Wait::kFlag, round, seen);
    if (!a.first) ptx::StRelaxed<ptx::Scope::kSys>(a.other, round);
  }
  *a.elapsed = ptx::GlobalTimer() - begin;
}

constexpr int kThreads = 384;
constexpr uint32_t kFirstExchangeWarp = 4, kExchangeThreads = 256, kWarmRounds = 20;

struct ExchangeArgs {
  // [2][blocks][words] in each GPU's memory, zeroed. A block writes round r + 2 only after it has got r + 1, which its
  // partner sent after it had read r: no one loses unread words.
  ptx::Word *mine, *other;
  uint32_t words, rounds;
  uint64_t* elapsed;  // ns, of block 0, without the warm rounds
  StreamArgs stream;
  Failure* failure;
};

__device__ void Exchange(const ExchangeArgs& a, uint32_t thread) {
  uint64_t begin = 0;
  for (uint32_t round = 1; round <= kWarmRounds + a.rounds; ++round) {
    if (round == kWarmRounds + 1) begin = ptx::GlobalTimer();
    const uint32_t first = blockIdx.x * a.words, at = (round & 1) * gridDim.x * a.words + first;
    for (uint32_t i = thread; i < a.words; i += kExchangeThreads)
      ptx::StRelaxed<ptx::Scope::kSys>(a.other + at + i, RoundWord(first + i, round));
    const bool ok =
        PollWords<ptx::Scope::kSys>(a.mine + at, a.words, first, round, thread, kExchangeThreads, a.failure);
    if (ptx::BarRedOr(1, kExchangeThreads, !ok)) return;
  }
  if (blockIdx.x == 0 && thread == 0) *a.elapsed = ptx::GlobalTimer() - begin;
}

__global__ void __launch_bounds__(kThreads, 1) ExchangeKernel(const __grid_constant__ ExchangeArgs a) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t full[kMaxDepth];
  __shared__ volatile int stop;
  if (threadIdx.x == 0) stop = 0;
  InitBarriers(full, kMaxDepth, 1);
  if (threadIdx.x == 0) StreamWeights(a.stream, ring, full, &stop, a.failure);
  if (threadIdx.x >= 32 * kFirstExchangeWarp) {
    Exchange(a, threadIdx.x - 32 * kFirstExchangeWarp);
    if (threadIdx.x == 32 * kFirstExchangeWarp) stop = 1;
  }
}

// What one of the two GPUs brings.
struct Side {
  Bench& bench;
  int blocks;
  uint64_t block_bytes = 512ull * kStageBytes;
  DeviceArray<uint8_t> weights;
  DeviceArray<ptx::Word> words;
  DeviceArray<uint32_t> flag{1};
  DeviceArray<uint64_t> elapsed{1};
  DeviceArray<StreamClock> clocks;

  // The device is current.
  Side(Bench& bench, int blocks, size_t count)
      : bench(bench), blocks(blocks), weights(blocks * block_bytes), words(count), clocks(blocks) {
    FillRandom(bench, weights.data(), weights.size(), 11);
    AllowShared(ExchangeKernel, kRingBytes);
    AllowShared(FlagKernel, 0);
    bench.Finish();
  }
};

// Runs launch(side, other, first) on both and waits for both; the time of the first side in microseconds.
template <typename F>
double RunBoth(Side& a, Side& b, F launch) {
  for (Side* side : {&a, &b}) {
    const DeviceGuard guard(side->bench.device());
    side->words.Zero(side->bench.stream());
    side->flag.Zero(side->bench.stream());
    side->bench.Finish();
  }
  for (Side* side : {&a, &b}) {
    const DeviceGuard guard(side->bench.device());
    launch(*side, side == &a ? b : a, side == &a);
  }
  FinishBoth(a.bench, b.bench);
  return static_cast<double>(a.elapsed.Get()[0]) * 1e-3;
}

double RunFlag(Side& a, Side& b, uint32_t rounds) {
  return RunBoth(a, b, [&](Side& side, Side& other, bool first) {
    Launch(FlagKernel, {1, 1}, side.bench.stream(),
           {side.flag.data(), other.flag.data(), rounds, first, side.elapsed.data(), side.bench.failure()});
  });
}

double RunExchange(Side& a, Side& b, uint32_t words, uint32_t rounds, bool busy) {
  return RunBoth(a, b, [&](Side& side, Side& other, bool) {
    const StreamArgs stream{side.weights.data(), side.block_bytes, busy ? kStages : 0u, kStageBytes,
                            side.clocks.data()};
    Launch(ExchangeKernel, {side.blocks, kThreads, kRingBytes, true}, side.bench.stream(),
           {side.words.data(), other.words.data(), words, rounds, side.elapsed.data(), stream, side.bench.failure()});
  });
}

struct Case {
  int kilobytes;
  const char *idle, *busy;  // design
};
constexpr Case kCases[] = {{2, "0.70", "2.0"}, {64, "0.82", "1.3"}, {512, "1.38", "3.3"}};

std::string ExchangeName(const Case& c, bool busy) {
  return Format("peer.exchange_%d%s", c.kilobytes, busy ? "_stream" : "");
}
std::string ExchangeText(const Case& c, bool busy) {
  return Format("exchange both ways, %d KB%s", c.kilobytes, busy ? ", beside weight streams" : "");
}
constexpr char kFlagName[] = "peer.flag", kFlagText[] = "flag to the other GPU, one way", kFlagDesign[] = "0.67";

}  // namespace

PeerBench::PeerBench(Bench& bench) {
  int count = 0;
  Check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (count < 2) {
    why_ = "needs 2 GPUs";
    return;
  }
  const int device = bench.device(), other = (device + 1) % count;
  for (const auto& [from, to] : {std::pair(device, other), std::pair(other, device)}) {
    int can = 0;
    Check(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer");
    if (!can) {
      why_ = Format("needs peer access from GPU %d to GPU %d", from, to);
      return;
    }
    const DeviceGuard guard(from);
    const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled)
      cudaGetLastError();
    else
      Check(error, "cudaDeviceEnablePeerAccess");
  }
  const DeviceGuard guard(other);
  bench_ = std::make_unique<Bench>(other, nullptr);
}

void MeasurePeer(Bench& bench) {
  const PeerBench peer(bench);
  if (peer.get() == nullptr) {
    bench.Skip(kFlagName, kFlagText, "us", kFlagDesign, peer.why());
    for (const bool busy : {false, true})
      for (const Case& c : kCases)
        bench.Skip(ExchangeName(c, busy), ExchangeText(c, busy), "us", busy ? c.busy : c.idle, peer.why());
    return;
  }
  constexpr uint32_t kRounds = 2'000;
  const int blocks = std::min(bench.sms(), peer.get()->sms());
  const auto words_of = [&](const Case& c) { return static_cast<uint32_t>((c.kilobytes * 64 + blocks - 1) / blocks); };
  const size_t count = 2ull * blocks * words_of(kCases[std::size(kCases) - 1]);
  Side here(bench, blocks, count);
  const std::unique_ptr<Side> there = [&] {
    const DeviceGuard guard(peer.get()->device());
    return std::make_unique<Side>(*peer.get(), blocks, count);
  }();

  std::vector<double> us;
  for (int i = 0; i <= kRepeats; ++i) {
    const double all = RunFlag(here, *there, kRounds);
    if (i > 0) us.push_back(all / kRounds / 2);
  }
  bench.Add(kFlagName, kFlagText, "us", Summarise(us), kFlagDesign, "half a round trip");
  for (const bool busy : {false, true})
    for (const Case& c : kCases) {
      us.clear();
      for (int i = 0; i <= kRepeats; ++i) {
        const double all = RunExchange(here, *there, words_of(c), kRounds, busy);
        if (i > 0) us.push_back(all / kRounds);
      }
      bench.Add(ExchangeName(c, busy), ExchangeText(c, busy), "us", Summarise(us), busy ? c.busy : c.idle,
                Format("%d blocks x %u words of 16 bytes", blocks, words_of(c)));
    }
}

}  // namespace musejax::bench

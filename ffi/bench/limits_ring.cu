// Reading through a ring of 5 x 36,864 bytes a block, one block an SM: one warp starts bulk copies, eight warps read
// every word from shared memory. From HBM (group hbm) and from L2 (group l2). The xor of all words read is compared
// with that of plain loads.
#include <cmath>

#include "bench/measure.h"
#include "bench/stream.cuh"

namespace musejax::bench {
namespace {

constexpr int kReaders = 8;
constexpr int kThreads = 32 * (1 + kReaders);
constexpr int kRepeats = 15;
constexpr uint32_t kSteadyStages = 1'024;  // a block: 5 GB on 132 SMs

struct ReadArgs {
  const uint8_t* src;  // [blocks][block_bytes]
  uint64_t block_bytes;
  uint32_t stages;       // that a block reads
  uint32_t piece, wrap;  // bytes of one copy, copies after which a block begins again
  bool evict_first;
  uint32_t* sum;       // xor of all words
  ulonglong2* clocks;  // [blocks] cycles and nanoseconds from a block's first stage to its last
  Failure* failure;
};

struct Rings {
  uint64_t full[kStages], empty[kStages];
};

__device__ void Produce(const ReadArgs& a, uint8_t* ring, Rings& bars) {
  const uint8_t* src = a.src + blockIdx.x * a.block_bytes;
  const uint64_t policy = ptx::CreatePolicyEvictFirst();
  Cursor at;
  uint32_t copy = 0;
  for (uint32_t i = 0; i < a.stages; ++i, at.Advance()) {
    if (!ptx::MbarrierWaitParity(&bars.empty[at.stage], at.parity ^ 1))
      return Report(a.failure, Wait::kStageEmpty, i, at.stage);
    ptx::MbarrierArriveExpectTx(&bars.full[at.stage], kStageBytes);
    for (uint32_t offset = 0; offset < kStageBytes; offset += a.piece) {
      uint8_t* dst = ring + at.stage * kStageBytes + offset;
      const uint8_t* from = src + static_cast<uint64_t>(copy) * a.piece;
      if (a.evict_first)
        ptx::CpAsyncBulk(dst, from, a.piece, &bars.full[at.stage], policy);
      else
        ptx::CpAsyncBulk(dst, from, a.piece, &bars.full[at.stage]);
      if (++copy == a.wrap) copy = 0;
    }
  }
}

__device__ void Consume(const ReadArgs& a, const uint8_t* ring, Rings& bars, int reader, int lane) {
  constexpr int kLoads = kStageBytes / (kReaders * 32 * 16);
  static_assert(kLoads * kReaders * 32 * 16 == kStageBytes, "readers share a stage evenly");
  Cursor at;
  uint32_t sum = 0;
  uint64_t cycles = 0, ns = 0;
  for (uint32_t i = 0; i < a.stages; ++i, at.Advance()) {
    if (!WarpWait(&bars.full[at.stage], at.parity, a.failure, Wait::kStageFull, i)) return;
    if (i == 0) cycles = clock64(), ns = ptx::GlobalTimer();
    const uint4* words = reinterpret_cast<const uint4*>(ring + at.stage * kStageBytes) + reader * 32 + lane;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const uint4 v = words[k * kReaders * 32];
      sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    __syncwarp();
    if (lane == 0) ptx::MbarrierArrive(&bars.empty[at.stage]);
  }
  if (reader == 0 && lane == 0) a.clocks[blockIdx.x] = {clock64() - cycles, ptx::GlobalTimer() - ns};
  sum = __reduce_xor_sync(~0u, sum);
  if (lane == 0) atomicXor(a.sum, sum);
}

__global__ void __launch_bounds__(kThreads, 1) RingReadKernel(const __grid_constant__ ReadArgs a) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ Rings bars;
  InitBarriers(bars.full, kStages, 1);
  InitBarriers(bars.empty, kStages, kReaders);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp > 0)
    Consume(a, ring, bars, warp - 1, lane);
  else if (lane == 0)
    Produce(a, ring, bars);
}

// The same xor by plain loads.
__global__ void PlainReadKernel(const __grid_constant__ ReadArgs a) {
  const uint8_t* src = a.src + blockIdx.x * a.block_bytes;
  const uint64_t count = static_cast<uint64_t>(a.stages) * (kStageBytes / 16);
  const uint32_t per_copy = a.piece / 16;
  uint32_t sum = 0;
  for (uint64_t i = threadIdx.x; i < count; i += blockDim.x) {
    const uint32_t copy = static_cast<uint32_t>(i / per_copy % a.wrap), at = static_cast<uint32_t>(i % per_copy);
    const uint4 v = *reinterpret_cast<const uint4*>(src + static_cast<uint64_t>(copy) * a.piece + at * 16);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  sum = __reduce_xor_sync(~0u, sum);
  if (threadIdx.x % 32 == 0) atomicXor(a.sum, sum);
}

struct FlipArgs {
  uint32_t* word;
};
__global__ void FlipKernel(FlipArgs a) { *a.word ^= 1; }

class Reader {
 public:
  Reader(Bench& bench, uint64_t block_bytes)
      : bench_(bench), data_(bench.sms() * block_bytes), sum_(1), clocks_(bench.sms()) {
    AllowShared(RingReadKernel, kRingBytes);
    FillRandom(bench, data_.data(), data_.size(), 1);
    args_ = {data_.data(), block_bytes, 0, kStageBytes, ~0u, false, sum_.data(), clocks_.data(), bench.failure()};
  }

  ReadArgs args() const { return args_; }
  double Megabytes(const ReadArgs& a) const { return 1e-6 * bench_.sms() * a.stages * kStageBytes; }

  void Read(const ReadArgs& a) const {
    Launch(RingReadKernel, {bench_.sms(), kThreads, kRingBytes}, bench_.stream(), a);
  }

  // Throws unless the ring reads what plain loads read, and a flipped bit changes it.
  void CheckSum(const ReadArgs& a) const {
    const uint32_t wanted = Sum([&] { Launch(PlainReadKernel, {bench_.sms(), 1024}, bench_.stream(), a); });
    const uint32_t got = Sum([&] { Read(a); });
    Launch(FlipKernel, {1, 1}, bench_.stream(), {reinterpret_cast<uint32_t*>(data_.data())});
    const uint32_t flipped = Sum([&] { Read(a); });
    Launch(FlipKernel, {1, 1}, bench_.stream(), {reinterpret_cast<uint32_t*>(data_.data())});
    const uint64_t copies = static_cast<uint64_t>(a.stages) * (kStageBytes / a.piece);
    const uint32_t change = (copies + a.wrap - 1) / a.wrap % 2;  // that copy was read so often; even numbers cancel
    if (got != wanted || flipped != (wanted ^ change))
      throw std::runtime_error(
          Format("bulk copies: expected xor %08x of all words and %08x with a flipped bit, got %08x and %08x", wanted,
                 wanted ^ change, got, flipped));
  }

  // SM clock of the last read in GHz, the median of the blocks.
  double Clock() const {
    std::vector<double> rates;
    for (const ulonglong2& c : clocks_.Get()) rates.push_back(static_cast<double>(c.x) / static_cast<double>(c.y));
    return Summarise(rates).median;
  }

 private:
  template <typename F>
  uint32_t Sum(F read) const {
    sum_.Zero(bench_.stream());
    read();
    bench_.Finish();
    return sum_.Get()[0];
  }

  Bench& bench_;
  DeviceArray<uint8_t> data_;
  DeviceArray<uint32_t> sum_;
  DeviceArray<ulonglong2> clocks_;
  ReadArgs args_;
};

}  // namespace

void MeasureHbm(Bench& bench) {
  const Reader reader(bench, static_cast<uint64_t>(kSteadyStages) * kStageBytes);
  for (const bool evict_first : {false, true}) {
    ReadArgs a = reader.args();
    a.stages = kSteadyStages;
    a.evict_first = evict_first;
    reader.CheckSum(a);
    const Stat rate = Rates(bench.Time(2, kRepeats, [&](int) { reader.Read(a); }), reader.Megabytes(a));
    if (evict_first) {
      bench.Add("hbm.evict_first", "HBM read, lines leave L2 first", "TB/s", rate, "");
      continue;
    }
    bench.Add("hbm.steady", "HBM read, bulk-copy ring, steady", "TB/s", rate, "4.57",
              Format("%.2f GB, xor of all words checked", reader.Megabytes(a) * 1e-3));
    std::vector<double> clocks;
    for (int i = 0; i < kRepeats; ++i) {
      reader.Read(a);
      bench.Finish();
      clocks.push_back(reader.Clock());
    }
    bench.Add("hbm.clock", "SM clock meanwhile", "GHz", Summarise(clocks), "", "clock64 / globaltimer");
  }

  ReadArgs a = reader.args();  // each repeat reads another window, so that L2 has nothing of it
  a.stages = static_cast<uint32_t>(std::lround(245e6 / bench.sms() / kStageBytes));
  reader.CheckSum(a);
  const int windows = static_cast<int>(kSteadyStages / a.stages);
  const auto us = bench.Time(2, 2 * windows, [&](int i) {
    ReadArgs window = a;
    window.src += static_cast<uint64_t>(i % windows) * a.stages * kStageBytes;
    reader.Read(window);
  });
  bench.Add("hbm.cold", "HBM read, one pass, cold launch", "us", Summarise(us), "69",
            Format("%.0f MB, %.2f TB/s (design 3.5)", reader.Megabytes(a), Rates(us, reader.Megabytes(a)).median));
}

void MeasureL2(Bench& bench) {
  constexpr uint32_t kPiece = kStageBytes / 4;
  const struct {
    int megabytes;
    const char* design;
  } sizes[] = {{8, "8.0"}, {33, "8.8"}, {45, ""}, {55, ""}};
  const Reader reader(bench, 55'000'000ull / bench.sms() / kPiece * kPiece + kPiece);
  for (const auto& size : sizes) {
    ReadArgs a = reader.args();
    a.stages = kSteadyStages;
    a.piece = kPiece;
    a.wrap = static_cast<uint32_t>(std::lround(size.megabytes * 1e6 / bench.sms() / kPiece));
    reader.CheckSum(a);
    const auto us = bench.Time(2, kRepeats, [&](int) { reader.Read(a); });
    bench.Add("l2." + std::to_string(size.megabytes), Format("L2 read, bulk-copy ring, %d MB", size.megabytes), "TB/s",
              Rates(us, reader.Megabytes(a)), size.design,
              Format("%.1f MB, copies of %u bytes", 1e-6 * bench.sms() * a.wrap * kPiece, kPiece));
  }
}

}  // namespace musejax::bench

// Is a 16-byte word one access? Blocks write words whose halves are equal and change with every write, other blocks
// read the same words meanwhile and look for halves that differ. Written as two stores, the halves must be seen to
// differ, or the test would see nothing.
#include <algorithm>

#include "bench/measure.h"
#include "bench/stream.cuh"

namespace musejax::bench {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kWordsAThread = 4, kBlockWords = kThreads * kWordsAThread;
constexpr uint64_t kReads = 1'000'000'000;
constexpr uint32_t kBetweenLooks = 256;  // rounds between two looks at the clock or the readers

// The n-th value that is written to a word; all of its bits change.
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull, kInverse = 0xF1DE83E19937733Dull;
static_assert(kFactor * kInverse == 1, "inverse modulo 2^64");

struct TearCounts {
  unsigned long long read, torn, changes, written;
};

struct TearArgs {
  ptx::Word* words;     // [pairs][kBlockWords], zeroed
  uint32_t* done;       // [pairs], zeroed: set when a pair's reader has finished
  uint32_t first_role;  // blocks first_role, first_role + 1, ...: below `pairs` writers, then the readers
  uint32_t pairs;
  uint32_t reads;   // of each word by its reader
  bool two_stores;  // the deliberate fault
  TearCounts* counts;
  Failure* failure;
};

// System scope, since the writers may be on another GPU than the counts.
__device__ void Count(unsigned long long* total, uint32_t mine) {
  const uint32_t sum = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) atomicAdd_system(total, static_cast<unsigned long long>(sum));
}

__device__ void Write(const TearArgs& a, uint32_t pair) {
  ptx::Word* words = a.words + pair * kBlockWords + threadIdx.x;
  const uint64_t begin = ptx::GlobalTimer();
  uint32_t n = 0;
  while (true) {
    for (uint32_t i = 0; i < kBetweenLooks; ++i) {
      const uint64_t value = ++n * kFactor;
      for (uint32_t k = 0; k < kWordsAThread; ++k) {
        ptx::Word* word = words + k * kThreads;
        if (a.two_stores) {
          ptx::StRelaxed<ptx::Scope::kSys>(&word->lo, value);
          ptx::StRelaxed<ptx::Scope::kSys>(&word->hi, value);
        } else {
          ptx::StRelaxed<ptx::Scope::kSys>(word, {value, value});
        }
      }
    }
    if (ptx::LdRelaxed<ptx::Scope::kSys>(a.done + pair) != 0 && n >= a.reads) break;
    if (ptx::GlobalTimer() - begin > ptx::kSpinBudgetNs) {
      Report(a.failure, Wait::kReaders, a.reads, n);
      break;
    }
  }
  __syncwarp();
  Count(&a.counts->written, n * kWordsAThread);
}

__device__ void Read(const TearArgs& a, uint32_t pair) {
  const ptx::Word* words = a.words + pair * kBlockWords + threadIdx.x;
  uint64_t last[kWordsAThread] = {};
  uint32_t torn = 0, changes = 0, n = 0;
  for (const uint64_t begin = ptx::GlobalTimer(); n < a.reads;) {
    ptx::Word got[kWordsAThread];
#pragma unroll
    for (uint32_t k = 0; k < kWordsAThread; ++k) got[k] = ptx::LdRelaxed<ptx::Scope::kSys>(words + k * kThreads);
#pragma unroll
    for (uint32_t k = 0; k < kWordsAThread; ++k) {
      // A word torn the same way in both halves is no value that was ever written.
      torn += got[k].lo != got[k].hi || got[k].lo * kInverse > 0xFFFFFFFFull;
      changes += got[k].lo != last[k];
      last[k] = got[k].lo;
    }
    if (++n % kBetweenLooks == 0 && ptx::GlobalTimer() - begin > ptx::kSpinBudgetNs) {
      Report(a.failure, Wait::kReaders, a.reads, n);
      break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) ptx::StRelaxed<ptx::Scope::kSys>(a.done + pair, 1u);
  Count(&a.counts->read, n * kWordsAThread);
  Count(&a.counts->torn, torn);
  Count(&a.counts->changes, changes);
}

__global__ void __launch_bounds__(kThreads, 1) TearKernel(TearArgs a) {
  const uint32_t role = a.first_role + blockIdx.x;
  if (role < a.pairs)
    Write(a, role);
  else
    Read(a, role - a.pairs);
}

// Writers on the writer's device, readers and words on the reader's; they may be one device.
TearCounts RunTear(Bench& writer, Bench& reader, bool two_stores) {
  const bool same = &writer == &reader;
  const uint32_t pairs = static_cast<uint32_t>(std::min(writer.sms(), reader.sms()) / 2);
  const DeviceGuard guard(reader.device());
  const DeviceArray<ptx::Word> words(static_cast<size_t>(pairs) * kBlockWords);
  const DeviceArray<uint32_t> done(pairs);
  const DeviceArray<TearCounts> counts(1);
  const uint32_t reads = static_cast<uint32_t>((kReads + pairs * kBlockWords - 1) / (pairs * kBlockWords));
  const TearArgs a{words.data(), done.data(), same ? 0u : pairs, pairs,
                   reads,        two_stores,  counts.data(),     reader.failure()};
  const int blocks = static_cast<int>(pairs);
  AllowShared(TearKernel, 0);
  if (!same) {  // the writer first: it goes on until the reader has finished
    const DeviceGuard other(writer.device());
    AllowShared(TearKernel, 0);
    TearArgs b = a;
    b.first_role = 0;
    b.failure = writer.failure();
    Launch(TearKernel, {blocks, kThreads, 0, true}, writer.stream(), b);
  }
  Launch(TearKernel, {same ? 2 * blocks : blocks, kThreads, 0, true}, reader.stream(), a);
  FinishBoth(reader, writer);
  return counts.Get()[0];
}

void AddTear(Bench& bench, Bench& writer, const std::string& name, const std::string& what) {
  const TearCounts one = RunTear(writer, bench, false), two = RunTear(writer, bench, true);
  bench.AddCount(
      name, what, one.torn, std::min(one.read, one.changes), two.torn,
      Format("%.3g read, %.3g written, %.3g changes seen; two stores: %.3g torn of %.3g", static_cast<double>(one.read),
             static_cast<double>(one.written), static_cast<double>(one.changes), static_cast<double>(two.torn),
             static_cast<double>(two.read)));
}

}  // namespace

void MeasureTear(Bench& bench) {
  AddTear(bench, bench, "tear.local", "torn 16-byte words, between SMs");
  const std::string what = "the same, written by another GPU";
  if (const PeerBench peer(bench); peer.get() != nullptr)
    AddTear(bench, *peer.get(), "tear.peer", what);
  else
    bench.Skip("tear.peer", what, "wrong", "0", peer.why());
}

}  // namespace musejax::bench

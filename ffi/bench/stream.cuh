// Device side of the measurements: the ring of stages that bulk copies fill, and a stream of weights that nobody uses,
// as load beside what is measured.
#pragma once

#include "bench/wait.cuh"
#include "common/layout.h"
#include "common/ptx.cuh"

namespace musejax::bench {

constexpr int kStages = 5;
constexpr uint32_t kStageBytes = Nvfp4TileBytes(4096);  // an NVFP4 row tile of the released model
static_assert(kStageBytes == 36'864, "design: ring of 5 x 36,864 bytes");
constexpr int kRingBytes = kStages * kStageBytes;

// Place in a ring of `size` stages, and the parity of its current phase. A consumer waits for `parity` of a full
// barrier; a producer for the other parity of an empty barrier, which a new barrier grants at once.
struct Cursor {
  uint32_t stage = 0, parity = 0;
  __device__ void Advance(uint32_t size = kStages) {
    if (++stage == size) stage = 0, parity ^= 1;
  }
};

// Called by all threads of the block.
__device__ inline void InitBarriers(uint64_t* bars, int count, uint32_t arrivals) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; ++i) ptx::MbarrierInit(&bars[i], arrivals);
    ptx::FenceMbarrierInit();
  }
  __syncthreads();
}

// MbarrierWaitParity with a report; the same answer in all lanes, so that a warp leaves as one.
__device__ inline bool WarpWait(uint64_t* bar, uint32_t parity, Failure* failure, Wait wait, uint64_t wanted) {
  const bool ok = __all_sync(~0u, ptx::MbarrierWaitParity(bar, parity));
  if (!ok && threadIdx.x % 32 == 0) Report(failure, wait, wanted, 0);
  return ok;
}

// ---- the stream as load ----

constexpr uint32_t kMaxDepth = 16;

struct StreamClock {
  uint64_t begin, end, bytes;  // of one block
};

struct StreamArgs {
  const uint8_t* src;     // [blocks][block_bytes]; each block goes through its own part again and again
  uint64_t block_bytes;   // larger than its share of L2
  uint32_t depth, bytes;  // copies in flight, bytes of each; depth 0: no stream
  StreamClock* clocks;    // [blocks]
};

// One thread: keeps `depth` copies in flight until *stop, then waits for the last ones. `full`: kMaxDepth barriers of
// one arrival.
__device__ inline void StreamWeights(const StreamArgs& a, uint8_t* ring, uint64_t* full, const volatile int* stop,
                                     Failure* failure) {
  if (a.depth == 0) return;
  const uint8_t* src = a.src + blockIdx.x * a.block_bytes;
  const uint32_t chunks = static_cast<uint32_t>(a.block_bytes / a.bytes);
  Cursor at;
  uint64_t copies = 0;
  const uint64_t begin = ptx::GlobalTimer();
  for (uint32_t chunk = 0; !*stop; ++copies) {
    if (!ptx::MbarrierWaitParity(&full[at.stage], at.parity ^ 1))
      return Report(failure, Wait::kStageFull, copies - a.depth, at.stage);
    ptx::MbarrierArriveExpectTx(&full[at.stage], a.bytes);
    ptx::CpAsyncBulk(ring + at.stage * a.bytes, src + static_cast<uint64_t>(chunk) * a.bytes, a.bytes, &full[at.stage]);
    at.Advance(a.depth);
    if (++chunk == chunks) chunk = 0;
  }
  for (uint32_t i = 0; i < a.depth; ++i, at.Advance(a.depth))
    if (!ptx::MbarrierWaitParity(&full[at.stage], at.parity ^ 1))
      return Report(failure, Wait::kStageFull, copies, at.stage);
  a.clocks[blockIdx.x] = {begin, ptx::GlobalTimer(), copies * a.bytes};
}

// ---- tagged words ----

// What is sent as the word of this number in a round.
__device__ inline ptx::Word RoundWord(uint32_t number, uint32_t round) {
  return ptx::Tagged(number, round, static_cast<uint16_t>(round));
}

// One of `threads` threads: until all words it looks after, numbers first, first + 1, ..., are those of the round.
// Compares payloads, too: ptxas narrows a load of which only the tag is used. False if that takes too long.
template <ptx::Scope kScope>
__device__ bool PollWords(const ptx::Word* words, uint32_t count, uint32_t first, uint32_t round, uint32_t thread,
                          uint32_t threads, Failure* failure) {
  constexpr int kAtOnce = 4;  // loads in flight a thread
  for (uint32_t base = thread; base < count; base += kAtOnce * threads) {
    uint32_t pending = 0;
    uint64_t seen = 0;
    for (int k = 0; k < kAtOnce; ++k) pending |= (base + k * threads < count) << k;
    const bool ok = ptx::SpinUntil([&] {
      ptx::Word got[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (pending >> k & 1) got[k] = ptx::LdRelaxed<kScope>(words + base + k * threads);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (!(pending >> k & 1)) continue;
        const ptx::Word wanted = RoundWord(first + base + k * threads, round);
        seen = got[k].hi;
        if (got[k].lo == wanted.lo && got[k].hi == wanted.hi) pending &= ~(1u << k);
      }
      return pending == 0;
    });
    if (!ok) {
      Report(failure, Wait::kWord, RoundWord(0, round).hi, seen);
      return false;
    }
  }
  return true;
}

}  // namespace musejax::bench

// The weight stream: warp 0 copies weights through a ring of stages in shared memory in the order in which the MMA
// warps consume them; and the buffers in which MMA warps leave the sums of their ranges of K for the warps that add
// them.
//
// A stage is consumed by all 8 MMA warps, each its own range of K. Only data written before this launch passes here.
#pragma once

#include "common/rows.cuh"
#include "layer/context.cuh"

namespace musejax::layer {

inline constexpr int kAdders = kFirstMmaWarp - 1;  // warps 1 to 3

struct SharedBuffers {
  alignas(128) uint8_t ring[kStages][kStageBytes];
  alignas(16) float partial[kAdders][kMmaWarps][kPartialFloats];  // [16 rows][16 columns], or [2 tiles][8 rows][16]
  uint64_t full[kStages], empty[kStages];
  uint64_t partial_full[kAdders], partial_empty[kAdders];
};

// They lie behind the pass in shared memory; found anew at each use, so that the compiler sees which memory it is.
__device__ __forceinline__ SharedBuffers& Buffers() {
  return *reinterpret_cast<SharedBuffers*>(ptx::DynamicShared() + kPassBytes + kWarps * kContextBytes);
}

__device__ inline void InitBuffers(SharedBuffers& s) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) ptx::MbarrierInit(&s.full[i], 1), ptx::MbarrierInit(&s.empty[i], kMmaWarps);
    for (int i = 0; i < kAdders; ++i)
      ptx::MbarrierInit(&s.partial_full[i], kMmaWarps), ptx::MbarrierInit(&s.partial_empty[i], 1);
    ptx::FenceMbarrierInit();
  }
}

// False: given up.
__device__ __forceinline__ bool WaitBarrier(Waiter waiter, uint64_t* bar, uint32_t parity) {
  Waiter::Wait wait = waiter.Begin();
  while (!ptx::MbarrierTryWaitParity(bar, parity))
    if (wait.Expired(parity, ~0u)) return false;
  return true;
}

// A position in the ring, counted alike by the producer and by every consumer.
struct RingCursor {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void Next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Warp 0, all lanes in step. What comes between two stages counts: with few of them an SM gets the memory's full rate
// only if a stage is asked for again within a fraction of a microsecond. So addresses are worked out 32 at a time.
struct Producer {
  RingCursor at;
  uint64_t policy;
  int outstanding = 0;
  bool stuck = false;    // a wait for a stage was given up
  uint64_t blocked = 0;  // ns in which no stage was free, of a build with MUSEJAX_LAYER_STAMPS

  // The next stage: `bytes` (a multiple of 16) from `from`.
  __device__ __forceinline__ void Push(Waiter waiter, const void* from, uint32_t bytes) {
    PushParts(waiter, bytes, [&](const auto& copy) { copy(0, from, bytes); });
  }
  // The next stage, of several parts, `bytes` together: parts calls copy(offset in the stage, from, bytes) for each.
  template <typename Parts>
  __device__ __forceinline__ void PushParts(Waiter waiter, uint32_t bytes, const Parts& parts) {
    if (stuck) return;
#if defined(MUSEJAX_LAYER_STAMPS)
    blocked -= ptx::GlobalTimer();
#endif
    stuck = !__all_sync(kAllLanes, WaitBarrier(waiter, &Buffers().empty[at.stage], at.phase ^ 1));
#if defined(MUSEJAX_LAYER_STAMPS)
    blocked += ptx::GlobalTimer();
#endif
    if (stuck) return;
    if (threadIdx.x % 32 == 0) {
      ptx::MbarrierArriveExpectTx(&Buffers().full[at.stage], bytes);
      parts([&](int offset, const void* from, uint32_t n) {
        ptx::CpAsyncBulk(Buffers().ring[at.stage] + offset, from, n, &Buffers().full[at.stage], policy);
      });
    }
    at.Next();
    if (outstanding < kStages) ++outstanding;
  }
  // Before leaving early: copies still on their way must land.
  __device__ void Drain() {
    RingCursor last = at;
    for (int i = 0; i < outstanding; ++i) {
      if (last.stage-- == 0) last.stage = kStages - 1, last.phase ^= 1;
      while (!ptx::MbarrierTryWaitParity(&Buffers().full[last.stage], last.phase)) {
      }
    }
  }
};

// Calls push(address that lane i worked out) for i = begin .. end - 1 in order; work_out(i) is called 32 at a time.
template <typename WorkOut, typename Push>
__device__ __forceinline__ void ForAddresses(int begin, int end, const WorkOut& work_out, const Push& push) {
#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    const int mine = first + int(threadIdx.x % 32);
    const uint64_t address = reinterpret_cast<uint64_t>(work_out(Min(mine, end - 1)));
#pragma unroll 1
    for (int i = first; i < Min(end, first + 32); ++i)
      push(reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, address, i - first)));
  }
}

// An MMA warp, or one that adds partials. Unit u of all GEMMs together uses buffer u mod 3 and is added by warp
// 1 + u mod 3, once a pass: so every warp sees each barrier's phases one after the other.
struct Consumer {
  RingCursor at;
  int buffer = 0;       // of the unit at hand
  uint32_t phases = 0;  // bit b: parity of the next use of buffer b
  uint32_t stuck = 0;   // not 0: a wait for a stage was given up

  __device__ __forceinline__ uint8_t* Wait(Waiter waiter) {
    if (!WaitBarrier(waiter, &Buffers().full[at.stage], at.phase)) stuck = 1;
    __syncwarp();
    return Buffers().ring[at.stage];
  }
  // After the warp's last read of the stage. The next copy into it, by another proxy, may come as soon as all warps
  // have arrived, so reads must have ended, not only begun: `loaded` is made of something of each of them, or a
  // fence stands before. A warp that has given up does not free the stage: a copy may still be on its way.
  __device__ __forceinline__ void Release(uint32_t loaded = 0) {
    __syncwarp();
    ptx::MbarrierArriveAfter(&Buffers().empty[at.stage], loaded, threadIdx.x % 32 | stuck);
    at.Next();
  }
  __device__ void NextUnit() { buffer = buffer == kAdders - 1 ? 0 : buffer + 1; }

  // MMA warp `warp` of 8: where its sums of the pass go; then Leave.
  __device__ float* Enter(Waiter waiter, int warp) {
    WaitBarrier(waiter, &Buffers().partial_empty[buffer], (phases >> buffer & 1) ^ 1);
    __syncwarp();
    return Buffers().partial[buffer][warp];
  }
  __device__ void Leave() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(&Buffers().partial_full[buffer]);
    phases ^= 1u << buffer;
  }

  // Adding warps: whether the unit is this warp's; the sums of all 8 warps in a pass; then Clear.
  __device__ bool Mine() const { return buffer == int(threadIdx.x / 32) - 1; }
  __device__ const float (*Take(Waiter waiter)) [kPartialFloats] {
    WaitBarrier(waiter, &Buffers().partial_full[buffer], phases >> buffer & 1);
    __syncwarp();
    return Buffers().partial[buffer];
  } __device__ void Clear() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::MbarrierArrive(&Buffers().partial_empty[buffer]);
    phases ^= 1u << buffer;
  }
};

}  // namespace musejax::layer

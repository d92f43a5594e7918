// A barrier over all blocks of a kernel, of this rank alone or of all ranks: what any of them wrote before it, into any
// rank's memory, all of them read after it.
//
// Its memory, 64 words at the start of a rank's frames, counts on from launch to launch: word 0 the arrivals of this
// rank's blocks, word 32 + r the barriers of all ranks at which rank r has arrived. The last block of a rank to arrive
// says so to all ranks. Every block must be resident, and all must pass the same barriers in the same order.
#pragma once

#include "comm/exchange.h"
#include "comm/wait.cuh"
#include "common/rows.cuh"

namespace musejax::comm {

inline constexpr int kBarrierBytes = 256;

// Barriers passed so far, in all launches; a block keeps its own in device memory between launches.
struct Passed {
  uint32_t all, exchanges;  // of them, those of all ranks
};

// In shared memory; thread 0 counts.
class Barrier {
 public:
  // By thread 0. ranks: those that run, the first ones of `exchange`, which stays where it is.
  __device__ void Begin(const Exchange* exchange, int rank, int ranks, Waiter waiter, Passed passed) {
    exchange_ = exchange, rank_ = rank, ranks_ = ranks, waiter_ = waiter, passed_ = passed;
  }
  // By all threads. What follows until Wait may not depend on other blocks, nor touch what they read.
  __device__ void Arrive(bool all_ranks) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    ++passed_.all, passed_.exchanges += all_ranks;
    all_ranks_ = all_ranks && ranks_ > 1;
    all_ranks_ ? __threadfence_system() : __threadfence();
    const uint32_t before = atomicAdd(Memory(rank_), 1u);
    if (!all_ranks_ || before + 1 != passed_.all * gridDim.x) return;
    __threadfence_system();  // what the others wrote, too
    for (int r = 0; r < ranks_; ++r) ptx::StRelaxed<Scope::kSys>(Memory(r) + 32 + rank_, passed_.exchanges);
  }
  // By all threads.
  __device__ void Wait() {
    if (threadIdx.x < 32) {
      __syncwarp();
      const uint32_t* word = Memory(rank_) + (all_ranks_ ? 32 + threadIdx.x % ranks_ : 0);
      const uint32_t wanted = all_ranks_ ? passed_.exchanges : passed_.all * gridDim.x;
      for (Waiter::Wait wait = waiter_.Begin(); !waiter_.Aborted();) {
        const uint32_t seen = ptx::LdAcquire<Scope::kSys>(word);
        const bool there = int32_t(seen - wanted) >= 0;
        if (__all_sync(kAllLanes, there)) break;
        if (__any_sync(kAllLanes, wait.Expired(wanted, seen))) break;
      }
    }
    __syncthreads();
  }
  __device__ Passed passed() const { return passed_; }

 private:
  __device__ uint32_t* Memory(int rank) const { return reinterpret_cast<uint32_t*>(exchange_->frames[rank]); }

  const Exchange* exchange_;
  int rank_, ranks_;
  Waiter waiter_;
  Passed passed_;
  bool all_ranks_;
};

}  // namespace musejax::comm

// Waits of a kernel for others, on this GPU or another: every one has a time limit. On expiry the first waiter fills
// the error block, all others leave at once, and values received after that mean nothing.
#pragma once

#include "comm/errors.h"
#include "common/ptx.cuh"

namespace musejax::comm {

using ptx::Scope;

// Where a warp is, and how its waits went; in shared memory.
struct Where {
  ErrorBlock* error;
  uint32_t* abort;  // in device memory, of all blocks: somebody has given up
  uint32_t budget;  // of a wait, in 1,024 ns
  int rank, block, warp, layer, phase;
  uint32_t aborted;       // waits end at once from here on
  uint32_t expired;       // a wait of this warp was the one that took too long:
  uint32_t wanted, seen;  // for this, finding that
  uint32_t started;       // of the wait at hand, in 1,024 ns
};

// Whether to give up a wait that takes long. first: begins to count the time.
inline __device__ __noinline__ bool Overdue(Where* where, bool first, uint32_t wanted, uint32_t seen) {
  __builtin_assume(__isShared(where));
  const uint32_t now = uint32_t(ptx::GlobalTimer() >> 10);
  if (first) where->started = now;
  const bool late = now - where->started > where->budget;
  if (!late && !where->aborted && !ptx::LdRelaxed<Scope::kGpu>(where->abort)) return false;
  if (late && !where->aborted) where->expired = 1, where->wanted = wanted, where->seen = seen;
  where->aborted = 1;
  ptx::StRelaxed<Scope::kGpu>(where->abort, 1u);
  return true;
}

// A thread's waits. Small, so that a copy costs nothing; no calls, so that registers stay where they are.
struct Waiter {
  Where* where;

  // One wait: Expired is called after each try that failed; true: give up.
  struct Wait {
    Where* where;
    uint32_t tries = 0;
    __device__ __forceinline__ bool Expired(uint32_t wanted, uint32_t seen) {
      return ++tries % 128 == 0 && Overdue(where, tries == 128, wanted, seen);
    }
  };
  __device__ __forceinline__ Wait Begin() const { return {where}; }
  __device__ __forceinline__ bool Aborted() const { return *const_cast<volatile uint32_t*>(&where->aborted) != 0; }
  __device__ __forceinline__ void At(int layer, int phase) const {
    if (!where->aborted) where->layer = layer, where->phase = phase;
  }

  // Instead of a launch: this warp takes it for given up. reports: as the one to tell of it.
  __device__ void Refuse(bool reports) const {
    where->phase = kRefused, where->expired = reports, where->aborted = 1;
  }
  // At the end: the first warp whose wait expired fills the error block.
  __device__ void Report() const {
    ErrorBlock* error = where->error;
    if (!where->expired || atomicCAS_system(&error->set, 0u, 1u) != 0) return;
    error->rank = where->rank, error->block = where->block, error->warp = where->warp;
    error->layer = where->layer, error->phase = where->phase, error->wanted = where->wanted, error->seen = where->seen;
    __threadfence_system();
    *reinterpret_cast<volatile uint32_t*>(&error->set) = 2;
  }
};

}  // namespace musejax::comm

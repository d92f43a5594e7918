// A spin that ran out of time: what the device leaves for the host.
#pragma once

#include <cstdint>

namespace musejax::bench {

enum class Wait : uint32_t { kStageFull, kStageEmpty, kPartialsFull, kPartialsEmpty, kBarrier, kWord, kFlag, kReaders };

inline const char* WaitName(Wait wait) {
  constexpr const char* names[] = {"a bulk copy",      "a free stage",  "the partial sums", "free partial sums",
                                   "the grid barrier", "a tagged word", "the peer's flag",  "the readers of the words"};
  return names[static_cast<uint32_t>(wait)];
}

// The first wait of a launch that ran out of time.
struct Failure {
  uint32_t taken;  // 0: none
  Wait wait;
  uint32_t block, thread;
  uint64_t wanted, seen;
};

#if defined(__CUDACC__)
__device__ inline void Report(Failure* failure, Wait wait, uint64_t wanted, uint64_t seen) {
  if (atomicCAS(&failure->taken, 0u, 1u) != 0) return;
  failure->wait = wait;
  failure->block = blockIdx.x;
  failure->thread = threadIdx.x;
  failure->wanted = wanted;
  failure->seen = seen;
}
#endif

}  // namespace musejax::bench

// Runs CUDA grids on the CPU, all of its threads as fibers of one host thread, so that the layer kernel can be tested
// where there is no GPU: same source, same tasks, same waits. A thread runs until it waits (a warp collective, a block
// barrier, a spin that has not succeeded) and then the next one does; which one is next can be shuffled by a seed.
//
// Only what the layer kernel uses is here (cuda_runtime.h and common/ptx.cuh of this folder). Memory is sequentially
// consistent and nothing tears, so ordering errors of a real GPU do not show; deadlocks, index and counting errors do.
#pragma once

#include <cstdint>
#include <functional>

namespace emulator {

inline constexpr int kWarpSize = 32;

// What a warp's lanes deposit for a collective: two sets, for the lanes of the collective before may still be reading.
struct Warp {
  struct Slot {
    uint32_t words[16];
  };
  Slot slots[2][kWarpSize];
  int arrived = 0;
  uint64_t generation = 0;
};

struct Block {
  struct Barrier {
    int arrived = 0;
    uint64_t generation = 0;
  };
  int grid, index;  // which of the grids that run at once, and which block of it
  uint8_t* shared;
  Barrier barriers[16];
};

struct Thread {
  int index;  // in the block
  Block* block;
  Warp* warp;
};

extern Thread* current;
extern int grid_blocks, block_threads;

void Yield();
// Runs `kernel` on every thread of `grids` grids of `blocks` blocks, all at once.
void Launch(int grids, int blocks, int threads, size_t shared_bytes, uint32_t seed,
            const std::function<void()>& kernel);

// All lanes of the warp arrive with up to 16 words each; returns the slots, valid until the collective after the next.
const Warp::Slot* Exchange(const uint32_t* words, int count);
void BlockBarrier(int id, int threads);

}  // namespace emulator

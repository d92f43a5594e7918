// Runs CUDA grids on the CPU, all of its threads as fibers of one host thread, so that the layer kernel can be tested
// where there is no GPU: same source, same tasks, same waits. A thread runs until it waits (a warp collective, a block
// barrier, a spin that has not succeeded) and then the next one does; which one is next can be shuffled by a seed.
//
// In rough weather warps have unequal speeds that change, whole blocks stop for a while, and what is sent (tagged words,
// bulk copies) arrives late and out of order, except at one address.
//
// Only what the layer kernel uses is here (cuda_runtime.h and common/ptx.cuh of this folder). Shared memory is
// sequentially consistent and nothing tears, so some ordering errors of a real GPU do not show; deadlocks, index and
// counting errors do, and in rough weather what relies on speed.
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
  uint64_t asleep = 0;  // until this turn
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
// As Yield; in rough weather for some turns.
void Sleep();
// Does what arrives at `address`: now, or in rough weather at some later turn.
void Arrive(const void* address, std::function<void()> what);

struct Order {
  uint32_t seed;  // of the order in which warps take turns; 0: as they are numbered
  bool rough;     // weather
};
// Runs `kernel` on every thread of `grids` grids of `blocks` blocks, all at once.
void Launch(int grids, int blocks, int threads, size_t shared_bytes, Order order, const std::function<void()>& kernel);

// All lanes of the warp arrive with up to 16 words each; returns the slots, valid until the collective after the next.
const Warp::Slot* Exchange(const uint32_t* words, int count);
void BlockBarrier(int id, int threads);

}  // namespace emulator

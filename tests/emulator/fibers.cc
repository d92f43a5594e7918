#include "fibers.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

// Saves the caller's registers and stack in *from and goes on with those in `to`. ucontext would ask the kernel for the
// signal mask each time.
extern "C" void EmulatorSwitch(void** from, void* to);
asm(R"(
.text
.globl EmulatorSwitch
EmulatorSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulator {

Thread* current = nullptr;
int grid_blocks = 0, block_threads = 0;

namespace {

constexpr size_t kStack = 64 << 10;

struct Fiber {
  Thread thread;
  void* stack_pointer;
  std::unique_ptr<uint8_t[]> stack;
  bool done = false;
};

void* scheduler = nullptr;
Fiber* running = nullptr;
const std::function<void()>* body = nullptr;

void Enter() {
  (*body)();
  running->done = true;
  for (;;) EmulatorSwitch(&running->stack_pointer, scheduler);
}

void Prepare(Fiber& f) {
  f.stack.reset(new uint8_t[kStack]);
  uintptr_t top = reinterpret_cast<uintptr_t>(f.stack.get() + kStack) & ~uintptr_t(63);
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;                          // where Enter would return to, so that its frame is aligned
  *--sp = reinterpret_cast<void*>(&Enter);  // popped by ret
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  f.stack_pointer = sp;
}

}  // namespace

void Yield() { EmulatorSwitch(&running->stack_pointer, scheduler); }

void Launch(int grids, int blocks, int threads, size_t shared_bytes, uint32_t seed,
            const std::function<void()>& kernel) {
  grid_blocks = blocks, block_threads = threads, body = &kernel;
  blocks *= grids;
  std::vector<std::unique_ptr<uint8_t, decltype(&free)>> shared;
  std::vector<Block> all(blocks);
  std::vector<Warp> warps(blocks * threads / kWarpSize);
  std::vector<Fiber> fibers(blocks * threads);
  for (int b = 0; b < blocks; ++b) {
    shared.emplace_back(static_cast<uint8_t*>(aligned_alloc(128, (shared_bytes + 127) / 128 * 128)), &free);
    memset(shared.back().get(), 0xAB, shared_bytes);  // a kernel finds anything in shared memory
    all[b].grid = b / grid_blocks, all[b].index = b % grid_blocks, all[b].shared = shared.back().get();
    for (int t = 0; t < threads; ++t) {
      Fiber& f = fibers[b * threads + t];
      f.thread = {t, &all[b], &warps[(b * threads + t) / kWarpSize]};
      Prepare(f);
    }
  }
  std::vector<int> order(fibers.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
  std::mt19937 random(seed);
  if (seed) {  // whole warps change places
    for (size_t w = warps.size() - 1; w > 0; --w) {
      const size_t other = random() % (w + 1);
      for (int i = 0; i < kWarpSize; ++i) std::swap(order[w * kWarpSize + i], order[other * kWarpSize + i]);
    }
  }
  for (size_t left = fibers.size(); left;) {
    left = 0;
    for (const int i : order) {
      if (fibers[i].done) continue;
      running = &fibers[i], current = &fibers[i].thread;
      EmulatorSwitch(&scheduler, running->stack_pointer);
      left += !fibers[i].done;
    }
  }
  current = nullptr;
}

const Warp::Slot* Exchange(const uint32_t* words, int count) {
  Warp& w = *current->warp;
  const uint64_t generation = w.generation;
  memcpy(w.slots[generation & 1][current->index % kWarpSize].words, words, 4 * count);
  if (++w.arrived == kWarpSize)
    w.arrived = 0, ++w.generation;
  else
    while (w.generation == generation) Yield();
  return w.slots[generation & 1];
}

void BlockBarrier(int id, int threads) {
  Block::Barrier& b = current->block->barriers[id];
  const uint64_t generation = b.generation;
  if (++b.arrived == threads)
    b.arrived = 0, ++b.generation;
  else
    while (b.generation == generation) Yield();
}

}  // namespace emulator

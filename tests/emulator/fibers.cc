#include "fibers.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <unordered_map>
#include <utility>
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

struct Weather {
  std::mt19937 random;
  uint64_t turn = 0;
  std::multimap<uint64_t, std::function<void()>> arrivals;  // by turn
  std::unordered_map<const void*, uint64_t> last;           // arrival at an address
  std::vector<uint32_t> slowness;                           // of a warp: it runs in one turn of slowness + 1
  std::vector<uint64_t> stopped;                            // of a block: until this turn

  Weather(uint32_t seed, size_t warps, size_t blocks) : random(seed), slowness(warps), stopped(blocks) {}

  uint64_t Below(uint64_t n) { return random() % n; }
  void Turn() {
    ++turn;
    while (!arrivals.empty() && arrivals.begin()->first <= turn) {
      const auto what = std::move(arrivals.begin()->second);
      arrivals.erase(arrivals.begin());
      what();
    }
    if (turn % 512 == 1) {
      for (uint32_t& s : slowness) s = Below(8) < 5 ? 0 : Below(8) ? 3 : 63;
      last.clear();
    }
    for (uint64_t& s : stopped)
      if (Below(2048) == 0) s = turn + Below(1024);
  }
  bool Holds(size_t block, size_t warp, const Warp& w) {
    return stopped[block] > turn || w.asleep > turn || Below(slowness[warp] + 1) != 0;
  }
  void Add(const void* address, std::function<void()> what) {
    const uint64_t delay = Below(8) ? Below(4) : Below(16) ? Below(64) : Below(2048);
    uint64_t& due = last[address];
    due = std::max(due, turn + delay);
    arrivals.emplace(due, std::move(what));
  }
};
Weather* weather = nullptr;

}  // namespace

void Yield() { EmulatorSwitch(&running->stack_pointer, scheduler); }

void Sleep() {
  if (weather) current->warp->asleep = weather->turn + 6;
  Yield();
}

void Arrive(const void* address, std::function<void()> what) {
  if (weather)
    weather->Add(address, std::move(what));
  else
    what();
}

void Launch(int grids, int blocks, int threads, size_t shared_bytes, Order how, const std::function<void()>& kernel) {
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
  std::mt19937 random(how.seed);
  if (how.seed) {  // whole warps change places
    for (size_t w = warps.size() - 1; w > 0; --w) {
      const size_t other = random() % (w + 1);
      for (int i = 0; i < kWarpSize; ++i) std::swap(order[w * kWarpSize + i], order[other * kWarpSize + i]);
    }
  }
  Weather rough(how.seed, warps.size(), all.size());
  weather = how.rough ? &rough : nullptr;
  std::vector<uint8_t> held(warps.size());
  for (size_t left = fibers.size(); left || !rough.arrivals.empty();) {
    left = 0;
    if (how.rough) {
      rough.Turn();
      for (size_t w = 0; w < warps.size(); ++w) held[w] = rough.Holds(w * kWarpSize / threads, w, warps[w]);
    }
    for (const int i : order) {
      if (fibers[i].done) continue;
      if (held[i / kWarpSize]) {
        ++left;
        continue;
      }
      running = &fibers[i], current = &fibers[i].thread;
      EmulatorSwitch(&scheduler, running->stack_pointer);
      left += !fibers[i].done;
    }
  }
  current = nullptr, weather = nullptr;
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

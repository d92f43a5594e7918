// The functions of ffi/common/ptx.cuh that the layer kernel uses, for the emulator. An mbarrier's word holds, from the
// low end: arrivals due in this phase (16 bits), arrivals a phase needs (16), bytes expected less bytes come (31), and
// the parity of the phase at hand (top bit).
#pragma once

#include <cuda_runtime.h>

#include <cassert>
#include <cstdint>

namespace musejax::ptx {

enum class Scope { kGpu, kSys };

struct EmulatedMbarrier {
  uint64_t* word;
  uint32_t due() const { return *word & 0xFFFF; }
  uint32_t need() const { return *word >> 16 & 0xFFFF; }
  uint32_t bytes() const { return *word >> 32 & 0x7FFFFFFF; }
  uint32_t parity() const { return uint32_t(*word >> 63); }
  void Set(uint32_t due, uint32_t need, uint32_t bytes, uint32_t parity) {
    *word = uint64_t(parity) << 63 | uint64_t(bytes) << 32 | need << 16 | due;
    if (due == 0 && bytes == 0) *word = uint64_t(parity ^ 1) << 63 | need << 16 | need;
  }
};

inline void MbarrierInit(uint64_t* bar, uint32_t count) { *bar = uint64_t(count) << 16 | count; }
inline void FenceMbarrierInit() {}
inline void MbarrierArrive(uint64_t* bar) {
  EmulatedMbarrier b{bar};
  assert(b.due() > 0);
  b.Set(b.due() - 1, b.need(), b.bytes(), b.parity());
}
inline void MbarrierArriveAfter(uint64_t* bar, uint32_t, uint32_t blocked) {
  if (!blocked) MbarrierArrive(bar);
}
inline void MbarrierArriveExpectTx(uint64_t* bar, uint32_t bytes) {
  EmulatedMbarrier b{bar};
  assert(b.due() > 0);
  b.Set(b.due() - 1, b.need(), b.bytes() + bytes, b.parity());
}
inline bool MbarrierTryWaitParity(uint64_t* bar, uint32_t parity) {
  if (EmulatedMbarrier{bar}.parity() != (parity & 1)) return true;
  emulator::Yield();
  return EmulatedMbarrier{bar}.parity() != (parity & 1);
}

// To break copies on purpose: they count as come when they are asked for.
inline bool counts_early = false;
inline uint64_t CreatePolicyEvictFirst() { return 0; }
inline void CpAsyncBulk(void* shared, const void* global, uint32_t bytes, uint64_t* bar, uint64_t = 0) {
  assert(reinterpret_cast<uintptr_t>(shared) % 16 == 0 && reinterpret_cast<uintptr_t>(global) % 16 == 0 &&
         bytes % 16 == 0 && bytes > 0);
  const auto count = [=] {
    EmulatedMbarrier b{bar};
    assert(b.bytes() >= bytes);
    b.Set(b.due(), b.need(), b.bytes() - bytes, b.parity());
  };
  if (counts_early) count();
  emulator::Arrive(shared, [=, early = counts_early] {
    memcpy(shared, global, bytes);
    if (!early) count();
  });
}
inline void (*on_prefetch)(const void* global, uint32_t bytes) = nullptr;
inline void CpAsyncBulkPrefetchL2(const void* global, uint32_t bytes) {
  assert(reinterpret_cast<uintptr_t>(global) % 16 == 0 && bytes % 16 == 0 && bytes > 0);
  if (on_prefetch) on_prefetch(global, bytes);
}
inline void FenceProxyAsync() {}

inline float EmulatedBf16(uint32_t pair, int half) { return __uint_as_float(half ? pair & 0xFFFF0000u : pair << 16); }

inline void MmaM16N8K16Bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto* slots = emulator::Exchange(words, 6);
  const int lane = emulator::current->index % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const int from = k % 8 / 2, high = k / 8;
      const float x = EmulatedBf16(slots[row % 8 * 4 + from].words[row / 8 + 2 * high], k & 1);
      const float y = EmulatedBf16(slots[column * 4 + from].words[4 + high], k & 1);
      sum += double(x) * y;
    }
    d[i] = float(sum);
  }
}

inline uint32_t CvtRnBf16x2(float low, float high) {
  const auto rounded = [](float f) {
    const uint32_t u = __float_as_uint(f);
    return (u & 0x7FFFFFFF) > 0x7F800000 ? (u >> 16 | 0x40) & 0xFFFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  };
  return rounded(high) << 16 | rounded(low);
}

inline float Ex2Approx(float x) { return float(exp2(double(x))); }

template <int kHalf>
uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  const float s = EmulatedBf16(b, kHalf);
  return CvtRnBf16x2(EmulatedBf16(a, 0) * s, EmulatedBf16(a, 1) * s);
}

// Of an 8 x 8 matrix whose row lane / 4 has columns 2 (lane % 4) and the next in this lane: its transpose likewise.
inline uint32_t Movmatrix(uint32_t a) {
  const auto* slots = emulator::Exchange(&a, 1);
  const int lane = emulator::current->index % 32, row = lane / 4, column = lane % 4 * 2;
  const auto at = [&](int r, int c) { return slots[r * 4 + c / 2].words[0] >> (c & 1) * 16 & 0xFFFF; };
  return at(column + 1, row) << 16 | at(column, row);
}

struct alignas(16) Word {
  uint64_t lo, hi;
};
// Now and then the others run: a spin on a word must let its writer go on.
template <Scope, typename T>
T LdRelaxed(const T* global) {
  static uint32_t loads = 0;
  if (++loads % 32 == 0) emulator::Yield();
  return *global;
}
template <Scope, typename T, typename V>
void StRelaxed(T* global, V value) {
  emulator::Arrive(global, [=] { *global = value; });
}

template <Scope kScope>
uint32_t LdAcquire(const uint32_t* global) {
  return LdRelaxed<kScope>(global);
}
// The thread that copies is the one that waits, so when it comes does not matter.
inline void CpAsync16(void* shared, const void* global) {
  assert(reinterpret_cast<uintptr_t>(shared) % 16 == 0 && reinterpret_cast<uintptr_t>(global) % 16 == 0);
  memcpy(shared, global, 16);
}
inline void CpAsyncCommit() {}
template <int>
void CpAsyncWait() {}

inline uint32_t AndOr(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | c; }
inline void BarSync(uint32_t id, uint32_t threads) { emulator::BlockBarrier(int(id), int(threads)); }

// Simulated time: each read is a microsecond later, and lets the others run.
inline uint64_t GlobalTimer() {
  static uint64_t now = 0;
  return now += 1000;
}
inline uint32_t ThreadOfBlock() { return threadIdx.x; }
inline void NanoSleep(uint32_t) { emulator::Sleep(); }
inline uint8_t* DynamicShared() { return emulator::current->block->shared; }

inline constexpr uint64_t kSpinBudgetNs = 2'000'000'000;

}  // namespace musejax::ptx

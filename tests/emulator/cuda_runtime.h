// What the kernels use of CUDA's language and runtime, for the emulator (fibers.h).
#pragma once

#include <cmath>
#include <cstring>

#include "fibers.h"

#define __CUDACC__ 1
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __shared__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __builtin_assume(x)

struct EmulatedIndex {
  struct X {
    int (*get)();
    operator unsigned() const { return unsigned(get()); }
  } x;
};
inline const EmulatedIndex threadIdx{{[] { return emulator::current->index; }}};
inline const EmulatedIndex blockIdx{{[] { return emulator::current->block->index; }}};
inline const EmulatedIndex gridDim{{[] { return emulator::grid_blocks; }}};
inline const EmulatedIndex blockDim{{[] { return emulator::block_threads; }}};

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
using cudaError_t = int;
using cudaStream_t = void*;

template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline unsigned __float_as_uint(float f) {
  unsigned u;
  memcpy(&u, &f, 4);
  return u;
}
inline float __uint_as_float(unsigned u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline int __popc(unsigned u) { return __builtin_popcount(u); }
inline int __clz(int u) { return u ? __builtin_clz(unsigned(u)) : 32; }
inline int __ffs(int u) { return __builtin_ffs(u); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return unsigned((uint64_t(high) << 32 | low) >> (n & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return out;
}

inline unsigned __vmaxu2(unsigned a, unsigned b) {
  const unsigned low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
  return ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16 | low;
}

template <typename T>
T EmulatedShuffle(T value, int from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint32_t words[2] = {};
  memcpy(words, &value, sizeof(T));
  const auto* slots = emulator::Exchange(words, 2);
  T out;
  memcpy(&out, slots[from & 31].words, sizeof(T));
  return out;
}
template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  return EmulatedShuffle(value, (emulator::current->index % 32) / width * width + from % width);
}
inline bool __shfl_sync(unsigned, bool value, int from) { return EmulatedShuffle(int(value), from) != 0; }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return EmulatedShuffle(value, (emulator::current->index % 32) ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned delta, int width = 32) {
  const int lane = emulator::current->index % 32;
  return EmulatedShuffle(value, lane % width >= int(delta) ? lane - int(delta) : lane);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  const int lane = emulator::current->index % 32;
  return EmulatedShuffle(value, lane + int(delta) < 32 ? lane + int(delta) : lane);
}
inline unsigned __ballot_sync(unsigned, bool yes) {
  const uint32_t word = yes;
  const auto* slots = emulator::Exchange(&word, 1);
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) out |= slots[i].words[0] << i;
  return out;
}
inline bool __any_sync(unsigned mask, bool yes) { return __ballot_sync(mask, yes) != 0; }
inline bool __all_sync(unsigned mask, bool yes) { return __ballot_sync(mask, !yes) == 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  const auto* slots = emulator::Exchange(&v, 1);
  unsigned out = 0;
  for (int i = 0; i < 32; ++i) out = slots[i].words[0] > out ? slots[i].words[0] : out;
  return out;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return ~__reduce_max_sync(mask, ~v); }
inline void __syncwarp(unsigned = ~0u) { emulator::Exchange(nullptr, 0); }
inline void __syncthreads() { emulator::BlockBarrier(0, emulator::block_threads); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline unsigned atomicCAS_system(unsigned* at, unsigned expected, unsigned value) {
  const unsigned old = *at;
  if (old == expected) *at = value;
  return old;
}
inline unsigned atomicOr(unsigned* at, unsigned value) {
  const unsigned old = *at;
  *at |= value;
  return old;
}
template <typename T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at += value;
  return old;
}

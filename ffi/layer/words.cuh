// Tagged words: 16 bytes, three 32-bit registers of payload and a 32-bit tag, written and read as one access, so that
// data is its own flag and no fence is needed. 8-byte words hold one register and a tag.
//
// The tag is the epoch of the layer that wrote the word, compared for equality only. Every spin is bounded: on expiry
// the first waiter fills the error block, all others leave at once, and values received after that mean nothing.
#pragma once

#include "comm/wait.cuh"
#include "common/rows.cuh"
#include "layer/sizes.h"

namespace musejax::layer {

inline constexpr uint32_t kPollNs = 64;  // between two looks at a word that is not there yet

using ptx::Scope;
using ptx::Word;
using comm::ErrorBlock;
using comm::Overdue;
using comm::Waiter;
using comm::Where;

__device__ __forceinline__ Word MakeWord(uint32_t r0, uint32_t r1, uint32_t r2, uint32_t tag) {
  return {uint64_t(r1) << 32 | r0, uint64_t(tag) << 32 | r2};
}
__device__ __forceinline__ uint32_t EpochOf(const Word& w) { return uint32_t(w.hi >> 32); }
// Register i of 3.
__device__ __forceinline__ uint32_t Register(const Word& w, int i) {
  return i == 0 ? uint32_t(w.lo) : i == 1 ? uint32_t(w.lo >> 32) : uint32_t(w.hi);
}

template <Scope kScope>
__device__ __forceinline__ void Publish(Word* to, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t tag) {
  ptx::StRelaxed<kScope>(to, MakeWord(r0, r1, r2, tag));
}

// Waits until the tag of the word that the first of `lanes` misses is there. Only this word is read, and not all the
// time: thousands of warps wait at once, and what they ask of L2 delays those that they wait for. By whole warps;
// false: given up.
//   missing: where the lane's tag is
inline __device__ __noinline__ bool Await(Where* where, uint32_t tag, uint32_t lanes, const uint32_t* missing) {
  __builtin_assume(__isShared(where));
  Waiter::Wait wait{where};
  const uint64_t first = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(missing), __ffs(int(lanes)) - 1);
  for (bool there = false;; ptx::NanoSleep(kPollNs)) {
    const uint32_t seen = ptx::LdRelaxed<Scope::kSys>(reinterpret_cast<const uint32_t*>(first));
    there = seen == tag;
    if (there || wait.Expired(tag, seen)) return __all_sync(kAllLanes, there);  // all lanes go on, or all give up
  }
}

// Waits for the word of lane 31 alone, before all lanes look for theirs: looks of all lanes that come too early take L2's
// time from those that are waited for.
__device__ __forceinline__ void AwaitOne(Waiter waiter, uint32_t tag, const Word* word) {
  Await(waiter.where, tag, 0x80000000u, reinterpret_cast<const uint32_t*>(word) + 3);
}
__device__ __forceinline__ void AwaitOne(Waiter waiter, uint32_t tag, const uint64_t* word) {
  Await(waiter.where, tag, 0x80000000u, reinterpret_cast<const uint32_t*>(word) + 1);
}

// N words at at(0) .. at(N - 1), each waited for; zeros in lanes that want none. By whole warps.
template <Scope kScope, int N, typename At>
__device__ __forceinline__ void Receive(Waiter waiter, uint32_t tag, const At& at, Word (&w)[N], bool wanted = true) {
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = wanted ? ptx::LdRelaxed<kScope>(at(i)) : MakeWord(0, 0, 0, tag);
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (EpochOf(w[i]) != tag) missing = i;
    const uint32_t lanes = __ballot_sync(kAllLanes, missing >= 0);
    if (lanes == 0) return;
    const Word* word = at(missing < 0 ? 0 : missing);
    if (!Await(waiter.where, tag, lanes, reinterpret_cast<const uint32_t*>(word) + 3)) return;
  }
}

// The same of N tagged floats.
//   kSideBySide: at(i) and at(i + 1) are, for even i, and come with one load; N is even
template <bool kSideBySide, int N, typename At>
__device__ __forceinline__ void ReceiveFloats(Waiter waiter, uint32_t tag, const At& at, float (&v)[N]) {
  for (;;) {
    int missing = -1;
    uint64_t w[N];
    if constexpr (kSideBySide) {
      static_assert(N % 2 == 0, "two floats a load");
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const Word two = ptx::LdRelaxed<Scope::kSys>(reinterpret_cast<const Word*>(at(i)));
        w[i] = two.lo, w[i + 1] = two.hi;
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) w[i] = ptx::LdRelaxed<Scope::kSys>(at(i));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = __uint_as_float(uint32_t(w[i]));
      if (uint32_t(w[i] >> 32) != tag) missing = i;
    }
    const uint32_t lanes = __ballot_sync(kAllLanes, missing >= 0);
    if (lanes == 0) return;
    const uint64_t* word = at(missing < 0 ? 0 : missing);
    if (!Await(waiter.where, tag, lanes, reinterpret_cast<const uint32_t*>(word) + 1)) return;
  }
}

// N words and M tagged floats at once: what comes at one time takes one way to L2 and back. What is there already is not
// read again.
//   kSideBySide: at_float(i) and at_float(i + 1) are, for even i; M is even
template <bool kSideBySide, int N, int M, typename At, typename AtFloat>
__device__ __forceinline__ void ReceiveBoth(Waiter waiter, uint32_t tag, const At& at, Word (&w)[N],
                                            const AtFloat& at_float, float (&v)[M]) {
  static_assert(!kSideBySide || M % 2 == 0, "two floats a load");
  uint64_t f[M];
#pragma unroll
  for (int i = 0; i < N; ++i) w[i] = MakeWord(0, 0, 0, ~tag);
#pragma unroll
  for (int i = 0; i < M; ++i) f[i] = uint64_t(~tag) << 32;
  for (;;) {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (EpochOf(w[i]) != tag) w[i] = ptx::LdRelaxed<Scope::kSys>(at(i));
#pragma unroll
    for (int i = 0; i < M; i += kSideBySide ? 2 : 1) {
      if constexpr (kSideBySide) {
        if (uint32_t(f[i] >> 32) == tag && uint32_t(f[i + 1] >> 32) == tag) continue;
        const Word two = ptx::LdRelaxed<Scope::kSys>(reinterpret_cast<const Word*>(at_float(i)));
        f[i] = two.lo, f[i + 1] = two.hi;
      } else if (uint32_t(f[i] >> 32) != tag) {
        f[i] = ptx::LdRelaxed<Scope::kSys>(at_float(i));
      }
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (EpochOf(w[i]) != tag) missing = i;
#pragma unroll
    for (int i = 0; i < M; ++i) {
      v[i] = __uint_as_float(uint32_t(f[i]));
      if (uint32_t(f[i] >> 32) != tag) missing = N + i;
    }
    const uint32_t lanes = __ballot_sync(kAllLanes, missing >= 0);
    if (lanes == 0) return;
    const uint32_t* tag_at = missing < N ? reinterpret_cast<const uint32_t*>(at(Max(missing, 0))) + 3
                                         : reinterpret_cast<const uint32_t*>(at_float(missing - N)) + 1;
    if (!Await(waiter.where, tag, lanes, tag_at)) return;
  }
}

// One float and its tag.
template <Scope kScope>
__device__ __forceinline__ void PublishFloat(uint64_t* to, float value, uint32_t tag) {
  ptx::StRelaxed<kScope>(to, uint64_t(tag) << 32 | __float_as_uint(value));
}

}  // namespace musejax::layer

// NVFP4 tiles in registers: the inverse of the packing of common/layout.h, in a few instructions an MMA.
#pragma once

#include "common/ptx.cuh"

namespace musejax::bench {

// Registers give codes times 2^-126 and scales times 2^107, so that their product is the value times this.
constexpr int kNvfp4Exponent = -19;

// A code word -> the four bf16x2 registers of an MMA's first operand, each code times 2^-126 (subnormal for 0.5).
__device__ __forceinline__ void UnpackCodes(uint32_t w, uint32_t (&a)[4]) {
  constexpr uint32_t kMask = 0x81C081C0u;  // sign, and three bits where exponent and fraction of a bf16 meet
  a[0] = w & kMask;
  a[1] = (w ^ w << 6) & kMask;
  a[2] = (w ^ __funnelshift_r(w, w, 4)) & kMask;
  a[3] = (w << 2 ^ w >> 6) & kMask;
}

// A scale word -> bf16 of steps 0 (low half) and 1 (high half), each times 2^107.
__device__ __forceinline__ uint32_t UnpackScales01(uint32_t w) { return (w & 0x0FF00FF0u) | 0x70007000u; }
// The same of steps 2 and 3, whose fields have their bytes swapped.
__device__ __forceinline__ uint32_t UnpackScales23(uint32_t w) { return UnpackScales01(__byte_perm(w, 0, 0x2301)); }

// d += 16 columns of a tile times b0, b1. `upper`, `lower`: scales of rows 0 to 7 and 8 to 15, in half kHalf.
template <int kHalf>
__device__ __forceinline__ void MmaNvfp4(float (&d)[4], uint32_t codes, uint32_t upper, uint32_t lower, uint32_t b0,
                                         uint32_t b1) {
  uint32_t a[4];
  UnpackCodes(codes, a);
  a[0] = ptx::MulBf16x2<kHalf>(a[0], upper);
  a[1] = ptx::MulBf16x2<kHalf>(a[1], lower);
  a[2] = ptx::MulBf16x2<kHalf>(a[2], upper);
  a[3] = ptx::MulBf16x2<kHalf>(a[3], lower);
  ptx::MmaM16N8K16Bf16(d, a, b0, b1);
}

}  // namespace musejax::bench

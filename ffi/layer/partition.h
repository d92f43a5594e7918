// How the work of the experts is listed and shared among SMs. Plain functions of the choices of all rows, so that every
// SM of every rank finds the same list by itself; for the kernel, and for tests on the host.
//
// A pair is (row, slot), numbered row * top_k + slot; the ids of a row are distinct. A visit is an expert and up to 8
// of its pairs, since an MMA has 8 columns; visits are in ascending order of (expert, pair). Columns are independent,
// so a row's bits do not depend on the pairs it shares a visit with.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace musejax::layer {

inline constexpr int kVisitPairs = 8;

struct Visit {
  int16_t expert, count;
  uint8_t pairs[kVisitPairs];  // the first `count`
};

// Units begin .. end - 1.
struct UnitSpan {
  int begin, end;
};

inline constexpr int kVisitCost = 1;  // what an SM pays for a visit's activations, in units

// Where the part of SM `block` of visits * units_per_visit units begins; products of both with blocks fit 31 bits.
MUSEJAX_FN constexpr int UnitBegin(int visits, int units_per_visit, int block, int blocks) {
  const int each = units_per_visit + kVisitCost, at = int(uint32_t(visits * each * block) / uint32_t(blocks));
  const int into = at % each - kVisitCost;
  return at / each * units_per_visit + (into > 0 ? into : 0);
}
// The part of one SM: contiguous; its units, plus kVisitCost for each visit that begins in it, are its even share to
// kVisitCost + 1.
MUSEJAX_FN constexpr UnitSpan UnitRange(int visits, int units_per_visit, int block, int blocks) {
  return {UnitBegin(visits, units_per_visit, block, blocks), UnitBegin(visits, units_per_visit, block + 1, blocks)};
}

MUSEJAX_FN int Popcount(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

// Visits of an expert whose pairs are in these rows (a bit each).
MUSEJAX_FN int VisitsOf(uint32_t rows) { return (Popcount(rows) + kVisitPairs - 1) / kVisitPairs; }

// Bit e % 32 of word e / 32: expert e has one visit or more, two visits.
template <int kWords>
struct VisitMasks {
  uint32_t one[kWords], two[kWords];
};

// Visits of the experts below this one; of all experts at 32 * kWords.
template <int kWords>
MUSEJAX_FN int VisitsBelow(const VisitMasks<kWords>& masks, int expert) {
  int visits = 0;
  for (int i = 0; i < kWords; ++i) {
    const int bits = expert - 32 * i;
    const uint32_t below = bits <= 0 ? 0u : bits >= 32 ? ~0u : (1u << bits) - 1;
    visits += Popcount(masks.one[i] & below) + Popcount(masks.two[i] & below);
  }
  return visits;
}

// Where the pair of `row` lies among the visits of its expert, and how many pairs that visit has.
struct PairPlace {
  int visit, column, count;
};
MUSEJAX_FN PairPlace PlaceOf(uint32_t rows, int row) {
  const int at = Popcount(rows & ((1u << row) - 1)), visit = at / kVisitPairs;
  const int left = Popcount(rows) - visit * kVisitPairs;
  return {visit, at % kVisitPairs, left < kVisitPairs ? left : kVisitPairs};
}

}  // namespace musejax::layer

// DenseGemm of phases.h: 16-row tiles of a weight, shared among threads.
#pragma once

#include "cpu/phases.h"
#include "cpu/thread_pool.h"

namespace musejax {

template <typename Store>
void DenseGemm(const uint8_t* w, int64_t slice_bytes, int64_t slices, int64_t n, int64_t k, const float* fragments,
               int count, const Store& store) {
  const int64_t tiles = Padded(n, kTile) / kTile, tile_bytes = kTile * Chunk(k) * 2;
  const float* x[kMaxRows];
  for (int row = 0; row < count; ++row) x[row] = fragments + row * DenseFragment(k);
  const Kernels& kernels = ActiveKernels();
  ParallelFor(slices * tiles, slices * tiles * kTile * k * 2, [&](int64_t task) {
    const int64_t slice = task / tiles, tile = task % tiles;
    float sums[kMaxRows * kTile];
    kernels.bf16_tile(w + slice * slice_bytes + tile * tile_bytes, tiles * tile_bytes, k, x, count, sums);
    const int64_t left = n - tile * kTile;
    for (int row = 0; row < count; ++row)
      for (int64_t i = 0; i < (left < kTile ? left : kTile); ++i)
        store(slice, tile * kTile + i, row, sums[row * kTile + i]);
  });
}

// Scratch that grows and is kept, one per thread and use.
template <typename T, int Use>
T* Scratch(int64_t n) {
  thread_local std::vector<T> buffer;
  if (int64_t(buffer.size()) < n) buffer.resize(n);
  return buffer.data();
}

}  // namespace musejax

// The inner loops of the CPU twin, built for three instruction sets with the same bits; phases call them through this
// table. Tokens come as fragments: a row of activations in the order in which its factors lie in a weight tile.
#pragma once

#include <cstdint>
#include <string_view>

namespace musejax {

// Fragments of one row of K values. Dense: per 16 columns 16 even and 16 odd factors, each twice, for rows r and r + 8.
// NVFP4: per 64 columns 4 vectors (register pair, column parity) of 16 lanes 4 t + step.
constexpr int64_t DenseFragment(int64_t k) { return 2 * k; }
constexpr int64_t Nvfp4Fragment(int64_t k) { return k; }
inline constexpr int64_t kMaxRangeTiles = 32;  // NVFP4 tiles of one range, so K is at most 16,384
void MakeDenseFragment(const float* x, int64_t k, float* fragment);
void MakeNvfp4Fragment(const float* x, int64_t k, float* fragment);

// What one row of queries sees through one key/value head.
struct Keys {
  const uint16_t *keys, *values;                    // bf16 [slots, c]; position p lies in slot p % slots
  int64_t slots, first, position, length;           // sees first <= p <= position; p >= length are nodes of this pass
  const uint16_t *tail_keys[16], *tail_values[16];  // of the ancestor (or the row itself) at position length + d
};

struct Kernels {
  const char* name;
  // A 16-row tile times n rows (n <= 16): out[n][16] = sums over K in the order of layout.h. chunk_stride: bytes from
  // one K chunk of this tile to the next.
  void (*bf16_tile)(const uint8_t* w, int64_t chunk_stride, int64_t k, const float* const* x, int n, float* out);
  void (*nvfp4_tile)(const uint8_t* w, int64_t k, const float* const* x, int n, float* out);
  // Router rows [range][rows][range columns] times one row of float32 values: out[rows].
  void (*router)(const float* w, int64_t rows, int64_t k, const float* x, float* out);
  // softmax(q k^T scale) v of `heads` queries [heads, c] that share a key/value head: out[heads, c], rounded to bf16.
  void (*attend)(const float* q, int heads, int c, float scale, const Keys& keys, float* out);
  // silu(gate) * up.
  void (*swiglu)(const float* gate, const float* up, int64_t n, float* out);
};

// The fastest set this machine has, or the one chosen by SelectKernels ("avx512", "avx2", "scalar"; "" = fastest).
const Kernels& ActiveKernels();
// False if the machine lacks that set or the name is unknown.
bool SelectKernels(std::string_view name);

}  // namespace musejax

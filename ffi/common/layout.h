// Where every packed weight lies, and the order in which sums over K are made: the one definition for the CPU twin,
// the CUDA kernel and Python (which asks the library, see bindings/layout.h).
//
// A layer is three arrays:
//   dense    u8 [slices, DenseLayout::bytes]              GEMMs every row passes, and the router
//   experts  u8 [slices, experts, ExpertLayout::bytes]    gate_up, then down
//   small    f32 [SmallLayout::count]                     gains, gates, selection bias, global scales; as published
//
// A GEMM weight [N, K] of a slice is stored as 16-row tiles in the order an MMA (m16n8k16) takes its first operand:
//   bf16 tile of 16 columns, 512 bytes:  [lane 32][register 4][2] bf16
//   nvfp4 tile of 64 columns:            codes 512 bytes [lane 32][step 4] words,
//                                        and scales 64 bytes [row % 8][row / 8] words
//   lane = row % 8 * 4 + column % 8 / 2,  register = row / 8 + 2 * (column % 16 / 8)
//
// Dense weights are K-chunk-major, [chunk][row tile][tile of 16 columns], so that a stream passes one chunk of all
// rows; expert weights are row-tile-major, and an nvfp4 row tile has all its codes before all its scales. Tiles of
// gate_up hold 8 gate rows, then the 8 up rows that belong to them. The router is f32, [range][row][column of the
// range].
//
// A code word holds 8 codes; code (register r, column parity h) is at bits 15, 8, 7, 6 of half h of the value x_r
// below, sign first:
//   x_0 = w,  x_1 = w ^ w << 6,  x_2 = w ^ rotr(w, 4),  x_3 = w << 2 ^ w >> 6
// So every register of a lane is one masked xor: bf16 values of 2^-126 times the code. A scale is an E5M3 field, the
// E4M3 value with exponent bias kScaleBias, 0 for 0; half h of a scale word holds those of steps h (low nibble at
// bit 4, high at bit 8) and h + 2 (low nibble at bit 12, high at bit 0), so that one mask makes bf16 values of a half.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace musejax {

inline constexpr int64_t kSlices = 8;      // every split dimension has this many slices, whatever the device count
inline constexpr int64_t kMaxRows = 16;    // rows of one pass
inline constexpr int64_t kTile = 16;       // rows of a weight tile
inline constexpr int64_t kBlock = 16;      // values that share an NVFP4 scale
inline constexpr int64_t kAlign = 256;     // of each section, in bytes: bulk copies need 16
inline constexpr int64_t kScaleBias = 10;  // E5M3 exponent field = exponent of the E4M3 value + this

// ---- the order of sums over K ----
inline constexpr int64_t kChunk = 1024;  // bf16 and f32: chunks of min(K, 1024), ascending,
inline constexpr int64_t kRanges = 8;    // each the sum of 8 ranges, ascending
MUSEJAX_FN constexpr int64_t Chunk(int64_t k) { return k < kChunk ? k : kChunk; }
MUSEJAX_FN constexpr int64_t Range(int64_t k) { return Chunk(k) / kRanges; }
// NVFP4: 8 ranges of K, or ranges of 64 where those would cut a tile.
MUSEJAX_FN constexpr int64_t Nvfp4Range(int64_t k) { return k % (kRanges * 64) == 0 ? k / kRanges : 64; }

// ---- other constants of order ----
inline constexpr int64_t kLeaf = 64;        // columns of one leaf of a sum of squares
inline constexpr int64_t kKeyBlock = 16;    // attention: positions of a block,
inline constexpr int64_t kKeyChunk = 256;   // of a chunk,
inline constexpr int64_t kKeyGroup = 1024;  // of a group; all aligned to absolute positions

// The sizes a layout depends on, of the whole model.
struct Shape {
  int64_t hidden, heads, kv_heads, head_dim, moe_hidden, moe_inner, experts;

  MUSEJAX_FN constexpr int64_t heads_slice() const { return heads / kSlices; }
  MUSEJAX_FN constexpr int64_t kv_slice() const { return kv_heads / kSlices; }
  MUSEJAX_FN constexpr int64_t hidden_slice() const { return hidden / kSlices; }
  MUSEJAX_FN constexpr int64_t moe_slice() const { return moe_hidden / kSlices; }
  MUSEJAX_FN constexpr int64_t inner_slice() const { return moe_inner / kSlices; }
  MUSEJAX_FN constexpr int64_t experts_slice() const { return experts / kSlices; }
  MUSEJAX_FN constexpr int64_t q_width() const { return heads * head_dim; }
  MUSEJAX_FN constexpr int64_t qkvg_rows() const {
    return 2 * (heads_slice() + kv_slice()) * head_dim;
  }  // q, k, v, gate of a slice
};

MUSEJAX_FN constexpr int64_t Padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
MUSEJAX_FN constexpr int64_t Bf16Bytes(int64_t rows, int64_t k) { return Padded(rows, kTile) * k * 2; }
MUSEJAX_FN constexpr int64_t Nvfp4TileBytes(int64_t k) { return k / 64 * (512 + 64); }
MUSEJAX_FN constexpr int64_t Nvfp4Bytes(int64_t rows, int64_t k) { return rows / kTile * Nvfp4TileBytes(k); }

// Byte offsets in one slice, in the order of use after the layer's attention; `qkvg` is used by the launch before.
struct DenseLayout {
  int64_t qkvg, out, pooler, router, unpooler, bytes;
  MUSEJAX_FN explicit constexpr DenseLayout(const Shape& s)
      : qkvg(0),
        out(qkvg + Padded(Bf16Bytes(s.qkvg_rows(), s.hidden), kAlign)),
        pooler(out + Padded(Bf16Bytes(s.hidden_slice(), s.q_width()), kAlign)),
        router(pooler + Padded(Bf16Bytes(s.moe_slice(), s.hidden), kAlign)),
        unpooler(router + Padded(s.experts_slice() * s.hidden * 4, kAlign)),
        bytes(unpooler + Padded(Bf16Bytes(s.hidden_slice(), s.moe_hidden), kAlign)) {}
};

// Byte offsets in one slice of one expert.
struct ExpertLayout {
  int64_t gate_up, down, bytes;
  MUSEJAX_FN constexpr ExpertLayout(const Shape& s, bool nvfp4)
      : gate_up(0),
        down(
            Padded(nvfp4 ? Nvfp4Bytes(2 * s.inner_slice(), s.moe_hidden) : Bf16Bytes(2 * s.inner_slice(), s.moe_hidden),
                   kAlign)),
        bytes(down +
              Padded(nvfp4 ? Nvfp4Bytes(s.moe_slice(), s.moe_inner) : Bf16Bytes(s.moe_slice(), s.moe_inner), kAlign)) {}
};

// Offsets in f32 values. The scales are there for NVFP4 layers only.
struct SmallLayout {
  int64_t input_norm, attention_residual_gate, ffn_norm, expert_norm, post_expert_norm, post_ffn_norm,
      ffn_residual_gate, router_bias, gate_up_global, down_global, gate_up_input_scale, down_input_scale, count;
  MUSEJAX_FN constexpr SmallLayout(const Shape& s, bool nvfp4)
      : input_norm(0),
        attention_residual_gate(input_norm + s.hidden),
        ffn_norm(attention_residual_gate + s.hidden),
        expert_norm(ffn_norm + s.hidden),
        post_expert_norm(expert_norm + s.moe_hidden),
        post_ffn_norm(post_expert_norm + s.moe_hidden),
        ffn_residual_gate(post_ffn_norm + s.hidden),
        router_bias(ffn_residual_gate + s.hidden),
        gate_up_global(router_bias + s.experts),
        down_global(gate_up_global + (nvfp4 ? 2 * s.experts : 0)),
        gate_up_input_scale(down_global + (nvfp4 ? s.experts : 0)),
        down_input_scale(gate_up_input_scale + (nvfp4 ? 2 * s.experts : 0)),
        count(down_input_scale + (nvfp4 ? s.experts : 0)) {}
};

// The LM head of one slice: bf16, K-chunk-major like a dense weight, rows padded to whole tiles with zeros.
MUSEJAX_FN constexpr int64_t HeadBytes(int64_t vocab, int64_t hidden) {
  return Padded(Bf16Bytes(vocab / kSlices, hidden), kAlign);
}

}  // namespace musejax

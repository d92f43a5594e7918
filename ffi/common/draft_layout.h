// Where every packed weight of a DFlash drafter lies: the one definition for the CPU twin, the CUDA kernel and Python
// (which asks the library, see bindings/layout.h). Tiles, chunks and the order of sums are those of layout.h.
//
// A drafter layer is two arrays:
//   dense    u8 [slices, DraftDenseLayout::bytes]    GEMM weights, bf16 tiles, K-chunk-major
//   small    f32 [DraftSmallLayout::count]           gains and base kernels of the convolutions, as published
// and beside the layers stand
//   fc        u8 [slices, FcBytes]         joined taps -> context
//   selector  u8 [slices, SelectorBytes]   hidden -> selector rank; none in DFlash 1
//
// A slice has its own heads, columns of hidden and of the FFN, convolution groups and ranks:
//   qkv               rows of its query heads, then of its key heads, then of its value heads
//   gate_up           tiles of 8 gate rows, then the 8 up rows that belong to them
//   attention_conv,   kernel projections: rows [side][tap][group of the slice], filled up to whole tiles with zeros, as
//   mlp_conv,         are those of the selector
// Rotation pairs channels i and i + head_dim / 2; where a drafter pairs neighbours, the rows of each query and key head
// and their gains are packed even channels first.
#pragma once

#include "common/layout.h"

namespace musejax {

inline constexpr int64_t kConvSides = 2;  // before and after a sublayer
inline constexpr int64_t kConvTaps = 2;   // a row and the row before it

// The sizes a drafter's layout depends on, of the whole drafter.
struct DraftShape {
  int64_t hidden, heads, kv_heads, head_dim, inner, taps, conv_groups, rank;  // DFlash 1: conv_groups, rank 0

  MUSEJAX_FN constexpr int64_t heads_slice() const { return heads / kSlices; }
  MUSEJAX_FN constexpr int64_t kv_slice() const { return kv_heads / kSlices; }
  MUSEJAX_FN constexpr int64_t hidden_slice() const { return hidden / kSlices; }
  MUSEJAX_FN constexpr int64_t inner_slice() const { return inner / kSlices; }
  MUSEJAX_FN constexpr int64_t groups_slice() const { return conv_groups / kSlices; }
  MUSEJAX_FN constexpr int64_t rank_slice() const { return rank / kSlices; }
  MUSEJAX_FN constexpr int64_t q_width() const { return heads * head_dim; }
  MUSEJAX_FN constexpr int64_t taps_width() const { return taps * hidden; }
  MUSEJAX_FN constexpr int64_t q_rows() const { return heads_slice() * head_dim; }
  MUSEJAX_FN constexpr int64_t kv_rows() const { return kv_slice() * head_dim; }
  MUSEJAX_FN constexpr int64_t qkv_rows() const { return q_rows() + 2 * kv_rows(); }
  MUSEJAX_FN constexpr int64_t delta_rows() const { return kConvSides * kConvTaps * groups_slice(); }
};

// Byte offsets in one slice of a layer, in the order of use.
struct DraftDenseLayout {
  int64_t attention_conv, qkv, out, mlp_conv, gate_up, down, bytes;
  MUSEJAX_FN explicit constexpr DraftDenseLayout(const DraftShape& s)
      : attention_conv(0),
        qkv(attention_conv + Padded(Bf16Bytes(s.delta_rows(), s.hidden), kAlign)),
        out(qkv + Padded(Bf16Bytes(s.qkv_rows(), s.hidden), kAlign)),
        mlp_conv(out + Padded(Bf16Bytes(s.hidden_slice(), s.q_width()), kAlign)),
        gate_up(mlp_conv + Padded(Bf16Bytes(s.delta_rows(), s.hidden), kAlign)),
        down(gate_up + Padded(Bf16Bytes(2 * s.inner_slice(), s.hidden), kAlign)),
        bytes(down + Padded(Bf16Bytes(s.hidden_slice(), s.inner), kAlign)) {}
};

// Offsets in f32 values. The base kernels are [side][tap][hidden].
struct DraftSmallLayout {
  int64_t input_norm, post_norm, q_norm, k_norm, attention_conv, mlp_conv, count;
  MUSEJAX_FN explicit constexpr DraftSmallLayout(const DraftShape& s)
      : input_norm(0),
        post_norm(input_norm + s.hidden),
        q_norm(post_norm + s.hidden),
        k_norm(q_norm + s.head_dim),
        attention_conv(k_norm + s.head_dim),
        mlp_conv(attention_conv + (s.conv_groups ? kConvSides * kConvTaps * s.hidden : 0)),
        count(mlp_conv + (s.conv_groups ? kConvSides * kConvTaps * s.hidden : 0)) {}
};

MUSEJAX_FN constexpr int64_t FcBytes(const DraftShape& s) {
  return Padded(Bf16Bytes(s.hidden_slice(), s.taps_width()), kAlign);
}
MUSEJAX_FN constexpr int64_t SelectorBytes(const DraftShape& s) {
  return Padded(Bf16Bytes(s.rank_slice(), s.hidden), kAlign);
}

}  // namespace musejax

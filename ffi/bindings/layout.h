// The packed layouts as Python sees them: layout(sizes..., nvfp4) and draft_layout(sizes...) -> {"dense.out": 0, ...},
// offsets and sizes of common/layout.h and common/draft_layout.h by name. Python packs and unpacks by these numbers and
// has none of its own.
#pragma once

#include <nanobind/nanobind.h>

#include "common/draft_layout.h"
#include "common/layout.h"

namespace musejax {

inline void DefineLayout(nanobind::module_& m) {
  namespace nb = nanobind;
  m.def(
      "layout",
      [](int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t moe_hidden, int64_t moe_inner,
         int64_t experts, int64_t vocab, bool nvfp4) {
        const Shape s{hidden, heads, kv_heads, head_dim, moe_hidden, moe_inner, experts};
        const DenseLayout d(s);
        const ExpertLayout e(s, nvfp4);
        const SmallLayout f(s, nvfp4);
        nb::dict out;
        auto put = [&](const char* name, int64_t value) { out[name] = value; };
        put("slices", kSlices), put("tile", kTile), put("chunk", kChunk), put("ranges", kRanges);
        put("scale_bias", kScaleBias), put("max_rows", kMaxRows);
        put("dense.qkvg", d.qkvg), put("dense.out", d.out), put("dense.pooler", d.pooler),
            put("dense.router", d.router);
        put("dense.unpooler", d.unpooler), put("dense.bytes", d.bytes);
        put("experts.gate_up", e.gate_up), put("experts.down", e.down), put("experts.bytes", e.bytes);
        put("small.input_norm", f.input_norm), put("small.attention_residual_gate", f.attention_residual_gate);
        put("small.ffn_norm", f.ffn_norm), put("small.expert_norm", f.expert_norm);
        put("small.post_expert_norm", f.post_expert_norm), put("small.post_ffn_norm", f.post_ffn_norm);
        put("small.ffn_residual_gate", f.ffn_residual_gate), put("small.router_bias", f.router_bias);
        put("small.gate_up_global", f.gate_up_global), put("small.down_global", f.down_global);
        put("small.gate_up_input_scale", f.gate_up_input_scale), put("small.down_input_scale", f.down_input_scale);
        put("small.count", f.count), put("head.bytes", HeadBytes(vocab, hidden));
        return out;
      },
      nb::kw_only(), nb::arg("hidden"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
      nb::arg("moe_hidden"), nb::arg("moe_inner"), nb::arg("experts"), nb::arg("vocab"), nb::arg("nvfp4"));
}

inline void DefineDraftLayout(nanobind::module_& m) {
  namespace nb = nanobind;
  m.def(
      "draft_layout",
      [](int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t inner, int64_t taps,
         int64_t conv_groups, int64_t rank, int64_t vocab) {
        const DraftShape s{hidden, heads, kv_heads, head_dim, inner, taps, conv_groups, rank};
        const DraftDenseLayout d(s);
        const DraftSmallLayout f(s);
        nb::dict out;
        auto put = [&](const char* name, int64_t value) { out[name] = value; };
        put("slices", kSlices), put("tile", kTile), put("chunk", kChunk), put("max_rows", kMaxRows);
        put("dense.attention_conv", d.attention_conv), put("dense.qkv", d.qkv), put("dense.out", d.out);
        put("dense.mlp_conv", d.mlp_conv), put("dense.gate_up", d.gate_up), put("dense.down", d.down);
        put("dense.bytes", d.bytes);
        put("small.input_norm", f.input_norm), put("small.post_norm", f.post_norm), put("small.q_norm", f.q_norm);
        put("small.k_norm", f.k_norm), put("small.attention_conv", f.attention_conv);
        put("small.mlp_conv", f.mlp_conv), put("small.count", f.count);
        put("fc.bytes", FcBytes(s)), put("selector.bytes", SelectorBytes(s));
        put("head.bytes", HeadBytes(vocab, hidden));
        return out;
      },
      nb::kw_only(), nb::arg("hidden"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("inner"),
      nb::arg("taps"), nb::arg("conv_groups"), nb::arg("rank"), nb::arg("vocab"));
}

}  // namespace musejax

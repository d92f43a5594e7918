"""One Python function for each FFI target of a drafter, as calls.py has them for the target model.

Names, operands and meaning are those of ffi/cpu/draft.h. `slices` axes hold the slices (or heads) of this device in
results, in weights and in rings, and all of them in other operands. stream: bfloat16 [8, t, d/8]; delta: float32 [8, t,
4 g/8], g = 0 in DFlash 1.

Raises (all, when the call runs): RuntimeError or ValueError with "operation: expected ..., got ... (argument ...)".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from musejax import ffi
from musejax.config import NUM_SLICES
from musejax.speculation.config import DraftConfig


class Top(NamedTuple):
    """What the LM head says of the drafted positions q, by slice.

    Attributes:
        values, ids: float32 and int32 [s, q, a], the largest unary logits, ties to the lower id.
        sums: float32 [s, q], sum of exp(logit - the slice's largest).
        gate: float32 [s, q, r/8], of the selector.
    """

    values: jax.Array
    ids: jax.Array
    sums: jax.Array
    gate: jax.Array


def draft_attribute(config: DraftConfig) -> dict:
    """Members of the struct `DraftAttribute` (ffi/bindings/draft_cpu.cc): sizes as int64, constants as float32."""
    sizes = {
        "hidden": config.hidden_size, "heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "inner": config.intermediate_size, "taps": len(config.target_layer_ids),
        "conv_groups": config.conv_groups, "rank": config.selector_rank or 0, "vocab": config.vocab_size,
        "window": config.sliding_window, "candidates": config.candidates,
    }
    constants = {
        "eps": config.rms_norm_eps, "attention_scale": config.head_dim**-0.5,
        "output_multiplier": config.output_multiplier, "softcap": config.final_logit_softcapping or 0.0,
        "embedding_scale": config.input_embedding_scale,
    }
    return {k: int(v) for k, v in sizes.items()} | {k: np.float32(v) for k, v in constants.items()}


class DraftCall:
    """FFI targets for one drafter."""

    def __init__(self, config: DraftConfig, platform: str = "cpu"):
        ffi.library(platform)
        self.config, self.model = config, draft_attribute(config)

    def _run(self, target, results, *operands, alias=None, **attributes):
        call = jax.ffi.ffi_call(f"musejax_draft_{target}", results, input_output_aliases=alias)
        return call(*operands, model=self.model, **attributes)

    def angles(self, positions_t):
        """-> cosines and sines, float32 [t, 2, c/2]; the target `musejax_angles`."""
        c = self.config.head_dim
        exponent = np.arange(0, c, 2, dtype=np.float32) / np.float32(c)
        inv_freq = (np.float32(1) / np.float32(self.config.rope_theta) ** exponent)[None]
        return jax.ffi.ffi_call("musejax_angles", _f32(1, positions_t.shape[0], 2, c // 2))(positions_t, inv_freq)[0]

    # ---- context ----

    def fc(self, taps, count, fc):
        """Joined taps, float32 [t, u d], of which `count` rows matter -> ctx bfloat16 [slices here, t, d/8]."""
        return self._run("fc", self._columns(fc, taps.shape[0], self.config.hidden_size), taps, count, fc)

    def context(self, ctx, cos_sin, start, count, hidden_norm, keys, values, layers):
        """-> rings bfloat16 [l, heads here, p, c] with rows 0 .. count - 1 at positions start, start + 1, ..."""
        return self._run("context", (_like(keys), _like(values)), ctx, cos_sin, start, count, hidden_norm, keys, values,
                         *_weights(layers), alias={5: 0, 6: 1})

    # ---- block ----

    def embed(self, rows):
        """Embedding rows, bfloat16 [8, t, d/8] -> stream."""
        return self._run("embed", _like(rows), rows)

    def layers(self, stream, cos_sin, length, keys, values, layers):
        """All layers on one device -> stream."""
        return self._run("layers", _like(stream), stream, cos_sin, length, keys, values, *_weights(layers),
                         alias={0: 0})

    def delta(self, stream, p, *, mlp: bool):
        """-> delta of the slices here; `mlp`: of the FFN's convolution, else of the attention's."""
        groups = 4 * self.config.conv_groups // NUM_SLICES
        return self._run("delta", _f32(p["dense"].shape[0], stream.shape[1], groups), stream, p["dense"], p["small"],
                         mlp=mlp)

    def attention(self, layer: int, stream, delta, cos_sin, length, p, keys, values):
        """-> o bfloat16 [query heads here, t, c]."""
        heads = p["dense"].shape[0] * self.config.num_attention_heads // NUM_SLICES
        o = jax.ShapeDtypeStruct((heads, stream.shape[1], self.config.head_dim), jnp.bfloat16)
        return self._run("attention", o, stream, delta, cos_sin, length, p["dense"], p["small"], keys, values,
                         layer=layer)

    def attn_out(self, o, stream, delta, begin, p):
        """-> stream after the attention, the slices here."""
        return self._run("attn_out", self._stream(stream, p), o, stream, delta, begin, p["dense"], p["small"])

    def up(self, stream, delta, p):
        """-> act bfloat16 [slices here, t, f/8]."""
        act = self._columns(p["dense"], stream.shape[1], self.config.intermediate_size)
        return self._run("up", act, stream, delta, p["dense"], p["small"])

    def down(self, act, stream, delta, begin, p):
        """-> stream after the FFN, the slices here."""
        return self._run("down", self._stream(stream, p), act, stream, delta, begin, p["dense"], p["small"])

    # ---- candidates ----

    def head(self, stream, norm, lm_head, selector, begin, *, num_tokens: int | None) -> Top:
        """-> Top of the slices here, for the rows after the anchor."""
        slices, q, a = lm_head.shape[0], stream.shape[1] - 1, self.config.candidates
        rank = (self.config.selector_rank or 0) // NUM_SLICES
        results = (_f32(slices, q, a), jax.ShapeDtypeStruct((slices, q, a), jnp.int32), _f32(slices, q),
                   _f32(slices, q, rank))
        limit = min(num_tokens or self.config.vocab_size, self.config.vocab_size)
        return Top(*self._run("head", results, stream, norm, lm_head, selector, begin, num_tokens=int(limit)))

    def lattice(self, top: Top, predecessor, successor, anchor):
        """Top of all slices -> (tokens int32 [q, a], scores float32 [q, a, a], coverage float32 [q])."""
        q, a = top.values.shape[1:]
        results = (jax.ShapeDtypeStruct((q, a), jnp.int32), _f32(q, a, a), _f32(q))
        return self._run("lattice", results, *top, predecessor, successor, anchor)

    def _columns(self, weights, rows: int, width: int):
        return jax.ShapeDtypeStruct((weights.shape[0], rows, width // NUM_SLICES), jnp.bfloat16)

    def _stream(self, stream, p):
        return self._columns(p["dense"], stream.shape[1], self.config.hidden_size)


def _weights(layers) -> list:
    return [x for p in layers for x in (p["dense"], p["small"])]


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

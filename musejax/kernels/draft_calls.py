"""One Python function for each FFI target of a drafter, as calls.py has them for the target model.

Names, operands and meaning are those of ffi/cpu/draft.h. Whole passes and the tree are targets of every platform, the
phases of the CPU alone. `slices` axes hold the slices (or heads) of this device in results, in weights and in rings,
and all of them in other operands. stream: bfloat16 [8, t, d/8]; delta: float32 [8, t, 4 g/8], g = 0 in DFlash 1.

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
    """Members of the struct `DraftAttribute` (ffi/bindings/draft_model.h): sizes as int64, constants as float32."""
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
    """FFI targets for one drafter. looped: of a whole pass those that one rank of several runs alone, for measurements:
    what the others would send is its own."""

    def __init__(self, config: DraftConfig, platform: str = "cpu", looped: bool = False):
        ffi.library(platform)
        self.config, self.model, self._suffix = config, draft_attribute(config), "_looped" if looped else ""

    def _run(self, target, results, *operands, alias=None, **attributes):
        call = jax.ffi.ffi_call(f"musejax_{target}", results, input_output_aliases=alias)
        return call(*operands, model=self.model, **attributes)

    def _connect(self, layers, keys, devices):
        if devices:
            ffi.connect_draft(self.model, len(layers), keys.shape[2], devices)

    def angles(self, positions_t):
        """-> cosines and sines, float32 [t, 2, c/2]; the target `musejax_angles`."""
        c = self.config.head_dim
        exponent = np.arange(0, c, 2, dtype=np.float32) / np.float32(c)
        inv_freq = (np.float32(1) / np.float32(self.config.rope_theta) ** exponent)[None]
        return jax.ffi.ffi_call("musejax_angles", _f32(1, positions_t.shape[0], 2, c // 2))(positions_t, inv_freq)[0]

    # ---- whole passes: one device, or several GPUs that exchange what they finish while they run ----

    def draft(self, rows, cos_sin, anchor, length, norm, lm_head, selector, predecessor, successor, keys, values,
              layers, *, num_tokens: int | None, devices: tuple[int, ...] = ()):
        """Embedding rows of the slices here, bfloat16 [slices here, t, d/8] -> lattice, as `lattice` returns it.

        Args:
            length: int32 [], positions in the rings before the block.
            devices: ordinals of the several GPUs, in the order of their slices.

        Raises:
            LibraryError: as `ffi.connect_draft`.
        """
        self._connect(layers, keys, devices)
        operands = (rows, cos_sin, anchor, length, norm, lm_head, selector, predecessor, successor, keys, values)
        results = _lattice(rows.shape[1] - 1, self.config.candidates)
        return self._run("draft" + self._suffix, results, *operands, *_weights(layers),
                         num_tokens=self._limit(num_tokens), devices=np.asarray(devices, np.int64))

    def commit(self, taps, cos_sin, start, count, fc, hidden_norm, keys, values, layers, *,
               devices: tuple[int, ...] = ()):
        """Joined taps, float32 [t, u d], of which `count` rows matter -> rings, as `context` returns them.

        Raises:
            LibraryError: as `ffi.connect_draft`.
        """
        self._connect(layers, keys, devices)
        return self._run("draft_commit" + self._suffix, (_like(keys), _like(values)), taps, cos_sin, start, count, fc,
                         hidden_norm, keys, values, *_weights(layers), alias={6: 0, 7: 1},
                         devices=np.asarray(devices, np.int64))

    # ---- phases, for one CPU device of several: context ----

    def fc(self, taps, count, fc):
        """Joined taps, float32 [t, u d], of which `count` rows matter -> ctx bfloat16 [slices here, t, d/8]."""
        return self._run("draft_fc", self._columns(fc, taps.shape[0], self.config.hidden_size), taps, count, fc)

    def context(self, ctx, cos_sin, start, count, hidden_norm, keys, values, layers):
        """-> rings bfloat16 [l, heads here, p, c] with rows 0 .. count - 1 at positions start, start + 1, ..."""
        return self._run("draft_context", (_like(keys), _like(values)), ctx, cos_sin, start, count, hidden_norm, keys,
                         values, *_weights(layers), alias={5: 0, 6: 1})

    # ---- block ----

    def embed(self, rows):
        """Embedding rows, bfloat16 [8, t, d/8] -> stream."""
        return self._run("draft_embed", _like(rows), rows)

    def delta(self, stream, p, *, mlp: bool):
        """-> delta of the slices here; `mlp`: of the FFN's convolution, else of the attention's."""
        groups = 4 * self.config.conv_groups // NUM_SLICES
        delta = _f32(p["dense"].shape[0], stream.shape[1], groups)
        return self._run("draft_delta", delta, stream, p["dense"], p["small"], mlp=mlp)

    def attention(self, layer: int, stream, delta, cos_sin, length, p, keys, values):
        """-> o bfloat16 [query heads here, t, c]."""
        heads = p["dense"].shape[0] * self.config.num_attention_heads // NUM_SLICES
        o = jax.ShapeDtypeStruct((heads, stream.shape[1], self.config.head_dim), jnp.bfloat16)
        return self._run("draft_attention", o, stream, delta, cos_sin, length, p["dense"], p["small"], keys, values,
                         layer=layer)

    def attn_out(self, o, stream, delta, begin, p):
        """-> stream after the attention, the slices here."""
        return self._run("draft_attn_out", self._stream(stream, p), o, stream, delta, begin, p["dense"], p["small"])

    def up(self, stream, delta, p):
        """-> act bfloat16 [slices here, t, f/8]."""
        act = self._columns(p["dense"], stream.shape[1], self.config.intermediate_size)
        return self._run("draft_up", act, stream, delta, p["dense"], p["small"])

    def down(self, act, stream, delta, begin, p):
        """-> stream after the FFN, the slices here."""
        return self._run("draft_down", self._stream(stream, p), act, stream, delta, begin, p["dense"], p["small"])

    # ---- candidates ----

    def head(self, stream, norm, lm_head, selector, begin, *, num_tokens: int | None) -> Top:
        """-> Top of the slices here, for the rows after the anchor."""
        slices, q, a = lm_head.shape[0], stream.shape[1] - 1, self.config.candidates
        rank = (self.config.selector_rank or 0) // NUM_SLICES
        results = (_f32(slices, q, a), jax.ShapeDtypeStruct((slices, q, a), jnp.int32), _f32(slices, q),
                   _f32(slices, q, rank))
        return Top(*self._run("draft_head", results, stream, norm, lm_head, selector, begin,
                              num_tokens=self._limit(num_tokens)))

    def lattice(self, top: Top, predecessor, successor, anchor):
        """Top of all slices -> (tokens int32 [q, a], scores float32 [q, a, a], coverage float32 [q])."""
        return self._run("draft_lattice", _lattice(*top.values.shape[1:]), *top, predecessor, successor, anchor)

    def _limit(self, num_tokens: int | None) -> int:
        return int(min(num_tokens or self.config.vocab_size, self.config.vocab_size))

    def _columns(self, weights, rows: int, width: int):
        return jax.ShapeDtypeStruct((weights.shape[0], rows, width // NUM_SLICES), jnp.bfloat16)

    def _stream(self, stream, p):
        return self._columns(p["dense"], stream.shape[1], self.config.hidden_size)


def tree(anchor, tokens_qa, scores_qaa, coverage_q, *, nodes: int, width: int, spine: int, tau: float):
    """Lattice (see `DraftCall.lattice`) -> (tokens, parents, depth, ancestors int32 [nodes], cum float32 [nodes]).

    Parents are -1 for the root and in padding; ancestors are the bits of uint32. The library must be loaded.
    """
    number = jax.ShapeDtypeStruct((nodes,), jnp.int32)
    call = jax.ffi.ffi_call("musejax_draft_tree", (number, number, number, number, _f32(nodes)))
    return call(anchor, tokens_qa, scores_qaa, coverage_q, width=int(width), spine=int(spine), tau=np.float32(tau))


def _weights(layers) -> list:
    return [x for p in layers for x in (p["dense"], p["small"])]


def _lattice(q: int, a: int) -> tuple:
    return jax.ShapeDtypeStruct((q, a), jnp.int32), _f32(q, a, a), _f32(q)


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

"""One Python function for each FFI target: shapes of its results, and its attributes in the types it decodes.

Names, operands and meaning are those of ffi/cpu/phases.h. `slices` axes hold the slices of this device in results and
in weights, and all of them in other operands. bfloat16 arrays hold finished, rounded values.

Raises (all, when the call runs): RuntimeError or ValueError with "operation: expected ..., got ... (argument ...)".
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from musejax import ffi
from musejax.cache import LayerCache
from musejax.config import NUM_SLICES, DecodeConfig, ModelConfig, combine_groups
from musejax.kernels.attributes import inverse_frequencies, layer_attributes, model_attribute, theta_index
from musejax.kernels.cache import KernelCache

SIZES = ("hidden", "heads", "kv_heads", "head_dim", "moe_hidden", "moe_inner", "experts", "top_k")
"""What an entry of `ffi.layer_instances` says, of the model attribute's members; its last number is the slices."""


class RowState(NamedTuple):
    """The rows of a pass, as the kernels take them.

    Attributes:
        parents: int32 [t], row of each row's parent, -1 for none; a chain is -1, 0, 1, ...
        state: int32 [3], positions before the pass, valid rows, accepted rows of the pass before (or cache.GAVE_UP).
        path: int32 [16], those accepted rows.
    """

    parents: jax.Array
    state: jax.Array
    path: jax.Array


class Call:
    """FFI targets for one model and one way to run it."""

    def __init__(self, config: ModelConfig, decode: DecodeConfig, platform: str = "cpu"):
        ffi.library(platform)
        self.config, self.model = config, model_attribute(config, decode)
        self.groups = combine_groups(decode.combine)

    def _run(self, target, results, *operands, alias=None, **attributes):
        call = jax.ffi.ffi_call(f"musejax_{target}", results, input_output_aliases=alias)
        return call(*operands, **attributes)

    def _layer(self, layer):
        return {"model": self.model, "nvfp4": layer in self.config.nvfp4_layers}

    def _sizes(self, slices):
        return (*(self.model[name] for name in SIZES), slices)

    def angles(self, positions_t):
        """-> cosines and sines, float32 [bases, t, 2, c/2]."""
        inv_freq = jnp.asarray(inverse_frequencies(self.config))
        shape = (inv_freq.shape[0], positions_t.shape[0], 2, self.config.head_dim // 2)
        if not shape[0]:
            return jnp.zeros(shape, jnp.float32)
        return self._run("angles", _f32(*shape), positions_t, inv_freq)

    def embed_norm(self, rows_std):
        """Embedding rows, bfloat16 [8, t, d/8] -> stream, float32 [t, d]."""
        return self._run("embed_norm", _f32(rows_std.shape[1], self.config.hidden_size), rows_std, model=self.model)

    def layers(self, layers: range, params, stream, q, gate, cos_sin, rows: RowState, cache: KernelCache, *, first,
               last, taps: tuple[int, ...] = (), devices: tuple[int, ...] = ()):
        """Consecutive layers on one device, or on one of several GPUs that exchange what they finish while they run;
        the cache in place.

        Args:
            taps: layers among them after which the stream is wanted.
            devices: ordinals of the several GPUs, in the order of their slices.

        Raises:
            LibraryError: as `ffi.connect`.

        Returns:
            (stream, q, gate, expert ids int32 [n, t, k], taps float32 [len(taps), t, d] in layer order, cache, whose
            `accepted` is that of `rows`, or GAVE_UP)
        """
        if devices:
            ffi.connect(self._sizes(NUM_SLICES // len(devices)), max(kv.keys.shape[1] for kv in cache.layers), devices)
        groups = [[params[i]["dense"], params[i]["experts"], params[i]["small"], *cache.layers[i], *cache.flight[i]]
                  for i in layers]
        kept = [_like(x) for group in groups for x in group[3:]]
        ids = jax.ShapeDtypeStruct((len(layers), stream.shape[0], self.config.num_experts_per_tok), jnp.int32)
        alias = {0: 0, 1: 1, 2: 2, 5: 3} | {7 + 7 * g + 3 + i: 6 + 4 * g + i for g in range(len(groups))
                                            for i in range(4)}
        tapped = _f32(len(taps), *stream.shape)
        results = (_like(stream), _like(q), _like(gate), _like(rows.state), ids, tapped, *kept)
        out = self._run("layers", results, stream, q, gate, cos_sin, *rows, *(x for group in groups for x in group),
                        alias=alias, model=self.model, first=first, last=last,
                        **layer_attributes(self.config, layers, taps, devices))
        stream, q, gate, state, ids, tapped, *kept = out
        stored, flight = list(cache.layers), list(cache.flight)
        for g, i in enumerate(layers):
            stored[i], flight[i] = LayerCache(*kept[4 * g:4 * g + 2]), LayerCache(*kept[4 * g + 2:4 * g + 4])
        cache = cache._replace(layers=tuple(stored), flight=tuple(flight), accepted=state[2])
        return stream, q, gate, ids, tapped, cache

    # ---- phases: one device of several ----

    def attn_in(self, layer, stream, cos_sin, rows: RowState, p, stored, flight):
        """-> (q, gate) bfloat16 [heads here, t, c], the cache with accepted rows stored, flight with the new rows."""
        theta = theta_index(self.config, layer)
        angles = cos_sin[theta] if theta >= 0 else jnp.zeros((0, 2, self.config.head_dim // 2), jnp.float32)
        heads = p["dense"].shape[0] * self.config.num_attention_heads // NUM_SLICES
        q = jax.ShapeDtypeStruct((heads, stream.shape[0], self.config.head_dim), jnp.bfloat16)
        kept = (*stored, *flight)
        q, gate, *kept = self._run("attn_in", (q, q, *map(_like, kept)), stream, angles, *rows, p["dense"], p["small"],
                                   *kept, alias={7 + i: 2 + i for i in range(4)},
                                   window=self.config.window(layer) or 0, **self._layer(layer))
        return q, gate, LayerCache(*kept[:2]), LayerCache(*kept[2:])

    def attention(self, layer, q, gate, rows: RowState, stored, flight):
        """-> o bfloat16 [heads here, t, c], and cache and flight as they were."""
        kept = (*stored, *flight)
        o, *kept = self._run("attention", (_like(q), *map(_like, kept)), q, gate, *rows, *kept, model=self.model,
                             alias={5 + i: 1 + i for i in range(4)}, window=self.config.window(layer) or 0)
        return o, LayerCache(*kept[:2]), LayerCache(*kept[2:])

    def attn_out(self, layer, o, p):
        """-> a bfloat16 [slices here, t, d/8]."""
        return self._run("attn_out", self._sliced(p, o.shape[1], self.config.hidden_size), o, p["dense"], p["small"],
                         **self._layer(layer))

    def pool(self, layer, stream, a, p):
        """-> stream with the attention branch, p bfloat16 [slices here, t, m/8], scores float32 [.., t, e/8]."""
        t, slices = stream.shape[0], p["dense"].shape[0]
        results = (_like(stream), self._sliced(p, t, self.config.moe_hidden_size),
                   _f32(slices, t, self.config.num_local_experts // NUM_SLICES))
        return self._run("pool", results, stream, a, p["dense"], p["small"], alias={0: 0}, **self._layer(layer))

    def experts_up(self, layer, pooled, scores, rows: RowState, p, begin):
        """-> c bfloat16 [slices here, t * k, f/8], ids int32 [t, k], weights float32 [t, k]."""
        t, k = pooled.shape[1], self.config.num_experts_per_tok
        ids = jax.ShapeDtypeStruct((t, k), jnp.int32)
        results = (self._sliced(p, t * k, self.config.moe_intermediate_size, "experts"), ids, _f32(t, k))
        return self._run("experts_up", results, pooled, scores, *rows, p["experts"], p["small"], begin,
                         **self._layer(layer))

    def experts_down(self, layer, c, ids, p, begin):
        """-> y bfloat16 [slices here, t * k, m/8]."""
        results = self._sliced(p, c.shape[1], self.config.moe_hidden_size, "experts")
        return self._run("experts_down", results, c, ids, p["experts"], p["small"], begin, **self._layer(layer))

    def combine(self, layer, y, ids, weights, p):
        """-> m bfloat16 [t, m]."""
        return self._run("combine", self._pooled(ids), y, ids, weights, p["small"], **self._layer(layer))

    def combine_partials(self, layer, y, ids, weights, p, begin, groups: int):
        """-> partials bfloat16 [groups, t, m] of the owner groups from expert `begin` on."""
        results = jax.ShapeDtypeStruct((groups, ids.shape[0], self.config.moe_hidden_size), jnp.bfloat16)
        return self._run("combine_partials", results, y, ids, weights, p["small"], begin, groups=groups,
                         **self._layer(layer))

    def combine_gathered(self, partials):
        """Partials of all owner groups -> m bfloat16 [t, m]."""
        return self._run("combine_gathered", _like(partials[0]), partials, model=self.model)

    def unpool(self, layer, m, p):
        """-> f bfloat16 [slices here, t, d/8]."""
        return self._run("unpool", self._sliced(p, m.shape[0], self.config.hidden_size), m, p["dense"], p["small"],
                         **self._layer(layer))

    def add_ffn(self, layer, stream, f, p):
        """-> stream with the FFN branch."""
        return self._run("add_ffn", _like(stream), stream, f, p["small"], alias={0: 0}, **self._layer(layer))

    # ---- the end of a pass ----

    def head(self, stream, final_norm, lm_head, begin, *, num_tokens: int | None, top: int):
        """-> raw logits float32 [slices here, t, v/8], and the largest of each slice: float32, int32 [.., t, top]."""
        slices, t = lm_head.shape[0], stream.shape[0]
        ids = jax.ShapeDtypeStruct((slices, t, top), jnp.int32)
        results = (_f32(slices, t, self.config.vocab_size // NUM_SLICES), _f32(slices, t, top), ids)
        return self._run("head", results, stream, final_norm, lm_head, begin, model=self.model,
                         num_tokens=self._limit(num_tokens), top=top)

    def head_sums(self, raw, largest, begin, *, num_tokens: int | None):
        """-> float32 [slices here, t]."""
        return self._run("head_sums", _f32(*raw.shape[:2]), raw, largest, begin, model=self.model,
                         num_tokens=self._limit(num_tokens))

    def logprob(self, raw_chosen, largest, sums):
        """Raw logit of each row's token, the largest one, sums of all slices -> log-probabilities float32 [t]."""
        return self._run("logprob", _like(largest), raw_chosen, largest, sums, model=self.model)

    def softcap(self, raw):
        """Raw logits of any shape -> logits."""
        return self._run("softcap", _f32(raw.size), raw.reshape(-1), model=self.model).reshape(raw.shape)

    def _limit(self, num_tokens):
        return int(min(num_tokens or self.config.vocab_size, self.config.vocab_size))

    def _sliced(self, p, rows, width, name="dense"):
        return jax.ShapeDtypeStruct((p[name].shape[0], rows, width // NUM_SLICES), jnp.bfloat16)

    def _pooled(self, ids):
        return jax.ShapeDtypeStruct((ids.shape[0], self.config.moe_hidden_size), jnp.bfloat16)


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)

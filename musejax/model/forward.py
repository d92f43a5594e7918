"""The whole decoder as pure functions of (params, tokens, cache): embedding -> layers -> logits."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from musejax import cache as kv
from musejax.config import DecodeConfig, ModelConfig
from musejax.model.attention import Rows, project
from musejax.model.layer import decoder_layer
from musejax.model.norms import rms
from musejax.model.router import loads


class Trace(NamedTuple):
    """What a pass can report besides its result.

    Attributes:
        streams: float32 [L + 1, t, d], residual stream after the embedding and after each layer.
        expert_ids: int32 [L, t, j].
        expert_weights: float32 [L, t, j].
        expert_loads: int32 [L, e], rows that chose each expert.
        margins: float32 [L, t], how clear each choice of experts was; see `router.Routing`.
    """

    streams: jax.Array
    expert_ids: jax.Array
    expert_weights: jax.Array
    expert_loads: jax.Array
    margins: jax.Array


def embed(params: dict, tokens_t, config: ModelConfig, decode: DecodeConfig) -> jax.Array:
    """Rows of the embedding table after their weightless norm -> residual stream, float32 [t, d]."""
    rows_std = params["embed"][:, tokens_t]
    rows = rows_std.swapaxes(0, 1).reshape(tokens_t.shape[0], -1)
    return decode.policy.round("embed_norm", rms(rows, config.rms_norm_eps))


def raw_logits(params: dict, stream_td, config: ModelConfig, decode: DecodeConfig) -> jax.Array:
    """Final norm and LM head -> float32 [t, v] before multiplier and softcap; greedy compares these."""
    policy = decode.policy
    x = rms(policy.round("final_stream", stream_td), config.rms_norm_eps)
    x = policy.round("norm", x * params["final_norm"].astype(jnp.float32))  # plain gain, no 1 +
    return project(x, params["lm_head"], policy)


def softcap(raw_tv, config: ModelConfig) -> jax.Array:
    """cap * tanh(raw * output_multiplier / cap)."""
    cap = config.final_logit_softcapping
    return cap * jnp.tanh(raw_tv * jnp.float32(config.output_multiplier) / cap)


def run_layers(params: dict, stream_td, cache: kv.Cache | None, rows: Rows, config: ModelConfig,
               decode: DecodeConfig, trace: bool = False, remat: bool = False):
    """All layers -> (stream, cache with the valid rows appended, Trace or None).

    Args:
        cache: None attends within the rows of this call only.
        remat: recompute each layer in the backward pass instead of keeping its activations.
    """
    streams, routings, layers = [stream_td], [], []
    length = None if cache is None else cache.length
    for i in range(config.num_hidden_layers):
        run = partial(decoder_layer, layer=i, config=config, decode=decode)
        run = jax.checkpoint(run) if remat else run
        out = run(params["layers"][i], streams[-1], stored=None if cache is None else cache.layers[i], length=length,
                  rows=rows)
        streams.append(out.stream)
        routings.append(out.routing)
        layers.append(out.cache)
    if cache is not None:
        cache = kv.Cache(tuple(layers), length + rows.num_valid)
    if not trace:
        return streams[-1], cache, None
    return streams[-1], cache, Trace(
        jnp.stack(streams), jnp.stack([r.ids for r in routings]), jnp.stack([r.weights for r in routings]),
        jnp.stack([loads(r, config) for r in routings]), jnp.stack([r.margin for r in routings]))


def append(params: dict, cache: kv.Cache, tokens_t, num_valid, *, config: ModelConfig,
           decode: DecodeConfig) -> tuple[jax.Array, kv.Cache]:
    """Runs the first num_valid of the given tokens after the cached ones.

    Args:
        tokens_t: int32 [t]; entries from num_valid on are padding and leave no trace.

    Returns:
        (residual stream [t, d], cache longer by num_valid).
    """
    rows = Rows(cache.length + jnp.arange(tokens_t.shape[0], dtype=jnp.int32), jnp.asarray(num_valid, jnp.int32))
    stream, cache, _ = run_layers(params, embed(params, tokens_t, config, decode), cache, rows, config, decode)
    return stream, cache


def forward(params: dict, tokens_t, *, config: ModelConfig, decode: DecodeConfig, remat: bool = False):
    """One pass over a whole sequence without a cache -> (logits [t, v] after softcap, Trace).

    Differentiable in params when `decode.experts` is `all`; use vmap for a batch.
    """
    t = tokens_t.shape[0]
    rows = Rows(jnp.arange(t, dtype=jnp.int32), jnp.int32(t))
    stream = embed(params, tokens_t, config, decode)
    stream, _, trace = run_layers(params, stream, None, rows, config, decode, trace=True, remat=remat)
    return softcap(raw_logits(params, stream, config, decode), config), trace

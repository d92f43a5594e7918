"""The target's pass over a tree of guesses: one call for 16 rows, in plain JAX or through the kernels."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from musejax import cache as kv
from musejax.config import DecodeConfig, ModelConfig
from musejax.kernels import forward as kernels
from musejax.kernels.cache import KernelCache, flush
from musejax.model import forward as fwd
from musejax.model.attention import Rows
from musejax.sampling import Sampler, choose


class Verified(NamedTuple):
    """What the target says of every row.

    Attributes:
        ids: int32 [t], the token after each row, greedy or sampled at the row's own position; see
            `kernels.forward.choose_after`.
        logprobs: float32 [t], their log-probabilities.
        stream: float32 [t, d], residual stream after the last layer: what the token was chosen from.
        taps: float32 [n, t, d], residual stream after the layers asked for.
        expert_ids: int32 [L, t, k], experts chosen; the number of experts in padding rows.
        cache: with the rows in flight; accept some of them before the next pass.
    """

    ids: jax.Array
    logprobs: jax.Array
    stream: jax.Array
    taps: jax.Array
    expert_ids: jax.Array
    cache: KernelCache


def ancestor_mask(parents_t) -> jax.Array:
    """bool [t, t]: row i is, or descends from, row j."""
    seen = jnp.eye(parents_t.shape[0], dtype=bool)
    for i in range(1, parents_t.shape[0]):
        parent = parents_t[i]
        seen = seen.at[i].set(seen[i] | jnp.where(parent < 0, False, seen[jnp.maximum(parent, 0)]))
    return seen


def _reference_pass(params, cache: KernelCache, tokens_t, parents_t, num_valid, config, decode, taps):
    """(stream, taps, expert ids, cache), in plain JAX."""
    cache = flush(cache)
    rows = Rows(cache.length + kernels.depths(parents_t), num_valid, ancestor_mask(parents_t))
    stream = fwd.embed(params, tokens_t, config, decode)
    stream, flight, trace = fwd.run_layers(params, stream, kv.Cache(cache.layers, cache.length), rows, config, decode,
                                           trace=True)
    return stream, trace.streams[jnp.array(taps, jnp.int32) + 1], trace.expert_ids, cache._replace(flight=flight.layers)


def verify(params: dict, cache: KernelCache, tokens_t, parents_t, num_valid, sampler: Sampler | None, *,
           config: ModelConfig, decode: DecodeConfig, taps: tuple[int, ...] = (), num_tokens: int | None = None,
           mesh=None) -> Verified:
    """One pass over a tree of tokens that follow the cached positions, and the token after each.

    Args:
        params: packed for `megakernel`, in table form for `reference`.
        tokens_t, parents_t: int32 [t], t <= 16; see `kernels.forward.run_pass`.
        num_valid: int32 [], rows from here on are padding.
        sampler: None is greedy. Noise goes with the absolute position of the token chosen.
        taps: static, ascending layers.
    """
    num_valid = jnp.asarray(num_valid, jnp.int32)
    positions = cache.length + kernels.depths(parents_t) + 1
    if decode.implementation == "megakernel":
        out = kernels.run_pass(params, cache, tokens_t, parents_t, num_valid, config=config, decode=decode, mesh=mesh,
                               taps=taps)
        (ids, logprobs), cache = kernels.choose_after(params, out.stream, positions, out.cache, sampler, config=config,
                                                      decode=decode, num_tokens=num_tokens, mesh=mesh)
        return Verified(ids, logprobs, out.stream, out.taps, out.expert_ids, cache)
    stream, tapped, expert_ids, cache = _reference_pass(params, cache, tokens_t, parents_t, num_valid, config, decode,
                                                        taps)
    raw = fwd.raw_logits(params, stream, config, decode)
    ids, logprobs = choose(raw, fwd.softcap(raw, config), positions, sampler, num_tokens=num_tokens)
    return Verified(ids, logprobs, stream, tapped, expert_ids, cache)

"""Keys and values for the kernels: the cache, and the rows of the last pass that are not in it yet.

A pass leaves the keys and values of its rows in a buffer of 16 rows a layer, "in flight". Which of them count is known
only after it (a tree of guesses has one accepted path), so the next pass is told: `accepted` rows, at the buffer rows
`path`, become positions length - accepted .. length - 1, and the phase that writes a layer's new rows first moves them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from musejax.cache import LayerCache, slots_of
from musejax.config import ConfigError, ModelConfig
from musejax.sharding import cache_sharding, replicated

MAX_ROWS = 16
"""Rows of one pass (kMaxRows in ffi/common/layout.h)."""

GAVE_UP = -1
"""`KernelCache.accepted` once a pass has given up waiting (kGaveUp in ffi/common/pass_state.h)."""


class KernelCache(NamedTuple):
    """State of one sequence.

    Attributes:
        layers: stored keys and values [k, p, c], bfloat16 for the kernels; position x in slot x mod p.
        flight: keys and values of the last pass's rows [k, 16, c].
        length: int32 [], positions stored or accepted; the next pass begins here.
        accepted: int32 [], rows of `flight` still to be stored, the last ones of `length`. GAVE_UP, for good, if this
            pass or one before it gave up waiting on a GPU: then nothing here means anything, and every further pass
            is refused (ffi.StateError). Not `length`, which rows, positions and loops depend on: it stays in its range
            and the same on all devices.
        path: int32 [16], which rows those are, in order of position.
    """

    layers: tuple[LayerCache, ...]
    flight: tuple[LayerCache, ...]
    length: jax.Array
    accepted: jax.Array
    path: jax.Array


def abstract_cache(config: ModelConfig, max_length: int, mesh=None, dtype=jnp.bfloat16) -> KernelCache:
    """Shapes, dtypes and, with a mesh, shardings; allocates nothing.

    Raises:
        ConfigError: max_length is below 1 or beyond max_position_embeddings.
    """
    if not 1 <= max_length <= config.max_position_embeddings:
        raise ConfigError(f"max_length: expected 1 to {config.max_position_embeddings} "
                          f"(max_position_embeddings), got {max_length}")
    heads = None if mesh is None else cache_sharding(config, mesh)
    whole = None if mesh is None else replicated(mesh)

    def pair(slots):
        shape = (config.num_key_value_heads, slots, config.head_dim)
        return LayerCache(*[jax.ShapeDtypeStruct(shape, dtype, sharding=heads)] * 2)

    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

    layers = range(config.num_hidden_layers)
    return KernelCache(tuple(pair(slots_of(config, i, max_length)) for i in layers),
                       tuple(pair(MAX_ROWS) for _ in layers), integers(), integers(), integers(MAX_ROWS))


def init_cache(config: ModelConfig, max_length: int, mesh=None, dtype=jnp.bfloat16) -> KernelCache:
    """An empty cache for up to max_length positions."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
                        abstract_cache(config, max_length, mesh, dtype))


def keep_placement(cache: KernelCache, config: ModelConfig, mesh) -> KernelCache:
    """The cache, told to stay where `init_cache` put it: else XLA may choose, and the next call compile anew."""
    if mesh is None:
        return cache
    heads, whole = cache_sharding(config, mesh), replicated(mesh)
    placed = jax.tree.map(lambda x: heads if x.ndim == 3 else whole, cache)
    return jax.lax.with_sharding_constraint(cache, placed)


def accept(cache: KernelCache, path, count) -> KernelCache:
    """After a pass: its first `count` rows of `path` (int32 [16]) become the next positions."""
    count = jnp.asarray(count, jnp.int32)
    accepted = jnp.where(cache.accepted < 0, cache.accepted, count)
    return cache._replace(length=cache.length + count, accepted=accepted, path=jnp.asarray(path, jnp.int32))


def none_accepted(cache: KernelCache) -> KernelCache:
    """The cache with no rows in flight to store; if a pass gave up, that stays known."""
    return cache._replace(accepted=jnp.minimum(cache.accepted, 0))


def give_up(cache: KernelCache, lost) -> KernelCache:
    """The cache, refused by every pass from now on if `lost` (bool [])."""
    return cache._replace(accepted=jnp.where(lost, GAVE_UP, cache.accepted))


def flush(cache: KernelCache) -> KernelCache:
    """The cache with its accepted rows stored; the next pass would do the same. Moves bits only."""
    row = jnp.arange(MAX_ROWS)
    position = cache.length - cache.accepted + row

    def store(kept, flight):
        slots = kept.shape[1]
        # Of rows that share a slot of a short ring the last one stays.
        wanted = (row < cache.accepted) & (row >= cache.accepted - slots)
        at = jnp.where(wanted, position % slots, slots)
        return kept.at[:, at].set(flight[:, cache.path], mode="drop")

    layers = jax.tree.map(store, cache.layers, cache.flight)
    return none_accepted(cache._replace(layers=layers))

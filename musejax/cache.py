"""Key/value cache: one array pair a layer, written in place, shapes fixed for the life of a sequence.

Position x of a sequence lives in slot x mod P of a layer with P slots. A sliding layer has as many slots
as its window, so old positions are overwritten (a ring); a full layer has `max_length` slots, so nothing
wraps. One rule covers both. Slots never written yet hold zeros and carry position -1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from musejax.config import ConfigError, ModelConfig
from musejax.numerics import Policy, storage_dtype


class LayerCache(NamedTuple):
    """Keys (after norm and rotation) and values of one layer, both [k, p, c]."""

    keys: jax.Array
    values: jax.Array


class Cache(NamedTuple):
    """State of one sequence.

    Attributes:
        layers: one LayerCache a layer.
        length: int32 [], positions stored so far; the next token has position `length`.
    """

    layers: tuple[LayerCache, ...]
    length: jax.Array


def slots_of(config: ModelConfig, layer: int, max_length: int) -> int:
    """Slots of one layer: the window, or max_length if that is smaller or the layer is full."""
    return min(config.window(layer) or max_length, max_length)


def abstract_cache(config: ModelConfig, policy: Policy, max_length: int, mesh=None) -> Cache:
    """Shapes, dtypes (see `numerics.storage_dtype`) and, with a mesh, shardings of a cache; allocates nothing.

    Raises:
        ConfigError: max_length is below 1 or beyond max_position_embeddings.
    """
    from musejax.sharding import cache_sharding, replicated

    if not 1 <= max_length <= config.max_position_embeddings:
        raise ConfigError(f"max_length: expected 1 to {config.max_position_embeddings} "
                          f"(max_position_embeddings), got {max_length}")
    sharding = None if mesh is None else cache_sharding(config, mesh)
    dtype = storage_dtype(policy, jax.default_backend() if mesh is None else mesh.devices.flat[0].platform)

    def array(layer):
        shape = (config.num_key_value_heads, slots_of(config, layer, max_length), config.head_dim)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    layers = tuple(LayerCache(array(i), array(i)) for i in range(config.num_hidden_layers))
    scalar = None if mesh is None else replicated(mesh)
    return Cache(layers, jax.ShapeDtypeStruct((), jnp.int32, sharding=scalar))


def init_cache(config: ModelConfig, policy: Policy, max_length: int, mesh=None) -> Cache:
    """An empty cache for up to max_length positions."""
    def zeros(x):
        return jnp.zeros(x.shape, x.dtype, device=x.sharding)

    return jax.tree.map(zeros, abstract_cache(config, policy, max_length, mesh))


def keep_placement(cache: Cache, config: ModelConfig, mesh) -> Cache:
    """The cache, told to stay where `init_cache` put it: else XLA may choose, and the next call compile anew."""
    if mesh is None:
        return cache
    from musejax.sharding import cache_sharding, replicated

    heads = jax.tree.map(lambda _: cache_sharding(config, mesh), cache.layers)
    return jax.lax.with_sharding_constraint(cache, Cache(heads, replicated(mesh)))


def slot_positions(num_slots: int, length: jax.Array) -> jax.Array:
    """int32 [p]: the position each slot holds once `length` positions are stored, -1 for none."""
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    newest = length - 1
    position = newest - (newest - slots) % num_slots
    return jnp.where((position >= 0) & (length > 0), position, -1)


def write_rows(layer: LayerCache, keys_ktc, values_ktc, positions_t, num_valid) -> LayerCache:
    """Stores the first num_valid rows at their positions' slots.

    Rows beyond num_valid, and rows that a later valid row of this call would overwrite in the ring, are
    dropped, so every slot is written at most once.
    """
    num_slots = layer.keys.shape[1]
    rows = jnp.arange(positions_t.shape[0])
    kept = (rows < num_valid) & (rows >= num_valid - num_slots)
    slots = jnp.where(kept, positions_t % num_slots, num_slots)

    def put(store_kpc, new_ktc):
        return store_kpc.at[:, slots].set(new_ktc.astype(store_kpc.dtype), mode="drop", unique_indices=True)

    return LayerCache(put(layer.keys, keys_ktc), put(layer.values, values_ktc))

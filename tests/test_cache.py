"""The cache: which position a slot holds, rings, padding rows, placements."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax import cache as kv
from musejax.config import MINI, RELEASED, ConfigError
from musejax.numerics import CANON
from musejax.sharding import make_mesh


def row(position, k=2, c=4):
    """What these tests store for a position: a value that names it."""
    return np.arange(k * c).reshape(k, c) + 100.0 * (position + 1)


def filled(slots, counts):
    """A layer after calls of counts[i] valid rows, each call padded by 3 rows."""
    layer = kv.LayerCache(*(jnp.zeros((2, slots, 4)),) * 2)
    at = 0
    for n in counts:
        positions = np.arange(at, at + n + 3)
        rows = jnp.asarray(np.stack([row(p) for p in positions], axis=1), jnp.float32)
        layer = jax.jit(kv.write_rows)(layer, rows, -rows, jnp.asarray(positions), n)
        at += n
    return layer, at


@pytest.mark.parametrize("counts", [[1], [7], [8], [9], [1] * 20, [3, 8, 1], [30], [5, 19, 1, 7]])
@pytest.mark.parametrize("slots", [8, 40])
def test_every_slot_holds_the_position_it_says(slots, counts):
    layer, length = filled(slots, counts)
    positions = np.asarray(kv.slot_positions(slots, jnp.int32(length)))
    assert sorted(positions[positions >= 0]) == list(range(max(0, length - slots), length))
    for slot, position in enumerate(positions):
        want = row(position) if position >= 0 else np.zeros((2, 4))
        assert_same_bits(layer.keys[:, slot], want.astype(np.float32))
        assert_same_bits(layer.values[:, slot] + 0.0, (-want + 0.0).astype(np.float32))


def test_empty_cache_holds_nothing():
    assert (np.asarray(kv.slot_positions(5, jnp.int32(0))) == -1).all()


def test_slots():
    assert kv.slots_of(MINI, 0, 100) == 8 and kv.slots_of(MINI, 1, 100) == 100 and kv.slots_of(MINI, 0, 5) == 5


def test_released_cache_is_abstract():
    cache = kv.abstract_cache(RELEASED, CANON, 131072, make_mesh(8))
    nbytes = sum(x.size * 2 for x in jax.tree.leaves(cache.layers))  # in bfloat16
    assert nbytes == 4096 * (16 * 131072 + 46 * 2048)  # spec section 3.3: 4096 bytes a token and layer
    assert cache.layers[0].keys.sharding.shard_shape(cache.layers[0].keys.shape) == (2, 2048, 64)


@pytest.mark.parametrize("length", [0, MINI.max_position_embeddings + 1])
def test_length_is_checked(length):
    with pytest.raises(ConfigError, match=f"max_length: expected 1 to 4096 .*got {length}"):
        kv.init_cache(MINI, CANON, length)


def test_placement_is_kept():
    mesh = make_mesh(4)
    cache = kv.init_cache(dataclasses.replace(MINI, num_hidden_layers=1, layer_types=(), layer_rope_theta=()),
                          CANON, 16, mesh)
    kept = jax.jit(lambda c: kv.keep_placement(jax.tree.map(lambda x: x + 1, c), MINI, mesh))(cache)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(kept), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)

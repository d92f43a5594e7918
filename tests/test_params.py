"""The parameter table: totals of spec section 5.3, slicing there and back, placements without memory."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax import params as table
from musejax.config import MINI, NANO, RELEASED
from musejax.sharding import DEVICE_COUNTS, make_mesh


def test_totals_of_the_released_model():
    rows = table.table(RELEASED)
    layers = [p for p in rows if p.path[0] == "layers"]
    assert sum(p.size for p in layers) == 816_680_189_440
    assert sum(p.size for p in rows) == 819_990_552_064
    assert sum(p.nbytes for p in layers if p.path[1] == 0) == 26_348_717_056
    groups = Counter()
    for p in layers:
        if p.path[1] == 0:
            groups[p.group] += p.size
    assert groups["attention"] == 218_103_808 and groups["pooling"] == 67_108_864
    assert groups["experts"] == 12_884_901_888


def test_nano_size():
    assert sum(p.size for p in table.table(NANO)) == 8_603_104


def test_names_are_unique():
    rows = table.table(RELEASED)
    assert len({p.hf_key for p in rows}) == len({p.path for p in rows}) == len(rows) == 62 * 18 + 3


def test_nvfp4_layer_of_the_released_model():
    """Spec section 5.3; parameters are counted as those of the matrices, scales as none."""
    rows = table.table(dataclasses.replace(RELEASED, nvfp4_layers=tuple(range(1, 61))))
    layer = [p for p in rows if p.path[:2] == ("layers", 1)]
    assert sum(p.nbytes for p in layer) == 7_826_676_736
    assert sum(p.nbytes for p in layer if p.group == "experts") == 7_247_763_456
    assert sum(p.parameters for p in rows) == 819_990_552_064
    assert f"{sum(p.nbytes for p in rows) / 1e9:.1f}" == "528.9"
    assert [p for p in rows if p.path[1:2] in ((0,), (61,))] == [
        p for p in table.table(RELEASED) if p.path[1:2] in ((0,), (61,))]


@pytest.mark.parametrize("config", [
    MINI, dataclasses.replace(MINI, num_local_experts=9), dataclasses.replace(MINI, nvfp4_layers=(0,)),
], ids=["8 slices", "1 slice", "NVFP4"])
def test_slicing_is_invertible_and_rows_stay_whole(config):
    rng = np.random.default_rng(0)
    for p in table.table(config)[:3 + 24]:
        x = rng.integers(0, 2**16, p.hf_shape).astype(np.uint16)
        sliced = table.slice_tensor(p, x)
        assert sliced.shape == p.shape, p.name
        assert_same_bits(table.unslice_tensor(p, sliced), x)


def test_a_slice_holds_its_rows_of_gate_and_up():
    p = next(p for p in table.table(MINI) if p.path == ("layers", 2, "gate_up"))
    e, width = MINI.num_local_experts, MINI.moe_intermediate_size
    x = np.arange(e * 2 * width * MINI.moe_hidden_size, dtype=np.int64).reshape(p.hf_shape)
    sliced = table.slice_tensor(p, x)
    per = width // 8
    assert_same_bits(sliced[3, 5, 0], x[5, 3 * per:4 * per])  # gate rows
    assert_same_bits(sliced[3, 5, 1], x[5, width + 3 * per:width + 4 * per])  # up rows


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_block_scales_are_sliced_with_their_codes(name):
    config = dataclasses.replace(MINI, nvfp4_layers=(2,))
    rows = {p.path[2]: p for p in table.table(config) if p.path[:2] == ("layers", 2)}
    plain = next(p for p in table.table(MINI) if p.path == ("layers", 2, name))

    def sliced(p):  # the number of its row in every element
        e, n, _ = p.hf_shape
        return table.slice_tensor(p, np.broadcast_to(np.arange(e * n).reshape(e, n, 1), p.hf_shape))[..., 0]

    assert_same_bits(sliced(rows[name]), sliced(plain))
    assert_same_bits(sliced(rows[name + "_scale"]), sliced(plain))


def test_tree_and_leaf_lookup():
    tree = table.build(MINI, lambda p: p)
    assert len(tree["layers"]) == MINI.num_hidden_layers
    assert all(table.leaf_of(tree, p) is p for p in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, table.Param)))


@pytest.mark.parametrize("devices", DEVICE_COUNTS)
def test_released_sizes_are_abstract(devices):
    mesh = make_mesh(devices)
    tree = table.abstract_params(RELEASED, mesh)
    leaves = jax.tree.leaves(tree)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    per_device = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    whole = sum(p.nbytes for p in table.table(RELEASED) if not p.split)
    split = sum(p.nbytes for p in table.table(RELEASED) if p.split)
    assert per_device == split // devices + whole


def test_init_params_matches_the_table():
    drawn = jax.eval_shape(lambda k: table.init_params(MINI, k), jax.random.key(0))
    for a, b in zip(jax.tree.leaves(drawn), jax.tree.leaves(table.abstract_params(MINI)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)

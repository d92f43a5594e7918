"""Flax modules: thin, abstract without memory, the same numbers as the functions."""

import jax
import numpy as np
from flax import nnx
from helpers import assert_same_bits

from musejax import params as table
from musejax.config import RELEASED, DecodeConfig
from musejax.model.forward import forward
from musejax.model.module import MuseSpark
from musejax.sharding import make_mesh


def test_module_calls_the_functions(small):
    config, params = small
    module = MuseSpark(config, params)
    tokens = np.arange(5)
    want, _ = forward(params, tokens, config=config, decode=DecodeConfig())
    assert_same_bits(module(tokens), want)
    for a, b in zip(jax.tree.leaves(module.pure()), jax.tree.leaves(params), strict=True):
        assert_same_bits(a, b)


def test_split_and_merge(small):
    config, params = small
    graph, state = nnx.split(MuseSpark(config, params))
    assert len(jax.tree.leaves(state)) == len(table.table(config))
    assert_same_bits(nnx.merge(graph, state)(np.arange(3)), MuseSpark(config, params)(np.arange(3)))


def test_released_module_is_abstract():
    mesh = make_mesh(8)
    module = MuseSpark(RELEASED, table.abstract_params(RELEASED, mesh))
    leaves = jax.tree.leaves(module.pure())
    assert sum(int(np.prod(x.shape)) for x in leaves) == 819_990_552_064
    assert all(x.sharding.mesh == mesh for x in leaves)

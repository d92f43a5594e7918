"""Small random models for the tests of the decoder."""

import dataclasses

import jax
import pytest

from musejax import params as table
from musejax.config import MINI


@pytest.fixture(scope="session")
def small():
    """Two layers, one sliding and one full, MINI sizes otherwise -> (config, params) with lively weights."""
    config = dataclasses.replace(MINI, num_hidden_layers=2, layer_types=(), layer_rope_theta=(), sliding_window=4)
    return config, lively(config)


def lively(config, seed=0):
    """Random parameters in which every gain, gate and bias matters."""
    params = table.init_params(config, jax.random.key(seed))
    rows = table.table(config)
    for p, key in zip(rows, jax.random.split(jax.random.key(seed + 1), len(rows)), strict=True):
        if p.group == "norms" or p.path[-1] == "router_bias":
            node = params
            for k in p.path[:-1]:
                node = node[k]
            node[p.path[-1]] = node[p.path[-1]] + (0.3 * jax.random.normal(key, p.shape)).astype(p.dtype)
    return params

"""Experts: reading only those hit, and the orders of addition."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax.config import MINI, DecodeConfig
from musejax.model.experts import all_experts, combine, hit_experts
from musejax.model.router import Routing
from musejax.numerics import EXACT

E, J = MINI.num_local_experts, MINI.num_experts_per_tok


def plain(h, ids, gate_up, down):
    """The formula, one row and slot at a time, in float64; weights as published."""
    out = np.zeros((*ids.shape, h.shape[1]))
    for (t, j), e in np.ndenumerate(ids):
        gate, up = np.split(gate_up[e].astype(np.float64) @ h[t].astype(np.float64), 2)
        out[t, j] = down[e].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up)
    return out


@pytest.fixture(scope="module")
def weights():
    from musejax import params as table

    rng = np.random.default_rng(0)
    rows = {p.path[-1]: p for p in table.table(MINI) if p.path[:2] == ("layers", 0)}
    published = {n: rng.normal(size=rows[n].hf_shape).astype(np.float32) / 11 for n in ("gate_up", "down")}
    return published, {n: jnp.asarray(table.slice_tensor(rows[n], x)) for n, x in published.items()}


ROUTES = {
    "random": lambda t: np.random.default_rng(t).permuted(np.tile(np.arange(E), (t, 1)), axis=1)[:, :J],
    "one expert takes all first slots": lambda t: np.stack([np.full(t, E - 1), np.arange(t) % (E - 1)], 1),
    "two experts take everything": lambda t: np.tile([0, E - 1], (t, 1)),
}


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 15, 16])
@pytest.mark.parametrize("route", ROUTES)
def test_hit_experts_are_the_formula(weights, rows, route):
    published, sliced = weights
    h = np.random.default_rng(rows).normal(size=(rows, MINI.moe_hidden_size)).astype(np.float32)
    ids = ROUTES[route](rows).astype(np.int32)
    want = plain(h, ids, published["gate_up"], published["down"])
    run = jax.jit(partial(hit_experts, decode=DecodeConfig(policy=EXACT)))
    got = run(h, ids, sliced)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()  # float32 sums of 128 terms
    every = all_experts(jnp.asarray(h), jnp.asarray(ids), sliced, DecodeConfig(policy=EXACT))
    assert np.abs(every - want).max() < 1e-5 * np.abs(want).max()


def test_weights_of_experts_not_hit_are_not_read(weights):
    _, sliced = weights
    ids = jnp.asarray([[3, 5]])
    h = jnp.ones((1, MINI.moe_hidden_size))
    poisoned = {n: jnp.full_like(w, jnp.nan).at[:, jnp.asarray([3, 5])].set(w[:, jnp.asarray([3, 5])])
                for n, w in sliced.items()}
    assert_same_bits(hit_experts(h, ids, poisoned, DecodeConfig()), hit_experts(h, ids, sliced, DecodeConfig()))


def test_padding_rows_hit_nothing(weights):
    _, sliced = weights
    poisoned = {n: jnp.full_like(w, jnp.nan) for n, w in sliced.items()}
    got = hit_experts(jnp.ones((2, MINI.moe_hidden_size)), jnp.full((2, J), E), poisoned, DecodeConfig())
    assert not np.asarray(got).any()


def combined(terms, owners, combine_order):
    """What `combine` makes of weighted terms, where rows after the norm are all ones."""
    j = len(terms)
    config = dataclasses.replace(MINI, num_experts_per_tok=j, num_local_experts=16, post_norm_eps=1e-30)
    routing = Routing(jnp.asarray([owners]) * 2, jnp.asarray([terms], jnp.float32), jnp.zeros(1))
    y = jnp.ones((1, j, config.moe_hidden_size))
    out = combine(y, routing, jnp.zeros(config.moe_hidden_size), config, DecodeConfig(combine=combine_order))
    return float(out[0, 0])


def test_orders_differ_as_the_spec_says():
    terms = [1.0, 2.0**-8, 2.0**-9]
    assert combined(terms, [0, 1, 0], "flat") == 1.0078125
    assert combined(terms, [0, 1, 0], "ep(8)") == 1.0
    assert combined(terms, [0, 0, 0], "ep(8)") == 1.0078125  # one owner adds like flat
    assert combined(terms, [0, 1, 0], "ep(1)") == 1.0078125

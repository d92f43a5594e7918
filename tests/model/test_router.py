"""Routing: the bias selects and does not weigh, ties, NaN, padding rows."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from musejax.config import MINI
from musejax.model.router import loads, route

FOUR = dataclasses.replace(MINI, num_local_experts=4, num_experts_per_tok=2)


def from_logits(logits, bias, config=FOUR, valid=None):
    """Routes rows whose router output before the multiplier is given."""
    logits = jnp.atleast_2d(jnp.asarray(logits, jnp.float32))
    t, e = logits.shape
    return route(logits, jnp.eye(e)[None], jnp.asarray(bias, jnp.float32),
                 jnp.ones(t, bool) if valid is None else jnp.asarray(valid), config)


def test_bias_selects_and_does_not_weigh():
    half = from_logits([2.0, -1.0, 0.5, 0.0], [-0.3, 0.4, 0.0, 0.0],
                       dataclasses.replace(FOUR, output_multiplier=2.0**-2.5))
    assert half.ids.tolist() == [[1, 2]]
    assert np.allclose(half.weights, [[0.466175, 0.533825]], atol=1e-6)  # spec section 10, number 6


def test_ties_go_to_the_lower_id():
    assert from_logits([1.0, 1.0, 1.0, 1.0], np.zeros(4)).ids.tolist() == [[0, 1]]
    assert from_logits([0.0, 1.0, 2.0, 1.0], np.zeros(4)).ids.tolist() == [[2, 1]]
    assert from_logits([0.0, 1.0, 2.0, 1.0], np.zeros(4)).margin.tolist() == [0.0]


def test_margin_is_the_gap_to_the_first_left_out():
    got = from_logits([8.0, 6.0, -6.0, -8.0], [0.0, 0.0, 0.0, 0.5])
    biased = 1 / (1 + np.exp(-np.array([8.0, 6.0, -6.0, -8.0]) * FOUR.output_multiplier)) + [0, 0, 0, 0.5]
    ranked = np.sort(biased)[::-1]
    assert np.isclose(got.margin[0], ranked[1] - ranked[2])
    everyone = from_logits([1.0, 2.0, 3.0, 4.0], np.zeros(4), dataclasses.replace(FOUR, num_experts_per_tok=4))
    assert everyone.ids.tolist() == [[3, 2, 1, 0]] and np.isinf(everyone.margin[0])


def test_nan_ranks_last_and_stays_in_its_row():
    clean = from_logits([[1.0, 2.0, 3.0, 4.0]], np.zeros(4))
    got = route(jnp.asarray([[np.nan, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]), jnp.eye(4)[None], jnp.zeros(4),
                jnp.ones(2, bool), FOUR)
    assert len(set(got.ids[0].tolist())) == 2
    assert got.ids[1].tolist() == clean.ids[0].tolist() and np.array_equal(got.weights[1], clean.weights[0])


def test_padding_rows_go_nowhere():
    got = from_logits(np.ones((3, 4)), np.zeros(4), valid=[True, True, False])
    assert got.ids.tolist() == [[0, 1], [0, 1], [4, 4]]
    assert loads(got, FOUR).tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_weights_add_up(factor):
    rng = np.random.default_rng(1)
    got = from_logits(rng.normal(size=(5, 4)), rng.normal(size=4),
                      dataclasses.replace(FOUR, routed_scaling_factor=factor))
    assert np.allclose(got.weights.sum(-1), factor, rtol=1e-6)

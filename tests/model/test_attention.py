"""Attention: visibility at window borders, grouping of heads, padding rows, both softmax forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax.config import MINI
from musejax.model.attention import attend, visible
from musejax.numerics import CANON, CANON_F32_PROBS, EXACT


def test_window_counts_the_query():
    seen = np.asarray(visible(jnp.asarray([9]), jnp.arange(12), 8))[0]
    assert np.flatnonzero(seen).tolist() == list(range(2, 10))  # spec section 10, number 7
    assert np.flatnonzero(np.asarray(visible(jnp.asarray([9]), jnp.arange(12), None))[0]).tolist() == list(range(10))
    assert not np.asarray(visible(jnp.asarray([9]), jnp.asarray([-1]), None)).any()


def inputs(t, p, seed=0):
    rng = np.random.default_rng(seed)
    n, k, c = MINI.num_attention_heads, MINI.num_key_value_heads, MINI.head_dim
    unit = [rng.normal(size=s) for s in ((t, n, c), (k, p, c))]
    q, key = (a / np.sqrt((a * a).mean(-1, keepdims=True)) for a in unit)
    mask = rng.random((t, p)) < 0.7
    mask[:, 0] = True
    return [a.astype(np.float32) for a in (q, key, rng.normal(size=(k, p, c)))] + [mask]


def plain(q, key, value, mask):
    """One head and row at a time, in float64."""
    t, n, _ = q.shape
    group, out = n // key.shape[0], np.zeros(q.shape)
    for i in range(t):
        for h in range(n):
            s = key[h // group].astype(np.float64) @ q[i, h] * MINI.attention_scale
            e = np.where(mask[i], np.exp(s), 0)
            out[i, h] = (e / e.sum()) @ value[h // group]
    return out


@pytest.mark.parametrize("policy", [EXACT, CANON_F32_PROBS, CANON], ids=["exact", "canon, f32 probs", "canon"])
@pytest.mark.parametrize("t", [1, 7, 16])
def test_attend_is_the_formula(policy, t):
    q, key, value, mask = inputs(t, 33)
    if policy.rounds:
        q, key, value = (np.asarray(jnp.asarray(a).astype(jnp.bfloat16).astype(jnp.float32)) for a in (q, key, value))
    got = jax.jit(lambda *a: attend(*a, MINI, policy))(q, key, value, mask)
    # Probabilities of 8 bits in CANON: 2^-9 relative in the numerator and again in the sum they are divided by.
    bound = 2.0**-8 * np.abs(value).max() if policy is CANON else 1e-5
    assert np.abs(got - plain(q, key, value, mask)).max() < bound


def test_a_row_that_sees_nothing_is_zero():
    q, key, value, mask = inputs(3, 9)
    mask[1] = False
    for policy in (EXACT, CANON):
        got = np.asarray(attend(q, key, value, mask, MINI, policy))
        assert not got[1].any() and np.isfinite(got).all()


def test_hidden_keys_leave_no_trace():
    q, key, value, mask = inputs(2, 20)
    mask[:, 7] = False
    junk_key, junk_value = key.copy(), value.copy()
    junk_key[:, 7], junk_value[:, 7] = 5.0, -3.0
    for policy in (EXACT, CANON):
        assert_same_bits(attend(q, junk_key, junk_value, mask, MINI, policy),
                         attend(q, key, value, mask, MINI, policy))

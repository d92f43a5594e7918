"""Norms and residual gates against the numbers of spec section 10."""

import jax.numpy as jnp
import numpy as np

from musejax.config import MINI
from musejax.model.norms import centred_norm, gain, input_scaled, residual_gate, rms
from musejax.numerics import CANON, EXACT

X = jnp.asarray([[1.0, 2.0, -3.0, 4.0]])
GAMMA = jnp.asarray([0.5, 0.0, -0.5, 1.0])


def test_epsilon_matters_for_small_rows():
    assert np.allclose(rms(jnp.full((1, 8), 0.001), 1e-5), 0.301511, atol=1e-6)


def test_centred_and_input_scaled_norms_differ():
    assert np.allclose(centred_norm(X, GAMMA, 1e-5, EXACT), [[0.547722, 0.730296, -0.547722, 2.921185]], atol=1e-6)
    scaled = input_scaled(X, GAMMA, 1e-8, EXACT)
    assert np.allclose(scaled, [[0.352332, 0.469776, -0.352332, 1.879105]], atol=1e-6)
    assert np.isclose(np.mean(np.square(scaled)), 1)


def test_small_gain_is_lost_in_canon_only():
    gamma = jnp.asarray([2.0**-8], jnp.bfloat16)
    assert gain(gamma, CANON)[0] == 1 and gain(gamma, EXACT)[0] == 1 + 2.0**-8


def test_residual_gate():
    alpha, beta = residual_gate(jnp.asarray([-0.2, 0.0, 0.5, 2.0, 3.0]), MINI)
    assert np.allclose(alpha, [0.940699, 0.866025, 0.540832, 0.050403, 0.031623], atol=1e-6)
    assert np.allclose(beta, [0.339244, 0.5, 0.841131, 0.998729, 0.999955], atol=1e-6)

"""Rotation against spec section 10, number 8."""

import jax.numpy as jnp
import numpy as np

from musejax.model.rope import angles, rotate
from musejax.numerics import CANON, EXACT


def test_pairs_are_half_apart():
    x = np.zeros((1, 1, 64), np.float32)
    x[0, 0, [0, 1]], x[0, 0, 32] = 1, 0.5
    out = rotate(jnp.asarray(x), angles(jnp.asarray([3]), 64, 5e5), EXACT)[0, 0]
    assert np.allclose(out[jnp.asarray([0, 1, 32, 33])], [-1.060553, -0.407767, -0.353876, 0.913086], atol=1e-6)


def test_frequencies():
    cos, sin = angles(jnp.asarray([1]), 64, 5e5)
    assert np.allclose(np.arctan2(sin, cos)[0, [1, 31]], [0.663601238, 3.013858e-06], rtol=1e-6)


def test_scores_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 64)), jnp.float32) for _ in range(2))

    def score(i, j):
        return float(jnp.sum(rotate(q, angles(jnp.asarray([i]), 64, 5e5), EXACT)
                             * rotate(k, angles(jnp.asarray([j]), 64, 5e5), EXACT)))

    assert np.isclose(score(7, 3), score(107, 103), atol=1e-4)
    assert not np.isclose(score(7, 3), score(7, 4), atol=1e-2)


def test_one_rounding_at_the_end():
    out = rotate(jnp.ones((1, 1, 8)), angles(jnp.asarray([5]), 8, 100.0), CANON)
    assert np.array_equal(out, out.astype(jnp.bfloat16).astype(jnp.float32))

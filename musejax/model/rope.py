"""Rotary positions (spec section 3.2). Layers with base 0 (NoPE) do not rotate at all.

Checkpoint rows of a q or k head are [even | odd] halves, so pairs are (j, j + c/2): "rotate half".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from musejax.numerics import Policy


def angles(positions_t: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [t, c/2], of position * theta^(-2j/c)."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)
    angle = positions_t.astype(jnp.float32)[:, None] * inv_freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_tnc: jax.Array, cos_sin: tuple[jax.Array, jax.Array], policy: Policy) -> jax.Array:
    """Rotates every head by its row's angles; one rounding at the end."""
    cos, sin = (a[:, None, :] for a in cos_sin)
    a, b = jnp.split(x_tnc, 2, axis=-1)
    return policy.round("rope", jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))

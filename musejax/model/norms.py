"""RMS norms, the residual gate, and their gains (spec sections 3 and 3.5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from musejax.config import ModelConfig
from musejax.numerics import Policy, sum_dtype


def rms(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, float32; the mean in `sum_dtype()`."""
    x = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x.astype(sum_dtype())), axis=-1, keepdims=True)
    return x * (1.0 / jnp.sqrt(mean + eps)).astype(jnp.float32)


def gain(gamma_d: jax.Array, policy: Policy) -> jax.Array:
    """1 + gamma, itself a rounding point, float32."""
    return policy.round("gain", 1.0 + gamma_d.astype(jnp.float32))


def centred_norm(x_td, gamma_d, eps: float, policy: Policy) -> jax.Array:
    """rms(x) * (1 + gamma)."""
    return policy.round("norm", rms(x_td, eps) * gain(gamma_d, policy))


def input_scaled(x_td, gamma_d, eps: float, policy: Policy) -> jax.Array:
    """rms(x * (1 + gamma)): the gain goes in first, so the result always has unit RMS. Not rounded."""
    return rms(policy.round("scaled", x_td * gain(gamma_d, policy)), eps)


def residual_gate(gate_d: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """(alpha, beta) of the norm-preserving gate, float32 [d]: alpha^2 + beta^2 = 1 above the floor."""
    u = gate_d.astype(jnp.float32) / config.residual_gate_temperature
    beta = jax.nn.sigmoid(u)
    alpha = jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-u) * (1.0 + beta), config.residual_gate_floor))
    return alpha, beta


def gated_residual(stream_td, branch_td, gate_d, config: ModelConfig, policy: Policy) -> jax.Array:
    """alpha * stream + beta * branch; the branch is a normed output, rounded here."""
    alpha, beta = residual_gate(gate_d, config)
    return alpha * stream_td + beta * policy.round("post_norm", branch_td)

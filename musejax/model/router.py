"""Router: which experts a row goes to, and with what weight (spec section 3.4). Always float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from musejax.config import ModelConfig
from musejax.numerics import einsum_f32


class Routing(NamedTuple):
    """Choice of one layer.

    Attributes:
        ids: int32 [t, j], chosen experts, best biased score first, ties to the lower id; the number of
            experts (no expert) in padding rows.
        weights: float32 [t, j], unbiased scores normalised over the chosen ones.
        margin: float32 [t], biased score of the last chosen expert minus that of the best one left out.
    """

    ids: jax.Array
    weights: jax.Array
    margin: jax.Array


def route(x_td, router_sed, bias_e, valid_t, config: ModelConfig) -> Routing:
    """Top-k of sigmoid(x W^T * output_multiplier) + bias; the bias selects and does not weigh.

    A NaN score ranks below all others.
    """
    experts = config.num_local_experts
    logits = einsum_f32("td,sed->tse", x_td, router_sed).reshape(-1, experts)
    scores = jax.nn.sigmoid(logits * jnp.float32(config.output_multiplier))
    biased = scores + bias_e
    biased = jnp.where(jnp.isnan(biased), -jnp.inf, biased)
    k = config.num_experts_per_tok
    best, ids = lax.top_k(biased, min(k + 1, experts))  # equal values: the lower index comes first
    margin = best[:, k - 1] - best[:, k] if k < experts else jnp.full(best.shape[:1], jnp.inf)
    ids = ids[:, :k]
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    weights = chosen / (chosen.sum(-1, keepdims=True) + config.route_eps) * config.routed_scaling_factor
    return Routing(jnp.where(valid_t[:, None], ids, experts).astype(jnp.int32), weights, margin)


def loads(routing: Routing, config: ModelConfig) -> jax.Array:
    """int32 [e]: rows that chose each expert."""
    return jnp.zeros(config.num_local_experts, jnp.int32).at[routing.ids.reshape(-1)].add(1, mode="drop")

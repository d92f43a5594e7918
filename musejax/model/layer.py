"""One decoder layer, plain JAX: the `reference` implementation, against which kernels are compared.

It follows the rounding points of numerics.py and promises no bits. Reading it top to bottom is reading
spec section 3.1 step by step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from musejax import cache as kv
from musejax.config import DecodeConfig, ModelConfig
from musejax.model.attention import Rows, attention, project
from musejax.model.experts import all_experts, combine, hit_experts
from musejax.model.norms import centred_norm, gated_residual, input_scaled, rms
from musejax.model.router import Routing, route


class LayerOutput(NamedTuple):
    """stream: float32 [t, d], residual stream after the layer. cache: written. routing: experts chosen."""

    stream: jax.Array
    cache: kv.LayerCache | None
    routing: Routing


def moe(p: dict, x_td, rows: Rows, config: ModelConfig, decode: DecodeConfig) -> tuple[jax.Array, Routing]:
    """Router, pooler, experts, combine, unpooler -> ([t, d], routing)."""
    policy = decode.policy
    routing = route(x_td, p["router"], p["router_bias"], rows.valid, config)
    pooled = policy.round("pooler", project(x_td, p["pooler"], policy))
    h = centred_norm(pooled, p["expert_norm"], config.rms_norm_eps, policy)
    run = hit_experts if decode.experts == "hit" else all_experts
    y = run(h, routing.ids, p, decode)
    m = combine(y, routing, p["post_expert_norm"], config, decode)
    return policy.round("unpooler", project(m, p["unpooler"], policy)), routing


def decoder_layer(p: dict, stream_td, layer: int, stored: kv.LayerCache | None, length, rows: Rows,
                  config: ModelConfig, decode: DecodeConfig) -> LayerOutput:
    """Residual stream before the layer -> after it.

    Args:
        p: the layer's parameters, `params["layers"][layer]`.
        stream_td: float32 [t, d].
        layer: index, which decides window and rotation.
        stored, length: the layer's cache and how many positions it holds; None runs without a cache.
        rows: positions and validity of the rows.
    """
    policy = decode.policy
    x = centred_norm(stream_td, p["input_norm"], config.rms_norm_eps, policy)
    a, stored = attention(p, x, layer, stored, length, rows, config, policy)
    stream = gated_residual(stream_td, rms(a, config.post_norm_eps), p["attention_residual_gate"], config, policy)
    x = centred_norm(stream, p["ffn_norm"], config.rms_norm_eps, policy)
    f, routing = moe(p, x, rows, config, decode)
    f = input_scaled(f, p["post_ffn_norm"], config.post_norm_eps, policy)
    return LayerOutput(gated_residual(stream, f, p["ffn_residual_gate"], config, policy), stored, routing)

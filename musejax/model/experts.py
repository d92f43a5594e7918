"""Routed experts and their ordered combination (spec section 3.1, steps 16 to 20, and 7.3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from musejax.config import DecodeConfig, ModelConfig, combine_groups
from musejax.model.norms import input_scaled
from musejax.model.router import Routing
from musejax.numerics import Policy


def expert(h_tm, gate_up_suf, down_sof, policy: Policy) -> jax.Array:
    """One expert on all rows: (silu(h Wgate^T) * h Wup^T) Wdown^T -> [t, m].

    Args:
        gate_up_suf: [s, 2, F/s, M], gate rows then up rows of each slice.
        down_sof: [s, M/s, F].
    """
    t = h_tm.shape[0]
    acc = policy.einsum("tm,sufm->utsf", h_tm, gate_up_suf).reshape(2, t, -1)
    act = policy.round("swiglu", jax.nn.silu(acc[0]) * acc[1])
    return policy.round("down", policy.einsum("tf,sof->tso", act, down_sof).reshape(t, -1))


def hit_experts(h_tm, ids_tj, p: dict, policy: Policy) -> jax.Array:
    """Outputs [t, j, m] of the chosen experts; loops over the distinct experts hit, reading only those."""
    num = p["gate_up"].shape[1]
    hit = jnp.zeros(num, bool).at[ids_tj.reshape(-1)].set(True, mode="drop")
    order = jnp.argsort(~hit, stable=True)

    def one(i, y_tjm):
        e = order[i]
        out = expert(h_tm, *(lax.dynamic_index_in_dim(p[w], e, axis=1, keepdims=False) for w in ("gate_up", "down")),
                     policy)
        return jnp.where((ids_tj == e)[..., None], out[:, None], y_tjm)

    y = jnp.zeros((*ids_tj.shape, h_tm.shape[1]), jnp.float32)
    return lax.fori_loop(0, hit.sum(dtype=jnp.int32), one, y)


def all_experts(h_tm, ids_tj, p: dict, policy: Policy) -> jax.Array:
    """The same outputs by computing every expert for every row: differentiable, and costly."""
    every = jax.vmap(lambda gate_up, down: expert(h_tm, gate_up, down, policy), in_axes=1, out_axes=1)
    y_tem = every(p["gate_up"], p["down"])
    return jnp.take_along_axis(y_tem, jnp.minimum(ids_tj, y_tem.shape[1] - 1)[..., None], axis=1)


def combine(y_tjm, routing: Routing, gamma_m, config: ModelConfig, decode: DecodeConfig) -> jax.Array:
    """Post-expert norm of every slot, then the weighted sum over slots, in a stated order.

    `flat` adds slots in slot order. `ep(R)` adds each owner group's slots in slot order, rounds that
    partial, and adds partials in owner order: the sum expert-parallel training computes.
    """
    policy = decode.policy
    z = input_scaled(y_tjm, gamma_m, config.post_norm_eps, policy)
    terms = routing.weights[..., None] * z
    groups = combine_groups(decode.combine)
    zero = jnp.zeros_like(terms[:, 0])

    def ordered(parts):
        total = zero
        for part in parts:
            total = total + part
        return total

    slots = range(terms.shape[1])
    if not groups:
        return policy.round("combine", ordered(terms[:, j] for j in slots))
    owner_tj = routing.ids // (config.num_local_experts // groups)
    partials = [ordered(jnp.where((owner_tj[:, j] == g)[:, None], terms[:, j], 0.0) for j in slots)
                for g in range(groups)]
    return policy.round("combine", ordered(policy.round("combine_partial", part) for part in partials))

"""Routed experts and their ordered combination (spec section 3.1, steps 16 to 20, and 7.3)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from musejax import nvfp4
from musejax.config import DecodeConfig, ModelConfig, combine_groups
from musejax.model.norms import input_scaled
from musejax.model.router import Routing
from musejax.numerics import Policy


def expert(h_tm, gate_up_suf, down_sof, policy: Policy) -> jax.Array:
    """One BF16 expert on all rows: (silu(h Wgate^T) * h Wup^T) Wdown^T -> [t, m].

    Args:
        gate_up_suf: [s, 2, F/s, M], gate rows then up rows of each slice.
        down_sof: [s, M/s, F].
    """
    gate, up = _gate_up(h_tm, gate_up_suf, policy)
    act = policy.round("swiglu", jax.nn.silu(gate) * up)
    return policy.round("down", _down(act, down_sof, policy))


def _gate_up(h_tm, gate_up_sufm, policy: Policy) -> jax.Array:
    """Accumulators [2, t, f] of gate and up."""
    return policy.einsum("tm,sufm->utsf", h_tm, gate_up_sufm).reshape(2, h_tm.shape[0], -1)


def _down(act_tf, down_sof, policy: Policy) -> jax.Array:
    """Accumulators [t, m]."""
    return policy.einsum("tf,sof->tso", act_tf, down_sof).reshape(act_tf.shape[0], -1)


def nvfp4_expert(h_tm, w: dict, inputs: tuple[jax.Array, jax.Array], decode: DecodeConfig) -> jax.Array:
    """One NVFP4 expert on all rows -> [t, m] (spec section 6.5).

    GEMMs multiply the exact grid values e2m1 * e4m3; global scales multiply their accumulators. Policy `exact`
    multiplies the scales into the weights instead, as the reference library does.

    Args:
        w: the expert's leaves: `gate_up` [s, 2, F/s, M/2], `gate_up_scale`, `gate_up_global` [2], `down` [s, M/s, F/2],
            `down_scale`, `down_global` [].
        inputs: input scales [] of the two GEMMs, for `nvfp4_static`.
    """
    policy, mode = decode.policy, decode.activations
    gate_up, down = nvfp4.grid(w["gate_up"], w["gate_up_scale"]), nvfp4.grid(w["down"], w["down_scale"])
    if not policy.rounds:
        return expert(h_tm, gate_up * w["gate_up_global"][:, None, None], down * w["down_global"], policy)
    h_tm, scale = _quantised(h_tm, mode, inputs[0])
    gate, up = _gate_up(h_tm, gate_up, policy)
    act = jax.nn.silu(gate * (scale * w["gate_up_global"][0])) * (up * (scale * w["gate_up_global"][1]))
    if mode != "nvfp4_static":  # there the epilogue quantises float32 values
        act = policy.round("swiglu", act)
    act, scale = _quantised(act, mode, inputs[1])
    return policy.round("down", _down(act, down, policy) * (scale * w["down_global"]))


def _quantised(x_tk, mode: str, input_scale) -> tuple[jax.Array, jax.Array | float]:
    """-> (values for a GEMM, factor of its accumulators: float32 [t, 1], or 1)."""
    if mode == "bf16":
        return x_tk, 1.0
    x = nvfp4.quantize_activation(x_tk, mode, input_scale)
    return x.grid, x.decode


def runner(h_tm, p: dict, decode: DecodeConfig) -> tuple[dict, dict, Callable[[dict], jax.Array]]:
    """-> (leaves of all experts, the expert axis of each, leaves of one expert -> its output on all rows)."""
    if "gate_up_scale" not in p:
        leaves = {name: p[name] for name in ("gate_up", "down")}
        return leaves, dict.fromkeys(leaves, 1), lambda w: expert(h_tm, w["gate_up"], w["down"], decode.policy)
    leaves = {base + end: p[base + end] for base in ("gate_up", "down") for end in ("", "_scale", "_global")}
    inputs = (p["gate_up_input_scale"].max(), p["down_input_scale"].max())  # over experts, as engines do
    axes = {name: 0 if name.endswith("_global") else 1 for name in leaves}
    return leaves, axes, lambda w: nvfp4_expert(h_tm, w, inputs, decode)


def hit_experts(h_tm, ids_tj, p: dict, decode: DecodeConfig) -> jax.Array:
    """Outputs [t, j, m] of the chosen experts; loops over the distinct experts hit, reading only those."""
    leaves, axes, run = runner(h_tm, p, decode)
    num = leaves["gate_up"].shape[1]
    hit = jnp.zeros(num, bool).at[ids_tj.reshape(-1)].set(True, mode="drop")
    order = jnp.argsort(~hit, stable=True)

    def one(i, y_tjm):
        e = order[i]
        out = run({n: lax.dynamic_index_in_dim(w, e, axis=axes[n], keepdims=False) for n, w in leaves.items()})
        return jnp.where((ids_tj == e)[..., None], out[:, None], y_tjm)

    y = jnp.zeros((*ids_tj.shape, h_tm.shape[1]), jnp.float32)
    return lax.fori_loop(0, hit.sum(dtype=jnp.int32), one, y)


def all_experts(h_tm, ids_tj, p: dict, decode: DecodeConfig) -> jax.Array:
    """The same outputs by computing every expert for every row: differentiable for BF16 experts, and costly."""
    leaves, axes, run = runner(h_tm, p, decode)
    y_tem = jax.vmap(run, in_axes=(axes,), out_axes=1)(leaves)
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

    def ordered(parts):
        return functools.reduce(jnp.add, parts, 0.0)

    slots = range(terms.shape[1])
    if not groups:
        return policy.round("combine", ordered(terms[:, j] for j in slots))
    owner_tj = routing.ids // (config.num_local_experts // groups)
    # All groups at once: group by group, XLA has not fused it for a GPU after five minutes.
    owned_gtj = owner_tj == jnp.arange(groups)[:, None, None]
    partials = ordered(jnp.where(owned_gtj[:, :, j, None], terms[:, j], 0.0) for j in slots)
    return policy.round("combine", ordered(policy.round("combine_partial", partials)))

"""Grouped-query attention over the cache and the rows of this call (spec section 3.1, steps 2 to 9)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from musejax import cache as kv
from musejax.config import ModelConfig
from musejax.model.norms import rms
from musejax.model.rope import angles, rotate
from musejax.numerics import Policy, einsum_f32


class Rows(NamedTuple):
    """What is known of the rows of one call.

    Attributes:
        positions: int32 [t], absolute position of each row, ascending.
        num_valid: int32 [], rows before it are real, the others padding.
    """

    positions: jax.Array
    num_valid: jax.Array

    @property
    def valid(self) -> jax.Array:
        """bool [t]."""
        return jnp.arange(self.positions.shape[0]) < self.num_valid


def project(x_td: jax.Array, w_snd: jax.Array, policy: Policy) -> jax.Array:
    """x W^T for a row-sliced weight [s, N/s, D] -> float32 [t, N], not rounded."""
    out = policy.einsum("td,snd->tsn", x_td, w_snd)
    return out.reshape(x_td.shape[0], -1)


def visible(query_t, key_p, window: int | None) -> jax.Array:
    """bool [t, p]: the key is stored (position >= 0), not in the future, and inside the window."""
    query, key = query_t[:, None], key_p[None, :]
    seen = (key >= 0) & (key <= query)
    return seen if window is None else seen & (key > query - window)


def attend(q_tnc, keys_kpc, values_kpc, mask_tp, config: ModelConfig, policy: Policy) -> jax.Array:
    """softmax(q k^T scale) v over all keys -> float32 [t, n, c]; query head n reads k/v head n // group."""
    t, n, c = q_tnc.shape
    k = keys_kpc.shape[0]
    q = q_tnc.reshape(t, k, n // k, c)
    scores = policy.einsum("tkgc,kpc->kgtp", q, keys_kpc) * jnp.float32(config.attention_scale)
    scores = jnp.where(mask_tp, scores, -jnp.inf)
    if policy.probs == "bfloat16":
        probs = policy.round("attention_probs", jnp.exp(scores))  # |score| is bounded: no running maximum
        total = probs.sum(-1)
        out = policy.einsum("kgtp,kpc->tkgc", probs, values_kpc)
    else:
        # A padding row sees no key; 0 instead of its maximum of -inf keeps NaN out.
        probs = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), -1e30))
        total = probs.sum(-1)
        out = einsum_f32("kgtp,kpc->tkgc", probs, values_kpc)
    total = jnp.where(total > 0, total, 1.0).transpose(2, 0, 1)
    return (out / total[..., None]).reshape(t, n, c)


def attention(p: dict, x_td, layer: int, stored: kv.LayerCache | None, length, rows: Rows, config: ModelConfig,
              policy: Policy) -> tuple[jax.Array, kv.LayerCache | None]:
    """Attention branch of one layer.

    Args:
        p: parameters of the layer.
        x_td: normed input.
        stored: the layer's cache before this call, or None to attend within this call only.
        length: int32 [], positions in the cache.

    Returns:
        (output projection [t, d], cache with this call's valid rows written).
    """
    t, c = x_td.shape[0], config.head_dim
    q, k, v, gate = (policy.round("qkv", project(x_td, p[name], policy)).reshape(t, -1, c)
                     for name in ("q_proj", "k_proj", "v_proj", "gate_proj"))
    q, k = (policy.round("qk_norm", rms(a, config.rms_norm_eps)) for a in (q, k))
    theta = config.layer_rope_theta[layer]
    if theta:
        cos_sin = angles(rows.positions, c, theta)
        q, k = rotate(q, cos_sin, policy), rotate(k, cos_sin, policy)

    keys, values = (a.swapaxes(0, 1).astype(policy.cache_dtype) for a in (k, v))
    key_positions = jnp.where(rows.valid, rows.positions, -1)
    if stored is not None:
        keys = jnp.concatenate([stored.keys, keys], axis=1)
        values = jnp.concatenate([stored.values, values], axis=1)
        held = kv.slot_positions(stored.keys.shape[1], length)
        key_positions = jnp.concatenate([held, key_positions])
        stored = kv.write_rows(stored, k, v, rows.positions, rows.num_valid)
    mask = visible(rows.positions, key_positions, config.window(layer))
    out = policy.round("attention", attend(q, keys, values, mask, config, policy))
    out = policy.round("gated_output", rms(out, config.rms_norm_eps) * jax.nn.sigmoid(gate))
    return policy.round("o_proj", project(out.reshape(t, -1), p["o_proj"], policy)), stored

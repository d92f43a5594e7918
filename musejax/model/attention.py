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
        positions: int32 [t], absolute position of each row, ascending unless they are a tree.
        num_valid: int32 [], rows before it are real, the others padding.
        ancestors: bool [t, t], of a tree of guesses: row i sees row j (its ancestors and itself); None for a chain.
            Rows of a tree are not stored: they come back in place of the cache, and an accepted path is stored later.
    """

    positions: jax.Array
    num_valid: jax.Array
    ancestors: jax.Array | None = None

    @property
    def valid(self) -> jax.Array:
        """bool [t]."""
        return jnp.arange(self.positions.shape[0]) < self.num_valid


def project(x_td: jax.Array, w_snd: jax.Array, policy: Policy) -> jax.Array:
    """x W^T for a row-sliced weight [s, N/s, D] -> float32 [t, N], not rounded."""
    out = policy.einsum("snd,td->snt", w_snd, x_td)  # weight first: else XLA's CPU backend transposes it anew each time
    return out.reshape(-1, x_td.shape[0]).T


def visible(query_t, key_p, window: int | None) -> jax.Array:
    """bool [t, p]: the key is stored (position >= 0), not in the future, and inside the window."""
    query, key = query_t[:, None], key_p[None, :]
    seen = (key >= 0) & (key <= query)
    return seen if window is None else seen & (key > query - window)


def attend(q_tnc, keys_kpc, values_kpc, mask_tp, config: ModelConfig, policy: Policy) -> jax.Array:
    """softmax(q k^T scale) v over all keys -> float32 [t, n, c]; query head n reads k/v head n // group."""
    t, n, c = q_tnc.shape
    k = keys_kpc.shape[0]
    group = n // k
    # Row r = (query, head in the group) of each k/v head: one batch axis, plain matrices behind it.
    q_krc = q_tnc.reshape(t, k, group, c).transpose(1, 0, 2, 3).reshape(k, t * group, c)
    seen_rp = jnp.repeat(mask_tp, group, axis=0)
    scores = policy.einsum("krc,kpc->krp", q_krc, keys_kpc) * jnp.float32(config.attention_scale)
    scores = jnp.where(seen_rp, scores, -jnp.inf)
    if policy.probs == "bfloat16":
        probs = policy.round("attention_probs", jnp.exp(scores))  # |score| is bounded: no running maximum
        out = policy.einsum("krp,kpc->krc", probs, values_kpc)
    else:
        # A padding row sees no key; -1e30 instead of its maximum of -inf keeps NaN out.
        probs = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), -1e30))
        out = einsum_f32("krp,kpc->krc", probs, values_kpc)
    total = probs.sum(-1, keepdims=True)
    out = out / jnp.where(total > 0, total, 1.0)
    return out.reshape(k, t, group, c).transpose(1, 0, 2, 3).reshape(t, n, c)


def seen_by(rows: Rows, keys, values, stored: kv.LayerCache | None, length, window: int | None):
    """What the rows of a call attend to, given their own keys and values [k, t, c].

    Returns:
        (keys, values [k, p, c], mask bool [t, p], what becomes of the cache).
    """
    own = jnp.where(rows.valid, rows.positions, -1)
    if rows.ancestors is not None:
        flight = kv.LayerCache(*(a.astype(stored.keys.dtype) for a in (keys, values)))
        held = kv.slot_positions(stored.keys.shape[1], length)
        mask = [visible(rows.positions, held, window), visible(rows.positions, own, window) & rows.ancestors]
        keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(stored, flight, strict=True))
        return keys, values, jnp.concatenate(mask, axis=1), flight
    if stored is None:
        return keys, values, visible(rows.positions, own, window), None
    written = kv.write_rows(stored, keys, values, rows.positions, rows.num_valid)
    if window is None or rows.positions.shape[0] == 1:  # nothing that these rows see was overwritten
        held = kv.slot_positions(written.keys.shape[1], length + rows.num_valid)
        return *written, visible(rows.positions, held, window), written
    keys, values = (jnp.concatenate([old, new.astype(old.dtype)], axis=1)
                    for old, new in zip(stored, (keys, values), strict=True))
    held = jnp.concatenate([kv.slot_positions(stored.keys.shape[1], length), own])
    return keys, values, visible(rows.positions, held, window), written


def attention(p: dict, x_td, layer: int, stored: kv.LayerCache | None, length, rows: Rows, config: ModelConfig,
              policy: Policy) -> tuple[jax.Array, kv.LayerCache | None]:
    """Attention branch of one layer.

    Args:
        p: parameters of the layer.
        x_td: normed input.
        stored: the layer's cache before this call, or None to attend within this call only.
        length: int32 [], positions in the cache.

    Returns:
        (output projection [t, d], cache with this call's valid rows written; of a tree, its rows [k, t, c] alone).
    """
    t, c = x_td.shape[0], config.head_dim
    q, k, v, gate = (policy.round("qkv", project(x_td, p[name], policy)).reshape(t, -1, c)
                     for name in ("q_proj", "k_proj", "v_proj", "gate_proj"))
    q, k = (policy.round("qk_norm", rms(a, config.rms_norm_eps)) for a in (q, k))
    theta = config.layer_rope_theta[layer]
    if theta:
        cos_sin = angles(rows.positions, c, theta)
        q, k = rotate(q, cos_sin, policy), rotate(k, cos_sin, policy)

    keys, values = (a.swapaxes(0, 1) for a in (k, v))
    keys, values, mask, stored = seen_by(rows, keys, values, stored, length, config.window(layer))
    out = policy.round("attention", attend(q, keys, values, mask, config, policy))
    out = policy.round("gated_output", rms(out, config.rms_norm_eps) * jax.nn.sigmoid(gate))
    return policy.round("o_proj", project(out.reshape(t, -1), p["o_proj"], policy)), stored

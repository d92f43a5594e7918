"""For tests of the drafter's kernels: random drafters in every form, and the arithmetic between GEMMs in NumPy."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from kernel_inputs import F32, rms_norm, round_bf16

from musejax.numerics import CANON_F32_PROBS
from musejax.params import BF16
from musejax.speculation import draft as dr
from musejax.speculation import draft_kernels as dk
from musejax.speculation import params as dp
from musejax.speculation.config import DraftConfig
from musejax.speculation.packing import pack_drafter, place

POLICY = CANON_F32_PROBS

BASE = DraftConfig(
    vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8, head_dim=16,
    intermediate_size=256, sliding_window=24, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=4096,
    block_size=16, mask_token_id=5, target_layer_ids=(2, 0, 1), conv_kernel_size=2, conv_group_size=16,
    selector_rank=32, selector_top_k=8, output_multiplier=0.5, final_logit_softcapping=20.0)
"""A ring of 24 slots, one and a half blocks of 16 positions; two query heads share a key/value head."""

PLAIN = {"conv_kernel_size": None, "conv_group_size": None, "selector_rank": None, "selector_top_k": None}
CONFIGS = {
    "base": BASE,
    "dflash 1, block of 8": replace(BASE, block_size=8, **PLAIN),
    "neighbour pairs": replace(BASE, rope_half=False, head_dim=32, input_embedding_scale=2.0,
                               final_logit_softcapping=None),
    "no sharing, groups of 8": replace(BASE, num_attention_heads=8, head_dim=64, conv_group_size=8, block_size=8,
                                       selector_top_k=24),
    "window below the block": replace(BASE, sliding_window=5),
    "K of 2048, heads of 128": replace(BASE, num_attention_heads=16, head_dim=128, intermediate_size=2048,
                                       conv_group_size=4),
    "window of 300": replace(BASE, num_hidden_layers=1, sliding_window=300, vocab_size=456),
    "eight heads share": replace(BASE, num_attention_heads=64, selector_rank=128, selector_top_k=16),
}
"""The window of 300 crosses a chunk of 256 positions, and 57 ids a slice fill no tile."""

OWN = ("neighbour pairs",)
"""Configs whose drafter brings its own embedding, LM head and mask vector."""


@dataclass(frozen=True, eq=False)
class Drafter:
    """One drafter and the arrays it borrows.

    Attributes:
        host: public layout, NumPy bfloat16.
        wide: the same in float32, for draft.py.
        packed: on one device.
        target: `embed` and `lm_head` as a packed target has them.
        borrowed: the same for draft.py.
    """

    config: DraftConfig
    host: dict
    wide: dict
    packed: dict
    target: dict
    borrowed: dr.Borrowed


def random_params(config: DraftConfig, seed: int = 0, extras: bool = False) -> dict:
    """bfloat16 values with which every part matters: convolutions off identity, gains off 1, coefficients about 0.3."""
    rng = np.random.default_rng(seed)

    def make(param):
        x, name = rng.standard_normal(param.shape, F32), param.path[-1]
        if param.start == "identity":
            return 0.2 * x + np.asarray([1, 0.5], F32)[None, :, None]
        if param.start == "ones":
            return 1 + 0.2 * x
        if name in ("predecessor", "successor"):
            return 0.5 * x
        if name in ("embed", "mask_embedding"):
            return x
        return (0.3 if name.endswith("conv_proj") else 1) * x / np.sqrt(F32(param.shape[-1]))

    rows = dp.table(config) if extras else dp.required(config)
    return dp.assemble(config, {p.path: make(p).astype(BF16) for p in rows})


def drafter_from(config: DraftConfig, host: dict, borrowed: dict) -> Drafter:
    """`borrowed`: params with the extras, whose embedding and head stand for the target's."""
    lent = pack_drafter(borrowed, config)
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), host)
    table = {name: jnp.asarray(borrowed[name], jnp.float32)[None] for name in ("embed", "lm_head")}
    return Drafter(config, host, wide, jax.tree.map(jnp.asarray, pack_drafter(host, config)),
                   {name: jnp.asarray(lent[name]) for name in ("embed", "lm_head")}, dr.borrow(wide, table))


@functools.cache
def drafter_of(config: DraftConfig, own: bool = False, seed: int = 0) -> Drafter:
    return drafter_from(config, random_params(config, seed, own), random_params(config, seed + 100, True))


def named(name: str) -> Drafter:
    return drafter_of(CONFIGS[name], name in OWN)


def on(drafter: Drafter, mesh) -> tuple[dict, dict]:
    """(packed params, target) on the devices of a mesh."""
    if mesh is None:
        return drafter.packed, drafter.target
    return place(drafter.packed, mesh), place(drafter.target, mesh)


# ------------------------------------------------------------------ contexts


def taps_of(config: DraftConfig, rows: int, seed: int = 0):
    rng = np.random.default_rng(1000 + seed)
    return rng.standard_normal((rows, config.taps_width), F32)


commit = jax.jit(dk.commit_context, static_argnames=("config", "mesh"))
draft = jax.jit(dk.draft, static_argnames=("config", "num_tokens", "mesh"))


def committed(drafter: Drafter, length: int, *, size: int = 16, mesh=None, max_length=None, params=None):
    """A cache after `length` positions, committed `size` at a time; further rows of a call must not count."""
    config, taps = drafter.config, taps_of(drafter.config, length + 16)
    params = on(drafter, mesh)[0] if params is None else params
    cache = dk.init_cache(config, max_length, mesh)
    for start in range(0, length, size):
        rows = np.concatenate([taps[start:start + size], 7 * np.ones((16 - size, config.taps_width), F32)])
        cache = commit(params, cache, jnp.asarray(rows), start, min(size, length - start), config=config, mesh=mesh)
    return cache


def reference_cache(cache) -> dr.DraftCache:
    """The same content as draft.py takes it: [l, p, k, c], float32."""
    return dr.DraftCache(*(jnp.asarray(x, jnp.float32).swapaxes(1, 2) for x in cache[:2]), cache.length)


# ------------------------------------------------------------------ arithmetic between GEMMs, with the kernels' bits


def slices(x_tn):
    """[t, n] -> bfloat16 [8, t, n/8]."""
    x = np.asarray(x_tn)
    return jnp.asarray(x.reshape(x.shape[0], 8, -1).swapaxes(0, 1).astype(BF16))


def whole(x_stn) -> np.ndarray:
    """[8, t, n/8] -> float32 [t, n]."""
    x = np.asarray(x_stn).astype(F32)
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def normed(x_td, gamma_d, config: DraftConfig) -> np.ndarray:
    return round_bf16(rms_norm(np.asarray(x_td, F32), config.rms_norm_eps) * np.asarray(gamma_d, F32))


def delta_slices(delta_toig):
    """[t, o, i, g] -> the kernels' float32 [8, t, o i g/8]."""
    t, g = delta_toig.shape[0], delta_toig.shape[3]
    return jnp.asarray(delta_toig.reshape(t, 4, 8, g // 8).transpose(2, 0, 1, 3).reshape(8, t, g // 2))


def two_taps(x_td, delta_tig, base_id) -> np.ndarray:
    x, base = np.asarray(x_td, F32), np.asarray(base_id, F32)
    coefficients = base + np.repeat(np.asarray(delta_tig, F32), x.shape[1] // delta_tig.shape[2], axis=2)
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    return round_bf16(coefficients[:, 0] * x + coefficients[:, 1] * before)

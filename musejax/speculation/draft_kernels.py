"""One draft pass through the kernels: draft.py's functions `draft` and `commit_context`, N-sharded over the devices.

Every GEMM is split along its columns into 8 slices, and devices exchange finished values by all-gather, so tokens,
scores, coverage and cache have the same bits on 1, 2, 4 and 8 devices, for any number of threads and instruction set.
Rounding is that of draft.py's DRAFT_POINTS under POLICY. No floating-point arithmetic runs in XLA.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from musejax import ffi
from musejax.config import NUM_SLICES, ConfigError
from musejax.kernels.cache import MAX_ROWS
from musejax.kernels.draft_calls import DraftCall, Top
from musejax.kernels.forward import gather, over_devices, platform_of
from musejax.numerics import CANON_F32_PROBS, Policy
from musejax.sharding import AXIS, replicated
from musejax.speculation.config import DraftConfig
from musejax.speculation.draft import DraftCache, Lattice
from musejax.speculation.packing import packing_problems, param_specs

POLICY = CANON_F32_PROBS
"""The one numeric policy of the kernels."""


def kernel_problems(config: DraftConfig, policy: Policy, platform: str) -> list[str]:
    """Why a drafter cannot run through the kernels, one line a reason; empty if it can.

    It then runs in plain JAX (draft.py), whole on every device.

    Raises:
        musejax.ffi.LibraryError: the compiled library is missing or does not fit.
    """
    problems = packing_problems(config)
    if policy != POLICY:
        problems.append(f"policy: expected {POLICY}, got {policy}")
    if "musejax_draft_layers" not in ffi.library(platform).targets():
        problems.append(f"platform: expected one whose library has the drafter's targets, got {platform}")
    return problems


def cache_specs() -> DraftCache:
    """PartitionSpec of every leaf: heads over the devices."""
    return DraftCache(P(None, AXIS), P(None, AXIS), P())


def _shardings(mesh) -> DraftCache:
    if mesh.size == 1:  # one spelling of one placement, as in sharding.split_axis0
        return DraftCache(*[replicated(mesh)] * 3)
    return DraftCache(*(NamedSharding(mesh, spec) for spec in cache_specs()))


def init_cache(config: DraftConfig, max_length: int | None = None, mesh=None) -> DraftCache:
    """An empty cache: as many slots as the window, or max_length if that is smaller.

    Returns:
        keys, values bfloat16 [l, k, p, c], heads over the mesh; length int32 [].

    Raises:
        ConfigError: max_length is below 1.
    """
    if max_length is not None and max_length < 1:
        raise ConfigError(f"max_length: expected at least 1, got {max_length}")
    slots = min(config.sliding_window, max_length or config.sliding_window)
    shape = (config.num_hidden_layers, config.num_key_value_heads, slots, config.head_dim)
    where = DraftCache(None, None, None) if mesh is None else _shardings(mesh)
    return DraftCache(jnp.zeros(shape, jnp.bfloat16, device=where.keys),
                      jnp.zeros(shape, jnp.bfloat16, device=where.values),
                      jnp.zeros((), jnp.int32, device=where.length))


def keep_placement(cache: DraftCache, mesh) -> DraftCache:
    """The cache, told to stay where `init_cache` put it."""
    return cache if mesh is None else lax.with_sharding_constraint(cache, _shardings(mesh))


def _first_slice(dense, many: bool):
    return lax.axis_index(AXIS) * dense.shape[0] if many else jnp.int32(0)


def _run_layers(call: DraftCall, params: dict, stream, cos_sin, cache: DraftCache, begin):
    """All layers on one of several devices -> stream, whole."""
    no_delta = jnp.zeros((NUM_SLICES, stream.shape[1], 0), jnp.float32)

    def coefficients(stream, p, mlp):
        return gather(call.delta(stream, p, mlp=mlp)) if call.config.has_conv else no_delta

    for i, p in enumerate(params["layers"]):
        delta = coefficients(stream, p, False)
        o = call.attention(i, stream, delta, cos_sin, cache.length, p, cache.keys, cache.values)
        stream = gather(call.attn_out(gather(o), stream, delta, begin, p))
        delta = coefficients(stream, p, True)
        act = call.up(stream, delta, p)
        stream = gather(call.down(gather(act), stream, delta, begin, p))
    return stream


def draft(params: dict, target: dict, cache: DraftCache, anchor, *, config: DraftConfig, num_tokens: int | None = None,
          mesh=None) -> Lattice:
    """The whole pass: block, unary logits, lattice. The cache is only read.

    Args:
        params: packed (packing.py).
        target: packed params of the target, whose `embed` and `lm_head` are used where the drafter has none of its own.
        anchor: int32 [], the newest known token; its position is cache.length.
        num_tokens: static; ids from here on are no candidates.
        mesh: static; where params and cache lie.
    """
    many = mesh is not None and mesh.size > 1
    none = jnp.zeros((0, 0), jnp.bfloat16)

    def body(params, embed, lm_head, cache, anchor):
        call = DraftCall(config, platform_of(mesh))
        begin = _first_slice(lm_head, many)
        ids = jnp.full(config.block_size, config.mask_token_id, jnp.int32).at[0].set(anchor)
        rows = embed[:, ids]
        if "mask_embedding" in params:
            rows = rows.at[:, 1:].set(params["mask_embedding"][:, None])
        stream = call.embed(gather(rows) if many else rows)
        cos_sin = call.angles(cache.length + jnp.arange(config.block_size, dtype=jnp.int32))
        if many:
            stream = _run_layers(call, params, stream, cos_sin, cache, begin)
        else:
            stream = call.layers(stream, cos_sin, cache.length, cache.keys, cache.values, params["layers"])
        selector = params.get("selector", jnp.zeros((lm_head.shape[0], 0), jnp.uint8))
        top = call.head(stream, params["norm"], lm_head, selector, begin, num_tokens=num_tokens)
        top = Top(*map(gather, top[:3]), gather(top.gate) if config.has_selector else jnp.zeros(
            (NUM_SLICES, *top.gate.shape[1:]), jnp.float32)) if many else top
        return call.lattice(top, params.get("predecessor", none), params.get("successor", none), anchor)

    run = over_devices(mesh, body, (param_specs(params), P(AXIS), P(AXIS), cache_specs(), P()), (P(), P(), P()))
    embed, lm_head = (params.get(name, target[name]) for name in ("embed", "lm_head"))
    return Lattice(*run(params, embed, lm_head, cache, jnp.asarray(anchor, jnp.int32)))


def commit_context(params: dict, cache: DraftCache, taps_tx, start, count, *, config: DraftConfig,
                   mesh=None) -> DraftCache:
    """Stores the first `count` rows at positions start, start + 1, ...; the length becomes start + count.

    A row's keys and values do not depend on the others, so commits of any size leave the same bits.

    Args:
        taps_tx: float32 [t, u d], t <= 16: see draft.commit_context.
    """
    if taps_tx.shape[0] > MAX_ROWS:
        raise ConfigError(f"taps: expected at most {MAX_ROWS} rows a call, got {taps_tx.shape[0]}")
    many = mesh is not None and mesh.size > 1

    def body(params, cache, taps, start, count):
        call = DraftCall(config, platform_of(mesh))
        ctx = call.fc(taps, count, params["fc"])
        cos_sin = call.angles(start + jnp.arange(taps.shape[0], dtype=jnp.int32))
        keys, values = call.context(gather(ctx) if many else ctx, cos_sin, start, count, params["hidden_norm"],
                                    cache.keys, cache.values, params["layers"])
        return DraftCache(keys, values, start + count)

    run = over_devices(mesh, body, (param_specs(params), cache_specs(), P(), P(), P()), cache_specs())
    return run(params, cache, taps_tx.astype(jnp.float32), jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32))

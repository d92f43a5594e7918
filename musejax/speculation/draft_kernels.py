"""A drafter through the kernels: draft.py's `draft` and `commit_context`, N-sharded over the devices, and the tree.

On one device each is one call, and on several GPUs one on each, whose kernels exchange finished values themselves. On
several CPU devices each phase is a call, with an all-gather after it, for no thread may wait inside a CPU call. Every
GEMM is split along its columns into 8 slices, so tokens, scores, coverage and cache have the same bits on 1, 2, 4 and 8
devices, for any number of threads and instruction set. Rounding is that of draft.py's DRAFT_POINTS under POLICY. No
floating-point arithmetic runs in XLA.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from musejax import ffi
from musejax.config import NUM_SLICES, ConfigError
from musejax.kernels import draft_calls
from musejax.kernels.cache import MAX_ROWS
from musejax.kernels.draft_calls import DraftCall, Top
from musejax.kernels.forward import gather, ordinals, over_devices, platform_of
from musejax.numerics import CANON_F32_PROBS, Policy
from musejax.sharding import AXIS, replicated
from musejax.speculation.config import DraftConfig
from musejax.speculation.draft import DraftCache, Lattice
from musejax.speculation.packing import packing_problems, param_specs
from musejax.speculation.tree import MAX_NODES, Tree

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
    if platform != "cpu":
        if config.candidates > ffi.MAX_DRAFT_CANDIDATES:
            problems.append(f"selector_top_k: expected at most {ffi.MAX_DRAFT_CANDIDATES} candidates, what a warp "
                            f"keeps, got {config.candidates}")
        if config.vocab_size > ffi.MAX_DRAFT_VOCABULARY:
            problems.append(f"vocab_size: expected at most {ffi.MAX_DRAFT_VOCABULARY}, which a block ranks, got "
                            f"{config.vocab_size}")
        if config.has_conv and config.conv_group_size % 2:
            problems.append(f"conv_group_size: expected an even number of channels, got {config.conv_group_size}")
        if config.num_hidden_layers > ffi.MAX_DRAFT_LAYERS:
            problems.append(f"num_hidden_layers: expected at most {ffi.MAX_DRAFT_LAYERS} layers, what a launch takes, "
                            f"got {config.num_hidden_layers}")
    if "musejax_draft" not in ffi.library(platform).targets():
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


def _first_slice(dense):
    return lax.axis_index(AXIS) * dense.shape[0]


class Head(NamedTuple):
    """What follows the layers, as the kernels take it: selector and codebooks are empty in DFlash 1.

    Attributes:
        norm: float32 [d].
        lm_head, selector: uint8 [slices here, bytes].
        predecessor, successor: bfloat16 [v, r].
    """

    norm: jax.Array
    lm_head: jax.Array
    selector: jax.Array
    predecessor: jax.Array
    successor: jax.Array

    @classmethod
    def of(cls, params: dict, lm_head) -> Head:
        codes = jnp.zeros((0, 0), jnp.bfloat16)
        return cls(params["norm"], lm_head, params.get("selector", jnp.zeros((lm_head.shape[0], 0), jnp.uint8)),
                   params.get("predecessor", codes), params.get("successor", codes))


def run_layers(call: DraftCall, params: dict, rows, cos_sin, cache: DraftCache, begin, gather=gather):
    """Phases from embedding rows to the last layer, on one of several devices -> stream, whole. gather: slices here
    [slices, ...] -> all slices."""
    stream = call.embed(gather(rows))
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


def run_head(call: DraftCall, head: Head, stream, anchor, begin, num_tokens, gather=gather):
    """Phases from the stream, whole, to the lattice, on one of several devices."""
    top = call.head(stream, head.norm, head.lm_head, head.selector, begin, num_tokens=num_tokens)
    gate = gather(top.gate) if call.config.has_selector else jnp.zeros((NUM_SLICES, *top.gate.shape[1:]), jnp.float32)
    return call.lattice(Top(*map(gather, top[:3]), gate), head.predecessor, head.successor, anchor)


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
    many, devices = mesh is not None and mesh.size > 1, ordinals(mesh)

    def body(params, embed, lm_head, cache, anchor):
        call, head = DraftCall(config, platform_of(mesh)), Head.of(params, lm_head)
        ids = jnp.full(config.block_size, config.mask_token_id, jnp.int32).at[0].set(anchor)
        rows = embed[:, ids]
        if "mask_embedding" in params:
            rows = rows.at[:, 1:].set(params["mask_embedding"][:, None])
        cos_sin = call.angles(cache.length + jnp.arange(config.block_size, dtype=jnp.int32))
        if devices or not many:
            return call.draft(rows, cos_sin, anchor, cache.length, *head, cache.keys, cache.values, params["layers"],
                              num_tokens=num_tokens, devices=devices)
        begin = _first_slice(lm_head)
        return run_head(call, head, run_layers(call, params, rows, cos_sin, cache, begin), anchor, begin, num_tokens)

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
    many, devices = mesh is not None and mesh.size > 1, ordinals(mesh)

    def body(params, cache, taps, start, count):
        call = DraftCall(config, platform_of(mesh))
        cos_sin = call.angles(start + jnp.arange(taps.shape[0], dtype=jnp.int32))
        after = (params["hidden_norm"], cache.keys, cache.values, params["layers"])
        if devices or not many:
            keys, values = call.commit(taps, cos_sin, start, count, params["fc"], *after, devices=devices)
        else:
            keys, values = call.context(gather(call.fc(taps, count, params["fc"])), cos_sin, start, count, *after)
        return DraftCache(keys, values, start + count)

    run = over_devices(mesh, body, (param_specs(params), cache_specs(), P(), P(), P()), cache_specs())
    return run(params, cache, taps_tx.astype(jnp.float32), jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32))


def tree(anchor, lattice: Lattice, *, nodes: int = MAX_NODES, width: int | None = None, spine: int = 0,
         tau: float = 1.0, mesh=None) -> Tree:
    """`build_tree` of `conditional_logprobs` (tree.py) as one call, on every device the same.

    Args:
        anchor: int32 [].
        nodes, width, spine, tau, mesh: static; a width of None allows all candidates.
    """
    ffi.library(platform_of(mesh))

    width = lattice.tokens.shape[1] if width is None else width

    def body(anchor, lattice):
        return draft_calls.tree(anchor, *lattice, nodes=nodes, width=width, spine=spine, tau=tau)

    run = over_devices(mesh, body, (P(), Lattice(P(), P(), P())), (P(),) * 5)
    tokens, parents, depth, ancestors, cum = run(jnp.asarray(anchor, jnp.int32), lattice)
    valid = (parents >= 0) | (jnp.arange(nodes) == 0)
    return Tree(tokens, parents, depth, valid, lax.bitcast_convert_type(ancestors, jnp.uint32), cum)

"""Log-probabilities of given tokens as training computes them, in two faces.

`logprobs` runs the phase kernels under the training sharding (spec section 7.2): dense weights whole on every device,
experts in contiguous blocks over R devices, each routed row computed entirely by the owner of its expert, results
combined over devices. Decoding splits the same weights along their output columns instead. The bits are the same, for
any R: every element is one sum over K in one order, and the combine follows the contract of `DecodeConfig.combine`.

    ep(G)   each device rounds the partial sums of its G/R owner groups to bfloat16; all-gather; added in owner order
    flat    all-gather of expert rows, of each the owner's copy is taken; added in slot order

No arithmetic on numbers happens in XLA on the way: it gathers and selects bits, and counts with integers.

`loss_and_grad` is plain JAX (musejax/model), differentiable, for a trainer: close, without a promise of bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from musejax.config import ConfigError, DecodeConfig, ModelConfig, combine_groups
from musejax.decode import cache_length, check_tokens
from musejax.kernels import forward as kf
from musejax.kernels.cache import MAX_ROWS, KernelCache, accept, flush, init_cache
from musejax.kernels.calls import Call, RowState
from musejax.model import forward as fwd
from musejax.packing import check_packable, is_packed

AXIS = "experts"
"""Name of the one axis of the mesh that experts are dealt out over."""


# ------------------------------------------------------------------ the plan: who owns what


@dataclass(frozen=True)
class Plan:
    """Who computes what. Hashable: a static argument of the jitted programs.

    Attributes:
        mesh: one axis, AXIS; None is one device without a mesh.
        devices: R, size of the mesh.
        experts: experts of one device; expert e is on device e // experts.
        groups: owner groups of ep(G) of one device; 0 for flat.
    """

    mesh: Mesh | None
    devices: int
    experts: int
    groups: int


def make_mesh(devices: int | Sequence = 1, platform: str | None = None) -> Mesh:
    """Mesh over the first `devices` local devices (or a given list of them) to deal experts out over.

    Raises:
        ConfigError: fewer than 1 device asked for, or more than there are.
    """
    if isinstance(devices, int):
        here = jax.devices(platform) if platform else jax.devices()
        if not 1 <= devices <= len(here):
            raise ConfigError(f"devices: expected 1 to {len(here)} (those JAX sees here), got {devices}")
        devices = here[:devices]
    return Mesh(np.asarray(devices), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def make_plan(config: ModelConfig, decode: DecodeConfig, mesh: Mesh | None = None) -> Plan:
    """The plan for a mesh.

    Raises:
        ConfigError: sizes without a packed form, a mesh with other axes, or a mesh over which experts or owner groups
            cannot be dealt out evenly: names tensor, dimension, size, mesh, and the sizes that would work.
    """
    check_packable(config)
    decode.check(config)
    if mesh is not None and mesh.axis_names != (AXIS,):
        raise ConfigError(f"mesh: expected one axis '{AXIS}' (score.make_mesh), got {mesh.axis_names}")
    devices = 1 if mesh is None else mesh.size
    experts, groups = config.num_local_experts, combine_groups(decode.combine)
    cuts = [("experts [8, E, bytes] of every layer, dimension 1", f"num_local_experts {experts}", experts)]
    if groups:
        cuts.append((f"partials [G, t, m] of every layer, dimension 0 (owner groups of {decode.combine})",
                     f"{groups} groups", groups))
    wrong = [f"{tensor}: {size} cannot be split evenly over a mesh of {devices} ('{AXIS}')"
             for tensor, size, count in cuts if count % devices]
    if wrong:
        common = math.gcd(*(count for *_, count in cuts))
        fits = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
        raise ConfigError("\n  ".join(["this training sharding does not work:", *wrong])
                          + f"\nSplits that work with {decode.combine}: {fits} devices.")
    return Plan(mesh, devices, experts // devices, groups // devices)


def param_specs(params: dict) -> dict:
    """PartitionSpec of every leaf of packed params: experts over the mesh, everything else whole on every device."""
    layers = [{name: P(None, AXIS) if name == "experts" else P() for name in layer} for layer in params["layers"]]
    return {name: layers if name == "layers" else P() for name in params}


def place(params: dict, plan: Plan) -> dict:
    """Packed params (NumPy, or arrays placed in any way) where this plan wants them; those that are there stay.

    Raises:
        ConfigError: params in the table form.
    """
    if not is_packed(params):
        raise ConfigError("params: expected the packed form (load with form='packed', or packing.pack_params), got the "
                          "table form")
    if plan.mesh is None:
        return jax.tree.map(jnp.asarray, params)
    shardings = jax.tree.map(lambda spec: NamedSharding(plan.mesh, spec), param_specs(params),
                             is_leaf=lambda x: isinstance(x, P))
    return jax.device_put(params, shardings)


# ------------------------------------------------------------------ a block of rows


class Block(NamedTuple):
    """What a block of t rows gives.

    Attributes:
        logprobs: float32 [t], of each row's target.
        trace: (streams float32 [L + 1, t, d], expert ids int32 [L, t, k], logits float32 [t, v]), or None.
        cache: longer by the valid rows.
    """

    logprobs: jax.Array
    trace: tuple[jax.Array, jax.Array, jax.Array] | None
    cache: KernelCache


def _gather(x: jax.Array, plan: Plan) -> jax.Array:
    """[R, ...]: every device's bfloat16 array; bits, not numbers, travel."""
    if plan.devices == 1:
        return x[None]
    words = lax.all_gather(lax.bitcast_convert_type(x, jnp.uint16), AXIS, axis=0)
    return lax.bitcast_convert_type(words, jnp.bfloat16)


def _combine(call: Call, layer: int, y, ids, weights, p: dict, begin, plan: Plan) -> jax.Array:
    """Each device's expert rows y [8, t * k, m/8], zeros where another one owns the expert -> m bfloat16 [t, m]."""
    if call.groups:
        partials = call.combine_partials(layer, y, ids, weights, p, begin, plan.groups)
        return call.combine_gathered(_gather(partials, plan).reshape(call.groups, *partials.shape[1:]))
    owner = jnp.minimum(ids.reshape(-1) // plan.experts, plan.devices - 1)  # padding rows have no owner; any will do
    y = jnp.take_along_axis(_gather(y, plan), owner[None, None, :, None], axis=0)[0]
    return call.combine(layer, y, ids, weights, p)


def _layer(call: Call, layer: int, p: dict, stream, cos_sin, rows: RowState, stored, flight, begin, plan: Plan):
    """One layer on one of R devices -> (stream, ids, stored, flight)."""
    q, gate, stored, flight = call.attn_in(layer, stream, cos_sin, rows, p, stored, flight)
    o, stored, flight = call.attention(layer, q, gate, rows, stored, flight)
    stream, pooled, scores = call.pool(layer, stream, call.attn_out(layer, o, p), p)
    c, ids, weights = call.experts_up(layer, pooled, scores, rows, p, begin)
    y = call.experts_down(layer, c, ids, p, begin)
    m = _combine(call, layer, y, ids, weights, p, begin, plan)
    return call.add_ffn(layer, stream, call.unpool(layer, m, p), p), ids, stored, flight


def block(params: dict, cache: KernelCache, tokens_t, targets_t, num_valid, *, config: ModelConfig,
          decode: DecodeConfig, plan: Plan, num_tokens: int | None, trace: bool) -> Block:
    """The first num_valid of up to 16 tokens, one after the other, after the cached ones."""
    t = tokens_t.shape[0]

    def body(params, cache, tokens_t, targets_t, num_valid):
        call = Call(config, decode, kf.platform_of(plan.mesh))
        begin = jnp.int32(0) if plan.devices == 1 else lax.axis_index(AXIS) * plan.experts
        rows = RowState(kf.chain(t), jnp.stack([cache.length, num_valid, cache.accepted]), cache.path)
        cos_sin = call.angles(cache.length + jnp.arange(t, dtype=jnp.int32))
        stored, flight, ids = list(cache.layers), list(cache.flight), []
        streams = [kf.embed(call, params, tokens_t, many=False)]
        for i, p in enumerate(params["layers"]):
            stream, chosen, stored[i], flight[i] = _layer(call, i, p, streams[-1], cos_sin, rows, stored[i], flight[i],
                                                          begin, plan)
            streams.append(stream)
            ids.append(chosen)
        logprobs = kf.token_logprobs(params, streams[-1], targets_t, config=config, decode=decode,
                                     num_tokens=num_tokens)
        extra = None
        if trace:
            _, logits = kf.logits(params, streams[-1], config=config, decode=decode)
            extra = jnp.stack(streams), jnp.stack(ids), logits
        cache = cache._replace(layers=tuple(stored), flight=tuple(flight))
        return logprobs, extra, accept(cache, jnp.arange(MAX_ROWS), num_valid)

    run = body
    if plan.devices > 1:
        run = jax.shard_map(body, mesh=plan.mesh, in_specs=(param_specs(params), P(), P(), P(), P()), out_specs=P(),
                            check_vma=False)
    return Block(*run(params, cache, tokens_t, targets_t, jnp.asarray(num_valid, jnp.int32)))


jit_block = jax.jit(block, static_argnames=("config", "decode", "plan", "num_tokens", "trace"),
                    donate_argnames="cache")


# ------------------------------------------------------------------ a sequence


class Scored(NamedTuple):
    """What `logprobs` gives with `trace`: NumPy, t tokens.

    Attributes:
        logprobs: float32 [t - 1].
        streams: float32 [L + 1, t, d], residual stream after the embedding and after each layer.
        expert_ids: int32 [L, t, k].
        logits: float32 [t, v], after softcap.
        keys, values: of each layer, bfloat16 [k, p, c], all t positions stored; position x in slot x mod p.
    """

    logprobs: np.ndarray
    streams: np.ndarray
    expert_ids: np.ndarray
    logits: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]


def logprobs(params: dict, tokens: Sequence[int], *, config: ModelConfig, decode: DecodeConfig,
             mesh: Mesh | None = None, rows: int = MAX_ROWS, num_tokens: int | None = None,
             max_length: int | None = None, trace: bool = False) -> np.ndarray | Scored:
    """Log-probability of every token but the first, given those before it, under the training sharding.

    The values are those that decoding reports for the same tokens, bit for bit, whatever the mesh and `rows`.

    Args:
        params: packed form, from anywhere; place them once with `place` to score many sequences.
        tokens: t >= 2 ids.
        mesh: of `make_mesh`; None is one device.
        rows: tokens that go through together, 1 to 16.
        num_tokens: ids from here on have no probability, as in decoding (the tokenizer's size); None is all.
        max_length: positions to allocate; None is what the tokens need.
        trace: also return what each layer computed.

    Returns:
        float32 [t - 1], element i belongs to tokens[i + 1]; or `Scored`.

    Raises:
        ConfigError: see `make_plan`, `place` and `decode.check_tokens`; fewer than two tokens, more than the context;
            rows outside 1 to 16; a token from num_tokens on.
    """
    plan = make_plan(config, decode, mesh)
    ids = check_tokens(config, tokens)
    if len(ids) < 2:
        raise ConfigError(f"tokens: expected at least 2, since the first is given, got {len(ids)}")
    if not 1 <= rows <= MAX_ROWS:
        raise ConfigError(f"rows: expected 1 to {MAX_ROWS} a block, got {rows}")
    if num_tokens is not None and ids[1:].max() >= num_tokens:
        raise ConfigError(f"tokens: expected ids below {num_tokens} (num_tokens), got {ids[1:].max()}")
    params = place(params, plan)
    cache = init_cache(config, max_length or cache_length(config, len(ids)))
    if plan.devices > 1:
        cache = jax.device_put(cache, NamedSharding(plan.mesh, P()))
    run = partial(jit_block, config=config, decode=decode, plan=plan, num_tokens=num_tokens, trace=trace)
    targets, out = np.append(ids[1:], 0).astype(np.int32), []
    for start in range(0, len(ids), rows):
        part, target = ids[start:start + rows], targets[start:start + rows]
        valid, pad = len(part), (0, rows - len(part))
        result = run(params, cache, jnp.asarray(np.pad(part, pad)), jnp.asarray(np.pad(target, pad)), valid)
        cache = jax.block_until_ready(result.cache)  # XLA's CPU rendezvous hangs with many programs in flight
        kept = [np.asarray(result.logprobs)[:valid]]
        if trace:
            streams, experts, logits = map(np.asarray, result.trace)
            kept += [streams[:, :valid], experts[:, :valid], logits[:valid]]
        out.append(kept)
    return _join(out, cache, trace)


def _join(blocks: list[list[np.ndarray]], cache: KernelCache, trace: bool) -> np.ndarray | Scored:
    parts = [np.concatenate(x, axis=axis) for x, axis in zip(zip(*blocks, strict=True), (0, 1, 1, 0), strict=False)]
    if not trace:
        return parts[0][:-1]
    keys, values = stored_bits(cache)
    return Scored(parts[0][:-1], *parts[1:], keys, values)


_jit_flush = jax.jit(flush)


def stored_bits(cache: KernelCache) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys and values of each layer [k, p, c], accepted rows included, as NumPy arrays."""
    layers = _jit_flush(cache).layers
    return [np.asarray(x.keys) for x in layers], [np.asarray(x.values) for x in layers]


# ------------------------------------------------------------------ plain JAX, for trainers


def token_logprobs(params: dict, tokens_bt, *, config: ModelConfig, decode: DecodeConfig,
                   num_tokens: int | None = None, remat: bool = False) -> jax.Array:
    """As `logprobs`, in plain JAX, differentiable and without a promise of bits: float32 [b, t - 1].

    Every expert is computed for every row (`experts="all"`); the choice of experts has no gradient.

    Args:
        params: table form, bfloat16 or float32 leaves.
        tokens_bt: int32 [b, t], or [t] for [t - 1].
        num_tokens: ids from here on have no probability.
        remat: compute each layer again in the backward pass instead of keeping its activations.

    Raises:
        ConfigError: NVFP4 layers, packed params, or tokens of another shape.
    """
    _check_trainable(params, tokens_bt, config)
    decode = DecodeConfig(policy=decode.policy, combine=decode.combine, experts="all")
    decode.check(config)

    def one(tokens_t):
        logits, _ = fwd.forward(params, tokens_t, config=config, decode=decode, remat=remat)
        if num_tokens is not None:
            logits = jnp.where(jnp.arange(config.vocab_size) < num_tokens, logits, -jnp.inf)
        chosen = jnp.take_along_axis(logits[:-1], tokens_t[1:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits[:-1], axis=-1)

    return one(tokens_bt) if tokens_bt.ndim == 1 else jax.vmap(one)(tokens_bt)


def _check_trainable(params: dict, tokens_bt, config: ModelConfig) -> None:
    """Raises what `token_logprobs` says."""
    if config.nvfp4_layers:
        raise ConfigError(f"nvfp4_layers: gradients need BF16 experts, expected no NVFP4 layers, got "
                          f"{len(config.nvfp4_layers)} of them (the first is layer {config.nvfp4_layers[0]}); take the "
                          "BF16 checkpoint, or `logprobs`, which needs no gradient")
    if is_packed(params):
        raise ConfigError("params: expected the table form (packing.unpack_params), got the packed form")
    if tokens_bt.ndim not in (1, 2) or tokens_bt.shape[-1] < 2:
        raise ConfigError(f"tokens: expected [b, t] or [t] with t of at least 2, got {list(tokens_bt.shape)}")


def loss(params: dict, tokens_bt, mask_bt=None, **choices) -> jax.Array:
    """Mean cross-entropy of next tokens, float32 []; see `loss_and_grad`."""
    values = -token_logprobs(params, tokens_bt, **choices)
    if mask_bt is None:
        return values.mean()
    kept = mask_bt[..., 1:] != 0
    return jnp.where(kept, values, 0.0).sum() / jnp.maximum(kept.sum(), 1)


def loss_and_grad(params: dict, tokens_bt, mask_bt=None, *, config: ModelConfig, decode: DecodeConfig,
                  num_tokens: int | None = None, remat: bool = False) -> tuple[jax.Array, dict]:
    """Loss of a batch and its gradient: what a trainer calls, inside its own jit.

    Rounding points of the policy are passed through by gradients.

    Args:
        params: table form (`params.table`), bfloat16 or float32 leaves.
        tokens_bt: int32 [b, t], or [t].
        mask_bt: as tokens; where it is 0 the token is not to be predicted (prompts, padding). The first token never is.
        num_tokens, remat: see `token_logprobs`.

    Returns:
        (mean cross-entropy in nats of the tokens to be predicted, float32 []; 0 if there is none,
        gradient, a pytree of the shapes and dtypes of params).

    Raises:
        ConfigError: see `token_logprobs`; a mask of another shape.
    """
    _check_trainable(params, tokens_bt, config)
    if mask_bt is not None and mask_bt.shape != tokens_bt.shape:
        raise ConfigError(f"mask: expected the shape of tokens {list(tokens_bt.shape)}, got {list(mask_bt.shape)}")
    return jax.value_and_grad(loss)(params, tokens_bt, mask_bt, config=config, decode=decode, num_tokens=num_tokens,
                                    remat=remat)

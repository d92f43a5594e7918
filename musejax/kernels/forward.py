"""A pass of up to 16 rows through the kernels: a chain of tokens, or a tree of guesses, after the cached positions.

On one device the decoder layers are one call (`musejax_layers`), and on several GPUs one on each, whose kernels
exchange finished values themselves. On several CPU devices each phase is a call, with an all-gather of finished values
after it, for no thread may wait inside a CPU call. They are the same functions, so the bits are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from musejax import sampling
from musejax.config import NUM_SLICES, DecodeConfig, ModelConfig
from musejax.kernels.cache import MAX_ROWS, KernelCache, accept, give_up, none_accepted
from musejax.kernels.calls import Call, RowState
from musejax.sampling import Sampler
from musejax.sharding import AXIS


class Pass(NamedTuple):
    """Result of a pass.

    Attributes:
        stream: float32 [t, d], residual stream after the last layer.
        expert_ids: int32 [L, t, k], experts chosen; the number of experts in padding rows.
        taps: float32 [n, t, d], the stream after each of the layers asked for, in layer order.
        cache: with this pass's rows in flight, none of them accepted yet.
        streams: float32 [L + 1, t, d], after the embedding and after each layer; None without `trace`.
    """

    stream: jax.Array
    expert_ids: jax.Array
    taps: jax.Array
    cache: KernelCache
    streams: jax.Array | None = None


def depths(parents_t) -> jax.Array:
    """int32 [t]: how many ancestors each row has; -1 is no parent, parents come before children."""
    out = jnp.zeros_like(parents_t)
    for i in range(1, parents_t.shape[0]):
        parent = parents_t[i]
        out = out.at[i].set(jnp.where(parent < 0, 0, out[jnp.maximum(parent, 0)] + 1))
    return out


def chain(t: int) -> jax.Array:
    """Parents of t rows in a row."""
    return jnp.arange(t, dtype=jnp.int32) - 1


def platform_of(mesh) -> str:
    return mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()


def ordinals(mesh) -> tuple[int, ...]:
    """Of the GPUs of a mesh of several; empty for one device, and for CPU devices."""
    if mesh is None or mesh.size == 1 or platform_of(mesh) == "cpu":
        return ()
    return tuple(device.local_hardware_id for device in mesh.devices.flat)


def gather(x: jax.Array) -> jax.Array:
    """All devices' slices or heads, joined along axis 0; bits, not numbers, travel."""
    if x.dtype != jnp.bfloat16:
        return lax.all_gather(x, AXIS, axis=0, tiled=True)
    return lax.bitcast_convert_type(gather(lax.bitcast_convert_type(x, jnp.uint16)), jnp.bfloat16)


def over_devices(mesh, function, in_specs, out_specs):
    """`function` on every device's part of its arguments; plain where there is one device."""
    if mesh is None or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def param_specs(params: dict) -> dict:
    """PartitionSpec of every leaf of packed params: slices over the mesh, the small arrays on all devices."""
    split, whole = P(AXIS), P()
    layers = [{name: whole if name == "small" else split for name in layer} for layer in params["layers"]]
    return {"embed": split, "final_norm": whole, "lm_head": split, "layers": layers}


def cache_specs(cache: KernelCache) -> KernelCache:
    heads = jax.tree.map(lambda _: P(AXIS), (cache.layers, cache.flight))
    return KernelCache(*heads, P(), P(), P())


def embed(call: Call, params: dict, tokens_t, many: bool) -> jax.Array:
    """Residual stream before the first layer, float32 [t, d]."""
    rows = params["embed"][:, tokens_t]
    return call.embed_norm(gather(rows) if many else rows)


def layer_on_devices(call: Call, layer: int, p: dict, stream, q, gate, rows: RowState, stored, flight, gather=gather):
    """One layer, attention to residual, on one of several devices -> (stream, ids, stored, flight). gather: slices here
    [slices, ...] -> all slices."""
    zero = jnp.int32(0)
    o, stored, flight = call.attention(layer, q, gate, rows, stored, flight)
    a = call.attn_out(layer, gather(o), p)
    stream, pooled, scores = call.pool(layer, stream, gather(a), p)
    c, ids, weights = call.experts_up(layer, gather(pooled), gather(scores), rows, p, zero)
    y = call.experts_down(layer, gather(c), ids, p, zero)
    f = call.unpool(layer, call.combine(layer, gather(y), ids, weights, p), p)
    return call.add_ffn(layer, stream, gather(f), p), ids, stored, flight


def run_pass(params: dict, cache: KernelCache, tokens_t, parents_t, num_valid, *, config: ModelConfig,
             decode: DecodeConfig, mesh=None, taps: tuple[int, ...] = (), trace: bool = False) -> Pass:
    """All layers of one pass.

    Args:
        params: packed form (packing.py).
        tokens_t: int32 [t], t <= 16; rows from num_valid on are padding, route nowhere and leave no keys.
        parents_t: int32 [t], see `calls.RowState`; row i sits at position cache.length + its depth and sees its
            ancestors and the cache.
        taps: static, ascending layers after which the stream is wanted too.
        trace: also return the stream before and after every layer; then `taps` is not looked at.

    Row i has the bits of its token decoded alone after its ancestors.
    """
    many, devices = mesh is not None and mesh.size > 1, ordinals(mesh)
    taps = tuple(range(config.num_hidden_layers)) if trace else taps

    def body(params, cache, tokens_t, parents_t, num_valid):
        call = Call(config, decode, platform_of(mesh))
        rows = RowState(parents_t, jnp.stack([cache.length, num_valid, cache.accepted]), cache.path)
        cos_sin = call.angles(cache.length + depths(parents_t))
        embedded = stream = embed(call, params, tokens_t, many)  # on GPUs none passes its gather before all are there
        layers = params["layers"]
        if devices or not many:
            heads = jnp.zeros((config.num_attention_heads // max(1, len(devices)), tokens_t.shape[0], config.head_dim),
                              jnp.bfloat16)
            stream, _, _, ids, tapped, cache = call.layers(range(len(layers)), layers, stream, heads, heads, cos_sin,
                                                           rows, cache, first=True, last=True, taps=taps,
                                                           devices=devices)
            return embedded, stream, ids, tapped, cache
        stored, flight, ids, tapped = list(cache.layers), list(cache.flight), [], []
        for i, p in enumerate(layers):
            q, gate, stored[i], flight[i] = call.attn_in(i, stream, cos_sin, rows, p, stored[i], flight[i])
            stream, chosen, stored[i], flight[i] = layer_on_devices(call, i, p, stream, q, gate, rows, stored[i],
                                                                    flight[i])
            ids.append(chosen)
            tapped += [stream] if i in taps else []
        tapped = jnp.stack(tapped) if tapped else jnp.zeros((0, *stream.shape), jnp.float32)
        return embedded, stream, jnp.stack(ids), tapped, cache._replace(layers=tuple(stored), flight=tuple(flight))

    specs = cache_specs(cache)
    run = over_devices(mesh, body, (param_specs(params), specs, P(), P(), P()), (P(), P(), P(), P(), specs))
    embedded, stream, ids, tapped, cache = run(params, cache, tokens_t, parents_t, jnp.asarray(num_valid, jnp.int32))
    streams = jnp.concatenate([embedded[None], tapped]) if trace else None
    return Pass(stream, ids, tapped, none_accepted(cache), streams)


def append(params: dict, cache: KernelCache, tokens_t, num_valid, *, config: ModelConfig, decode: DecodeConfig,
           mesh=None) -> tuple[jax.Array, KernelCache]:
    """The first num_valid of up to 16 tokens, one after the other -> (stream [t, d], cache longer by num_valid)."""
    out = run_pass(params, cache, tokens_t, chain(tokens_t.shape[0]), num_valid, config=config, decode=decode,
                   mesh=mesh)
    return out.stream, accept(out.cache, jnp.arange(MAX_ROWS), num_valid)


class Choice(NamedTuple):
    """What the LM head says of each row.

    Attributes:
        ids: int32 [t], token of the largest raw logit, ties to the lower id; -1 if `choose_after` finds that the pass
            gave up on one of several devices.
        logprobs: float32 [t], its log-probability.
    """

    ids: jax.Array
    logprobs: jax.Array


def _head(stream_td, params, decode, config, mesh, num_tokens, finish, out_specs, accepted=0):
    """Runs `finish(call, raw logits here [s, t, v/8], largest [t], its id [t], first slice here)` after the LM head.

    accepted: of the cache, as each device knows it. A device that gave up takes its slices for some before the first
    one: so the gather of ids, negative ones among them, tells all devices, and costs nothing.
    """
    many = mesh is not None and mesh.size > 1

    def body(stream, final_norm, lm_head, accepted):
        call = Call(config, decode, platform_of(mesh))
        begin = lax.axis_index(AXIS) * lm_head.shape[0] if many else jnp.int32(0)
        begin = jnp.where(accepted < 0, -NUM_SLICES, begin) if many else begin
        raw, best, ids = call.head(stream, final_norm, lm_head, begin, num_tokens=num_tokens, top=1)
        best, ids = (gather(x)[..., 0] if many else x[..., 0] for x in (best, ids))  # [8, t]
        first = jnp.argmax(best, axis=0)[None]  # slices ascend: the first of equals has the lowest id
        largest, winner = (jnp.take_along_axis(x, first, axis=0)[0] for x in (best, ids))
        winner = jnp.where((ids < 0).any(), -1, winner) if many else winner
        return finish(call, raw, largest, winner, begin)

    run = over_devices(mesh, body, (P(), P(), P(AXIS), P()), out_specs)
    return run(stream_td, params["final_norm"], params["lm_head"], jnp.asarray(accepted, jnp.int32))


def greedy(params: dict, stream_td, *, config: ModelConfig, decode: DecodeConfig, num_tokens: int | None = None,
           mesh=None, accepted=0) -> Choice:
    """The most likely token of each row; the LM head stays split, devices exchange maxima and sums."""
    many = mesh is not None and mesh.size > 1

    def finish(call, raw, largest, winner, begin):
        sums = call.head_sums(raw, largest, begin, num_tokens=num_tokens)
        return Choice(winner, call.logprob(largest, largest, gather(sums) if many else sums))

    return _head(stream_td, params, decode, config, mesh, num_tokens, finish, Choice(P(), P()), accepted)


def choose(params: dict, stream_td, positions_t, sampler: Sampler | None, *, config: ModelConfig, decode: DecodeConfig,
           num_tokens: int | None = None, mesh=None, accepted=0) -> Choice:
    """The next token of each row, greedy (sampler None) or sampled; see `sampling.choose`.

    Log-probabilities come from the kernels either way. A sampled id also depends on XLA's arithmetic of noise, top-k
    and top-p, which therefore always sees 16 rows: then a row draws the same token in a pass of any size.
    """
    if sampler is None:
        return greedy(params, stream_td, config=config, decode=decode, num_tokens=num_tokens, mesh=mesh,
                      accepted=accepted)
    many = mesh is not None and mesh.size > 1

    def finish(call, raw, largest, winner, begin):
        sums = call.head_sums(raw, largest, begin, num_tokens=num_tokens)
        sums, raw = (gather(x) if many else x for x in (sums, raw))
        raw = raw.swapaxes(0, 1).reshape(stream_td.shape[0], -1)
        padding = MAX_ROWS - raw.shape[0]
        padded, positions = jnp.pad(raw, ((0, padding), (0, 0))), jnp.pad(positions_t, (0, padding))
        ids, _ = sampling.choose(padded, call.softcap(padded), positions, sampler, num_tokens=num_tokens)
        ids = jnp.where(winner < 0, winner, ids[:raw.shape[0]])
        chosen = jnp.take_along_axis(raw, ids[:, None], axis=1)[:, 0]
        return Choice(ids, call.logprob(chosen, largest, sums))

    return _head(stream_td, params, decode, config, mesh, num_tokens, finish, Choice(P(), P()), accepted)


def choose_after(params: dict, stream_td, positions_t, cache: KernelCache, sampler: Sampler | None, *,
                 config: ModelConfig, decode: DecodeConfig, num_tokens: int | None = None,
                 mesh=None) -> tuple[Choice, KernelCache]:
    """`choose`, of the pass that left `cache`. If that pass gave up on one of several devices, all of them learn it:
    every id is -1, and the cache is one that gave up, the same on all."""
    choice = choose(params, stream_td, positions_t, sampler, config=config, decode=decode, num_tokens=num_tokens,
                    mesh=mesh, accepted=cache.accepted)
    many = mesh is not None and mesh.size > 1
    return choice, give_up(cache, choice.ids[0] < 0) if many else cache


def logits(params: dict, stream_td, *, config: ModelConfig, decode: DecodeConfig, mesh=None):
    """-> (raw logits, logits after softcap), float32 [t, v] each."""
    many = mesh is not None and mesh.size > 1

    def finish(call, raw, largest, winner, begin):
        raw = (gather(raw) if many else raw).swapaxes(0, 1).reshape(stream_td.shape[0], -1)
        return raw, call.softcap(raw)

    return _head(stream_td, params, decode, config, mesh, None, finish, (P(), P()))


def token_logprobs(params: dict, stream_td, ids_t, *, config: ModelConfig, decode: DecodeConfig,
                   num_tokens: int | None = None, mesh=None) -> jax.Array:
    """Log-probability of a given token of each row, float32 [t]; greedy's value where it is the greedy one."""
    many = mesh is not None and mesh.size > 1
    width = config.vocab_size // NUM_SLICES

    def finish(call, raw, largest, winner, begin):
        sums = call.head_sums(raw, largest, begin, num_tokens=num_tokens)
        sums, raw = (gather(x) if many else x for x in (sums, raw))
        chosen = raw[ids_t // width, jnp.arange(ids_t.shape[0]), ids_t % width]
        return call.logprob(chosen, largest, sums)

    return _head(stream_td, params, decode, config, mesh, num_tokens, finish, P())


jit_run_pass = jax.jit(run_pass, static_argnames=("config", "decode", "mesh", "taps", "trace"), donate_argnames="cache")
jit_append = jax.jit(append, static_argnames=("config", "decode", "mesh"), donate_argnames="cache")
jit_greedy = jax.jit(greedy, static_argnames=("config", "decode", "num_tokens", "mesh"))
jit_logits = jax.jit(logits, static_argnames=("config", "decode", "mesh"))
jit_token_logprobs = jax.jit(token_logprobs, static_argnames=("config", "decode", "num_tokens", "mesh"))

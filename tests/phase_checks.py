"""The phases of a layer on two implementations, each from the same input bits (design section 7); the inputs of a phase
are what the first implementation, the CPU library, made before.

The bounds are those of phase_inputs.py. What holds beyond them: rows that only move keep their bits, and so do ids and
weights of experts, for choices are made without sums over K.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from helpers import assert_same_bits
from kernel_inputs import F32, Model, centred_norm, random_bf16, random_cache, whole, wide
from phase_inputs import assert_gemm, assert_near, log, of_pairs, reference_up, row_state, stream_of

from musejax import nvfp4, score
from musejax.cache import LayerCache
from musejax.config import DecodeConfig, combine_groups
from musejax.kernels import forward as kf
from musejax.kernels.cache import MAX_ROWS
from musejax.kernels.calls import RowState
from musejax.params import BF16

HEAD, RESIDUAL, SCORE = 2.0**-6, 2.0**-6, 1e-5


@dataclass(frozen=True)
class Start:
    """What a layer begins with.

    Attributes:
        stream: float32 [t, d].
        cos_sin: float32 [bases, t, 2, c/2].
        stored, flight: the layer's keys and values, of the cache and of the pass before.
    """

    stream: np.ndarray
    cos_sin: np.ndarray
    rows: RowState
    stored: LayerCache
    flight: LayerCache


def start_of(call, layer: int, t: int, length: int, *, parents=None, valid=None, accepted=0, max_length=1100,
             seed=0) -> Start:
    """Random rows and keys; `call` makes the angles. Of the pass before, rows 1, 3, 5, ... are accepted."""
    config, rng = call.config, np.random.default_rng(seed)
    path = [(2 * i + 1) % MAX_ROWS for i in range(accepted)]
    rows = row_state(t, length=length, valid=valid, parents=parents, accepted=accepted, path=path)
    cache = random_cache(config, length, max_length, seed)
    flight = LayerCache(*(random_bf16(rng, (config.num_key_value_heads, MAX_ROWS, config.head_dim)) for _ in range(2)))
    cos_sin = np.asarray(call.angles(length + kf.depths(rows.parents)))
    return Start(stream_of(config, t, seed), cos_sin, RowState(*map(np.asarray, rows)),
                 LayerCache(*map(np.asarray, cache.layers[layer])), flight)


def check_attention(both, model: Model, layer: int, start: Start) -> np.ndarray:
    """attn_in, attention, attn_out; the CPU's a."""
    p, valid = model.packed["layers"][layer], int(start.rows.state[1])
    want, got = both("attn_in", layer, start.stream, start.cos_sin, start.rows, p, start.stored, start.flight)
    assert_near(wide(got[0]), wide(want[0]), HEAD, "q", rounded=True)
    assert_gemm(wide(got[1]).swapaxes(0, 1).reshape(len(start.stream), -1),
                wide(want[1]).swapaxes(0, 1).reshape(len(start.stream), -1), "gate")
    for a, b in zip(got[2], want[2], strict=True):
        assert_same_bits(a, b)
    for name, a, b, old in zip(("keys", "values"), got[3], want[3], start.flight, strict=True):
        assert_near(wide(a)[:, :valid], wide(b)[:, :valid], HEAD, f"new {name}", rounded=True)
        assert_same_bits(a[:, valid:], old[:, valid:])
    q, gate, stored, flight = want

    (want, *_), (got, *kept) = both("attention", layer, q, gate, start.rows, stored, flight)
    assert_near(wide(got)[:, :valid], wide(want)[:, :valid], HEAD, "o", rounded=True)
    assert not wide(got)[:, valid:].any()
    for after, before in zip(kept, (stored, flight), strict=True):
        for a, b in zip(after, before, strict=True):
            assert_same_bits(a, b)
    o = want

    want, got = both("attn_out", layer, o, p)
    assert_gemm(whole(wide(got)), whole(wide(want)), "a")
    return want


def check_pool(both, model: Model, layer: int, start: Start, a) -> tuple:
    """The CPU's (stream, p, scores)."""
    want, got = both("pool", layer, start.stream, a, model.packed["layers"][layer])
    assert_near(got[0], want[0], RESIDUAL, "stream with attention")
    assert_gemm(whole(wide(got[1])), whole(wide(want[1])), "p")
    error = np.abs(got[2] - want[2]).max()
    log.info("scores: worst %.2e", error)
    assert error <= SCORE
    return want


def check_codes(got, want, model: Model, layer: int, pooled, ids) -> None:
    """Static codes of c [8, pairs, f/8] are the CPU's, 99.8% of them or all but one block whose scale is another; the
    others only where what is quantised is within 2^-16 of a threshold."""
    p, host, last = model.table["layers"][layer], model.host["layers"][layer], model.config.num_local_experts - 1
    chosen = ids.reshape(-1) <= last
    got, want = (wide(whole(x))[chosen] for x in (got, want))
    equal = got == want
    log.info("codes of c: %.5f equal", equal.mean())
    assert (~equal).sum() <= max(0.002 * equal.size, nvfp4.BLOCK)
    h = jnp.asarray(centred_norm(wide(whole(pooled)), host["expert_norm"], model.config.rms_norm_eps))
    act = of_pairs(reference_up(h, p, "nvfp4_static"), np.minimum(ids, last))[chosen]
    scale = p["down_input_scale"].max()
    near = [np.asarray(nvfp4.quantize_activation(jnp.asarray(act * F32(1 + e * 2.0**-16)), "nvfp4_static", scale).grid)
            for e in (0, -1, 1)]
    assert np.logical_or.reduce([equal, *(got == x for x in near)]).all()


def check_experts(both, model: Model, layer: int, start: Start, pooled, scores, mode: str) -> tuple:
    """experts_up and experts_down of all experts, and of some: the same bits there. The CPU's (y, ids, weights)."""
    p = model.packed["layers"][layer]
    want, got = both("experts_up", layer, pooled, scores, start.rows, p, np.int32(0))
    c, ids, weights = want
    assert_same_bits(got[1], ids)
    assert_same_bits(got[2], weights)
    chosen = (ids < model.config.num_local_experts).reshape(-1)
    if mode == "nvfp4_static" and layer in model.config.nvfp4_layers:
        check_codes(got[0], c, model, layer, pooled, ids)
    else:
        assert_gemm(whole(wide(got[0])), whole(wide(c)), "c")
    assert not wide(got[0])[:, ~chosen].any()
    y, got_y = both("experts_down", layer, c, ids, p, np.int32(0))
    assert_gemm(whole(wide(got_y)), whole(wide(y)), "y")

    begin, count = 3, 5
    part = {**p, "experts": np.asarray(p["experts"])[:, begin:begin + count]}
    here = ((ids >= begin) & (ids < begin + count)).reshape(-1)
    _, (some_c, some_ids, some_weights) = both("experts_up", layer, pooled, scores, start.rows, part, np.int32(begin))
    _, some_y = both("experts_down", layer, c, ids, part, np.int32(begin))
    assert_same_bits(some_ids, ids)
    assert_same_bits(some_weights, weights)
    for some, every in ((some_c, got[0]), (some_y, got_y)):
        assert_same_bits(some, np.where(here[:, None], every, BF16.type(0)))
    return y, ids, weights


def check_combine(both, model: Model, layer: int, y, ids, weights, decode: DecodeConfig) -> np.ndarray:
    """combine, and combine_partials with combine_gathered; the CPU's m."""
    p, groups = model.packed["layers"][layer], combine_groups(decode.combine)
    m, got = both("combine", layer, y, ids, weights, p)
    assert_gemm(wide(got), wide(m), "m")
    for owners in (groups, groups // 4) if groups else ():  # groups of one device
        begins = range(0, groups, owners)
        parts = [both("combine_partials", layer, y, ids, weights, p,
                      np.int32(begin * model.config.num_local_experts // groups), owners) for begin in begins]
        want, partials = (np.concatenate(x) for x in zip(*parts, strict=True))
        assert_gemm(wide(partials).reshape(-1, m.shape[1]), wide(want).reshape(-1, m.shape[1]), "partial sums")
        assert_same_bits(both("combine_gathered", partials)[1], got)
    return m


def check_layer(both, model: Model, layer: int, start: Start, decode: DecodeConfig) -> None:
    """All phases of a layer. both(name, *operands) -> (results on the CPU, results to check), NumPy arrays."""
    a = check_attention(both, model, layer, start)
    stream, pooled, scores = check_pool(both, model, layer, start, a)
    y, ids, weights = check_experts(both, model, layer, start, pooled, scores, decode.activations)
    m = check_combine(both, model, layer, y, ids, weights, decode)
    p = model.packed["layers"][layer]
    f, got = both("unpool", layer, m, p)
    assert_gemm(whole(wide(got)), whole(wide(f)), "f")
    want, got = both("add_ffn", layer, stream, f, p)
    assert_near(got, want, RESIDUAL, "stream with experts")


def run_layer(call, layer: int, p: dict, stream, cos_sin, rows: RowState, stored, flight):
    """The phases of a layer of one device, one after the other -> (stream, ids, stored, flight)."""
    plan = score.Plan(None, 1, call.config.num_local_experts, call.groups)
    return score._layer(call, layer, p, stream, cos_sin, rows, stored, flight, np.int32(0), plan)

"""Choice of experts in the kernels: ties, NaN, bias, crowded and empty experts, dead scales; alone and in passes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import (
    F32,
    PHASE_CONFIGS,
    SMALL,
    accepted,
    model_from,
    model_of,
    one_pass,
    random_bf16,
    random_cache,
    random_host_params,
    round_bf16,
    slices,
    whole,
    wide,
)

from musejax import nvfp4
from musejax.config import DecodeConfig
from musejax.kernels.calls import Call, RowState
from musejax.kernels.forward import chain
from musejax.model import experts as ref_experts
from musejax.nvfp4 import ACTIVATIONS
from musejax.packing import layout
from musejax.params import BF16
from musejax.sharding import make_mesh

MINI = PHASE_CONFIGS["mini"]  # 16 experts, 4 of them a row
ROWS = 16
CONFIGS = {"4 of 16": MINI, "1 of 16": replace(MINI, num_experts_per_tok=1),
           "16 of 16": replace(MINI, num_experts_per_tok=16),
           "8 of 64": replace(MINI, num_local_experts=64, num_experts_per_tok=8, routed_scaling_factor=2.5)}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def with_bias(config, packed_layer, bias, layer=0):
    start = layout(config, layer)["small.router_bias"]
    return {**packed_layer, "small": packed_layer["small"].at[start:start + config.num_local_experts].set(bias)}


def up(config, scores, bias=None, valid=ROWS, packed=None, pooled=None):
    """experts_up on one device -> (c, ids, weights), NumPy."""
    p = model_of(config).packed["layers"][0] if packed is None else packed
    p = with_bias(config, p, jnp.asarray(np.zeros(config.num_local_experts) if bias is None else bias, F32))
    t = len(scores)
    pooled = random_bf16(np.random.default_rng(0), (ROWS, config.moe_hidden_size))[:t] if pooled is None else pooled
    rows = RowState(chain(t), jnp.asarray([0, valid, 0], jnp.int32), jnp.zeros(16, jnp.int32))
    return [np.asarray(x) for x in Call(config, DecodeConfig()).experts_up(
        0, slices(pooled), slices(scores, F32), rows, p, jnp.int32(0))]


def expected(config, scores, bias):
    """ids by biased score, NaN last, ties to the lower id; weights by score, summed in slot order."""
    biased = scores + np.asarray(bias, F32)
    ids = np.argsort(-np.where(np.isnan(biased), -np.inf, biased), axis=1, kind="stable")
    ids = ids[:, :config.num_experts_per_tok]
    chosen, total = np.take_along_axis(scores, ids, 1), np.zeros(len(scores), F32)
    for slot in chosen.T:
        total = total + slot
    weights = chosen / (total + F32(config.route_eps))[:, None] * F32(config.routed_scaling_factor)
    return ids.astype(np.int32), weights


def random_scores(config, seed=0):
    return np.random.default_rng(seed).uniform(0, 1, (ROWS, config.num_local_experts)).astype(F32)


# ------------------------------------------------------------------ the choice


@configs
def test_choice(config):
    scores, rng = random_scores(config), np.random.default_rng(1)
    for bias in (np.zeros(config.num_local_experts, F32), rng.standard_normal(config.num_local_experts, F32)):
        _, ids, weights = up(config, scores, bias)
        want_ids, want_weights = expected(config, scores, bias)
        assert_same_bits(ids, want_ids)
        assert_same_bits(weights, want_weights)


@configs
def test_ties_go_to_the_lower_id(config):
    few = np.random.default_rng(2).integers(0, 3, (ROWS, config.num_local_experts)).astype(F32) / 4
    few[0] = 0.5
    few[1] = 0  # all scores 0: weights are 0, not NaN
    few[2] = np.where(np.arange(config.num_local_experts) % 2, -0.0, 0.0)
    _, ids, weights = up(config, few)
    assert_same_bits(ids, expected(config, few, 0)[0])
    assert list(ids[0]) == list(ids[1]) == list(ids[2]) == list(range(config.num_experts_per_tok))
    assert not weights[1].any()


def test_bias_selects_and_does_not_weigh():
    scores, bias = random_scores(MINI), np.zeros(16, F32)
    bias[[3, 11, 12, 14]] = 5, 7, 6, 4
    _, ids, weights = up(MINI, scores, bias)
    assert (ids == [11, 12, 3, 14]).all()
    chosen = scores[:, ids[0]]
    assert np.abs(weights - chosen / chosen.sum(1, keepdims=True)).max() < 2.0**-22
    # The same four through scores alone: in another order, with the same weights but for the order of their sum.
    only = np.where(bias > 0, scores, F32(-1))
    _, by_score, weights_by_score = up(MINI, only)
    assert (np.sort(by_score) == [3, 11, 12, 14]).all() and (by_score != ids).any()
    order, other = np.argsort(ids, 1), np.argsort(by_score, 1)
    difference = np.take_along_axis(weights, order, 1) - np.take_along_axis(weights_by_score, other, 1)
    assert np.abs(difference).max() < 2.0**-22


def test_nan_and_infinite_bias():
    """NaN and -inf rank last, in order of id; if nothing else is left they are chosen, ids still distinct."""
    scores, bias = random_scores(MINI), np.zeros(16, F32)
    bias[[0, 5]], bias[[2, 9]], bias[7] = np.nan, -np.inf, np.inf
    _, ids, _ = up(MINI, scores, bias)
    assert_same_bits(ids, expected(MINI, scores, bias)[0])
    assert (ids[:, 0] == 7).all() and not np.isin(ids, [0, 5, 2, 9]).any()
    for worst in (np.nan, -np.inf):
        few = np.full(16, worst, F32)
        few[[6, 13]] = 0
        _, ids, _ = up(MINI, scores, few)
        assert (np.sort(ids[:, :2]) == [6, 13]).all() and (ids[:, 2:] == [0, 1]).all()
        _, ids, _ = up(MINI, scores, np.full(16, worst, F32))
        assert (ids == [0, 1, 2, 3]).all()


def test_nan_scores_of_a_row():
    """One NaN score is never chosen; a row of NaN takes the first experts, and other rows do not notice."""
    scores = random_scores(MINI)
    scores[3, scores[3].argmax()] = np.nan
    scores[5] = np.nan
    c, ids, weights = up(MINI, scores)
    good = random_scores(MINI)
    good_c, good_ids, good_weights = up(MINI, good)
    rest = [i for i in range(ROWS) if i not in (3, 5)]
    assert_same_bits(ids[rest], good_ids[rest])
    assert_same_bits(weights[rest], good_weights[rest])
    assert list(ids[3]) == list(expected(MINI, scores, 0)[0][3]) and good_ids[3, 0] not in ids[3]
    assert np.isfinite(weights[3]).all()
    assert list(ids[5]) == [0, 1, 2, 3] and np.isnan(weights[5]).all()
    pairs = np.repeat(np.isin(np.arange(ROWS), rest), 4)
    assert_same_bits(c[:, pairs], good_c[:, pairs])


@pytest.mark.parametrize("valid", [0, 1, 9])
def test_padding_rows_route_nowhere(valid):
    scores = random_scores(MINI)
    scores[valid:] = np.nan
    c, ids, weights = up(MINI, scores, valid=valid)
    assert (ids[valid:] == 16).all() and not weights[valid:].any() and not wide(c)[:, 4 * valid:].any()
    if valid:
        want = up(MINI, scores[:valid], valid=valid)
        assert_same_bits(c[:, :4 * valid], want[0])
        assert_same_bits(ids[:valid], want[1])
        assert_same_bits(weights[:valid], want[2])


# ------------------------------------------------------------------ crowded and empty experts


@pytest.mark.parametrize("layer, mode", [(0, "bf16"), *((1, m) for m in ACTIVATIONS)])
def test_all_rows_on_one_expert(layer, mode):
    """16 rows share each weight that is read; each has the bits it has alone."""
    config = CONFIGS["1 of 16"]
    call, p = Call(config, DecodeConfig(activations=mode)), model_of(config).packed["layers"][layer]
    pooled, scores = random_bf16(np.random.default_rng(0), (ROWS, config.moe_hidden_size)), random_scores(config)
    scores[:, 5] = 2

    def run(rows):
        state = RowState(chain(len(rows)), jnp.asarray([0, len(rows), 0], jnp.int32), jnp.zeros(16, jnp.int32))
        c, ids, _ = call.experts_up(layer, slices(pooled[rows]), slices(scores[rows], F32), state, p, jnp.int32(0))
        assert (np.asarray(ids) == 5).all()
        return c, call.experts_down(layer, c, ids, p, jnp.int32(0))

    together = run(np.arange(ROWS))
    for row in range(ROWS):
        for a, b in zip(run([row]), together, strict=True):
            assert_same_bits(np.asarray(a)[:, 0], np.asarray(b)[:, row])
    some = run(np.arange(3, 12))
    for a, b in zip(some, together, strict=True):
        assert_same_bits(a, np.asarray(b)[:, 3:12])


def test_repeated_ids():
    """More than 16 pairs of one expert (no router makes them): as good as any other pairs."""
    call, p = Call(MINI, DecodeConfig()), model_of(MINI).packed["layers"][0]
    c = random_bf16(np.random.default_rng(3), (ROWS * 4, MINI.moe_intermediate_size))
    same, apart = np.full((ROWS, 4), 7, np.int32), np.tile(np.array([3, 7, 9, 11], np.int32), (ROWS, 1))
    together = whole(call.experts_down(0, slices(c), jnp.asarray(same), p, jnp.int32(0)))
    for slot in range(4):
        ids = np.roll(apart, slot - 1, axis=1)  # 7 in this slot
        got = whole(call.experts_down(0, slices(c), jnp.asarray(ids), p, jnp.int32(0)))
        assert_same_bits(together[slot::4], got[slot::4])


@pytest.mark.parametrize("devices", [1, 2])
def test_experts_without_rows_are_not_read(devices):
    """An expert that the bias keeps out may hold NaN."""
    model, tokens, mesh = model_of(SMALL), np.arange(9), make_mesh(devices)
    bias = jnp.zeros(16).at[jnp.array([3, 8])].set(jnp.array([-jnp.inf, -9.0]))
    packed = {**model.packed, "layers": [with_bias(SMALL, p, bias, i) for i, p in enumerate(model.packed["layers"])]}
    poisoned = {**packed, "layers": [{**p, "experts": p["experts"].at[:, jnp.array([3, 8])].set(255)}
                                     for p in packed["layers"]]}
    a, b = (one_pass(model, random_cache(SMALL, 30, 64, mesh=mesh), tokens, mesh=mesh, params=x)
            for x in (packed, poisoned))
    assert not np.isin(a.expert_ids, [3, 8]).any()
    assert np.isfinite(a.stream).all()
    assert_same_bits(b.stream, a.stream)
    assert_same_bits(b.expert_ids, a.expert_ids)


def test_crowded_experts_in_passes():
    """Biases that send every row to the same experts: rows alone have the same bits."""
    model = model_of(SMALL)
    bias = jnp.zeros(16).at[jnp.array([2, 3, 13, 15])].set(3.0)
    packed = {**model.packed, "layers": [with_bias(SMALL, p, bias, i) for i, p in enumerate(model.packed["layers"])]}
    cache, tokens = random_cache(SMALL, 30, 64), np.arange(16) * 3
    out = one_pass(model, cache, tokens, params=packed)
    assert (np.sort(out.expert_ids) == [2, 3, 13, 15]).all()
    for row, token in enumerate(tokens):
        alone = one_pass(model, cache, [token], params=packed)
        assert_same_bits(alone.stream[0], out.stream[row])
        cache = accepted(alone.cache, [0])


# ------------------------------------------------------------------ NaN in passes


def with_nan_token(model, token):
    return {**model.packed, "embed": model.packed["embed"].at[2, token, 5].set(jnp.nan)}


@pytest.mark.parametrize("devices", [1, 4])
def test_a_nan_row_is_confined(devices):
    """Its descendants are NaN, all other rows have the bits they would have beside a good row."""
    model, mesh = model_of(SMALL), make_mesh(devices)
    parents = [-1, 0, 0, -1, 3, 2, 5, 1, 3, -1]
    tokens = np.array([1, 2, 77, 4, 5, 6, 7, 8, 9, 10])
    bad = np.isin(np.arange(10), [2, 5, 6])  # the row of token 77 and what comes after it
    for mode in ACTIVATIONS if devices == 1 else ("bf16",):
        cache, decode = random_cache(SMALL, 250, 300, mesh=mesh), DecodeConfig(activations=mode)
        good, out = (one_pass(model, cache, tokens, parents, mesh=mesh, params=params, decode=decode)
                     for params in (model.packed, with_nan_token(model, 77)))
        assert np.isnan(np.asarray(out.stream)[bad]).all()
        assert_same_bits(np.asarray(out.stream)[~bad], np.asarray(good.stream)[~bad])
        assert_same_bits(np.asarray(out.expert_ids)[:, ~bad], np.asarray(good.expert_ids)[:, ~bad])
        ids = np.asarray(out.expert_ids)[:, bad]
        assert ((ids >= 0) & (ids < 16)).all() and all(len(set(x)) == 4 for x in ids.reshape(-1, 4))
        for a, b in zip(jax.tree.leaves(out.cache.flight), jax.tree.leaves(good.cache.flight), strict=True):
            assert_same_bits(np.asarray(a)[:, :10][:, ~bad], np.asarray(b)[:, :10][:, ~bad])


@pytest.mark.parametrize("length", [5, 30, 260])
def test_what_is_not_seen_may_be_nan(length):
    """Slots never written, rows in flight that are no ancestors, keys that left the window."""
    model, tokens = model_of(SMALL), np.arange(6)
    cache = random_cache(SMALL, length, 300)
    kept = []
    for layer, pair in enumerate(cache.layers):
        slots = pair.keys.shape[1]
        if slots == 24:  # at the first row: positions length - 24 .. length - 1, of which it sees all but the first
            unseen = [(length - 24) % 24] if length >= 24 else range(length, 24)
        else:
            unseen = range(length, slots)
        kept.append(jax.tree.map(lambda x, u=tuple(unseen): x.at[:, jnp.array(u)].set(jnp.nan), pair))
        assert layer < 3
    flight = jax.tree.map(lambda x: x.at[:, 6:].set(jnp.nan), cache.flight)
    poisoned = cache._replace(layers=tuple(kept), flight=flight)
    a, b = (one_pass(model, c, tokens, [-1, 0, 0, 1, 2, -1]) for c in (cache, poisoned))
    assert_same_bits(b.stream, a.stream)
    assert np.isfinite(a.stream).all()


# ------------------------------------------------------------------ dead scales


def dead(kind):
    """Experts in NVFP4 with hardly anything in them; those of ids 4 and up stay as they were."""
    host = random_host_params(SMALL)
    p = host["layers"][1]
    for name in ("gate_up", "down"):
        if kind == "zero blocks":
            p[name][:, :4], p[name + "_scale"][:, :4] = 0, 0
        elif kind == "smallest scales":
            p[name + "_scale"].view(np.uint8)[:, :4] = 1  # 2^-9
        else:
            p[name + "_global"][:4] = {"tiny globals": 2e-38, "subnormal globals": 1e-42, "zero globals": 0}[kind]
    p["router_bias"][:4] = 9  # the four dead ones are chosen
    return model_from(SMALL, host)


@pytest.mark.parametrize("mode", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["zero blocks", "smallest scales", "tiny globals", "subnormal globals",
                                  "zero globals"])
def test_dead_experts(kind, mode):
    """Numbers stay finite, rows keep the bits they have alone, and the phase agrees with the reference."""
    model, decode = dead(kind), DecodeConfig(activations=mode)
    cache, tokens = random_cache(SMALL, 30, 64), np.arange(8)
    out = one_pass(model, cache, tokens, decode=decode)
    assert np.isfinite(out.stream).all() and (np.asarray(out.expert_ids)[1] < 4).all()
    for row in range(3):
        alone = one_pass(model, cache, tokens[row:row + 1], decode=decode)
        assert_same_bits(alone.stream[0], out.stream[row])
        cache = accepted(alone.cache, [0])

    call, p = Call(SMALL, decode), model.packed["layers"][1]
    pooled, scores = random_bf16(np.random.default_rng(1), (8, 128)), np.full((8, 16), 0.5, F32)
    rows = RowState(chain(8), jnp.asarray([0, 8, 0], jnp.int32), jnp.zeros(16, jnp.int32))
    c, ids, weights = call.experts_up(1, slices(pooled), slices(scores, F32), rows, p, jnp.int32(0))
    y = call.experts_down(1, c, ids, p, jnp.int32(0))
    m = call.combine(1, slices(whole(y)), ids, weights, p)
    assert np.isfinite(wide(c)).all() and np.isfinite(wide(y)).all() and np.isfinite(wide(m)).all()
    table = model.table["layers"][1]
    if kind == "smallest scales":
        x = jnp.asarray(wide(whole(c)))
        static = (x, table["down_input_scale"].max())  # quantised already, to zeros here
        x, scale = static if mode == "nvfp4_static" else ref_experts._quantised(x, mode, None)
        for e in range(4):
            grid = nvfp4.grid(table["down"][:, e], table["down_scale"][:, e])
            want = round_bf16(ref_experts._down(x, grid, decode.policy) * (scale * table["down_global"][e]))
            here = (np.asarray(ids) == e).reshape(-1)
            got = wide(whole(y))[here]
            assert np.abs(got - want[here]).max() <= 2.0**-7 * np.abs(want).max()
            assert (np.abs(want).max() > 0) == (mode != "nvfp4_static")
    else:
        assert np.abs(wide(y)).max() <= 1e-36


def test_every_block_scale():
    """All 127 legal bytes of E4M3, the subnormal ones too: exact sums of one product each."""
    host = random_host_params(MINI)
    p, rng = host["layers"][1], np.random.default_rng(6)
    m, f = MINI.moe_hidden_size, MINI.moe_intermediate_size
    codes = rng.integers(0, 16, (8, 16, m // 8, f)).astype(np.uint8)
    scale = rng.integers(1, 127, (8, 16, m // 8, f // 16)).astype(np.uint8)
    p["down"], p["down_scale"] = nvfp4.pack(codes), scale.view(nvfp4.E4M3)
    p["down_global"] = np.ones_like(p["down_global"])
    model = model_from(MINI, host)
    assert set(np.unique(scale)) == set(range(1, 127))
    # Row i of pair (i, slot) has a single 1 in column 8 i + slot.
    c = np.zeros((ROWS * 4, f), F32)
    columns = np.arange(ROWS * 4) * 2 % f
    c[np.arange(ROWS * 4), columns] = 1
    ids = np.stack([rng.permutation(16)[:4] for _ in range(ROWS)]).astype(np.int32)
    y = whole(Call(MINI, DecodeConfig()).experts_down(1, slices(c), jnp.asarray(ids), model.packed["layers"][1],
                                                      jnp.int32(0)))
    values = nvfp4.E2M1[codes] * np.repeat(scale.view(nvfp4.E4M3).astype(F32), 16, axis=-1)
    want = values.swapaxes(0, 1).reshape(16, m, f)[ids.reshape(-1), :, columns]
    assert_same_bits(y, (want + F32(0)).astype(BF16))

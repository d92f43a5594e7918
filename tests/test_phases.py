"""Every phase of the CPU twin against `reference`, from the same input bits: norms, router, experts, combine, head.

Attention and the projections beside it: test_attention_kernel.py; the order of sums: test_sum_order.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import (
    F32,
    PHASE_CONFIGS,
    TWO,
    centred_norm,
    math_h,
    model_from,
    model_of,
    random_bf16,
    random_host_params,
    rms_norm,
    round_bf16,
    slices,
    tree_sum,
    whole,
    wide,
)
from phase_inputs import (
    CANON,
    ROWS,
    assert_gemm,
    assert_near,
    configs,
    layers,
    log,
    of_pairs,
    reference_up,
    row_state,
    stream_of,
)

from musejax import nvfp4
from musejax.config import DecodeConfig
from musejax.kernels.calls import Call
from musejax.model import attention as ref_attention
from musejax.model import experts as ref_experts
from musejax.model import forward as ref_forward
from musejax.model import norms as ref_norms
from musejax.model import router as ref_router
from musejax.nvfp4 import ACTIVATIONS
from musejax.params import BF16

# ------------------------------------------------------------------ embedding, norms


@configs
def test_embed_norm(config):
    model, tokens = model_of(config), jnp.arange(ROWS) * 31
    got = Call(config, DecodeConfig()).embed_norm(model.packed["embed"][:, tokens])
    assert_gemm(got, ref_forward.embed(model.table, tokens, config, DecodeConfig()))
    rows = wide(model.host["embed"][:, np.asarray(tokens)]).swapaxes(0, 1).reshape(ROWS, -1)
    assert_same_bits(got, round_bf16(rms_norm(rows, config.rms_norm_eps)))


@configs
def test_norm_of_numpy(config):
    """The norm that makes inputs for the tests below is the reference's, up to a last place here and there."""
    gamma = model_of(config).host["layers"][0]["input_norm"]
    x = stream_of(config)
    want = ref_norms.centred_norm(jnp.asarray(x), jnp.asarray(wide(gamma)), config.rms_norm_eps, CANON)
    assert_gemm(centred_norm(x, gamma, config.rms_norm_eps), want)


# ------------------------------------------------------------------ router, experts, combine


@configs
@layers
def test_pool_and_route(config, layer):
    model = model_of(config)
    p, packed, wide_p = (m["layers"][layer] for m in (model.host, model.packed, model.table))
    call, stream, rng = Call(config, DecodeConfig()), stream_of(config), np.random.default_rng(5)
    a = random_bf16(rng, (ROWS, config.hidden_size))
    got, pooled, scores = call.pool(layer, jnp.asarray(stream), slices(a), packed)
    want = ref_norms.gated_residual(jnp.asarray(stream), ref_norms.rms(jnp.asarray(wide(a)), config.post_norm_eps),
                                    wide_p["attention_residual_gate"], config, CANON)
    assert_near(got, want, 2.0**-6, "stream")
    # Where the branch rounds alike the stream is alike but for float32 rounding.
    assert np.mean(np.abs(np.asarray(got) - want) <= 2.0**-21 * np.abs(want).max()) >= 0.998

    x = jnp.asarray(centred_norm(np.asarray(got), p["ffn_norm"], config.rms_norm_eps))
    assert_gemm(wide(whole(pooled)), CANON.round("pooler", ref_attention.project(x, wide_p["pooler"], CANON)),
                "p")
    rows = row_state(valid=14)
    routing = ref_router.route(x, wide_p["router"], wide_p["router_bias"], jnp.arange(ROWS) < 14, config)
    logits = np.asarray(x) @ np.asarray(wide_p["router"]).reshape(-1, config.hidden_size).T
    want = jax.nn.sigmoid(logits * F32(config.output_multiplier))
    error = np.abs(whole(scores) - want).max()
    log.info("scores: worst %.2e", error)
    assert error <= 1e-5

    c, ids, weights = call.experts_up(layer, pooled, scores, rows, packed, jnp.int32(0))
    assert not wide(c)[:, 14 * config.num_experts_per_tok:].any()
    clear = np.asarray(routing.margin) > 1e-4
    assert clear.sum() >= 12
    # The order of two chosen experts whose scores are nearly equal may differ, too.
    want_ids, got_ids = np.asarray(routing.ids), np.asarray(ids)
    assert_same_bits(np.sort(got_ids, 1)[clear], np.sort(want_ids, 1)[clear])
    same = (got_ids == want_ids).all(1)
    assert same.sum() >= 12
    assert (np.abs(np.asarray(weights) - routing.weights)[same & (np.arange(ROWS) < 14)] <= 1e-5).all()
    assert (got_ids[14:] == config.num_local_experts).all() and not np.asarray(weights)[14:].any()


def expert_inputs(config, seed=7):
    """Pooled rows, and scores that choose experts at random, with weights."""
    rng = np.random.default_rng(seed)
    pooled = random_bf16(rng, (ROWS, config.moe_hidden_size))
    scores = rng.uniform(0.1, 0.9, (ROWS, config.num_local_experts)).astype(F32)
    return pooled, scores


@partial(jax.jit, static_argnames=("mode",))
def reference_down(c, p, mode):
    """Outputs of every expert for every row of c, [e, t, m]; `nvfp4_static` takes c as quantised."""
    leaves = {k: v for k, v in p.items() if k.startswith("down") and "input" not in k}
    axes = {k: 0 if k.endswith("_global") else 1 for k in leaves}

    def one(w):
        if "down_scale" not in w:
            return CANON.round("down", ref_experts._down(c, w["down"], CANON))
        x, scale = (c, p["down_input_scale"].max()) if mode == "nvfp4_static" else ref_experts._quantised(c, mode, None)
        return CANON.round("down", ref_experts._down(x, nvfp4.grid(w["down"], w["down_scale"]), CANON)
                           * (scale * w["down_global"]))

    return jax.vmap(one, in_axes=(axes,))(leaves)


MODES = [(0, "bf16"), *((1, mode) for mode in ACTIVATIONS)]
modes = pytest.mark.parametrize("layer, mode", MODES, ids=["bf16 experts", *(f"nvfp4 {m}" for _, m in MODES[1:])])


@configs
@modes
def test_experts(config, layer, mode):
    model, call = model_of(config), Call(config, DecodeConfig(activations=mode))
    p, packed, wide_p = (m["layers"][layer] for m in (model.host, model.packed, model.table))
    pooled, scores = expert_inputs(config)
    c, ids, _ = call.experts_up(layer, slices(pooled), slices(scores, F32), row_state(), packed, jnp.int32(0))
    h = centred_norm(wide(pooled), p["expert_norm"], config.rms_norm_eps)
    act = of_pairs(reference_up(jnp.asarray(h), wide_p, mode), ids)
    if layer and mode == "nvfp4_static":
        # Codes are equal unless a value is within 2^-16 of a threshold: one of its neighbours' codes then.
        scale = wide_p["down_input_scale"].max()
        near = [np.asarray(nvfp4.quantize_activation(jnp.asarray(act * F32(1 + e * 2.0**-16)), mode, scale).grid)
                for e in (0, -1, 1)]
        got = wide(whole(c))
        log.info("c: %.5f equal", np.mean(got == near[0]))
        assert np.mean(got == near[0]) >= 0.998
        assert np.logical_or.reduce([got == x for x in near]).all()
    else:
        assert_gemm(wide(whole(c)), round_bf16(act), "c")

    y = call.experts_down(layer, c, ids, packed, jnp.int32(0))
    want = of_pairs(reference_down(jnp.asarray(wide(whole(c))), wide_p, mode), ids, per_pair=True)
    assert_gemm(wide(whole(y)), want, "y")


@modes
def test_experts_of_one_owner(layer, mode):
    """All slices of some experts, as expert parallelism holds them: the same bits, zeros for the others' rows."""
    config = PHASE_CONFIGS["mini"]
    call, packed = Call(config, DecodeConfig(activations=mode)), model_of(config).packed["layers"][layer]
    pooled, scores = (slices(x, x.dtype) for x in expert_inputs(config))
    c, ids, weights = call.experts_up(layer, pooled, scores, row_state(), packed, jnp.int32(0))
    y = call.experts_down(layer, c, ids, packed, jnp.int32(0))
    begin, count = 4, 6
    part = {**packed, "experts": packed["experts"][:, begin:begin + count]}
    c1, ids1, weights1 = call.experts_up(layer, pooled, scores, row_state(), part, jnp.int32(begin))
    y1 = call.experts_down(layer, c, ids, part, jnp.int32(begin))
    assert_same_bits(ids1, ids)
    assert_same_bits(weights1, weights)
    here = ((np.asarray(ids) >= begin) & (np.asarray(ids) < begin + count)).reshape(-1)
    assert 0 < here.sum() < here.size
    for part, every in ((c1, c), (y1, y)):
        assert_same_bits(part, np.where(here[:, None], np.asarray(every), BF16.type(0)))


def identity_experts(config, seed=0):
    """Weights of layer 1 whose GEMMs pass their inputs on: code 1.0 on the diagonal, scale 1."""
    host = random_host_params(config, seed)
    p, n = host["layers"][1], config.moe_hidden_size
    assert n == config.moe_intermediate_size
    eye = nvfp4.pack(np.where(np.eye(n, dtype=bool), 2, 0).astype(np.uint8))
    for name in ("gate_up", "down"):
        p[name] = np.broadcast_to(eye.reshape(8, 1, *(() if name == "down" else (1,)), n // 8, n // 2),
                                  p[name].shape).copy()
        p[name + "_scale"] = np.ones_like(p[name + "_scale"])
        p[name + "_global"] = np.full_like(p[name + "_global"], 0.37)
    return model_from(config, host)


def rough_rows(config, n):
    """Rows with blocks of very different sizes, zeros, ties, and values on thresholds."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((ROWS, n // 16, 16)) * np.exp2(rng.integers(-12, 4, (ROWS, n // 16, 1)))
    x[1], x[2, ::2] = 0, 0
    x[3] = rng.choice(nvfp4.E2M1, x[3].shape)  # exactly on the grid
    x[4] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], x[4].shape) * rng.choice([-1, 1], x[4].shape)
    x[5, :, 1:] = 0  # one value a block
    x[6] *= 2.0**-110  # below TINY
    x[7] = -0.0
    return x.reshape(ROWS, n).astype(BF16)


def test_per_token_quantiser_bit_for_bit():
    """Experts that pass on what they multiply: codes, block scales and row scales of `nvfp4.quantize_activation`."""
    config = PHASE_CONFIGS["mini"]
    model, call = identity_experts(config), Call(config, DecodeConfig(activations="nvfp4_per_token"))
    c = rough_rows(config, config.moe_intermediate_size)
    ids = jnp.arange(ROWS, dtype=jnp.int32)[:, None] % config.num_local_experts
    every = np.repeat(c, config.num_experts_per_tok, axis=0)
    ids = jnp.repeat(ids, config.num_experts_per_tok, axis=1)
    y = call.experts_down(1, slices(every), ids, model.packed["layers"][1], jnp.int32(0))
    x = nvfp4.quantize_activation(jnp.asarray(wide(every)), "nvfp4_per_token")
    assert len(np.unique(np.abs(x.values))) == 8 and len(np.unique(x.scale)) > 20
    want = np.asarray(x.grid) * (np.asarray(x.decode) * F32(0.37))
    got = wide(whole(y))
    # A sum that begins with +0 has no -0.
    assert_same_bits(got, round_bf16(want) + F32(0))


def test_static_quantiser_bit_for_bit():
    """The same for given scales, and for float32 values behind SwiGLU."""
    config = PHASE_CONFIGS["mini"]
    model, call = identity_experts(config), Call(config, DecodeConfig(activations="nvfp4_static"))
    p = model.host["layers"][1]
    pooled, scores = expert_inputs(config)
    pooled[:8] = rough_rows(config, config.moe_hidden_size)[:8]
    c, _, _ = call.experts_up(1, slices(pooled), slices(scores, F32), row_state(), model.packed["layers"][1],
                              jnp.int32(0))
    h = centred_norm(wide(pooled), p["expert_norm"], config.rms_norm_eps)
    first, second = (F32(p[name + "_input_scale"].max()) for name in ("gate_up", "down"))
    x = np.asarray(nvfp4.quantize_activation(jnp.asarray(h), "nvfp4_static", first).grid) + F32(0)
    u = x * (first * F32(0.37))
    act = math_h()("silu", u) * u
    want = np.asarray(nvfp4.quantize_activation(jnp.asarray(act), "nvfp4_static", second).grid)
    got = wide(whole(c)).reshape(ROWS, config.num_experts_per_tok, -1)
    for slot in range(config.num_experts_per_tok):
        assert_same_bits(got[:, slot], want)


@configs
@pytest.mark.parametrize("order", ["flat", "ep(2)", "ep(8)"])
def test_combine(config, order):
    model, decode = model_of(config), DecodeConfig(combine=order)
    call, packed, rng = Call(config, decode), model.packed["layers"][0], np.random.default_rng(2)
    k, e, m = config.num_experts_per_tok, config.num_local_experts, config.moe_hidden_size
    y = random_bf16(rng, (ROWS * k, m))
    ids = np.stack([rng.permutation(e)[:k] for _ in range(ROWS)]).astype(np.int32)
    weights = rng.uniform(0.1, 0.5, (ROWS, k)).astype(F32)
    ids[14:], weights[14:] = e, 0
    got = call.combine(0, slices(y), jnp.asarray(ids), jnp.asarray(weights), packed)
    routing = ref_router.Routing(jnp.asarray(ids), jnp.asarray(weights), None)
    want = ref_experts.combine(jnp.asarray(wide(y).reshape(ROWS, k, m)), routing,
                               model.table["layers"][0]["post_expert_norm"], config, decode)
    assert_gemm(wide(got)[:14], want[:14])
    assert not wide(got)[14:].any()

    # Bit for bit, in NumPy.
    gain = round_bf16(F32(1) + wide(model.host["layers"][0]["post_expert_norm"]))
    z = rms_norm(round_bf16(wide(y) * gain), config.post_norm_eps).reshape(ROWS, k, m)
    terms = weights[..., None] * z
    groups = int(order[3:-1]) if order != "flat" else 1
    total = np.zeros((ROWS, m), F32)
    for g in range(groups):
        part = np.zeros((ROWS, m), F32)
        for j in range(k):
            here = ids[:, j] // (e // groups) == g
            part = np.where(here[:, None], part + terms[:, j], part)
        total = total + (round_bf16(part) if order != "flat" else part)
    assert_same_bits(wide(got), round_bf16(total))

    if order == "ep(8)":
        for owners in (1, 2, 8):  # groups of one device
            partials = jnp.concatenate([
                call.combine_partials(0, slices(y), jnp.asarray(ids), jnp.asarray(weights), packed,
                                      jnp.int32(begin * e // 8), owners) for begin in range(0, 8, owners)])
            assert_same_bits(call.combine_gathered(partials), got)


@configs
def test_unpool(config):
    model = model_of(config)
    m = random_bf16(np.random.default_rng(4), (ROWS, config.moe_hidden_size))
    got = Call(config, DecodeConfig()).unpool(0, jnp.asarray(m), model.packed["layers"][0])
    want = ref_attention.project(jnp.asarray(wide(m)), model.table["layers"][0]["unpooler"], CANON)
    assert_gemm(wide(whole(got)), CANON.round("unpooler", want))


@configs
@layers
def test_add_ffn(config, layer):
    model = model_of(config)
    stream, f = stream_of(config), random_bf16(np.random.default_rng(6), (ROWS, config.hidden_size))
    got = Call(config, DecodeConfig()).add_ffn(layer, jnp.asarray(stream), slices(f), model.packed["layers"][layer])
    p = model.table["layers"][layer]
    branch = ref_norms.input_scaled(jnp.asarray(wide(f)), p["post_ffn_norm"], config.post_norm_eps, CANON)
    want = ref_norms.gated_residual(jnp.asarray(stream), branch, p["ffn_residual_gate"], config, CANON)
    assert_near(got, want, 2.0**-6)
    assert np.mean(np.abs(np.asarray(got) - want) <= 2.0**-21 * np.abs(want).max()) >= 0.998


# ------------------------------------------------------------------ head


@configs
def test_head(config):
    model, call = model_of(config), Call(config, DecodeConfig())
    stream = stream_of(config)
    raw, best, ids = call.head(jnp.asarray(stream), model.packed["final_norm"], model.packed["lm_head"], jnp.int32(0),
                               num_tokens=None, top=3)
    x = round_bf16(stream)
    x = round_bf16(rms_norm(x, config.rms_norm_eps) * wide(model.host["final_norm"]))
    want = np.asarray(ref_attention.project(jnp.asarray(x), model.table["lm_head"], CANON))
    # float32 sums of 128 to 2,048 terms in XLA's order on this CPU: sqrt(2,048) roundings of 2^-24, three times
    assert_near(whole(raw), want, 2.0**-17)
    whole_want = ref_forward.raw_logits(model.table, jnp.asarray(stream), config, DecodeConfig())
    assert_near(whole(raw), whole_want, 2.0**-6)

    parts = np.asarray(raw)
    order = np.argsort(-parts, axis=-1, kind="stable")[..., :3]
    assert_same_bits(best, np.take_along_axis(parts, order, -1))
    assert_same_bits(ids, (order + np.arange(8)[:, None, None] * parts.shape[-1]).astype(np.int32))
    assert_near(call.softcap(raw), ref_forward.softcap(raw, config), 2.0**-20)


def test_head_ties_nan_and_limit():
    """Equal logits go to the lower id, NaN comes last, ids from num_tokens on do not exist."""
    config = replace(TWO, vocab_size=448)  # slices of 56: the last tile is half empty
    host = random_host_params(config)
    host["lm_head"][:, 3] = host["lm_head"][:, 40] = host["lm_head"][:, 7]  # equal rows in every slice
    host["lm_head"][5, 11] = np.nan
    model, call, limit = model_from(config, host), Call(config, DecodeConfig()), 6 * 56 + 20
    raw, best, ids = map(np.asarray, call.head(jnp.asarray(stream_of(config)), model.packed["final_norm"],
                                               model.packed["lm_head"], jnp.int32(0), num_tokens=limit, top=56))
    for s in range(8):
        count = min(max(limit - 56 * s, 0), 56)
        for row in range(ROWS):
            x = np.where(np.isnan(raw[s, row]), -np.inf, raw[s, row])[:count]
            order = np.argsort(-x, kind="stable")
            assert_same_bits(ids[s, row, :count], (56 * s + order).astype(np.int32))
            assert_same_bits(best[s, row, :count], x[order])
            assert (ids[s, row, count:] == 448).all() and np.isneginf(best[s, row, count:]).all()
    assert np.isnan(raw[5, :, 11]).all() and (ids[5, :, -1] == 5 * 56 + 11).all()
    at = {n: np.argmax(ids[0] == n, axis=1) for n in (3, 7, 40)}
    assert ((at[7] - at[3] == 1) & (at[40] - at[7] == 1)).all()


@pytest.mark.parametrize("num_tokens", [None, 300])
def test_logprobs(num_tokens):
    """Log-probabilities against float64, and the sums in the stated order, bit for bit."""
    config, math = TWO, math_h()
    call, rng = Call(config, DecodeConfig()), np.random.default_rng(9)
    raw = (2 * rng.standard_normal((8, ROWS, 64))).astype(F32)
    limit = num_tokens or 512
    flat = np.where(np.arange(512) < limit, whole(raw), -np.inf)
    largest = flat.max(1).astype(F32)
    sums = np.asarray(call.head_sums(jnp.asarray(raw), jnp.asarray(largest), jnp.int32(0), num_tokens=num_tokens))

    cap = F32(config.final_logit_softcapping)

    def softcap(x):
        return cap * math("tanh", x * F32(config.output_multiplier) / cap)

    terms = math("exp", softcap(raw) - softcap(largest)[None, :, None])
    terms = np.where((np.arange(512) < limit).reshape(8, 1, 64), terms, F32(0))
    assert_same_bits(sums, tree_sum(terms))
    chosen = flat[:, 17].astype(F32)
    got = np.asarray(call.logprob(jnp.asarray(chosen), jnp.asarray(largest), jnp.asarray(sums)))
    logits = float(cap) * np.tanh(flat[:, :limit].astype(np.float64) * config.output_multiplier / float(cap))
    want = logits[:, 17] - np.log(np.exp(logits).sum(1))
    log.info("log-probabilities: worst %.2e", np.abs(got - want).max())
    assert (np.abs(got - want) <= 2e-6).all(), "about two units in the last place of numbers near 8"

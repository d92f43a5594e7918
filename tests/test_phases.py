"""Every phase of the CPU twin against `reference`, from the same input bits, and the stated order of its sums.

Bounds are those of the design: GEMM outputs 2 units in the last place or 2^-14 of the row's RMS, and 99.8% equal;
attention 2^-6 of the head's RMS; router 1e-5; residual stream 2^-6 of the row's RMS. Inputs of GEMMs behind a norm
come from the NumPy copy of the norm (kernel_inputs.py), which has the twin's bits; the reference's norm differs from it
in the last place of few elements, and would move all outputs of their rows.
"""

import logging
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
    attention_in_order,
    centred_norm,
    in_order,
    k_sum,
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

from musejax import nvfp4
from musejax.cache import LayerCache
from musejax.config import FULL, SLIDING, DecodeConfig
from musejax.kernels.attributes import inverse_frequencies, thetas
from musejax.kernels.calls import Call, RowState
from musejax.kernels.forward import chain, depths
from musejax.model import attention as ref_attention
from musejax.model import experts as ref_experts
from musejax.model import forward as ref_forward
from musejax.model import norms as ref_norms
from musejax.model import rope as ref_rope
from musejax.model import router as ref_router
from musejax.nvfp4 import ACTIVATIONS
from musejax.params import BF16

log = logging.getLogger("measured")
"""What was measured: `pytest --log-cli-level=INFO`."""

CANON = DecodeConfig().policy
ROWS = 16

configs = pytest.mark.parametrize("config", PHASE_CONFIGS.values(), ids=PHASE_CONFIGS)
layers = pytest.mark.parametrize("layer", [0, 1], ids=["bf16", "nvfp4"])


# ------------------------------------------------------------------ bounds


def unit_of(x):
    """bf16's unit in the last place."""
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126))) - 7)


def assert_gemm(got, want, name="result"):
    """bf16 values of one GEMM [t, n]: within 2 units in the last place or 2^-14 RMS(row), and 99.8% bit-equal."""
    got, want = np.asarray(got, F32), np.asarray(want, F32)
    unit = unit_of(want)
    rms = np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    error, equal = np.abs(got - want), np.mean(got == want)
    bound = np.maximum(2 * unit, 2.0**-14 * rms)
    log.info("%s: %.5f equal, worst %.3f of the bound", name, equal, (error / bound).max())
    assert (error <= bound).all(), (error / unit).max()
    assert equal >= 0.998, f"{equal:.5f} of the elements are equal"


def assert_near(got, want, bound, name="result", rounded=False):
    """Within `bound` of the RMS of the last axis; `rounded` values may part by a unit of theirs, if that is more."""
    got, want = np.asarray(got, F32), np.asarray(want, F32)
    error, rms = np.abs(got - want), np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    log.info("%s: worst %.2e of the RMS, bound %.2e", name, (error / rms).max(), bound)
    assert (error <= np.maximum(bound * rms, unit_of(want) if rounded else 0)).all(), (error / rms).max()


def row_state(t=ROWS, *, length=0, valid=None, parents=None, accepted=0, path=()):
    parents = chain(t) if parents is None else jnp.asarray(parents, jnp.int32)
    state = jnp.asarray([length, t if valid is None else valid, accepted], jnp.int32)
    return RowState(parents, state, jnp.asarray(np.pad(np.asarray(path, np.int32), (0, 16 - len(path)))))


def stream_of(config, t=ROWS, seed=0):
    return np.random.default_rng(seed).standard_normal((t, config.hidden_size)).astype(F32)


def empty_keys(config, slots, heads=None):
    shape = (heads or config.num_key_value_heads, slots, config.head_dim)
    return LayerCache(*(jnp.zeros(shape, BF16) for _ in range(2)))


def heads_last(x_ntc):
    """[n, t, c] -> float32 [t, n, c]."""
    return wide(x_ntc).swapaxes(0, 1)


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


@pytest.mark.parametrize("hidden", [128, 1024, 2048])  # slices of 16, 128 and 256 columns: less than a leaf, 2, 4
def test_order_of_sums_of_squares(hidden):
    """Bit for bit. Probes, too small to count in the sum, lie halfway between two bf16 values once they are normed: a
    factor that is off by one unit in the last place pushes them over. The value projection passes them on."""
    config, rng = replace(TWO, hidden_size=hidden), np.random.default_rng(hidden)
    host, eps = random_host_params(config), config.rms_norm_eps
    p, probes = host["layers"][1], np.sort(rng.choice(hidden, hidden // 4, replace=False))
    p["input_norm"] = np.zeros_like(p["input_norm"])
    w = np.zeros((config.kv_width, hidden), BF16)
    w[np.arange(len(probes)), probes] = 1
    p["v_proj"] = w.reshape(p["v_proj"].shape)

    stream = (rng.uniform(1, 2, (ROWS, hidden)) * np.exp2(rng.integers(-4, 5, (ROWS, hidden)))).astype(F32)
    stream[:, probes] = 0
    factor = rms_norm(stream, eps)[:, :, None].max(1) / stream.max(1)[:, None]
    halfway = (2 * rng.integers(128, 256, (ROWS, len(probes))) + 1) * 2.0**-40
    stream[:, probes] = halfway / factor
    *_, flight = Call(config, DecodeConfig()).attn_in(
        1, jnp.asarray(stream), jnp.zeros((0, ROWS, 2, 32)), row_state(), model_from(config, host).packed["layers"][1],
        empty_keys(config, 1), empty_keys(config, 16))
    got = heads_last(flight.values).reshape(ROWS, -1)[:, :len(probes)]
    assert_same_bits(got, centred_norm(stream, p["input_norm"], eps)[:, probes])

    squares = stream * stream
    others = {
        "column after column": in_order(squares, -1),
        "slices from the last": in_order(tree_sum(squares.reshape(ROWS, 8, -1))[:, ::-1], -1),
        "leaves of 16": in_order(in_order(tree_sum(squares.reshape(ROWS, 8, -1, 16)), -1), -1),
    }
    if hidden == 128:  # where a slice is 16 columns this is the order
        del others["leaves of 16"]
    for name, total in others.items():
        scale = F32(1) / np.sqrt(total / F32(hidden) + F32(eps))
        assert (round_bf16(stream[:, probes] * scale[:, None]) != got).any(), f"this test would see: {name}"


# ------------------------------------------------------------------ attention


@configs
@layers
def test_attn_in(config, layer):
    model, p = model_of(config), model_of(config).host["layers"][layer]
    call, stream = Call(config, DecodeConfig()), stream_of(config)
    rows = row_state(length=1000, valid=13)
    positions = 1000 + depths(rows.parents)
    q, gate, stored, flight = call.attn_in(layer, jnp.asarray(stream), call.angles(positions), rows,
                                           model.packed["layers"][layer], empty_keys(config, 1000),
                                           empty_keys(config, 16))
    x = jnp.asarray(centred_norm(stream, p["input_norm"], config.rms_norm_eps))
    proj = {name: CANON.round("qkv", ref_attention.project(x, model.table["layers"][layer][name], CANON))
            for name in ("q_proj", "k_proj", "v_proj", "gate_proj")}

    def rotated(name):
        a = CANON.round("qk_norm", ref_norms.rms(proj[name].reshape(ROWS, -1, config.head_dim), config.rms_norm_eps))
        theta = config.layer_rope_theta[layer]
        return ref_rope.rotate(a, ref_rope.angles(positions, config.head_dim, theta), CANON) if theta else a

    assert_near(heads_last(q), rotated("q_proj"), 2.0**-6, "q", rounded=True)
    assert_near(heads_last(flight.keys)[:13], rotated("k_proj")[:13], 2.0**-6, "k", rounded=True)
    assert_gemm(heads_last(gate).reshape(ROWS, -1), proj["gate_proj"], "gate")
    assert_gemm(heads_last(flight.values).reshape(ROWS, -1)[:13], proj["v_proj"][:13],
                "v")
    assert not heads_last(flight.keys)[13:].any() and not heads_last(flight.values)[13:].any(), "padding leaves none"
    assert not any(wide(x).any() for x in stored)


@pytest.mark.parametrize("layer, length", [(0, 22), (0, 41), (1, 20)], ids=["ring", "ring, slot 0 in between", "full"])
def test_attn_in_stores_accepted_rows(layer, length):
    """Rows `path` of the last pass go to their positions' slots before this pass's rows take their place."""
    config, slots, path = replace(PHASE_CONFIGS["mini"], sliding_window=20), 20, (3, 0, 9, 15, 7)
    call, rng = Call(config, DecodeConfig()), np.random.default_rng(3)
    kept, flight = (LayerCache(*(random_bf16(rng, (8, n, config.head_dim)) for _ in range(2))) for n in (slots, 16))
    _, _, stored, after = call.attn_in(
        layer, jnp.zeros((2, config.hidden_size)), call.angles(jnp.arange(2)),
        row_state(2, length=length, accepted=5, path=path), model_of(config).packed["layers"][layer],
        LayerCache(*map(jnp.asarray, kept)), LayerCache(*map(jnp.asarray, flight)))
    for new, old, moved, left in zip(stored, kept, flight, after, strict=True):
        expected = old.copy()
        expected[:, [(length - 5 + i) % slots for i in range(5)]] = moved[:, list(path)]
        assert_same_bits(new, expected)
        assert_same_bits(np.asarray(left)[:, 2:], moved[:, 2:])


BORDERS = (0, 1, 14, 15, 16, 17, 31, 240, 254, 255, 256, 257, 1008, 1023, 1024, 1025, 1300)
"""Stored positions: around the ends of blocks of 16, chunks of 256 and groups of 1,024."""
TREE = (-1, 0, 0, -1, 1, 1, 4, 2, 6, 3, 8, 9, 10, 5, 12, 11)


class Attention:
    """Random queries over a random past, and what a row sees of it, in plain arrays.

    With `scale` 0 all keys weigh the same, and with `cancel` besides sums of values show the order they were made in.
    """

    def __init__(self, config, length, slots, parents, seed=0, scale=1.0, cancel=False):
        rng = np.random.default_rng(seed)
        self.config, self.length, self.slots, self.parents = config, length, slots, parents
        c, t = config.head_dim, len(parents)
        self.q, self.gate = (random_bf16(rng, (config.num_attention_heads, t, c), s) for s in (scale, 1.0))
        self.kept = [random_bf16(rng, (config.num_key_value_heads, slots, c)) for _ in range(2)]
        self.flight = [random_bf16(rng, (config.num_key_value_heads, 16, c)) for _ in range(2)]
        if cancel:  # large values and, elsewhere, their opposites: rounding errors of the sums stand out
            self.kept[1] = (self.kept[1] * np.exp2(rng.integers(0, 24, (1, slots, 1)))).astype(BF16)
            half = slots // 2
            self.kept[1][:, slots - half:] = -rng.permuted(self.kept[1][:, :half], axis=1)
        self.depth = np.asarray(depths(jnp.asarray(parents, jnp.int32)))

    def run(self, layer):
        o, stored, flight = Call(self.config, DecodeConfig()).attention(
            layer, jnp.asarray(self.q), jnp.asarray(self.gate), row_state(len(self.parents), length=self.length,
                                                                          parents=self.parents),
            LayerCache(*map(jnp.asarray, self.kept)), LayerCache(*map(jnp.asarray, self.flight)))
        for a, b in zip((*stored, *flight), (*self.kept, *self.flight), strict=True):
            assert_same_bits(a, b)
        return heads_last(o)

    def ancestors(self, row):
        out = []
        while row >= 0:
            out.append(row)
            row = self.parents[row]
        return out[::-1]

    def seen_by(self, row, window):
        """(keys, values of positions 0 .. the row's own: float32 [k, p, c], first position seen)."""
        position = self.length + int(self.depth[row])
        at = np.arange(self.length) % self.slots
        both = [wide(np.concatenate([kept[:, at], flight[:, self.ancestors(row)]], axis=1))
                for kept, flight in zip(self.kept, self.flight, strict=True)]
        return *both, max(0, position - window + 1) if window else 0


def check_against_reference(a: Attention, layer):
    config, window = a.config, a.config.window(layer)
    group = config.num_attention_heads // config.num_key_value_heads
    # One mask over history and all rows in flight: row r sees its ancestors.
    history = np.arange(max(0, a.length - a.slots), a.length)
    keys, values = (jnp.asarray(wide(np.concatenate([kept[:, history % a.slots], flight[:, :len(a.parents)]], axis=1)))
                    for kept, flight in zip(a.kept, a.flight, strict=True))
    positions = a.length + a.depth
    mask = np.zeros((len(a.parents), keys.shape[1]), bool)
    for row in range(len(a.parents)):
        mask[row, :len(history)] = True
        mask[row, len(history) + np.asarray(a.ancestors(row))] = True
    if window:
        mask &= np.concatenate([history, positions])[None] > positions[:, None] - window
    assert group > 1
    out = CANON.round("attention", ref_attention.attend(jnp.asarray(heads_last(a.q)), keys, values, jnp.asarray(mask),
                                                        config, CANON))
    gate = jnp.asarray(heads_last(a.gate))
    want = CANON.round("gated_output", ref_norms.rms(out, config.rms_norm_eps) * jax.nn.sigmoid(gate))
    assert_near(a.run(layer), want, 2.0**-6, rounded=True)


@pytest.mark.parametrize("length", BORDERS)
def test_attention_full(length):
    """A tree of 16 rows behind so many positions."""
    a = Attention(TWO, length, max(length, 1), TREE, seed=length)
    check_against_reference(a, 1)


@pytest.mark.parametrize("window, slots", [(8, 8), (24, 24), (256, 256), (300, 300), (300, 400), (1200, 1200)])
@pytest.mark.parametrize("offset", [-1, 0, 1, 250])
def test_attention_window(window, slots, offset):
    """Rings that are not full yet, just full, and wrapped; windows shorter than the tree and across borders."""
    config = replace(TWO, sliding_window=window)
    a = Attention(config, window + offset, slots, TREE, seed=window + offset)
    check_against_reference(a, 0)


def attend_in_order(a: Attention, row, window, shift=0):
    """Row `row` [n, c] in NumPy; with `shift`, as if all borders lay so many positions earlier."""
    math, config = math_h(), a.config
    keys, values, first = a.seen_by(row, window)
    pad = np.zeros((config.num_key_value_heads, shift, config.head_dim), F32)
    keys, values = (np.concatenate([pad, x], axis=1) for x in (keys, values))
    position = a.length + int(a.depth[row]) + shift
    q, gate = (heads_last(x)[row].reshape(config.num_key_value_heads, -1, config.head_dim) for x in (a.q, a.gate))
    out = np.stack([attention_in_order(q[h], keys[h], values[h], first + shift, position, config.attention_scale,
                                       lambda s: math("exp", s)) for h in range(config.num_key_value_heads)])
    out = round_bf16(rms_norm(out, config.rms_norm_eps, slices=1) * math("sigmoid", gate))
    return out.reshape(-1, config.head_dim)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [0, 300])
def test_attention_in_the_stated_order(head_dim, window):
    """Bit for bit: blocks of 16, chunks of 256, groups of 4 chunks, all at absolute positions, each from +0."""
    config = replace(TWO, head_dim=head_dim, qk_scale_factor=2.5 * head_dim**0.5 / 8, sliding_window=window or 8)
    for length, parents in ((5, TREE), (250, TREE[:9]), (1021, TREE), (2100, (-1, 0, 0))):
        for scale, cancel in ((1.0, False), (0.0, True)):
            a = Attention(config, length, window or length, parents, length, scale, cancel)
            got = a.run(0 if window else 1)
            for row in range(len(parents)):
                assert_same_bits(got[row], attend_in_order(a, row, window))


@pytest.mark.parametrize("window", [0, 1500])
def test_attention_would_show_another_order(window):
    a = Attention(replace(TWO, sliding_window=window or 8), 3000, window or 3000, (-1,), scale=0.0, cancel=True)
    got = a.run(0 if window else 1)[0]
    assert_same_bits(got, attend_in_order(a, 0, window))
    for shift in (1, 16, 256):  # borders of everything, of chunks and groups, of groups
        with pytest.raises(AssertionError, match="elements differ"):
            assert_same_bits(got, attend_in_order(a, 0, window, shift))


@configs
def test_attn_out(config):
    model = model_of(config)
    o = random_bf16(np.random.default_rng(1), (config.num_attention_heads, ROWS, config.head_dim))
    got = Call(config, DecodeConfig()).attn_out(0, jnp.asarray(o), model.packed["layers"][0])
    x = jnp.asarray(heads_last(o).reshape(ROWS, -1))
    want = CANON.round("o_proj", ref_attention.project(x, model.table["layers"][0]["o_proj"], CANON))
    assert_gemm(wide(whole(got)), want)


def test_angles():
    """Products of positions and frequencies round as in the reference; the rest is right in float32."""
    config = replace(TWO, layer_types=(SLIDING, FULL), layer_rope_theta=(5e5, 1e4))
    positions = np.array([0, 1, 2, 7, 100, 4095, 65537, 1048575], np.int32)
    got = np.asarray(Call(config, DecodeConfig()).angles(jnp.asarray(positions)))
    assert thetas(config) == [1e4, 5e5]
    angle = positions.astype(F32)[:, None] * inverse_frequencies(config)[:, None]
    want = np.stack([np.cos(angle.astype(np.float64)), np.sin(angle.astype(np.float64))], axis=2)
    assert (np.abs(got - want) <= 2.0**-24).all()


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


def of_pairs(x_et, ids_tj, per_pair=False):
    """[e, rows, n] -> [t * j, n]: each (row, slot)'s expert; rows are t, or t * j with `per_pair`."""
    ids = np.asarray(ids_tj).reshape(-1)
    rows = np.arange(len(ids)) if per_pair else np.arange(len(ids)) // ids_tj.shape[1]
    return np.asarray(x_et)[ids, rows]


@partial(jax.jit, static_argnames=("mode",))
def reference_up(h, p, mode):
    """Inner activations of every expert for every row, [e, t, f], before they are rounded or quantised."""
    leaves = {k: v for k, v in p.items() if k.startswith("gate_up") and "input" not in k}
    axes = {k: 0 if k.endswith("_global") else 1 for k in leaves}

    def one(w):
        if "gate_up_scale" not in w:
            gate, up = ref_experts._gate_up(h, w["gate_up"], CANON)
            return jax.nn.silu(gate) * up
        x, scale = ref_experts._quantised(h, mode, p["gate_up_input_scale"].max())
        gate, up = ref_experts._gate_up(x, nvfp4.grid(w["gate_up"], w["gate_up_scale"]), CANON)
        return jax.nn.silu(gate * (scale * w["gate_up_global"][0])) * (up * (scale * w["gate_up_global"][1]))

    return jax.vmap(one, in_axes=(axes,))(leaves)


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


# ------------------------------------------------------------------ order of sums over K


def sparse_rows(rng, t, k, chunk, ranges):
    """Rows [t, k] with one sum a range: large ones that cancel but for rounding, and small ones.

    A range holds 2 x in its first half and -x in its second: x in any order, and other bits of the whole sum if the
    range were cut in two.
    """
    length, parts = chunk // ranges, k // chunk * ranges
    x = rng.uniform(1, 2, (t, parts)) * np.exp2(rng.integers(0, 4, (t, parts)))
    large = rng.uniform(1, 2, (t, parts // 2)) * np.exp2(rng.integers(18, 26, (t, parts // 2)))
    for row, order in enumerate(rng.permuted(np.tile(np.arange(parts), (t, 1)), axis=1)):
        some = order[:2 * (parts // 3)].reshape(-1, 2)
        for pair, value in zip(some, large[row], strict=False):
            x[row, pair] = value, -value
    out, row, half = np.zeros((t, parts, length)), np.arange(t)[:, None], length // 2
    out[row, np.arange(parts), rng.integers(0, half, (t, parts))] = 2 * x
    out[row, np.arange(parts), rng.integers(half, length, (t, parts))] = -x
    return out.reshape(t, k).astype(BF16)


def weight_of_ones(rng, shape):
    """1 or 2 of either sign, the same along K, so that what cancels in x cancels."""
    return np.broadcast_to(rng.choice([-2, -1, 1, 2], (*shape[:-1], 1)), shape).astype(F32)


def assert_order_of_k(got, x, w, chunk, ranges):
    """got is the sum of x W^T in the stated order, and not in two others."""
    products = x[:, None, :] * w[None]
    assert_same_bits(got, round_bf16(k_sum(products, chunk, ranges)))
    backwards = round_bf16(k_sum(products[..., ::-1], chunk, ranges))
    assert (got != backwards).mean() > 0.02, "this test would see another order"


@pytest.mark.parametrize("width", [128, 512, 1024, 2048, 4096])
def test_order_of_k_dense(width):
    """Chunks of min(K, 1024) in ascending order, each 8 ranges in ascending order."""
    config, rng = replace(TWO, num_attention_heads=width // 16, head_dim=16), np.random.default_rng(width)
    host = random_host_params(replace(config, num_local_experts=8))
    w = weight_of_ones(rng, host["layers"][0]["o_proj"].shape)
    host["layers"][0]["o_proj"] = w.astype(BF16)
    model = model_from(config, host)
    x = sparse_rows(rng, ROWS, width, min(width, 1024), 8)
    o = jnp.asarray(x.reshape(ROWS, -1, 16).swapaxes(0, 1))
    got = wide(whole(Call(config, DecodeConfig()).attn_out(0, o, model.packed["layers"][0])))
    assert_order_of_k(got, wide(x), w.reshape(-1, width), min(width, 1024), 8)


@pytest.mark.parametrize("width", [128, 512, 1024, 2048])
@layers
def test_order_of_k_experts(width, layer):
    """BF16 as dense; NVFP4 in 8 ranges of K, or in ranges of 64 where those would cut a tile of 64."""
    config, rng = replace(TWO, moe_intermediate_size=width), np.random.default_rng(width)
    host = random_host_params(config)
    p, e = host["layers"][layer], config.num_local_experts
    w = weight_of_ones(rng, (8, e, config.moe_hidden_size // 8, width))
    if layer:
        codes = nvfp4.e2m1_encode(w)
        p["down"], p["down_scale"] = nvfp4.pack(codes), np.ones_like(p["down_scale"])
        p["down_global"] = np.ones_like(p["down_global"])
    else:
        p["down"] = w.astype(BF16)
    model = model_from(config, host)
    chunk, ranges = (min(width, 1024), 8) if not layer else (width, 8 if width % 512 == 0 else width // 64)
    k = config.num_experts_per_tok
    x = sparse_rows(rng, ROWS * k, width, chunk, max(ranges, 4))
    ids = np.stack([rng.permutation(e)[:k] for _ in range(ROWS)]).astype(np.int32)
    got = wide(whole(Call(config, DecodeConfig()).experts_down(layer, slices(x), jnp.asarray(ids),
                                                               model.packed["layers"][layer], jnp.int32(0))))
    rows = w.swapaxes(0, 1).reshape(e, -1, width)[ids.reshape(-1)]
    products = wide(x)[:, None, :] * rows
    if ranges == 2:  # two values in either: with the order inside a range, which is a platform's own
        exact = products.astype(np.float64).sum(-1)
        assert (np.abs(got - exact) <= 2.0**-20 * np.abs(products).max(-1) + 2.0**-8 * np.abs(exact)).all()
        return
    assert_same_bits(got, round_bf16(k_sum(products, chunk, ranges)))
    assert (got != round_bf16(k_sum(products[..., ::-1], chunk, ranges))).mean() > 0.02


def test_order_of_k_router():
    """The router in float32: as dense; scores show it through the sigmoid."""
    config, rng, math = replace(TWO, hidden_size=2048, output_multiplier=0.5), np.random.default_rng(8), math_h()
    host = random_host_params(config)
    p = host["layers"][0]
    p["router"] = weight_of_ones(rng, p["router"].shape) * F32(2.0**-6)
    for name in ("ffn_norm", "attention_residual_gate"):  # the same factor for every column
        p[name] = np.zeros_like(p[name])
    model = model_from(config, host)
    stream = wide(sparse_rows(rng, ROWS, 2048, 1024, 8))
    got, _, scores = Call(config, DecodeConfig()).pool(0, jnp.asarray(stream), slices(np.zeros_like(stream)),
                                                       model.packed["layers"][0])
    x = centred_norm(np.asarray(got), p["ffn_norm"], config.rms_norm_eps)
    logits = k_sum(x[:, None] * p["router"].reshape(-1, 2048), 1024, 8)
    assert_same_bits(whole(scores), math("sigmoid", logits * F32(0.5)))
    other = k_sum((x[:, None] * p["router"].reshape(-1, 2048))[..., ::-1], 1024, 8)
    assert (whole(scores) != math("sigmoid", other * F32(0.5))).any()


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
    # float32 sums of 128 to 2,048 terms in another order
    assert_near(whole(raw), want, 2.0**-19)
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

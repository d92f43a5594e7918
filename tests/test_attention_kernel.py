"""The attention phases of the CPU twin against `reference`: projections, stored rows, windows, trees; and the bits of
the stated order of blocks, chunks and groups."""

from dataclasses import replace

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
    math_h,
    model_of,
    random_bf16,
    rms_norm,
    round_bf16,
    whole,
    wide,
)
from phase_inputs import (
    CANON,
    ROWS,
    assert_gemm,
    assert_near,
    configs,
    empty_keys,
    heads_last,
    layers,
    row_state,
    stream_of,
)

from musejax.cache import LayerCache
from musejax.config import FULL, SLIDING, DecodeConfig
from musejax.kernels.attributes import inverse_frequencies, thetas
from musejax.kernels.calls import Call
from musejax.kernels.forward import depths
from musejax.model import attention as ref_attention
from musejax.model import norms as ref_norms
from musejax.model import rope as ref_rope
from musejax.params import BF16


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

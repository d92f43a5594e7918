"""The phase targets of the CUDA library on the emulator (tests/emulator): each phase beside the CPU library from the
same input bits, and their chain beside the layer kernel bit for bit."""

from dataclasses import replace

import emulated
import numpy as np
import pytest
from emulated_phases import EmulatedCall, EmulatedTwins
from helpers import assert_same_bits
from kernel_inputs import SMALL, model_of, random_bf16, whole, wide
from phase_checks import check_layer, run_layer, start_of
from phase_inputs import assert_gemm
from test_layer_kernel import TREES, after_a_pass, tokens_of

from musejax.bench.layer import layout
from musejax.bench.phases import rank_layer
from musejax.cache import LayerCache
from musejax.config import MINI, NUM_SLICES, DecodeConfig
from musejax.kernels.calls import RowState
from musejax.nvfp4 import ACTIVATIONS

FEW_CHOICES = replace(MINI, num_hidden_layers=2, layer_types=(), layer_rope_theta=(), nvfp4_layers=(1,))
"""Two experts a row."""


def check(config, layer, t, length, mode="bf16", combine="ep(8)", how=(), **start):
    decode = DecodeConfig(activations=mode, combine=combine)
    twins = EmulatedTwins(config, decode, **dict(how))
    check_layer(twins.both, model_of(config), layer, start_of(twins.cpu, layer, t, length, **start), decode)


@pytest.mark.parametrize("rows", [1, 9, 16])
@pytest.mark.parametrize("layer, mode", [(0, "bf16"), *((1, mode) for mode in ACTIVATIONS)])
def test_phases(layer, mode, rows):
    check(SMALL, layer, rows, 40, mode, parents=TREES["random"][:rows], seed=rows)


@pytest.mark.parametrize("layer", [0, 2], ids=["window", "full"])
@pytest.mark.parametrize("length", [0, 16, 250, 1018])
def test_contexts(layer, length):
    """None stored, and the borders of blocks, chunks and groups; some rows accepted, some padding."""
    check(SMALL, layer, 16, length, parents=TREES["random"], valid=13, accepted=min(length, 6))


@pytest.mark.parametrize("mode", ACTIVATIONS[1:])
def test_padding_of_quantised_experts(mode):
    check(SMALL, 1, 16, 20, mode, valid=11)


def test_two_choices_and_flat_combine():
    check(FEW_CHOICES, 1, 9, 40, combine="flat")


# ------------------------------------------------------------------ the layer kernel, bit for bit


@pytest.mark.parametrize("mode, combine", [*((mode, "ep(8)") for mode in ACTIVATIONS), ("bf16", "flat")])
def test_chain_is_the_layer_kernel(mode, combine):
    model, decode, parents = model_of(SMALL), DecodeConfig(activations=mode, combine=combine), TREES["random"]
    cache, tokens, valid = after_a_pass(model, 250, [0, 1, 2]), tokens_of(16), 14
    want = emulated.run(model, cache, tokens, parents, valid, decode=decode)
    call = EmulatedCall(SMALL, decode, blocks=3, seed=1)
    length = int(cache.length)
    stream, cos_sin = emulated.embed(model, tokens, length, parents)
    state = np.array([length, valid, int(cache.accepted)], np.int32)
    rows = RowState(np.asarray(parents, np.int32), state, np.asarray(cache.path))
    for i, p in enumerate(model.packed["layers"]):
        stream, ids, stored, flight = run_layer(call, i, p, stream, cos_sin, rows, cache.layers[i], cache.flight[i])
        assert_same_bits(stream[:valid], want.taps[i, :valid])
        assert_same_bits(ids, want.ids[i])
        for x, y in zip((*stored, *flight), want.kept[i], strict=True):
            assert_same_bits(np.asarray(x).view(np.uint16), y)


def of_rank(p, rank):
    return {name: x if name == "small" else np.asarray(x)[rank:rank + 1] for name, x in p.items()}


@pytest.mark.parametrize("mode", ACTIVATIONS)
def test_eight_ranks_are_one(mode):
    """Phases of one slice at a time give the slices of the phases of all."""
    model, decode, layer, zero = model_of(SMALL), DecodeConfig(activations=mode), 1, np.int32(0)
    call, p = EmulatedCall(SMALL, decode), model.packed["layers"][layer]
    start = start_of(call, layer, 9, 40, parents=TREES["random"][:9], accepted=3)

    def each(run):
        """Results of all ranks, joined along their first axes."""
        parts = [run(r, of_rank(p, r)) for r in range(NUM_SLICES)]
        return [np.concatenate(x) for x in zip(*parts, strict=True)]

    def kept(r, arrays):
        return type(start.stored)(*(x[r:r + 1] for x in arrays))

    def flat(out):
        q, gate, stored, flight = out
        return q, gate, *stored, *flight

    q, gate, *keys = flat(call.attn_in(layer, start.stream, start.cos_sin, start.rows, p, start.stored, start.flight))
    got = each(lambda r, p: flat(call.attn_in(layer, start.stream, start.cos_sin, start.rows, p,
                                              kept(r, start.stored), kept(r, start.flight))))
    for x, y in zip(got, (q, gate, *keys), strict=True):
        assert_same_bits(x, y)
    stored, flight = keys[:2], keys[2:]
    o, *_ = call.attention(layer, q, gate, start.rows, type(start.stored)(*stored), type(start.flight)(*flight))
    heads = len(q) // NUM_SLICES
    [got] = each(lambda r, p: call.attention(layer, q[r * heads:(r + 1) * heads], gate[r * heads:(r + 1) * heads],
                                             start.rows, kept(r, stored), kept(r, flight))[:1])
    assert_same_bits(got, o)
    a = call.attn_out(layer, o, p)
    assert_same_bits(each(lambda r, p: [call.attn_out(layer, o, p)])[0], a)
    _, *pooled = call.pool(layer, start.stream, a, p)
    for x, y in zip(each(lambda r, p: call.pool(layer, start.stream, a, p)[1:]), pooled, strict=True):
        assert_same_bits(x, y)
    c, ids, weights = call.experts_up(layer, *pooled, start.rows, p, zero)
    [got] = each(lambda r, p: call.experts_up(layer, *pooled, start.rows, p, zero)[:1])
    assert_same_bits(got, c)
    y = call.experts_down(layer, c, ids, p, zero)
    assert_same_bits(each(lambda r, p: [call.experts_down(layer, c, ids, p, zero)])[0], y)
    m = call.combine(layer, y, ids, weights, p)
    assert_same_bits(each(lambda r, p: [call.unpool(layer, m, p)])[0], call.unpool(layer, m, p))


def test_looped_phases_are_the_looped_kernel():
    """What `bench layer --phases` compares: one slice whose results come back as those of all ranks, and whose gains
    are those of all ranks."""
    model, at, decode = model_of(SMALL), layout(SMALL), DecodeConfig()

    def with_equal_gains(small):
        small = np.array(small)
        for name, width in (("post_expert_norm", SMALL.moe_hidden_size), ("post_ffn_norm", SMALL.hidden_size)):
            begin, part = at[f"small.{name}"], width // NUM_SLICES
            small[begin:begin + width] = np.tile(small[begin:begin + part], NUM_SLICES)
        return small

    layers = [{**p, "small": with_equal_gains(p["small"])} for p in model.packed["layers"]]
    model = replace(model, packed={**model.packed, "layers": layers})
    cache, tokens, parents = after_a_pass(model, 40, [0, 1, 2]), tokens_of(9), TREES["chain"][:9]
    want = emulated.run(model, cache, tokens, parents, slices=1, ranks=1)
    call, length = EmulatedCall(SMALL, decode), int(cache.length)
    stream, cos_sin = emulated.embed(model, tokens, length, parents)
    state = np.array([length, 9, int(cache.accepted)], np.int32)
    rows = RowState(np.asarray(parents, np.int32), state, np.asarray(cache.path))
    for i, p in enumerate(layers):
        kept = (LayerCache(*(np.asarray(x)[:1] for x in arrays)) for arrays in (cache.layers[i], cache.flight[i]))
        stream, ids, _, _ = rank_layer(call, i, of_rank(p, 0), stream, cos_sin, rows, *kept)
        assert_same_bits(stream, want.taps[i])
        assert_same_bits(ids, want.ids[i])


# ------------------------------------------------------------------ the checks see faults


def test_blocks_and_turns():
    for how in (dict(blocks=1), dict(blocks=7, seed=2)):
        check(SMALL, 1, 5, 30, how=how)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_wrong_weight_is_seen(name):
    model, decode = model_of(SMALL), DecodeConfig()
    call, p = EmulatedCall(SMALL, decode), model.packed["layers"][1]
    start = start_of(call, 1, 4, 20)
    want = run_layer(call, 1, p, start.stream, start.cos_sin, start.rows, start.stored, start.flight)
    wrong = np.array(p[name])
    wrong[3, ..., 1001] ^= 0x40
    got = run_layer(call, 1, {**p, name: wrong}, start.stream, start.cos_sin, start.rows, start.stored, start.flight)
    with pytest.raises(AssertionError):
        assert_same_bits(got[0], want[0])


def test_a_wait_that_cannot_end_is_reported():
    """A unit that nobody runs; the next launch works."""
    model = model_of(SMALL)
    m = random_bf16(np.random.default_rng(0), (2, SMALL.moe_hidden_size))
    with pytest.raises(emulated.WaitError, match=r"block . warp .* wanted"):
        EmulatedCall(SMALL, DecodeConfig(), lost=1, budget_ms=5.0).unpool(1, m, model.packed["layers"][1])
    twins = EmulatedTwins(SMALL, DecodeConfig())
    want, got = twins.both("unpool", 1, m, model.packed["layers"][1])
    assert_gemm(whole(wide(got)), whole(wide(want)))

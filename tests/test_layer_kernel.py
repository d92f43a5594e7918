"""The CUDA layer kernel on the emulator (tests/emulator): against the CPU twin, and against itself bit for bit. And
that a wait that cannot end is reported."""

import ctypes
import re
from dataclasses import replace

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import F32, SMALL, accepted, model_of, one_pass, random_cache

from musejax.config import DecodeConfig
from musejax.kernels.cache import GAVE_UP
from musejax.kernels.schedule import GEMMS, Shape, unit_counts
from musejax.nvfp4 import ACTIVATIONS

MAX_LENGTH = 1100
DEEP = replace(SMALL, num_attention_heads=32, moe_hidden_size=1024, moe_intermediate_size=1024, num_hidden_layers=2,
               layer_types=(), layer_rope_theta=(), nvfp4_layers=(1,))
"""Two chunks of K in one dense GEMM (out); expert K of 1024, whose NVFP4 ranges are loaded in two parts."""
TREES = {
    "chain": tuple(range(-1, 15)),
    "star": (-1,) + (0,) * 15,
    "two chains": (-1, -1, *range(14)),
    "random": tuple(int(np.random.default_rng(1).integers(-1, i)) for i in range(16)),
}
RESIDUAL_BOUND = 2.0**-6  # of RMS(row): design section 7, from the same input bits
MARGIN = 1e-4


def tokens_of(t, seed=0):
    return np.random.default_rng(seed).integers(0, SMALL.vocab_size, t).astype(np.int32)


def after_a_pass(model, length, path, seed=0):
    """A cache with rows in flight, those of `path` accepted."""
    cache = random_cache(model.config, length, MAX_LENGTH, seed=seed)
    return accepted(one_pass(model, cache, tokens_of(16, 50 + seed)).cache, path)


def assert_same_result(a, b):
    for name in ("stream", "ids", "taps"):
        assert_same_bits(getattr(a, name), getattr(b, name))
    for x, y in zip(jax.tree.leaves(a.kept), jax.tree.leaves(b.kept), strict=True):
        assert_same_bits(x, y)


def check_against_twin(model, cache, tokens, parents=None, **how):
    """Each layer from the twin's bits before it; returns the worst error over RMS(row)."""
    twin = one_pass(model, cache, tokens, parents, trace=True, decode=how.get("decode"))
    worst = 0.0
    for i in range(model.config.num_hidden_layers):
        start = emulated.Result(np.array(twin.streams[i]), None, None, np.zeros((16, len(tokens), 64), np.uint16),
                                np.zeros((16, len(tokens), 64), np.uint16),
                                [[np.array(x).view(np.uint16) for x in (*cache.layers[i], *cache.flight[i])]])
        got = emulated.run(model, cache, tokens, parents, layers=range(i, i + 1), start=start, **how)
        want = np.array(twin.streams[i + 1])
        same_route = (np.sort(got.ids[0], axis=-1) == np.sort(np.asarray(twin.expert_ids[i]), axis=-1)).all(-1)
        assert same_route.mean() >= 0.9, f"layer {i}: rows with other experts: {np.flatnonzero(~same_route)}"
        error = np.abs(got.stream - want).max(-1) / np.sqrt((want.astype(np.float64)**2).mean(-1))
        worst = max(worst, float(error[same_route].max()))
        for name, x, y in zip(("keys", "values", "flight keys", "flight values"), got.kept[0],
                              (*twin.cache.layers[i], *twin.cache.flight[i]), strict=True):
            x, y = (np.asarray(v).view(np.uint16).astype(np.uint32) << 16 for v in (x, np.asarray(y)))
            x, y = (np.ascontiguousarray(v).view(F32) for v in (x, y))
            assert np.abs(x - y).max() <= 2.0**-5, f"layer {i}, {name}: {np.abs(x - y).max()}"
    return worst


@pytest.mark.parametrize("mode", ACTIVATIONS)
@pytest.mark.parametrize("length", [0, 9, 250, 1018])
def test_against_the_twin(length, mode):
    model = model_of(SMALL)
    cache = random_cache(SMALL, length, MAX_LENGTH)
    worst = check_against_twin(model, cache, tokens_of(16, length), TREES["random"],
                               decode=DecodeConfig(activations=mode))
    assert worst <= RESIDUAL_BOUND


@pytest.mark.parametrize("count", [1, 5, 16])
def test_accepted_rows_are_seen_and_stored(count):
    model = model_of(SMALL)
    cache = after_a_pass(model, 270, range(count))
    assert check_against_twin(model, cache, tokens_of(3)) <= RESIDUAL_BOUND


def test_flat_combine():
    model = model_of(SMALL)
    worst = check_against_twin(model, random_cache(SMALL, 40, MAX_LENGTH), tokens_of(16),
                               decode=DecodeConfig(combine="flat"))
    assert worst <= RESIDUAL_BOUND


def after_alone(cache, result):
    """The cache after a pass of one row that the emulator ran, the row accepted."""
    def arrays(like, kept):
        return type(like)(*(jax.device_put(x.view(np.asarray(old).dtype), old.sharding)
                            for x, old in zip(kept, like, strict=True)))

    layers = tuple(arrays(like, kept[:2]) for like, kept in zip(cache.layers, result.kept, strict=True))
    flight = tuple(arrays(like, kept[2:]) for like, kept in zip(cache.flight, result.kept, strict=True))
    return accepted(cache._replace(layers=layers, flight=flight, accepted=jnp.int32(0)), [0])


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("length", [0, 250, 1018])
def test_rows_alone(tree, length):
    """Row i of a tree has the bits of its token decoded alone after its ancestors, each in a pass of its own."""
    model, tokens, parents = model_of(SMALL), tokens_of(16, 3), TREES[tree]
    cache = random_cache(SMALL, length, MAX_LENGTH, seed=1)
    whole = emulated.run(model, cache, tokens, parents)
    after = {-1: cache}
    for i in range(16):
        alone = emulated.run(model, after[parents[i]], tokens[i:i + 1])
        assert_same_bits(whole.stream[i:i + 1], alone.stream)
        assert_same_bits(whole.ids[:, i:i + 1], alone.ids)
        after[i] = after_alone(after[parents[i]], alone)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 15])
def test_row_counts_and_padding(rows):
    model, tokens = model_of(SMALL), tokens_of(16)
    cache = random_cache(SMALL, 250, MAX_LENGTH)
    full = emulated.run(model, cache, tokens)
    few = emulated.run(model, cache, tokens[:rows])
    padded = emulated.run(model, cache, tokens, valid=rows)
    assert_same_bits(full.stream[:rows], few.stream)
    assert_same_bits(full.stream[:rows], padded.stream[:rows])
    assert (padded.ids[:, rows:] == SMALL.num_local_experts).all()


@pytest.mark.parametrize("blocks, seed", [(1, 0), (3, 1), (7, 2), (12, 3)])
def test_blocks_and_turns(blocks, seed):
    model, tokens = model_of(SMALL), tokens_of(16)
    cache = after_a_pass(model, 250, [0, 1, 2])
    one = emulated.run(model, cache, tokens, TREES["random"])
    other = emulated.run(model, cache, tokens, TREES["random"], blocks=blocks, seed=seed)
    assert_same_result(one, other)


@pytest.mark.parametrize("blocks, seed", [(4, 1), (10, 2), (10, 3)])
def test_rough_weather(blocks, seed):
    """Whatever is slow or late; with 10 SMs two own nothing of the residual stream."""
    model, tokens = model_of(SMALL), tokens_of(16)
    cache = after_a_pass(model, 250, [0, 1, 2])
    calm = emulated.run(model, cache, tokens, TREES["random"])
    rough = emulated.run(model, cache, tokens, TREES["random"], blocks=blocks, seed=seed, rough=True)
    assert_same_result(calm, rough)


def test_rough_weather_sees_what_calm_does_not():
    """Copies that count as come when they are asked for."""
    model, tokens = model_of(SMALL), tokens_of(16)
    cache = random_cache(SMALL, 40, MAX_LENGTH)
    right = emulated.run(model, cache, tokens)
    emulated.library().EmulateEarlyCounts.argtypes = [ctypes.c_bool]
    emulated.library().EmulateEarlyCounts(True)
    try:
        assert_same_result(right, emulated.run(model, cache, tokens, seed=1))
        with pytest.raises(AssertionError):
            assert_same_result(right, emulated.run(model, cache, tokens, seed=1, rough=True))
    finally:
        emulated.library().EmulateEarlyCounts(False)


@pytest.mark.slow
def test_deep():
    """Against the twin; and with spans of dense units that begin and end inside chunks of K, in rough weather."""
    model, tokens, sms = model_of(DEEP), tokens_of(16), 5
    cache = after_a_pass(model, 250, [0, 1, 2])
    assert check_against_twin(model, cache, tokens, TREES["random"]) <= RESIDUAL_BOUND
    calm = emulated.run(model, cache, tokens, TREES["random"])
    counts = unit_counts(Shape.of(DEEP), 8)
    even = [[[counts[gemm] * i // sms, counts[gemm] * (i + 1) // sms] for gemm in GEMMS] for i in range(sms)]
    assert any(begin < counts["out"] // 2 < end for (_, (begin, end), *_) in even), "a span of both chunks"
    rough = emulated.run(model, cache, tokens, TREES["random"], blocks=sms, schedule=even, seed=2, rough=True)
    assert_same_result(calm, rough)


@pytest.mark.parametrize("mode", ACTIVATIONS)
def test_one_rank_is_several(mode):
    model, tokens, decode = model_of(SMALL), tokens_of(16), DecodeConfig(activations=mode)
    cache = after_a_pass(model, 250, [0, 1, 2])
    one = emulated.run(model, cache, tokens, TREES["random"], decode=decode)
    for ranks in (2, 4, 8):
        several = emulated.run(model, cache, tokens, TREES["random"], decode=decode, slices=8 // ranks, ranks=ranks,
                               blocks=2, seed=1)
        assert_same_result(one, several)


@pytest.mark.parametrize("cut", [1, 2])
def test_launches(cut):
    """The stack in one launch, or cut after a layer's residual and next heads."""
    model, tokens = model_of(SMALL), tokens_of(16)
    cache = after_a_pass(model, 250, [0, 1, 2])
    whole = emulated.run(model, cache, tokens, TREES["random"])
    head = emulated.run(model, cache, tokens, TREES["random"], layers=range(cut + 1), last=False)
    rest = emulated.run(model, cache, tokens, TREES["random"], layers=range(cut, 3), first=False,
                        start=head._replace(kept=[head.kept[cut], *([np.asarray(x).view(np.uint16).copy() for x in
                                            (*cache.layers[i], *cache.flight[i])] for i in range(cut + 1, 3))]))
    assert_same_bits(whole.stream, rest.stream)
    assert_same_bits(whole.ids, np.concatenate([head.ids[:cut], rest.ids]))
    for i, kept in enumerate([*head.kept[:cut], *rest.kept]):
        for x, y in zip(kept, whole.kept[i], strict=True):
            assert_same_bits(x, y)


def test_the_comparison_sees_a_wrong_weight():
    model, tokens = model_of(SMALL), tokens_of(16)
    cache = random_cache(SMALL, 40, MAX_LENGTH)

    def change(layer, arrays):
        if layer == 1:
            arrays["dense"] = arrays["dense"].copy()
            arrays["dense"][3, 1001] ^= 0x40

    with pytest.raises(AssertionError):
        assert_same_result(emulated.run(model, cache, tokens), emulated.run(model, cache, tokens, change=change))


def test_a_wait_that_cannot_end_is_reported():
    """Rank 1 of 8 does not run: rank 0 says where it waited, and the next launch works."""
    model, tokens = model_of(replace(SMALL)), tokens_of(2)
    cache = random_cache(SMALL, 40, MAX_LENGTH)
    emulated.library().EmulateOnlyRank.argtypes = [ctypes.c_int]
    emulated.library().EmulateOnlyRank(0)
    with pytest.raises(emulated.WaitError, match=r"rank 0 .* layer 0 phase") as error:
        emulated.run(model, cache, tokens, slices=1, ranks=8, blocks=2, budget_ms=5.0)
    emulated.library().EmulateOnlyRank(-1)
    assert error.value.accepted == [GAVE_UP] + [0] * 7, "the rank that gave up marks its state"
    assert np.isfinite(emulated.run(model, cache, tokens, slices=1, ranks=8, blocks=2).stream).all()


TWO = {"slices": 4, "ranks": 2, "blocks": 2}
REFUSED = r"rank {} block 0 warp 0 layer 0 phase -1 "


def test_a_stale_epoch_is_reported():
    """Two ranks, one of them 1000 epochs ahead: no tag fits any more. Both give up, and a new pass is right."""
    model, tokens = model_of(SMALL), tokens_of(2)
    cache = after_a_pass(model, 40, [0, 1])
    want = emulated.run(model, cache, tokens, **TWO)
    shifted = emulated.library().EmulateShiftEpochs(1, ctypes.c_uint32(1000))
    assert shifted >= 1
    with pytest.raises(emulated.WaitError, match=r"layer 0 phase \d+ wanted") as error:
        emulated.run(model, cache, tokens, budget_ms=5.0, **TWO)
    assert error.value.accepted == [GAVE_UP, GAVE_UP]
    assert_same_result(emulated.run(model, cache, tokens, **TWO), want)


def test_epochs_that_agree_are_no_error():
    """Both ranks 1000 epochs ahead: the comparison above sees that they differ, not that they are new."""
    model, tokens = model_of(SMALL), tokens_of(2)
    cache = random_cache(SMALL, 40, MAX_LENGTH)
    want = emulated.run(model, cache, tokens, **TWO)
    for rank in (0, 1):
        emulated.library().EmulateShiftEpochs(rank, ctypes.c_uint32(1000))
    assert_same_result(emulated.run(model, cache, tokens, **TWO), want)


def refused(model, cache, tokens, accepted, **how):
    """The WaitError of a launch whose ranks' states say so many accepted rows."""
    with pytest.raises(emulated.WaitError) as error:
        emulated.run(model, cache, tokens, accepted=accepted, budget_ms=5.0, **how)
    return error.value


def test_the_state_of_a_pass_that_gave_up_is_refused():
    """At once: nothing is run, and the state stays refused; a launch of another state is right."""
    model, tokens = model_of(SMALL), tokens_of(2)
    cache = random_cache(SMALL, 40, MAX_LENGTH)
    want = emulated.run(model, cache, tokens)
    stream, _ = emulated.embed(model, tokens, 40, [-1, 0])
    for count in (GAVE_UP, -7):
        error = refused(model, cache, tokens, [count])
        assert re.match(REFUSED.format(0), str(error)) and error.accepted == [GAVE_UP]
        assert_same_bits(error.streams[0], stream)
    assert_same_result(emulated.run(model, cache, tokens), want)


def test_a_rank_that_refuses_makes_the_others_give_up():
    """It publishes nothing that they could take for a value; and its epochs go on as theirs do."""
    model, tokens = model_of(SMALL), tokens_of(2)
    cache = random_cache(SMALL, 40, MAX_LENGTH)
    error = refused(model, cache, tokens, [0, GAVE_UP], **TWO)
    assert error.accepted == [GAVE_UP, GAVE_UP]
    want = emulated.run(model, cache, tokens, **TWO)
    emulated.library().EmulateKeepWorkspaces.argtypes = [ctypes.c_bool]
    emulated.library().EmulateKeepWorkspaces(True)
    try:
        refused(model, cache, tokens, [0, GAVE_UP], **TWO)
        assert_same_result(emulated.run(model, cache, tokens, **TWO), want)
    finally:
        emulated.library().EmulateKeepWorkspaces(False)


def test_nothing_runs_after_somebody_has_given_up():
    """Whatever launch it was, on the same device: its state would be taken for one that is well."""
    model, tokens = model_of(SMALL), tokens_of(2)
    cache = random_cache(SMALL, 40, MAX_LENGTH)
    emulated.library().EmulateGivenUp.argtypes = [ctypes.c_bool]
    emulated.library().EmulateGivenUp(True)
    try:
        error = refused(model, cache, tokens, [0, 0], **TWO)
        assert re.match(REFUSED.format(r"\d"), str(error)) and error.accepted == [GAVE_UP, GAVE_UP]
    finally:
        emulated.library().EmulateGivenUp(False)
    assert np.isfinite(emulated.run(model, cache, tokens, **TWO).stream).all()

"""In which form a drafter is loaded, where it lies, and that steps with it have the same bits on several devices."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import musejax
from musejax import ffi
from musejax.config import DecodeConfig
from musejax.numerics import EXACT
from musejax.paths import nano_drafter_path
from musejax.speculation.config import NANO_DRAFTER
from musejax.speculation.draft_kernels import POLICY, kernel_problems
from musejax.speculation.packing import is_packed
from musejax.speculation.params import init_params, save_drafter
from musejax.speculation.step import Speculation

PROMPT = [7, 300, 12, 12, 900, 4, 88, 1023, 5, 61, 9, 2000, 17, 3, 44, 45, 46, 300, 12, 901]


def steps(model, count):
    """Tokens of each of `count` steps, and the drafter's cache after them."""
    state, out = model.start_speculative(PROMPT, 128), []
    for _ in range(count):
        state, made = model.step_speculative(state)
        out.append(np.asarray(made.tokens)[:int(made.count)].tolist())
    return out, state.draft


@pytest.fixture(scope="module")
def one():
    return musejax.load(drafter=nano_drafter_path())


def test_packed_for_the_kernels(one):
    assert is_packed(one.drafter) and one.drafter["layers"][0]["dense"].shape[0] == 8
    _, cache = steps(one, 1)
    assert cache.keys.dtype == jnp.bfloat16 and cache.keys.shape == (5, 8, 128, 64)


@pytest.mark.parametrize("devices", [2, 8])
def test_devices(one, devices):
    """Sharded over the devices; guesses, accepted runs and the cache bit for bit those of one device."""
    model = musejax.load(drafter=nano_drafter_path(), devices=devices)
    dense = model.drafter["layers"][0]["dense"]
    assert dense.sharding.shard_shape(dense.shape)[0] == 8 // devices
    (want, kept), (got, cache) = steps(one, 4), steps(model, 4)
    assert got == want
    assert cache.keys.sharding.shard_shape(cache.keys.shape)[1] == 8 // devices
    for a, b in zip(cache, kept, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("how", [{"decode": DecodeConfig(implementation="reference")},
                                 {"speculation": Speculation(policy=EXACT)}], ids=["reference", "exact"])
def test_as_published_for_plain_jax(how):
    model = musejax.load(drafter=nano_drafter_path(), **how)
    assert not is_packed(model.drafter) and model.drafter["fc"].shape == (128, 384)


def test_reasons_against_the_kernels():
    assert kernel_problems(NANO_DRAFTER, POLICY, "cpu") == []
    reasons = kernel_problems(replace(NANO_DRAFTER, selector_rank=24), EXACT, "cpu")
    assert len(reasons) == 2 and "selector_rank" in reasons[0] and "policy" in reasons[1]


def test_limits_of_the_cuda_kernels(monkeypatch):
    many = replace(NANO_DRAFTER, selector_top_k=24, num_hidden_layers=17)
    assert kernel_problems(many, POLICY, "cpu") == []
    monkeypatch.setattr(ffi, "library", lambda platform: SimpleNamespace(targets=lambda: {"musejax_draft": None}))
    for platform in ("cuda", "gpu"):
        assert kernel_problems(NANO_DRAFTER, POLICY, platform) == []
        candidates, layers = kernel_problems(many, POLICY, platform)
        assert "at most 16 candidates, what a warp keeps, got 24" in candidates and "at most 16 layers" in layers
        ids, groups = kernel_problems(replace(NANO_DRAFTER, vocab_size=2**19 + 8, conv_group_size=1), POLICY, platform)
        assert "vocab_size: expected at most 524288" in ids and "conv_group_size: expected an even number" in groups
    monkeypatch.setattr(ffi, "library", lambda platform: SimpleNamespace(targets=dict))
    assert "the drafter's targets, got cuda" in kernel_problems(NANO_DRAFTER, POLICY, "cuda")[0]


def test_sizes_without_a_packed_form_run_in_plain_jax(tmp_path):
    """A selector rank that fills no vector: the text is still that of plain decoding."""
    config = replace(NANO_DRAFTER, selector_rank=24, num_hidden_layers=1)
    params = init_params(config, jax.random.key(0))
    model = musejax.load(drafter=save_drafter(tmp_path / "odd", params, config))
    assert model.decode.implementation == "megakernel" and not is_packed(model.drafter)
    got = [token for run in steps(model, 3)[0] for token in run]
    state, want = model.start(PROMPT, 128), []
    for _ in got:
        state = model.step(state)
        want.append(int(state.token))
    assert got == want

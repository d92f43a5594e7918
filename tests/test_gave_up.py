"""The cache of a pass that gave up: whatever is done with it, every further pass refuses it, with a message; and all of
several devices know of it."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_inputs import SMALL, model_of, one_pass, random_cache, tokens_of

from musejax import decode as steps
from musejax import ffi
from musejax.config import DecodeConfig
from musejax.kernels import cache as kc
from musejax.kernels import forward as kf
from musejax.kernels.calls import Call
from musejax.kernels.prefill import append_reference
from musejax.sampling import Sampler, Sampling
from musejax.sharding import make_mesh
from musejax.speculation import step as speculative
from musejax.speculation.step import SpecParams, Speculation
from musejax.speculation.tree import chain_tree

DECODE = DecodeConfig(implementation="megakernel")
HOW = {"config": SMALL, "decode": DECODE}
MESSAGE = (r"{}: expected at least 0 accepted rows, got -1, the state of a pass that gave up: start anew from the "
           r"prompt \(argument state\[2\]\)")
LENGTH, MAX_LENGTH = 20, 64


def given_up(cache):
    return jax.jit(kc.give_up)(cache, True)


@pytest.fixture
def cache():
    return random_cache(SMALL, LENGTH, MAX_LENGTH)


@pytest.fixture
def packed():
    return model_of(SMALL).packed


def refused(call, operation="layers"):
    """JAX raises a ValueError if the call has failed before it returns, else a RuntimeError for what it returned."""
    with pytest.raises((RuntimeError, ValueError), match=MESSAGE.format(operation)) as error:
        jax.block_until_ready(call())
    assert ffi._GAVE_UP in str(error.value), "the words by which raise_wait_error knows it"


# ------------------------------------------------------------------ the mark


def test_the_mark_stays(cache, packed):
    lost = given_up(cache)
    after = [kc.accept(lost, jnp.arange(16), 3), kc.flush(lost), kc.none_accepted(lost), kc.give_up(lost, False),
             append_reference(packed, lost, jnp.zeros(2, jnp.int32), 2, **HOW)[1]]
    assert [int(x.accepted) for x in after] == [kc.GAVE_UP] * 5
    assert int(after[0].length) == LENGTH + 3, "positions and loops go on as on other devices"


def test_nothing_is_marked_without_cause(cache):
    after = kc.accept(cache, jnp.arange(16), 3)
    assert [int(x.accepted) for x in (after, kc.give_up(after, False), kc.none_accepted(after))] == [3, 3, 0]


# ------------------------------------------------------------------ passes


@pytest.mark.parametrize("devices", [1, 2])
def test_a_pass_is_refused(cache, devices):
    """On one device and on several; another cache is right before and after."""
    model, mesh = model_of(SMALL), make_mesh(devices) if devices > 1 else None
    if mesh is not None:
        cache = jax.device_put(cache, jax.tree.map(partial(NamedSharding, mesh), kf.cache_specs(cache)))
    want = one_pass(model, cache, tokens_of(SMALL, 4), mesh=mesh)
    for _ in range(2):
        refused(lambda: one_pass(model, given_up(cache), tokens_of(SMALL, 4), mesh=mesh),
                "layers" if devices == 1 else "attn_in")
    got = one_pass(model, cache, tokens_of(SMALL, 4), mesh=mesh)
    assert_same_bits(got.stream, want.stream)
    assert int(got.cache.accepted) == 0


def test_a_step_is_refused(packed):
    state = steps.start(packed, [3, 1, 4], MAX_LENGTH, **HOW)
    refused(lambda: steps.jit_decode_step(packed, state._replace(cache=given_up(state.cache)), **HOW))


def test_a_chunk_of_a_prompt_is_refused(packed, cache):
    chunk = jnp.zeros(16, jnp.int32), jnp.int32(5)
    refused(lambda: steps.jit_prefill_chunk(packed, given_up(cache), *chunk, **HOW))


def test_a_speculative_step_is_refused(packed):
    params, how = SpecParams(packed, None), {**HOW, "speculation": Speculation()}
    state = speculative.start(params, [3, 1, 4], MAX_LENGTH, **how)
    refused(lambda: speculative.jit_decode_step(params, state._replace(cache=given_up(state.cache)), **how))
    state = speculative.start(params, [3, 1, 4], MAX_LENGTH, **how)
    refused(lambda: speculative.jit_run_steps(params, state._replace(cache=given_up(state.cache)), jnp.int32(4), room=4,
                                              stop_ids=(), **how))


# ------------------------------------------------------------------ several devices


@pytest.fixture
def head_anywhere(monkeypatch):
    """As on a GPU: the LM head takes any number for its first slice. The CPU's refuses what is none."""
    plain, width = Call.head, SMALL.vocab_size // 8

    def head(self, stream, final_norm, lm_head, begin, **how):
        raw, best, ids = plain(self, stream, final_norm, lm_head, jnp.maximum(begin, 0), **how)
        return raw, best, ids + jnp.minimum(begin, 0) * width

    plain_sums = Call.head_sums
    monkeypatch.setattr(Call, "head", head)
    monkeypatch.setattr(Call, "head_sums", lambda self, raw, largest, begin, **how:
                        plain_sums(self, raw, largest, jnp.maximum(begin, 0), **how))


@pytest.mark.parametrize("sampler", [None, Sampling(temperature=0.7)])
@pytest.mark.parametrize("lost", [(), (0,), (1,), (0, 1)])
def test_devices_agree(cache, head_anywhere, lost, sampler):
    """Whichever device's copy of the cache says that the pass gave up."""
    model, mesh = model_of(SMALL), make_mesh(2)
    cache = jax.device_put(cache, jax.tree.map(partial(NamedSharding, mesh), kf.cache_specs(cache)))
    marks = [jax.device_put(jnp.int32(kc.GAVE_UP if i in lost else 0), d) for i, d in enumerate(mesh.devices.flat)]
    mark = jax.make_array_from_single_device_arrays((), NamedSharding(mesh, P()), marks)
    stream = np.random.default_rng(0).standard_normal((3, SMALL.hidden_size)).astype(np.float32)
    choose = jax.jit(partial(kf.choose_after, mesh=mesh, **HOW))
    sampler = sampler and Sampler.of(sampler)
    choice, after = choose(model.on(mesh), stream, jnp.arange(3), cache._replace(accepted=mark), sampler)
    want = jax.jit(partial(kf.choose, **HOW))(model.packed, stream, jnp.arange(3), sampler)
    for shard in after.accepted.addressable_shards:
        assert int(shard.data) == (kc.GAVE_UP if lost else 0)
    for shard in choice.ids.addressable_shards:
        assert np.asarray(shard.data).tolist() == ([-1] * 3 if lost else np.asarray(want.ids).tolist())
    if not lost:
        assert_same_bits(choice.logprobs, want.logprobs)


def test_a_step_that_gave_up_emits_one_token(monkeypatch, packed):
    """On every device, whatever tree each has: a loop that goes by the count ends on all of them together."""
    params, how = SpecParams(packed, None), {**HOW, "speculation": Speculation()}
    state = speculative.start(params, [3, 1, 4], MAX_LENGTH, **how)
    plain = speculative.verify
    counts = []
    for ids in (-1, 7):
        monkeypatch.setattr(speculative, "verify",
                            lambda *args, ids=ids, **how: plain(*args, **how)._replace(ids=jnp.full(16, ids)))
        monkeypatch.setattr(speculative, "guess", lambda *_, ids=ids, **__: chain_tree(0, jnp.full(15, ids, jnp.int32)))
        counts.append(int(speculative.decode_step(params, state, **how)[1].count))
    assert counts == [1, 16], "one where it gave up, all of the guesses where not"


# ------------------------------------------------------------------ reports


@pytest.mark.parametrize(("text", "kind"), [
    ("layers: a wait did not end within 2000 ms: rank 0, SM 7; the state of this pass is lost", ffi.WaitError),
    (MESSAGE.format("layers").replace("\\", ""), ffi.StateError)])
def test_kinds_of_reports(monkeypatch, text, kind):
    module = SimpleNamespace(layer_error=lambda: text, reset_after_error=lambda: 0)
    monkeypatch.setattr(ffi, "_loaded", {"cuda": module})
    with pytest.raises(ffi.WaitError) as error:
        ffi.raise_wait_error()
    assert type(error.value) is kind and str(error.value) == text

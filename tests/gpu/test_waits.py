"""A wait inside the layer kernel that does not end: reported with its place, and after the reset all is well; but for
what the pass left, which is refused."""

import time
from contextlib import contextmanager, suppress
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import SMALL, model_of, random_cache

import musejax
from musejax import ffi
from musejax.config import NUM_SLICES, DecodeConfig
from musejax.kernels import forward as kf
from musejax.kernels import schedule as ks
from musejax.kernels.cache import GAVE_UP, accept, give_up
from musejax.paths import nano_drafter_path

BUDGET = 2 * 10**9  # ns
PLACE = r"rank 0, SM \d+, warp \d+, layer \d, phase .*, wanted \d+, saw \d+"
REFUSED = r"layers: .* got -1, the state of a pass that gave up: start anew from the prompt"


@pytest.fixture
def launch(gpu):
    """One pass on the GPU over a cache, by default one that is well -> `Pass`."""
    params, cache = (jax.device_put(x, gpu) for x in (model_of(SMALL).packed, random_cache(SMALL, 250, 400)))
    run = jax.jit(kf.run_pass, static_argnames=("config", "decode"))

    def go(cache=cache):
        with jax.default_device(gpu):
            out = run(params, cache, jnp.arange(16, dtype=jnp.int32), kf.chain(16), 16, config=SMALL,
                      decode=DecodeConfig())
            return jax.block_until_ready(out)

    return go


@contextmanager
def missing_unit(gpu, config):
    """Inside the context no SM runs the last unit of the attention output, so all wait for it in vain."""
    library = ffi.library("gpu")
    sms = library.multiprocessors()[0]
    shape = ks.Shape.of(config)
    number = library.layer_instances().index((*shape, config.num_experts_per_tok, NUM_SLICES))

    def use(spans):
        library.set_schedule(number, sms, spans.ravel().tolist())

    right = ks.spans(ks.dense_schedule(shape, NUM_SLICES, sms))
    wrong = np.array(right)
    out = wrong[:, ks.GEMMS.index("out")]
    out[out[:, 1] == out[:, 1].max()] -= (0, 1)
    use(wrong)
    try:
        yield
    finally:
        use(right)


@pytest.fixture
def unit_missing(gpu):
    return partial(missing_unit, gpu, SMALL)


def test_a_wait_that_takes_too_long(launch, unit_missing):
    """Reported once its budget is over, and the next launch is right."""
    lib = ffi.library("gpu")
    first = launch()
    ffi.raise_wait_error()
    try:
        assert lib.set_spin_budget(20 * 10**6) == 0
        with unit_missing():
            launch()
            with pytest.raises(ffi.WaitError, match=PLACE):
                ffi.raise_wait_error()
    finally:
        assert lib.set_spin_budget(BUDGET) == 0
    ffi.raise_wait_error()
    assert_same_bits(launch().stream, first.stream)


@contextmanager
def budget(ns):
    """Of the waits inside the context."""
    lib = ffi.library("gpu")
    assert lib.set_spin_budget(ns) == 0
    try:
        yield
    finally:
        assert lib.set_spin_budget(BUDGET) == 0


def test_the_cache_of_a_pass_that_gave_up(launch, unit_missing):
    """Refused again and again, and so is what a refused pass left; another cache has the right bits between."""
    first = launch()
    with budget(20 * 10**6), unit_missing():
        lost = launch().cache
        with pytest.raises(ffi.WaitError, match=PLACE):
            ffi.raise_wait_error()
    assert int(lost.accepted) == GAVE_UP
    for _ in range(3):
        after = launch(lost)
        with pytest.raises(ffi.StateError, match=REFUSED):
            ffi.raise_wait_error()
        assert int(after.cache.accepted) == GAVE_UP
        lost = accept(after.cache, jnp.arange(16), 2)
        got = launch()
        ffi.raise_wait_error()
        assert int(got.cache.accepted) == 0
        assert_same_bits(got.stream, first.stream)


def test_refused_at_once(launch):
    """A refused launch waits for nothing: it takes less than a pass would, and no budget runs out."""
    lost = give_up(launch().cache, True)
    launch(lost)
    with pytest.raises(ffi.StateError, match=REFUSED):
        ffi.raise_wait_error()
    begin = time.perf_counter()
    launch(lost)
    assert time.perf_counter() - begin < BUDGET / 1e9 / 4
    with pytest.raises(ffi.StateError, match=REFUSED):
        ffi.raise_wait_error()


def assert_refused(run, *state):
    """By the report, or by a later call of the same program that has found it."""
    with pytest.raises((ffi.StateError, jax.errors.JaxRuntimeError), match=REFUSED):
        jax.block_until_ready(run(*state))
        ffi.raise_wait_error()
    with suppress(ffi.StateError):
        ffi.raise_wait_error()


@pytest.mark.parametrize("speculate", [False, True])
def test_steps_after_a_wait_that_did_not_end(gpu, speculate):
    """Plain and speculative steps of the nano model: the state is refused, step after step, and a new one is right."""
    model = musejax.load(devices=[gpu], drafter=nano_drafter_path() if speculate else None)
    prompt = model.tokenizer.encode("Question: What is 3 times 14?", bos=True, parse_special=False)
    start, step = ((model.start_speculative, lambda s: model.step_speculative(s)[0]) if speculate
                   else (model.start, model.step))

    def tokens():
        state, out = start(prompt, 128), []
        for _ in range(4):
            state = step(state)
            out.append(int(state.token))
        ffi.raise_wait_error()
        return out

    want, state = tokens(), step(start(prompt, 128))
    with budget(200 * 10**6), missing_unit(gpu, model.config):
        state = jax.block_until_ready(step(state))
        with pytest.raises(ffi.WaitError, match=PLACE):
            ffi.raise_wait_error()
    for _ in range(3):
        assert_refused(step, jax.tree.map(jnp.copy, state))
        assert tokens() == want


def test_a_whole_run_from_a_state_that_gave_up(gpu):
    """In one `lax.while_loop`, which ends."""
    model = musejax.load(devices=[gpu], drafter=nano_drafter_path())
    state = model.start_speculative(model.tokenizer.encode("Question:", bos=True, parse_special=False), 128)
    want = np.asarray(model.run_speculative(jax.tree.map(jnp.copy, state), 20, ()).tokens)
    ffi.raise_wait_error()
    assert_refused(lambda state: model.run_speculative(state, 20, ()), state._replace(cache=give_up(state.cache, True)))
    state = model.start_speculative(model.tokenizer.encode("Question:", bos=True, parse_special=False), 128)
    assert np.asarray(model.run_speculative(state, 20, ()).tokens).tolist() == want.tolist()
    ffi.raise_wait_error()

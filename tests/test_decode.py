"""Prefill and the decode step: same tokens as one pass, no recompilation, any mesh, donated state."""

import dataclasses
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from musejax import decode as steps
from musejax import params as table
from musejax.config import MINI, ConfigError, DecodeConfig
from musejax.model.forward import forward
from musejax.numerics import EXACT
from musejax.sampling import Sampling
from musejax.sharding import make_mesh, param_sharding

CONFIG = dataclasses.replace(MINI, num_hidden_layers=2, layer_types=(), layer_rope_theta=(), sliding_window=4)
DECODE = DecodeConfig(policy=EXACT, prefill_chunk=5)


@pytest.fixture(scope="module")
def params():
    return table.init_params(CONFIG, jax.random.key(0))


def greedy_by_forward(params, prompt, count):
    """Tokens by a whole pass each: what cached decoding must reproduce."""
    run = jax.jit(lambda t, n: forward(params, t, config=CONFIG, decode=DECODE)[0][n - 1])
    tokens = list(prompt)
    for _ in range(count):
        padded = np.pad(tokens, (0, 32 - len(tokens)))  # causal: rows after the last one do not matter
        tokens.append(int(jnp.argmax(run(padded, len(tokens)))))
    return tokens[len(prompt):]


def run_steps(params, prompt, count, mesh=None, sampling=None):
    sampling = sampling or Sampling()
    state = steps.start(params, prompt, 32, sampling, config=CONFIG, decode=DECODE, mesh=mesh)
    tokens, logprobs = [int(state.token)], [float(state.logprob)]
    for _ in range(count - 1):
        state = steps.jit_decode_step(params, state, config=CONFIG, decode=DECODE, mesh=mesh)
        tokens.append(int(state.token))
        logprobs.append(float(state.logprob))
    return tokens, logprobs


def test_decode_equals_whole_passes(params):
    prompt = [3, 1, 4, 1, 5, 9, 2]
    tokens, logprobs = run_steps(params, prompt, 12)
    assert tokens == greedy_by_forward(params, prompt, 12)
    logits, _ = forward(params, jnp.asarray(prompt + tokens), config=CONFIG, decode=DECODE)
    want = jax.nn.log_softmax(logits, -1)[jnp.arange(6, 18), jnp.asarray(tokens)]
    assert np.abs(want - np.asarray(logprobs)).max() < 2e-4  # float32 sums in another order


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_any_mesh_decodes_the_same_tokens(params, devices):
    mesh = make_mesh(devices)
    placed = table.build(CONFIG, lambda p: jax.device_put(table.leaf_of(params, p), param_sharding(p, mesh)))
    prompt = [3, 1, 4, 1, 5, 9, 2]
    tokens, logprobs = run_steps(placed, prompt, 6, mesh)
    want, want_logprobs = run_steps(params, prompt, 6)
    assert tokens == want
    assert np.abs(np.asarray(logprobs) - want_logprobs).max() < 2e-4  # XLA may add in another order


def test_sampling_depends_on_the_seed_alone(params):
    def go(seed):
        return run_steps(params, [1, 2, 3], 8, sampling=Sampling(temperature=1.0, seed=seed))[0]

    assert go(1) == go(1) != go(2)


@pytest.mark.parametrize("mesh", [None, 1, 2])
def test_nothing_is_compiled_after_the_first_step(params, mesh, caplog):
    if mesh is not None:
        mesh = make_mesh(mesh)
        params = table.build(CONFIG, lambda p: jax.device_put(table.leaf_of(params, p), param_sharding(p, mesh)))
    run = dict(config=CONFIG, decode=DECODE, mesh=mesh)
    state = steps.start(params, list(range(11)), 64, **run)
    state = steps.jit_decode_step(params, state, **run)
    int(state.token)
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        for _ in range(40):
            state = steps.jit_decode_step(params, state, **run)
        int(state.token)
        assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
        # The counter itself is checked: another shape is a compilation and is seen.
        jax.jit(lambda x: x + 1)(np.zeros(77))
        assert [r for r in caplog.records if "Compiling" in r.getMessage()]


def test_state_is_donated(params):
    state = steps.start(params, [1, 2], 32, config=CONFIG, decode=DECODE)
    keys = state.cache.layers[0].keys
    steps.jit_decode_step(params, state, config=CONFIG, decode=DECODE)
    assert keys.is_deleted()


def test_a_step_fits_into_a_larger_program(params):
    """As the docstring promises: a user can trace it into a loop of their own."""
    prompt = [3, 1, 4, 1, 5, 9, 2]

    @partial(jax.jit, static_argnames="count")
    def several(params, state, count):
        def body(state, _):
            state = steps.decode_step(params, state, config=CONFIG, decode=DECODE)
            return state, state.token

        return jax.lax.scan(body, state, length=count)[1]

    state = steps.start(params, prompt, 32, config=CONFIG, decode=DECODE)
    first = int(state.token)
    assert [first, *several(params, state, 5).tolist()] == run_steps(params, prompt, 6)[0]


def test_cache_lengths_come_in_steps():
    assert steps.cache_length(MINI, 1) == 256 and steps.cache_length(MINI, 257) == 512
    assert steps.cache_length(MINI, 4096) == 4096
    with pytest.raises(ConfigError, match=r"at most 4096 tokens .*got 4097"):
        steps.cache_length(MINI, 4097)


@pytest.mark.parametrize(("prompt", "message"), [
    ([], "at least one token"), ([1.5, 2.0], "flat list of token ids, got float64"),
    ([[1, 2]], r"flat list of token ids, got int64 of shape \(1, 2\)"),
    ([1, 512], "ids of 0 to 511, got 512 at index 1"), ([-1], "got -1"),
    ([1] * 33, "at most 32 tokens .*got 33")])
def test_prompts_are_checked_before_anything_runs(prompt, message):
    with pytest.raises(ConfigError, match=message):
        steps.prefill(None, prompt, 32, config=CONFIG, decode=DECODE)

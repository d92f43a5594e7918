"""The whole decoder: cached decoding equals one pass, padding leaves no trace, gradients flow."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax import cache as kv
from musejax.config import DecodeConfig
from musejax.model import forward as fwd
from musejax.numerics import CANON, EXACT

DECODE = DecodeConfig(policy=EXACT, combine="flat")


@pytest.fixture(scope="module")
def programs(small):
    config, params = small
    append = jax.jit(partial(fwd.append, config=config, decode=DECODE))
    head = jax.jit(lambda s: fwd.softcap(fwd.raw_logits(params, s, config, DECODE), config))
    whole = jax.jit(partial(fwd.forward, config=config, decode=DECODE))
    return partial(append, params), head, partial(whole, params)


def tokens_of(length, config):
    return np.random.default_rng(length).integers(0, config.vocab_size, length).astype(np.int32)


def in_chunks(append, head, config, tokens, chunk):
    cache, out = kv.init_cache(config, EXACT, 16), []
    for start in range(0, len(tokens), chunk):
        part = tokens[start:start + chunk]
        padded = np.pad(part, (0, chunk - len(part)), constant_values=3)
        stream, cache = append(cache, padded, len(part))
        out.append(np.asarray(head(stream))[:len(part)])
    return np.concatenate(out), cache


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16])
def test_chunks_equal_one_pass_around_the_window(small, programs, chunk):
    config, _ = small
    append, head, whole = programs
    w = config.sliding_window
    for length in (w - 1, w, w + 1, 2 * w + 3):
        tokens = tokens_of(length, config)
        want, trace = whole(tokens)
        assert float(trace.margins.min()) > 1e-4  # else two float32 orders may route differently
        got, cache = in_chunks(append, head, config, tokens, chunk)
        assert np.abs(got - want).max() < 2e-4, length  # float32 sums in another order
        assert int(cache.length) == length


def test_padding_rows_leave_no_trace(small, programs):
    config, _ = small
    append, _, _ = programs
    tokens = tokens_of(7, config)
    caches = []
    for junk in (0, 501):
        padded = np.concatenate([tokens, np.full(9, junk, np.int32)])
        stream, cache = append(kv.init_cache(config, EXACT, 16), padded, 7)
        caches.append((stream[:7], cache))
    for a, b in zip(*map(jax.tree.leaves, caches), strict=True):
        assert_same_bits(a, b)


def test_window_reaches_exactly_as_far_as_it_should(small):
    """The last row of a model of sliding layers alone sees its window, once per layer, and nothing before."""
    import dataclasses

    from musejax.config import SLIDING

    config, params = small
    config = dataclasses.replace(config, layer_types=(SLIDING,) * 2)
    run = jax.jit(lambda t: fwd.forward(params, t, config=config, decode=DECODE)[0][-1])
    tokens = tokens_of(12, config)
    base = run(tokens)
    reach = 2 * (config.sliding_window - 1)  # how far back two layers can see
    for back in range(12):
        other = tokens.copy()
        other[11 - back] = (other[11 - back] + 1) % config.vocab_size
        assert np.array_equal(run(other), base) == (back > reach), back


def test_canon_stays_close_to_exact(small):
    config, params = small
    tokens = tokens_of(6, config)
    canon = fwd.forward(params, tokens, config=config, decode=DecodeConfig(policy=CANON, combine="flat"))[0]
    exact = fwd.forward(params, tokens, config=config, decode=DECODE)[0]
    assert np.sqrt(np.mean((canon - exact) ** 2)) < 0.05 * np.sqrt(np.mean(exact**2))  # two layers of 8-bit rounding


def test_softcap_values(small):
    import dataclasses

    config = dataclasses.replace(small[0], output_multiplier=2.0**-2.5, final_logit_softcapping=20.0)
    got = fwd.softcap(jnp.asarray([10.0, 100.0, 400.0]), config)
    assert np.allclose(got, [1.763178, 14.167190, 19.966056], atol=1e-5)  # spec section 4


def test_gradients_reach_every_parameter(small):
    config, params = small
    decode = DecodeConfig(policy=CANON, combine="flat", experts="all")
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    tokens = tokens_of(12, config)

    @partial(jax.jit, static_argnames="remat")
    def grad(p, remat):
        def loss(q):
            return jnp.sum(jnp.sin(fwd.forward(q, tokens, config=config, decode=decode, remat=remat)[0]))

        return jax.grad(loss)(p)

    grads = grad(params, False)
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(g).all(), name
        assert np.asarray(g).any() == (name.split("'")[-2] != "router_bias"), name  # the bias only selects
    again = grad(params, True)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(again), strict=True):
        assert np.allclose(a, b, rtol=1e-3, atol=1e-4)  # XLA fuses the two programs differently

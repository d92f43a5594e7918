"""Choosing tokens: ties, masks, restrictions, noise that depends on seed and position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax.config import ConfigError
from musejax.sampling import Sampler, Sampling, choose, noise, restrict


def pick(logits, sampling, positions=(0,), num_tokens=None, raw=None):
    logits = jnp.atleast_2d(jnp.asarray(logits, jnp.float32))
    raw = logits if raw is None else jnp.atleast_2d(jnp.asarray(raw, jnp.float32))
    return choose(raw, logits, jnp.asarray(positions), Sampler.of(sampling), num_tokens=num_tokens)


def test_greedy_takes_the_lowest_of_equals_and_compares_before_the_softcap():
    ids, _ = pick([1, 3, 3, 2], Sampling())
    assert ids.tolist() == [1]
    ids, _ = pick([20.0, 20.0], Sampling(), raw=[900.0, 901.0])  # the softcap saturated
    assert ids.tolist() == [1]


def test_ids_beyond_the_tokenizer_are_never_chosen():
    ids, logprobs = pick([0.0, 1.0, 9.0], Sampling(), num_tokens=2)
    assert ids.tolist() == [1] and np.isclose(logprobs[0], 1 - np.log(1 + np.e))
    for seed in range(20):
        ids, _ = pick([0.0, 1.0, 9.0], Sampling(temperature=5.0, seed=seed), num_tokens=2)
        assert ids[0] < 2


def allowed(logits, **options):
    return np.flatnonzero(np.isfinite(restrict(jnp.asarray([logits], jnp.float32),
                                               Sampler.of(Sampling(temperature=1.0, **options)))[0])).tolist()


def test_top_k_and_top_p():
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    assert allowed(logits) == [0, 1, 2, 3]
    assert allowed(logits, top_k=2) == [1, 2]
    assert allowed(logits, top_p=0.39) == [1]
    assert allowed(logits, top_p=0.5) == [1, 2]
    assert allowed(logits, top_p=1e-9) == [1]
    assert allowed(logits, top_k=3, top_p=0.95) == [1, 2, 3]
    assert allowed(logits, top_k=2, top_p=0.5) == [1]  # probabilities after top-k: 4/7 reaches 0.5
    assert allowed([1.0, 1.0, 1.0], top_k=2) == [0, 1]  # equals rank by id
    assert allowed(logits, top_k=100) == [0, 1, 2, 3]
    # float32 sums reach 1 before the end
    assert allowed(np.concatenate([np.zeros(5000), [-12.0]])) == list(range(5001))


def test_least_temperature_is_greedy_in_effect():
    ids, _ = pick([1.0, 1.001, 0.0], Sampling(temperature=1e-5, seed=3))
    assert ids.tolist() == [1]


def test_samples_follow_the_distribution():
    probs = np.array([0.1, 0.4, 0.3, 0.2])
    n = 20000
    ids, logprobs = pick(np.tile(np.log(probs), (n, 1)), Sampling(temperature=1.0, seed=7), np.arange(n))
    share = np.bincount(np.asarray(ids), minlength=4) / n
    assert np.abs(share - probs).max() < 0.015  # four standard deviations of a share are 0.014
    assert np.allclose(np.exp(logprobs), probs[np.asarray(ids)], atol=1e-6)


def test_noise_depends_on_seed_and_position_alone():
    sampler = Sampler.of(Sampling(temperature=1.0, seed=3))
    many = noise(sampler, jnp.arange(10), 50)
    assert_same_bits(many[4], noise(sampler, jnp.asarray([4]), 50)[0])
    assert not np.array_equal(many[4], many[5])
    assert not np.array_equal(many, noise(Sampler.of(Sampling(temperature=1.0, seed=4)), jnp.arange(10), 50))


def test_other_values_need_no_compilation():
    step = jax.jit(lambda x, s: restrict(x, s))
    for k, p in ((0, 1.0), (5, 0.5), (9, 0.1)):
        step(jnp.zeros((1, 16)), Sampler.of(Sampling(temperature=1.0, top_k=k, top_p=p)))
    assert step._cache_size() == 1


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", -0.1), ("temperature", 1e-40), ("seed", 1.5), ("top_k", float("nan")), ("top_k", True),
    ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1), ("top_k", 1.5),
    ("top_p", 0.0), ("top_p", 1.1), ("seed", -1), ("seed", 2**32)])
def test_ranges(field, value):
    with pytest.raises(ConfigError, match=field):
        Sampling(**{field: value})

"""Choosing the next token: greedy, or temperature, top-k and top-p with noise keyed by position.

The noise for the token at absolute position x depends on (seed, x) alone, so the same text comes out
however many tokens a pass yields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from musejax.config import ConfigError

LEAST_TEMPERATURE = 1e-5
"""Below it logits over temperature leave the range in which float32 tells them apart; 0 is greedy."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the largest logit (greedy); otherwise logits are divided by it.
        top_k: keep the k largest logits, 0 keeps all.
        top_p: then keep the fewest whose probability reaches top_p, at least one.
        seed: of the noise.

    Raises:
        ConfigError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature <= 1e6:
            raise ConfigError(f"temperature: expected 0 (greedy) or {LEAST_TEMPERATURE:g} to 1e6, "
                              f"got {self.temperature}")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or not 0 <= self.top_k < 2**31:
            raise ConfigError(f"top_k: expected an integer of at least 0 (0 keeps all), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected a number above 0 and at most 1, got {self.top_p}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed: expected an integer of 0 to 2^32 - 1, got {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Sampler(NamedTuple):
    """A Sampling as arrays, so that another value needs no compilation; all scalars. Greedy has none: None."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array

    @classmethod
    def of(cls, sampling: Sampling) -> Sampler | None:
        """The arrays, or None for greedy: the choice between the two programs is then part of the structure."""
        if sampling.greedy:
            return None
        return cls(jnp.float32(sampling.temperature), jnp.int32(sampling.top_k), jnp.float32(sampling.top_p),
                   jnp.uint32(sampling.seed))


def mask_unused(values_tv: jax.Array, num_tokens: int | None) -> jax.Array:
    """-inf at ids the tokenizer never produces (num_tokens and above; None masks nothing)."""
    if num_tokens is None or num_tokens >= values_tv.shape[-1]:
        return values_tv
    return jnp.where(jnp.arange(values_tv.shape[-1]) < num_tokens, values_tv, -jnp.inf)


def restrict(logits_tv: jax.Array, sampler: Sampler) -> jax.Array:
    """-inf outside top-k and top-p of logits already divided by the temperature.

    Equal logits rank by lower id first.
    """
    order = jnp.argsort(-logits_tv, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits_tv, order, axis=-1)
    rank = jnp.arange(logits_tv.shape[-1])
    kept = (sampler.top_k == 0) | (rank < sampler.top_k)
    probs = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # A float32 sum may reach 1 before the last token: top_p = 1 keeps all by rule, not by sum.
    kept = kept & ((before < sampler.top_p) | (rank == 0) | (sampler.top_p >= 1))
    kept_by_id = jnp.zeros_like(kept).at[jnp.arange(order.shape[0])[:, None], order].set(kept)
    return jnp.where(kept_by_id, logits_tv, -jnp.inf)


def noise(sampler: Sampler, positions_t: jax.Array, vocab: int) -> jax.Array:
    """Gumbel noise float32 [t, v], a function of (seed, position) alone."""
    root = jax.random.key(sampler.seed)
    return jax.vmap(lambda position: jax.random.gumbel(jax.random.fold_in(root, position), (vocab,)))(positions_t)


def choose(raw_tv, logits_tv, positions_t, sampler: Sampler | None, *, num_tokens: int | None):
    """Next token of each row.

    Args:
        raw_tv: float32, logits before multiplier and softcap; greedy compares these, since the softcap
            saturates and would make ties. Ties go to the lower id.
        logits_tv: float32, after softcap; sampled from.
        positions_t: int32, absolute position of the token to be chosen.
        sampler: None is greedy.

    Returns:
        (ids int32 [t], log-probabilities float32 [t] of the ids under softmax(logits), unscaled).
    """
    logits = mask_unused(logits_tv, num_tokens)
    if sampler is None:
        ids = jnp.argmax(mask_unused(raw_tv, num_tokens), axis=-1)
    else:
        scaled = restrict(logits / sampler.temperature, sampler)
        ids = jnp.argmax(scaled + noise(sampler, positions_t, logits.shape[-1]), axis=-1)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), ids[:, None], axis=-1)[:, 0]
    return ids.astype(jnp.int32), logprobs

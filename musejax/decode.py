"""Decoding as jitted programs over one state: prefill a prompt in chunks, then one token a step.

`decode_step` is a pure function of (params, state) with fixed shapes: call `jit_decode_step`, or trace
it into a larger program. The state is donated, so always go on with the one returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from musejax import cache as kv
from musejax.config import EXACT_PREFILL_MAX, ConfigError, DecodeConfig, ModelConfig
from musejax.kernels import cache as kernel_cache
from musejax.kernels import forward as kernels
from musejax.kernels.cache import KernelCache
from musejax.kernels.prefill import append_reference
from musejax.model import forward as fwd
from musejax.sampling import Sampler, Sampling, choose
from musejax.sharding import replicated

CACHE_STEP = 256
"""Caches are made in multiples of this many positions, so that few lengths are ever compiled."""


class DecodeState(NamedTuple):
    """State between two steps.

    Attributes:
        cache: keys and values of every position before `token`; its kind goes with the implementation.
        token: int32 [], the last token chosen; the next step runs it. After a pass that gave up waiting on a GPU it
            means nothing (and may be -1), and so does all else: every further step is refused (ffi.StateError).
        logprob: float32 [], its log-probability.
        sampler: how tokens are chosen; None is greedy.
    """

    cache: kv.Cache | KernelCache
    token: jax.Array
    logprob: jax.Array
    sampler: Sampler | None


def uses_kernels(decode: DecodeConfig) -> bool:
    """Whether params are packed and run through the kernels; `auto` that no `for_model` has decided is `reference`."""
    return decode.implementation == "megakernel"


def init_cache(config: ModelConfig, decode: DecodeConfig, max_length: int, mesh=None) -> kv.Cache | KernelCache:
    """An empty cache for up to max_length positions, of the kind that this implementation takes."""
    if uses_kernels(decode):
        return kernel_cache.init_cache(config, max_length, mesh)
    return kv.init_cache(config, decode.policy, max_length, mesh)


def append(params, cache, tokens_t, num_valid, *, config, decode, mesh=None):
    """The first num_valid tokens through the model -> (residual stream [t, d], cache longer by num_valid)."""
    if uses_kernels(decode):
        return kernels.append(params, cache, tokens_t, num_valid, config=config, decode=decode, mesh=mesh)
    return fwd.append(params, cache, tokens_t, num_valid, config=config, decode=decode)


def choose_next(params, stream_1d, cache, sampler: Sampler | None, *, config, decode, num_tokens, mesh) -> DecodeState:
    """The state whose token follows the last cached position, given that position's residual stream [1, d]."""
    if uses_kernels(decode):
        (ids, logprobs), cache = kernels.choose_after(params, stream_1d, cache.length[None], cache, sampler,
                                                      config=config, decode=decode, num_tokens=num_tokens, mesh=mesh)
        keep = kernel_cache.keep_placement
    else:
        raw = fwd.raw_logits(params, stream_1d, config, decode)
        ids, logprobs = choose(raw, fwd.softcap(raw, config), cache.length[None], sampler, num_tokens=num_tokens)
        keep = kv.keep_placement
    state = DecodeState(cache, ids[0], logprobs[0], sampler)
    if mesh is None:
        return state
    rest = jax.lax.with_sharding_constraint(state._replace(cache=()), replicated(mesh))
    return rest._replace(cache=keep(cache, config, mesh))


def decode_step(params: dict, state: DecodeState, *, config: ModelConfig, decode: DecodeConfig,
                num_tokens: int | None = None, mesh: Mesh | None = None) -> DecodeState:
    """Runs state.token through the model and chooses the token after it.

    Args:
        params: pytree of `params.build`.
        state: what `start` or the step before returned; donated when jitted.
        config, decode: static.
        num_tokens: static; ids from here on are never chosen (the tokenizer's size).
        mesh: static; where params and cache lie, None for wherever they are.

    Returns:
        The next state: cache longer by one, token and log-probability of the new token. Once the cache
        is full (length = max_length), further steps are undefined; the caller counts.
    """
    stream, cache = append(params, state.cache, state.token[None], 1, config=config, decode=decode, mesh=mesh)
    return choose_next(params, stream, cache, state.sampler, config=config, decode=decode,
                       num_tokens=num_tokens, mesh=mesh)


def prefill_chunk(params: dict, cache, tokens_t, num_valid, *, config: ModelConfig, decode: DecodeConfig,
                  mesh: Mesh | None = None, exact: bool = True) -> tuple[jax.Array, kv.Cache | KernelCache]:
    """Appends one chunk -> (residual stream [1, d] of its last valid row, cache).

    Args:
        exact: static; False runs plain JAX on the weights and the cache of the kernels.
    """
    if uses_kernels(decode) and not exact:
        stream, cache = append_reference(params, cache, tokens_t, num_valid, config=config, decode=decode)
    else:
        stream, cache = append(params, cache, tokens_t, num_valid, config=config, decode=decode, mesh=mesh)
    keep = kernel_cache.keep_placement if uses_kernels(decode) else kv.keep_placement
    return jax.lax.dynamic_slice_in_dim(stream, num_valid - 1, 1), keep(cache, config, mesh)


_STATIC = ("config", "decode", "mesh")
_CHOICE = (*_STATIC, "num_tokens")
jit_decode_step = jax.jit(decode_step, static_argnames=_CHOICE, donate_argnames="state")
jit_prefill_chunk = jax.jit(prefill_chunk, static_argnames=(*_STATIC, "exact"), donate_argnames="cache")
jit_choose_next = jax.jit(choose_next, static_argnames=_CHOICE, donate_argnames="cache")


def cache_length(config: ModelConfig, tokens: int) -> int:
    """Positions to allocate for this many tokens: the next multiple of CACHE_STEP within the context.

    Raises:
        ConfigError: more tokens than the context holds.
    """
    limit = config.max_position_embeddings
    if tokens > limit:
        raise ConfigError(f"context: expected at most {limit} tokens (max_position_embeddings), got {tokens}; "
                          "shorten the prompt or ask for fewer new tokens")
    return min(limit, -(-tokens // CACHE_STEP) * CACHE_STEP)


def check_tokens(config: ModelConfig, tokens: Sequence[int]) -> np.ndarray:
    """The prompt as int32 [t].

    Raises:
        ConfigError: no token, not a flat list of integers, or an id outside the vocabulary.
    """
    ids = np.asarray(tokens)
    if not ids.size:
        raise ConfigError("prompt: expected at least one token, got none")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(f"prompt: expected a flat list of token ids, got {ids.dtype} of shape {ids.shape}")
    bad = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if bad.size:
        raise ConfigError(f"prompt: expected ids of 0 to {config.vocab_size - 1}, got {ids[bad[0]]} at index {bad[0]}")
    return ids.astype(np.int32)


def exact_prefill(decode: DecodeConfig, tokens: int) -> bool:
    """Whether a prompt of so many tokens has the bits of decoding it token by token."""
    if not uses_kernels(decode):
        return False
    return decode.prefill == "exact" or (decode.prefill == "auto" and tokens <= EXACT_PREFILL_MAX)


def prefill(params: dict, tokens: Sequence[int], max_length: int, *, config: ModelConfig, decode: DecodeConfig,
            mesh=None) -> tuple[jax.Array, kv.Cache]:
    """A prompt through the model in chunks, the last one padded: of 16 rows where it is exact (`exact_prefill`), else
    of decode.prefill_chunk.

    Returns:
        (residual stream [1, d] of the last prompt token, cache).

    Raises:
        ConfigError: an empty prompt, an id outside the vocabulary, or more tokens than max_length.
    """
    ids = check_tokens(config, tokens)
    if len(ids) > max_length:
        raise ConfigError(f"prompt: expected at most {max_length} tokens (max_length), got {len(ids)}")
    cache = init_cache(config, decode, max_length, mesh)
    exact = exact_prefill(decode, len(ids))
    chunk = kernel_cache.MAX_ROWS if exact else decode.prefill_chunk
    run = partial(jit_prefill_chunk, config=config, decode=decode, mesh=mesh, exact=exact)
    for start in range(0, len(ids), chunk):
        part = ids[start:start + chunk]
        padded = np.pad(part, (0, chunk - len(part)))
        stream, cache = run(params, cache, jnp.asarray(padded), jnp.int32(len(part)))
    return stream, cache


def start(params: dict, tokens: Sequence[int], max_length: int, sampling: Sampling | None = None, *,
          config: ModelConfig, decode: DecodeConfig, num_tokens: int | None = None, mesh=None) -> DecodeState:
    """Prefills a prompt and chooses the first token: the state to step from.

    Args:
        tokens: ids of the prompt.
        max_length: positions to allocate; prompt and generated tokens must fit.
        sampling: None is greedy.
        num_tokens: ids from here on are never chosen.

    Raises:
        ConfigError: as `prefill`.
    """
    sampling = sampling or Sampling()
    stream, cache = prefill(params, tokens, max_length, config=config, decode=decode, mesh=mesh)
    return jit_choose_next(params, stream, cache, Sampler.of(sampling), config=config, decode=decode,
                           num_tokens=num_tokens, mesh=mesh)

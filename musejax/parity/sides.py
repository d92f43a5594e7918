"""Decoding in one way: passes of rows, and on them a prompt with decoded tokens and a tree of guesses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from musejax import decode as steps
from musejax import score
from musejax.config import DecodeConfig, ModelConfig
from musejax.kernels import forward as kf
from musejax.kernels.cache import MAX_ROWS, KernelCache, accept, init_cache, keep_placement


class Step(NamedTuple):
    """What one pass of t rows gives; `rows` as `arrays` shows them.

    Attributes:
        rows: dict of arrays with one entry a row on axis 0 (logits, log-probability of the target, greedy choice and
            its log-probability, expert ids, stream), or on axis 2 (keys and values in flight, [L, k, 16, c]).
        cache: rows accepted as asked.
        streams: see `kernels.forward.Pass`.
    """

    rows: dict
    cache: KernelCache
    streams: jax.Array | None


def step(params, cache, tokens_t, parents_t, num_valid, targets_t, count, *, config, decode, num_tokens, mesh,
         trace) -> Step:
    """A pass and its LM head; afterwards the first `count` rows, a chain, are accepted."""
    how = {"config": config, "decode": decode, "mesh": mesh}
    out = kf.run_pass(params, cache, tokens_t, parents_t, num_valid, trace=trace, **how)
    choice = kf.greedy(params, out.stream, num_tokens=num_tokens, **how)
    rows = {
        "logits": kf.logits(params, out.stream, **how)[1],
        "log-probabilities": kf.token_logprobs(params, out.stream, targets_t, num_tokens=num_tokens, **how),
        "greedy tokens": choice.ids, "their log-probabilities": choice.logprobs,
        "expert ids": out.expert_ids.swapaxes(0, 1), "streams": out.stream,
        "keys": jnp.stack([x.keys for x in out.cache.flight]),
        "values": jnp.stack([x.values for x in out.cache.flight]),
    }
    cache = accept(out.cache, jnp.arange(MAX_ROWS), count)
    return Step(rows, cache if mesh is None else keep_placement(cache, config, mesh), out.streams)


jit_step = jax.jit(step, static_argnames=("config", "decode", "num_tokens", "mesh", "trace"))


@dataclass(frozen=True)
class Side:
    """Decoding in one way.

    Attributes:
        params: packed form, placed on `mesh`.
        max_length: positions of caches.
        mesh: None is one device.
    """

    params: dict
    config: ModelConfig
    decode: DecodeConfig
    num_tokens: int
    max_length: int
    mesh: jax.sharding.Mesh | None = None

    def empty(self) -> KernelCache:
        return init_cache(self.config, self.max_length, self.mesh)

    def step(self, cache, tokens, parents=None, valid=None, targets=None, count=None, trace=False) -> Step:
        """Rows `tokens` after the cache; by default a chain, all valid, all accepted."""
        t = len(tokens)
        parents = range(-1, t - 1) if parents is None else parents
        targets = [0] * t if targets is None else targets
        valid = t if valid is None else valid
        count = valid if count is None else count
        numbers = (np.asarray(x, np.int32) for x in (tokens, parents, valid, targets, count))
        out = jit_step(self.params, cache, *numbers, config=self.config, decode=self.decode, num_tokens=self.num_tokens,
                       mesh=self.mesh, trace=trace)
        return jax.block_until_ready(out)  # XLA's CPU rendezvous hangs with many programs in flight

    def chain(self, cache, tokens, targets=None, trace=False) -> Iterator[tuple[int, Step]]:
        """Tokens in blocks of 16 rows, the last one padded -> (valid rows, step) of each."""
        targets = [0] * len(tokens) if targets is None else targets
        for start in range(0, len(tokens), MAX_ROWS):
            part, target = tokens[start:start + MAX_ROWS], targets[start:start + MAX_ROWS]
            pad = (0, MAX_ROWS - len(part))
            out = self.step(cache, np.pad(part, pad), valid=len(part), targets=np.pad(target, pad), trace=trace)
            cache = out.cache
            yield len(part), out


def arrays(out: Step, rows: Sequence[int]) -> dict[str, np.ndarray]:
    """Some rows of a pass as NumPy, keys and values in flight included."""
    return {name: np.asarray(x)[:, :, rows] if name in ("keys", "values") else np.asarray(x)[rows]
            for name, x in out.rows.items()}


def stored(cache: KernelCache) -> dict[str, np.ndarray]:
    """Stored keys and values of every layer."""
    return {f"{name} of layer {i}": x for name, xs in zip(("keys", "values"), score.stored_bits(cache), strict=True)
            for i, x in enumerate(xs)}


# ------------------------------------------------------------------ a prompt, decoded tokens, a tree


class Decoded(NamedTuple):
    """A prompt and decoded tokens, n together, all of them run.

    Attributes:
        tokens: int32 [n].
        values: "logits" [n, v], "log-probabilities" [n - 1] of tokens[1:], and stored keys and values.
        tree: rows of a tree after them; see `Step.rows`.
        parents, guesses: int32 [16], that tree.
    """

    tokens: np.ndarray
    values: dict[str, np.ndarray]
    tree: dict[str, np.ndarray]
    parents: np.ndarray
    guesses: np.ndarray


def run_decode(side: Side, prompt: np.ndarray, count: int, seed: int) -> Decoded:
    """The prompt in blocks, `count` greedy tokens one by one, then a random tree of 16 rows."""
    logits, logprobs = [], []
    cache = side.empty()
    for valid, out in side.chain(cache, prompt, np.append(prompt[1:], 0)):
        rows = arrays(out, range(valid))
        logits.append(rows["logits"])
        logprobs.append(rows["log-probabilities"])
    logprobs[-1] = logprobs[-1][:-1]  # of no token
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(rows["greedy tokens"][-1]))
        logprobs.append(rows["their log-probabilities"][-1:])
        out = side.step(out.cache, tokens[-1:])
        rows = arrays(out, [0])
        logits.append(rows["logits"])
    rng = np.random.default_rng([seed, 1])
    parents, guesses = tree_of("random", rng), rng.integers(0, side.num_tokens, MAX_ROWS)
    tree = side.step(out.cache, guesses, parents=parents, count=0)
    values = {"logits": np.concatenate(logits), "log-probabilities": np.concatenate(logprobs)} | stored(out.cache)
    return Decoded(np.asarray(tokens, np.int32), values, arrays(tree, range(MAX_ROWS)), parents, guesses)


def streams_of(side: Side, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """Streams [L + 1, n, d] of given tokens, in the same blocks as `run_decode`."""
    out, parts = None, []
    for valid, out in side.chain(side.empty(), tokens[:prompt], trace=True):
        parts.append(np.asarray(out.streams)[:, :valid])
    for token in tokens[prompt:]:
        out = side.step(out.cache, [token], trace=True)
        parts.append(np.asarray(out.streams))
    return np.concatenate(parts, axis=1)


def run_steps(side: Side, prompt: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """The same by `decode.start` and `decode.decode_step`: what generation runs."""
    how = {"config": side.config, "num_tokens": side.num_tokens, "mesh": side.mesh,
           "decode": replace(side.decode, implementation="megakernel", prefill="exact")}
    state = steps.start(side.params, prompt, side.max_length, **how)
    tokens, logprobs = [], []
    for _ in range(count):
        tokens.append(int(state.token))
        logprobs.append(np.asarray(state.logprob))
        state = jax.block_until_ready(steps.jit_decode_step(side.params, state, **how))
    return {"tokens": np.asarray(tokens, np.int32), "log-probabilities": np.asarray(logprobs)} | stored(state.cache)


def tree_of(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Parents of 16 rows, int32; cut anywhere they still are a tree."""
    rows = np.arange(MAX_ROWS)
    parents = {"chain": rows - 1, "star": np.where(rows, 0, -1),
               "random": np.array([rng.integers(-1, i) if i else -1 for i in rows])}
    return parents[kind].astype(np.int32)

"""Where tokens come from: an engine yields decode steps, and `collect` makes an answer of them.

A decode step is one pass of the target model over what a drafter proposed, and the tokens it yields; without a drafter
each step yields one token. `request_steps` is the seam: whatever decodes, it looks like this iterator. All lengths,
rates and counts are computed from these steps, so they mean the same for every engine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from musejax import generation
from musejax.decode import cache_length
from musejax.ffi import raise_wait_error
from musejax.generation import plan_length
from musejax.loading import Model
from musejax.sampling import Sampling
from musejax.text import STOP, TextStream
from musejax.tokenizer import Tokenizer


class StepError(RuntimeError):
    """An engine yielded a step that cannot be: a bug of the engine."""


class Step(NamedTuple):
    """What one step of an engine gave.

    Attributes:
        tokens: ids, at least one and at most the width. After an end token there may be more: they are cut away.
        seconds: wall time until these tokens were on the host and the next step could start.
        experts: distinct experts hit in each layer, if the engine knows.
        prefill: the prompt's step, always the first, and no other.
    """

    tokens: Sequence[int]
    seconds: float
    experts: Sequence[int] | None = None
    prefill: bool = False


def verify_width(drafter=None) -> int:
    """Most tokens that a decode step can yield: the current one and what the drafter adds in a row."""
    return 1 if drafter is None else drafter.block_size


def request_steps(model: Model, prompt: Sequence[int], sampling: Sampling | None = None, *, max_new_tokens: int,
                  stop_ids: Sequence[int] = (), drafter=None) -> Iterator[Step]:
    """Decodes one request, batch 1: the prefill step with the first token, then decode steps until a stop id or
    max_new_tokens. The caller may close the iterator at any step.

    Args:
        prompt: token ids.
        sampling: None is greedy.
        max_new_tokens: cut to what the context leaves.
        drafter: the `DraftConfig` of the drafter that the model was loaded with; None decodes one token a step, also
            with a model that has a drafter.

    Raises:
        ConfigError: as `plan_length`, at the call.
        WaitError: while iterating; see `ffi.raise_wait_error`.
    """
    if drafter is not None:
        return _speculative(model, prompt, sampling, max_new_tokens, stop_ids)
    count = plan_length(model, prompt, max_new_tokens)
    stops = frozenset(stop_ids)
    # One token goes to num_experts_per_tok different experts of each layer.
    experts = (model.config.num_experts_per_tok,) * model.config.num_hidden_layers

    def steps():
        begin = time.perf_counter()
        state = model.start(prompt, cache_length(model.config, len(prompt) + count), sampling)
        token = int(state.token)  # waits for the device
        raise_wait_error()
        yield Step((token,), time.perf_counter() - begin, prefill=True)
        for _ in range(count - 1):
            if token in stops:
                return
            begin = time.perf_counter()
            state = model.step(state)
            token = int(state.token)
            raise_wait_error()
            yield Step((token,), time.perf_counter() - begin, experts)

    return steps()


def _speculative(model: Model, prompt, sampling, max_new_tokens: int, stop_ids) -> Iterator[Step]:
    """`generation.steps`, timed: each step ends when its tokens are on the host."""
    made = generation.steps(model, prompt, sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids)

    def steps():
        prefill = True
        while True:
            begin = time.perf_counter()
            step = next(made, None)
            if step is None:
                return
            yield Step(step.tokens, time.perf_counter() - begin, None if prefill else step.distinct, prefill)
            prefill = False

    return steps()


# ------------------------------------------------------------------ compilations


class _Compilations:
    """Counts compilations of this process, of whatever program."""

    def __init__(self):
        self.count = 0
        self._listening = False

    def now(self) -> int:
        if not self._listening:
            jax.monitoring.register_event_duration_secs_listener(self._event)
            self._listening = True
        return self.count

    def _event(self, name: str, seconds: float, **_) -> None:
        self.count += name == "/jax/core/compile/backend_compile_duration"


compilations = _Compilations()


# ------------------------------------------------------------------ answers


@dataclass
class Taken:
    """A step as it was used: tokens delivered (not those cut away), milliseconds, whether anything was compiled in it,
    and distinct experts a layer (mean of the layers; None if unknown)."""

    delivered: int
    ms: float
    compiled: bool
    experts: float | None


@dataclass
class Answer:
    """One request, done.

    Attributes:
        text: generated text, special tokens as they are spelled, without the stop that ended it.
        tokens: the tokens delivered, C in number: up to the end token, or the token that completes a stop text, or the
            limit. These count, what was verified behind them does not.
        finish_reason: `eos`, `stop` or `length`.
        prefill: the prompt's step.
        steps: decode steps, V in number.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prefill: Taken
    steps: list[Taken] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        """Of the tokens as little-endian int32."""
        return hashlib.sha256(np.asarray(self.tokens, "<i4").tobytes()).hexdigest()


def collect(source: Iterator[Step], tokenizer: Tokenizer, *, stop_ids: Sequence[int], stop: Sequence[str] = (),
            limit: int, width: int = 1, after_step: Callable[[], None] | None = None,
            max_steps: int | None = None) -> Answer:
    """Takes steps until the answer ends.

    Args:
        limit: most tokens.
        width: most tokens a decode step can yield.
        after_step: called after each step; what it raises ends the request.
        max_steps: end after so many decode steps; the reason is then `length`.

    Raises:
        StepError: the engine yields what cannot be.
    """
    taken: list[Taken] = []

    def tokens():
        left, before = limit, compilations.now()
        for step in source:
            _check(step, width, first=not taken)
            taken.append(Taken(0, 1e3 * step.seconds, compilations.now() > before,
                               None if step.experts is None else float(np.mean(step.experts))))
            for token in step.tokens[:left]:
                taken[-1].delivered += 1
                yield int(token), 0.0
            left -= len(step.tokens)
            if after_step is not None:
                after_step()
            if left <= 0 or (max_steps is not None and len(taken) > max_steps):
                return
            before = compilations.now()

    try:
        text = TextStream(tokens(), tokenizer, stop_ids=stop_ids, stop=stop)
        for _ in text:
            pass
    finally:
        source.close()
    if not taken:
        raise StepError("steps: expected a prefill step, got none")
    delivered = sum(t.delivered for t in taken)
    if delivered != len(text.tokens):
        raise StepError(f"steps: expected {len(text.tokens)} tokens in all (C), got {delivered}")
    reason = text.finish_reason if text.finish_reason != STOP else "eos" if isinstance(text.stopped_by, int) else "stop"
    return Answer(text.text, text.tokens, reason, taken[0], taken[1:])


def _check(step: Step, width: int, first: bool) -> None:
    """Raises StepError for a step that cannot be."""
    if step.prefill != first:
        raise StepError("steps: expected the prefill step first and once, got "
                        + ("a decode step first" if first else "it again"))
    most = 1 if step.prefill else width
    if not 1 <= len(step.tokens) <= most:
        raise StepError(f"steps: expected 1 to {most} tokens in a step, got {len(step.tokens)}")

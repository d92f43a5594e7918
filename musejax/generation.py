"""The loop around the decode step: tokens one by one, or a whole answer with its text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from musejax.config import ConfigError
from musejax.decode import cache_length, check_tokens
from musejax.ffi import raise_wait_error
from musejax.kernels.cache import MAX_ROWS
from musejax.loading import Model
from musejax.sampling import Sampling
from musejax.text import TextStream


class StreamToken(NamedTuple):
    """One generated token: its id and its log-probability under the model (temperature 1)."""

    id: int
    logprob: float


class StepTokens(NamedTuple):
    """What one decode step emitted: one token, or several where guesses were accepted.

    Attributes:
        tokens: ids, in order.
        logprobs: float32 log-probability of each.
        distinct: int32 [L], distinct experts a layer that the step's rows chose; None if it did not say.
    """

    tokens: list[int]
    logprobs: list[float]
    distinct: np.ndarray | None = None


@dataclass(frozen=True)
class Generation:
    """An answer.

    Attributes:
        text: decoded text up to the stop (without it); None without a tokenizer.
        tokens: generated ids, the stop id included if one ended it.
        logprobs: float32 log-probability of each token.
        finish_reason: `stop` (stop id or stop string) or `length`.
        prompt_tokens: how many tokens the prompt had.
        steps: decode steps after the prompt; fewer than tokens where guesses were accepted.
        seconds: wall time, prefill included, first compilation included.
        decode_seconds: wall time after the first token.
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_tokens: int
    steps: int
    seconds: float
    decode_seconds: float


def plan_length(model: Model, prompt: Sequence[int], max_new_tokens: int) -> int:
    """New tokens that fit: max_new_tokens, or what the context leaves. Compiles nothing.

    Raises:
        ConfigError: empty prompt, unknown id, max_new_tokens below 1, or no room for one token.
    """
    prompt = check_tokens(model.config, prompt)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    room = model.config.max_position_embeddings - len(prompt)
    if room < 1:
        raise ConfigError(f"prompt: expected fewer than {model.config.max_position_embeddings} tokens "
                          f"(max_position_embeddings), got {len(prompt)}; shorten the prompt")
    return min(max_new_tokens, room)


def steps(model: Model, prompt: Sequence[int], sampling: Sampling | None = None, *, max_new_tokens: int = 256,
          stop_ids: Sequence[int] | None = None) -> Iterator[StepTokens]:
    """Yields what each step emitted: first the token that the prompt led to, then step by step. A stop id ends it, and
    is part of it. Checks its arguments before compiling.

    Raises:
        ConfigError: as `plan_length`, at the call, not at the first token.
        WaitError: while iterating; a kernel on a GPU gave up waiting (ffi.raise_wait_error).
    """
    sampling = sampling or Sampling()
    count = plan_length(model, prompt, max_new_tokens)
    stops = frozenset(model.defaults.stop_ids if stop_ids is None else stop_ids)
    speculate = model.speculation.drafter is not None

    def run():
        room = min(count + (MAX_ROWS if speculate else 0), model.config.max_position_embeddings - len(prompt))
        start = model.start_speculative if speculate else model.start
        state = start(prompt, cache_length(model.config, len(prompt) + room), sampling)
        made = StepTokens([int(state.token)], [float(state.logprob)])
        left = count
        while True:
            raise_wait_error()
            end = next((i + 1 for i, token in enumerate(made.tokens) if token in stops), 0)
            kept = min(end or len(made.tokens), left)
            yield StepTokens(made.tokens[:kept], made.logprobs[:kept], made.distinct)
            left -= kept
            if end or not left:
                return
            if speculate:
                state, emitted = model.step_speculative(state)
                tokens = np.asarray(emitted.tokens)[:int(emitted.count)]
                made = StepTokens(tokens.tolist(), np.asarray(emitted.logprobs)[:len(tokens)].tolist(),
                                  np.asarray(emitted.distinct))
            else:
                state = model.step(state)
                made = StepTokens([int(state.token)], [float(state.logprob)])

    return run()


def whole_run(model: Model, prompt: Sequence[int], sampling: Sampling | None = None, *, max_new_tokens: int = 256,
              stop_ids: Sequence[int] | None = None) -> Iterator[StepTokens]:
    """As `steps`, with all of them in one program on the device. What came out is yielded afterwards: the prompt's
    token, then the rest in as many parts as there were steps (which tokens a step brought is not kept).

    Raises:
        ConfigError: as `plan_length`, at the call.
        WaitError: while iterating, as `steps`.
    """
    count = plan_length(model, prompt, max_new_tokens)
    stops = tuple(model.defaults.stop_ids if stop_ids is None else stop_ids)

    def run():
        room = min(count + MAX_ROWS, model.config.max_position_embeddings - len(prompt))
        state = model.start_speculative(prompt, cache_length(model.config, len(prompt) + room), sampling)
        out = model.run_speculative(state, count, stops)
        tokens, logprobs = (np.asarray(x)[:int(out.count)].tolist() for x in (out.tokens, out.logprobs))
        raise_wait_error()
        yield StepTokens(tokens[:1], logprobs[:1])
        for part in np.array_split(np.arange(1, len(tokens)), int(out.steps) or 1):
            if part.size:
                yield StepTokens([tokens[i] for i in part], [logprobs[i] for i in part])

    return run()


def stream(model: Model, prompt: Sequence[int], sampling: Sampling | None = None, *, max_new_tokens: int = 256,
           stop_ids: Sequence[int] | None = None) -> Iterator[StreamToken]:
    """Yields generated tokens; the last one may be a stop id. Checks its arguments before compiling.

    Args:
        prompt: token ids.
        stop_ids: None takes the checkpoint's.

    Raises:
        ConfigError: as `plan_length`, at the call, not at the first token.
    """
    made = steps(model, prompt, sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    return (StreamToken(*token) for step in made for token in zip(step.tokens, step.logprobs, strict=True))


def generate(model: Model, prompt: str | Sequence[int], sampling: Sampling | None = None, *,
             max_new_tokens: int = 256, stop: Sequence[str] = (), stop_ids: Sequence[int] | None = None,
             on_device: bool = False) -> Generation:
    """A whole answer.

    Args:
        prompt: text (encoded with BOS first; special tokens in it stay plain text) or token ids.
        stop: strings that end the text and are not part of it.
        on_device: run all steps in one `lax.while_loop`, without the host in between; the same tokens. Not with `stop`.

    Raises:
        ConfigError: empty or too long prompt, text without a tokenizer, an option outside its range, `on_device` with
            stop strings.
        ValueError: an empty stop string.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError("prompt: expected text, got an empty string")
        if model.tokenizer is None:
            raise ConfigError(f"prompt: expected token ids, since {model.path} has no tokenizer.json, got text")
        prompt = model.tokenizer.encode(prompt, bos=True, parse_special=False)
    stop_ids = tuple(model.defaults.stop_ids if stop_ids is None else stop_ids)
    begin = time.perf_counter()
    first = begin

    passes = 0

    def timed(made):
        nonlocal first, passes
        for passes, step in enumerate(made):  # the first one is the prompt's
            first = first if passes else time.perf_counter()
            yield from (StreamToken(*token) for token in zip(step.tokens, step.logprobs, strict=True))

    if on_device and stop:
        raise ConfigError("on_device: expected no stop strings, which only the host can look for; use stop_ids")
    run = whole_run if on_device else steps
    source = run(model, prompt, sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    text = TextStream(timed(source), model.tokenizer, stop_ids=stop_ids, stop=stop)
    for _ in text:
        pass
    end = time.perf_counter()
    return Generation(
        text=text.text if model.tokenizer is not None else None, tokens=text.tokens, logprobs=text.logprobs,
        finish_reason=text.finish_reason, prompt_tokens=len(prompt), steps=passes,
        seconds=end - begin, decode_seconds=end - first)

"""The loop around the decode step: tokens one by one, or a whole answer with its text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from musejax.config import ConfigError
from musejax.decode import cache_length, check_tokens
from musejax.loading import Model
from musejax.sampling import Sampling
from musejax.text import TextStream


class StreamToken(NamedTuple):
    """One generated token: its id and its log-probability under the model (temperature 1)."""

    id: int
    logprob: float


@dataclass(frozen=True)
class Generation:
    """An answer.

    Attributes:
        text: decoded text up to the stop (without it); None without a tokenizer.
        tokens: generated ids, the stop id included if one ended it.
        logprobs: float32 log-probability of each token.
        finish_reason: `stop` (stop id or stop string) or `length`.
        prompt_tokens: how many tokens the prompt had.
        seconds: wall time, prefill included, first compilation included.
        decode_seconds: wall time after the first token.
    """

    text: str | None
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_tokens: int
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


def stream(model: Model, prompt: Sequence[int], sampling: Sampling | None = None, *, max_new_tokens: int = 256,
           stop_ids: Sequence[int] | None = None) -> Iterator[StreamToken]:
    """Yields generated tokens; the last one may be a stop id. Checks its arguments before compiling.

    Args:
        prompt: token ids.
        stop_ids: None takes the checkpoint's.

    Raises:
        ConfigError: as `plan_length`, at the call, not at the first token.
    """
    sampling = sampling or Sampling()
    count = plan_length(model, prompt, max_new_tokens)
    stops = frozenset(model.defaults.stop_ids if stop_ids is None else stop_ids)

    def tokens():
        state = model.start(prompt, cache_length(model.config, len(prompt) + count), sampling)
        for made in range(1, count + 1):
            token = StreamToken(int(state.token), float(state.logprob))
            yield token
            if token.id in stops or made == count:
                return
            state = model.step(state)

    return tokens()


def generate(model: Model, prompt: str | Sequence[int], sampling: Sampling | None = None, *,
             max_new_tokens: int = 256, stop: Sequence[str] = (), stop_ids: Sequence[int] | None = None) -> Generation:
    """A whole answer.

    Args:
        prompt: text (encoded with BOS first; special tokens in it stay plain text) or token ids.
        stop: strings that end the text and are not part of it.

    Raises:
        ConfigError: empty or too long prompt, text without a tokenizer, an option outside its range.
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

    def timed(tokens):
        nonlocal first
        for made, token in enumerate(tokens):
            first = first if made else time.perf_counter()
            yield token

    source = stream(model, prompt, sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    text = TextStream(timed(source), model.tokenizer, stop_ids=stop_ids, stop=stop)
    for _ in text:
        pass
    end = time.perf_counter()
    return Generation(
        text=text.text if model.tokenizer is not None else None, tokens=text.tokens, logprobs=text.logprobs,
        finish_reason=text.finish_reason, prompt_tokens=len(prompt), seconds=end - begin, decode_seconds=end - first)

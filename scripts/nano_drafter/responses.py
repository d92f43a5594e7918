"""What the drafter learns from: prompts in forms nano knows, nano's own greedy responses, its taps on the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax import lax
from nano import batches, data, text
from nano.evaluate import Decoder
from nano.training import DECODE

from musejax.config import ModelConfig
from musejax.speculation.config import DraftConfig
from musejax.speculation.train import Sequences, tapped

ROW_WIDTH = 448
"""Longest training text of nano, prompt and worked answer; longer ones take the shorter form or are left out."""

FORMS = ("labelled", "bare", "chat")


class Text(NamedTuple):
    """Token ids of a prompt and its response, the stop id included; the first `prompt` are given."""

    ids: list[int]
    prompt: int


class Responses(Decoder):
    """The batched greedy decoder, keeping the stop id of a response."""

    def texts(self, params, prompts: list[list[int]]) -> list[Text]:
        """Prompt and response of up to `count` prompts; those too long for `width` are left out."""
        fitting = [prompt for prompt in prompts if 0 < len(prompt) <= self.width][:self.count]
        tokens, valid = np.zeros((self.count, self.width), np.int32), np.ones(self.count, np.int32)
        for row, prompt in enumerate(fitting):
            tokens[row, :len(prompt)], valid[row] = prompt, len(prompt)
        out = []
        for prompt, ids in zip(fitting, np.asarray(self._compiled(params, tokens, valid)).tolist(), strict=False):
            end = next((k + 1 for k, i in enumerate(ids) if i in self.stops), len(ids))
            out.append(Text([*prompt, *ids[:end]], len(prompt)))
        return out


def recipe_of(pairs: list[tuple[str, str]], backend: tokenizers.Tokenizer, seed: int, count: int,
              variants: int) -> batches.Recipe:
    """Batches of `count` training texts, numbers and names redrawn, whose prompts are used."""
    lexicon = data.find_lexicon([question for question, _ in pairs])
    return batches.Recipe(tuple(pairs), lexicon, backend.to_str(), seed, (ROW_WIDTH,), count * ROW_WIDTH, variants,
                          noise=0.0)


def prompts_of(stream: batches.Batches) -> Iterator[list[list[int]]]:
    """Prompts, batch after batch, without end."""
    for batch in stream:
        yield [row[:n].tolist() for row, n in zip(batch.tokens, batch.prompt, strict=True)]


def fixed_prompts(forms: text.Forms, sets: dict[str, list[tuple[str, str]]]) -> dict[str, list[list[int]]]:
    """Prompts of problems as they are, by "set, form"; empty sets have none."""
    return {f"{name}, {form}": [getattr(forms, form)(question) for question, _ in pairs]
            for name, pairs in sets.items() if pairs for form in FORMS}


# ------------------------------------------------------------------ on the device


def empty_store(capacity: int, width: int, drafter: DraftConfig) -> Sequences:
    taps = jnp.zeros((capacity, width, drafter.taps_width), jnp.bfloat16)
    lengths = (jnp.zeros(capacity, jnp.int32) for _ in range(2))
    return Sequences(jnp.zeros((capacity, width), jnp.int32), taps, *lengths)


def fill(target, store: Sequences, tokens_bp, prompt_b, length_b, at, *, drafter: DraftConfig,
         config: ModelConfig) -> Sequences:
    """The store with a chunk of sequences, and nano's taps of them, at rows at, at + 1, ..."""
    decode = DECODE.for_model(config)
    taps = jax.vmap(partial(tapped, target, drafter=drafter, config=config, decode=decode))(tokens_bp)
    new = Sequences(tokens_bp, taps, prompt_b, length_b)
    return jax.tree.map(lambda kept, x: lax.dynamic_update_slice_in_dim(kept, x, at, 0), store, new)


class Store:
    """Sequences and their taps on the device, added chunk by chunk.

    Attributes:
        data: rows from `count` on are empty.
        count: texts on the device.
        capacity: rows, a multiple of `chunk`.
    """

    def __init__(self, target, capacity: int, chunk: int, width: int, drafter: DraftConfig, config: ModelConfig):
        self._target, self._chunk, self._width = target, chunk, width
        self.capacity, self.count = -(-capacity // chunk) * chunk, 0
        self._waiting: list[Text] = []
        self.data = empty_store(self.capacity, width, drafter)
        self._fill = jax.jit(partial(fill, drafter=drafter, config=config), donate_argnums=1)

    def compile(self) -> Store:
        integers = jax.ShapeDtypeStruct((self._chunk,), jnp.int32)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self._target, self.data))
        tokens = jax.ShapeDtypeStruct((self._chunk, self._width), jnp.int32)
        self._fill = self._fill.lower(*like, tokens, integers, integers, jax.ShapeDtypeStruct((), jnp.int32)).compile()
        return self

    def __len__(self) -> int:
        """Texts so far, those on their way to the device included."""
        return self.count + len(self._waiting)

    def add(self, texts: list[Text], last: bool = False) -> None:
        """Adds texts as far as they fit; whole chunks go to the device, with `last` an unfinished one too."""
        self._waiting += texts[:self.capacity - len(self)]
        while len(self._waiting) >= self._chunk or (last and self._waiting):
            some, self._waiting = self._waiting[:self._chunk], self._waiting[self._chunk:]
            tokens, lengths = np.zeros((self._chunk, self._width), np.int32), np.zeros((2, self._chunk), np.int32)
            for i, row in enumerate(some):
                tokens[i, :len(row.ids)], lengths[:, i] = row.ids, (row.prompt, len(row.ids))
            self.data = self._fill(self._target, self.data, tokens, *lengths, np.int32(self.count))
            self.count += len(some)


def answer_sets(decoder: Responses, target, store: Store, prompts: dict[str, list[list[int]]]) -> dict[str, list[int]]:
    """Answers all prompts into the store -> its rows by set; prompts too long for the decoder are left out."""
    places = {}
    for name, some in prompts.items():
        first = len(store)
        for at in range(0, len(some), decoder.count):
            store.add(decoder.texts(target, some[at:at + decoder.count]))
        places[name] = list(range(first, len(store)))
    store.add([], last=True)
    return {name: rows for name, rows in places.items() if rows}


def answer_many(decoder: Responses, target, store: Store, stream: batches.Batches, until: float) -> int:
    """Answers prompts until the store is full or the clock (time.monotonic) says `until`, one batch at least.

    Returns:
        Tokens of all responses.
    """
    tokens, source = 0, prompts_of(stream)
    while len(store) < store.capacity and (time.monotonic() < until or not len(store)):
        made = decoder.texts(target, next(source))
        store.add(made)
        tokens += sum(len(row.ids) - row.prompt for row in made)
    store.add([], last=True)
    jax.block_until_ready(store.data)
    return tokens

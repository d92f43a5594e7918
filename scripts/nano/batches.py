"""Training batches: every epoch draws each problem anew, in worker processes, in an order fixed by the seed."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
import tokenizers
from nano.data import Lexicon, Problems
from nano.text import Forms, Row

CHUNK = 128  # problems a task


class Rows(NamedTuple):
    """Texts: `tokens` [n, width + 1] filled up with id 0, `prompt` and `length` int32 [n] (0 for an empty row)."""

    tokens: np.ndarray
    prompt: np.ndarray
    length: np.ndarray

    @property
    def width(self) -> int:
        return self.tokens.shape[1] - 1

    def batch(self, places: np.ndarray, width: int) -> Rows:
        """These rows, cut to a width that holds them, as int32."""
        return Rows(self.tokens[places, :width + 1].astype(np.int32), self.prompt[places], self.length[places])


def pack(rows: list[Row], count: int, width: int) -> Rows:
    """Up to `count` rows, each of at most width + 1 tokens."""
    tokens = np.zeros((count, width + 1), np.int32)
    for line, row in zip(tokens, rows, strict=False):
        line[:len(row.ids)] = row.ids
    lengths = [(row.prompt, len(row.ids)) for row in rows] + [(0, 0)] * (count - len(rows))
    prompt, length = np.array(lengths, np.int32).reshape(-1, 2).T.copy()
    return Rows(tokens, prompt, length)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What an epoch is made of; together with the seed it decides every token.

    Attributes:
        pairs: (question, answer) of the training problems.
        tokenizer: tokenizer.json as text.
        widths: row lengths of the buckets, ascending; a row goes to the first that holds it, or is left out.
        tokens: tokens of one batch (rows x width).
        variants: times a problem with redrawable numbers is shown in an epoch; others are shown once.
        names, things, keep, noise: probabilities, see `Problems` and `Forms`.
    """

    pairs: tuple[tuple[str, str], ...]
    lexicon: Lexicon
    tokenizer: str
    seed: int
    widths: tuple[int, ...]
    tokens: int
    variants: int = 4
    names: float = 0.6
    things: float = 0.3
    keep: float = 0.1
    noise: float = 0.05


class Maker:
    """Makes rows by a recipe; lives in each worker."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.problems = Problems(list(recipe.pairs), recipe.lexicon, recipe.names, recipe.things, recipe.keep)
        self.forms = Forms(tokenizers.Tokenizer.from_str(recipe.tokenizer), recipe.noise)

    def rows(self, epoch: int, first: int) -> Rows:
        """Rows of CHUNK problems from `first` on, in one epoch."""
        longest, out = self.recipe.widths[-1] + 1, []
        for i in range(first, min(first + CHUNK, len(self.recipe.pairs))):
            rng = np.random.default_rng([self.recipe.seed, epoch, i])
            count = self.recipe.variants if self.problems.templates[i] else 1
            for question, answer in self.problems.variants(i, rng, count):
                row = self.forms.row(question, answer, rng)
                if len(row.ids) > longest:
                    row = self.forms.plain_row(question, answer, labelled=True)
                if len(row.ids) <= longest:
                    out.append(row)
        packed = pack(out, len(out), longest - 1)
        return packed._replace(tokens=packed.tokens.astype(np.uint16))  # half the bytes on the way to the trainer


_maker: Maker


def _start_worker(recipe: Recipe) -> None:
    global _maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = Maker(recipe)


def _work(epoch: int, first: int) -> Rows:
    return _maker.rows(epoch, first)


class Batches:
    """Iterates over batches from a position on; `position` (epoch, batch) is that of the next one.

    Args:
        workers: processes; 0 makes everything here.
        ahead: epochs made in advance.
    """

    def __init__(self, recipe: Recipe, position: tuple[int, int] = (0, 0), workers: int = 0, ahead: int = 3):
        self.recipe, self.position = recipe, position
        self._ahead = ahead if workers else 1
        if workers:  # spawned: a fork would copy the threads of JAX
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, context, _start_worker, (recipe,))
            self._submit = lambda *task: self._pool.submit(_work, *task)
        else:
            self._pool, maker = None, Maker(recipe)

            def here(*task):
                done = Future()
                done.set_result(maker.rows(*task))
                return done

            self._submit = here
        self._queue: deque = deque()
        self._next_epoch = position[0]
        self._fill()

    def _fill(self) -> None:
        while len(self._queue) < self._ahead:
            tasks = [self._submit(self._next_epoch, first) for first in range(0, len(self.recipe.pairs), CHUNK)]
            self._queue.append((self._next_epoch, tasks))
            self._next_epoch += 1

    def __iter__(self) -> Iterator[Rows]:
        while True:
            epoch, tasks = self._queue.popleft()
            rows = Rows(*map(np.concatenate, zip(*(task.result() for task in tasks), strict=True)))
            self._fill()
            plan = self._plan(rows.length, epoch)
            for k in range(self.position[1], len(plan)):
                self.position = (epoch, k + 1)
                yield rows.batch(*plan[k])
            self.position = (epoch + 1, 0)

    def _plan(self, lengths: np.ndarray, epoch: int) -> list[tuple[np.ndarray, int]]:
        """The batches of an epoch as (rows, width), shuffled; rows that do not fill one are left out."""
        recipe, plan = self.recipe, []
        rng = np.random.default_rng([recipe.seed, epoch, len(recipe.pairs)])
        order = rng.permutation(len(lengths))
        bucket = np.searchsorted(np.array(recipe.widths) + 1, lengths[order])
        for b, width in enumerate(recipe.widths):
            places, count = order[bucket == b], recipe.tokens // width
            plan += [(places[at:at + count], width) for at in range(0, len(places) - count + 1, count)]
        if not plan:
            raise ValueError(f"expected rows enough for one batch of {recipe.tokens} tokens, got {len(lengths)} rows")
        return [plan[k] for k in rng.permutation(len(plan))]

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)

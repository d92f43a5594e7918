"""From generated tokens to text: whole characters, stop strings, the reason why it ended.

Independent of JAX and of the model: `TextStream` takes any iterator of (token id, log-probability).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from musejax.tokenizer import StreamDecoder, Tokenizer

STOP, LENGTH, INTERRUPT = "stop", "length", "interrupt"
"""Finish reasons: a stop id or stop string came; the tokens ran out; the user broke off."""


class StopStrings:
    """Passes text on until a stop string is complete, and never any part of it.

    Text that may be the beginning of a stop string is held back until the next text decides. The result
    does not depend on how the text is cut into pieces: the string that is complete first wins, and of those
    complete at the same place the longest.

    Attributes:
        found: the stop string that came, or None.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise ValueError("stop strings: expected at least one character each, got an empty one")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that is now safe to show; nothing more after a stop string."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if places:
            _, at, self.found = min(places)
            self._held = ""
            return text[:at]
        keep = max((self._overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - keep:]
        return text[:len(text) - keep]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a beginning of `stop`."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Iterates over pieces of text of a generation, and knows afterwards what came and why it ended.

    Special tokens other than stop ids appear in the text as they are spelled. Without a tokenizer the text is
    the token ids, separated by spaces.

    Attributes:
        tokens, logprobs: of all tokens taken so far, a stop id included.
        text: the pieces so far, joined; without the stop id or stop string.
        finish_reason: `stop`, `length`, `interrupt`, or None while it runs.
        stopped_by: the stop id or stop string, if that was the reason.

    Args:
        source: yields (token id, log-probability). It may end at a stop id (yielding it last) or go on.
        stop_ids: these tokens end the text and are not part of it.
        stop: these strings do likewise.

    Raises:
        ValueError: an empty stop string, or stop strings without a tokenizer.
    """

    def __init__(self, source: Iterable[tuple[int, float]], tokenizer: Tokenizer | None, *,
                 stop_ids: Iterable[int] = (), stop: Sequence[str] = ()):
        if stop and tokenizer is None:
            raise ValueError("stop strings: expected a checkpoint with tokenizer.json, found none")
        self._source = iter(source)
        self._decoder = StreamDecoder(tokenizer) if tokenizer is not None else _IdsAsText()
        self._stops = StopStrings(stop)
        self._stop_ids = frozenset(stop_ids)
        self._pieces: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.stopped_by: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, none empty."""
        while self.finish_reason is None:
            piece = self._step()
            if piece:
                self._pieces.append(piece)
                yield piece

    def _step(self) -> str:
        """Takes one token; returns the text it completes."""
        try:
            token, logprob = next(self._source)
        except StopIteration:
            return self._end(LENGTH)
        self.tokens.append(int(token))
        self.logprobs.append(float(logprob))
        if token in self._stop_ids:
            self.stopped_by = int(token)
            return self._end(STOP)
        piece = self._stops.push(self._decoder.push(token))
        return piece + self._end(STOP) if self._stops.found is not None else piece

    def _end(self, reason: str) -> str:
        """Sets the finish reason and frees the source; returns the text that was held back."""
        rest = self._stops.push(self._decoder.finish())
        if self._stops.found is not None:
            reason, self.stopped_by = STOP, self._stops.found
        self.finish_reason = reason
        if hasattr(self._source, "close"):
            self._source.close()
        return rest + self._stops.finish()

    def interrupt(self) -> str:
        """Ends the text here; returns the piece that was still held back. Does nothing after the end."""
        if self.finish_reason is not None:
            return ""
        rest = self._end(INTERRUPT)
        self._pieces.append(rest)
        return rest


class _IdsAsText:
    """Stands in for a decoder where there is no tokenizer."""

    def __init__(self):
        self._first = True

    def push(self, token: int) -> str:
        space, self._first = "" if self._first else " ", False
        return f"{space}{int(token)}"

    def finish(self) -> str:
        return ""

"""What a model is asked and where its answer ends: the profiles. Numbers of different profiles cannot be compared."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from musejax.chat import ChatTemplate, opening_of, split_messages
from musejax.gsm8k.data import Data, DataError, Row, load, row_id
from musejax.gsm8k.shots import COT8
from musejax.text import StopStrings
from musejax.tokenizer import Tokenizer

SPLIT = "test"
"""Rows of this file are scored; worked examples never come from it."""


class ProfileError(ValueError):
    """A profile cannot be run so; the message says what was expected."""


@dataclass(frozen=True)
class Profile:
    """A recipe.

    Attributes:
        before, after: what stands around the question.
        shots: worked examples before it: "" none, "train5" the first five of the train file, "cot8" the fixed eight.
        stop: texts that end the answer and are no part of it; the checkpoint's end tokens do so in every profile.
        limit: most new tokens.
        scorers: names of `extract.SCORERS`; the first is the one that progress shows.
        effort: reasoning effort of a chat profile; None for profiles without a template.
        rows: how many rows are run unless told otherwise; None is all.
    """

    name: str
    before: str
    after: str
    stop: tuple[str, ...]
    limit: int
    scorers: tuple[str, ...]
    shots: str = ""
    effort: str | None = None
    rows: int | None = None

    @property
    def chat(self) -> bool:
        """Whether the question goes through the checkpoint's chat template."""
        return self.effort is not None


_QUESTION = {"before": "Question: ", "after": "\nAnswer:", "stop": ("Question:",), "limit": 512,
             "scorers": ("strict", "flexible", "numeric")}
_BOXED = {"before": "", "stop": (), "effort": "low",
          "after": "\nPlease reason step by step, and put your final answer within \\boxed{}."}

PROFILES = {p.name: p for p in (
    Profile("fewshot5", shots="train5", **_QUESTION),
    Profile("boxed-chat", limit=4096, scorers=("numeric", "boxed", "flexible"), **_BOXED),
    Profile("plain", **_QUESTION),
    Profile("cot8", before="Q: ", after="\nA:", shots="cot8", stop=("Q:",), limit=512,
            scorers=("cot-strict", "flexible")),
    Profile("bench", limit=512, scorers=(), rows=1, **_BOXED),
)}


@dataclass(frozen=True)
class Shots:
    """Worked examples.

    Attributes:
        ids: where each comes from, such as `train/0000`.
        pairs: (question, answer) each.
        data: the file they were read from, if any.
    """

    ids: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    data: Data | None = None


def shots_of(profile: Profile, folder: Path) -> Shots:
    """The worked examples of a profile.

    Raises:
        DataError: they come from a file that is missing or too short.
    """
    if profile.shots == "cot8":
        return Shots(tuple(f"cot8/{i}" for i in range(len(COT8))), COT8)
    if not profile.shots:
        return Shots()
    data = load("train", folder)
    if len(data.rows) < 5:
        raise DataError(f"{data.path}: expected at least 5 problems, got {len(data.rows)}")
    rows = data.rows[:5]
    return Shots(tuple(row_id("train", r.index) for r in rows), tuple((r.question, r.answer) for r in rows), data)


def check_apart(rows: Sequence[Row], shots: Shots) -> None:
    """Raises ProfileError if a row to be scored is also a worked example of the prompt."""
    given = {question.strip(): name for name, (question, _) in zip(shots.ids, shots.pairs, strict=True)}
    for row in rows:
        if name := given.get(row.question.strip()):
            raise ProfileError(f"{row_id(SPLIT, row.index)}: expected no scored row among the worked examples, but it "
                               f"is {name}; leave it out with --rows, or take the published data")


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, as text, and what it has already written of the reply (chat; None otherwise)."""

    ids: list[int]
    text: str
    opening: str | None


class Prompter:
    """Makes the prompts of one profile with a checkpoint's tokenizer and template.

    Attributes:
        date: ISO date that the template is given, so that prompts do not change at midnight; None gives none.

    Raises:
        ProfileError: the profile needs a chat template and there is none, or needs none and got a date.
        ChatError: the template does not accept the question.
    """

    def __init__(self, profile: Profile, shots: Shots, tokenizer: Tokenizer, template: ChatTemplate | None,
                 date: str | None = None):
        if profile.chat and template is None:
            raise ProfileError(f"profile {profile.name}: expected a checkpoint with a chat template, found none; "
                               "take --profile plain or fewshot5")
        if date is not None and not profile.chat:
            raise ProfileError(f"--date: expected a profile with a chat template beside it, got {profile.name}")
        self.profile, self.tokenizer, self._template = profile, tokenizer, template
        self._shots = "".join(f"{profile.before}{q}{profile.after} {a}\n\n" for q, a in shots.pairs)
        self.date = date or self._date()

    def _date(self) -> str | None:
        """Today, if the template tells the date even where none is given; else None."""
        if not self.profile.chat:
            return None
        today = datetime.date.today().isoformat()
        return today if self._render("a", None) == self._render("a", today) else None

    def _render(self, content: str, date: str | None) -> str:
        return self._template.render([{"role": "user", "content": content}], reasoning_effort=self.profile.effort,
                                     date=date)

    def text(self, row: Row) -> str:
        """The prompt as text, the template's markers included."""
        content = f"{self._shots}{self.profile.before}{row.question}{self.profile.after}"
        return self._render(content, self.date) if self.profile.chat else content

    def prompt(self, row: Row) -> Prompt:
        """The prompt of one row; BOS comes from the template, or else first."""
        text, chat = self.text(row), self.profile.chat
        ids = self.tokenizer.encode(text, bos=not chat, parse_special=chat)
        return Prompt(ids, text, opening_of(text) if chat else None)

    def digest(self, row: Row) -> str:
        """SHA-256 of the prompt's text."""
        return hashlib.sha256(self.text(row).encode()).hexdigest()

    def split(self, raw: str, opening: str | None) -> tuple[str, str]:
        """A generated text -> (final text, reasoning).

        In chat, only messages to the user are final, and all others reasoning, in which no answer is ever looked for.
        Then special tokens go, and the final text is cut at the profile's stops once more: reasoning may hold them.
        """
        final, reasoning = raw, ""
        if opening is not None:
            messages = split_messages(raw, opening)
            final = "\n".join(m.text for m in messages if m.recipient == "user" and m.text)
            reasoning = "\n".join(m.text for m in messages if m.recipient != "user" and m.text)
        return cut(self._plain(final), self.profile.stop), self._plain(reasoning)

    def _plain(self, text: str) -> str:
        for special in self.tokenizer.special_ids:
            text = text.replace(self.tokenizer.token_bytes(special).decode(errors="replace"), "")
        return text


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop."""
    strings = StopStrings(stops)
    return strings.push(text) + strings.finish()

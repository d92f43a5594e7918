"""The GSM8K problems: one JSON object a line, with `question` and `answer`; the last line of an answer is `#### N`."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = "MUSEJAX_GSM8K"
FILES = {"test": "gsm8k_test.jsonl", "train": "gsm8k_train.jsonl"}
EXPECTED = {
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
}
"""SHA-256 of the published files: 1,319 and 7,473 problems."""

MARK = "#### "


class DataError(ValueError):
    """The problems are missing or cannot be read; the message says what was expected."""


class Row(NamedTuple):
    """One problem.

    Attributes:
        index: line of the file, from 0.
        answer: worked lines and the last line with the number, as published.
        gold: the number as the file writes it, such as `18`, `-10` or `1,450,000`.
    """

    index: int
    question: str
    answer: str
    gold: str


@dataclass(frozen=True)
class Data:
    """The problems of one file, and the SHA-256 of its bytes."""

    split: str
    path: Path
    rows: tuple[Row, ...]
    sha256: str

    @property
    def expected(self) -> bool:
        """Whether this is the published file."""
        return self.sha256 == EXPECTED[self.split]


def row_id(split: str, index: int) -> str:
    """Name of a row in results, such as `test/0042`."""
    return f"{split}/{index:04d}"


def locate(folder: str | None) -> Path:
    """The folder with the problems: the argument, else $MUSEJAX_GSM8K.

    Raises:
        DataError: neither is given, or it is no folder.
    """
    source = "--data" if folder is not None else ENVIRONMENT
    given = folder if folder is not None else os.environ.get(ENVIRONMENT)
    files = " and ".join(f"{FILES[s]} (SHA-256 {EXPECTED[s]})" for s in FILES)
    if not given:
        raise DataError(f"GSM8K problems: expected --data DIR, or {ENVIRONMENT}, naming the folder with {files}; "
                        "got neither")
    if not Path(given).is_dir():
        raise DataError(f"{source} {given}: expected a folder with {files}, found no such folder")
    return Path(given)


def load(split: str, folder: Path) -> Data:
    """Reads all problems of `split`, "test" or "train". A file of another hash is read too; see `Data.expected`.

    Raises:
        DataError: no such file, or a line that is no problem.
    """
    path = folder / FILES[split]
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: expected the GSM8K {split} problems with SHA-256 {EXPECTED[split]}, "
                        "found no such file") from None
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    rows = tuple(_row(i, line, path) for i, line in enumerate(lines))
    return Data(split, path, rows, hashlib.sha256(content).hexdigest())


def _row(index: int, line: bytes, path: Path) -> Row:
    where = f"{path}, line {index + 1}"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise DataError(f"{where}: expected a JSON object, got: {err}") from None
    question, answer = (entry.get(k) if isinstance(entry, dict) else None for k in ("question", "answer"))
    if not isinstance(question, str) or not isinstance(answer, str):
        raise DataError(f"{where}: expected an object with the texts question and answer, got {line[:60]!r}")
    last = answer.rpartition("\n")[2]
    gold = last.removeprefix(MARK)
    plain = gold.replace(",", "").removeprefix("-")
    if not last.startswith(MARK) or not (plain.isascii() and plain.isdecimal()):
        raise DataError(f"{where}: expected an answer whose last line is '{MARK}' and an integer, got {last[:60]!r}")
    return Row(index, question, answer, gold)

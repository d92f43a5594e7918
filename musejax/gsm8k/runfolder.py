"""A run on disk: `config.json` (what was asked), `items.jsonl` (a line a row, written when it is done), `summary.json`.

A run that was killed leaves whole lines and maybe a torn last one. Going on keeps the rows that are done, by their id,
and runs the others, those that failed included.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
from pathlib import Path

CONFIG, ITEMS, SUMMARY = "config.json", "items.jsonl", "summary.json"


class RunError(ValueError):
    """The folder of a run cannot be used so; the message says what was expected and what to do."""


class RunFolder:
    """The folder of one run, held by one process at a time.

    Attributes:
        path: the folder.
        done: items of earlier processes that did not fail, by id.

    Args:
        path: made if it is not there.
        resume: go on with the items in it.

    Raises:
        RunError: it is no folder, another process holds it, it has items and resume is False, it has items and no
            config.json, or a line of items.jsonl is no item.
        OSError: it cannot be made or written.
    """

    def __init__(self, path: str | Path, resume: bool):
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"--out {path}: expected a folder or a new name, found a file")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._hold()
        self._file = None
        try:
            with tempfile.TemporaryFile(dir=self.path):  # an unwritable folder must not be noticed after hours
                pass
            items, self._torn = self._read()
            if items and not resume:
                raise RunError(f"--out {path}: expected an empty folder or --resume, found {len(items)} items; add "
                               "--resume to go on with them, or name a new folder")
            if items and not (self.path / CONFIG).is_file():
                raise RunError(f"{self.path / CONFIG}: expected the configuration of the {len(items)} items beside it, "
                               "found no such file; name a new folder with --out")
        except BaseException:
            self.close()
            raise
        self.done = {item["id"]: item for item in items if item["error"] is None}
        self._rewrite = self._torn or len(self.done) != len(items)

    def _hold(self) -> int:
        """Locks the folder until the process ends, however it ends."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                raise RunError(f"--out {self.path}: expected a folder that no other run is writing to, but one is; "
                               "wait for it, or name a new folder") from None
            # A file system without locks: go on without.
        return handle

    def _read(self) -> tuple[list[dict], bool]:
        """(items, whether the last line was torn)."""
        try:
            content = (self.path / ITEMS).read_bytes()
        except FileNotFoundError:
            return [], False
        *lines, rest = content.split(b"\n")
        items = {}
        for number, line in enumerate(lines, 1):
            try:
                item = json.loads(line)
                name, _ = item["id"], item["error"]
                items[name] = item
            except (ValueError, RecursionError, KeyError, TypeError) as err:
                raise RunError(f"{self.path / ITEMS}, line {number}: expected an item of a run, got {line[:60]!r} "
                               f"({type(err).__name__}); remove the line to have its row run again") from None
        return list(items.values()), bool(rest)

    def config(self) -> dict | None:
        """The configuration of the items here; None if there is none.

        Raises:
            RunError: the file is not a JSON object.
        """
        path = self.path / CONFIG
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as err:
            raise RunError(f"{path}: expected JSON, got: {err}; name a new folder with --out") from None
        if not isinstance(value, dict):
            raise RunError(f"{path}: expected a JSON object, got {type(value).__name__}; name a new folder with --out")
        return value if self.done or self._torn or self._rewrite else None

    def start(self, config: dict) -> None:
        """Writes the configuration, drops what was torn or failed, and opens items.jsonl to append."""
        self._write_json(CONFIG, config)
        with contextlib.suppress(FileNotFoundError):
            (self.path / SUMMARY).unlink()  # of an earlier process
        if self._rewrite:
            self._write_items(self.done.values())
        self._file = open(self.path / ITEMS, "a", encoding="utf-8")

    def add(self, item: dict) -> None:
        """Writes one item, for good as far as this process can tell."""
        self._file.write(_line(item))
        self._file.flush()
        self.done[item["id"]] = item

    def finish(self, summary: dict) -> None:
        """Puts the items in the order of their rows, and writes the summary."""
        self._file.close()
        names = list(self.done)
        if names != sorted(names):
            self._write_items(self.done[name] for name in sorted(names))
        self._write_json(SUMMARY, summary)

    def close(self) -> None:
        """Lets go of the folder; it may be done twice."""
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write_items(self, items) -> None:
        self._write(ITEMS, "".join(map(_line, items)))

    def _write_json(self, name: str, value: dict) -> None:
        self._write(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        """The whole file or nothing."""
        partial = self.path / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path / name)


def _line(item: dict) -> str:
    return json.dumps(item, ensure_ascii=False) + "\n"

"""What the subcommands of `musejax` do; `musejax.cli` parses their arguments and imports them when needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


class UsageError(ValueError):
    """The command line asks for something that cannot be done; the message says what was expected."""


def note(text: str) -> None:
    """One line for the user, on stderr: stdout is for results."""
    print(f"musejax: {text}", file=sys.stderr, flush=True)


def checkpoint_folder(given: str | None, hint: str = "") -> Path:
    """The folder of the checkpoint argument; None takes the shipped nano.

    Args:
        hint: ends the message if there is no such folder.

    Raises:
        UsageError: no such folder.
        FileNotFoundError: the shipped checkpoint is not installed.
    """
    if given is None:
        from musejax.paths import nano_path

        return nano_path()
    path = Path(given)
    if not path.is_dir():
        from musejax.checkpoint.container import unfinished_reason

        if reason := unfinished_reason(path):
            raise UsageError(reason)
        found = "a file" if path.exists() else "nothing"
        raise UsageError(f"{given}: expected a checkpoint folder, found {found}{hint}")
    return path


def check_overlays(folders: Sequence[str]) -> None:
    """Raises UsageError for the first overlay that is no folder."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise UsageError(f"--overlay {folder}: expected a folder with safetensors files, found no such folder")

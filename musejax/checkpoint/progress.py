"""The progress bar of long work: bytes done, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def bar(total: int, title: str, enabled: bool, start: int = 0) -> Iterator[Callable]:
    """Shows progress over `total` bytes; the value is a function to call with each number of bytes done."""
    with tqdm(total=total, initial=start, desc=title, unit="B", unit_scale=True, disable=not enabled) as shown:
        yield shown.update


def say(text: str, enabled: bool) -> None:
    """Prints a line on stderr without breaking a bar that is shown."""
    if enabled:
        tqdm.write(text, file=sys.stderr)

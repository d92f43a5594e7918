"""The error of this package, and the list of faults from which its text is made."""

from __future__ import annotations

MAX_LISTED = 20
"""Faults of one kind that are written out; the rest is counted."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the text lists every fault that was found, and what to change."""


class Faults:
    """Faults by kind, collected so that one error can name all of them."""

    def __init__(self):
        self._by_kind: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_kind)

    def add(self, kind: str, text: str) -> None:
        self._by_kind.setdefault(kind, []).append(text)

    def has(self, kind: str) -> bool:
        return kind in self._by_kind

    def raise_if_any(self, heading: str, advice: str = "", listed: int = MAX_LISTED) -> None:
        """Raises CheckpointError with all faults so far, kind by kind; does nothing if there are none.

        Args:
            listed: faults of one kind that are written out.
        """
        if not self:
            return
        lines = [heading]
        for kind, texts in self._by_kind.items():
            lines.append(f"  {kind} ({len(texts)}):")
            lines += [f"    {text}" for text in texts[:listed]]
            if len(texts) > listed:
                lines.append(f"    and {len(texts) - listed} more")
        raise CheckpointError("\n".join(lines + ([advice] if advice else [])))

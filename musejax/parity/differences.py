"""Comparing bits: the first element that differs, the layer where the streams part, and a line of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Difference:
    """The first element that differs.

    Attributes:
        what: array, such as "logits".
        index: of the element.
        left, right: its values in hex and as numbers.
        differing, size: elements of the array, how many of them differ and how many there are.
        layer: first layer after which the stream differs; -1 for the embedding; the number of layers if the streams
            are equal and only the LM head is not; None if it was not looked for.
        row: first row whose stream differs there, None for the LM head.
    """

    what: str
    index: tuple[int, ...]
    left: str
    right: str
    differing: int
    size: int
    layer: int | None = None
    row: int | None = None

    def __str__(self):
        where = "" if self.layer is None else "; all streams are equal, up to the LM head" if self.row is None else (
            f"; the streams part in {'the embedding' if self.layer < 0 else f'layer {self.layer}'}, row {self.row}")
        return (f"{self.what} differ in {self.differing:,} of {self.size:,} values, first at {list(self.index)}: "
                f"{self.left} against {self.right}{where}")


def _bits(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def _hex(value: np.generic) -> str:
    return f"0x{value.tobytes()[::-1].hex()} ({value})"


def difference(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> Difference | None:
    """The first difference of the first array that differs; None if all bits agree.

    Raises:
        ValueError: other names, shapes or dtypes: the two runs are not comparable.
    """
    if list(left) != list(right):
        raise ValueError(f"expected the same arrays, got {list(left)} and {list(right)}")
    for name, a in left.items():
        a, b = np.asarray(a), np.asarray(right[name])
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(f"{name}: expected {a.dtype} {list(a.shape)} on both sides, got {b.dtype} {list(b.shape)}")
        differs = _bits(a) != _bits(b)
        if differs.any():
            at = tuple(int(i) for i in np.unravel_index(differs.argmax(), a.shape))
            return Difference(name, at, _hex(a[at]), _hex(b[at]), int(differs.sum()), a.size)
    return None


def located(found: Difference, left: np.ndarray, right: np.ndarray) -> Difference:
    """The difference, with the place where the streams [L + 1, t, d] of the two runs part."""
    differs = (_bits(left) != _bits(right)).any(-1)
    if not differs.any():
        return replace(found, layer=len(left) - 1)
    layer, row = (int(i) for i in np.argwhere(differs)[0])
    return replace(found, layer=layer - 1, row=row)


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        group: see the text of the package.
        setting: activations and combine order.
        name: what is compared.
        passed: None if it could not be run.
        note: why it was not run, or what is wrong besides bits.
        values: compared.
    """

    group: str
    setting: str
    name: str
    passed: bool | None
    values: int = 0
    difference: Difference | None = None
    note: str = ""

    def __str__(self):
        verdict = {True: "PASS", False: "FAIL", None: "SKIP"}[self.passed]
        head = f"{verdict}  {self.group:<8} {self.setting:<24} {self.name}"
        if self.note:
            return f"{head}: {self.note}"
        return f"{head}: {self.difference}" if self.difference else f"{head} ({self.values:,} values)"

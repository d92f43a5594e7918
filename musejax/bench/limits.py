"""What the GPU at hand can do at most and at best: bandwidths, latencies, and properties the kernels build on.

The measurements are small CUDA kernels in `ffi/bench`; here their rows become a table and plain data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

GROUPS = {
    "hbm": "read of HBM through a bulk-copy ring, steady and from a cold launch; SM clock",
    "l2": "the same from L2, by resident size",
    "nvfp4": "stream of NVFP4 weights, dequantised and multiplied",
    "barrier": "barrier of all blocks",
    "gather": "gather over all blocks by tagged words, alone and beside a weight stream",
    "tear": "16-byte words read in halves of two writes",
    "mma": "columns of an MMA independent, subnormal operands kept",
    "fence": "store and fence, alone and beside a weight stream",
    "cluster": "barrier of a cluster",
    "launch": "empty kernels in a CUDA graph",
    "peer": "flag and exchange between two GPUs",
}
"""What can be measured; the library has the same names (`kGroups` in `ffi/bench/limits.cu`)."""

COLUMNS = f"{'what':<50} {'figure':>10} {'unit':<5} {'least to greatest':>19}  {'design':<24} note"


class BenchError(RuntimeError):
    """Nothing can be measured here; the text says what was expected and found."""


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        name: group.what, such as "hbm.steady"; only the group if all of it failed.
        what: the same for people.
        unit: "TB/s", "us", "GHz", or "wrong" for a count of wrong results.
        figure, low, high: median, least and greatest of the repeats; 0 if there are none.
        design: the figure that the design counts on, as text; empty: none.
        note: sizes, checks, or why the status is not ok.
        status: ok; failed: a check or a wait; skipped: cannot be measured here.
    """

    name: str
    what: str
    unit: str
    figure: float
    low: float
    high: float
    repeats: int
    design: str
    note: str
    status: str


def open_library():
    """The CUDA library, and the name of the GPU that is measured.

    Raises:
        LibraryError: the library is missing or does not fit.
        BenchError: JAX finds no GPU.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of the memory
    import jax

    from musejax.ffi import library

    module = library("cuda")
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError as error:
        raise BenchError(f"bench limits: expected a GPU that JAX can use, got none ({error}): run it on a machine with "
                         "an NVIDIA GPU, with jax[cuda13] or jax[cuda12] installed") from error
    return module, device.device_kind


def measure(module, groups: Sequence[str], device: int = 0) -> Iterator[Row]:
    """Measures group by group; each group's rows come when it is done.

    Args:
        module: the CUDA library.
        groups: names from `GROUPS`.
        device: number of the GPU.

    Raises:
        BenchError: the library refuses; its text says why.
    """
    for group in groups:
        try:
            rows = module.limits(device, [group])
        except (RuntimeError, ValueError) as error:
            raise BenchError(str(error)) from error
        yield from (Row(**row) for row in rows)


def as_line(row: Row) -> str:
    """A row under `COLUMNS`."""
    figure = spread = "-"
    if row.repeats:
        figure = _number(row, row.figure)
        spread = f"{_number(row, row.low)} to {_number(row, row.high)}" if row.repeats > 1 else "-"
    note = f"FAILED: {row.note}" if row.status == "failed" else row.note
    return f"{row.what:<50} {figure:>10} {row.unit:<5} {spread:>19}  {row.design or '-':<24} {note}".rstrip()


def _number(row: Row, value: float) -> str:
    return f"{value:,.0f}" if row.unit == "wrong" else f"{value:.2f}"


def to_json(rows: Sequence[Row], **more) -> dict:
    """The rows as plain data, and whatever else is to be kept with them."""
    return {**more, "failed": sum(row.status == "failed" for row in rows), "rows": [asdict(row) for row in rows]}

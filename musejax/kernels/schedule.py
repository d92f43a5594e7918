"""The schedule of the layer kernel's dense units, as plain data: which SM runs which units, in which order.

A unit is 16 output columns of a dense GEMM times one chunk of K, numbered chunk by chunk (`ffi/layer/dense.cuh`). An SM
runs its units one after the other, and its weights come through the ring in that very order. This repeats every turn of
the kernel's loop over layers:

    attention, out, router, pooler, experts, unpooler, qkvg of the next layer

A unit waits for the finished values of the GEMMs before its own, that is for all of their units, on all SMs. So units
in a wrong order on one SM can leave all SMs waiting for each other; `validate` finds that, and `spans` makes the form
that the kernel reads. By design any valid schedule gives the same bits; tests/gpu/test_schedule_bits.py compares seven.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from musejax.config import NUM_SLICES, SLICE_MULTIPLE, ModelConfig
from musejax.packing import CHUNK

GEMMS = ("qkvg", "out", "router", "pooler", "unpooler")
"""In the order of `enum Dense`."""

TURN = ("out", "router", "pooler", "unpooler", "qkvg")
"""In the order in which the kernel's loop runs them."""

NEEDS = {"out": (), "router": ("out",), "pooler": ("out",), "unpooler": ("router", "pooler"), "qkvg": ("unpooler",)}
"""GEMMs whose units must all have run, in the same turn, before a unit can: between pooler and unpooler all SMs run the
experts, which need router and pooler. `out` needs the attention of what qkvg made in the turn before. No unit of a turn
waits for a later turn, so a schedule that ends one turn ends any number of them."""

ROUTER_COST = 3
"""What a router unit takes, in pooler units: its weights are float32, three MMAs each, and do not pass the ring."""


class Shape(NamedTuple):
    """The sizes that units depend on, of the whole model (`Shape` in `ffi/common/layout.h`)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    moe_hidden: int
    moe_inner: int
    experts: int

    @classmethod
    def of(cls, config: ModelConfig) -> Shape:
        return cls(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
                   config.moe_hidden_size, config.moe_intermediate_size, config.num_local_experts)


class Unit(NamedTuple):
    """Unit `number` of a GEMM."""

    gemm: str
    number: int

    def __str__(self):
        return f"{self.gemm} {self.number}"


@dataclass(frozen=True)
class Schedule:
    """Who runs what in one turn.

    Attributes:
        sms: of each SM its units, in the order in which it runs them.
    """

    sms: tuple[tuple[Unit, ...], ...]


class Wait(NamedTuple):
    """Part of a deadlock: SM `sm` runs `unit`, which waits for all units of `gemm`, no later than `holds`, for which
    the next part waits."""

    sm: int
    unit: Unit
    gemm: str
    holds: Unit

    def __str__(self):
        before = "" if self.holds == self.unit else f" and before its {self.holds}"
        return f"SM {self.sm} runs {self.unit} after all of {self.gemm}{before}"


class ScheduleError(ValueError):
    """A schedule that the kernel must not run.

    Attributes:
        fault: "sms", "unknown", "twice", "missing" or "deadlock"; from `spans` "form".
        cycle: of a deadlock its parts, each holding up the next, the last one the first.
    """

    def __init__(self, fault: str, text: str, cycle: tuple[Wait, ...] = ()):
        super().__init__(f"schedule: {text}")
        self.fault, self.cycle = fault, cycle


def unit_counts(shape: Shape, slices: int) -> dict[str, int]:
    """Units of each GEMM for a rank that owns so many of the 8 slices (`DenseOf::kUnits`).

    Raises:
        ValueError: `slices` does not divide 8.
    """
    if slices < 1 or NUM_SLICES % slices:
        raise ValueError(f"expected 1, 2, 4 or 8 slices, got {slices} (argument slices)")
    chunks = chunk_counts(shape)
    return {gemm: slices * -(-columns // SLICE_MULTIPLE) * chunks[gemm]
            for gemm, (columns, _) in _columns_and_k(shape).items()}


def chunk_counts(shape: Shape) -> dict[str, int]:
    """Chunks of K of each GEMM (`DenseOf::kChunks`)."""
    return {gemm: k // min(k, CHUNK) for gemm, (_, k) in _columns_and_k(shape).items()}


def _columns_and_k(shape: Shape) -> dict[str, tuple[int, int]]:
    heads = shape.heads + shape.kv_heads
    return {
        "qkvg": (2 * heads // NUM_SLICES * shape.head_dim, shape.hidden),
        "out": (shape.hidden // NUM_SLICES, shape.heads * shape.head_dim),
        "router": (shape.experts // NUM_SLICES, shape.hidden),
        "pooler": (shape.moe_hidden // NUM_SLICES, shape.hidden),
        "unpooler": (shape.hidden // NUM_SLICES, shape.moe_hidden),
    }


# ------------------------------------------------------------------ the schedule that we run


def dense_schedule(shape: Shape, slices: int, sms: int) -> Schedule:
    """Each GEMM in contiguous parts of one chunk of K, which read few activations: even ones, but for the pooler's. It
    runs beside the router, so SMs with router units get fewer of its units.

    Args:
        slices: of one rank.
        sms: of its GPU.

    Raises:
        ValueError: `slices` does not divide 8, or there is no SM.
    """
    if sms < 1:
        raise ValueError(f"expected at least one SM, got {sms} (argument sms)")
    counts, chunks = unit_counts(shape, slices), chunk_counts(shape)
    ends = {gemm: _ends(count, chunks[gemm], sms) for gemm, count in counts.items()}
    router = [ROUTER_COST * (end - begin) for begin, end in itertools.pairwise([0, *ends["router"]])]
    ends["pooler"] = _ends(counts["pooler"], chunks["pooler"], sms, router)
    return Schedule(tuple(
        tuple(Unit(gemm, n) for gemm in TURN for n in range(ends[gemm][i - 1] if i else 0, ends[gemm][i]))
        for i in range(sms)))


def _ends(count: int, chunks: int, sms: int, costs: list[int] | None = None) -> list[int]:
    """Ends of the SMs' parts of `count` units, SMs having `costs` already (none: equal ones). An SM reads its chunk's
    activations before it multiplies, so each chunk has SMs of its own, and the last ones of the GPU may have nothing to
    do, unless that gave an SM more units."""
    each, units = sms // chunks, count // chunks
    if not each or -(-units // each) > -(-count // sms):
        return _fill(costs or [0] * sms, count)
    ends = [chunk * units + end for chunk in range(chunks)
            for end in _fill((costs or [0] * sms)[chunk * each:(chunk + 1) * each], units)]
    return ends + [count] * (sms - len(ends))


def _fill(costs: list[int], units: int) -> list[int]:
    """Ends of the parts of `units` that bring all SMs to one level where they have `costs` already, to one unit."""
    total = units
    for n, cost in enumerate(ordered := sorted(costs)):
        total += cost
        level = Fraction(total, n + 1)
        if n + 1 == len(ordered) or level <= ordered[n + 1]:
            break
    return [int(end) for end in itertools.accumulate(max(level - cost, Fraction(0)) for cost in costs)]


# ------------------------------------------------------------------ what must hold


def validate(schedule: Schedule, counts: Mapping[str, int], sms: int) -> None:
    """Checks that the SMs, each in its own order, run every unit once and never wait for each other forever.

    Args:
        counts: units of each GEMM (`unit_counts`).
        sms: of the GPU.

    Raises:
        ScheduleError: the first fault: a wrong number of SMs, an unknown unit, one that runs twice or not at all; else
            a cycle of units that wait for each other.
    """
    if len(schedule.sms) != sms:
        raise ScheduleError("sms", f"expected units for SMs 0 to {sms - 1}, got units for {len(schedule.sms)} SMs")
    runs_on: dict[Unit, int] = {}
    for sm, units in enumerate(schedule.sms):
        for unit in units:
            if unit.gemm not in counts or unit.number not in range(counts[unit.gemm]):
                expected = ", ".join(f"{gemm} 0 to {count - 1}" for gemm, count in counts.items())
                raise ScheduleError("unknown", f"SM {sm} runs {unit}, expected one of {expected}")
            if unit in runs_on:
                raise ScheduleError("twice", f"SM {sm} runs {unit}, which SM {runs_on[unit]} runs already")
            runs_on[unit] = sm
    for unit in _all_units(counts):
        if unit not in runs_on:
            raise ScheduleError("missing", f"no SM runs {unit}")
    if cycle := _cycle(schedule, counts, runs_on):
        raise ScheduleError("deadlock", "SMs wait for each other forever: " + "; ".join(map(str, cycle)), cycle)


def _all_units(counts: Mapping[str, int]) -> Iterable[Unit]:
    return (Unit(gemm, n) for gemm, count in counts.items() for n in range(count))


def _cycle(schedule: Schedule, counts: Mapping[str, int], runs_on: Mapping[Unit, int]) -> tuple[Wait, ...]:
    """A deadlock, empty if there is none. Nodes of the graph are the units, and the GEMMs: "all of it has run"."""
    graph = graphlib.TopologicalSorter({gemm: [Unit(gemm, n) for n in range(count)] for gemm, count in counts.items()})
    for units in schedule.sms:
        for before, unit in zip((None, *units), units, strict=False):
            graph.add(unit, *NEEDS[unit.gemm], *([before] if before else []))
    try:
        graph.prepare()
    except graphlib.CycleError as error:
        nodes = error.args[1][:-1]  # each one holds up the next
    else:
        return ()
    first = next(i for i, node in enumerate(nodes) if isinstance(node, str))  # an SM's own order has no cycle
    nodes = nodes[first:] + nodes[:first]
    gemms = [i for i, node in enumerate(nodes) if isinstance(node, str)]
    parts = zip(gemms, [*gemms[1:], len(nodes)], strict=True)  # between two GEMMs all units are of one SM
    return tuple(Wait(runs_on[nodes[a + 1]], nodes[a + 1], nodes[a], nodes[b - 1]) for a, b in parts)


# ------------------------------------------------------------------ the form that the kernel reads


def spans(schedule: Schedule) -> np.ndarray:
    """A valid schedule as `Pass::schedule` holds it: int32 [SMs, 5, 2], begin and end of each SM's units of each of
    `GEMMS`.

    Raises:
        ScheduleError: the kernel cannot run it: units of a GEMM on an SM that are not a run of ascending numbers, or
            GEMMs in another order than `TURN`.
    """
    out = np.zeros((len(schedule.sms), len(GEMMS), 2), np.int32)
    for sm, units in enumerate(schedule.sms):
        runs = [(gemm, [unit.number for unit in run]) for gemm, run in itertools.groupby(units, lambda unit: unit.gemm)]
        order = [gemm for gemm, _ in runs]
        if order != [gemm for gemm in TURN if gemm in order]:
            raise ScheduleError("form", f"expected the GEMMs of SM {sm} once each in the order {', '.join(TURN)}, got "
                                + ", ".join(order))
        for gemm, numbers in runs:
            for before, number in itertools.pairwise(numbers):
                if number != before + 1:
                    raise ScheduleError("form", f"SM {sm} runs {gemm} {number} after {gemm} {before}, expected "
                                        f"{before + 1}: the kernel takes a begin and an end")
            out[sm, GEMMS.index(gemm)] = numbers[0], numbers[-1] + 1
    return out

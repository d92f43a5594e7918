"""What `musejax bench layer` runs and finds, as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from musejax.bench.limits import BenchError
from musejax.config import NUM_SLICES, RELEASED
from musejax.kernels.cache import MAX_ROWS

FIRST_LAYER = 2  # of the model: sliding and full layers follow as they come, all with NVFP4 experts


def check_ranks(command: str, devices: int, slices: int) -> None:
    """Raises BenchError unless so many devices can have so many slices of a layer each."""
    for name, count, why in (("devices", devices, "one a rank"), ("slices", slices, "all there are")):
        if not 1 <= count <= NUM_SLICES:
            raise BenchError(f"{command}: {name}: expected 1 to {NUM_SLICES} ({why}), got {count}")
    if NUM_SLICES % devices:
        raise BenchError(f"{command}: devices: expected 1, 2, 4 or 8, got {devices}")
    if NUM_SLICES % slices or slices * devices > NUM_SLICES:
        raise BenchError(f"{command}: slices: expected 1, 2, 4 or 8, at most 8 on all devices together, got "
                         f"{slices} on each of {devices}")


def check_work(command: str, case) -> None:
    """Raises BenchError if rows, distinct, context or layers of a case are out of the released model's range."""
    c, k = RELEASED, RELEASED.num_experts_per_tok
    for name, low, high, why in (
            ("rows", 1, MAX_ROWS, "what a pass takes"),
            ("distinct", k, min(case.rows * k, c.num_local_experts), f"rows {case.rows}, {k} choices each"),
            ("context", 0, c.max_position_embeddings - MAX_ROWS, "what the model takes"),
            ("layers", 1, c.num_hidden_layers - FIRST_LAYER, f"what the model has from layer {FIRST_LAYER} on")):
        if not low <= getattr(case, name) <= high:
            raise BenchError(f"{command}: {name}: expected {low} to {high} ({why}), got {getattr(case, name)}")


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        distinct: experts that the rows are to hit (D), at least 8, at most 8 a row; met on average, up to what random
            choices reach (102 for 16 rows).
        rows: 1 to 16.
        context: positions before the pass.
        layers: layers in one launch, 1 to 60.
        activations: as `DecodeConfig`.
        devices: GPUs, a rank each; what ranks that are not there would send is looped back.
        slices: of a rank. All slices of a layer have the same weights, so that results have the same bits on any number
            of devices, of slices, and of ranks that are looped back.

    Raises:
        BenchError: a value out of range.
    """

    distinct: int = 49
    rows: int = 16
    context: int = 2048
    layers: int = 8
    activations: str = "bf16"
    devices: int = 1
    slices: int = 1

    def __post_init__(self):
        check_work("bench layer", self)
        check_ranks("bench layer", self.devices, self.slices)

    @property
    def numbers(self) -> range:
        """The layers' numbers in the model."""
        return range(FIRST_LAYER, FIRST_LAYER + self.layers)

    def slots(self, config, layer: int) -> int:
        """Positions that a layer's cache holds."""
        return config.window(layer) or self.context + 2 * MAX_ROWS


def cases_of(distinct: Sequence[int] | None, rows: Sequence[int], context: Sequence[int], **more) -> list[Case]:
    """Every combination; without `distinct` 49, or as many as the rows can hit.

    Raises:
        BenchError: as `Case`.
    """
    k = RELEASED.num_experts_per_tok
    return [Case(d, r, x, **more) for r in rows for x in context for d in distinct or [min(49, r * k)]]


@dataclass(frozen=True)
class Timing:
    """One case's figures: microseconds a layer (10th, 50th, 90th percentile), bytes a layer, result.

    Attributes:
        layers: in one launch; of the baseline fewer than the case has.
        distinct: experts hit a layer, mean over launches and layers.
        histogram: how many experts were hit by 1, 2, ... rows, mean a layer.
        weight_bytes: read a layer, each expert hit once; `expert_bytes` of them are the experts'.
        key_bytes: of history keys and values, read a layer.
        digest: hash of the residual streams of all launches.
        failed: what is wrong with the results; empty: nothing.
        phases: the same, a launch each phase, interleaved.
        baseline: the same by XLA, interleaved.
    """

    layers: int
    us: tuple[float, float, float]
    distinct: float
    histogram: tuple[float, ...]
    weight_bytes: float
    expert_bytes: float
    key_bytes: int
    digest: str
    failed: str = ""
    phases: Timing | None = None
    baseline: Timing | None = None

    @property
    def gb_per_s(self) -> float:
        """Weights alone, at the median."""
        return self.weight_bytes / self.us[1] / 1e3

    @property
    def failures(self) -> list[str]:
        """Its own, and those of what it is compared with."""
        return [t.failed for t in (self, self.phases, self.baseline) if t and t.failed]


def expected_distinct(admitted: int, rows: int, k: int) -> float:
    """Mean number of distinct experts if every row chooses k of `admitted` at random."""
    return admitted * (1 - (1 - k / admitted) ** rows)


def admitted_experts(case: Case, config) -> int:
    """How many experts a layer's bias must admit for `case.distinct` to be hit on average."""
    k, total = config.num_experts_per_tok, config.num_local_experts
    counts = np.arange(k, total + 1)
    return int(counts[np.argmin(np.abs(expected_distinct(counts, case.rows, k) - case.distinct))])


def as_line(device: str, case: Case, timing: Timing, limit: float) -> str:
    """A case in one line.

    E is the time of the experts' bytes at `limit` (GB/s), W all else; nothing is fetched ahead, so H is 0. The phases
    are `phases.PhasedLayers`, the baseline `reference.ReferenceLayers`.
    """
    hits = ", ".join(f"{r} x {n:.1f}" for r, n in enumerate(timing.histogram, 1) if n >= 0.05)
    e = timing.expert_bytes / limit / 1e3
    ranks = "one rank of 8, exchanges looped back"
    if (case.devices, case.slices) != (1, 1):
        ranks = f"GPUs {case.devices}, {case.slices} of 8 slices each"
        ranks += ", the others looped back" * (case.devices * case.slices < NUM_SLICES)
    line = (f"{device}; {ranks}; released sizes, NVFP4, {case.activations}; "
            f"rows {case.rows}; context {case.context}; {timing.layers} layers in one launch; D {case.distinct} asked, "
            f"{timing.distinct:.1f} met (rows x experts: {hits}); {_time(timing)}, W {timing.us[1] - e:.1f} E {e:.1f} "
            f"H 0; {timing.weight_bytes / 1e6:.1f} MB of weights, {timing.key_bytes / 1e6:.2f} MB of keys and values; "
            f"{timing.gb_per_s:.0f} GB/s of weights, {timing.gb_per_s / limit:.1%} of {limit:.0f}; "
            f"result {timing.digest}")
    if p := timing.phases:
        line += (f"; the same phases one launch each in a CUDA graph, with the copies in between: {_time(p)}, "
                 f"{p.us[1] / timing.us[1]:.2f} times the kernel's; result {p.digest}")
    if b := timing.baseline:
        line += (f"; the same rank in plain JAX by XLA, {b.layers} sliding layer{'s' * (b.layers > 1)} in one program, "
                 f"all rows times each expert hit: D {b.distinct:.1f} met; {_time(b)}, "
                 f"{b.us[1] / timing.us[1]:.2f} times the kernel's; {b.weight_bytes / 1e6:.1f} MB of weights, "
                 f"{b.gb_per_s:.0f} GB/s; result {b.digest}")
    return line + "".join(f"; FAILED: {text}" for text in timing.failures)


def _time(timing: Timing) -> str:
    low, median, high = timing.us
    return f"{median:.1f} us a layer ({low:.1f} to {high:.1f})"


def to_json(results: Sequence[tuple[Case, Timing]], limit: float, **more) -> dict:
    """The cases as plain data, and whatever else is to be kept with them."""
    return {**more, "roofline_gb_per_s": limit, "failed": sum(bool(timing.failures) for _, timing in results),
            "cases": [{"case": asdict(case), "admitted": admitted_experts(case, RELEASED), **asdict(timing),
                       "gb_per_s": timing.gb_per_s, "share": timing.gb_per_s / limit} for case, timing in results]}

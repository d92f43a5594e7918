"""What `scripts/peer_layer.py` runs and finds, as text and as plain data: sizes of one rank, bytes, figures; without
PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from musejax.bench.cases import FIRST_LAYER, admitted_experts, check_work
from musejax.config import NUM_SLICES
from musejax.config import RELEASED as RELEASED_CONFIG

SPLITS = ("pooled", "inner")


@dataclass(frozen=True)
class Sizes:
    """A model's, or those of a rank of it. Whatever is not here is as in the config class of the library."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    moe_hidden: int
    moe_inner: int
    experts: int
    top_k: int
    window: int

    def rank(self, split: str) -> Sizes:
        """What a config can say of one rank of 8."""
        part = {"pooled": "moe_hidden", "inner": "moe_inner"}[split]
        return replace(self, heads=self.heads // NUM_SLICES, kv_heads=self.kv_heads // NUM_SLICES,
                       **{part: getattr(self, part) // NUM_SLICES})

    @property
    def attention_bytes(self) -> int:
        """q, k, v, gate and o of a layer, bfloat16."""
        return 2 * self.hidden * self.head_dim * (3 * self.heads + 2 * self.kv_heads)

    @property
    def pool_bytes(self) -> int:
        """Pooler and unpooler, bfloat16."""
        return 2 * 2 * self.hidden * self.moe_hidden

    @property
    def router_bytes(self) -> int:
        """float32."""
        return 4 * self.experts * self.hidden

    @property
    def dense_bytes(self) -> int:
        """All matrices of a layer but the experts'."""
        return self.attention_bytes + self.pool_bytes + self.router_bytes

    @property
    def expert_bytes(self) -> int:
        """One expert, bfloat16."""
        return 2 * 3 * self.moe_hidden * self.moe_inner

    @property
    def layer_bytes(self) -> int:
        """All that a layer holds."""
        return self.dense_bytes + self.experts * self.expert_bytes


RELEASED = Sizes("released", RELEASED_CONFIG.hidden_size, RELEASED_CONFIG.num_attention_heads,
                 RELEASED_CONFIG.num_key_value_heads, RELEASED_CONFIG.head_dim, RELEASED_CONFIG.moe_hidden_size,
                 RELEASED_CONFIG.moe_intermediate_size, RELEASED_CONFIG.num_local_experts,
                 RELEASED_CONFIG.num_experts_per_tok, RELEASED_CONFIG.sliding_window)
TINY = Sizes("tiny", 256, 32, 16, 16, 128, 128, 256, 8, 64)


@dataclass(frozen=True)
class Case:
    """What is run; see `cases.Case`.

    Raises:
        BenchError: a value out of range.
    """

    distinct: int = 49
    rows: int = 16
    context: int = 2048
    layers: int = 8
    split: str = "pooled"
    sizes: Sizes = RELEASED

    def __post_init__(self):
        check_work("peer layer", self)

    @property
    def rank(self) -> Sizes:
        return self.sizes.rank(self.split)

    @property
    def full(self) -> list[bool]:
        """Whether a layer sees all of the context, and has no rotation; layer by layer."""
        return [RELEASED_CONFIG.window(i) is None for i in range(FIRST_LAYER, FIRST_LAYER + self.layers)]

    @property
    def key_bytes(self) -> int:
        """Of history keys and values, bfloat16, mean a layer."""
        seen = [self.context if full else min(self.context, self.sizes.window) for full in self.full]
        return int(np.mean(seen)) * 2 * 2 * self.rank.head_dim * self.rank.kv_heads

    @property
    def admitted(self) -> int:
        """Experts that a layer's selection bias must admit, as for our layers."""
        return admitted_experts(self, RELEASED_CONFIG)


@dataclass(frozen=True)
class WayTiming:
    """What one way took: microseconds a layer (10th, 50th, 90th percentile), seconds of compilation, graphs that
    torch.compile declined to record; or why it did not run."""

    name: str
    us: tuple[float, float, float] = (0, 0, 0)
    compile_s: float = 0
    skipped_graphs: int = 0
    why_not: str = ""

    def text(self) -> str:
        if self.why_not:
            return f"{self.name} {self.why_not}"
        low, median, high = self.us
        skipped = f", {self.skipped_graphs} CUDA graphs declined" * bool(self.skipped_graphs)
        return f"{self.name} {median:.1f} us a layer ({low:.1f} to {high:.1f}{skipped})"


@dataclass(frozen=True)
class Timing:
    """One case's figures.

    Attributes:
        ways: the fastest first, those that did not run last.
        distinct: experts hit a layer, mean over launches and layers.
        weight_bytes: that the peer has to read a layer, each expert hit once; `expert_bytes` of them are the experts'.
        difference: of the results, from those without torch.compile: RMS over RMS of a row, the rows' median, the worst
            layer and way.
        failed: what is wrong; empty: nothing.
    """

    ways: tuple[WayTiming, ...]
    distinct: float
    weight_bytes: float
    expert_bytes: float
    difference: float
    failed: str = ""

    @property
    def gb_per_s(self) -> float:
        """Of the weights, at the median of the fastest way; 0 if none ran."""
        us = self.ways[0].us[1]
        return self.weight_bytes / us / 1e3 if us else 0.0


def as_line(machine: str, case: Case, timing: Timing, limit: float | None) -> str:
    """A case in one line; `limit` in GB/s."""
    best, *others = timing.ways
    share = f", {timing.gb_per_s / limit:.1%} of {limit:.0f}" if limit else ""
    sizes = f"{case.sizes.name} sizes, one rank of 8 (split {case.split}), bfloat16, no exchanges"
    return (f"{machine}; MuseSparkTextDecoderLayer; {sizes}; rows {case.rows}; context {case.context}; "
            f"{case.layers} layers in one program; D {case.distinct} asked, {timing.distinct:.1f} met; {best.text()}; "
            f"{timing.weight_bytes / 1e6:.1f} MB of weights, {timing.expert_bytes / 1e6:.1f} of them experts', "
            f"{case.key_bytes / 1e6:.2f} MB of keys and values; {timing.gb_per_s:.0f} GB/s of weights{share}; "
            + "".join(f"beside it {way.text()}; " for way in others)
            + f"layers within {timing.difference:.1e} of those without torch.compile"
            + f"; FAILED: {timing.failed}" * bool(timing.failed)
            + "; A REHEARSAL, no figure of the model" * (case.sizes is not RELEASED))


def to_json(results: Sequence[tuple[Case, Timing]], **more) -> dict:
    """The cases as plain data, and whatever else is to be kept with them."""
    return {**more, "failed": sum(bool(timing.failed) for _, timing in results),
            "cases": [{"case": asdict(case), "rank": asdict(case.rank), "admitted": case.admitted,
                       "key_bytes": case.key_bytes, **asdict(timing), "gb_per_s": timing.gb_per_s}
                      for case, timing in results]}

"""What `musejax bench step` runs and finds, as text and as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from musejax.bench.cases import Timing, admitted_experts, check_ranks
from musejax.bench.launches import Launches
from musejax.bench.limits import BenchError
from musejax.config import NUM_SLICES, RELEASED, ModelConfig
from musejax.kernels.cache import MAX_ROWS
from musejax.packing import CHUNK
from musejax.speculation.config import DraftConfig


@dataclass(frozen=True)
class StepCase:
    """What is run, with a tree of 16 rows: one rank of 8, exchanges looped back, or several slices and devices.

    Attributes:
        distinct: experts that the rows are to hit (D), as in `cases.Case`.
        context: positions before each step; at least as many as a step accepts, which take the place of the last ones.
        layers: the first so many of the model, 1 to 62; of all 62 the first and the last have bfloat16 experts.
        draft_inner: width of the drafter's FFN.
        accepted: tokens a step that tokens a second are stated for; nothing of what is run depends on it.
        devices: GPUs, a rank each.
        slices: of each layer on each of them; what ranks that are not there would send is looped back. All slices have
            the same weights, so that results have the same bits on any number of devices, and of slices that are looped
            back; but the drafter of one slice on one device has other base kernels.

    Raises:
        BenchError: a value out of range.
    """

    distinct: int = 49
    context: int = 2048
    layers: int = RELEASED.num_hidden_layers
    draft_inner: int = 24576
    accepted: float = 6.6
    devices: int = 1
    slices: int = 1

    def __post_init__(self):
        c, k = RELEASED, RELEASED.num_experts_per_tok
        for name, low, high, why in (
                ("distinct", k, min(MAX_ROWS * k, c.num_local_experts), f"rows {MAX_ROWS}, {k} choices each"),
                ("context", MAX_ROWS, c.max_position_embeddings - MAX_ROWS, "accepted rows, and what the model takes"),
                ("layers", 1, c.num_hidden_layers, "what the model has"),
                ("accepted", 1, MAX_ROWS, "tokens of a step")):
            if not low <= getattr(self, name) <= high:
                raise BenchError(f"bench step: {name}: expected {low} to {high} ({why}), got {getattr(self, name)}")
        if self.draft_inner < CHUNK or self.draft_inner % CHUNK:
            raise BenchError(f"bench step: draft_inner: expected a multiple of {CHUNK}, in which sums over K are made, "
                             f"got {self.draft_inner}")
        check_ranks("bench step", self.devices, self.slices)

    rows = MAX_ROWS

    @property
    def numbers(self) -> range:
        """The layers' numbers in the model."""
        return range(self.layers)

    @property
    def ends(self) -> int:
        """Slices of embedding, drafter and LM head on each device: of several all 8, for the drafter's kernels loop
        nothing back between GPUs; of one as many as of a layer."""
        return NUM_SLICES // self.devices if self.devices > 1 else self.slices

    @property
    def config(self) -> ModelConfig:
        """The released model with NVFP4 experts as published: not in the first and the last layer."""
        return replace(RELEASED, nvfp4_layers=tuple(range(1, RELEASED.num_hidden_layers - 1)))

    @property
    def drafter(self) -> DraftConfig:
        """Sizes of the drafter for it."""
        c = RELEASED
        return DraftConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=5, num_attention_heads=64,
            num_key_value_heads=8, head_dim=128, intermediate_size=self.draft_inner, sliding_window=2048,
            rms_norm_eps=1e-5, rope_theta=500000.0, max_position_embeddings=c.max_position_embeddings,
            block_size=MAX_ROWS, mask_token_id=201818, target_layer_ids=(1, 16, 30, 44, 59),
            num_target_layers=c.num_hidden_layers, conv_kernel_size=2, conv_group_size=16, selector_rank=256,
            selector_top_k=16, output_multiplier=c.output_multiplier,
            final_logit_softcapping=c.final_logit_softcapping)

    @property
    def tapped(self) -> tuple[int, ...]:
        """The layer run for each of the drafter's taps: with fewer layers the last one stands for those not there."""
        return tuple(min(i, self.layers - 1) for i in self.drafter.target_layer_ids)

    def slots(self, layer: int) -> int:
        """Positions that a layer's cache holds."""
        return RELEASED.window(layer) or self.context + 2 * MAX_ROWS


@dataclass(frozen=True)
class StepTiming:
    """A step's figures; times are the 10th, 50th and 90th percentile.

    Attributes:
        step, draft, verify: ms of the whole step, of drafter and tree alone, of layers and LM head alone, in turns.
        distinct: experts hit a layer, mean over steps and layers.
        emitted: tokens a step of these random models, mean.
        weight_bytes: read a step by each device, each expert hit once, the LM head twice (drafter and target).
        launches: of the program of a step.
        weights_s, compile_s, first_s: seconds in which weights were made, the step was compiled, and run first.
        in_use, needed: bytes of memory of the first device, and how many of them are weights and caches.
        digest: hash of what all steps returned.
        failed: what is wrong with the results; empty: nothing.
        looped: of several devices, the first one's work alone, all exchanges looped back, interleaved.
        baseline: two layers in plain JAX by XLA, interleaved.
    """

    step: tuple[float, float, float]
    draft: tuple[float, float, float]
    verify: tuple[float, float, float]
    distinct: float
    emitted: float
    weight_bytes: float
    launches: Launches
    weights_s: float
    compile_s: float
    first_s: float
    in_use: int
    needed: int
    digest: str
    failed: str = ""
    looped: StepTiming | None = None
    baseline: Timing | None = None

    @property
    def rest(self) -> float:
        """ms of accept, commit and what else is neither draft nor verify, at the medians."""
        return self.step[1] - self.draft[1] - self.verify[1]

    @property
    def gb_per_s(self) -> float:
        """Weights alone, at the median."""
        return self.weight_bytes / self.step[1] / 1e6

    @property
    def failures(self) -> list[str]:
        """Its own, and those of what it is compared with."""
        return [t.failed for t in (self, self.looped, self.baseline) if t and t.failed]

    @property
    def exchange(self) -> float:
        """How much longer a step is than without exchange, at the medians; 0.1: by 10%."""
        return self.step[1] / self.looped.step[1] - 1

    def tokens_per_s(self, case: StepCase) -> float:
        """At the acceptance that the case states."""
        return case.accepted / self.step[1] * 1e3

    def baseline_ms(self, case: StepCase) -> float:
        """The baseline's median, scaled to all layers."""
        return self.baseline.us[1] * case.layers / 1e3


def as_line(device: str, case: StepCase, timing: StepTiming, limit: float) -> str:
    """A case in one line; `limit` in GB/s. The baseline has no LM head, and verification has."""
    t, wide = timing, sum(i not in case.config.nvfp4_layers for i in case.numbers)
    each = " on each" if case.devices > 1 else ""
    line = (f"{device}; {_ranks(case)}; one speculative step of the released sizes: drafter of "
            f"{case.drafter.num_hidden_layers} layers (FFN {case.draft_inner}), tree of {MAX_ROWS}, {case.layers} "
            f"layers ({case.layers - wide} NVFP4, {wide} bf16), head, accept, commit; rows {MAX_ROWS}; context "
            f"{case.context}; D {case.distinct} asked, {t.distinct:.1f} met; step {_time(t.step)}: "
            f"draft {_time(t.draft)}, verify {_time(t.verify)}, rest {t.rest:.3f} ms; {t.launches.count} launches, "
            f"{'a loop' if t.launches.loop else 'no loop'}; {t.weight_bytes / 1e9:.2f} GB of weights{each}, "
            f"{t.gb_per_s:.0f} GB/s, {t.gb_per_s / limit:.1%} of {limit:.0f}; {t.tokens_per_s(case):.0f} tokens/s "
            f"at {case.accepted:g} accepted, assumed ({t.emitted:.1f} of these random models); weights made in "
            f"{t.weights_s:.1f} s, compiled in {t.compile_s:.1f} s, first step {t.first_s:.2f} s; "
            f"{t.in_use / 1e9:.1f} GB in use, {t.needed / 1e9:.1f} of them weights and caches; result {t.digest}")
    if o := timing.looped:
        line += (f"; the same work on one GPU, all exchanges looped back, in turns: step {_time(o.step)}: draft "
                 f"{_time(o.draft)}, verify {_time(o.verify)}, rest {o.rest:.3f} ms; {o.launches.count} launches; the "
                 f"exchange adds {t.exchange:.1%}; result {o.digest}")
    if b := timing.baseline:
        ms = t.baseline_ms(case)
        line += (f"; the layers only in plain JAX by XLA, {b.layers} layers measured and scaled to {case.layers}: D "
                 f"{b.distinct:.1f} met; {ms:.1f} ms, {ms / t.verify[1]:.2f} times verify; result {b.digest}")
    return line + "".join(f"; FAILED: {text}" for text in t.failures)


def _ranks(case: StepCase) -> str:
    """What is exchanged and what is looped back."""
    if case.devices == 1:
        if case.slices == 1:
            return "one rank of 8, exchanges looped back"
        return f"GPUs 1, {case.slices} of 8 slices" + ", the others looped back" * (case.slices < NUM_SLICES)
    back = NUM_SLICES - case.devices * case.slices
    return (f"GPUs {case.devices}; exchanged by kernels while they run: layers, {case.slices} of 8 slices each, "
            f"{f'the other {back} looped back' if back else 'none looped back'}, and drafter, {case.ends} of 8 each, "
            f"none looped back; by all-gathers of XLA: embedding rows, maxima and sums of the LM head, {case.ends} of "
            "8 each, none looped back")


def _time(ms: tuple[float, float, float]) -> str:
    low, median, high = ms
    return f"{median:.3f} ms ({low:.3f} to {high:.3f})"


def _plain(timing: StepTiming) -> dict:
    return {**asdict(timing), "launches": timing.launches.count, "loop": timing.launches.loop, "rest": timing.rest}


def to_json(case: StepCase, timing: StepTiming, limit: float, **more) -> dict:
    """The case as plain data, laid out as `bench layer` has its cases, and whatever else is to be kept with it."""
    figures = {"case": asdict(case), "admitted": admitted_experts(case, case.config), **_plain(timing),
               "gb_per_s": timing.gb_per_s, "share": timing.gb_per_s / limit,
               "tokens_per_s_assumed": timing.tokens_per_s(case)}
    if timing.looped:
        figures |= {"looped": _plain(timing.looped), "exchange": timing.exchange}
    if timing.baseline:
        figures["baseline_ms_scaled"] = timing.baseline_ms(case)
    return {**more, "roofline_gb_per_s": limit, "failed": int(bool(timing.failures)), "cases": [figures]}

#!/usr/bin/env python3
"""Projects a speculative step of the released model on 8 GPUs from what was measured on one and on two; a projection,
not a measurement. Every input is printed with where it comes from; a range is carried through to the result.

    python scripts/project.py [--layer 126 125 127] [--exchange 1.08 1.05 1.16] [--accepted 6.6]

The model of a layer is T = W + E: E, the time of the experts' weights, goes with the memory's rate; W, the chain of
latencies from the end of one list of experts to the next, does not change with it. Exchanges between real GPUs make the
whole longer by a factor, measured on two. The drafter is taken likewise, its bytes at the memory's rate and the rest of
its time as it was; the LM head at the layer's share of the memory's rate.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

LAYERS, BF16_LAYERS = 62, 2  # of the released model; the first and the last layer have bfloat16 experts


class Range(NamedTuple):
    """A figure with its least and greatest value."""

    figure: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(*(x * factor for x in self))

    def plus(self, other: Range) -> Range:
        return Range(*(a + b for a, b in zip(self, other, strict=True)))

    def text(self, digits: int, unit: str) -> str:
        return f"{self.figure:.{digits}f} {unit} ({self.low:.{digits}f} to {self.high:.{digits}f})"


class Machine(NamedTuple):
    name: str
    memory: float  # TB/s a GPU, as a stream reads it
    source: str


MACHINES = (Machine("8 x H200", 4.59, "`musejax bench limits` on one"),
            Machine("8 x GB300", 8.0, "data sheet, not measured; nothing of ours ran there"))
MEASURED_ON = MACHINES[0]


class Inputs(NamedTuple):
    """What is measured or assumed; bytes are a GPU's.

    Attributes:
        layer: us, one rank of 8, exchanges looped back, D 49, 16 rows, context 2048.
        experts: us of it that are the experts'.
        exchange: factor of real exchanges.
        bf16_experts_mb: experts of a bfloat16 layer, 49 hit.
        nvfp4_experts_mb: those of an NVFP4 layer.
        layer_mb: all weights of an NVFP4 layer.
        head_mb, draft_mb: LM head; drafter with its LM head.
        draft: us of a draft and its tree.
        rest: us of embedding, accept, commit and launches.
        accepted: tokens a step.
    """

    layer: Range = Range(126, 125, 127)
    experts: float = 59
    exchange: Range = Range(1.08, 1.05, 1.16)
    bf16_experts_mb: float = 616.6
    nvfp4_experts_mb: float = 173.4
    layer_mb: float = 245.3
    head_mb: float = 413.8
    draft_mb: float = 1400.1
    draft: Range = Range(1241, 1223, 1265)
    rest: Range = Range(50, 0, 150)
    accepted: float = 6.6


SOURCES = {
    "layer": "us, `musejax bench layer --layers 24` on one H200",
    "experts": "us of it, `scripts/timeline.py` on one H200",
    "exchange": "`musejax bench step --devices 2 --layers 8` over its looped part: draft 1.05, verify 1.06, or 1.095 "
                "if all of that is the layers'; high: `bench layer --devices 2`, 168 beside 145; assumed: 8 are as 2",
    "bf16_experts_mb": "counted, D 49",
    "nvfp4_experts_mb": "counted, D 49",
    "layer_mb": "counted, D 49",
    "head_mb": "counted",
    "draft_mb": "counted, FFN of 24,576",
    "draft": "us, `musejax bench step` on one H200",
    "rest": "us, assumed; in `musejax bench step` nothing was left of the step beside draft and verification",
    "accepted": "tokens a step, as published for the drafter; not measured with this model",
}


class Step(NamedTuple):
    """Milliseconds of a step's parts, and tokens/s."""

    verify: Range
    draft: Range
    rest: Range
    rate: Range


def project(inputs: Inputs, machine: Machine) -> Step:
    """A step on eight GPUs of a machine."""
    faster = MEASURED_ON.memory / machine.memory
    share = Range(*(inputs.layer_mb / (us * MEASURED_ON.memory) for us in inputs.layer))  # MB / TB/s = us
    chain = Range(*(us - inputs.experts for us in inputs.layer))

    def layer(experts_mb: float) -> Range:
        experts = inputs.experts * experts_mb / inputs.nvfp4_experts_mb * faster
        return Range(*((us + experts) * e for us, e in zip(chain, inputs.exchange, strict=True)))

    def stream(mb: Range) -> Range:
        return Range(*(x / (machine.memory * s) for x, s in zip(mb, share, strict=True)))

    layers = layer(inputs.nvfp4_experts_mb).times(LAYERS - BF16_LAYERS)
    verify = layers.plus(layer(inputs.bf16_experts_mb).times(BF16_LAYERS)).plus(stream(Range(*[inputs.head_mb] * 3)))
    bytes_there, bytes_here = (inputs.draft_mb / m.memory for m in (machine, MEASURED_ON))
    draft = Range(*((us - bytes_here + bytes_there) * e for us, e in zip(inputs.draft, inputs.exchange, strict=True)))
    total = verify.plus(draft).plus(inputs.rest)
    rate = Range(*(inputs.accepted / us * 1e6 for us in (total.figure, total.high, total.low)))
    return Step(verify.times(1e-3), draft.times(1e-3), inputs.rest.times(1e-3), rate)


def lines(inputs: Inputs) -> list[str]:
    """Inputs and results, a line each."""
    out = [f"input  {name}: {x if not isinstance(x, Range) else x.text(2, '').replace('  ', ' ')}; {SOURCES[name]}"
           for name, x in inputs._asdict().items()]
    out += [f"input  memory of {m.name}: {m.memory} TB/s a GPU; {m.source}" for m in MACHINES]
    for machine in MACHINES:
        step = project(inputs, machine)
        out.append(f"PROJECTION, not measured: {machine.name}: verify {step.verify.text(2, 'ms')}, draft "
                   f"{step.draft.text(2, 'ms')}, rest {step.rest.text(2, 'ms')}: {step.rate.text(0, 'tokens/s')} at "
                   f"{inputs.accepted} tokens a step, D 49, context 2048")
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--layer", type=float, nargs=3, default=Inputs().layer, metavar=("US", "LOW", "HIGH"))
    p.add_argument("--exchange", type=float, nargs=3, default=Inputs().exchange, metavar=("FACTOR", "LOW", "HIGH"))
    p.add_argument("--accepted", type=float, default=Inputs().accepted, help="tokens a step")
    args = p.parse_args()
    print("\n".join(lines(Inputs(layer=Range(*args.layer), exchange=Range(*args.exchange), accepted=args.accepted))))


if __name__ == "__main__":
    main()

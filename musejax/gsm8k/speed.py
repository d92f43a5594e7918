"""The published speed figure: median of 20 decode steps on one GSM8K request, batch 1, greedy.

Everything is compiled by a run of the same request before. Then 5 decode steps are skipped and the next 20 timed one by
one, each until its tokens are on the host. Tokens are counted, not steps or callbacks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from musejax.gsm8k.data import Row, row_id
from musejax.gsm8k.profiles import SPLIT, Prompt
from musejax.gsm8k.run import Setup, answer
from musejax.gsm8k.score import rates

SKIPPED, TIMED = 5, 20
UNEVEN = 0.05
"""Median and mean of a window that differ by more than this get a warning."""


def measure(setup: Setup, row: Row, prompt: Prompt, repeats: int,
            after_step: Callable[[], None] | None = None) -> Iterator[dict]:
    """Times the request `repeats` times, with the drafter if there is one and then without; yields each as it is done.

    Returns:
        Dicts of `window`.
    """
    for drafter in [None] if setup.drafter is None else [setup.drafter, None]:
        for repeat in range(repeats + 1):
            done = answer(setup, row, prompt, after_step=after_step, max_steps=SKIPPED + TIMED, drafter=drafter)
            if repeat:  # the first run compiles
                yield {"request": row_id(SPLIT, row.index), "drafter": drafter is not None, "repeat": repeat,
                       **window(done)}


def window(done) -> dict:
    """Figures of one timed request.

    Returns:
        What `score.rates` gives for the timed steps, with `L_window` for the mean of tokens a step; first_token_ms;
        steps: how many were timed; incomplete: fewer than 25 decode steps came before the end; experts_per_layer: mean
        of distinct experts (D), or None; compilations: timed steps, or the prefill, in which something was compiled;
        slowest: index of the slowest timed step; uneven: median and mean differ by more than 5%.
    """
    timed = done.steps[SKIPPED:SKIPPED + TIMED]
    figures: dict[str, Any] = rates([s.delivered for s in timed], [s.ms for s in timed]) or {"steps": 0}
    hit = [s.experts for s in timed if s.experts is not None]
    median, mean = figures.get("step_ms_median"), figures.get("step_ms_mean")
    figures["L_window"] = figures.pop("tokens_per_step", None)
    return figures | {
        "first_token_ms": done.prefill.ms, "incomplete": len(timed) < TIMED,
        "experts_per_layer": statistics.fmean(hit) if hit else None,
        "compilations": sum(s.compiled for s in (done.prefill, *timed)),
        "slowest": max(range(len(timed)), key=lambda i: timed[i].ms) if timed else None,
        "uneven": bool(timed) and abs(mean - median) > UNEVEN * median,
    }

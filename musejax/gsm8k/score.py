"""Figures of a run, computed from its items: accuracy with an interval, acceptance length, times of decode steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Z = 1.959964
"""Of a 95% interval."""


def wilson(right: int, count: int) -> tuple[float, float, float]:
    """(share, low end, high end) of the 95% Wilson interval.

    Raises:
        ValueError: count below 1, or right outside 0 to count.
    """
    if count < 1 or not 0 <= right <= count:
        raise ValueError(f"expected 0 <= right <= count and count of at least 1, got {right} of {count}")
    p, z2 = right / count, Z * Z
    scale = 1 + z2 / count
    centre = (p + z2 / (2 * count)) / scale
    half = Z * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count)) / scale
    return p, max(0.0, centre - half), min(1.0, centre + half)


def accuracy(right: int, count: int) -> dict:
    """Share right with its interval, and lm-eval's standard error: sample deviation over root n (None for one item)."""
    p, low, high = wilson(right, count)
    error = math.sqrt(p * (1 - p) / (count - 1)) if count > 1 else None
    return {"accuracy": p, "low": low, "high": high, "right": right, "count": count, "stderr": error}


def acceptance(pairs: Sequence[tuple[int, int]]) -> dict | None:
    """Acceptance length, each of the usual ways, from (C tokens, V decode steps) of requests; None if none had a step.

    Returns:
        mean: plain mean of C/V over requests, the published definition; token_weighted: sum of C * C/V over sum of C;
        pooled: sum of C over sum of V; after_prefill: plain mean of (C - 1)/V; requests: how many had a decode step.
    """
    pairs = [(c, v) for c, v in pairs if v]
    if not pairs:
        return None
    tokens, steps = sum(c for c, _ in pairs), sum(v for _, v in pairs)
    return {
        "mean": statistics.fmean(c / v for c, v in pairs),
        "token_weighted": sum(c * c / v for c, v in pairs) / tokens,
        "pooled": tokens / steps,
        "after_prefill": statistics.fmean((c - 1) / v for c, v in pairs),
        "requests": len(pairs), "tokens": tokens, "steps": steps,
    }


def rates(delivered: Sequence[int], milliseconds: Sequence[float]) -> dict | None:
    """Rates of decode steps with a_i tokens delivered in t_i ms; None without steps.

    Returns:
        step_ms_median, step_ms_min, step_ms_p90, step_ms_max, step_ms_mean; tokens_per_step: mean of a_i;
        tok_s: 1000 * tokens_per_step / step_ms_median; tok_s_window: 1000 * sum of a_i / sum of t_i.
    """
    if not delivered:
        return None
    ordered = sorted(milliseconds)
    median, mean = statistics.median(ordered), statistics.fmean(ordered)
    per_step = statistics.fmean(delivered)
    return {
        "step_ms_median": median, "step_ms_min": ordered[0], "step_ms_p90": quantile(ordered, 0.9),
        "step_ms_max": ordered[-1], "step_ms_mean": mean, "tokens_per_step": per_step,
        "tok_s": 1000 * per_step / median, "tok_s_window": 1000 * sum(delivered) / sum(ordered),
        "steps": len(ordered),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, with straight lines between them."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def timed_steps(items: Sequence[dict]) -> list[tuple[int, float]]:
    """(tokens delivered, milliseconds) of all decode steps in which nothing was compiled."""
    return [(a, ms) for item in items for a, ms in zip(item["step_tokens"], item["step_ms"], strict=True)
            if ms is not None]


def summarise(items: Sequence[dict], scorers: Sequence[str]) -> dict:
    """All figures of a run. Items that failed or were cut off count as wrong; steps in which something was compiled
    have no time. Times are under `times` alone."""
    good = [item for item in items if item["error"] is None]
    steps = timed_steps(good)
    experts = [d for item in good for d in item["step_experts"] if d is not None]
    first = [item["prefill_ms"] for item in good]
    return {
        "items": len(items),
        "errors": len(items) - len(good),
        "cut_off": sum(item["finish_reason"] == "length" for item in good),
        "empty": sum(item["final_empty"] for item in good),
        "scores": {s: accuracy(sum(item["correct"][s] for item in items), len(items)) for s in scorers if items},
        "acceptance": acceptance([(item["completion_tokens"], item["verify_steps"]) for item in good]),
        "experts_per_layer": {"median": statistics.median(experts), "mean": statistics.fmean(experts)}
        if experts else None,
        "completion_tokens": sum(item["completion_tokens"] for item in good),
        "times": {"decode": rates([a for a, _ in steps], [ms for _, ms in steps]),
                  "prefill_ms_median": statistics.median(first) if first else None},
    }

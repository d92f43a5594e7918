"""Text of a run: progress on stderr while it goes on, the report at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from musejax.gsm8k.profiles import SPLIT
from musejax.gsm8k.score import rates, timed_steps

EVERY = 30.0
"""Seconds between two lines of progress where stderr is no terminal."""


class Progress:
    """How far a run is: one line that changes on a terminal, else a line at most every 30 s; nothing if quiet.

    Args:
        done: items there already.
        todo: rows still to be run.
        scorer: whose accuracy is shown, or None.
    """

    def __init__(self, done: Sequence[dict], todo: int, scorer: str | None, quiet: bool):
        self._items, self._total, self._fresh = list(done), len(done) + todo, 0
        self._scorer, self._quiet = scorer, quiet
        self._terminal = sys.stderr.isatty()
        self._begin = self._said = time.monotonic()
        self._width = 0

    def add(self, item: dict) -> None:
        """Counts one more item."""
        self._items.append(item)
        self._fresh += 1
        now = time.monotonic()
        if self._quiet or (not self._terminal and now - self._said < EVERY):
            return
        self._said = now
        line = self._line(now - self._begin)
        if self._terminal:
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """Ends the line that changes."""
        if self._width:
            sys.stderr.write("\n")
            sys.stderr.flush()

    def _line(self, seconds: float) -> str:
        done = len(self._items)
        parts = [f"{done}/{self._total}"]
        if self._scorer is not None:
            right = sum(item["correct"][self._scorer] for item in self._items)
            parts.append(f"{self._scorer} {right / done:.4f}")
        lengths = [item["accept_len"] for item in self._items if item["accept_len"] is not None]
        if lengths:
            parts.append(f"L {sum(lengths) / len(lengths):.2f}")
        steps = timed_steps(self._items[-20:])
        if figures := rates([a for a, _ in steps], [ms for _, ms in steps]):
            parts.append(f"{figures['tok_s_window']:.0f} tok/s")
        left = seconds / self._fresh * (self._total - done)
        parts.append(f"{left / 60:.0f} min left" if left >= 120 else f"{left:.0f} s left")
        return "gsm8k: " + " · ".join(parts)


def as_text(summary: dict) -> str:
    """The report of a run."""
    partial = f", partial: of {summary['planned']} rows" if summary["partial"] else ""
    lines = [f"GSM8K {SPLIT}, profile {summary['profile']}, {summary['items']} items ({summary['errors']} errors, "
             f"{summary['cut_off']} cut off, {summary['empty']} empty){partial}"]
    for name, s in summary["scores"].items():
        lines.append(f"{name:<16} {s['accuracy']:.4f}  [{s['low']:.4f}, {s['high']:.4f}]   {s['right']}/{s['count']}")
    length = summary["acceptance"]
    if length is not None:
        lines.append(f"acceptance length  mean of requests {length['mean']:.3f} · token-weighted "
                     f"{length['token_weighted']:.3f} · pooled {length['pooled']:.3f} · (C-1)/V "
                     f"{length['after_prefill']:.3f}   (width {summary['verify_width']})")
    decode, experts = summary["times"]["decode"], summary["experts_per_layer"]
    if decode is not None:
        lines.append(f"decode   median {decode['step_ms_median']:.2f} ms/step   "
                     f"tok/s {decode['tok_s']:.0f} (median step), {decode['tok_s_window']:.0f} (all steps)"
                     + (f"   D {experts['median']:.1f} experts/layer" if experts else "")
                     + f"   first token {summary['times']['prefill_ms_median']:.1f} ms (median)")
    lines.append(settings(summary))
    return "\n".join(lines + determinism(summary["determinism"]) + [f"warning: {w}" for w in summary["warnings"]])


def settings(summary: dict) -> str:
    """The line that says how it was run."""
    return " · ".join((f"seed {summary['seed']}", summary["choice"], f"checkpoint {summary['checkpoint']}",
                       f"mesh {summary['mesh']}", summary["engine"]))


def determinism(checked: dict | None) -> list[str]:
    """Lines on the check that answers repeat."""
    if checked is None:
        return []
    lines = [f"determinism  {checked['rows']} rows, {len(checked['differences'])} differences"]
    for d in checked["differences"]:
        top = ", ".join(f"token {t} {x:.6f}" for t, x in d["top"])
        lines.append(f"  {d['id']}: {' and '.join(d['runs'])} differ at token {d['position']}: "
                     f"{d['tokens'][0]} and {d['tokens'][1]}; top logits there: {top}")
    return lines


def speed_line(figures: dict) -> str:
    """One timed request."""
    title = f"{'drafter' if figures['drafter'] else 'no-spec'} #{figures['repeat']}  "
    if not figures["steps"]:
        return title + "incomplete: the answer ended before the first timed step"
    line = (f"{title}tok/s {figures['tok_s']:.1f}  step {figures['step_ms_median']:.3f} ms median "
            f"({figures['step_ms_min']:.3f} min, {figures['step_ms_p90']:.3f} p90, {figures['step_ms_max']:.3f} max)  "
            f"L {figures['L_window']:.2f}  tok/s {figures['tok_s_window']:.1f} (window)  "
            f"first token {figures['first_token_ms']:.1f} ms")
    if figures["experts_per_layer"] is not None:
        line += f"  D {figures['experts_per_layer']:.1f}"
    if figures["incomplete"]:
        line += f"  incomplete: {figures['steps']} steps"
    if figures["uneven"]:
        line += (f"\n  warning: mean {figures['step_ms_mean']:.3f} ms and median differ by more than 5%; "
                 f"slowest is timed step {figures['slowest']} with {figures['step_ms_max']:.3f} ms")
    if figures["compilations"]:
        line += f"\n  failed: something was compiled in {figures['compilations']} steps of the timed request"
    return line

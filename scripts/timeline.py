#!/usr/bin/env python3
"""When the warps of the layer kernel pass its points: a table, the critical chain, a trace, and a picture of a layer.

    python scripts/timeline.py --distinct 49 --out out/timeline

Runs a case of `musejax bench layer` with a library built with -DMUSEJAX_LAYER_STAMPS=ON. A stamp is the time at which a
warp has come to a point of a layer (`Point` in ffi/layer/layer.cuh). Figures are medians over launches and over layers
but the first, which finds the machine cold, and count from the first stamp of the layer. W runs from the last DownSums
of a layer to the last Listed of the next, when the experts are known everywhere; E from there to the last DownSums.

Writes trace.json for Perfetto or chrome://tracing, and with matplotlib layer.png.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

SOURCE = Path(__file__).resolve().parent.parent / "ffi" / "layer" / "layer.cuh"
WARPS, MAX_LAYERS, MAX_POINTS = 12, 64, 32  # of layer_stamps()
ROLES = {"add": slice(0, 3), "multiply": slice(3, 11)}  # of the row warps, which are warps 1 to 11


class TimelineError(RuntimeError):
    """The stamps are not there, or not what the source says."""


class Row(NamedTuple):
    """A point: us since the layer's first stamp, of the first warp, the median one and the last; what the last one adds
    to the point before; the median of each role; who was last most often, as (SM, warp), and in which share of cases.
    """

    name: str
    first: float
    median: float
    last: float
    step: float
    roles: tuple[float, ...]
    latest: tuple[int, int]
    share: float


def point_names(source: str, namespace: str = "Point") -> list[str]:
    """The enumerators of `Point`, or of `Part`, in order of time, without their k.

    Raises:
        TimelineError: there are none.
    """
    found = re.search(rf"namespace {namespace} \{{\s*enum : int \{{(.*?)\}}", source, re.S)
    names = re.findall(r"\bk(\w+)", found[1]) if found else []
    if not 0 < len(names) <= MAX_POINTS:
        raise TimelineError(f"expected 1 to {MAX_POINTS} points (enum {namespace} of ffi/layer/layer.cuh), got "
                            f"{len(names)}")
    return names


def unfold(flat, layers: int, names: list[str]) -> np.ndarray:
    """What layer_stamps() returned -> int64 ns [SMs, 11 row warps, layers, points].

    Raises:
        TimelineError: no stamps, or a warp that passed its points in another order.
    """
    if len(flat) == 0:
        raise TimelineError("expected stamps, got none: build the library with -DMUSEJAX_LAYER_STAMPS=ON "
                            "(CMAKE_ARGS=-DMUSEJAX_LAYER_STAMPS=ON MUSEJAX_CUDA=ON pip install .)")
    stamps = np.asarray(flat, np.int64).reshape(-1, WARPS, MAX_LAYERS, MAX_POINTS)[:, 1:, :layers, :len(names)]
    passed = stamps.reshape(*stamps.shape[:2], -1)
    wrong = np.argwhere((np.diff(passed, axis=-1) < 0) | (passed[..., :-1] == 0))
    if wrong.size:
        sm, warp, at = map(int, wrong[0])
        raise TimelineError(f"expected stamps in order of time, got {passed[sm, warp, at]} before "
                            f"{passed[sm, warp, at + 1]} ns at SM {sm}, warp {warp + 1}, layer {at // len(names)}, "
                            f"point {names[at % len(names)]}: is the library built from this source?")
    return stamps


class StreamPart(NamedTuple):
    """A part of a layer's weight stream, medians over SMs and layers: us that it took, and of them us in which it
    waited for a free stage of the ring, or for the list of visits."""

    name: str
    took: float
    waited: float


def stream_parts(flat, layers: int, parts: list[str]) -> list[StreamPart]:
    """What layer_stamps() returned of warp 0, which notes at the end of each part the time and how long it waited; the
    first and the last layer of the launch do not count."""
    x = np.asarray(flat, np.int64).reshape(-1, WARPS, MAX_LAYERS, MAX_POINTS)[:, 0, :layers, :2 * len(parts)]
    ends, waited = x[..., 0::2], x[..., 1::2] / 1e3
    # The last part belongs to the layer that it is for, and comes before that layer's other parts.
    first = parts[-1]
    order = [len(parts) - 1, *range(len(parts) - 1)]
    ends, waited = ends[..., order], waited[..., order]
    took = np.diff(ends.reshape(len(ends), -1), axis=1).reshape(len(ends), -1) / 1e3
    took = np.concatenate([np.full((len(ends), 1), np.nan), took], axis=1).reshape(ends.shape)[:, 1:layers - 1]
    waited = waited[:, 1:layers - 1]
    names = [first, *parts[:-1]]
    listed = names.index("List")
    waited[..., listed] = took[..., listed]
    return [StreamPart(name, float(np.median(took[..., i])), float(np.median(waited[..., i])))
            for i, name in enumerate(names)]


def stream_as_text(parts: list[StreamPart]) -> str:
    """The weight stream's idle time by cause."""
    total, waited = sum(p.took for p in parts), sum(p.waited for p in parts)
    lines = [f"the weight stream (warp 0, medians): {waited:.1f} of {total:.1f} us a layer ({waited / total:.0%}) "
             "spent waiting for a free stage, or for the list", f"  {'part':<10} {'us':>6} {'waiting':>8}"]
    return "\n".join(lines + [f"  {p.name:<10} {p.took:6.1f} {p.waited:8.1f}" for p in parts])


def since_layer_began(launches: np.ndarray) -> np.ndarray:
    """int64 ns [launches, SMs, warps, layers, points] -> us since the layer's first stamp, float64 [cases, SMs, warps,
    points], a case being a layer of a launch, but for the first one.
    """
    x = launches[:, :, :, 1:]
    x = x - x[..., :1].min(axis=(1, 2), keepdims=True)
    return np.moveaxis(x, 3, 1).reshape(-1, *x.shape[1:3], x.shape[-1]) / 1e3


def table(launches: np.ndarray, names: list[str]) -> list[Row]:
    """A row a point; for the arrays see `since_layer_began`."""
    x = since_layer_began(launches)
    out, before = [], 0.0
    for i, name in enumerate(names):
        at = x[..., i]
        lasts = at.max(axis=(1, 2))
        late = Counter(int(case.argmax()) for case in at)
        index, count = late.most_common(1)[0]
        sm, warp = divmod(index, at.shape[2])
        last = float(np.median(lasts))
        out.append(Row(name, float(np.median(at.min(axis=(1, 2)))), float(np.median(at)), last, last - before,
                       tuple(float(np.median(at[:, :, warps])) for warps in ROLES.values()), (sm, warp + 1),
                       count / len(at)))
        before = last
    return out


def regimes(launches: np.ndarray, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(W, E) in us of every layer but the first; their sum is the layer's time."""
    listed, down = (launches[..., names.index(name)].max(axis=(1, 2)) for name in ("Listed", "DownSums"))
    return ((listed[:, 1:] - down[:, :-1]) / 1e3).ravel(), ((down - listed)[:, 1:] / 1e3).ravel()


def after_gemm2(launches: np.ndarray, names: list[str]) -> np.ndarray:
    """us of every layer but the first and of every SM, flat: from when the last of its MMA warps has ended the experts'
    second GEMM to when the first of them has ended the next GEMM, the unpooler's. At most so long the tensor cores wait
    for exchanges there; the unpooler's own units, a microsecond or so, are in it.
    """
    x = launches[:, :, ROLES["multiply"], 1:]
    begin, end = (x[..., names.index(name)] for name in ("DownSums", "UnpoolerSums"))
    return ((end.min(axis=2) - begin.max(axis=2)) / 1e3).ravel()


def chain(launch: np.ndarray, layer: int, names: list[str]) -> list[tuple[str, int, int, float]]:
    """Who was last at each point of a layer: (point, SM, warp, us since the layer's first stamp)."""
    x = launch[:, :, layer]
    late = [np.unravel_index(x[..., i].argmax(), x.shape[:2]) for i in range(len(names))]
    return [(name, int(sm), int(warp) + 1, float(x[sm, warp, i] - x[..., 0].min()) / 1e3)
            for i, (name, (sm, warp)) in enumerate(zip(names, late, strict=True))]


def shares(launches: np.ndarray, names: list[str]) -> dict[str, list[tuple[str, float]]]:
    """By role: (point, share of its warps' time that passes between the point before and it), the largest first. The
    first point counts from the last one of the layer before."""
    flat = launches.reshape(*launches.shape[:3], -1)
    spent = np.diff(flat, axis=-1)[..., len(names) - 1:].reshape(*flat.shape[:3], -1, len(names))
    out = {}
    for role, warps in ROLES.items():
        total = spent[:, :, warps].sum(axis=(0, 1, 2, 3))
        out[role] = sorted(zip(names, (total / total.sum()).tolist(), strict=True), key=lambda pair: -pair[1])
    return out


def clock_step(launches: np.ndarray) -> int:
    """ns by which the clock advances: what all stamps have in common."""
    return int(np.gcd.reduce((launches - launches.min()).ravel()))


def trace(launch: np.ndarray, names: list[str], sms: list[int]) -> dict:
    """Trace events: one process an SM, one track for the first warp of each role, one slice between points, named after
    the point at its end."""
    events, begin = [], launch.min()
    for sm in sms:
        events.append({"ph": "M", "name": "process_name", "pid": sm, "args": {"name": f"SM {sm}"}})
        for role, warps in ROLES.items():
            warp = warps.start + 1
            events.append({"ph": "M", "name": "thread_name", "pid": sm, "tid": warp,
                           "args": {"name": f"{role} (warp {warp})"}})
            at = (launch[sm, warp - 1] - begin) / 1e3
            flat = at.ravel().tolist()
            for i, (left, right) in enumerate(pairwise(flat), 1):
                events.append({"ph": "X", "pid": sm, "tid": warp, "name": names[i % len(names)], "ts": left,
                               "dur": right - left, "args": {"layer": i // len(names)}})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def draw(launch: np.ndarray, layer: int, names: list[str], title: str, file) -> None:
    """A picture of one layer: an SM a line, each phase in a colour; times are the medians of the SM's warps."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    x = (launch[:, :, layer] - launch[:, :, layer, 0].min()) / 1e3
    edges = np.median(x, axis=1)  # of sequences that ascend: ascends
    figure = Figure(figsize=(16, 9), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names[1:], 1):
        axes.barh(np.arange(len(edges)), edges[:, i] - edges[:, i - 1], left=edges[:, i - 1], height=1.0, label=name,
                  color=colormaps["turbo"](i % 2 / 2 + i / len(names) / 2))
    axes.set(xlabel="us since the layer began", ylabel="SM", title=title, ylim=(len(edges) - 0.5, -0.5))
    axes.margins(x=0)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(file, dpi=120)


def as_text(launches: np.ndarray, names: list[str], layer: int) -> str:
    """Everything but the pictures."""
    lines = [f"{'point':<13} {'first':>7} {'median':>7} {'last':>7} {'step':>6}  "
             + " ".join(f"{role:>8}" for role in ROLES) + "  last most often"]
    for row in table(launches, names):
        lines.append(f"{row.name:<13} {row.first:7.1f} {row.median:7.1f} {row.last:7.1f} {row.step:+6.1f}  "
                     + " ".join(f"{x:8.1f}" for x in row.roles)
                     + f"  SM {row.latest[0]} warp {row.latest[1]} ({row.share:.0%})")
    w, e = regimes(launches, names)
    lines += ["", "; ".join(f"{name} {np.median(x):.1f} us ({x.min():.1f} to {x.max():.1f})"
                            for name, x in (("layer", w + e), ("W", w), ("E", e)))]
    idle = after_gemm2(launches, names)
    lines += [f"after GEMM2 until the unpooler has been multiplied, an SM: {np.median(idle):.1f} us "
              f"({idle.min():.1f} to {idle.max():.1f})"]
    lines += [f"the clock advances by {clock_step(launches)} ns", "", f"last at each point of layer {layer}:"]
    lines += [f"  {at:7.1f} {name:<13} SM {sm} warp {warp}" for name, sm, warp, at in chain(launches[-1], layer, names)]
    for role, parts in shares(launches, names).items():
        lines += ["", f"time of the warps that {role}, by the point at its end:"]
        lines += [f"  {share:6.1%} {name}" for name, share in parts]
    return "\n".join(lines)


def stamps_of(case, launches: int, names: list[str], parts: list[str]) -> tuple[np.ndarray, list[StreamPart]]:
    """Runs the case -> [launches, SMs, warps, layers, points], two launches before them not counted, and the parts of
    the last one's weight stream."""
    import jax

    from musejax import ffi
    from musejax.bench.layer import LoopedLayers, open_library

    module, _ = open_library()
    layers, out = LoopedLayers(case), []
    for n in range(launches + 2):
        stream = jax.block_until_ready(layers.stream(n))
        jax.block_until_ready(layers.launch(stream))
        ffi.raise_wait_error()
        if n >= 2:
            out.append(unfold(module.layer_stamps(), case.layers, names))
    return np.stack(out), stream_parts(module.layer_stamps(), case.layers, parts)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--distinct", type=int, default=49, help="experts that the rows hit (D)")
    p.add_argument("--rows", type=int, default=16)
    p.add_argument("--context", type=int, default=2048)
    p.add_argument("--layers", type=int, default=8, help="in one launch, 3 or more")
    p.add_argument("--activations", default="bf16", choices=("bf16", "nvfp4_static", "nvfp4_per_token"))
    p.add_argument("--launches", type=int, default=5)
    p.add_argument("--layer", type=int, help="which one is drawn, 1 or more (default: the middle one)")
    p.add_argument("--sms", type=int, nargs="+", default=[0, 1, 64, 127], help="SMs in the trace")
    p.add_argument("--out", type=Path, default=Path("out/timeline"), help="folder for trace.json and layer.png")
    args = p.parse_args()

    from musejax.bench.cases import Case
    from musejax.bench.limits import BenchError
    from musejax.ffi import LibraryError, WaitError

    layer = args.layers // 2 if args.layer is None else args.layer
    for name, value, low, high in (("layers", args.layers, 3, MAX_LAYERS), ("launches", args.launches, 1, 1000),
                                   ("layer", layer, 1, args.layers - 1)):
        if not low <= value <= high:
            p.error(f"--{name}: expected {low} to {high}, got {value}")
    try:
        case = Case(args.distinct, args.rows, args.context, args.layers, args.activations)
        names, parts = (point_names(SOURCE.read_text(), space) for space in ("Point", "Part"))
        launches, stream = stamps_of(case, args.launches, names, parts)
    except (BenchError, LibraryError, TimelineError, WaitError, OSError) as error:
        p.error(str(error))
    if not all(0 <= sm < launches.shape[1] for sm in args.sms):
        p.error(f"--sms: expected 0 to {launches.shape[1] - 1}, got {args.sms}")
    print(f"{case}\n{as_text(launches, names, layer)}\n\n{stream_as_text(stream)}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "trace.json").write_text(json.dumps(trace(launches[-1], names, args.sms)))
    try:
        draw(launches[-1], layer, names, f"layer {layer} of {case}", args.out / "layer.png")
    except ImportError:
        print("\nno picture: matplotlib is not installed")


if __name__ == "__main__":
    main()

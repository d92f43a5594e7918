"""`musejax bench`: measurements. `bench limits` measures the GPU itself, `bench layer` a decoder layer on it, `bench
step` a whole speculative step."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from musejax.commands import UsageError

DONE, FAILED = 0, 1


def run(args: Namespace) -> int:
    """Runs the measurement that `args.bench` names; its exit code.

    Raises:
        UsageError, LibraryError, BenchError: what was expected and found; nothing was measured.
    """
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: expected a file in a folder that exists, found no such folder")
    return {"limits": limits, "layer": layer, "step": step}[args.bench](args)


def limits(args: Namespace) -> int:
    """Prints one line per figure as they come; 1 if a check or a wait failed."""
    from musejax.bench import limits as bench
    from musejax.checkpoint.container import write_json

    module, device = bench.open_library()
    started = time.perf_counter()
    print(f"{device}; medians, beside the figures measured on H200 that the design counts on\n\n{bench.COLUMNS}")
    rows = []
    for row in bench.measure(module, args.only or list(bench.GROUPS)):
        rows.append(row)
        print(bench.as_line(row), flush=True)
    seconds = time.perf_counter() - started
    if args.json is not None:
        write_json(Path(args.json), bench.to_json(rows, device=device, version=module.version(), seconds=seconds))
    failed = sum(row.status == "failed" for row in rows)
    print(f"\n{f'{failed} of {len(rows)} rows failed' if failed else f'{len(rows)} rows'} ({seconds:.0f} s)")
    return FAILED if failed else DONE


def layer(args: Namespace) -> int:
    """Prints one line per case as they come; 1 if results are wrong."""
    from musejax.bench import cases, layer
    from musejax.checkpoint.container import write_json

    wanted = cases.cases_of(args.distinct, args.rows, args.context, layers=args.layers, activations=args.activations,
                            devices=args.devices, slices=args.slices)
    module, device = layer.open_library()
    started = time.perf_counter()
    limit = layer.roofline(module)
    results = []
    for case in wanted:
        timing = layer.measure(case, args.batches, baseline=args.baseline, phases=args.phases)
        results.append((case, timing))
        print(cases.as_line(device, case, timing, limit), flush=True)
    if args.json is not None:
        write_json(Path(args.json), cases.to_json(results, limit, device=device, version=module.version(),
                                                  batches=args.batches, seconds=time.perf_counter() - started))
    return FAILED if any(timing.failures for _, timing in results) else DONE


def step(args: Namespace) -> int:
    """Prints one line; 1 if results are wrong."""
    from musejax.bench import layer, step, step_cases
    from musejax.checkpoint.container import write_json

    case = step_cases.StepCase(args.distinct, args.context, args.layers, args.draft_inner, args.accepted, args.devices,
                               args.slices)
    module, device = layer.open_library("bench step")
    started = time.perf_counter()
    mesh = step.prepare(case, args.baseline)
    limit = layer.roofline(module, "bench step")
    timing = step.measure(case, args.batches, baseline=args.baseline, mesh=mesh)
    print(step_cases.as_line(device, case, timing, limit), flush=True)
    if args.json is not None:
        write_json(Path(args.json), step_cases.to_json(case, timing, limit, device=device, version=module.version(),
                                                       batches=args.batches, seconds=time.perf_counter() - started))
    return FAILED if timing.failures else DONE

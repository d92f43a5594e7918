"""`musejax parity`: equal bits on any number of devices, rows and threads, and in the training sharding."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from pathlib import Path

from musejax.commands import UsageError, check_overlays, checkpoint_folder

FAILED = 1


def run(args: Namespace) -> int:
    """Prints one line per comparison; 0 if all bits agree, else 1.

    Raises:
        UsageError, CheckpointError, ConfigError, LibraryError: what was expected and found.
    """
    folder = checkpoint_folder(args.checkpoint)
    check_overlays(args.overlay)
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: expected a file in a folder that exists, found no such folder")
    use_cpu(max(args.devices))

    from tqdm import tqdm

    from musejax import parity
    from musejax.checkpoint.container import write_json
    from musejax.ffi import library

    started = time.perf_counter()
    with tqdm(total=1, desc="load", unit="comparison", disable=None) as bar:
        def begin(total: int) -> None:
            bar.reset(total)
            bar.set_description("parity")

        def report(row: parity.Row) -> None:
            bar.write(str(row), file=sys.stdout)
            sys.stdout.flush()
            bar.update()

        rows = parity.run(folder, overlay=tuple(args.overlay), activations=args.activations, combine=args.combine,
                          tokens=args.tokens, devices=args.devices, seed=args.seed, quick=args.quick,
                          inject=args.inject, report=report, begin=begin)
    seconds = time.perf_counter() - started
    lib = library("cpu")
    result = parity.to_json(rows, checkpoint=str(folder), overlay=list(args.overlay), inject=args.inject,
                            devices=list(args.devices), tokens=args.tokens, seed=args.seed, quick=args.quick,
                            instruction_set=str(lib.isa()), threads=lib.threads(), seconds=seconds)
    if args.json is not None:
        write_json(Path(args.json), result)
    failed, skipped = (sum(row.passed is verdict for row in rows) for verdict in (False, None))
    print((f"{failed} of {len(rows)} comparisons found other bits" if failed else
           f"{len(rows) - skipped} comparisons, all bits equal") + (f", {skipped} skipped" if skipped else "")
          + f" ({seconds:.0f} s)" + (f"; broken on purpose: {parity.INJECTIONS[args.inject]}" if args.inject else ""))
    return FAILED if failed else 0


def use_cpu(devices: int) -> None:
    """Makes JAX run on so many devices of the CPU, unless it has started already or XLA_FLAGS says how many."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if devices > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", devices)
        except RuntimeError:  # devices exist already: `parity.run` says if there are too few
            pass

"""`musejax quantize`: a published BF16 checkpoint -> the same with NVFP4 experts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from musejax.commands import checkpoint_folder, note


def run(args: Namespace) -> int:
    """Checks the paths, then quantises; one line a layer on stdout.

    Raises:
        UsageError, musejax.checkpoint.CheckpointError, musejax.config.ConfigError: what was expected and found.
    """
    source, destination = checkpoint_folder(args.source), Path(args.destination)

    from musejax.checkpoint import CheckpointError, is_converted, quantize
    from musejax.checkpoint.load import require_checkpoint

    require_checkpoint(source)
    if is_converted(source):
        raise CheckpointError(f"{source}: expected a published checkpoint (safetensors), got a converted one")
    quantize(source, destination, layers=args.layers, progress=not args.quiet,
             report=lambda error: print(error, flush=True))
    if not args.quiet:
        note(f"wrote {destination}; nothing was calibrated: input scales, which only --activations nvfp4_static uses, "
             "are 1.0")
    return 0

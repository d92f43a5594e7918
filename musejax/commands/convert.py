"""`musejax convert`: a published checkpoint -> the sliced and packed form that loads fast."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from musejax.commands import check_overlays, checkpoint_folder, note


def run(args: Namespace) -> int:
    """Checks the paths, then converts.

    Raises:
        UsageError, musejax.checkpoint.CheckpointError, musejax.config.ConfigError, musejax.ffi.LibraryError: what was
            expected and found.
    """
    source, destination = checkpoint_folder(args.source), Path(args.destination)
    check_overlays(args.overlay)

    import jax

    from musejax.checkpoint import convert

    jax.config.update("jax_platforms", "cpu")  # Orbax starts the backends, and a GPU would reserve its memory

    convert(source, destination, overlay=tuple(args.overlay), progress=not args.quiet,
            overwrite=args.overwrite)
    if not args.quiet:
        note(f"wrote {destination}")
    return 0

"""`musejax check`: the golden values of a folder against what this installation computes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from musejax.commands import UsageError, check_overlays, checkpoint_folder

FAILED = 1


def run(args: Namespace) -> int:
    """Prints one line per comparison (or one JSON object); 0 if all pass, else 1.

    Raises:
        UsageError, musejax.check.CheckError, CheckpointError, ConfigError: what was expected and found.
    """
    folder = checkpoint_folder(args.folder)
    check_overlays(args.overlay)
    expected = Path(args.expected) if args.expected else folder / "expected.npz"
    if not expected.is_file():
        raise UsageError(f"{expected}: expected golden values of this checkpoint, found no such file; "
                         "name another file with --expected")

    from musejax import check

    rows = check.run(folder, overlay=tuple(args.overlay), expected=expected,
                     report=(lambda line: None) if args.json else lambda line: print(line, flush=True))
    result = check.to_json(rows)
    if args.json:
        print(json.dumps(result))
    else:
        failed, left = (sum(row.passed is verdict for row in rows) for verdict in (False, None))
        print((f"{failed} of {len(rows)} comparisons failed" if failed else f"{len(rows) - left} comparisons passed")
              + (f", {left} left open by near ties" if left else ""))
    return 0 if result["passed"] else FAILED

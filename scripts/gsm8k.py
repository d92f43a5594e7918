#!/usr/bin/env python3
"""`musejax gsm8k` from a checkout: the same arguments, output and exit codes.

    python scripts/gsm8k.py --data DIR --limit 50 --out RUN
"""

import sys

from musejax.cli import run

if __name__ == "__main__":
    sys.exit(run(["gsm8k", *sys.argv[1:]]))

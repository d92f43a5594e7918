"""Arguments of `musejax gsm8k`. Imports nothing heavy: the parser is built for every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable

PROFILE_NAMES = ("fewshot5", "boxed-chat", "plain", "cot8", "bench")
SCORER_NAMES = ("strict", "flexible", "numeric", "boxed", "cot-strict", "llama-strict", "self-consistency",
                "sglang-old", "sglang-new")
LEAST_REPEATS = 3


def rows(text: str) -> tuple[int, int]:
    """`A:B` (B not included) or one number -> (first, end)."""
    first, colon, end = text.partition(":")
    if first.isdecimal() and (end.isdecimal() or not colon):
        low = int(first)
        high = int(end) if colon else low + 1
        if low < high:
            return low, high
    raise argparse.ArgumentTypeError(f"expected rows such as 0:200 (200 not included) or 7, got {text!r}")


def scorers(text: str) -> tuple[str, ...]:
    """Names with commas between."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in SCORER_NAMES]:
        raise argparse.ArgumentTypeError(f"expected names out of {', '.join(SCORER_NAMES)}, got {unknown[0]!r}")
    return names


def add(commands, number: Callable, add_running: Callable) -> None:
    """Adds the command.

    Args:
        commands: of argparse.
        number: (kind, low, high, expected) -> an argparse type.
        add_running: adds the options that say how a model is run, `--drafter` among them.
    """
    count = number(int, 1, 2**31 - 1, "an integer of at least 1")
    p = commands.add_parser("gsm8k", help="score GSM8K, with acceptance length and speed", description=(
        "Answers GSM8K test problems and scores the answers. The report goes to stdout, progress to stderr. With --out "
        "every answer is kept as soon as it is there, and --resume goes on after a kill. Exit codes: 0 done, 1 a check "
        "failed, 2 nothing was run, 3 some items failed, 130 interrupted."))
    p.add_argument("--checkpoint", metavar="DIR", help="checkpoint folder (default: the shipped nano)")
    p.add_argument("--no-spec", action="store_true", help="one token a step (default, unless --drafter is given)")
    p.add_argument("--data", metavar="DIR", help="folder with gsm8k_test.jsonl and gsm8k_train.jsonl (default: "
                   "$MUSEJAX_GSM8K)")
    p.add_argument("--profile", choices=PROFILE_NAMES, help="prompt, stops, limit and scorers (default: plain for "
                   "nano; else boxed-chat, with --speed bench)")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--limit", metavar="N", type=count, help="the first N rows (default: all)")
    which.add_argument("--rows", metavar="A:B", type=rows, help="rows from A to B - 1, or one row")
    p.add_argument("--scorers", metavar="LIST", type=scorers,
                   help=f"instead of the profile's: {', '.join(SCORER_NAMES)}")
    p.add_argument("--date", metavar="YYYY-MM-DD", help="the date that a chat template is told")
    choice = p.add_argument_group("choice of tokens")
    choice.add_argument("--max-new-tokens", metavar="N", type=count, help="(default: the profile's)")
    choice.add_argument("--temperature", metavar="T", default=0.0, help="0 is greedy (default)",
                        type=number(float, 0, 1e6, "a finite number of at least 0 (0 is greedy)"))
    choice.add_argument("--top-p", metavar="P", default=1.0, help="(default 1: all)",
                        type=number(float, 5e-324, 1, "a number above 0 and at most 1"))
    choice.add_argument("--top-k", metavar="K", default=0, help="(default 0: all)",
                        type=number(int, 0, 2**31 - 1, "an integer of at least 0 (0 keeps all)"))
    choice.add_argument("--seed", metavar="N", default=0, help="of all noise (default 0)",
                        type=number(int, 0, 2**32 - 1, "an integer of 0 to 4294967295"))
    choice.add_argument("--sample", metavar="N", default=0, help="number of the sample of a seed (default 0)",
                        type=number(int, 0, 2**31 - 1, "an integer of at least 0"))
    keep = p.add_argument_group("run")
    keep.add_argument("--out", metavar="RUNDIR", help="keep config.json, items.jsonl and summary.json there")
    keep.add_argument("--resume", action="store_true", help="go on with the items in RUNDIR")
    keep.add_argument("--check-determinism", metavar="K", type=count,
                      help="run the first K rows twice and compare tokens")
    keep.add_argument("--speed", action="store_true", help="instead of scores: time 20 decode steps of one request, "
                      "batch 1, greedy, after 5 that are skipped")
    keep.add_argument("--repeat", metavar="N", default=LEAST_REPEATS, help=f"of --speed (default {LEAST_REPEATS})",
                      type=number(int, LEAST_REPEATS, 1000, f"an integer of at least {LEAST_REPEATS}"))
    add_running(p)
    p.add_argument("--quiet", action="store_true", help="no notes or progress")

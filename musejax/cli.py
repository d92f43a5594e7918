"""The command `musejax`: argument parsing, exit codes, nothing else.

Exit codes: 0 done; 1 a comparison of `check` or `parity`, or a check of `gsm8k` or `bench`, failed; 2 wrong input, with
one message on stderr; 3 some items of `gsm8k` failed; 130 interrupted by Ctrl-C; 141 the reader of the output went
away. Modules that import JAX are imported by the subcommand that needs them, so that `--help` answers at once.

The console script is `run`; `main` is for callers that go on afterwards.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from musejax.bench.limits import GROUPS
from musejax.commands import UsageError
from musejax.commands.interrupts import INTERRUPTED, ignore_interrupts, leave, leave_on_interrupt
from musejax.gsm8k import options as gsm8k

WRONG_INPUT, READER_GONE = 2, 141

EXAMPLES = """examples:
  musejax generate --prompt "Tom has 3 apples."            with the small model that comes with the package
  musejax generate CKPT --chat --prompt-file question.txt --max-new-tokens 2048
  musejax info released                                    sizes of the 816B model, without its weights
  musejax convert CKPT CONVERTED                           once, so that later loads are fast
  musejax quantize CKPT NVFP4                              4-bit experts; load or convert the result
  musejax gsm8k --data DIR --limit 50 --out RUN            score the first 50 problems; --resume goes on after a kill
  musejax bench limits --json limits.json                  bandwidths and latencies of this GPU
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(WRONG_INPUT, f"musejax: error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import PackageNotFoundError, version  # slow to import, so only here

        try:
            print(f"musejax {version('musejax')}")
        except PackageNotFoundError:
            print("musejax (not installed)")
        parser.exit()


def _number(kind: type, low: float, high: float, expected: str) -> Callable[[str], float]:
    """An argparse type: a number of [low, high], or an error that says what was expected."""

    def parse(text: str):
        try:
            value = kind(text)
            if low <= value <= high:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


_COUNT = _number(int, 1, 2**31 - 1, "an integer of at least 1")
_TOP_K = _number(int, 0, 2**31 - 1, "an integer of at least 0 (0 keeps all)")
_SEED = _number(int, 0, 2**32 - 1, "an integer of 0 to 4294967295")
_TEMPERATURE = _number(float, 0, sys.float_info.max, "a finite number of at least 0 (0 is greedy)")
_TOP_P = _number(float, sys.float_info.min, 1, "a number above 0 and at most 1")


def _token_ids(text: str) -> list[int]:
    try:
        ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        ids = [-1]
    if any(i < 0 for i in ids):
        raise argparse.ArgumentTypeError(f"expected token ids such as '1 2 3', got {text!r}")
    return ids


def _layers(text: str) -> list[int]:
    out: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.strip().isdecimal() and (last.strip().isdecimal() or not dash)):
            raise argparse.ArgumentTypeError(f"expected layers such as 1-60 or 0,2-4, got {text!r}")
        low, high = int(first), int(last if dash else first)
        if not low <= high < 10_000:
            raise argparse.ArgumentTypeError(f"expected ascending ranges of layers such as 1-60, got {part!r}")
        out.update(range(low, high + 1))
    return sorted(out)


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names with commas between, got {text!r}")
    return list(dict.fromkeys(names))


def _counts(text: str) -> list[int]:
    if not all(name.isdecimal() and int(name) in (1, 2, 4, 8) for name in _names(text)):
        raise argparse.ArgumentTypeError(f"expected some of 1, 2, 4, 8 such as 1,8, got {text!r}")
    return sorted(map(int, _names(text)))


def _stop_string(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected at least one character, got an empty string")
    return text


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="musejax", description="Muse Spark Open in JAX.", epilog=EXAMPLES,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_convert(commands)
    _add_quantize(commands)
    _add_info(commands)
    _add_check(commands)
    _add_parity(commands)
    _add_bench(commands)
    gsm8k.add(commands, _number, _add_running)
    return parser


def _add_generate(commands) -> None:
    p = commands.add_parser("generate", help="continue a text, or answer a question with --chat", description=(
        "Continues a text, or answers a question with --chat. Text goes to stdout as it comes, statistics to stderr. "
        "Ctrl-C ends the text where it is and leaves with exit code 130."))
    p.add_argument("checkpoint", nargs="?", metavar="CKPT", help="checkpoint folder (default: the shipped nano)")
    prompt = p.add_argument_group("prompt (default: stdin, if it is a pipe)").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text, '-' is stdin; a last line break is dropped")
    prompt.add_argument("--prompt-ids", metavar="IDS", type=_token_ids, help="such as '1 2 3'; no BOS is added")
    chat = p.add_argument_group("chat")
    chat.add_argument("--chat", action="store_true", help="render the prompt with the checkpoint's chat template; "
                      "only messages to the user are shown")
    chat.add_argument("--system", metavar="TEXT", help="instructions that come before the question")
    chat.add_argument("--reasoning-effort", choices=("minimal", "low", "medium", "high", "xhigh"))
    chat.add_argument("--date", metavar="YYYY-MM-DD", help="the date that the model is told")
    choice = p.add_argument_group("choice of tokens")
    choice.add_argument("--max-new-tokens", metavar="N", type=_COUNT, default=256, help="(default 256)")
    choice.add_argument("--temperature", metavar="T", type=_TEMPERATURE, default=0.0, help="0 is greedy (default)")
    choice.add_argument("--top-p", metavar="P", type=_TOP_P, default=1.0, help="(default 1: all)")
    choice.add_argument("--top-k", metavar="K", type=_TOP_K, default=0, help="(default 0: all)")
    choice.add_argument("--seed", metavar="N", type=_SEED, default=0, help="(default 0)")
    choice.add_argument("--stop", metavar="TEXT", type=_stop_string, action="append", default=[],
                        help="end before this text; may be repeated")
    _add_running(p)
    out = p.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON object at the end instead of text")
    out.add_argument("--quiet", action="store_true", help="no statistics, notes or progress")


def _add_running(p) -> None:
    """Options that say how a model is run."""
    run = p.add_argument_group("how it runs")
    run.add_argument("--policy", choices=("canon", "exact"), default="canon",
                     help="canon rounds to bfloat16 at named points (default); exact is all float32")
    run.add_argument("--activations", choices=("bf16", "nvfp4_static", "nvfp4_per_token"), default="bf16",
                     help="what NVFP4 experts multiply their weights with: bf16 (default), or 4 bits too, with the "
                     "scales of the checkpoint or of each token")
    run.add_argument("--implementation", choices=("auto", "reference", "megakernel"), default="auto",
                     help="of a decoder layer: megakernel = compiled phases, same bits on any number of devices; "
                          "reference = plain JAX; auto (default) = megakernel where it can run")
    run.add_argument("--prefill", choices=("auto", "exact", "reference"), default="auto",
                     help="of megakernel: exact = the bits of decoding the prompt token by token; reference = plain "
                          "JAX, faster for long prompts; auto (default) = exact up to 4096 tokens")
    _add_speculation(run)
    run.add_argument("--combine", metavar="ORDER", help="order of expert sums: flat, or ep(R) such as ep(8)")
    run.add_argument("--devices", metavar="N", type=int, choices=(1, 2, 4, 8), default=1,
                     help="1, 2, 4 or 8 (default 1)")
    run.add_argument("--platform", choices=("cpu", "gpu"), help="(default: what JAX finds); with cpu, --devices N "
                     "makes N devices of it")
    run.add_argument("--prefill-chunk", metavar="ROWS", type=_COUNT, help="rows per prefill call")
    _add_overlay(run)


def _add_speculation(parser) -> None:
    parser.add_argument("--drafter", metavar="DIR", help="folder of a DFlash drafter whose guesses are verified 16 a "
                        "step, or 'nano' for the shipped one of nano; the text stays that of plain decoding")
    parser.add_argument("--tree-width", metavar="N", type=_COUNT, help="guesses that may follow one token; 1 is a "
                        "chain (default: all candidates)")
    parser.add_argument("--tree-spine", metavar="N", type=int, default=0, choices=range(16), help="the first N guesses "
                        "follow the likeliest chain (default 0)")


def _add_overlay(parser) -> None:
    parser.add_argument("--overlay", metavar="DIR", action="append", default=[],
                        help="folder whose tensors replace those of the same name; may be repeated")


def _add_convert(commands) -> None:
    p = commands.add_parser("convert", help="slice a published checkpoint once, so that later loads are fast")
    p.add_argument("source", metavar="SRC", help="published checkpoint (a Hugging Face folder)")
    p.add_argument("destination", metavar="DST", help="new folder; an interrupted conversion goes on where it was")
    _add_overlay(p)
    p.add_argument("--overwrite", action="store_true", help="replace DST if it is a converted checkpoint")
    p.add_argument("--quiet", action="store_true", help="no progress")


def _add_quantize(commands) -> None:
    p = commands.add_parser("quantize", help="make a published checkpoint with 4-bit (NVFP4) experts", description=(
        "Makes a published checkpoint with NVFP4 experts from one with BF16 experts, and prints the relative RMS error "
        "of each layer. Nothing is calibrated: input scales are written as 1.0."))
    p.add_argument("source", metavar="SRC", help="published BF16 checkpoint (a Hugging Face folder)")
    p.add_argument("destination", metavar="DST", help="new folder; it appears when it is complete")
    p.add_argument("--layers", metavar="LIST", type=_layers,
                   help="whose experts, such as 1-60 or 0,2-4 (default: all but the first and the last)")
    p.add_argument("--quiet", action="store_true", help="no progress")


def _add_info(commands) -> None:
    p = commands.add_parser("info", help="configuration, parameter and byte counts, dtypes", description=(
        "Prints configuration, parameter and byte counts of a checkpoint, from its headers, or of a named "
        "configuration (released, mini, nano), without any weights."))
    p.add_argument("checkpoint", nargs="?", metavar="CKPT|PRESET", help="(default: the shipped nano)")
    p.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def _add_check(commands) -> None:
    p = commands.add_parser("check", help="compare with the golden values in a folder")
    p.add_argument("folder", metavar="FOLDER", help="checkpoint folder")
    p.add_argument("--expected", metavar="FILE", help="golden values (default: FOLDER/expected.npz)")
    _add_overlay(p)
    p.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def _add_parity(commands) -> None:
    p = commands.add_parser("parity", help="check that bits do not depend on devices, rows, threads or sharding",
                            description=(
        "Decodes with a checkpoint on the CPU in many ways and compares the bits: on 1, 2, 4 and 8 devices, under the "
        "training sharding, row by row and in trees, with other threads and instruction sets. Prints a line for each "
        "comparison; exit code 1 if any bit differs. Devices are made of the CPU."))
    p.add_argument("checkpoint", nargs="?", metavar="CKPT", help="checkpoint folder (default: the shipped nano)")
    _add_overlay(p)
    p.add_argument("--activations", metavar="LIST", type=_names, help="of bf16,nvfp4_static,nvfp4_per_token "
                   "(default: all that apply)")
    p.add_argument("--combine", metavar="LIST", type=_names, help="orders of expert sums (default: ep(8),flat)")
    p.add_argument("--tokens", metavar="N", type=_COUNT, default=64, help="decoded after the prompt (default 64)")
    p.add_argument("--devices", metavar="LIST", type=_counts, default=[1, 2, 4, 8], help="(default 1,2,4,8)")
    p.add_argument("--seed", metavar="N", type=_SEED, default=0, help="of prompt and trees (default 0)")
    p.add_argument("--quick", action="store_true", help="fewer rows and positions, no threads and instruction sets")
    p.add_argument("--inject", choices=("k-order", "combine-order", "slice", "tie"), help="break one side on purpose: "
                   "the order of sums over K, or of the combine, a bit of one slice, the choice in a tie")
    p.add_argument("--json", metavar="PATH", help="also write the result to a file")


def _add_bench(commands) -> None:
    p = commands.add_parser("bench", help="measure the GPU, and the kernels on it")
    kinds = p.add_subparsers(title="measurements", dest="bench", required=True, metavar="MEASUREMENT")
    p = kinds.add_parser("limits", help="bandwidths, latencies, properties of instructions", description=(
        "Measures what the GPU can do at most and at best, and prints one line for each figure with the one that the "
        "design counts on. Takes a minute and needs the whole GPU. Exit code 1 if a check fails."))
    p.add_argument("--only", metavar="NAME", nargs="+", choices=GROUPS, help=f"some of {', '.join(GROUPS)}")
    p.add_argument("--json", metavar="FILE", help="also write the result to a file")
    p = kinds.add_parser("layer", help="microseconds of a decoder layer", description=(
        "Measures decoder layers of the released sizes as one rank of 8 on one GPU, exchanges looped back: random "
        "NVFP4 weights, another routing in each launch. Prints one line for each combination of rows, context and "
        "distinct experts, with the share of the HBM rate measured before. Exit code 1 if results are not finite, or "
        "differ when repeated."))
    p.add_argument("--distinct", metavar="D", type=int, nargs="+", help="experts that the rows hit, 8 or more; met on "
                   "average (default: 49, or what fewer rows can hit)")
    p.add_argument("--rows", metavar="N", type=int, nargs="+", default=[16], help="1 to 16 (default 16)")
    p.add_argument("--context", metavar="N", type=int, nargs="+", default=[2048],
                   help="positions before these rows (default 2048)")
    p.add_argument("--layers", metavar="N", type=int, default=8, help="in one launch, 1 to 60 (default 8)")
    p.add_argument("--activations", choices=("bf16", "nvfp4_static", "nvfp4_per_token"), default="bf16",
                   help="what NVFP4 experts multiply their weights with (default bf16)")
    p.add_argument("--devices", metavar="N", type=int, default=1,
                   help="GPUs, a rank each, with real exchanges between them (default 1)")
    p.add_argument("--slices", metavar="N", type=int, default=1,
                   help="of the 8 on each of them: 1, 2, 4 or 8 (default 1)")
    p.add_argument("--batches", metavar="N", type=_COUNT, default=9, help="samples, of 5 launches each (default 9)")
    p.add_argument("--phases", action="store_true",
                   help="also time the layers as one launch a phase in a CUDA graph, batch by batch in between; the "
                        "same bits are expected")
    p.add_argument("--baseline", action="store_true",
                   help="also time two of the layers in plain JAX as XLA compiles them, batch by batch in between")
    p.add_argument("--json", metavar="FILE", help="also write the result to a file")
    p = kinds.add_parser("step", help="milliseconds of a whole speculative step", description=(
        "Measures draft, tree, verification by all layers, LM head, accept and commit of the released sizes as one "
        "program: one rank of 8 on one GPU, exchanges looped back, 16 rows, random weights (67 GB). Prints one line: "
        "the step, draft and verification alone, launches, share of the HBM rate measured before. Several GPUs "
        "exchange for real, always in turns with the first one's part alone, exchanges looped back: what the exchange "
        "adds. Exit code 1 if results are not finite, or differ when repeated, from GPU to GPU, or from those without "
        "exchange."))
    p.add_argument("--layers", metavar="N", type=int, default=62, help="of the model, 1 to 62 (default 62)")
    p.add_argument("--context", metavar="N", type=int, default=2048,
                   help="positions before the step, 16 or more (default 2048)")
    p.add_argument("--distinct", metavar="D", type=int, default=49,
                   help="experts that the rows hit, 8 to 128; met on average (default 49)")
    p.add_argument("--draft-inner", metavar="N", type=int, default=24576,
                   help="width of the drafter's FFN, a multiple of 1024 (default 24576)")
    p.add_argument("--accepted", metavar="N", type=float, default=6.6,
                   help="tokens a step, 1 to 16, that tokens a second are stated for; assumed, not measured (default "
                   "6.6)")
    p.add_argument("--devices", metavar="N", type=int, default=1,
                   help="GPUs, a rank each, 1, 2, 4 or 8; several have all of embedding, drafter and LM head together, "
                        "and of each layer --slices (default 1)")
    p.add_argument("--slices", metavar="N", type=int, default=1,
                   help="of a layer's 8 on each of them: 1, 2, 4 or 8; those not there are looped back (default 1)")
    p.add_argument("--batches", metavar="N", type=_COUNT, default=9, help="samples, of 5 steps each (default 9)")
    p.add_argument("--baseline", action="store_true",
                   help="also time two layers in plain JAX as XLA compiles them, batch by batch in between")
    p.add_argument("--json", metavar="FILE", help="also write the result to a file")


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as done:  # help, version, wrong arguments
        return done.code or 0
    if args.command == "generate":
        from musejax.commands.generate import run
    elif args.command == "convert":
        from musejax.commands.convert import run
    elif args.command == "quantize":
        from musejax.commands.quantize import run
    elif args.command == "info":
        from musejax.commands.info import run
    elif args.command == "parity":
        from musejax.commands.parity import run
    elif args.command == "bench":
        from musejax.commands.bench import run
    elif args.command == "gsm8k":
        from musejax.commands.gsm8k import run
    else:
        from musejax.commands.check import run
    return run(args)


def _explanation(err: Exception) -> str | None:
    """What to tell the user if an exception is about wrong input or a full disk; None if it means a bug."""
    if isinstance(err, OSError):
        if err.filename is not None:
            return f"{err.filename}: {err.strerror}"
        if _output_fails() or err.errno in (errno.ENOSPC, errno.EDQUOT):  # unbuffered output fails only once
            return f"output cannot be written: {err.strerror}"
        return str(err) if isinstance(err, FileNotFoundError) else None
    ours = type(err).__module__.partition(".")[0] == "musejax" and isinstance(err, (ValueError, RuntimeError))
    return str(err) if ours else None


def _output_fails() -> bool:
    """Whether stdout cannot take what was written to it; if so, it is dropped."""
    try:
        sys.stdout.flush()
        return False
    except OSError:
        _drop_output()
        return True


def _drop_output() -> None:
    """Sends what stdout still holds to nowhere, or Python complains when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_streams() -> None:
    if sys.stderr is None:  # closed; without this, messages would go to stdout
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:  # a file opened later would take its place, and stray output would go into it
        raise UsageError("standard output is closed: expected a file, a pipe or a terminal")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings appear as one line, without source lines, each text once."""
    seen = set()

    def show(message, *_, **__):
        if str(message) not in seen:
            seen.add(str(message))
            print(f"musejax: warning: {message}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Exceptions that mean a bug are not caught."""
    try:
        _check_streams()
        with _plain_warnings():
            code = _run(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("musejax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return READER_GONE
    except Exception as err:
        text = _explanation(err)
        if text is None:
            raise
        print(f"musejax: error: {text}", file=sys.stderr)
        return WRONG_INPUT


def run(argv: Sequence[str] | None = None) -> int:
    """The console script: `main` in a process of its own, which Ctrl-C ends without teardown."""
    leave_on_interrupt()
    code = main(argv)
    if code == INTERRUPTED:
        leave(code)
    ignore_interrupts()
    return code


if __name__ == "__main__":
    sys.exit(run())

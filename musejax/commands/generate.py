"""`musejax generate`: prompt -> text on stdout as it comes, or one JSON object.

Cheap checks come first: arguments, files, prompt length; only then weights are loaded and code is compiled.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from musejax.chat import ChatTemplate, MessageParser, opening_of
from musejax.commands import UsageError, check_overlays, checkpoint_folder, note
from musejax.commands.interrupts import INTERRUPTED, Deferred
from musejax.text import INTERRUPT, TextStream
from musejax.tokenizer import Tokenizer, read_generation_config


@dataclass
class Request:
    """A checked request.

    Attributes:
        prompt: token ids.
        opening: what a rendered chat prompt has already written of the reply; None in raw mode.
        stop_ids: tokens that end the text.
        max_new_tokens: at most what the context leaves after the prompt.
    """

    path: Path
    config: object  # ModelConfig, DecodeConfig and Sampling: their modules import JAX
    decode: object
    sampling: object
    tokenizer: Tokenizer | None
    prompt: list[int]
    opening: str | None
    stop_ids: tuple[int, ...]
    max_new_tokens: int


def run(args: Namespace) -> int:
    """Checks, loads, generates; exit code 0, or 130 if the user broke off.

    Raises:
        UsageError, ConfigError, CheckpointError, TokenizerError: what was expected and found.
    """
    _check_combinations(args)
    path = checkpoint_folder(args.checkpoint, hint=" (a prompt goes to --prompt)")
    check_overlays(args.overlay)
    prompt = read_prompt(args)
    with Deferred(args.quiet) as interrupt:  # before JAX is imported
        request = prepare(args, path, prompt)
        interrupt.check()
        model = load_model(args, request)
        interrupt.check()
        return write_out(args, request, model, interrupt)


def _check_combinations(args: Namespace) -> None:
    if args.chat and args.prompt_ids is not None:
        raise UsageError("--chat: expected a prompt as text, got --prompt-ids")
    for name in ("system", "reasoning_effort", "date"):
        if getattr(args, name) is not None and not args.chat:
            raise UsageError(f"--{name.replace('_', '-')}: expected --chat beside it, since raw mode has no template")


# ------------------------------------------------------------------ prompt


def read_prompt(args: Namespace) -> str | list[int]:
    """The prompt from its argument, file or pipe.

    Raises:
        UsageError: no prompt, an empty one, or bytes that are not UTF-8.
    """
    if args.prompt_ids is not None:
        source, prompt = "--prompt-ids", args.prompt_ids
    elif args.prompt is not None:
        source, prompt = "--prompt", args.prompt
    elif args.prompt_file not in (None, "-"):
        source, prompt = args.prompt_file, _text(Path(args.prompt_file).read_bytes(), args.prompt_file)
    elif args.prompt_file == "-" or (sys.stdin is not None and not sys.stdin.isatty()):
        source, prompt = "stdin", _text(sys.stdin.buffer.read(), "stdin")
    else:
        raise UsageError("expected a prompt: --prompt TEXT, --prompt-file FILE, --prompt-ids IDS, or text by a pipe")
    if not prompt:
        raise UsageError(f"{source}: expected a prompt, got nothing")
    return prompt


def _text(data: bytes, source: str) -> str:
    """UTF-8 text without its last line break, which editors and `echo` add."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise UsageError(f"{source}: expected UTF-8 text, got {err.reason} at byte {err.start}") from None
    return text.removesuffix("\n").removesuffix("\r")


def prepare(args: Namespace, path: Path, prompt: str | list[int]) -> Request:
    """Everything that can be checked without weights.

    Raises:
        UsageError, ConfigError, CheckpointError, TokenizerError: what was expected and found.
    """
    select_platform(args)
    from musejax.checkpoint.load import require_checkpoint
    from musejax.config import DecodeConfig, ModelConfig
    from musejax.numerics import POLICIES
    from musejax.sampling import Sampling

    require_checkpoint(path)
    config = ModelConfig.from_folder(path)
    tokenizer = Tokenizer.find(path)
    if tokenizer is None and (isinstance(prompt, str) or args.stop):
        raise UsageError(f"{path}: text needs tokenizer.json, found none; give token ids: --prompt-ids '1 2 3'"
                         + (" and no --stop" if args.stop else ""))
    stop_ids = read_generation_config(path).stop_ids
    if args.chat:
        stop_ids = tuple(dict.fromkeys((*stop_ids, *tokenizer.stop_ids)))
    ids, opening = _tokens(args, path, tokenizer, prompt)
    if not args.chat:
        ChatTemplate.find(path)  # loading reads it too, but only after the weights
    choices = {"combine": args.combine, "prefill_chunk": args.prefill_chunk, "activations": args.activations,
               "implementation": args.implementation, "prefill": args.prefill}
    decode = DecodeConfig(policy=POLICIES[args.policy], **{k: v for k, v in choices.items() if v is not None})
    if args.combine is not None:
        decode.check(config)  # what was asked for; `for_model` would quietly take another order
    return Request(
        path=path, config=config, decode=decode.for_model(config),
        sampling=Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed),
        tokenizer=tokenizer, prompt=ids, opening=opening, stop_ids=stop_ids or getattr(tokenizer, "stop_ids", ()),
        max_new_tokens=_fit(args, config, tokenizer, ids))


def _tokens(args: Namespace, path: Path, tokenizer: Tokenizer | None, prompt) -> tuple[list[int], str | None]:
    """-> (prompt ids, what a chat prompt has written of the reply or None)."""
    if not isinstance(prompt, str):
        return prompt, None
    if not args.chat:
        return tokenizer.encode(prompt, bos=True, parse_special=False), None
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    rendered = ChatTemplate.from_folder(path).render(
        [*messages, {"role": "user", "content": prompt}], reasoning_effort=args.reasoning_effort, date=args.date)
    # The template writes BOS itself, and has made the caller's text harmless.
    return tokenizer.encode(rendered, bos=False, parse_special=True), opening_of(rendered)


def _fit(args: Namespace, config, tokenizer: Tokenizer | None, prompt: list[int]) -> int:
    """New tokens that the context has room for.

    Raises:
        UsageError: the tokenizer or a prompt id is not of this model, or the prompt fills the context.
    """
    if tokenizer is not None and tokenizer.size > config.vocab_size:
        raise UsageError(f"tokenizer.json: expected at most {config.vocab_size} tokens (vocab_size), got "
                         f"{tokenizer.size}; take it and config.json from the same checkpoint")
    unknown = [i for i in prompt if i >= config.vocab_size]
    if unknown:
        raise UsageError(f"prompt: expected token ids below {config.vocab_size} (vocab_size), got {unknown[0]}")
    room = config.max_position_embeddings - len(prompt)
    if room < 1:
        raise UsageError(f"prompt: expected fewer than {config.max_position_embeddings} tokens "
                         f"(max_position_embeddings), got {len(prompt)}; shorten it")
    if args.max_new_tokens > room and not args.quiet:
        note(f"the context has room for {room} new tokens, not {args.max_new_tokens}")
    return min(args.max_new_tokens, room)


# ------------------------------------------------------------------ engine


def select_platform(args: Namespace) -> None:
    """Applies --platform; must come before JAX's first use of a device, and later has no effect.

    Raises:
        UsageError: JAX finds no GPU, or fewer devices than --devices.
    """
    if args.platform is None and args.devices == 1:
        return
    import jax

    if args.platform is None:
        _check_devices(args.devices)
        return

    if args.platform == "gpu":  # where JAX finds one, it is the default
        try:
            jax.devices("gpu")
        except RuntimeError as err:
            raise UsageError(f"--platform gpu: expected a GPU that JAX can use, got: {err}") from None
        return
    jax.config.update("jax_platforms", "cpu")
    if args.devices > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", args.devices)
        except RuntimeError:  # devices exist already: their number is checked when the mesh is made
            pass


def _check_devices(wanted: int) -> None:
    """Without --platform, nobody has made CPU devices: says how to."""
    import jax

    here = jax.devices()
    if wanted > len(here) and here[0].platform == "cpu":
        raise UsageError(f"--devices {wanted}: expected at most {len(here)} (those JAX sees here); "
                         f"with --platform cpu, --devices {wanted} makes {wanted} of the CPU")


def load_model(args: Namespace, request: Request):
    """The loaded `musejax.Model`."""
    from musejax.loading import load

    return load(request.path, devices=args.devices, overlay=tuple(args.overlay), decode=request.decode,
                progress=not args.quiet, drafter=drafter_path(args), speculation=speculation_of(args))


def drafter_path(args: Namespace) -> Path | None:
    """Folder of the drafter that --drafter names."""
    from musejax.paths import nano_drafter_path

    if args.drafter is None:
        return None
    return nano_drafter_path() if args.drafter == "nano" else Path(args.drafter)


def speculation_of(args: Namespace):
    """The `Speculation` that --tree-width and --tree-spine describe."""
    from musejax.speculation.step import Speculation

    return Speculation(width=args.tree_width, spine=args.tree_spine)


def start_stream(model, request: Request) -> Iterable:
    """Generated tokens, each with `id` and `logprob`."""
    from musejax.generation import stream

    return stream(model, request.prompt, request.sampling, max_new_tokens=request.max_new_tokens,
                  stop_ids=request.stop_ids)


# ------------------------------------------------------------------ output


class _Clock:
    """Wall times of a generation's tokens, and the place where Ctrl-C ends them: here every token passes, also one
    that completes no text."""

    def __init__(self, interrupt: Deferred):
        self._interrupt = interrupt
        self._times = [time.perf_counter()]

    def timed(self, tokens: Iterable) -> Iterator[tuple[int, float]]:
        for token in tokens:
            self._times.append(time.perf_counter())
            yield token.id, token.logprob
            self._interrupt.check()  # after the token is taken, so that it is not lost

    def report(self) -> dict[str, float | None]:
        """The rate counts from the second token on: compilation and prefill come before."""
        start, *tokens = self._times
        rate = (len(tokens) - 2) / (tokens[-1] - tokens[1]) if len(tokens) > 2 else None
        return {"seconds": time.perf_counter() - start,
                "first_token_seconds": tokens[0] - start if tokens else None, "tokens_per_second": rate}


class _Writer:
    """Writes text to stdout as it comes; in chat only what is for the reader."""

    def __init__(self, opening: str | None, silent: bool):
        self.parser = None if opening is None else MessageParser(opening)
        self._silent = silent
        self._last = ""

    def push(self, piece: str) -> None:
        self._write(self.parser.push(piece) if self.parser else piece)

    def finish(self) -> None:
        """Writes the rest, and ends the last line."""
        self._write(self.parser.finish() if self.parser else "")
        if not self._last.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        if text and not self._silent:
            self._last = text
            sys.stdout.write(text)
            sys.stdout.flush()


def write_out(args: Namespace, request: Request, model, interrupt: Deferred) -> int:
    """Generates and writes; Ctrl-C ends the text where it is."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the text
    if sys.stderr.isatty() and not args.quiet:
        note(f"prompt of {len(request.prompt)} tokens; compiling and reading it ...")
    clock, writer = _Clock(interrupt), _Writer(request.opening, silent=args.json)
    text = TextStream(clock.timed(start_stream(model, request)), request.tokenizer,
                      stop_ids=request.stop_ids, stop=args.stop)
    try:
        for piece in text:
            writer.push(piece)
    except KeyboardInterrupt:
        writer.push(text.interrupt())
    writer.finish()
    times = clock.report()
    if args.json:
        print(json.dumps(_result(args, request, model, text, writer.parser) | times))
    if not args.quiet:
        _statistics(request, text, times)
        if writer.parser and not any(m.visible for m in writer.parser.messages):
            note("no message for the user came; raise --max-new-tokens, or see all messages with --json")
    return INTERRUPTED if interrupt.asked or text.finish_reason == INTERRUPT else 0


def _statistics(request: Request, text: TextStream, times: dict) -> None:
    rate, first = times["tokens_per_second"], times["first_token_seconds"]
    note(f"prompt {len(request.prompt)} tokens; generated {len(text.tokens)} tokens in {times['seconds']:.2f} s"
         + (f", the first in {first:.2f} s" if first is not None else "")
         + (f"; {rate:.1f} tokens/s from the second on" if rate else "")
         + f"; finish: {text.finish_reason}"
         + (f" ({text.stopped_by!r})" if text.stopped_by is not None else ""))


def _result(args: Namespace, request: Request, model, text: TextStream, parser: MessageParser | None) -> dict:
    """The JSON object, without times. In chat, `text` is what the user sees and `raw_text` all of it."""
    result = {"text": text.text}
    if parser is not None:
        result = {"text": "\n".join(m.text for m in parser.messages if m.visible and m.text), "raw_text": text.text,
                  "messages": [{"recipient": m.recipient, "text": m.text} for m in parser.messages]}
    decode = model.decode
    return result | {
        "token_ids": text.tokens,
        "logprobs": [x if math.isfinite(x) else None for x in text.logprobs],  # JSON has no infinity
        "finish_reason": text.finish_reason,
        "stopped_by": text.stopped_by,
        "prompt_tokens": len(request.prompt),
        "generated_tokens": len(text.tokens),
        "checkpoint": str(request.path),
        "overlay": list(args.overlay),
        "settings": {
            "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "seed": args.seed,
            "max_new_tokens": request.max_new_tokens, "policy": decode.policy.name, "combine": decode.combine,
            "activations": decode.activations,
            "implementation": decode.implementation, "prefill": decode.prefill, "prefill_chunk": decode.prefill_chunk,
            "devices": args.devices, "drafter": args.drafter, "tree_width": args.tree_width,
            "tree_spine": args.tree_spine,
        },
    }

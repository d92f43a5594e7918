"""`musejax parity`: the promise of equal bits, checked on a checkpoint. Every line compares bits, none has a tolerance.

packing   packed weights unpack to what was packed, and what was loaded is what the files hold.
devices   a prompt, 64 decoded tokens and a tree of guesses on 2, 4 and 8 devices against one device: logits,
          log-probabilities, keys, values; and the same tokens by `decode.start` and `decode.decode_step`.
score     decoding (split along output columns) against `score.logprobs` (training sharding, experts dealt out over 1,
          2, 4 and 8 devices), in each combine order.
rows      each row of chains, stars and random trees of 2 to 16 rows against its token decoded alone after its
          ancestors, at borders of key blocks, chunks and windows; with padding rows; and after a path is accepted.
machine   threads and instruction sets.

Where two runs part, both run again with the streams between layers, to name the first layer that differs.

`inject` breaks one side on purpose, to show that the comparison sees it. "This side" is one device, "the other side"
everything it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

from musejax import decode as steps
from musejax.checkpoint import is_converted, load_params, open_published
from musejax.checkpoint.container import read_manifest
from musejax.checkpoint.load import require_checkpoint
from musejax.config import ConfigError, DecodeConfig, ModelConfig
from musejax.kernels.cache import MAX_ROWS
from musejax.nvfp4 import ACTIVATIONS
from musejax.packing import check_packable
from musejax.parity.checks import (
    INSTRUCTION_SETS,
    THREADS,
    Bench,
    check_devices,
    check_machine,
    check_packing,
    check_rows,
    check_score,
    deepest_path,
)
from musejax.parity.differences import Difference, Row, difference, located
from musejax.parity.injections import INJECTIONS, injected
from musejax.parity.sides import run_decode, tree_of
from musejax.sharding import DEVICE_COUNTS
from musejax.tokenizer import Tokenizer

__all__ = ["INJECTIONS", "INSTRUCTION_SETS", "Bench", "Difference", "Row", "check_arguments", "check_devices",
           "check_machine", "check_packing", "check_rows", "check_score", "deepest_path", "difference", "injected",
           "located", "prepare", "run", "run_decode", "to_json", "tree_of"]

PROMPT = 37
"""Tokens of the prompt: more than two blocks of 16 rows, the last one not full."""

COMBINES = ("ep(8)", "flat")


def check_arguments(config: ModelConfig, activations, combine, devices: Sequence[int],
                    tokens: int) -> list[DecodeConfig]:
    """One DecodeConfig for each pair of activations and combine order; None takes all that apply.

    Raises:
        ConfigError: 4-bit activations without NVFP4 layers, an unknown name, a device count that does not divide 8,
            more devices than there are, sizes without a packed form, more tokens than the context.
    """
    check_packable(config)
    for mode in activations or ():
        if mode != "bf16" and not config.nvfp4_layers:
            raise ConfigError(f"activations: {mode} needs NVFP4 experts, and this checkpoint has none; use bf16")
    wrong = [d for d in devices if d not in DEVICE_COUNTS]
    if wrong or not devices:
        raise ConfigError(f"devices: expected some of {', '.join(map(str, DEVICE_COUNTS))}, got {wrong or 'none'}")
    here = len(jax.devices())
    if max(devices) > here:
        raise ConfigError(f"devices: expected {max(devices)}, got {here}; ask for them before JAX starts, with "
                          f"XLA_FLAGS=--xla_force_host_platform_device_count={max(devices)}, or name fewer")
    steps.cache_length(config, PROMPT + tokens + MAX_ROWS)
    modes = activations or (ACTIVATIONS if config.nvfp4_layers else ("bf16",))
    choices = [DecodeConfig(activations=mode, combine=order) for mode in modes for order in combine or COMBINES]
    for decode in choices:
        decode.check(config)
    return choices


def prepare(folder: str | Path, *, overlay: Sequence = (), activations: Sequence[str] | None = None,
            combine: Sequence[str] | None = None, tokens: int = 64, devices: Sequence[int] = DEVICE_COUNTS,
            seed: int = 0, quick: bool = False, inject: str | None = None) -> tuple[Bench, list[DecodeConfig]]:
    """Checks the arguments, then loads; see `run`."""
    if inject is not None and inject not in INJECTIONS:
        raise ConfigError(f"inject: expected one of {', '.join(INJECTIONS)}, got {inject!r}")
    folder, overlay, devices = Path(folder), tuple(overlay), tuple(sorted(set(devices)))
    require_checkpoint(folder)
    published = None if is_converted(folder) else open_published(folder, overlay=overlay)
    config = published.config if published else read_manifest(folder)["config"]
    choices = check_arguments(config, activations, combine, devices, tokens)
    _, params = load_params(folder, overlay=overlay, form="packed")
    tokenizer = Tokenizer.find(folder)
    num_tokens = min(config.vocab_size, tokenizer.size if tokenizer else config.vocab_size)
    here, there = injected(inject, config, jax.tree.map(np.array, params))
    prompt = np.random.default_rng([seed, 0]).integers(0, num_tokens, PROMPT).astype(np.int32)
    return Bench(config, here, there, published, folder, overlay, prompt, num_tokens, tokens, devices, seed, quick,
                 inject), choices


def run(folder: str | Path, *, report: Callable[[Row], None] = print, begin: Callable[[int], None] = lambda total: None,
        **choice) -> list[Row]:
    """All comparisons; reports each row as it is known.

    Args:
        folder: a published or converted checkpoint.
        begin: called once with how many rows there will be, before the first.
        overlay: folders whose tensors replace those of the same name.
        activations, combine: None takes all that apply.
        tokens: decoded after the prompt.
        devices: counts to compare with one device.
        seed: of prompt and trees.
        quick: fewer positions and row counts, and no threads and instruction sets.
        inject: a key of INJECTIONS; then only the groups that compare with the other side are run.

    Raises:
        CheckpointError, ConfigError, LibraryError: before anything is compared.
    """
    b, choices = prepare(folder, **choice)
    devices, quick, inject = b.devices, b.quick, b.inject
    modes = len({decode.activations for decode in choices})
    many = sum(d > 1 for d in devices)
    total = len(choices) * (1 + many + len(devices) + len(devices) + (not quick))
    total += 0 if inject else 3 + 3 * modes + (0 if quick else modes * (len(THREADS) + len(INSTRUCTION_SETS) - 1))
    begin(total)
    result: list[Row] = []

    def add(rows: Iterator[Row]):
        for row in rows:
            result.append(row)
            report(row)

    if not inject:
        add(check_packing(b))
    seen = set()
    for decode in choices:
        base = run_decode(b.side(decode), b.prompt, b.tokens, b.seed)
        add(check_devices(b, decode, base))
        add(check_score(b, decode, base))
        if not inject and decode.activations not in seen:  # rows and machine do not depend on the order of combining
            seen.add(decode.activations)
            add(check_rows(b, decode))
            if not quick:
                add(check_machine(b, decode, base))
    return result


def to_json(rows: Sequence[Row], **about) -> dict:
    """The result as plain data; `about` is added to it."""
    return {"passed": all(row.passed is not False for row in rows), **about,
            "rows": [asdict(row) for row in rows]}

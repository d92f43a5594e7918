#!/usr/bin/env python3
"""Teacher-forced comparison of the kernels with the plain JAX reference on text, or of the GPU's with the CPU's on what
the CPU says; a line of figures each.

    python scripts/compare_twin.py --text ../shared/data/gsm8k_test.jsonl --positions 10000
    python scripts/compare_twin.py --text ../shared/data/gsm8k_test.jsonl --positions 10000 --gpu

Both follow the same rounding points and add in other orders, so single roundings differ, and now and then an expert.
How much that alone changes is measured too: the reference against itself with sums in float64. The line says how many
positions, and for both pairs the share of equal most likely tokens and the mean of KL(reference || other) in nats.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import musejax
from musejax.config import DecodeConfig
from musejax.decode import cache_length
from musejax.kernels import cache as kernel_cache
from musejax.kernels import forward as kernels
from musejax.model.forward import forward

LENGTH = 500  # positions a sequence
PROMPT = 100  # of which so many at most are the prompt, where the twin writes the rest


class Agreement(NamedTuple):
    """Over positions: share of equal most likely tokens, mean and largest KL divergence in nats."""

    top1: float
    kl: float
    worst: float


def agreement(want_tv: np.ndarray, got_tv: np.ndarray) -> Agreement:
    """Of two arrays of logits [t, v]."""
    p, q = (x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
            for x in (want_tv.astype(np.float64), got_tv.astype(np.float64)))
    kl = (np.exp(p) * (p - q)).sum(-1)
    return Agreement(float(np.mean(want_tv.argmax(-1) == got_tv.argmax(-1))), float(kl.mean()), float(kl.max()))


class Flip(NamedTuple):
    """A position at which the most likely tokens differ.

    Attributes:
        margin: how far the wanted one is ahead of the next, as the twin sees it: a difference of logits.
    """

    position: int
    margin: float
    want: int
    got: int


def flips(want_tv: np.ndarray, got_tv: np.ndarray) -> list[Flip]:
    """The widest margin first."""
    want, got = want_tv.argmax(-1), got_tv.argmax(-1)
    best = np.sort(np.partition(want_tv, -2, axis=-1)[:, -2:], axis=-1)
    found = [Flip(int(i), float(best[i, 1] - best[i, 0]), int(want[i]), int(got[i]))
             for i in np.flatnonzero(want != got)]
    return sorted(found, key=lambda flip: -flip.margin)


def kernel_logits(model, tokens: np.ndarray) -> np.ndarray:
    """float32 [t, v] by passes of 16 rows."""
    rows = kernel_cache.MAX_ROWS
    run = {"config": model.config, "decode": model.decode, "mesh": model.mesh}
    cache, out = kernel_cache.init_cache(model.config, len(tokens), model.mesh), []
    for begin in range(0, len(tokens), rows):
        part = tokens[begin:begin + rows]
        padded = jnp.asarray(np.pad(part, (0, rows - len(part))))
        stream, cache = kernels.jit_append(model.params, cache, padded, len(part), **run)
        out.append(np.asarray(kernels.jit_logits(model.params, stream, **run)[1])[:len(part)])
    return np.concatenate(out)


def compare(path, texts: list[str], positions: int, activations: str = "bf16") -> tuple[Agreement, Agreement]:
    """(kernels, reference with float64 sums), each against the reference, over that many positions of the texts."""
    twin, plain = (musejax.load(path, decode=DecodeConfig(implementation=name, activations=activations))
                   for name in ("megakernel", "reference"))
    ids = [i for text in texts for i in twin.tokenizer.encode(text, bos=True, parse_special=False)]
    if len(ids) < positions:
        raise SystemExit(f"expected text of at least {positions} tokens, got {len(ids)}")
    run = jax.jit(partial(forward, config=plain.config, decode=plain.decode))
    want, got, wide = [], [], []
    for begin in range(0, positions, LENGTH):
        tokens = np.asarray(ids[begin:min(begin + LENGTH, positions)], np.int32)
        want.append(np.asarray(run(plain.params, tokens)[0]))
        got.append(kernel_logits(twin, tokens))
        with jax.enable_x64(True):
            wide.append(np.asarray(run(plain.params, tokens)[0]))
    want, got, wide = (np.concatenate(x) for x in (want, got, wide))
    return agreement(want, got), agreement(want, wide)


def continuation(model, prompt: list[int], length: int) -> np.ndarray:
    """int32 [length], the prompt and what the model says next, greedily."""
    tokens = list(prompt)
    state = model.start(tokens, cache_length(model.config, length + 1))
    while True:
        tokens.append(int(state.token))
        if len(tokens) == length:
            return np.asarray(tokens, np.int32)
        state = model.step(state)


def compare_devices(path, questions: list[str], positions: int, activations: str,
                    device: jax.Device) -> tuple[Agreement, list[Flip]]:
    """The kernels of `device` against the CPU's, over that many positions of prompts and what the CPU says next."""
    if len(questions) < (needed := -(-positions // LENGTH)):
        raise SystemExit(f"expected at least {needed} questions, got {len(questions)}")
    decode = DecodeConfig(implementation="megakernel", activations=activations)
    twin, other = (musejax.load(path, devices=[x], decode=decode) for x in (jax.devices("cpu")[0], device))
    want, got = [], []
    for begin, question in zip(range(0, positions, LENGTH), questions, strict=False):
        prompt = twin.tokenizer.encode(f"Question: {question}\nAnswer:", bos=True, parse_special=False)[:PROMPT]
        tokens = continuation(twin, prompt, min(LENGTH, positions - begin))
        want.append(kernel_logits(twin, tokens))
        got.append(kernel_logits(other, tokens))
    want, got = np.concatenate(want), np.concatenate(got)
    return agreement(want, got), flips(want, got)


def report(device: str, activations: str, positions: int, seen: Agreement, found: list[Flip], bound: float) -> bool:
    """Prints what compare_devices found; whether all flips are within the bound."""
    beyond = [flip for flip in found if flip.margin > bound]
    print(f"{device} against the CPU twin, {activations}: {positions} positions of prompts and what the twin says "
          f"next; top-1 equal {seen.top1:.2%}; mean KL {seen.kl:.2e}, largest {seen.worst:.2f} nats; {len(found)} "
          f"other tokens, {len(beyond)} of them where the twin's margin exceeds {bound}")
    for flip in found:
        print(f"  position {flip.position}: margin {flip.margin:.4f}, token {flip.want} on the CPU, {flip.got} there")
    return not beyond


def rows_of(path) -> list[dict]:
    """The items of a GSM8K file."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def texts_of(path) -> list[str]:
    """Questions and answers of a GSM8K file."""
    return [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows_of(path)]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", nargs="?", help="folder; default the shipped nano")
    p.add_argument("--text", required=True, help="GSM8K jsonl")
    p.add_argument("--positions", type=int, default=10000)
    p.add_argument("--activations", default="bf16", choices=("bf16", "nvfp4_static", "nvfp4_per_token"))
    p.add_argument("--gpu", action="store_true", help="compare the first GPU with the CPU twin instead")
    p.add_argument("--margin", type=float, default=0.25, help="with --gpu: beyond it both say the same token")
    args = p.parse_args()
    if args.gpu:
        try:
            device = jax.devices("gpu")[0]
        except RuntimeError as error:
            p.error(f"--gpu: expected a GPU that JAX sees, found none ({str(error).splitlines()[0]})")
        questions = [row["question"] for row in rows_of(args.text)]
        seen, found = compare_devices(args.checkpoint, questions, args.positions, args.activations, device)
        raise SystemExit(not report(device.device_kind, args.activations, args.positions, seen, found, args.margin))
    twin, noise = compare(args.checkpoint, texts_of(args.text), args.positions, args.activations)
    for name, x in (("kernels", twin), ("reference with float64 sums", noise)):
        print(f"{name} against reference, {args.activations}: {args.positions} positions; top-1 equal {x.top1:.2%}; "
              f"mean KL {x.kl:.2e}, largest {x.worst:.2f} nats")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Teacher-forced comparison of the kernels with the plain JAX reference on text; one line of figures.

    python scripts/compare_twin.py --text ../shared/data/gsm8k_test.jsonl --positions 10000

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
from musejax.kernels import cache as kernel_cache
from musejax.kernels import forward as kernels
from musejax.model.forward import forward

LENGTH = 500  # positions a sequence


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


def texts_of(path) -> list[str]:
    """Questions and answers of a GSM8K file."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", nargs="?", help="folder; default the shipped nano")
    p.add_argument("--text", required=True, help="GSM8K jsonl")
    p.add_argument("--positions", type=int, default=10000)
    p.add_argument("--activations", default="bf16", choices=("bf16", "nvfp4_static", "nvfp4_per_token"))
    args = p.parse_args()
    twin, noise = compare(args.checkpoint, texts_of(args.text), args.positions, args.activations)
    for name, x in (("kernels", twin), ("reference with float64 sums", noise)):
        print(f"{name} against reference, {args.activations}: {args.positions} positions; top-1 equal {x.top1:.2%}; "
              f"mean KL {x.kl:.2e}, largest {x.worst:.2f} nats")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Speculative decoding against plain decoding, bit for bit; one line a setting, exit code 1 on any difference.

    python scripts/check_lossless.py --text ../shared/data/gsm8k_test.jsonl --prompts 40 --tokens 10000 --devices 1 8

Plain decoding runs one row a pass on one device. For each tree shape and device count the speculative run must give the
same tokens, log-probabilities, residual streams (of which logits are made, and which are compared as logits too), and,
after `flush`, the same keys and values.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import NamedTuple

import numpy as np

SHAPES = {"chain": {"width": 1}, "tree": {}, "tree, width 8, spine 4": {"width": 8, "spine": 4}}


class Decoded(NamedTuple):
    """Of one prompt: int32 [n], float32 [n], float32 [n, d], float32 [n, v], and the caches' arrays."""

    tokens: np.ndarray
    logprobs: np.ndarray
    streams: np.ndarray
    logits: np.ndarray
    keys_values: list[np.ndarray]


def logits_of(model, streams: np.ndarray) -> np.ndarray:
    """Raw logits of rows, 16 at a time."""
    import jax.numpy as jnp

    from musejax.kernels.cache import MAX_ROWS
    from musejax.kernels.forward import jit_logits

    out = []
    for begin in range(0, len(streams), MAX_ROWS):
        part = streams[begin:begin + MAX_ROWS]
        padded = jnp.asarray(np.pad(part, ((0, MAX_ROWS - len(part)), (0, 0))))
        raw, _ = jit_logits(model.params, padded, config=model.config, decode=model.decode, mesh=model.mesh)
        out.append(np.asarray(raw)[:len(part)])
    return np.concatenate(out)


def stored(cache) -> list[np.ndarray]:
    """Keys and values after `flush`."""
    import jax

    from musejax.kernels.cache import flush

    return [np.asarray(x) for x in jax.tree.leaves(flush(cache).layers)]


def speculative(model, prompt, sampling, tokens: int, length: int) -> Decoded:
    """At least `tokens` new tokens by speculative steps; the last step may bring more."""
    state = model.start_speculative(prompt, length, sampling)
    out, logprobs, streams = [], [], []
    while len(out) < tokens:
        state, made = model.step_speculative(state)
        count = int(made.count)
        out += np.asarray(made.tokens)[:count].tolist()
        logprobs.append(np.asarray(made.logprobs)[:count])
        streams.append(np.asarray(made.stream)[:count])
    streams = np.concatenate(streams)
    return Decoded(np.array(out, np.int32), np.concatenate(logprobs), streams, logits_of(model, streams),
                   stored(state.cache))


def plain(model, prompt, sampling, tokens: int, length: int) -> Decoded:
    """Exactly `tokens` new tokens, one row a pass."""
    import jax
    import jax.numpy as jnp

    from musejax.decode import start
    from musejax.kernels.forward import append, choose

    run = {"config": model.config, "decode": model.decode, "mesh": model.mesh}
    sampler = None
    state = start(model.params, prompt, length, sampling, num_tokens=model.num_tokens, **run)
    sampler, token, cache = state.sampler, state.token, state.cache

    def step(params, cache, token):
        stream, cache = append(params, cache, token[None], 1, **run)
        ids, logprobs = choose(params, stream, cache.length[None], sampler, num_tokens=model.num_tokens, **run)
        return stream[0], cache, ids[0], logprobs[0]

    step = jax.jit(step, donate_argnums=1)
    out, logprobs, streams = [], [], []
    for _ in range(tokens):
        stream, cache, token, logprob = step(model.params, cache, jnp.asarray(token))
        out.append(int(token))
        logprobs.append(np.asarray(logprob))
        streams.append(np.asarray(stream))
    streams = np.stack(streams)
    return Decoded(np.array(out, np.int32), np.array(logprobs), streams, logits_of(model, streams), stored(cache))


def first_difference(got: Decoded, want: Decoded) -> str | None:
    """In words, or None; bits are compared."""
    pairs = [(name, getattr(got, name), getattr(want, name)) for name in Decoded._fields[:4]]
    pairs += [(f"keys and values [{i}]", a, b) for i, (a, b) in enumerate(zip(got[4], want[4], strict=True))]
    for name, a, b in pairs:
        a, b = (np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (a, b))
        if a.shape != b.shape:
            return f"{name}: shapes {a.shape} and {b.shape}"
        if (different := np.argwhere(a != b)).size:
            at = tuple(map(int, different[0]))
            return f"{name}: first at {at}: {int(a[at]):#x} against {int(b[at]):#x}, {len(different)} differ"
    return None


def check(prompts, tokens: int, devices, shapes, samplings, say=print) -> bool:
    """Whether all settings give plain decoding's bits; `tokens` new tokens a prompt."""
    import musejax
    from musejax.config import DecodeConfig
    from musejax.decode import cache_length
    from musejax.paths import nano_drafter_path
    from musejax.speculation.step import Speculation

    decode = DecodeConfig(implementation="megakernel")
    base = musejax.load(decode=decode)
    encoded = [base.tokenizer.encode(text, bos=True, parse_special=False) for text in prompts]
    equal = True
    for sampling in samplings:
        done: dict[tuple, Decoded] = {}
        for count in devices:
            for name, shape in shapes.items():
                model = musejax.load(decode=decode, devices=count, drafter=nano_drafter_path(),
                                     speculation=Speculation(**shape))
                total = steps = 0
                fault = None
                for i, prompt in enumerate(encoded):
                    length = cache_length(base.config, len(prompt) + tokens + 32)
                    got = speculative(model, prompt, sampling, tokens, length)
                    key = (i, len(got.tokens))
                    if key not in done:
                        done[key] = plain(base, prompt, sampling, len(got.tokens), length)
                    total += len(got.tokens)
                    fault = first_difference(got, done[key])
                    if fault:
                        fault = f"prompt {i}: {fault}"
                        break
                    steps += 1
                equal &= fault is None
                how = "greedy" if sampling.greedy else f"temperature {sampling.temperature}, seed {sampling.seed}"
                say(f"{'FAIL' if fault else 'PASS'}  {name}, {count} device(s), {how}: {steps} prompts, {total} tokens"
                    + (f"; {fault}" if fault else ""))
    return equal


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--text", required=True, help="GSM8K jsonl, for the prompts")
    p.add_argument("--prompts", type=int, default=40)
    p.add_argument("--tokens", type=int, default=10000, help="new tokens over all prompts, about")
    p.add_argument("--devices", type=int, nargs="+", default=[1], choices=(1, 2, 4, 8))
    p.add_argument("--seeds", type=int, default=0, help="also sampled, with so many seeds")
    args = p.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from musejax.sampling import Sampling

    with open(args.text, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:args.prompts]
    prompts = [f"Question: {row['question']}\nAnswer:" for row in rows]
    samplings = [Sampling()] + [Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=s) for s in range(args.seeds)]
    equal = check(prompts, -(-args.tokens // len(prompts)), args.devices, SHAPES, samplings,
                  say=lambda line: print(line, flush=True))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

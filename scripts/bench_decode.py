#!/usr/bin/env python3
"""Times plain decoding of a checkpoint, one sequence, on whatever device JAX finds; one line of figures each.

    python scripts/bench_decode.py [CKPT] --tokens 512 --implementation megakernel reference

Several implementations take turns, step by step. A line says device, ranks, context, distinct experts a layer (D),
tokens a step, median step time with its 10th and 90th percentile, tokens/s, compilations after the first step, and a
hash of the tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import time

import jax
import numpy as np

import musejax
from musejax.config import DecodeConfig
from musejax.decode import cache_length, jit_decode_step


def device_name(device: jax.Device) -> str:
    if device.platform != "cpu":
        return device.device_kind
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def start(args, implementation: str):
    """(model, state after one step, length of the prompt)."""
    decode = DecodeConfig(implementation=implementation, activations=args.activations)
    model = musejax.load(args.checkpoint, devices=args.devices, decode=decode)
    prompt = model.tokenizer.encode(args.prompt, bos=True, parse_special=False)
    state = model.start(prompt, cache_length(model.config, len(prompt) + args.tokens + 2))
    return model, jax.block_until_ready(model.step(state)), len(prompt)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", nargs="?", help="folder; default the shipped nano")
    p.add_argument("--prompt", default="Question: Tom has 3 boxes of 12 pencils and gives 7 away. "
                                       "How many are left?\nAnswer:")
    p.add_argument("--tokens", type=int, default=512, help="steps timed; stop ids are ignored")
    p.add_argument("--devices", type=int, default=1)
    p.add_argument("--implementation", nargs="+", default=["auto"], choices=("auto", "reference", "megakernel"))
    p.add_argument("--activations", default="bf16", choices=("bf16", "nvfp4_static", "nvfp4_per_token"))
    args = p.parse_args()

    runs = [start(args, implementation) for implementation in args.implementation]
    states = [state for _, state, _ in runs]
    tokens, times = [[int(state.token)] for state in states], [[] for _ in runs]
    compiled = jit_decode_step._cache_size()
    for _ in range(args.tokens):
        for i, (model, _, _) in enumerate(runs):
            begin = time.perf_counter()
            states[i] = model.step(states[i])
            tokens[i].append(int(states[i].token))
            times[i].append(time.perf_counter() - begin)
    compiled = jit_decode_step._cache_size() - compiled
    for (model, _, prompt), chosen, taken in zip(runs, tokens, times, strict=True):
        low, median, high = np.percentile(np.array(taken) * 1e3, (10, 50, 90))
        digest = hashlib.sha256(np.array(chosen, np.int32).tobytes()).hexdigest()[:12]
        print(f"{device_name(model.mesh.devices.flat[0])}; ranks {args.devices}; "
              f"{model.path.name}, {model.decode.policy.name}, {model.decode.implementation}, {args.activations}; "
              f"context {prompt} to {prompt + len(chosen)}; D {model.config.num_experts_per_tok}; 1 token a step; "
              f"{median:.2f} ms a step ({low:.2f} to {high:.2f}); {1e3 / median:.0f} tokens/s; "
              f"compilations {compiled}; tokens {digest}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Times plain decoding of a checkpoint, one sequence, on whatever device JAX finds; one line of figures.

    python scripts/bench_decode.py [CKPT] --tokens 512

The line says device, ranks, context, distinct experts a layer (D), tokens a step, median step time with
its 10th and 90th percentile, tokens/s, compilations after the first step, and a hash of the tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import time

import jax
import numpy as np

import musejax
from musejax.decode import cache_length, jit_decode_step


def device_name(device: jax.Device) -> str:
    if device.platform != "cpu":
        return device.device_kind
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", nargs="?", help="folder; default the shipped nano")
    p.add_argument("--prompt", default="Question: Tom has 3 boxes of 12 pencils and gives 7 away. "
                                       "How many are left?\nAnswer:")
    p.add_argument("--tokens", type=int, default=512, help="steps timed; stop ids are ignored")
    p.add_argument("--devices", type=int, default=1)
    args = p.parse_args()

    model = musejax.load(args.checkpoint, devices=args.devices)
    prompt = model.tokenizer.encode(args.prompt, bos=True, parse_special=False)
    state = model.start(prompt, cache_length(model.config, len(prompt) + args.tokens + 2))
    state = model.step(state)
    tokens, times = [int(state.token)], []
    compiled = jit_decode_step._cache_size()
    for _ in range(args.tokens):
        begin = time.perf_counter()
        state = model.step(state)
        tokens.append(int(state.token))
        times.append(time.perf_counter() - begin)
    low, median, high = np.percentile(np.array(times) * 1e3, (10, 50, 90))
    digest = hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()[:12]
    print(f"{device_name(model.mesh.devices.flat[0])}; ranks {args.devices}; "
          f"{model.path.name}, {model.decode.policy.name}, {model.decode.implementation}; "
          f"context {len(prompt)} to {len(prompt) + len(tokens)}; "
          f"D {model.config.num_experts_per_tok}; 1 token a step; {median:.2f} ms a step ({low:.2f} to {high:.2f}); "
          f"{1e3 / median:.0f} tokens/s; compilations {jit_decode_step._cache_size() - compiled}; tokens {digest}")


if __name__ == "__main__":
    main()

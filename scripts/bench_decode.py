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
from musejax.paths import nano_drafter_path
from musejax.speculation.step import jit_decode_step as jit_speculative_step


def device_name(device: jax.Device) -> str:
    if device.platform != "cpu":
        return device.device_kind
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


class Run:
    """One way to decode, after its first step."""

    def __init__(self, args, implementation: str, drafter=None):
        decode = DecodeConfig(implementation=implementation, activations=args.activations)
        self.model = musejax.load(args.checkpoint, devices=args.devices, decode=decode, drafter=drafter)
        self.prompt = self.model.tokenizer.encode(args.prompt, bos=True, parse_special=False)
        self.speculative = drafter is not None
        start = self.model.start_speculative if self.speculative else self.model.start
        self.state = start(self.prompt, cache_length(self.model.config, len(self.prompt) + args.tokens + 34))
        self.tokens, self.times, self.distinct = [int(self.state.token)], [], []
        self.step()
        self.times.clear()

    def step(self) -> None:
        begin = time.perf_counter()
        if self.speculative:
            self.state, made = self.model.step_speculative(self.state)
            self.tokens += np.asarray(made.tokens)[:int(made.count)].tolist()
            self.distinct.append(np.asarray(made.distinct).mean())
        else:
            self.state = self.model.step(self.state)
            self.tokens.append(int(self.state.token))
            self.distinct.append(self.model.config.num_experts_per_tok)
        self.times.append(time.perf_counter() - begin)

    def line(self, args, compiled: int) -> str:
        model, made = self.model, (len(self.tokens) - 2) / max(len(self.distinct) - 1, 1)
        low, median, high = np.percentile(np.array(self.times) * 1e3, (10, 50, 90))
        digest = hashlib.sha256(np.array(self.tokens[:args.tokens], np.int32).tobytes()).hexdigest()[:12]
        return (f"{device_name(model.mesh.devices.flat[0])}; ranks {args.devices}; {model.path.name}, "
                f"{model.decode.policy.name}, {model.decode.implementation}{', drafter' * self.speculative}, "
                f"{args.activations}; context {len(self.prompt)} to {len(self.prompt) + len(self.tokens)}; "
                f"D {np.mean(self.distinct):.1f}; {made:.2f} tokens a step; {median:.2f} ms a step ({low:.2f} to "
                f"{high:.2f}); {1e3 * made / median:.0f} tokens/s; compilations {compiled}; tokens {digest}")


def compilations() -> int:
    return jit_decode_step._cache_size() + jit_speculative_step._cache_size()


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", nargs="?", help="folder; default the shipped nano")
    p.add_argument("--prompt", default="Question: Tom has 3 boxes of 12 pencils and gives 7 away. "
                                       "How many are left?\nAnswer:")
    p.add_argument("--tokens", type=int, default=512, help="tokens to make; stop ids are ignored")
    p.add_argument("--devices", type=int, default=1)
    p.add_argument("--implementation", nargs="+", default=["auto"], choices=("auto", "reference", "megakernel"))
    p.add_argument("--activations", default="bf16", choices=("bf16", "nvfp4_static", "nvfp4_per_token"))
    p.add_argument("--drafter", help="folder of a drafter, or 'nano': one more line, speculative")
    args = p.parse_args()

    runs = [Run(args, implementation) for implementation in args.implementation]
    if args.drafter:
        drafter = nano_drafter_path() if args.drafter == "nano" else args.drafter
        runs.append(Run(args, args.implementation[0], drafter))
    compiled = compilations()
    while waiting := [run for run in runs if len(run.tokens) < args.tokens]:
        for run in waiting:
            run.step()
    compiled = compilations() - compiled
    for run in runs:
        print(run.line(args, compiled))


if __name__ == "__main__":
    main()

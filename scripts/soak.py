#!/usr/bin/env python3
"""Decodes the same text again and again, on several device counts in turn, and compares a hash of every run; exit code
1 on any difference.

    python scripts/soak.py [CKPT] --devices 1 2 --seconds 480
    python scripts/soak.py [CKPT] --devices 8 --reference 1 --steps 100000

A run is `--tokens` steps after the prompt as one program, nothing on the host in between; its hash is over its tokens,
log-probabilities and all keys and values. The line says how many steps there were in the time given. The reference
decodes once.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import musejax
from musejax import ffi
from musejax.config import DecodeConfig
from musejax.decode import cache_length, decode_step


class Decoder:
    """The same text on so many devices."""

    def __init__(self, checkpoint, devices: int, prompt: str, tokens: int):
        self.devices, self.steps, self.digest = devices, 0, None
        self.model = model = musejax.load(checkpoint, devices=devices, decode=DecodeConfig(implementation="megakernel"))
        ids = model.tokenizer.encode(prompt, bos=True, parse_special=False)
        self.state = model.start(ids, cache_length(model.config, len(ids) + tokens + 1))

        def run(params, state):
            def step(i, carry):
                state, made, logprobs = carry
                state = decode_step(params, state, config=model.config, decode=model.decode,
                                    num_tokens=model.num_tokens, mesh=model.mesh)
                return state, made.at[i].set(state.token), logprobs.at[i].set(state.logprob)

            empty = jnp.zeros(tokens, jnp.int32), jnp.zeros(tokens, jnp.float32)
            return lax.fori_loop(0, tokens, step, (state, *empty))

        self.tokens, self.run = tokens, jax.jit(run)

    def again(self) -> bool:
        """One more run; whether its hash is that of the first."""
        state, made, logprobs = self.run(self.model.params, self.state)
        kept = jax.tree.map(np.asarray, (made, logprobs, state.cache.layers))
        ffi.raise_wait_error()
        digest = hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(kept))).hexdigest()[:12]
        self.digest, self.steps = self.digest or digest, self.steps + self.tokens
        return digest == self.digest


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("checkpoint", nargs="?", help="(default: nano)")
    p.add_argument("--devices", type=int, nargs="+", default=[1], choices=(1, 2, 4, 8))
    p.add_argument("--reference", type=int, choices=(1, 2, 4, 8), help="devices of a run that all are compared with")
    p.add_argument("--seconds", type=float, default=60)
    p.add_argument("--steps", type=int, help="end before the time is up, once there were so many on each")
    p.add_argument("--tokens", type=int, default=256, help="steps of a run (default 256)")
    p.add_argument("--prompt", default="Question: What is 3 times 14?\nAnswer:")
    args = p.parse_args()
    decoders = [Decoder(args.checkpoint, n, args.prompt, args.tokens) for n in args.devices]
    reference = [Decoder(args.checkpoint, args.reference, args.prompt, args.tokens)] if args.reference else []
    same = all([d.again() for d in decoders + reference])  # compiles
    begin = time.perf_counter()
    while (same and time.perf_counter() - begin < args.seconds
           and (args.steps is None or min(d.steps for d in decoders) < args.steps)):
        same = all([d.again() for d in decoders])
    decoders += reference
    same &= len({d.digest for d in decoders}) == 1
    counts = ", ".join(f"{d.steps} steps on {d.devices} device(s), hash {d.digest}" for d in decoders)
    print(f"{'PASS' if same else 'FAIL'}  {decoders[0].model.mesh.devices.flat[0].device_kind}; "
          f"{time.perf_counter() - begin:.0f} s; {counts}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

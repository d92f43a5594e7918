"""Stand-ins for tests of `musejax bench step`: figures, runs without a GPU, programs of sizes for a CPU."""

import jax
import jax.numpy as jnp
import numpy as np

from musejax.bench import layer, step
from musejax.bench.cases import Timing
from musejax.bench.launches import Launches
from musejax.bench.phases import rank_layer
from musejax.bench.step_cases import StepCase, StepTiming
from musejax.cache import LayerCache
from musejax.config import MINI, DecodeConfig
from musejax.kernels.calls import Call
from musejax.speculation.tree import chain_tree

BASELINE = Timing(2, (1180.0, 1200.0, 1220.0), 48.5, (20.0, 28.5), 240e6, 170e6, 262144, "0123456789ab")
TIMING = StepTiming(
    step=(9.9, 10.0, 10.3), draft=(0.6, 0.625, 0.65), verify=(9.0, 9.125, 9.2), distinct=48.75, emitted=1.04,
    weight_bytes=18e9, launches=Launches(40, False), weights_s=31.25, compile_s=12.5, first_s=1.5,
    in_use=68_500_000_000, needed=67_480_000_000, digest="ba9876543210", baseline=BASELINE)


class Runs:
    """Stand-in for `step.Runs`: `broken` says from which step on a bit is wrong; `other`: without exchange."""

    def __init__(self, broken=10**9, value=1.0, nodes=16, other=None):
        self.case, self.other = StepCase(layers=2), other
        self.broken, self.value, self.nodes, self.order = broken, value, nodes, []
        self.state, self.steps = step.State([], (jnp.zeros(3),), 0, 0, 0, 0), 0
        self.weights = {"lm_head": np.zeros(100), "layers": [
            {"dense": np.zeros(50), "experts": np.zeros((1, 256, 10))}] * 2,
            "drafter": {"fc": np.zeros(1), "selector": np.zeros(2), "layers": [{"dense": np.zeros(3)}] * 5}}
        self.launches, self.weights_s, self.compile_s, self.needed = Launches(7, False), 1.0, 2.0, 3

    def start(self):
        return self.state

    def looped(self):
        return self.other

    def split(self):
        self.order.append("split")

    def draft(self):
        self.order.append("draft")
        return jnp.zeros(1)

    verify = draft

    def step(self):
        self.order.append("step")
        self.steps += 1
        stream = np.full((16, 4), self.value, np.float32)
        if self.steps >= self.broken:
            stream.view(np.uint32)[1, 2] ^= 1
        ids = np.stack([[range(8)] * 16, [range(8)] * 15 + [range(4, 12)]]).astype(np.int32)
        ids[1, 0] = 256  # a row of no node
        return step.Result(jnp.full(16, 5), jnp.int32(2), jnp.int32(self.nodes), jnp.zeros(16), jnp.asarray(stream),
                           jnp.asarray(ids))


# ------------------------------------------------------------------ small sizes


def _run_looped(call, numbers, params, stream, cos_sin, rows, kept, taps, devices):
    """In place of `layer.run_looped`: phase by phase."""
    ids, tapped, after = [], [], []
    for n, p in zip(numbers, params, strict=True):
        stored, flight = (LayerCache(*kept[4 * n + j:4 * n + j + 2]) for j in (0, 2))
        stream, chosen, stored, flight = rank_layer(call, n, p, stream, cos_sin, rows, stored, flight)
        ids.append(chosen)
        tapped += [stream] if n in taps else []
        after += [*stored, *flight]
    return stream, jnp.stack(ids), jnp.stack(tapped), after


def use_phases(monkeypatch) -> None:
    """From now on layers run phase by phase, as the CPU can; exchanges of layers are looped back on any mesh."""
    monkeypatch.setattr(step, "run_looped", _run_looped)


class SmallStep(step.Step):
    """`step.Step` of two layers of MINI, whose drafter guesses the chain `guesses` and commits nothing."""

    guesses = tuple(range(100, 115))

    def __init__(self, case: StepCase, mesh=None):
        self.case, self.config, self.mesh, self.taps = case, MINI, mesh, (0, 1)
        self.call = Call(MINI, DecodeConfig())

    def start(self, seed):
        keys = jax.random.split(jax.random.key(seed), 8)
        kept = [layer.random_bf16(keys[4 * n + j], (1, s, MINI.head_dim))
                for n, slots in enumerate((8, 64)) for j, s in enumerate((slots, slots, 16, 16))]
        return step.State(kept, (), jnp.int32(40), jnp.int32(7), jnp.int32(0), jnp.zeros(16, jnp.int32))

    def draft(self, weights, rings, length, token):
        return chain_tree(token, jnp.asarray(self.guesses, jnp.int32))

    def commit(self, weights, rings, taps, start, path, count):
        return rings


def small_weights(case: StepCase, seed: int, mesh=None) -> dict:
    """In place of `step.random_weights`, for `SmallStep`."""
    keys = jax.random.split(jax.random.key(seed + 10), 5)
    head = step.random_packed(keys[4], layer.layout(MINI, False)["head.bytes"])
    drafter = {"fc": jnp.zeros((case.ends, 1), jnp.uint8), "selector": jnp.zeros((case.ends, 2), jnp.uint8),
               "layers": [{"dense": jnp.zeros((case.ends, 3), jnp.uint8)}]}
    return step.copies({"layers": [layer.random_layer(key, MINI, 16, False) for key in keys[:2]],
                        "embed": jnp.repeat(layer.random_bf16(keys[2], (1, 512, 16)), case.ends, axis=0),
                        "final_norm": step.random_gains(keys[3], 128).astype(jnp.bfloat16),
                        "lm_head": jnp.repeat(head, case.ends, axis=0), "drafter": drafter}, mesh)

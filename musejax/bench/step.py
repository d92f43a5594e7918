"""`musejax bench step`: milliseconds of a whole speculative step of the released sizes, one rank of 8 on one GPU.

Draft, tree, verify, accept and commit are one program, as in `speculation.step`; what the seven other ranks would send
is this rank's own slice, 8 times. Weights are random, so hardly a guess is accepted; the work of a step does not depend
on that. State goes from step to step, but the length stays: accepted rows take the place of the last positions instead
of new ones. So every step reads as many keys as the first, and the caches need not grow with the steps.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from musejax import ffi
from musejax.bench.cases import Case, admitted_experts
from musejax.bench.launches import count_launches
from musejax.bench.layer import Samples, random_bf16, random_layer, run_looped
from musejax.bench.limits import BenchError
from musejax.bench.step_cases import StepCase, StepTiming
from musejax.config import NUM_SLICES, DecodeConfig
from musejax.kernels.cache import MAX_ROWS
from musejax.kernels.calls import Call, RowState
from musejax.kernels.draft_calls import DraftCall
from musejax.numerics import round_bf16
from musejax.speculation import accept as acceptance
from musejax.speculation import draft_kernels
from musejax.speculation.config import DraftConfig
from musejax.speculation.draft import Lattice
from musejax.speculation.packing import layout as draft_layout
from musejax.speculation.tree import Tree

TARGETS = ("musejax_draft_looped", "musejax_draft_commit_looped", "musejax_draft_tree", "musejax_layers_looped")
FIRST_TOKEN = 1
GENERATOR = "rbg"  # the default one needs many times the memory of 8-bit codes

# ------------------------------------------------------------------ weights


@partial(jax.jit, static_argnames=("count",))
def random_packed(key, count: int) -> jax.Array:
    """uint8 [1, count]: bfloat16 weights of a GEMM, in whatever order."""
    weights = jax.random.normal(key, (count // 2,), jnp.float32) / 90
    return lax.bitcast_convert_type(weights.astype(jnp.bfloat16), jnp.uint8).reshape(1, -1)


@partial(jax.jit, static_argnames=("count",))
def random_gains(key, count: int) -> jax.Array:
    """float32 [count], values of bfloat16 around 1."""
    return round_bf16(1 + jax.random.normal(key, (count,), jnp.float32) / 16)


def random_drafter(key, config: DraftConfig) -> dict:
    """One slice of a drafter, packed (speculation/packing.py), without embedding and LM head."""
    at, d = draft_layout(config), config.hidden_size
    keys = iter(jax.random.split(key, 6 + 2 * config.num_hidden_layers))
    codes = (config.vocab_size, config.selector_rank)
    return {"fc": random_packed(next(keys), at["fc.bytes"]), "hidden_norm": random_gains(next(keys), d),
            "norm": random_gains(next(keys), d), "selector": random_packed(next(keys), at["selector.bytes"]),
            "predecessor": random_bf16(next(keys), codes), "successor": random_bf16(next(keys), codes),
            "layers": [{"dense": random_packed(next(keys), at["dense.bytes"]),
                        "small": random_gains(next(keys), at["small.count"])}
                       for _ in range(config.num_hidden_layers)]}


def random_weights(case: StepCase, seed: int) -> dict:
    """One slice of target and drafter: embed bfloat16 [1, v, d/8], final_norm bfloat16 [d], lm_head uint8 [1, n],
    layers as `layer.random_layer`, drafter. Each kind is compiled once."""
    c = case.config
    keys = jax.random.split(jax.random.key(seed, impl=GENERATOR), case.layers + 4)
    admitted = admitted_experts(case, c)
    return {"embed": random_bf16(keys[0], (1, c.vocab_size, c.hidden_size // NUM_SLICES)),
            "final_norm": random_gains(keys[1], c.hidden_size).astype(jnp.bfloat16),
            "lm_head": random_packed(keys[2], draft_layout(case.drafter)["head.bytes"]),
            "drafter": random_drafter(keys[3], case.drafter),
            "layers": [random_layer(key, c, admitted, i in c.nvfp4_layers)
                       for i, key in zip(case.numbers, keys[4:], strict=True)]}


def draft_bytes(weights: dict) -> int:
    """What a draft and a commit read: every matrix once, the LM head too; of the codebooks a few rows, not counted."""
    drafter = weights["drafter"]
    matrices = (drafter["fc"], drafter["selector"], weights["lm_head"], *(p["dense"] for p in drafter["layers"]))
    return sum(w.size for w in matrices)


def verify_bytes(weights: dict, distinct) -> float:
    """What a verification reads, if `distinct[i]` experts are hit in layer i."""
    layers = weights["layers"]
    experts = sum(float(n) * p["experts"].shape[2] for n, p in zip(distinct, layers, strict=True))
    return experts + sum(p["dense"].size for p in layers) + weights["lm_head"].size


# ------------------------------------------------------------------ the step


class State(NamedTuple):
    """Between two steps; donated.

    Attributes:
        kept: of each layer keys and values [2, p, 64], and those of the rows in flight [2, 16, 64], bfloat16.
        rings: keys and values of the drafter, bfloat16 [5, 1, 2048, 128].
        length: int32 [], positions; always the same.
        token: int32 [], the newest.
        accepted, path: int32 [], [16], rows in flight that become the last positions.
    """

    kept: list
    rings: tuple
    length: jax.Array
    token: jax.Array
    accepted: jax.Array
    path: jax.Array


class Verified(NamedTuple):
    """What the target says of 16 rows: choices int32 [16], logprobs float32 [16], stream float32 [16, d], taps float32
    [n, 16, d], ids int32 [layers, 16, k] (the number of experts in rows of no node)."""

    choices: jax.Array
    logprobs: jax.Array
    stream: jax.Array
    taps: jax.Array
    ids: jax.Array


class Result(NamedTuple):
    """Of a step: emitted int32 [16], the first `count` of them; nodes int32 [], of the tree; the rest as `Verified`."""

    emitted: jax.Array
    count: jax.Array
    nodes: jax.Array
    logprobs: jax.Array
    stream: jax.Array
    ids: jax.Array


class Step:
    """The program of a case, as pure functions of weights and state."""

    def __init__(self, case: StepCase):
        self.case, self.config, self.drafter = case, case.config, case.drafter
        self.taps = tuple(sorted(set(case.tapped)))
        self.call = Call(self.config, DecodeConfig(), "cuda")
        self.draft_call = DraftCall(self.drafter, "cuda", looped=True)

    def start(self, seed: int) -> State:
        """The first state: caches full of random keys and values."""
        c, d, key = self.config, self.drafter, jax.random.key(seed + 1, impl=GENERATOR)
        heads, kept = c.num_key_value_heads // NUM_SLICES, []
        for n, i in enumerate(self.case.numbers):
            stored, flight = (heads, self.case.slots(i), c.head_dim), (heads, MAX_ROWS, c.head_dim)
            kept += [random_bf16(jax.random.fold_in(key, 4 * n + j), shape)
                     for j, shape in enumerate((stored, stored, flight, flight))]
        ring = (d.num_hidden_layers, d.num_key_value_heads // NUM_SLICES, d.sliding_window, d.head_dim)
        rings = tuple(random_bf16(jax.random.fold_in(key, 4 * len(self.case.numbers) + j), ring) for j in range(2))
        return State(kept, rings, jnp.int32(self.case.context), jnp.int32(FIRST_TOKEN), jnp.int32(0),
                     jnp.zeros(MAX_ROWS, jnp.int32))

    def draft(self, weights: dict, rings, length, token) -> Tree:
        """Drafter and tree."""
        d, p = self.drafter, weights["drafter"]
        ids = jnp.full(d.block_size, d.mask_token_id, jnp.int32).at[0].set(token)
        cos_sin = self.draft_call.angles(length + jnp.arange(d.block_size, dtype=jnp.int32))
        lattice = Lattice(*self.draft_call.draft(
            weights["embed"][:, ids], cos_sin, token, length, p["norm"], weights["lm_head"], p["selector"],
            p["predecessor"], p["successor"], *rings, p["layers"], num_tokens=None))
        return draft_kernels.tree(token, lattice)

    def verify(self, weights: dict, kept: list, length, accepted, path, tree: Tree) -> tuple[Verified, list]:
        """Layers and LM head for the nodes of a tree -> (what they say, kept)."""
        call = self.call
        stream = call.embed_norm(_eight(weights["embed"][:, tree.tokens]))
        rows = RowState(tree.parents, jnp.stack([length, tree.num_valid, accepted]), path)
        stream, ids, taps, kept = run_looped(call, self.case.numbers, weights["layers"], stream,
                                             call.angles(length + tree.depth), rows, kept, self.taps)
        zero = jnp.int32(0)
        raw, best, chosen = call.head(stream, weights["final_norm"], weights["lm_head"], zero, num_tokens=None, top=1)
        best, chosen = _eight(best[..., 0]), _eight(chosen[..., 0])
        first = jnp.argmax(best, axis=0)[None]
        largest, choices = (jnp.take_along_axis(x, first, axis=0)[0] for x in (best, chosen))
        sums = _eight(call.head_sums(raw, largest, zero, num_tokens=None))
        return Verified(choices, call.logprob(largest, largest, sums), stream, taps, ids), kept

    def commit(self, weights: dict, rings, taps, start, path, count) -> tuple:
        """Rows `path[:count]` of the taps go into the rings, at positions from `start` on."""
        p = weights["drafter"]
        joined = jnp.concatenate([taps[self.taps.index(i)] for i in self.case.tapped], axis=-1)[path]
        cos_sin = self.draft_call.angles(start + jnp.arange(MAX_ROWS, dtype=jnp.int32))
        return tuple(self.draft_call.commit(joined, cos_sin, start, count, p["fc"], p["hidden_norm"], *rings,
                                            p["layers"]))

    def step(self, state: State, weights: dict) -> tuple[State, Result]:
        """Draft, tree, verify, accept, commit."""
        tree = self.draft(weights, state.rings, state.length, state.token)
        verified, kept = self.verify(weights, state.kept, state.length, state.accepted, state.path, tree)
        accepted = acceptance.accept(tree, verified.choices)
        path, count = jnp.maximum(accepted.path, 0), accepted.count
        rings = self.commit(weights, state.rings, verified.taps, state.length - count, path, count)
        result = Result(accepted.emitted, count, tree.num_valid, verified.logprobs[path], verified.stream, verified.ids)
        return State(kept, rings, state.length, accepted.anchor, count, path), result


def _eight(x: jax.Array) -> jax.Array:
    """[1, ...] -> [8, ...]: as if every rank sent the same."""
    return jnp.tile(x, (NUM_SLICES,) + (1,) * (x.ndim - 1))


# ------------------------------------------------------------------ measuring


class Runs:
    """A case on the default device, ready to run: the step, and its two large parts alone.

    Attributes:
        launches: of the program of a step.
        weights_s, compile_s: seconds.
    """

    def __init__(self, case: StepCase, seed: int = 0):
        """Raises BenchError if the CUDA library has no kernels for the released sizes."""
        check_library(case)
        self.seed, self.program = seed, Step(case)
        shapes = jax.eval_shape(lambda: (self.start(), random_weights(case, seed)))
        begin = time.perf_counter()
        self._step = jax.jit(self.program.step, donate_argnums=(0,)).lower(*shapes).compile()
        self.compile_s = time.perf_counter() - begin
        self.launches = count_launches(self._step.as_text())
        begin = time.perf_counter()
        self.weights = jax.block_until_ready(random_weights(case, seed))
        self.weights_s = time.perf_counter() - begin
        self.state = self.start()
        self.needed = sum(x.nbytes for x in jax.tree.leaves((self.weights, self.state)))
        self._draft, self._verify = jax.jit(self.program.draft), jax.jit(self.program.verify, donate_argnums=(1,))

    def start(self) -> State:
        return self.program.start(self.seed)

    def split(self) -> None:
        """Gives the parts alone caches of their own, and a tree to verify after one accepted row. Compiles them now:
        XLA drops its CUDA graphs when it compiles, which is not to happen between samples."""
        alone = self.start()
        self.kept, self.alone = alone.kept, alone._replace(kept=[], accepted=jnp.int32(1))
        self.tree = self.draft()
        self.verify()

    def step(self) -> Result:
        self.state, result = self._step(self.state, self.weights)
        return result

    def draft(self) -> Tree:
        return self._draft(self.weights, self.alone.rings, self.alone.length, self.alone.token)

    def verify(self) -> Verified:
        """Of one tree again and again."""
        _, _, length, _, accepted, path = self.alone
        verified, self.kept = self._verify(self.weights, self.kept, length, accepted, path, self.tree)
        return verified


def check_library(case: StepCase) -> None:
    """Raises BenchError if the CUDA library has not what a step needs."""
    sizes = any(s[0] == case.config.hidden_size and s[-1] == 1 for s in ffi.layer_instances())
    lacking = [name for name in TARGETS if name not in ffi.library("cuda").targets()]
    if lacking or not sizes:
        raise BenchError("bench step: expected a library compiled for the released sizes, 1 slice a device, with "
                         f"{', '.join(TARGETS)}, got one without {', '.join(lacking) or 'these sizes'}; build with "
                         "MUSEJAX_CUDA=ON")


def memory_in_use() -> int:
    """Bytes that JAX has taken of the default device."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0)


class Checks:
    """What steps have returned, and what is wrong with it."""

    def __init__(self, layers: int, experts: int):
        self.layers, self.experts = layers, experts
        self.digest, self.hits, self.counts, self.failed = hashlib.sha256(), [], [], ""

    def take(self, result: Result) -> None:
        result = Result(*map(np.asarray, result))
        for x in result:
            self.digest.update(x.tobytes())
        self.counts.append(int(result.count))
        rows = result.ids.reshape(self.layers, -1)
        self.hits.append([np.unique(ids[ids < self.experts]).size for ids in rows])
        if not (np.isfinite(result.stream).all() and np.isfinite(result.logprobs).all()):
            self.failed = "results: expected finite numbers, got others"
        elif result.nodes != MAX_ROWS:
            self.failed = f"tree: expected {MAX_ROWS} nodes, got {result.nodes}"

    def compare(self, got: list, want: list) -> None:
        """Arrays of the first step repeated: the same bits are expected."""
        different = sum(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True))
        if different:
            self.failed = (f"the first step repeated: expected the same bits, got others in {different} of {len(want)} "
                           "arrays")


def _first_step(runs) -> list:
    """A step -> its results and the rings after it."""
    result = jax.block_until_ready(runs.step())
    ffi.raise_wait_error()
    return [np.array(x) for x in (*result, *runs.state.rings)]


def measure(case: StepCase, batches: int = 9, each: int = 5, seed: int = 0, baseline: bool = False) -> StepTiming:
    """Runs `batches` batches of `each` steps back to back, in turns with as many drafts and verifications alone, and
    with `baseline` two layers of `reference.ReferenceLayers`, after a batch of each that is not counted.

    Raises:
        BenchError: as `Runs`.
        WaitError: a wait inside a kernel did not end.
    """
    runs = Runs(case, seed)
    begin = time.perf_counter()
    first = _first_step(runs)
    first_s, in_use = time.perf_counter() - begin, memory_in_use()
    runs.split()
    other = None
    if baseline:
        from musejax.bench.reference import ReferenceLayers

        layers = Case(distinct=case.distinct, context=case.context, layers=2)
        other = Samples(ReferenceLayers(layers, case.config, seed))
        streams = [jax.random.normal(jax.random.key(1000 + i), (MAX_ROWS, case.config.hidden_size), jnp.float32)
                   for i in range(each)]
    checks = Checks(case.layers, case.config.num_local_experts)
    times = {"step": [], "draft": [], "verify": []}
    for n in range(batches + 1):
        for name, samples in times.items():
            begin = time.perf_counter()
            results = jax.block_until_ready([getattr(runs, name)() for _ in range(each)])
            elapsed = time.perf_counter() - begin
            ffi.raise_wait_error()
            if n:
                samples.append(elapsed / each * 1e3)
            if name == "step":
                for result in results:
                    checks.take(result)
        if other:
            other.batch(streams, n > 0)
    del results
    runs.state = runs.start()
    checks.compare(_first_step(runs), first)
    distinct = np.mean(checks.hits, axis=0)
    return StepTiming(
        **{name: tuple(map(float, np.percentile(samples, (10, 50, 90)))) for name, samples in times.items()},
        distinct=float(distinct.mean()), emitted=float(np.mean(checks.counts)),
        weight_bytes=draft_bytes(runs.weights) + verify_bytes(runs.weights, distinct), launches=runs.launches,
        weights_s=runs.weights_s, compile_s=runs.compile_s, first_s=first_s, in_use=in_use, needed=runs.needed,
        digest=checks.digest.hexdigest()[:12], failed=checks.failed, baseline=other and other.timing())

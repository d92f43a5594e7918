"""`musejax bench step`: milliseconds of a whole speculative step of the released sizes, one rank of 8 on one GPU.

Draft, tree, verify, accept and commit are one program, as in `speculation.step`; what the seven other ranks would send
is this rank's own slice, 8 times. Weights are random, so hardly a guess is accepted; the work of a step does not depend
on that. State goes from step to step, but the length stays: accepted rows take the place of the last positions instead
of new ones. So every step reads as many keys as the first, and the caches need not grow with the steps.

On several GPUs the program runs on each, and they exchange what they have: the kernels of layers and drafter while they
run, embedding rows and what the LM head finds by all-gathers of XLA. For what that costs, the first GPU then runs its
part alone, with its own slices in place of what the others sent. All slices have the same weights, so that the results
are to have the same bits, on all GPUs.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from musejax import ffi
from musejax.bench.cases import Case, admitted_experts
from musejax.bench.launches import count_launches
from musejax.bench.layer import Samples, connect, in_slices, random_bf16, random_layer, run_looped
from musejax.bench.limits import BenchError
from musejax.bench.step_cases import StepCase, StepTiming
from musejax.config import NUM_SLICES, DecodeConfig
from musejax.kernels.cache import MAX_ROWS
from musejax.kernels.calls import Call, RowState
from musejax.kernels.draft_calls import DraftCall, draft_attribute
from musejax.kernels.forward import gather, ordinals, over_devices
from musejax.numerics import round_bf16
from musejax.sharding import AXIS, replicated
from musejax.speculation import accept as acceptance
from musejax.speculation import draft_kernels
from musejax.speculation.config import DraftConfig
from musejax.speculation.draft import Lattice
from musejax.speculation.packing import layout as draft_layout
from musejax.speculation.tree import Tree

TARGETS = ("musejax_draft_looped", "musejax_draft_commit_looped", "musejax_draft_tree", "musejax_layers_looped")
EXCHANGING = ("musejax_draft", "musejax_draft_commit")  # on several GPUs, beside those
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


def equal_slices(drafter: dict, config: DraftConfig, slices: int) -> dict:
    """A drafter of one slice -> of several equal ones, which give what one gives whose exchanges are looped back: base
    kernels of convolutions, which lie whole on every rank, repeat from slice to slice, too."""
    begin, d = draft_layout(config)["small.attention_conv"], config.hidden_size
    repeat = lambda x: jnp.repeat(x, slices, axis=0)  # noqa: E731

    def small(x):
        base = jnp.tile(x[begin:].reshape(-1, d)[:, :d // NUM_SLICES], (1, NUM_SLICES))
        return x.at[begin:].set(base.reshape(-1))

    return drafter | {"fc": repeat(drafter["fc"]), "selector": repeat(drafter["selector"]),
                      "layers": [{"dense": repeat(p["dense"]), "small": small(p["small"])} for p in drafter["layers"]]}


def copies(tree, mesh):
    """Arrays of the first device -> on every device of a mesh, whole; there they are not copied."""
    if mesh is None:
        return tree

    def copy(x):
        parts = [jax.device_put(x, device) for device in mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(x.shape, replicated(mesh), parts)

    return jax.tree.map(copy, tree)


def each_copy(x: jax.Array) -> list[jax.Array]:
    """Of an array that lies whole on every device: what the first one has, the second one, and so on."""
    return [shard.data for shard in sorted(x.addressable_shards, key=lambda shard: shard.device.id)]


def random_weights(case: StepCase, seed: int, mesh=None) -> dict:
    """A device's slices of target and drafter: embed bfloat16 [ends, v, d/8], final_norm bfloat16 [d], lm_head uint8
    [ends, n], layers as `layer.random_layer` but [slices, ...], drafter; on every device of the mesh. Each kind is
    compiled once."""
    c = case.config
    keys = jax.random.split(jax.random.key(seed, impl=GENERATOR), case.layers + 4)
    admitted = admitted_experts(case, c)
    repeat = lambda x: jnp.repeat(x, case.ends, axis=0) if case.ends > 1 else x  # noqa: E731

    def layer(key, nvfp4):
        one = random_layer(key, c, admitted, nvfp4)
        return copies(in_slices(one, case.slices) if case.slices > 1 else one, mesh)

    drafter = random_drafter(keys[3], case.drafter)
    if case.devices > 1 or case.slices > 1:
        drafter = equal_slices(drafter, case.drafter, case.ends)
    ends = {"embed": repeat(random_bf16(keys[0], (1, c.vocab_size, c.hidden_size // NUM_SLICES))),
            "final_norm": random_gains(keys[1], c.hidden_size).astype(jnp.bfloat16),
            "lm_head": repeat(random_packed(keys[2], draft_layout(case.drafter)["head.bytes"])),
            "drafter": drafter}
    return copies(ends, mesh) | {"layers": [layer(key, i in c.nvfp4_layers)
                                            for i, key in zip(case.numbers, keys[4:], strict=True)]}


def draft_bytes(weights: dict) -> int:
    """What a draft and a commit read on a device: every matrix once, the LM head too; of the codebooks a few rows, not
    counted."""
    drafter = weights["drafter"]
    matrices = (drafter["fc"], drafter["selector"], weights["lm_head"], *(p["dense"] for p in drafter["layers"]))
    return sum(w.size for w in matrices)


def verify_bytes(weights: dict, distinct) -> float:
    """What a verification reads on a device, if `distinct[i]` experts are hit in layer i."""
    layers = weights["layers"]
    experts = sum(float(n) * p["experts"].shape[0] * p["experts"].shape[2]
                  for n, p in zip(distinct, layers, strict=True))
    return experts + sum(p["dense"].size for p in layers) + weights["lm_head"].size


# ------------------------------------------------------------------ the step


class State(NamedTuple):
    """Between two steps; donated.

    Attributes:
        kept: of each layer keys and values [2 slices, p, 64], and those of the rows in flight [2 slices, 16, 64],
            bfloat16.
        rings: keys and values of the drafter, bfloat16 [5, ends, 2048, 128].
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
    """The program of a case, as pure functions of weights and state.

    Attributes:
        mesh: of the devices that exchange what they have, on each of which the program runs; None: one device, to which
            its own slices come back instead.
    """

    def __init__(self, case: StepCase, mesh=None):
        self.case, self.config, self.drafter, self.mesh = case, case.config, case.drafter, mesh
        self.taps = tuple(sorted(set(case.tapped)))
        self.call = Call(self.config, DecodeConfig(), "cuda")
        self.draft_call = DraftCall(self.drafter, "cuda", looped=mesh is None)

    def start(self, seed: int) -> State:
        """The first state: caches full of random keys and values, the same in all slices."""
        c, d, key = self.config, self.drafter, jax.random.key(seed + 1, impl=GENERATOR)
        heads, kept = c.num_key_value_heads // NUM_SLICES, []
        for n, i in enumerate(self.case.numbers):
            stored, flight = (heads, self.case.slots(i), c.head_dim), (heads, MAX_ROWS, c.head_dim)
            kept += [jnp.tile(random_bf16(jax.random.fold_in(key, 4 * n + j), shape), (self.case.slices, 1, 1))
                     for j, shape in enumerate((stored, stored, flight, flight))]
        ring = (d.num_hidden_layers, d.num_key_value_heads // NUM_SLICES, d.sliding_window, d.head_dim)
        rings = tuple(jnp.tile(random_bf16(jax.random.fold_in(key, 4 * len(self.case.numbers) + j), ring),
                               (1, self.case.ends, 1, 1)) for j in range(2))
        return State(kept, rings, jnp.int32(self.case.context), jnp.int32(FIRST_TOKEN), jnp.int32(0),
                     jnp.zeros(MAX_ROWS, jnp.int32))

    def draft(self, weights: dict, rings, length, token) -> Tree:
        """Drafter and tree."""
        d, p = self.drafter, weights["drafter"]
        ids = jnp.full(d.block_size, d.mask_token_id, jnp.int32).at[0].set(token)
        cos_sin = self.draft_call.angles(length + jnp.arange(d.block_size, dtype=jnp.int32))
        lattice = Lattice(*self.draft_call.draft(
            weights["embed"][:, ids], cos_sin, token, length, p["norm"], weights["lm_head"], p["selector"],
            p["predecessor"], p["successor"], *rings, p["layers"], num_tokens=None, devices=ordinals(self.mesh)))
        return draft_kernels.tree(token, lattice)

    def verify(self, weights: dict, kept: list, length, accepted, path, tree: Tree) -> tuple[Verified, list]:
        """Layers and LM head for the nodes of a tree -> (what they say, kept)."""
        call = self.call
        stream = call.embed_norm(self._eight(weights["embed"][:, tree.tokens]))
        rows = RowState(tree.parents, jnp.stack([length, tree.num_valid, accepted]), path)
        stream, ids, taps, kept = run_looped(call, self.case.numbers, weights["layers"], stream,
                                             call.angles(length + tree.depth), rows, kept, self.taps,
                                             ordinals(self.mesh))
        head = weights["lm_head"]
        begin = jnp.int32(0) if self.mesh is None else lax.axis_index(AXIS) * head.shape[0]
        raw, best, chosen = call.head(stream, weights["final_norm"], head, begin, num_tokens=None, top=1)
        best, chosen = self._eight(best[..., 0]), self._eight(chosen[..., 0])
        first = jnp.argmax(best, axis=0)[None]
        largest, choices = (jnp.take_along_axis(x, first, axis=0)[0] for x in (best, chosen))
        sums = self._eight(call.head_sums(raw, largest, begin, num_tokens=None))
        return Verified(choices, call.logprob(largest, largest, sums), stream, taps, ids), kept

    def commit(self, weights: dict, rings, taps, start, path, count) -> tuple:
        """Rows `path[:count]` of the taps go into the rings, at positions from `start` on."""
        p = weights["drafter"]
        joined = jnp.concatenate([taps[self.taps.index(i)] for i in self.case.tapped], axis=-1)[path]
        cos_sin = self.draft_call.angles(start + jnp.arange(MAX_ROWS, dtype=jnp.int32))
        return tuple(self.draft_call.commit(joined, cos_sin, start, count, p["fc"], p["hidden_norm"], *rings,
                                            p["layers"], devices=ordinals(self.mesh)))

    def step(self, state: State, weights: dict) -> tuple[State, Result]:
        """Draft, tree, verify, accept, commit."""
        tree = self.draft(weights, state.rings, state.length, state.token)
        verified, kept = self.verify(weights, state.kept, state.length, state.accepted, state.path, tree)
        accepted = acceptance.accept(tree, verified.choices)
        path, count = jnp.maximum(accepted.path, 0), accepted.count
        rings = self.commit(weights, state.rings, verified.taps, state.length - count, path, count)
        result = Result(accepted.emitted, count, tree.num_valid, verified.logprobs[path], verified.stream, verified.ids)
        return State(kept, rings, state.length, accepted.anchor, count, path), result

    def _eight(self, x: jax.Array) -> jax.Array:
        """Slices here [s, ...] -> all [8, ...]: those of the other devices, or as if they sent the same."""
        if self.mesh is not None:
            return gather(x)
        return jnp.tile(x, (NUM_SLICES // x.shape[0],) + (1,) * (x.ndim - 1))


# ------------------------------------------------------------------ measuring


class Runs:
    """A case on the default device, or on those of a mesh, ready to run: the step, and its two large parts alone.

    Attributes:
        launches: of the program of a step.
        weights_s, compile_s: seconds.
        needed: bytes of weights and a state, on each device.
    """

    def __init__(self, case: StepCase, seed: int = 0, mesh=None, weights: dict | None = None):
        """weights: those to run with; None makes new ones."""
        self.case, self.seed, self.mesh, self.program = case, seed, mesh, Step(case, mesh)
        shapes = jax.eval_shape(lambda: (self.program.start(seed), random_weights(case, seed)))
        self.needed = size_of(shapes)
        begin = time.perf_counter()
        self._step = self._jit(self.program.step, 0).lower(*shapes).compile()
        self.compile_s = time.perf_counter() - begin
        self.launches = count_launches(self._step.as_text())
        begin = time.perf_counter()
        self.weights = jax.block_until_ready(random_weights(case, seed, mesh) if weights is None else weights)
        self.weights_s = time.perf_counter() - begin
        self.state = self.start()
        self._draft, self._verify = self._jit(self.program.draft), self._jit(self.program.verify, 1)

    def _jit(self, function, *donated: int):
        where = {} if self.mesh is None else dict.fromkeys(("in_shardings", "out_shardings"), replicated(self.mesh))
        return jax.jit(over_devices(self.mesh, function, P(), P()), donate_argnums=donated, **where)

    def looped(self) -> Runs:
        """The first device's part alone, with its weights: its own slices in place of what the others sent."""
        return Runs(self.case, self.seed, weights=jax.tree.map(lambda x: each_copy(x)[0], self.weights))

    def start(self) -> State:
        return copies(self.program.start(self.seed), self.mesh)

    def split(self) -> None:
        """Gives the parts alone caches of their own, and a tree to verify after one accepted row. Compiles them now:
        XLA drops its CUDA graphs when it compiles, which is not to happen between samples."""
        alone = self.start()
        self.kept, self.alone = alone.kept, alone._replace(kept=[], accepted=copies(jnp.int32(1), self.mesh))
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


def size_of(tree) -> int:
    """Bytes of arrays, or of shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# ------------------------------------------------------------------ before anything is run


def prepare(case: StepCase, baseline: bool = False):
    """What has to be there before anything that takes time; several GPUs may write each other's memory from then on.

    Returns:
        The mesh of the case's devices if they are several; else None.

    Raises:
        BenchError: the library has no kernels for the case, GPUs are too few or cannot write each other's memory, the
            weights do not fit, or a baseline of more than one rank of 8 is asked for.
    """
    if baseline and (case.devices, case.slices) != (1, 1):
        raise BenchError("bench step: the baseline is of one rank of 8, expected devices 1 and slices 1, got "
                         f"{case.devices} and {case.slices}")
    sizes, mesh = check_library(case), None
    if case.devices > 1:
        mesh = connect("bench step", case.devices, sizes, max(map(case.slots, case.numbers)))
        try:
            ffi.connect_draft(draft_attribute(case.drafter), case.drafter.num_hidden_layers,
                              case.drafter.sliding_window, ordinals(mesh))
        except ffi.LibraryError as error:
            raise BenchError(f"bench step: {error}") from error
    check_memory(case, min(map(free_memory, jax.local_devices()[:1] if mesh is None else mesh.devices.flat)))
    return mesh


def check_library(case: StepCase) -> tuple[int, ...]:
    """The sizes of the layer kernel for a case, as `ffi.connect` takes them.

    Raises:
        BenchError: the CUDA library has not what a step needs.
    """
    sizes = [s for s in ffi.layer_instances() if s[0] == case.config.hidden_size and s[-1] == case.slices]
    targets = TARGETS + EXCHANGING * (case.devices > 1)
    lacking = [name for name in targets if name not in ffi.library("cuda").targets()]
    if lacking or not sizes:
        raise BenchError(f"bench step: expected a library compiled for the released sizes, {case.slices} "
                         f"slice{'s' * (case.slices > 1)} a device, with {', '.join(targets)}, got one without "
                         f"{', '.join(lacking) or 'these sizes'}; build with MUSEJAX_CUDA=ON")
    return sizes[0]


def free_memory(device) -> float:
    """Bytes of a device that JAX may still take; infinite where it does not say."""
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else float("inf")


def check_memory(case: StepCase, free: float) -> None:
    """Raises BenchError if weights and caches need more bytes of a device than `free`: how many layers fit."""
    shapes = jax.eval_shape(lambda: random_weights(case, 0))
    state = jax.eval_shape(lambda: Step(case).start(0))
    states = 4 if case.devices > 1 else 2  # of the step and of its parts alone, and of both without exchange
    layers = [size_of(p) + states * size_of(state.kept[4 * n:4 * n + 4]) for n, p in enumerate(shapes["layers"])]
    ends = size_of(shapes) - size_of(shapes["layers"]) + states * size_of(state._replace(kept=[]))
    # While a layer is made, what it is made of takes about as much as a slice of it, twice.
    making = [2 * size_of(p) // case.slices for p in shapes["layers"]]
    needed = [ends + sum(layers[:n]) + max(making[:n]) for n in range(1, case.layers + 1)]
    if needed[-1] > free:
        fit = sum(x <= free for x in needed)
        raise BenchError(f"bench step: layers: expected at most {fit} (what fits into the {free / 1e9:.1f} GB that JAX "
                         f"may still take of a GPU), got {case.layers}, which need {needed[-1] / 1e9:.1f} GB: ask for "
                         "fewer layers or slices, or allow JAX more with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95")


# ------------------------------------------------------------------ what came out


def memory_in_use() -> int:
    """Bytes that JAX has taken of the default device."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0)


class Checks:
    """What steps have returned, and what is wrong with it."""

    def __init__(self, layers: int, experts: int):
        self.layers, self.experts = layers, experts
        self.digest, self.hits, self.counts, self.failed = hashlib.sha256(), [], [], ""

    def take(self, result: Result) -> None:
        result = Result(*self.alike(result))
        for x in result:
            self.digest.update(x.tobytes())
        self.counts.append(int(result.count))
        rows = result.ids.reshape(self.layers, -1)
        self.hits.append([np.unique(ids[ids < self.experts]).size for ids in rows])
        if not (np.isfinite(result.stream).all() and np.isfinite(result.logprobs).all()):
            self.failed = "results: expected finite numbers, got others"
        elif result.nodes != MAX_ROWS:
            self.failed = f"tree: expected {MAX_ROWS} nodes, got {result.nodes}"

    def alike(self, arrays) -> list[np.ndarray]:
        """Arrays as the first device has them; the same bits are expected on all."""
        out = []
        for x in arrays:
            first, *others = map(np.array, each_copy(x))
            out.append(first)
            wrong = [n for n, other in enumerate(others, 1) if other.tobytes() != first.tobytes()]
            if wrong:
                self.failed = ("results on several GPUs: expected the same bits on each, got others on GPU "
                               f"{', '.join(map(str, wrong))}")
        return out

    def compare(self, what: str, got: list, want: list) -> None:
        """Arrays of two runs of a step: the same bits are expected."""
        different = sum(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True))
        if different:
            self.failed = f"{what}: expected the same bits, got others in {different} of {len(want)} arrays"

    def compare_all(self, what: str, other: Checks) -> None:
        """All steps beside others: the same bits are expected."""
        if self.digest.digest() != other.digest.digest():
            self.failed = f"{what}: expected the same bits, got others"


class StepSamples:
    """What was measured of `Runs` that take turns with others, and their checks."""

    def __init__(self, runs):
        self.runs, self.times = runs, {"step": [], "draft": [], "verify": []}
        self.checks = Checks(runs.case.layers, runs.case.config.num_local_experts)
        begin = time.perf_counter()
        self.first = self._first_step()
        self.first_s, self.in_use = time.perf_counter() - begin, memory_in_use()
        runs.split()

    def _first_step(self) -> list[np.ndarray]:
        """A step -> its results and the rings after it."""
        result = jax.block_until_ready(self.runs.step())
        ffi.raise_wait_error()
        return self.checks.alike((*result, *self.runs.state.rings))

    def batch(self, each: int, counted: bool) -> None:
        """Steps back to back, then as many drafts and verifications alone; the time of each kind is one sample."""
        for name, samples in self.times.items():
            begin = time.perf_counter()
            results = jax.block_until_ready([getattr(self.runs, name)() for _ in range(each)])
            elapsed = time.perf_counter() - begin
            ffi.raise_wait_error()
            if counted:
                samples.append(elapsed / each * 1e3)
            if name == "step":
                for result in results:
                    self.checks.take(result)

    def check_repeat(self) -> None:
        """The first step once more: the same bits are expected."""
        self.runs.state = self.runs.start()
        self.checks.compare("the first step repeated", self._first_step(), self.first)

    def check_same(self, looped: StepSamples) -> None:
        """All steps beside those without exchange: the same bits are expected."""
        self.checks.compare_all("the steps beside those without exchange", looped.checks)
        self.checks.compare("the first step beside the one without exchange", self.first, looped.first)

    def timing(self) -> StepTiming:
        runs, checks = self.runs, self.checks
        distinct = np.mean(checks.hits, axis=0)
        return StepTiming(
            **{name: tuple(map(float, np.percentile(samples, (10, 50, 90)))) for name, samples in self.times.items()},
            distinct=float(distinct.mean()), emitted=float(np.mean(checks.counts)),
            weight_bytes=draft_bytes(runs.weights) + verify_bytes(runs.weights, distinct), launches=runs.launches,
            weights_s=runs.weights_s, compile_s=runs.compile_s, first_s=self.first_s, in_use=self.in_use,
            needed=runs.needed, digest=checks.digest.hexdigest()[:12], failed=checks.failed)


def measure(case: StepCase, batches: int = 9, each: int = 5, seed: int = 0, baseline: bool = False,
            mesh=None) -> StepTiming:
    """Runs `batches` batches of `each` steps back to back, in turns with as many drafts and verifications alone, with
    the same without exchange where there is a mesh, and with `baseline` with two layers of
    `reference.ReferenceLayers`, after a batch of each that is not counted.

    Args:
        mesh: of the case's devices, as `prepare` returns it.

    Raises:
        WaitError: a wait inside a kernel did not end.
    """
    turns = [StepSamples(Runs(case, seed, mesh))]
    if mesh is not None:
        turns.append(StepSamples(turns[0].runs.looped()))
    other = None
    if baseline:
        from musejax.bench.reference import ReferenceLayers

        layers = Case(distinct=case.distinct, context=case.context, layers=2)
        other = Samples(ReferenceLayers(layers, case.config, seed))
        streams = [jax.random.normal(jax.random.key(1000 + i), (MAX_ROWS, case.config.hidden_size), jnp.float32)
                   for i in range(each)]
    for n in range(batches + 1):
        for samples in turns:
            samples.batch(each, n > 0)
        if other:
            other.batch(streams, n > 0)
    for samples in turns:
        samples.check_repeat()
    if mesh is not None:
        turns[0].check_same(turns[1])
    timing, *looped = (samples.timing() for samples in turns)
    return replace(timing, looped=looped[0] if looped else None, baseline=other and other.timing())

"""The CUDA kernels of a drafter on the emulator of tests/emulator: the same source, its threads as fibers on the CPU.

Sums inside an MMA are made in float64 here, so results stand beside draft.py within tolerances, and beside themselves
bit for bit.
"""

import ctypes
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from emulated import WaitError, compile_sources

from musejax.config import NUM_SLICES
from musejax.kernels.cache import MAX_ROWS
from musejax.kernels.draft_calls import DraftCall, draft_attribute
from musejax.speculation.draft import DraftCache, Lattice

FLOATS = ("eps", "attention_scale", "output_multiplier", "softcap", "embedding_scale")


class _How(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int32) for name in ("ranks", "slices", "layers", "rows", "slots", "blocks")),
                ("seed", ctypes.c_uint32), ("rough", ctypes.c_int32), ("budget_ms", ctypes.c_double)]


class How(NamedTuple):
    """How a launch runs.

    Attributes:
        ranks: that run at once.
        slices: of a rank, all 8 over the ranks by default; with fewer the exchanges are looped back.
        blocks: SMs of each rank.
        seed: of the order in which warps take turns; 0 is in order.
        rough: warps of unequal speeds, blocks that stop, and flags that arrive late.
        budget_ms: of a wait, by the emulator's clock, which each reading advances.
    """

    ranks: int = 1
    slices: int | None = None
    blocks: int = 3
    seed: int = 0
    rough: bool = False
    budget_ms: float = 1e6


ONE_RANK = How()


class Drafted(NamedTuple):
    """lattice: of rank 0. stream: bfloat16 bits, uint16 [8, t, d/8], after the last layer."""

    lattice: Lattice
    stream: np.ndarray


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles the kernels for the emulator, or skips the test."""
    return compile_sources("draft.cc", "fibers.cc")


def only_rank(rank: int) -> None:
    """From now on only this rank runs in launches of several; -1: all."""
    library().EmulateOnlyRank(rank)


def _bits(x) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return x.view(np.uint16).copy() if x.dtype.itemsize == 2 else x.copy()


class _Launch:
    """Arrays of the ranks of a launch, kept as long as pointers to them are used."""

    def __init__(self, config, how: How, rows: int, slots: int):
        self.slices = how.slices or NUM_SLICES // how.ranks
        self.how = _How(how.ranks, self.slices, config.num_hidden_layers, rows, slots, how.blocks, how.seed, how.rough,
                        how.budget_ms)
        self.config, self.arrays, self.pointers = config, [], []

    def give(self, x) -> np.ndarray | None:
        x = None if x is None else _bits(x)
        self.arrays.append(x)
        self.pointers.append(None if x is None else x.ctypes.data)
        return x

    def part(self, rank: int, x, axis: int = 0):
        """What a rank has of an array with a slice or head axis."""
        x = np.asarray(x)
        each = x.shape[axis] * self.slices // NUM_SLICES
        return np.take(x, range(rank * each, (rank + 1) * each), axis=axis)

    def layers(self, rank: int, drafter, cache) -> list:
        rings = [self.part(rank, x, 1) for x in cache[:2]]
        return [[self.give(x) for x in (self.part(rank, p["dense"]), p["small"], rings[0][i], rings[1][i])][2:]
                for i, p in enumerate(drafter.packed["layers"])]

    def run(self, function, *more) -> None:
        attribute = draft_attribute(self.config)
        integers = np.array([v for k, v in attribute.items() if k not in FLOATS], np.int64)
        floats = np.array([attribute[name] for name in FLOATS], np.float32)
        table, text = (ctypes.c_void_p * len(self.pointers))(*self.pointers), ctypes.create_string_buffer(512)
        code = function(ctypes.c_void_p(integers.ctypes.data), ctypes.c_void_p(floats.ctypes.data),
                        ctypes.byref(self.how), *more, table, text, len(text))
        if code:
            raise WaitError(text.value.decode())


def draft(drafter, cache, anchor: int, how: How = ONE_RANK, num_tokens: int | None = None) -> Drafted:
    """One launch."""
    config, rows = drafter.config, drafter.config.block_size
    q, a, call = rows - 1, config.candidates, DraftCall(config)
    ids = np.full(rows, config.mask_token_id)
    ids[0] = anchor
    embedded = np.array(np.asarray(drafter.packed.get("embed", drafter.target["embed"]))[:, ids])
    if "mask_embedding" in drafter.packed:
        embedded[:, 1:] = np.asarray(drafter.packed["mask_embedding"])[:, None]
    cos_sin = call.angles(cache.length + jnp.arange(rows, dtype=jnp.int32))
    none = np.zeros((0, 0), np.uint16)
    launch, results = _Launch(config, how, rows, cache.keys.shape[2]), []
    for rank in range(how.ranks):
        for x in (launch.part(rank, embedded), cos_sin, np.int32([anchor]), np.int32([cache.length]),
                  drafter.packed["norm"], launch.part(rank, drafter.packed.get("lm_head", drafter.target["lm_head"])),
                  launch.part(rank, drafter.packed.get("selector", np.zeros((8, 0), np.uint8))),
                  drafter.packed.get("predecessor", none), drafter.packed.get("successor", none)):
            launch.give(np.asarray(x))
        results.append([launch.give(x) for x in (
            np.zeros((q, a), np.int32), np.zeros((q, a, a), np.float32), np.zeros(q, np.float32),
            np.zeros((NUM_SLICES, MAX_ROWS, config.hidden_size // NUM_SLICES), np.uint16))])
        launch.layers(rank, drafter, cache)
    launch.run(library().EmulateDraft, ctypes.c_int(num_tokens or config.vocab_size))
    for other in results[1:]:  # every rank has the same answer
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
    *lattice, stream = results[0]
    return Drafted(Lattice(*lattice), stream[:, :rows])


def commit(drafter, cache, taps, start: int, count: int, how: How = ONE_RANK) -> DraftCache:
    """One launch -> the cache after it; keys and values as uint16."""
    config, call = drafter.config, DraftCall(drafter.config)
    cos_sin = call.angles(start + jnp.arange(len(taps), dtype=jnp.int32))
    launch = _Launch(config, how, len(taps), cache.keys.shape[2])
    rings = []
    for rank in range(how.ranks):
        for x in (np.float32(taps), cos_sin, np.int32([start]), np.int32([count]),
                  launch.part(rank, drafter.packed["fc"]), drafter.packed["hidden_norm"]):
            launch.give(np.asarray(x))
        rings.append(launch.layers(rank, drafter, cache))
    launch.run(library().EmulateCommit)
    keys, values = (np.stack([np.concatenate([ranks[i][n] for ranks in rings]) for i in range(len(rings[0]))])
                    for n in range(2))
    return DraftCache(keys, values, start + count)


def tree(anchor: int, lattice: Lattice, nodes: int, width: int | None = None, spine: int = 0, tau: float = 1.0):
    """-> (tokens, parents, depth, ancestors int32 [4, n], cum float32 [n])."""
    q, a = lattice.tokens.shape
    sizes = np.int32([q, a, nodes, min(width or a, a), min(spine, q)])
    out, cum = np.zeros((4, nodes), np.int32), np.zeros(nodes, np.float32)
    given = [np.int32([anchor]), *(np.ascontiguousarray(x) for x in lattice)]

    def at(x):
        return ctypes.c_void_p(x.ctypes.data)

    library().EmulateTree(at(sizes), ctypes.c_float(tau), *map(at, given), at(out), at(cum))
    return out, cum

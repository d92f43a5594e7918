"""The comparisons, one function a group, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from musejax import decode as steps
from musejax import score
from musejax.checkpoint import load_params
from musejax.checkpoint.published import Published
from musejax.config import ConfigError, DecodeConfig, ModelConfig
from musejax.ffi import library
from musejax.kernels import forward as kf
from musejax.kernels.cache import MAX_ROWS, KernelCache, accept
from musejax.packing import pack_params, packed_table, unpack_params
from musejax.params import leaf_of, table, unslice_tensor
from musejax.parity.differences import Row, difference, located
from musejax.parity.injections import reversed_columns
from musejax.parity.sides import Decoded, Side, Step, arrays, run_decode, run_steps, stored, streams_of, tree_of
from musejax.sharding import make_mesh

ROW_COUNTS = (2, 7, 8, 9, 15, 16)
THREADS = (1, 2, 7)
INSTRUCTION_SETS = ("avx512", "avx2", "scalar")
KEY_BORDERS = (16, 256, 1024)
"""Of the order of attention (kKeyBlock, kKeyChunk, kKeyGroup in ffi/common/layout.h)."""


@dataclass(frozen=True)
class Bench:
    """What all comparisons share.

    Attributes:
        here, there: packed params (NumPy) of this side and of the other side.
        published: the files, None for a converted checkpoint.
        prompt: int32 [PROMPT].
        tokens: decoded after it.
    """

    config: ModelConfig
    here: dict
    there: dict
    published: Published | None
    folder: Path
    overlay: tuple
    prompt: np.ndarray
    num_tokens: int
    tokens: int
    devices: tuple[int, ...]
    seed: int
    quick: bool
    inject: str | None

    @property
    def max_length(self) -> int:
        needed = max(len(self.prompt) + self.tokens + MAX_ROWS, max(self.positions) + MAX_ROWS + 1)
        return steps.cache_length(self.config, needed)

    @property
    def positions(self) -> list[int]:
        """Positions before a tree, one short of a border: the first of its rows is before it, others behind."""
        if self.quick:
            borders = [min(self.config.sliding_window, 256)]
        else:
            borders = [1, *KEY_BORDERS, self.config.sliding_window]
        room = self.config.max_position_embeddings - MAX_ROWS - 1
        return sorted({b - 1 for b in borders if b - 1 <= room})

    def side(self, decode: DecodeConfig, devices: int = 1, other: bool = False) -> Side:
        """Decoding on so many devices. This costs a copy of the weights."""
        params = self.there if other else self.here
        mesh = make_mesh(devices) if devices > 1 else None
        if mesh is None:
            params = jax.tree.map(jnp.asarray, params)
        else:
            specs = kf.param_specs(params)
            params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
        return Side(params, self.config, self.there_decode(decode) if other else decode, self.num_tokens,
                    self.max_length, mesh)

    def aligned(self, streams: np.ndarray) -> np.ndarray:
        """Streams [..., d] of the other side, with the columns in this side's order."""
        return reversed_columns(streams, self.config.hidden_size // 16) if self.inject == "k-order" else streams

    def there_decode(self, decode: DecodeConfig) -> DecodeConfig:
        if self.inject != "combine-order":
            return decode
        return replace(decode, combine="ep(8)" if decode.combine == "flat" else "flat")


def _setting(decode: DecodeConfig) -> str:
    return f"{decode.activations}, {decode.combine}"


def _row(group: str, setting: str, name: str, left: dict, right: dict,
         streams: Callable[[], tuple[np.ndarray, np.ndarray]] | None = None) -> Row:
    """Compares; `streams` runs both sides again, for their streams."""
    found = difference(left, right)
    if found and streams:
        found = located(found, *streams())
    return Row(group, setting, name, found is None, sum(np.asarray(x).size for x in left.values()), found)


def check_packing(b: Bench) -> Iterator[Row]:
    """Packed form and files."""
    packed = {row.name: leaf_of(b.here, row) for row in packed_table(b.config)}
    unpacked = unpack_params(b.here, b.config)
    again = pack_params(unpacked, b.config)
    yield _row("packing", "", "packed = unpacked and packed again", packed,
               {row.name: leaf_of(again, row) for row in packed_table(b.config)})
    _, loaded = load_params(b.folder, overlay=b.overlay, form="table")
    rows = table(b.config)
    yield _row("packing", "", "loaded in table form = packed and unpacked",
               {p.name: np.asarray(leaf_of(loaded, p)) for p in rows}, {p.name: leaf_of(unpacked, p) for p in rows})
    what = "files = loaded, not quantised again" if b.config.nvfp4_layers else "files = loaded"
    if b.published is None:
        yield Row("packing", "", what, None, note="a converted checkpoint has no published files")
        return
    files, saved = {}, {}
    for source in b.published.sources:
        tensor, p = source.tensors[0], source.param
        file = np.asarray(tensor.map()) if tensor.shape == p.hf_shape else unslice_tensor(p, source.read())
        files[p.hf_key] = file if file.dtype == p.dtype else file.astype(p.dtype)  # float32 residual gates
        saved[p.hf_key] = np.asarray(unslice_tensor(p, leaf_of(unpacked, p)))
    yield _row("packing", "", what, files, saved)


def check_devices(b: Bench, decode: DecodeConfig, base: Decoded) -> Iterator[Row]:
    """One device against several, and against the programs of generation."""
    n, setting = len(b.prompt), _setting(decode)
    finite = np.isfinite(base.values["logits"])
    yield Row("devices", setting, "logits are numbers", bool(finite.all()), finite.size,
              note="" if finite.all() else f"{(~finite).sum():,} are not: equal bits of those would say nothing")
    steps_of = {"tokens": base.tokens[n:], **base.values}
    steps_of["log-probabilities"] = steps_of["log-probabilities"][n - 1:]
    del steps_of["logits"]
    for devices in b.devices:
        side = b.side(decode, devices, other=devices > 1)
        if devices > 1:
            out = run_decode(side, b.prompt, b.tokens, b.seed)
            out.tree["streams"] = b.aligned(out.tree["streams"])
            left, right = (x.values | {f"{name} of a tree": y for name, y in x.tree.items()} | {"tokens": x.tokens}
                           for x in (base, out))
            yield _row("devices", setting, f"1 device = {devices}", left, right, lambda side=side: (
                streams_of(b.side(decode), base.tokens, n), b.aligned(streams_of(side, base.tokens, n))))
        yield _row("devices", setting, f"1 device = decode_step on {devices}", steps_of,
                   run_steps(side, b.prompt, b.tokens))


def check_score(b: Bench, decode: DecodeConfig, base: Decoded) -> Iterator[Row]:
    """Decoding against the training sharding."""
    setting = _setting(decode)
    blocks = [(r, MAX_ROWS) for r in b.devices] + ([] if b.quick else [(1, 7)])
    for devices, rows in blocks:
        name = f"decode = score on {devices}" + (f", blocks of {rows}" if rows != MAX_ROWS else "")
        other = b.there_decode(decode)
        mesh = score.make_mesh(devices) if devices > 1 else None
        try:
            score.make_plan(b.config, other, mesh)
        except ConfigError as err:
            yield Row("score", setting, name, None, note=str(err).replace("\n", " "))
            continue
        got = score.logprobs(b.there, base.tokens, config=b.config, decode=other, mesh=mesh, rows=rows,
                             num_tokens=b.num_tokens, max_length=b.max_length, trace=True)
        right = {"logits": got.logits, "log-probabilities": got.logprobs}
        right |= {f"{kind} of layer {i}": x for kind, xs in (("keys", got.keys), ("values", got.values))
                  for i, x in enumerate(xs)}
        yield _row("score", setting, name, base.values, right, lambda got=got: (
            streams_of(b.side(decode), base.tokens, len(b.prompt)), b.aligned(got.streams)))


def caches_at(side: Side, tokens: np.ndarray, positions: Sequence[int]) -> dict[int, KernelCache]:
    """Caches with the first so many of the tokens, for each of the ascending positions."""
    cache, done, out = side.empty(), 0, {}
    for position in positions:
        for _, result in side.chain(cache, tokens[done:position]):
            cache = result.cache
        out[position], done = cache, position
    return out


def check_rows(b: Bench, decode: DecodeConfig) -> Iterator[Row]:
    """Rows of a tree against the same tokens alone; one line a kind of tree."""
    side = b.side(decode)
    rng = np.random.default_rng([b.seed, 2])
    before = caches_at(side, rng.integers(0, b.num_tokens, max(b.positions)), b.positions)
    counts = (8, 16) if b.quick else ROW_COUNTS
    at = ", ".join(map(str, b.positions))
    for kind in ("chain", "star", "random"):
        parents, guesses = tree_of(kind, rng), rng.integers(0, b.num_tokens, MAX_ROWS)
        name = f"{kind} of {', '.join(map(str, counts))} rows after {at} positions = each row alone"
        values, found = 0, None
        for position in b.positions:
            alone = rows_alone(side, before[position], guesses, parents)
            for count, rows in sorted({(n, r) for n in counts for r in (n, MAX_ROWS)}):
                junk = np.where(np.arange(MAX_ROWS) < count, guesses, rng.integers(0, b.num_tokens, MAX_ROWS))
                out = side.step(before[position], junk[:rows], parents=parents[:rows], valid=count, count=0)
                left, right = arrays(out, range(count)), joined([arrays(s, [0]) for s in alone[:count]])
                values += sum(x.size for x in left.values())
                if found := difference(left, right):
                    traced = side.step(before[position], junk[:rows], parents=parents[:rows], valid=count, count=0,
                                       trace=True)
                    single = rows_alone(side, before[position], guesses[:count], parents[:count], trace=True)
                    found = located(replace(found, what=f"{found.what} of {count} rows after {position} positions"),
                                    np.asarray(traced.streams)[:, :count],
                                    np.concatenate([np.asarray(s.streams) for s in single], axis=1))
                    break
            else:
                path = deepest_path(parents)
                result = accept_and_go_on(side, before[position], guesses, parents, path, alone)
                values += sum(x.size for x in result[0].values())
                found = difference(*result)
            if found:
                break
        yield Row("rows", decode.activations, name, found is None, values, found)


def joined(rows: list[dict]) -> dict[str, np.ndarray]:
    """Rows of passes of one row each as rows of one pass."""
    return {name: np.concatenate([r[name] for r in rows], axis=2 if name in ("keys", "values") else 0)
            for name in rows[0]}


def rows_alone(side: Side, cache: KernelCache, guesses, parents, trace=False) -> list[Step]:
    """Each token in a pass of its own, after its ancestors."""
    out: list[Step] = []
    for token, parent in zip(guesses, parents, strict=True):
        out.append(side.step(out[parent].cache if parent >= 0 else cache, [token], trace=trace))
    return out


def deepest_path(parents: np.ndarray) -> list[int]:
    """Rows from a root to the deepest leaf."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append(([] if parent < 0 else paths[parent]) + [row])
    return max(paths, key=len)


def accept_and_go_on(side: Side, cache, guesses, parents, path: list[int], alone: list[Step]) -> tuple[dict, dict]:
    """A tree pass whose `path` is accepted, and one token after it, against the path decoded token by token."""
    tree = side.step(cache, guesses, parents=parents, count=0)
    cache = accept(tree.cache, np.pad(path, (0, MAX_ROWS - len(path))), len(path))
    results = [side.step(c, guesses[:1]) for c in (cache, alone[path[-1]].cache)]
    return tuple({f"{name} after an accepted path": x for name, x in (arrays(out, [0]) | stored(out.cache)).items()}
                 for out in results)


def check_machine(b: Bench, decode: DecodeConfig, base: Decoded) -> Iterator[Row]:
    """Threads and instruction sets of the CPU library, which are put back afterwards."""
    lib, side, n = library("cpu"), b.side(decode), len(b.prompt)
    isa, left = lib.isa(), base.values | base.tree
    want = streams_of(side, base.tokens, n)

    def compare(name):
        out = run_decode(side, b.prompt, b.tokens, b.seed)
        return _row("machine", _setting(decode), name, left, out.values | out.tree,
                    lambda: (want, streams_of(side, base.tokens, n)))

    try:
        for threads in THREADS:
            lib.set_threads(threads)
            yield compare(f"threads: {threads} = the default")
        lib.set_threads(0)
        for name in INSTRUCTION_SETS:
            if not lib.set_isa(name):
                yield Row("machine", _setting(decode), f"{name} = {isa}", None, note="this machine lacks it")
            elif name != isa:
                yield compare(f"{name} = {isa}")
    finally:
        lib.set_threads(0)
        lib.set_isa(isa)

"""`musejax parity`: the promise of equal bits, checked on a checkpoint. Every line compares bits, none has a tolerance.

packing   packed weights unpack to what was packed, and what was loaded is what the files hold.
devices   a prompt, 64 decoded tokens and a tree of guesses on 2, 4 and 8 devices against one device: logits,
          log-probabilities, keys, values; and the same tokens by `decode.start` and `decode.decode_step`.
score     decoding (split along output columns) against `score.logprobs` (training sharding, experts dealt out over 1,
          2, 4 and 8 devices), in each combine order.
rows      each row of chains, stars and random trees of 2 to 16 rows against its token decoded alone after its
          ancestors, at borders of key blocks, chunks and windows; with padding rows; and after a path is accepted.
machine   threads and instruction sets.

Where two runs part, both run again with the streams between layers, to name the first layer that differs.

`inject` breaks one side on purpose, to show that the comparison sees it. "This side" is one device, "the other side"
everything it is compared with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from musejax import decode as steps
from musejax import score
from musejax.checkpoint import is_converted, load_params, open_published
from musejax.checkpoint.container import read_manifest
from musejax.checkpoint.load import require_checkpoint
from musejax.checkpoint.published import Published
from musejax.config import ConfigError, DecodeConfig, ModelConfig
from musejax.ffi import library
from musejax.kernels import forward as kf
from musejax.kernels.cache import MAX_ROWS, KernelCache, accept, init_cache, keep_placement
from musejax.nvfp4 import ACTIVATIONS
from musejax.packing import check_packable, layout, pack_params, packed_table, unpack_params
from musejax.params import leaf_of, table, unslice_tensor
from musejax.sharding import DEVICE_COUNTS, make_mesh
from musejax.tokenizer import Tokenizer

PROMPT = 37
"""Tokens of the prompt: more than two blocks of 16 rows, the last one not full."""

COMBINES = ("ep(8)", "flat")
ROW_COUNTS = (2, 7, 8, 9, 15, 16)
THREADS = (1, 2, 7)
INSTRUCTION_SETS = ("avx512", "avx2", "scalar")
KEY_BORDERS = (16, 256, 1024)
"""Of the order of attention (kKeyBlock, kKeyChunk, kKeyGroup in ffi/common/layout.h)."""

INJECTIONS = {
    "k-order": "other side: the same values in another order in sums over K, of all GEMMs but o_proj",
    "combine-order": "other side: combine in another order (flat for ep(R), ep(8) for flat)",
    "slice": "other side: the sign of one weight of o_proj in slice 5 of the middle layer",
    "tie": "both sides: two experts of the middle layer tie for the last place; other side: takes the higher id",
}


# ------------------------------------------------------------------ differences


@dataclass(frozen=True)
class Difference:
    """The first element that differs.

    Attributes:
        what: array, such as "logits".
        index: of the element.
        left, right: its values in hex and as numbers.
        differing, size: elements of the array, how many of them differ and how many there are.
        layer: first layer after which the stream differs; -1 for the embedding; the number of layers if the streams
            are equal and only the LM head is not; None if it was not looked for.
        row: first row whose stream differs there, None for the LM head.
    """

    what: str
    index: tuple[int, ...]
    left: str
    right: str
    differing: int
    size: int
    layer: int | None = None
    row: int | None = None

    def __str__(self):
        where = "" if self.layer is None else "; all streams are equal, up to the LM head" if self.row is None else (
            f"; the streams part in {'the embedding' if self.layer < 0 else f'layer {self.layer}'}, row {self.row}")
        return (f"{self.what} differ in {self.differing:,} of {self.size:,} values, first at {list(self.index)}: "
                f"{self.left} against {self.right}{where}")


def _bits(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def _hex(value: np.generic) -> str:
    return f"0x{value.tobytes()[::-1].hex()} ({value})"


def difference(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> Difference | None:
    """The first difference of the first array that differs; None if all bits agree.

    Raises:
        ValueError: other names, shapes or dtypes: the two runs are not comparable.
    """
    if list(left) != list(right):
        raise ValueError(f"expected the same arrays, got {list(left)} and {list(right)}")
    for name, a in left.items():
        a, b = np.asarray(a), np.asarray(right[name])
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(f"{name}: expected {a.dtype} {list(a.shape)} on both sides, got {b.dtype} {list(b.shape)}")
        differs = _bits(a) != _bits(b)
        if differs.any():
            at = tuple(int(i) for i in np.unravel_index(differs.argmax(), a.shape))
            return Difference(name, at, _hex(a[at]), _hex(b[at]), int(differs.sum()), a.size)
    return None


def located(found: Difference, left: np.ndarray, right: np.ndarray) -> Difference:
    """The difference, with the place where the streams [L + 1, t, d] of the two runs part."""
    differs = (_bits(left) != _bits(right)).any(-1)
    if not differs.any():
        return replace(found, layer=len(left) - 1)
    layer, row = (int(i) for i in np.argwhere(differs)[0])
    return replace(found, layer=layer - 1, row=row)


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        group: see the module's text.
        setting: activations and combine order.
        name: what is compared.
        passed: None if it could not be run.
        note: why it was not run, or what is wrong besides bits.
        values: compared.
    """

    group: str
    setting: str
    name: str
    passed: bool | None
    values: int = 0
    difference: Difference | None = None
    note: str = ""

    def __str__(self):
        verdict = {True: "PASS", False: "FAIL", None: "SKIP"}[self.passed]
        head = f"{verdict}  {self.group:<8} {self.setting:<24} {self.name}"
        if self.note:
            return f"{head}: {self.note}"
        return f"{head}: {self.difference}" if self.difference else f"{head} ({self.values:,} values)"


# ------------------------------------------------------------------ one way to run


class Step(NamedTuple):
    """What one pass of t rows gives; `rows` as `arrays` shows them.

    Attributes:
        rows: dict of arrays with one entry a row on axis 0 (logits, log-probability of the target, greedy choice and
            its log-probability, expert ids, stream), or on axis 2 (keys and values in flight, [L, k, 16, c]).
        cache: rows accepted as asked.
        streams: see `kernels.forward.Pass`.
    """

    rows: dict
    cache: KernelCache
    streams: jax.Array | None


def step(params, cache, tokens_t, parents_t, num_valid, targets_t, count, *, config, decode, num_tokens, mesh,
         trace) -> Step:
    """A pass and its LM head; afterwards the first `count` rows, a chain, are accepted."""
    how = {"config": config, "decode": decode, "mesh": mesh}
    out = kf.run_pass(params, cache, tokens_t, parents_t, num_valid, trace=trace, **how)
    choice = kf.greedy(params, out.stream, num_tokens=num_tokens, **how)
    rows = {
        "logits": kf.logits(params, out.stream, **how)[1],
        "log-probabilities": kf.token_logprobs(params, out.stream, targets_t, num_tokens=num_tokens, **how),
        "greedy tokens": choice.ids, "their log-probabilities": choice.logprobs,
        "expert ids": out.expert_ids.swapaxes(0, 1), "streams": out.stream,
        "keys": jnp.stack([x.keys for x in out.cache.flight]),
        "values": jnp.stack([x.values for x in out.cache.flight]),
    }
    cache = accept(out.cache, jnp.arange(MAX_ROWS), count)
    return Step(rows, cache if mesh is None else keep_placement(cache, config, mesh), out.streams)


jit_step = jax.jit(step, static_argnames=("config", "decode", "num_tokens", "mesh", "trace"))


@dataclass(frozen=True)
class Side:
    """Decoding in one way.

    Attributes:
        params: packed form, placed on `mesh`.
        max_length: positions of caches.
        mesh: None is one device.
    """

    params: dict
    config: ModelConfig
    decode: DecodeConfig
    num_tokens: int
    max_length: int
    mesh: jax.sharding.Mesh | None = None

    def empty(self) -> KernelCache:
        return init_cache(self.config, self.max_length, self.mesh)

    def step(self, cache, tokens, parents=None, valid=None, targets=None, count=None, trace=False) -> Step:
        """Rows `tokens` after the cache; by default a chain, all valid, all accepted."""
        t = len(tokens)
        parents = range(-1, t - 1) if parents is None else parents
        targets = [0] * t if targets is None else targets
        valid = t if valid is None else valid
        count = valid if count is None else count
        numbers = (np.asarray(x, np.int32) for x in (tokens, parents, valid, targets, count))
        out = jit_step(self.params, cache, *numbers, config=self.config, decode=self.decode, num_tokens=self.num_tokens,
                       mesh=self.mesh, trace=trace)
        return jax.block_until_ready(out)  # XLA's CPU rendezvous hangs with many programs in flight

    def chain(self, cache, tokens, targets=None, trace=False) -> Iterator[tuple[int, Step]]:
        """Tokens in blocks of 16 rows, the last one padded -> (valid rows, step) of each."""
        targets = [0] * len(tokens) if targets is None else targets
        for start in range(0, len(tokens), MAX_ROWS):
            part, target = tokens[start:start + MAX_ROWS], targets[start:start + MAX_ROWS]
            pad = (0, MAX_ROWS - len(part))
            out = self.step(cache, np.pad(part, pad), valid=len(part), targets=np.pad(target, pad), trace=trace)
            cache = out.cache
            yield len(part), out


def arrays(out: Step, rows: Sequence[int]) -> dict[str, np.ndarray]:
    """Some rows of a pass as NumPy, keys and values in flight included."""
    return {name: np.asarray(x)[:, :, rows] if name in ("keys", "values") else np.asarray(x)[rows]
            for name, x in out.rows.items()}


def stored(cache: KernelCache) -> dict[str, np.ndarray]:
    """Stored keys and values of every layer."""
    return {f"{name} of layer {i}": x for name, xs in zip(("keys", "values"), score.stored_bits(cache), strict=True)
            for i, x in enumerate(xs)}


# ------------------------------------------------------------------ a prompt, decoded tokens, a tree


class Decoded(NamedTuple):
    """A prompt and decoded tokens, n together, all of them run.

    Attributes:
        tokens: int32 [n].
        values: "logits" [n, v], "log-probabilities" [n - 1] of tokens[1:], and stored keys and values.
        tree: rows of a tree after them; see `Step.rows`.
        parents, guesses: int32 [16], that tree.
    """

    tokens: np.ndarray
    values: dict[str, np.ndarray]
    tree: dict[str, np.ndarray]
    parents: np.ndarray
    guesses: np.ndarray


def run_decode(side: Side, prompt: np.ndarray, count: int, seed: int) -> Decoded:
    """The prompt in blocks, `count` greedy tokens one by one, then a random tree of 16 rows."""
    logits, logprobs = [], []
    cache = side.empty()
    for valid, out in side.chain(cache, prompt, np.append(prompt[1:], 0)):
        rows = arrays(out, range(valid))
        logits.append(rows["logits"])
        logprobs.append(rows["log-probabilities"])
    logprobs[-1] = logprobs[-1][:-1]  # of no token
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(rows["greedy tokens"][-1]))
        logprobs.append(rows["their log-probabilities"][-1:])
        out = side.step(out.cache, tokens[-1:])
        rows = arrays(out, [0])
        logits.append(rows["logits"])
    rng = np.random.default_rng([seed, 1])
    parents, guesses = tree_of("random", rng), rng.integers(0, side.num_tokens, MAX_ROWS)
    tree = side.step(out.cache, guesses, parents=parents, count=0)
    values = {"logits": np.concatenate(logits), "log-probabilities": np.concatenate(logprobs)} | stored(out.cache)
    return Decoded(np.asarray(tokens, np.int32), values, arrays(tree, range(MAX_ROWS)), parents, guesses)


def streams_of(side: Side, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """Streams [L + 1, n, d] of given tokens, in the same blocks as `run_decode`."""
    out, parts = None, []
    for valid, out in side.chain(side.empty(), tokens[:prompt], trace=True):
        parts.append(np.asarray(out.streams)[:, :valid])
    for token in tokens[prompt:]:
        out = side.step(out.cache, [token], trace=True)
        parts.append(np.asarray(out.streams))
    return np.concatenate(parts, axis=1)


def run_steps(side: Side, prompt: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """The same by `decode.start` and `decode.decode_step`: what generation runs."""
    how = {"config": side.config, "num_tokens": side.num_tokens, "mesh": side.mesh,
           "decode": replace(side.decode, implementation="megakernel", prefill="exact")}
    state = steps.start(side.params, prompt, side.max_length, **how)
    tokens, logprobs = [], []
    for _ in range(count):
        tokens.append(int(state.token))
        logprobs.append(np.asarray(state.logprob))
        state = jax.block_until_ready(steps.jit_decode_step(side.params, state, **how))
    return {"tokens": np.asarray(tokens, np.int32), "log-probabilities": np.asarray(logprobs)} | stored(state.cache)


def tree_of(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Parents of 16 rows, int32; cut anywhere they still are a tree."""
    rows = np.arange(MAX_ROWS)
    parents = {"chain": rows - 1, "star": np.where(rows, 0, -1),
               "random": np.array([rng.integers(-1, i) if i else -1 for i in rows])}
    return parents[kind].astype(np.int32)


# ------------------------------------------------------------------ breaking one side on purpose


_HIDDEN_ROWS = ("o_proj", "unpooler")
_HIDDEN_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "pooler", "router", "input_norm", "ffn_norm",
                   "post_ffn_norm", "attention_residual_gate", "ffn_residual_gate")


def _reversed_rows(x: np.ndarray, axis: int) -> np.ndarray:
    """Blocks of 16 rows in reversed order; x [s, ..., rows of a slice, ...], rows on `axis`."""
    cut = x.reshape(*x.shape[:axis], x.shape[axis] // 16, 16, *x.shape[axis + 1:])
    return np.flip(cut, (0, axis)).reshape(x.shape)


def _reversed_columns(x: np.ndarray, blocks: int) -> np.ndarray:
    """Blocks of columns in reversed order, also of codes and scales."""
    cut = x.reshape(*x.shape[:-1], blocks, -1)
    return np.flip(cut, -2).reshape(x.shape)


def _other_k_order(config: ModelConfig, params: dict) -> dict:
    """The same model with columns of the stream, of h and of c (spec section 3.1) in reversed blocks of 16.

    Weights that make such columns have their rows moved along with the columns of those that take them, so all values
    are the same, and sums over K and sums of squares add them in another order.
    """
    d, m, f = (n // 16 for n in (config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size))

    def layer(p):
        out = {name: _reversed_rows(x, 1) if name in _HIDDEN_ROWS else
               _reversed_columns(x, d) if name in _HIDDEN_COLUMNS else x for name, x in p.items()}
        out["pooler"] = _reversed_rows(out["pooler"], 1)
        out["expert_norm"] = _reversed_columns(p["expert_norm"], m)
        for end in ("", "_scale"):
            if "gate_up" + end in p:
                out["gate_up" + end] = _reversed_columns(_reversed_rows(p["gate_up" + end], 3), m)
                out["down" + end] = _reversed_columns(p["down" + end], f)
        # Rows of y keep their order, and with it the combine.
        return out

    return {"embed": _reversed_rows(params["embed"], 2), "final_norm": _reversed_columns(params["final_norm"], d),
            "lm_head": _reversed_columns(params["lm_head"], d), "layers": [layer(p) for p in params["layers"]]}


def _with_tie(config: ModelConfig, params: dict, swapped: bool) -> dict:
    """In the middle layer the first and the last expert tie for the last place; `swapped`, each has the other's id."""
    i, k, last = config.num_hidden_layers // 2, config.num_experts_per_tok, config.num_local_experts - 1
    if k > last:
        raise ConfigError(f"inject: tie needs an expert that is not chosen, and all {k} are")
    p = {name: np.array(x, order="C") for name, x in params["layers"][i].items()}
    router = p["router"].reshape(last + 1, -1)
    router[last] = router[0]
    top = p["router_bias"].max()
    p["router_bias"][1:k] = top + 4
    p["router_bias"][[0, last]] = top + 2
    for name in p:
        if swapped and name.startswith(("gate_up", "down")):
            axis = 0 if name.endswith(("_global", "_input_scale")) else 1
            order = np.arange(last + 1)
            order[[0, last]] = last, 0
            p[name] = np.take(p[name], order, axis=axis)
    return params | {"layers": [p if j == i else layer for j, layer in enumerate(params["layers"])]}


def _with_other_sign(config: ModelConfig, packed: dict) -> dict:
    """The sign of the largest weight among the first 64 of o_proj in slice 5 of the middle layer."""
    packed = copy.deepcopy(packed)
    i = config.num_hidden_layers // 2
    start = layout(config, i)["dense.out"]
    words = packed["layers"][i]["dense"][5, start:start + 128].view(np.uint16)
    words[(words & 0x7FFF).argmax()] ^= 0x8000
    return packed


def injected(kind: str | None, config: ModelConfig, packed: dict) -> tuple[dict, dict]:
    """Packed params of this side and of the other side."""
    if kind == "slice":
        return packed, _with_other_sign(config, packed)
    if kind in ("k-order", "tie"):
        params = unpack_params(packed, config)
        if kind == "k-order":
            return packed, pack_params(_other_k_order(config, params), config)
        return tuple(pack_params(_with_tie(config, params, swapped), config) for swapped in (False, True))
    return packed, packed


# ------------------------------------------------------------------ the comparisons


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
        return _reversed_columns(streams, self.config.hidden_size // 16) if self.inject == "k-order" else streams

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


# ------------------------------------------------------------------ everything


def check_arguments(config: ModelConfig, activations, combine, devices: Sequence[int],
                    tokens: int) -> list[DecodeConfig]:
    """One DecodeConfig for each pair of activations and combine order; None takes all that apply.

    Raises:
        ConfigError: 4-bit activations without NVFP4 layers, an unknown name, a device count that does not divide 8,
            more devices than there are, sizes without a packed form, more tokens than the context.
    """
    check_packable(config)
    for mode in activations or ():
        if mode != "bf16" and not config.nvfp4_layers:
            raise ConfigError(f"activations: {mode} needs NVFP4 experts, and this checkpoint has none; use bf16")
    wrong = [d for d in devices if d not in DEVICE_COUNTS]
    if wrong or not devices:
        raise ConfigError(f"devices: expected some of {', '.join(map(str, DEVICE_COUNTS))}, got {wrong or 'none'}")
    here = len(jax.devices())
    if max(devices) > here:
        raise ConfigError(f"devices: expected {max(devices)}, got {here}; ask for them before JAX starts, with "
                          f"XLA_FLAGS=--xla_force_host_platform_device_count={max(devices)}, or name fewer")
    steps.cache_length(config, PROMPT + tokens + MAX_ROWS)
    modes = activations or (ACTIVATIONS if config.nvfp4_layers else ("bf16",))
    choices = [DecodeConfig(activations=mode, combine=order) for mode in modes for order in combine or COMBINES]
    for decode in choices:
        decode.check(config)
    return choices


def prepare(folder: str | Path, *, overlay: Sequence = (), activations: Sequence[str] | None = None,
            combine: Sequence[str] | None = None, tokens: int = 64, devices: Sequence[int] = DEVICE_COUNTS,
            seed: int = 0, quick: bool = False, inject: str | None = None) -> tuple[Bench, list[DecodeConfig]]:
    """Checks the arguments, then loads; see `run`."""
    if inject is not None and inject not in INJECTIONS:
        raise ConfigError(f"inject: expected one of {', '.join(INJECTIONS)}, got {inject!r}")
    folder, overlay, devices = Path(folder), tuple(overlay), tuple(sorted(set(devices)))
    require_checkpoint(folder)
    published = None if is_converted(folder) else open_published(folder, overlay=overlay)
    config = published.config if published else read_manifest(folder)["config"]
    choices = check_arguments(config, activations, combine, devices, tokens)
    _, params = load_params(folder, overlay=overlay, form="packed")
    tokenizer = Tokenizer.find(folder)
    num_tokens = min(config.vocab_size, tokenizer.size if tokenizer else config.vocab_size)
    here, there = injected(inject, config, jax.tree.map(np.array, params))
    prompt = np.random.default_rng([seed, 0]).integers(0, num_tokens, PROMPT).astype(np.int32)
    return Bench(config, here, there, published, folder, overlay, prompt, num_tokens, tokens, devices, seed, quick,
                 inject), choices


def run(folder: str | Path, *, report: Callable[[Row], None] = print, begin: Callable[[int], None] = lambda total: None,
        **choice) -> list[Row]:
    """All comparisons; reports each row as it is known.

    Args:
        folder: a published or converted checkpoint.
        begin: called once with how many rows there will be, before the first.
        overlay: folders whose tensors replace those of the same name.
        activations, combine: None takes all that apply.
        tokens: decoded after the prompt.
        devices: counts to compare with one device.
        seed: of prompt and trees.
        quick: fewer positions and row counts, and no threads and instruction sets.
        inject: a key of INJECTIONS; then only the groups that compare with the other side are run.

    Raises:
        CheckpointError, ConfigError, LibraryError: before anything is compared.
    """
    b, choices = prepare(folder, **choice)
    devices, quick, inject = b.devices, b.quick, b.inject
    modes = len({decode.activations for decode in choices})
    many = sum(d > 1 for d in devices)
    total = len(choices) * (1 + many + len(devices) + len(devices) + (not quick))
    total += 0 if inject else 3 + 3 * modes + (0 if quick else modes * (len(THREADS) + len(INSTRUCTION_SETS) - 1))
    begin(total)
    result: list[Row] = []

    def add(rows: Iterator[Row]):
        for row in rows:
            result.append(row)
            report(row)

    if not inject:
        add(check_packing(b))
    seen = set()
    for decode in choices:
        base = run_decode(b.side(decode), b.prompt, b.tokens, b.seed)
        add(check_devices(b, decode, base))
        add(check_score(b, decode, base))
        if not inject and decode.activations not in seen:  # rows and machine do not depend on the order of combining
            seen.add(decode.activations)
            add(check_rows(b, decode))
            if not quick:
                add(check_machine(b, decode, base))
    return result


def to_json(rows: Sequence[Row], **about) -> dict:
    """The result as plain data; `about` is added to it."""
    return {"passed": all(row.passed is not False for row in rows), **about,
            "rows": [asdict(row) for row in rows]}

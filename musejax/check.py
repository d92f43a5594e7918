"""`musejax check`: a checkpoint folder against the golden values that came with it.

`expected.npz` holds what the reference library computed (keys as written by the fixture script:
`input_ids`, `logits_fp32`, `topk_ids`, `topk_weights`, `hidden_canonical`, `logits_canonical`). Three comparisons:

exact       policy `exact` in one pass against the float32 logits and routes of the reference library.
steps       the same prompt in chunks and token by token, lengths around the window, against the one pass.
canon       policy `canon`, embedding, head and each layer alone, from its golden input stream: random weights are
            chaotic, so an end-to-end comparison of a rounding policy would only measure chaos.

Where layers have NVFP4 experts, those golden values do not apply, but for the steps. Then:

nvfp4       policy `exact`, experts dequantised, against the logits of the reference library with the same weights
            (`logits_nvfp4_w4a16_fp32`); `logits_nvfp4_w4a4_static`, 4-bit activations in policy `canon`, is reported
            and not judged: a code that flips moves everything after it.

A row whose choice of experts is a near tie may go either way. End to end such rows and those after them, which see
their keys, are counted and not judged; in the canon comparison the other choice is tried.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from musejax import cache as kv
from musejax.checkpoint import load_params
from musejax.config import DecodeConfig, ModelConfig
from musejax.info import ranges
from musejax.model import forward as fwd
from musejax.model.attention import Rows
from musejax.model.layer import decoder_layer
from musejax.numerics import CANON_F32_PROBS, EXACT
from musejax.sharding import make_mesh

LOGIT_BOUND = 2e-4
"""float32 sums in another order than the reference library's; 7e-5 was seen on the fixtures of two files."""

LOGIT_BOUND_CAP = 1e-2
"""Deep random models are chaotic: the reference library's own float32 logits leave the float64 streams by up to 1e-3
(14 layers). The bound then is three times that, at most this; of twenty mistakes in the model the least visible, a
bfloat16 router, moved logits by 0.02."""

EXACT_MARGIN = 1e-4
"""A selection margin below this can flip between two float32 implementations."""

# Bounds of the canon lines. Sums are float64 on both sides, so what differs is the last place of a float32 exp, sine,
# sigmoid or fused multiply-add, and now and then a rounding to bfloat16 that it flips: in 1 row of 100 at the fixtures'
# sizes, in 1 of 8 at width 4096.

ROW_BOUND = 2.0**-4
"""Largest error of a row whose experts agree, over RMS(row). One flipped rounding moves its row by 2^-7 as a rule, but
of 1.3 million flips made on purpose one in 1000 moved it by 0.03 and more, the worst by 0.07. Another expert moves it
by 0.6 and more. One unit in the last place of the element itself, 2^-7, is allowed besides: the branch is rounded
before it is added."""

CLEAN_BOUND = 2.0**-12
"""A row is clean if its largest error over RMS(row) is at most this: nothing in it was flipped."""

UNCLEAN_IN_LAYER, UNCLEAN = 0.75, 0.5
"""Shares of rows that may be unclean, in one layer and over all layers. A flipped key moves the later rows that see it:
seen were 0.40 in a layer of the default sizes (of 15,000), 0.69 where full layers rotate (of 9,600), and over the
layers of a model 0.18. A rounding point left out makes 0.95 and more of 20 rows unclean in each layer that has it."""

CANON_MARGIN = 2.0**-6
"""A selection margin below this can flip in the canon comparison: the flips made on purpose moved scores by up to
0.008, and by up to 0.03 with an output multiplier of 2."""

HEAD_BOUND = 2.0**-18
"""Largest error of canon logits, over the softcap: the head rounds the same values, so only the last places of a
float32 product and tanh differ (2^-22 seen). The head without one of its rounding points is off by 2^-8 and more."""

CHUNKS = (1, 3, 7, 16)
REQUIRED = ("input_ids", "logits_fp32", "topk_ids", "topk_weights", "hidden_canonical", "logits_canonical")
REQUIRED_NVFP4 = ("input_ids", "logits_nvfp4_w4a16_fp32")
STATIC = "logits_nvfp4_w4a4_static"

CANON_DECODE = DecodeConfig(policy=CANON_F32_PROBS, combine="flat")
"""As the golden values are made: probabilities in float32, experts added in slot order."""

SAME = 1e-5
"""Logits of a rounding policy closer than this come from the same rounded values."""


class CheckError(ValueError):
    """There are no golden values to compare with, or they do not belong to this checkpoint."""


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        worst: the largest deviation among judged rows, in the unit of the bound.
        index: where it is, such as (row, vocabulary id).
        judged, unjudged: how many rows (tokens).
        passed: None if no row could be judged.
        worst_unjudged: the largest deviation among the others, for information.
    """

    name: str
    worst: float
    bound: float
    index: tuple[int, ...]
    judged: int
    unjudged: int
    passed: bool | None
    note: str = ""
    worst_unjudged: float = 0.0

    def __str__(self):
        verdict = {True: "PASS" if self.judged else "NOTE", False: "FAIL", None: "OPEN"}[self.passed]
        rows = f"{self.judged} rows"
        if self.unjudged:
            rows += f" ({self.unjudged} not judged: worst {self.worst_unjudged:.3e})"
        where = f" at {self.index}" if self.index else ""
        return (f"{verdict}  {self.name:<34} worst {self.worst:.3e}{where}, bound {self.bound:.3e}, {rows}"
                + (f"; {self.note}" if self.note else ""))


def compare(name: str, got, want, bound: float, judged: int | None = None, note: str = "") -> Row:
    """Largest |got - want| over the first `judged` rows (None: all); NaN never passes."""
    total = len(want)
    judged = total if judged is None else judged
    if got.shape != want.shape:
        raise CheckError(f"{name}: expected shape {want.shape} as in expected.npz, got {got.shape}")
    error = np.abs(got.astype(np.float64) - want)
    error = np.where(np.isnan(error), np.inf, error)
    rest = float(error[judged:].max(initial=0))
    if not judged:
        return Row(name, 0.0, bound, (), 0, total, None, "the first row already has a near tie", rest)
    index = np.unravel_index(np.argmax(error[:judged]), error[:judged].shape)
    worst = float(error[index])
    return Row(name, worst, bound, tuple(map(int, index)), judged, total - judged, worst <= bound, note, rest)


def read_expected(path: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """The golden arrays.

    Raises:
        CheckError: no such file, missing arrays, or arrays of another model.
    """
    if not path.is_file():
        raise CheckError(f"{path}: expected golden values of this checkpoint, found no such file; "
                         "name another file with --expected")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as err:
        raise CheckError(f"{path}: expected a NumPy .npz archive, got {err}") from None
    required = REQUIRED_NVFP4 if config.nvfp4_layers else REQUIRED
    missing = [k for k in required if k not in arrays]
    if missing:
        raise CheckError(f"{path}: expected arrays {', '.join(required)}, missing {', '.join(missing)}")
    ids = arrays["input_ids"]
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise CheckError(f"{path}: input_ids: expected integers [t], got {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise CheckError(f"{path}: input_ids: expected ids of 0 to {config.vocab_size - 1}, got {ids.min()} to "
                         f"{ids.max()}")
    t, k, layers = len(ids), config.num_experts_per_tok, config.num_hidden_layers
    streams = (layers + 1, t, config.hidden_size)
    shapes = {"logits_fp32": (t, config.vocab_size), "topk_ids": (layers, t, k), "topk_weights": (layers, t, k),
              "hidden_canonical": streams, "hidden_fp32": streams, "logits_canonical": (t, config.vocab_size),
              REQUIRED_NVFP4[1]: (t, config.vocab_size), STATIC: (t, config.vocab_size)}
    for key, shape in shapes.items():
        if key in arrays and (arrays[key].shape != shape or arrays[key].dtype.kind not in "fiu"):
            raise CheckError(f"{path}: {key}: expected numbers of shape {shape} from config.json, got "
                             f"{arrays[key].dtype} of shape {arrays[key].shape}")
    return arrays


def clear_rows(margins_lt: np.ndarray) -> int:
    """Rows before the first one whose selection margin is below EXACT_MARGIN in any layer."""
    unclear = np.flatnonzero((margins_lt < EXACT_MARGIN).any(axis=0))
    return int(unclear[0]) if unclear.size else margins_lt.shape[1]


def logit_bound(params, config: ModelConfig, decode: DecodeConfig, expected) -> float:
    """LOGIT_BOUND, or more where the golden logits themselves are farther from the golden streams."""
    if "hidden_fp32" not in expected:
        return LOGIT_BOUND
    head = jax.jit(lambda p, s: fwd.softcap(fwd.raw_logits(p, s, config, decode), config))
    own = np.abs(np.asarray(head(params, jnp.asarray(expected["hidden_fp32"][-1]))) - expected["logits_fp32"]).max()
    return float(min(max(LOGIT_BOUND, 3 * own), LOGIT_BOUND_CAP)) if np.isfinite(own) else LOGIT_BOUND


def check_exact(params, config: ModelConfig, expected) -> tuple[list[Row], np.ndarray, int]:
    """-> (rows of the result, one-pass logits, how many token rows can be judged)."""
    decode = DecodeConfig(policy=EXACT, combine="flat")
    bound = logit_bound(params, config, decode, expected)
    tokens = jnp.asarray(expected["input_ids"], jnp.int32)
    logits, trace = jax.jit(partial(fwd.forward, config=config, decode=decode))(params, tokens)
    logits, trace = np.asarray(logits), jax.tree.map(np.asarray, trace)
    clear = clear_rows(trace.margins)
    note = ""
    if "hidden_fp32" in expected:
        off = np.abs(trace.streams - expected["hidden_fp32"])[:, :clear].max((1, 2), initial=0)
        parts = np.flatnonzero(~(off <= bound))
        note = f"streams part {f'after layer {parts[0] - 1}' if parts[0] else 'in the embedding'}" if parts.size else ""
    rows = [compare("exact: logits", logits, expected["logits_fp32"], bound, clear, note)]
    # In id order: the margin says nothing about two chosen experts that are close to each other.
    order, golden = (np.argsort(ids, axis=-1) for ids in (trace.expert_ids, expected["topk_ids"]))
    ids, want = np.take_along_axis(trace.expert_ids, order, -1), np.take_along_axis(expected["topk_ids"], golden, -1)
    wrong = (ids != want).any(-1).T.astype(float)  # [t, L]
    rows.append(compare("exact: expert ids (row, layer)", wrong, np.zeros_like(wrong), 0.0, clear))
    weights = np.take_along_axis(trace.expert_weights, order, -1).swapaxes(0, 1)
    want = np.take_along_axis(expected["topk_weights"], golden, -1).swapaxes(0, 1)
    rows.append(compare("exact: expert weights", weights, want, LOGIT_BOUND, clear))
    return rows, logits, clear


def check_nvfp4(params, config: ModelConfig, expected) -> tuple[list[Row], np.ndarray, int]:
    """-> as `check_exact`, for a checkpoint with NVFP4 experts."""
    decode = DecodeConfig(policy=EXACT, combine="flat")
    tokens = jnp.asarray(expected["input_ids"], jnp.int32)
    logits, trace = jax.jit(partial(fwd.forward, config=config, decode=decode))(params, tokens)
    logits, clear = np.asarray(logits), clear_rows(np.asarray(trace.margins))
    rows = [compare("nvfp4: logits", logits, expected[REQUIRED_NVFP4[1]], LOGIT_BOUND, clear)]
    if STATIC in expected:
        decode = DecodeConfig(policy=CANON_F32_PROBS, combine="flat", activations="nvfp4_static")
        static, _ = jax.jit(partial(fwd.forward, config=config, decode=decode))(params, tokens)
        line = compare("nvfp4_static: logits", np.asarray(static), expected[STATIC], SAME)
        same = int((np.abs(static - expected[STATIC]).max(-1) <= SAME).sum())
        rows.append(replace(line, judged=0, unjudged=len(tokens), passed=True,
                            note=f"{same} rows within the bound"))
    return rows, logits, clear


def run_in_chunks(append, head, empty: kv.Cache, tokens, chunk: int) -> np.ndarray:
    """Logits [t, v] of a sequence that goes through the cache in chunks, the last one padded.

    Args:
        append, head: jitted `forward.append` and logits, both with their parameters bound.
    """
    cache, out = empty, []
    for start in range(0, len(tokens), chunk):
        part = tokens[start:start + chunk]
        padded = jnp.asarray(np.pad(part, (0, chunk - len(part))), jnp.int32)
        stream, cache = append(cache, padded, jnp.int32(len(part)))
        out.append(np.asarray(head(stream))[:len(part)])
    return np.concatenate(out)


def check_steps(params, config: ModelConfig, expected, one_pass, clear: int, bound: float) -> list[Row]:
    """Cached decoding against the one pass, for lengths around the window that the golden prompt reaches."""
    decode = DecodeConfig(policy=EXACT, combine="flat")
    window, tokens = config.sliding_window, np.asarray(expected["input_ids"])
    lengths = [n for n in (window - 1, window, window + 1, 2 * window + 3) if 0 < n <= len(tokens)] or [len(tokens)]
    append = partial(jax.jit(partial(fwd.append, config=config, decode=decode)), params)
    head = partial(jax.jit(lambda p, s: fwd.softcap(fwd.raw_logits(p, s, config, decode), config)), params)
    empty = kv.init_cache(config, decode.policy, len(tokens))
    rows = []
    for chunk in CHUNKS:
        worst = []
        for n in lengths:
            got = run_in_chunks(append, head, empty, tokens[:n], chunk)
            name = f"steps: chunks of {chunk}, length {n}"
            worst.append(compare(name, got, one_pass[:n], bound, min(n, clear)))
        rows.append(max(worst, key=lambda r: (r.passed is False, r.judged > 0, r.worst)))
    return rows


def check_canon(params, config: ModelConfig, expected) -> list[Row]:
    """Embedding, each layer and the head alone, from its golden input to its golden output.

    Sums are float64 (`numerics.sum_dtype`) as those of the golden values are, here alone and for this reason: a float32
    sum flips so many roundings of keys that in 1 of 100 correct layers most rows move, and it flips the embedding too.
    """
    golden = expected["hidden_canonical"]
    t = golden.shape[1]
    with jax.enable_x64(True):
        embedded = jax.jit(partial(fwd.embed, config=config, decode=CANON_DECODE))(
            params, jnp.asarray(expected["input_ids"], jnp.int32))
        out = [compare("canon: embedding", np.asarray(embedded), golden[0], 0.0)]  # a norm and one rounding
        shares = []
        for i, layer in enumerate(params["layers"]):
            got, other = with_near_ties(canon_layer(i, t, config), layer, golden[i], golden[i + 1])
            line, share = judge_canon_layer(i, got, golden[i + 1], other)
            out += [line, share]
            shares.append(share)
        head = jax.jit(lambda p, s: fwd.softcap(fwd.raw_logits(p, s, config, CANON_DECODE), config))
        logits = np.asarray(head(params, jnp.asarray(golden[-1])))
    out.append(judge_all_layers(shares, t))
    bound = HEAD_BOUND * config.final_logit_softcapping
    return [*out, compare("canon: logits of the last stream", logits, expected["logits_canonical"], bound)]


def canon_layer(layer: int, t: int, config: ModelConfig):
    """-> jitted (parameters of the layer, stream [t, d]) -> LayerOutput, for positions from 0."""
    rows = Rows(jnp.arange(t, dtype=jnp.int32), jnp.int32(t))
    run = partial(decoder_layer, layer=layer, stored=None, length=None, config=config, decode=CANON_DECODE)
    return partial(jax.jit(run), rows=rows)


def with_near_ties(run, layer: dict, stream_td, want_td) -> tuple[np.ndarray, int]:
    """Output of one layer [t, d], where near ties go the way of the golden values; how many rows needed that.

    A row with a near tie is right if it is right with the best expert left out in place of the last one chosen.

    Args:
        run: (parameters of the layer, stream) -> LayerOutput.
    """
    result = run(layer, jnp.asarray(stream_td))
    got, margin = np.array(result.stream), np.asarray(result.routing.margin)
    last = np.asarray(result.routing.ids)[:, -1]
    other = 0
    for row in np.flatnonzero((row_error(got, want_td) > ROW_BOUND) & (margin < CANON_MARGIN)):
        without = {**layer, "router_bias": layer["router_bias"].at[last[row]].add(-2 * CANON_MARGIN)}
        again = np.asarray(run(without, jnp.asarray(stream_td)).stream)[row]
        if row_error(again, want_td[row]) <= ROW_BOUND:
            got[row], other = again, other + 1
    return got, other


def relative_error(got, want, last_place: float = 0.0):
    """|got - want| over RMS(row), each element's divisor enlarged by `last_place` of its own size."""
    want = np.asarray(want, np.float64)
    return np.abs(got - want) / (np.sqrt(np.mean(want**2, axis=-1, keepdims=True)) + last_place * np.abs(want))


def row_error(got, want):
    """Largest error of each row in the unit of ROW_BOUND, which allows 2^-7 of an element besides."""
    error = relative_error(got, want, 2.0**-7 / ROW_BOUND).max(-1)
    return np.where(np.isnan(error), np.inf, error)


def judge_canon_layer(layer: int, got, want, other: int = 0) -> list[Row]:
    """Two lines: the worst row, and the share of unclean rows.

    Args:
        other: rows that took the other expert of a near tie, for information.
    """
    error = row_error(got, want)[:, None]
    line = compare(f"canon: layer {layer}, error / RMS(row)", error, np.zeros_like(error), ROW_BOUND,
                   note=f"{other} by the other expert of a near tie" if other else "")
    unclean = ~(relative_error(got, want).max(-1) <= CLEAN_BOUND)  # NaN too
    allowed = max(UNCLEAN_IN_LAYER, 1 / len(want))
    share = judge_share(f"canon: layer {layer}, rows not clean", float(unclean.mean()), allowed, len(want))
    return [replace(line, index=(line.index[0],)), share]


def judge_all_layers(shares: list[Row], t: int) -> Row:
    """The share of unclean rows over all layers: what judges golden values of a single row."""
    rows = t * len(shares)
    allowed = max(UNCLEAN, 2 / rows)
    return judge_share("canon: all layers, rows not clean", float(np.mean([s.worst for s in shares])), allowed, rows)


def judge_share(name: str, share: float, allowed: float, rows: int) -> Row:
    """A line for a share of unclean rows. Of too few rows any number may be, and the line says so."""
    if allowed >= 1:
        return Row(name, share, allowed, (), 0, rows, True, "too few rows to judge by", share)
    return Row(name, share, allowed, (), rows, 0, share <= allowed)


def run(folder: str | Path, *, overlay=(), expected: str | Path | None = None,
        report: Callable[[str], None] = print) -> list[Row]:
    """All comparisons; reports each line as it is known.

    Args:
        folder: a published or converted checkpoint.
        expected: the golden values, default `folder/expected.npz`.

    Raises:
        CheckError, ConfigError, CheckpointError: before anything is computed.
    """
    folder = Path(folder)
    path = Path(expected) if expected else folder / "expected.npz"
    read_expected(path, ModelConfig.from_folder(folder))  # before the weights
    config, params = load_params(folder, mesh=make_mesh(), overlay=overlay)
    golden = read_expected(path, config)  # the tensors say which layers have NVFP4 experts
    result: list[Row] = []

    def add(rows):
        for row in rows:
            report(str(row))
        result.extend(rows)

    if config.nvfp4_layers:
        report(f"NOTE  layers {ranges(config.nvfp4_layers)} have NVFP4 experts: golden values of the BF16 experts "
               "(exact, canon) do not apply and are left out")
    exact, one_pass, clear = (check_nvfp4 if config.nvfp4_layers else check_exact)(params, config, golden)
    add(exact)
    add(check_steps(params, config, golden, one_pass, clear, exact[0].bound))
    if not config.nvfp4_layers:
        add(check_canon(params, config, golden))
    return result


def to_json(rows: list[Row]) -> dict:
    """The result as plain data; JSON has no infinity, so it becomes null."""
    def plain(row):
        return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in asdict(row).items()}

    return {"passed": not any(r.passed is False for r in rows), "rows": [plain(r) for r in rows]}

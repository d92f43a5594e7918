"""What begins and ends a pass, on the GPU against the CPU library in the same process.

Bits are the CPU's, but for the LM head's GEMM: the tensor cores add inside a range of K in an order of their own. Its
bound is the design's for GEMM outputs: 2^-14 of the row's RMS in float32, and 99.8% equal once rounded to bfloat16.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import F32, TWO, in_order, random_bf16, round_bf16, tree, tree_sum

from musejax.config import MINI
from musejax.packing import pack_head
from musejax.params import BF16

ROWS = 16
COUNTS = (1, 2, 7, 8, 9, 15)
ERRORS = (RuntimeError, ValueError)

HEADS = {
    "one MMA a range": replace(TWO, vocab_size=448),  # slices of 56: the last tile is half empty
    "slices narrower than a tile": replace(TWO, vocab_size=40),
    "K 640": replace(TWO, hidden_size=640),
    "one chunk": replace(TWO, hidden_size=1024),
    "K 8192": replace(TWO, hidden_size=8192, vocab_size=1096),
    "more tiles than warps": replace(TWO, vocab_size=202048),
}
heads = pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)


def operands_of(config, seed=0):
    """stream [16, d], final_norm [d], packed LM head."""
    rng = np.random.default_rng(seed)
    d = config.hidden_size
    stream = rng.standard_normal((ROWS, d)).astype(F32)
    norm = (1 + 0.1 * rng.standard_normal(d, F32)).astype(BF16)
    weight = random_bf16(rng, (8, config.vocab_size // 8, d), d**-0.5)
    return stream, norm, pack_head(config, weight)


def begin(slice_=0):
    return np.int32(slice_)


def assert_same_but_nan(a, b):
    """Same bits, or NaN in both: which NaN is the hardware's."""
    a, b = np.asarray(a), np.asarray(b)
    assert_same_bits(np.isnan(a), np.isnan(b))
    assert_same_bits(np.where(np.isnan(a), 0, a), np.where(np.isnan(b), 0, b))


def expected_top(raw, top, limit, vocab):
    """values, ids [s, t, top]: larger first, NaN as -inf, ties to the lower id; -inf and `vocab` for none."""
    s, _, n = raw.shape
    x = np.where(np.isnan(raw), -np.inf, raw)
    ids = np.arange(s * n, dtype=np.int32).reshape(s, 1, n)
    order = np.argsort(np.where(ids < limit, -x, np.inf), axis=-1, kind="stable")
    # -(-inf) sorts with what is beyond the limit; lower ids come first, and those are within it.
    values, chosen = np.take_along_axis(x, order, -1), np.take_along_axis(np.broadcast_to(ids, x.shape), order, -1)
    there = chosen < limit
    return np.where(there, values, -np.inf).astype(F32)[..., :top], np.where(there, chosen, vocab)[..., :top]


# ------------------------------------------------------------------ the beginning of a pass


@pytest.mark.parametrize("half", [8, 32])
def test_angles(twins, half):
    config = replace(TWO, head_dim=2 * half, num_hidden_layers=3, layer_types=(), layer_rope_theta=(5e5, 1e4, 0.0))
    positions = np.array([0, 1, 2, 255, 4095, 131071, 2**20 + 1, 2**24 + 1], np.int32)
    cpu, gpu = twins(config).both("angles", positions)
    assert_same_bits(cpu, gpu)
    assert np.abs(gpu[:, :, 0] ** 2 + gpu[:, :, 1] ** 2 - 1).max() < 1e-6


@pytest.mark.parametrize("width", [128, 640, 1024, 4096, 8192, 16384])
@pytest.mark.parametrize("t", [1, 7, 16])
def test_embed_norm(twins, width, t):
    rng = np.random.default_rng(width)
    rows = random_bf16(rng, (8, t, width // 8)) * np.exp2(rng.integers(-20, 20, (1, t, 1))).astype(BF16)
    cpu, gpu = twins(replace(TWO, hidden_size=width)).both("embed_norm", rows)
    assert_same_bits(cpu, gpu)


def test_embed_norm_of_zeros_and_nan(twins):
    rows = np.zeros((8, 3, 16), BF16)
    rows[:, 1] = 1
    rows[3, 2, 5] = np.nan
    cpu, gpu = twins(TWO).both("embed_norm", rows)
    assert_same_but_nan(cpu, gpu)
    assert not gpu[0].any() and np.isfinite(gpu[1]).all() and np.isnan(gpu[2]).all()


# ------------------------------------------------------------------ LM head


@heads
def test_head_against_the_cpu(twins, compare, config):
    cpu, gpu = twins(config).both("head", *operands_of(config), begin(), num_tokens=None, top=2)
    rms = np.sqrt(np.mean(np.square(cpu[0]), axis=-1, keepdims=True))
    compare("raw logits", cpu[0], gpu[0], 2.0**-14 * rms)
    assert np.mean(round_bf16(cpu[0]) == round_bf16(gpu[0])) >= 0.998
    for got, want in zip(gpu[1:], expected_top(gpu[0], 2, config.vocab_size, config.vocab_size), strict=True):
        assert_same_bits(got, want)


@heads
def test_head_rows_do_not_depend_on_each_other(twins, config):
    """1 to 16 rows, rows in another order, beside junk: the same bits a row."""
    stream, norm, lm_head = operands_of(config)
    pair = twins(config)

    def run(rows):
        return pair.on_gpu("head", rows, norm, lm_head, begin(), num_tokens=None, top=3)

    want = run(stream)
    for t in COUNTS:
        for got, all_rows in zip(run(stream[:t]), want, strict=True):
            assert_same_bits(got, all_rows[:, :t])
    order = np.random.default_rng(1).permutation(ROWS)
    for got, all_rows in zip(run(stream[order]), want, strict=True):
        assert_same_bits(got, all_rows[:, order])
    junk = stream.copy()
    junk[1::2] = np.array([np.nan, np.inf, 1e30, 0], F32).repeat(2)[:, None]
    for got, all_rows in zip(run(junk), want, strict=True):
        assert_same_bits(got[:, ::2], all_rows[:, ::2])


@heads
def test_head_slices_do_not_depend_on_each_other(twins, config):
    """1, 2 or 4 slices a device: the bits of 8 on one."""
    stream, norm, lm_head = operands_of(config)
    pair, limit = twins(config), config.vocab_size - 3
    want = pair.on_gpu("head", stream, norm, lm_head, begin(), num_tokens=limit, top=2)
    for first, slices in ((0, 1), (7, 1), (2, 2), (4, 4)):
        part = slice(first, first + slices)
        got = pair.on_gpu("head", stream, norm, lm_head[part], begin(first), num_tokens=limit, top=2)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b[part])


@pytest.mark.parametrize("width", [128, 1024, 4096])
def test_head_order_of_k(twins, width):
    """With one product a range the order inside a range is gone: the CPU's bits, and others if ranges change places."""
    config = replace(TWO, hidden_size=width)
    rng, parts = np.random.default_rng(width), max(8, width // 128)
    stream = np.zeros((ROWS, parts, width // parts), F32)
    stream[..., 3] = rng.standard_normal((ROWS, parts)) * np.exp2(rng.integers(-8, 8, (ROWS, parts)))
    weight = rng.choice([-2, -1, 1, 2], (8, config.vocab_size // 8, parts, width // parts)).astype(BF16)
    norm = np.ones(width, BF16)

    def run(which, order):
        head = pack_head(config, weight[:, :, order].reshape(8, -1, width))
        rows = stream[:, order].reshape(ROWS, width)
        return which("head", rows, norm, head, begin(), num_tokens=None, top=1)[0]

    pair, ascending = twins(config), np.arange(parts)
    got = run(pair.on_gpu, ascending)
    assert_same_bits(got, run(pair.on_cpu, ascending))
    assert (got != run(pair.on_gpu, ascending[::-1])).mean() > 0.02, "this test would see another order"


def test_head_ties_nan_and_limit(twins):
    """Equal logits go to the lower id, NaN comes last, ids from num_tokens on do not exist."""
    config, limit = HEADS["one MMA a range"], 6 * 56 + 20
    stream, norm, _ = operands_of(config)
    weight = random_bf16(np.random.default_rng(5), (8, 56, config.hidden_size), 0.1)
    weight[:, 3] = weight[:, 40] = weight[:, 7]
    weight[:, 20] = weight[:, 21] = 0  # +0 twice
    weight[5, 11] = np.nan
    operands = stream, norm, pack_head(config, weight), begin()
    raw, best, ids = twins(config).on_gpu("head", *operands, num_tokens=limit, top=56)
    assert np.isnan(raw[5, :, 11]).all() and np.isnan(raw).sum() == ROWS
    values, chosen = expected_top(raw, 56, limit, config.vocab_size)
    assert_same_bits(ids, chosen)
    assert_same_bits(best, values)
    assert (ids[5, :, -1] == 5 * 56 + 11).all() and (ids[7] == 448).all() and (ids[6, :, 20:] == 448).all()
    at = {n: np.argmax(ids[0] == n, axis=1) for n in (3, 7, 40)}
    assert ((at[7] - at[3] == 1) & (at[40] - at[7] == 1)).all()


def test_head_all_nan(twins):
    """A row of NaN: lowest ids, -inf, and no other row notices."""
    config = HEADS["one MMA a range"]
    stream, norm, lm_head = operands_of(config)
    want = twins(config).on_gpu("head", stream, norm, lm_head, begin(), num_tokens=None, top=3)
    stream[2, 5] = np.nan
    raw, best, ids = twins(config).on_gpu("head", stream, norm, lm_head, begin(), num_tokens=None, top=3)
    assert np.isnan(raw[:, 2]).all() and np.isneginf(best[:, 2]).all()
    assert_same_bits(ids[:, 2], (56 * np.arange(8)[:, None] + np.arange(3)).astype(np.int32))
    for got, old in zip((raw, best, ids), want, strict=True):
        assert_same_bits(np.delete(got, 2, axis=1), np.delete(old, 2, axis=1))


# ------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("num_tokens", [None, 300, 1])
@pytest.mark.parametrize("vocab", [40, 512, 8 * 65600], ids=lambda v: f"vocab {v}")  # the last: two rounds of leaves
def test_logprobs(twins, vocab, num_tokens):
    config = replace(TWO, vocab_size=vocab)
    pair, rng, width = twins(config), np.random.default_rng(vocab), vocab // 8
    raw = (2 * rng.standard_normal((8, 3, width))).astype(F32)
    limit = min(num_tokens or vocab, vocab)
    flat = raw.swapaxes(0, 1).reshape(3, -1)
    largest = np.where(np.arange(vocab) < limit, flat, -np.inf).max(1).astype(F32)
    cpu, gpu = pair.both("head_sums", raw, largest, begin(), num_tokens=num_tokens)
    assert_same_bits(cpu, gpu)
    part = pair.on_gpu("head_sums", raw[4:6], largest, begin(4), num_tokens=num_tokens)
    assert_same_bits(part, gpu[4:6])
    cpu, gpu = pair.both("logprob", flat[:, 0].copy(), largest, gpu)
    assert_same_bits(cpu, gpu)


def test_order_of_sums_would_be_seen(twins):
    """Other orders of the same terms give other bits: of leaves, and of columns inside a tree."""
    config = replace(TWO, vocab_size=8 * 1024, final_logit_softcapping=30.0)
    rng = np.random.default_rng(2)
    raw = (8 * rng.standard_normal((8, ROWS, 1024))).astype(F32)
    largest = raw.max((0, 2))
    pair = twins(config)
    sums = pair.on_gpu("head_sums", raw, largest, begin(), num_tokens=None)
    backwards = pair.on_gpu("head_sums", raw[..., ::-1].copy(), largest, begin(), num_tokens=None)
    assert (sums != backwards).any()
    terms = np.exp(rng.standard_normal((64, 1024))).astype(F32)
    sequential = in_order(in_order(terms.reshape(64, -1, 16), -1), -1)
    assert (tree_sum(terms) != sequential).any() and (tree(terms[:, :16]) != in_order(terms[:, :16], -1)).any()


def test_softcap(twins):
    rng = np.random.default_rng(7)
    some = rng.standard_normal(100_000) * np.exp2(rng.integers(-30, 30, 100_000))
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38]
    raw = np.concatenate([special, some]).astype(F32)
    for config in (TWO, MINI, replace(TWO, output_multiplier=2.0**0.5, final_logit_softcapping=30.0)):
        cpu, gpu = twins(config).both("softcap", raw)
        assert_same_but_nan(cpu, gpu)
        assert np.isnan(gpu[4]) and np.isfinite(np.delete(gpu, 4)).all() and np.signbit(gpu[1])


# ------------------------------------------------------------------ programs, and what is wrong


def test_graph_replays_have_the_same_bits(twins, gpu):
    """A program of all targets, again and again: from its second run on XLA replays a recorded graph."""
    config = HEADS["one chunk"]
    call = twins(config).gpu[1]
    stream, norm, lm_head = jax.device_put(operands_of(config), gpu)

    @jax.jit
    def step(stream, positions):
        raw, best, ids = call.head(stream, norm, lm_head, jnp.int32(0), num_tokens=None, top=1)
        largest = best[..., 0].max(0)
        sums = call.head_sums(raw, largest, jnp.int32(0), num_tokens=None)
        rows = stream.reshape(ROWS, 8, -1).swapaxes(0, 1).astype(jnp.bfloat16)
        return (raw, best, ids, call.logprob(largest, largest, sums), call.softcap(raw), call.angles(positions),
                call.embed_norm(rows))

    positions = jnp.arange(ROWS, dtype=jnp.int32)
    want = [np.asarray(x) for x in step(stream, positions)]
    for _ in range(5):
        other = step(stream + 1, positions + 1)  # other values in between
        for got, first in zip(step(stream, positions), want, strict=True):
            assert_same_bits(got, first)
        assert (np.asarray(other[0]) != want[0]).any()


@pytest.mark.parametrize(("change", "text"), [
    ({"stream": np.zeros((3, 64), F32)}, r"head: expected \[3,128\], got \[3,64\] \(argument stream\)"),
    ({"stream": np.zeros((3, 128), BF16)}, r"head: expected float32, got bfloat16 \(argument stream\)"),
    ({"stream": np.zeros((17, 128), F32)}, r"head: expected at most 16 rows, got 17 \(argument stream\)"),
    ({"norm": np.zeros(64, BF16)}, r"head: expected \[128\], got \[64\] \(argument final_norm\)"),
    ({"lm_head": np.zeros((8, 256), np.uint8)}, r"head: expected \[8,\d+\], got \[8,256\] \(argument lm_head\)"),
    ({"begin": np.zeros(1, np.int32)}, r"head: expected \[\], got \[1\] \(argument begin\)"),
    ({"top": 57}, r"head: expected 1 to the vocabulary of a slice, got 57 \(argument top\)"),
    ({"top": 0}, r"head: expected 1 to the vocabulary of a slice, got 0 \(argument top\)"),
])
def test_wrong_operands_of_head(twins, change, text):
    """The error says what was expected, as on the CPU, and the next call works."""
    config = HEADS["one MMA a range"]
    pair = twins(config)
    stream, norm, lm_head = operands_of(config)
    right = {"stream": stream[:3], "norm": norm, "lm_head": lm_head, "begin": begin(), "top": 1}
    for run in (pair.on_cpu, pair.on_gpu):
        wrong = right | change
        with pytest.raises(ERRORS, match=text):
            run("head", *(wrong[k] for k in ("stream", "norm", "lm_head", "begin")), num_tokens=None, top=wrong["top"])
    want = pair.on_gpu("head", stream, norm, lm_head, begin(), num_tokens=None, top=1)
    got = pair.on_gpu("head", right["stream"], norm, lm_head, begin(), num_tokens=None, top=1)
    assert_same_bits(got[0], want[0][:, :3])


@pytest.mark.parametrize(("name", "operands", "attributes", "text"), [
    ("embed_norm", [np.zeros((8, 4, 8), BF16)], {},
     r"embed_norm: expected \[8,4,16\], got \[8,4,8\] \(argument rows\)"),
    ("angles", [np.zeros(4, F32)], {}, r"angles: expected int32, got float32 \(argument positions\)"),
    ("head_sums", [np.zeros((8, 4, 8), F32), np.zeros(4, F32), begin()], {"num_tokens": None},
     r"head_sums: expected \[8,4,64\], got \[8,4,8\] \(argument raw\)"),
    ("logprob", [np.zeros(4, F32), np.zeros(4, F32), np.zeros((4, 4), F32)], {},
     r"logprob: expected \[8,4\], got \[4,4\] \(argument sums\)"),
    ("softcap", [np.zeros(4, np.int32)], {}, r"softcap: expected float32, got int32 \(argument raw\)"),
])
def test_wrong_operands(twins, name, operands, attributes, text):
    pair = twins(TWO)
    for run in (pair.on_cpu, pair.on_gpu):
        with pytest.raises(ERRORS, match=text):
            run(name, *operands, **attributes)


@pytest.mark.parametrize("name", ["embed_norm", "softcap"])
def test_nothing_to_do(twins, name):
    """No rows: empty results on both."""
    operand = np.zeros((8, 0, 16), BF16) if name == "embed_norm" else np.zeros(0, F32)
    for out in twins(TWO).both(name, operand):
        assert out.size == 0

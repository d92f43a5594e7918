"""The order of sums in the kernels, bit for bit: sums of squares, sums over K, and that other orders would be seen.

Attention's order: test_attention_kernel.py.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import (
    F32,
    SMALL,
    TWO,
    WIDE,
    centred_norm,
    in_order,
    k_sum,
    math_h,
    model_from,
    model_of,
    one_pass,
    random_cache,
    random_host_params,
    rms_norm,
    round_bf16,
    slices,
    tokens_of,
    tree_sum,
    whole,
    wide,
)
from phase_inputs import ROWS, empty_keys, heads_last, layers, row_state

from musejax import nvfp4
from musejax.config import DecodeConfig
from musejax.kernels.calls import Call
from musejax.params import BF16

# ------------------------------------------------------------------ sums of squares


@pytest.mark.parametrize("hidden", [128, 1024, 2048])  # slices of 16, 128 and 256 columns: less than a leaf, 2, 4
def test_order_of_sums_of_squares(hidden):
    """Bit for bit. Probes, too small to count in the sum, lie halfway between two bf16 values once they are normed: a
    factor that is off by one unit in the last place pushes them over. The value projection passes them on."""
    config, rng = replace(TWO, hidden_size=hidden), np.random.default_rng(hidden)
    host, eps = random_host_params(config), config.rms_norm_eps
    p, probes = host["layers"][1], np.sort(rng.choice(hidden, hidden // 4, replace=False))
    p["input_norm"] = np.zeros_like(p["input_norm"])
    w = np.zeros((config.kv_width, hidden), BF16)
    w[np.arange(len(probes)), probes] = 1
    p["v_proj"] = w.reshape(p["v_proj"].shape)

    stream = (rng.uniform(1, 2, (ROWS, hidden)) * np.exp2(rng.integers(-4, 5, (ROWS, hidden)))).astype(F32)
    stream[:, probes] = 0
    factor = rms_norm(stream, eps)[:, :, None].max(1) / stream.max(1)[:, None]
    halfway = (2 * rng.integers(128, 256, (ROWS, len(probes))) + 1) * 2.0**-40
    stream[:, probes] = halfway / factor
    *_, flight = Call(config, DecodeConfig()).attn_in(
        1, jnp.asarray(stream), jnp.zeros((0, ROWS, 2, 32)), row_state(), model_from(config, host).packed["layers"][1],
        empty_keys(config, 1), empty_keys(config, 16))
    got = heads_last(flight.values).reshape(ROWS, -1)[:, :len(probes)]
    assert_same_bits(got, centred_norm(stream, p["input_norm"], eps)[:, probes])

    squares = stream * stream
    others = {
        "column after column": in_order(squares, -1),
        "slices from the last": in_order(tree_sum(squares.reshape(ROWS, 8, -1))[:, ::-1], -1),
        "leaves of 16": in_order(in_order(tree_sum(squares.reshape(ROWS, 8, -1, 16)), -1), -1),
    }
    if hidden == 128:  # where a slice is 16 columns this is the order
        del others["leaves of 16"]
    for name, total in others.items():
        scale = F32(1) / np.sqrt(total / F32(hidden) + F32(eps))
        assert (round_bf16(stream[:, probes] * scale[:, None]) != got).any(), f"this test would see: {name}"


# ------------------------------------------------------------------ sums over K


def sparse_rows(rng, t, k, chunk, ranges):
    """Rows [t, k] with one sum a range: large ones that cancel but for rounding, and small ones.

    A range holds 2 x in its first half and -x in its second: x in any order, and other bits of the whole sum if the
    range were cut in two.
    """
    length, parts = chunk // ranges, k // chunk * ranges
    x = rng.uniform(1, 2, (t, parts)) * np.exp2(rng.integers(0, 4, (t, parts)))
    large = rng.uniform(1, 2, (t, parts // 2)) * np.exp2(rng.integers(18, 26, (t, parts // 2)))
    for row, order in enumerate(rng.permuted(np.tile(np.arange(parts), (t, 1)), axis=1)):
        some = order[:2 * (parts // 3)].reshape(-1, 2)
        for pair, value in zip(some, large[row], strict=False):
            x[row, pair] = value, -value
    out, row, half = np.zeros((t, parts, length)), np.arange(t)[:, None], length // 2
    out[row, np.arange(parts), rng.integers(0, half, (t, parts))] = 2 * x
    out[row, np.arange(parts), rng.integers(half, length, (t, parts))] = -x
    return out.reshape(t, k).astype(BF16)


def weight_of_ones(rng, shape):
    """1 or 2 of either sign, the same along K, so that what cancels in x cancels."""
    return np.broadcast_to(rng.choice([-2, -1, 1, 2], (*shape[:-1], 1)), shape).astype(F32)


def assert_order_of_k(got, x, w, chunk, ranges):
    """got is the sum of x W^T in the stated order, and not in two others."""
    products = x[:, None, :] * w[None]
    assert_same_bits(got, round_bf16(k_sum(products, chunk, ranges)))
    backwards = round_bf16(k_sum(products[..., ::-1], chunk, ranges))
    assert (got != backwards).mean() > 0.02, "this test would see another order"


@pytest.mark.parametrize("width", [128, 512, 1024, 2048, 4096])
def test_order_of_k_dense(width):
    """Chunks of min(K, 1024) in ascending order, each 8 ranges in ascending order."""
    config, rng = replace(TWO, num_attention_heads=width // 16, head_dim=16), np.random.default_rng(width)
    host = random_host_params(replace(config, num_local_experts=8))
    w = weight_of_ones(rng, host["layers"][0]["o_proj"].shape)
    host["layers"][0]["o_proj"] = w.astype(BF16)
    model = model_from(config, host)
    x = sparse_rows(rng, ROWS, width, min(width, 1024), 8)
    o = jnp.asarray(x.reshape(ROWS, -1, 16).swapaxes(0, 1))
    got = wide(whole(Call(config, DecodeConfig()).attn_out(0, o, model.packed["layers"][0])))
    assert_order_of_k(got, wide(x), w.reshape(-1, width), min(width, 1024), 8)


@pytest.mark.parametrize("width", [128, 512, 1024, 2048])
@layers
def test_order_of_k_experts(width, layer):
    """BF16 as dense; NVFP4 in 8 ranges of K, or in ranges of 64 where those would cut a tile of 64."""
    config, rng = replace(TWO, moe_intermediate_size=width), np.random.default_rng(width)
    host = random_host_params(config)
    p, e = host["layers"][layer], config.num_local_experts
    w = weight_of_ones(rng, (8, e, config.moe_hidden_size // 8, width))
    if layer:
        codes = nvfp4.e2m1_encode(w)
        p["down"], p["down_scale"] = nvfp4.pack(codes), np.ones_like(p["down_scale"])
        p["down_global"] = np.ones_like(p["down_global"])
    else:
        p["down"] = w.astype(BF16)
    model = model_from(config, host)
    chunk, ranges = (min(width, 1024), 8) if not layer else (width, 8 if width % 512 == 0 else width // 64)
    k = config.num_experts_per_tok
    x = sparse_rows(rng, ROWS * k, width, chunk, max(ranges, 4))
    ids = np.stack([rng.permutation(e)[:k] for _ in range(ROWS)]).astype(np.int32)
    got = wide(whole(Call(config, DecodeConfig()).experts_down(layer, slices(x), jnp.asarray(ids),
                                                               model.packed["layers"][layer], jnp.int32(0))))
    rows = w.swapaxes(0, 1).reshape(e, -1, width)[ids.reshape(-1)]
    products = wide(x)[:, None, :] * rows
    if ranges == 2:  # two values in either: with the order inside a range, which is a platform's own
        exact = products.astype(np.float64).sum(-1)
        assert (np.abs(got - exact) <= 2.0**-20 * np.abs(products).max(-1) + 2.0**-8 * np.abs(exact)).all()
        return
    assert_same_bits(got, round_bf16(k_sum(products, chunk, ranges)))
    assert (got != round_bf16(k_sum(products[..., ::-1], chunk, ranges))).mean() > 0.02


def test_order_of_k_router():
    """The router in float32: as dense; scores show it through the sigmoid."""
    config, rng, math = replace(TWO, hidden_size=2048, output_multiplier=0.5), np.random.default_rng(8), math_h()
    host = random_host_params(config)
    p = host["layers"][0]
    p["router"] = weight_of_ones(rng, p["router"].shape) * F32(2.0**-6)
    for name in ("ffn_norm", "attention_residual_gate"):  # the same factor for every column
        p[name] = np.zeros_like(p[name])
    model = model_from(config, host)
    stream = wide(sparse_rows(rng, ROWS, 2048, 1024, 8))
    got, _, scores = Call(config, DecodeConfig()).pool(0, jnp.asarray(stream), slices(np.zeros_like(stream)),
                                                       model.packed["layers"][0])
    x = centred_norm(np.asarray(got), p["ffn_norm"], config.rms_norm_eps)
    logits = k_sum(x[:, None] * p["router"].reshape(-1, 2048), 1024, 8)
    assert_same_bits(whole(scores), math("sigmoid", logits * F32(0.5)))
    other = k_sum((x[:, None] * p["router"].reshape(-1, 2048))[..., ::-1], 1024, 8)
    assert (whole(scores) != math("sigmoid", other * F32(0.5))).any()


# ------------------------------------------------------------------ whole passes


def permuted_pooling(config, host, order):
    """The same function with the channels of the experts' width in another order."""
    m, out = config.moe_hidden_size, {**host, "layers": []}
    for p in host["layers"]:
        new = {name: p[name].reshape(m, -1)[order].reshape(p[name].shape)
               for name in ("pooler", "expert_norm", "post_expert_norm")}
        new |= {name: p[name][..., order] for name in ("gate_up", "unpooler")}
        down = p["down"].swapaxes(0, 1).reshape(config.num_local_experts, m, -1)[:, order]
        new["down"] = down.reshape(-1, 8, m // 8, down.shape[-1]).swapaxes(0, 1)
        out["layers"].append({name: np.ascontiguousarray(new.get(name, x)) for name, x in p.items()})
    return out


def test_order_of_k_is_seen():
    """A model whose pooled channels come in another order is the same function, and close, but not the same bits."""
    config = replace(WIDE, nvfp4_layers=())
    host = random_host_params(config)
    order = np.random.default_rng(0).permutation(config.moe_hidden_size)
    a, b = (one_pass(model_from(config, h), random_cache(config, 30, 64), tokens_of(config, 8))
            for h in (host, permuted_pooling(config, host, order)))
    error = np.abs(np.asarray(a.stream) - b.stream)
    assert np.median(error) < 2.0**-7, "close: rounding differences of bf16, in units of a stream of RMS 1"
    with pytest.raises(AssertionError, match=r"elements differ .*first at \(\d+, \d+\)"):
        assert_same_bits(a.stream, b.stream)


def test_order_of_combine_is_seen():
    model, tokens = model_of(SMALL), tokens_of(SMALL, 8)
    flat, ep = (one_pass(model, random_cache(SMALL, 30, 64), tokens, decode=DecodeConfig(combine=c))
                for c in ("flat", "ep(8)"))
    with pytest.raises(AssertionError, match=r"elements differ .*first at \(\d+, \d+\)"):
        assert_same_bits(flat.stream, ep.stream)

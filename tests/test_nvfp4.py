"""NVFP4 arithmetic: known values of the format, and the bits of the NumPy reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax import nvfp4

F32 = np.float32


# ------------------------------------------------------------------ known values


def test_trap_15_decoding():
    packed = np.frombuffer(bytes.fromhex("2B7F10943AE105C8"), np.uint8)[None]
    scale = np.array([[0x39]], np.uint8).view(nvfp4.E4M3)
    want = [-0.10546875, 0.0703125, -0.421875, 0.421875, 0, 0.03515625, 0.140625, -0.03515625, -0.0703125, 0.10546875,
            0.03515625, -0.28125, 0.2109375, 0, -0.0, -0.140625]
    assert_same_bits(nvfp4.dequantize(packed, scale, F32(0.0625)), np.array([want], F32))
    assert_same_bits(np.asarray(jax.jit(nvfp4.grid)(packed, scale)) * F32(0.0625), np.array([want], F32))


TRAP_17 = np.array([[.1, -.25, .3, 1, -2.2, 3.05, 0, 4.9, -6, .6, 1.4, -1.9, 2.6, .9, -.05, 5.2]], F32)
TRAP_17_VALUES = [0, -0.0, .5, 1, -2, 3, 0, 4, -6, .5, 1.5, -2, 3, 1, -0.0, 6]


def test_trap_17_activations():
    run = partial(jax.jit, static_argnames="mode")(nvfp4.quantize_activation)
    got = run(TRAP_17, mode="nvfp4_static", input_scale=1.0)
    assert got.scale.tolist() == [[1.0]] and got.decode.tolist() == [[1.0]]
    assert_same_bits(got.grid, np.array([TRAP_17_VALUES], F32))
    saturated = run(TRAP_17, mode="nvfp4_static", input_scale=0.01)  # 100 is a tie between 96 and 104
    assert saturated.scale.tolist() == [[96.0]] and float(abs(saturated.values).max()) == 6
    row = run(TRAP_17, mode="nvfp4_per_token")
    assert row.scale.tolist() == [[448.0]] and float(row.decode[0, 0]) == F32(6 * F32(1 / 2688))
    assert_same_bits(row.values.reshape(1, -1), np.array([TRAP_17_VALUES], F32))


def test_every_code_and_scale_decodes(reference):
    bits = np.arange(256, dtype=np.uint8)
    assert_same_bits(bits[:127].view(nvfp4.E4M3).astype(F32), reference.e4m3_decode(bits[:127]))
    packed = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), (127, 1))
    scale = bits[:127, None]
    want = reference.nvfp4_grid(packed, scale)
    assert_same_bits(jax.jit(nvfp4.grid)(packed, scale.view(nvfp4.E4M3)), want)
    assert_same_bits(want, np.asarray(want, jnp.bfloat16).astype(F32))  # exact in bfloat16
    assert_same_bits(nvfp4.pack(nvfp4.unpack(packed)), packed)


# ------------------------------------------------------------------ rounding


def around(points):
    """Each positive point with its neighbours in float32."""
    points = np.asarray(points, F32)
    return np.concatenate([np.nextafter(points, F32(0)), points, np.nextafter(points, F32(np.inf))])


def scale_inputs(reference):
    values = reference.E4M3[:127].astype(F32)
    edges = around(np.concatenate([values[1:], (values[1:] + values[:-1]) / 2, [464, 480, 1e30, 3.4e38]]))
    random = np.exp2(np.random.default_rng(0).uniform(-14, 12, 10**6)).astype(F32)
    return np.concatenate([[F32(0)], edges, random])


def code_inputs():
    edges = around([0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 1e30])
    random = np.random.default_rng(1).normal(size=10**6).astype(F32) * 3
    return np.concatenate([[F32(0), F32(1e-42)], edges, -edges, [F32(-0.0)], random])


def test_block_scales_round_like_the_reference(reference):
    x = scale_inputs(reference)
    want = reference.e4m3_encode(x)
    assert_same_bits(nvfp4.e4m3_encode(x).view(np.uint8), want)
    assert_same_bits(jax.jit(nvfp4.round_e4m3)(x), reference.e4m3_decode(want))


def test_codes_round_like_the_reference(reference):
    x = code_inputs()
    want = reference.e2m1_encode(x)
    assert_same_bits(nvfp4.e2m1_encode(x), want)
    assert_same_bits(jax.jit(nvfp4.round_e2m1)(x), reference.E2M1[want])


# ------------------------------------------------------------------ weights


def weight_cases():
    rng = np.random.default_rng(2)
    w = rng.normal(size=(4, 64, 128)).astype(F32)
    w[1] *= np.exp2(rng.integers(-30, 30, (64, 128)))
    w[2] = np.asarray(w[2], jnp.bfloat16).astype(F32)
    w[3, :8] = 0
    w[3, 8:] *= F32(1e-30)
    return w


def test_weights_quantise_like_the_reference(reference):
    w = weight_cases()
    got = nvfp4.quantize_weight(w)
    for i, matrix in enumerate(w):
        packed, scale, total = reference.quantize_weight(matrix)
        assert_same_bits(got.packed[i], packed)
        assert_same_bits(got.scale[i].view(np.uint8), scale)
        assert_same_bits(got.global_scale[i], total)
        assert_same_bits(nvfp4.dequantize(got.packed[i], got.scale[i], got.global_scale[i]),
                         reference.nvfp4_dequant(packed, scale, total))


def test_matrix_of_zeros_stays_zero():
    got = nvfp4.quantize_weight(np.zeros((2, 3, 32), F32))
    assert not got.packed.any() and not got.global_scale.any()
    assert not nvfp4.dequantize(*got).any()


@pytest.mark.parametrize("w", [np.ones((2, 24), F32), np.full((2, 16), np.nan, F32), np.full((2, 16), np.inf, F32)])
def test_weights_that_cannot_be_quantised(w):
    with pytest.raises(ValueError, match="NVFP4: expected"):
        nvfp4.quantize_weight(w)


# ------------------------------------------------------------------ activations


def activation_rows(k=256):
    """About 1e6 values: normal rows, wide ranges, blocks whose amax lies on scale boundaries, zeros, extremes."""
    rng = np.random.default_rng(3)
    normal = rng.normal(size=(2500, k))
    wide = normal[:600] * np.exp2(rng.integers(-20, 20, (600, k)))
    scaled = normal[:400] * np.exp2(rng.uniform(-60, 90, (400, 1)))
    zeros = np.zeros((4, k))
    zeros[1], zeros[2, 7], zeros[3, ::2] = -0.0, 1.0, -3.0
    x = np.concatenate([normal, wide, scaled, zeros]).astype(F32)
    grid = np.concatenate([nvfp4.E2M1[:8], around([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])]).astype(F32)
    edges = rng.choice(grid, (400, k)) * rng.choice(F32([-1, 1]), (400, k))
    steps = np.arange(127, dtype=np.uint8).view(nvfp4.E4M3).astype(F32)
    mids = (steps[1:] + steps[:-1]) / 2
    ends = np.resize(np.concatenate([around(6 * mids), around(6 * steps[1:])]).astype(F32), (400, k // 16))
    edges.reshape(400, -1, 16)[:, :, 3] = ends * (edges.reshape(400, -1, 16)[:, :, 3] < 0) + ends
    subnormal = normal[:50].astype(F32) * F32(1e-42)
    subnormal[:, 0] = 1.0  # in a row of normal size they are as good as zero
    huge = normal[:50] / np.abs(normal[:50]).max() * 3.4e38
    bf16 = np.asarray(normal[:500], jnp.bfloat16)
    return np.concatenate([x, edges, subnormal, huge.astype(F32), bf16.astype(F32)])


def scales_of_reference(reference, x, mode, d):
    """Block scales of `quantize_activation`, which the reference does not give out."""
    c = F32(1.0 / (6.0 * 448.0))
    dec = np.abs(x).max(-1, keepdims=True) * c if mode == "per_token" else np.full((len(x), 1), d, F32)
    enc = np.where(dec > 0, F32(1) / np.where(dec > 0, dec, F32(1)), np.finfo(F32).max)
    amax = np.abs(x.reshape(len(x), -1, 16)).max(-1)
    return reference.e4m3_decode(reference.e4m3_encode(enc * (amax * F32(1.0 / 6.0))))


@pytest.mark.parametrize(("mode", "d"), [("per_token", 1.0), *(("static", F32(d)) for d in (
    1, 0.01, 6 / 2688, 2 / 2688, 1 / 3, 0.0023, 77.7, 1e-6, 1e20))])
def test_activations_quantise_like_the_reference(reference, mode, d):
    x = activation_rows()
    assert x.size > 10**6
    with np.errstate(all="ignore"):
        grid, decode = reference.quantize_activation(x, mode, d)
        scale = scales_of_reference(reference, x, mode, d)
    got = jax.jit(partial(nvfp4.quantize_activation, mode=f"nvfp4_{mode}"))(x, input_scale=d)
    assert_same_bits(got.scale, scale)
    assert_same_bits(got.decode, decode)
    assert_same_bits(got.grid, grid)


def test_constant_input_scale_gives_the_same_bits(reference):
    """The scale may be a constant of the compiled program, which XLA folds."""
    x = activation_rows()[:500]
    for d in (6 / 2688, 1 / 3, 0.0023):
        got = jax.jit(partial(nvfp4.quantize_activation, mode="nvfp4_static", input_scale=d))(x)
        assert_same_bits(got.grid, reference.quantize_activation(x, "static", d)[0])


def test_rows_far_below_one_count_as_zero():
    x = np.full((3, 32), [[1e-31], [1e-40], [1e-44]], F32) * np.tile(F32([1, -1]), 16)
    got = jax.jit(partial(nvfp4.quantize_activation, mode="nvfp4_per_token"))(x)
    assert not np.asarray(got.grid).any() and not np.asarray(got.decode).any()


@pytest.mark.parametrize("mode", ["nvfp4_static", "nvfp4_per_token"])
def test_nan_stays_in_its_row(mode):
    x = activation_rows()[:3]
    bad = x.copy()
    bad[1, 5] = np.nan
    run = jax.jit(partial(nvfp4.quantize_activation, mode=mode))
    got, clean = run(bad), run(x)
    assert np.isnan(np.asarray(got.grid)[1, :16]).all()
    assert_same_bits(np.asarray(got.grid)[[0, 2]], np.asarray(clean.grid)[[0, 2]])

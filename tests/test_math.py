"""ffi/common/math.h against float64, over every 1,021st float: all exponents, both signs, infinities and NaN.

Errors are in units in the last place of the true value, as measured on all of these floats, rounded up a little.
"""

import ml_dtypes
import numpy as np
import pytest
from kernel_inputs import F32, math_h

FLOATS = np.arange(0, 2**32, 1021, dtype=np.uint32).view(F32)
FINITE = np.sort(FLOATS[np.isfinite(FLOATS)])
NAN = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF80ABCD, 0x7FFFFFFF], np.uint32).view(F32)


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def errors(got, want):
    """In units of the last place of `want`; below the normal numbers in those of the smallest of them."""
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 2.0**-126))) - 23)
    return np.abs(got - want) / unit


def values(name, low=-np.inf, high=np.inf, parts=1):
    """Floats in [low, high], ascending, the same in float64, and what the function makes of them."""
    x = FINITE[(low <= FINITE) & (high >= FINITE)]
    got = math_h()(name, x)
    assert len(x) > 100_000 and got.shape[-1] == len(x)
    return x, x.astype(np.float64), got


def test_floats():
    assert len(np.unique(FLOATS.view(np.uint32) >> 23)) == 512, "every exponent with either sign"


def test_exp():
    _, x64, got = values("exp", -87.3, 88.3)
    assert errors(got, np.exp(x64)).max() < 1.03
    assert (np.diff(got) >= 0).all() and got.min() > 0
    _, _, got = values("exp")
    assert (np.diff(got) >= 0).all() and np.isfinite(got).all()
    inf, zero, low, high = math_h()("exp", [np.inf, -np.inf, -87.31, 1e30])
    assert (zero, low) == (0, 0) and inf == high == math_h()("exp", [88.3])[0]
    assert (math_h()("exp", [0.0, -0.0]) == 1).all()


def test_sigmoid():
    _, x64, got = values("sigmoid", -87.3)
    assert errors(got, 1 / (1 + np.exp(-x64))).max() < 2.1
    x, _, got = values("sigmoid")
    assert (np.diff(got) >= 0).all() and got.min() == 0 and got.max() == 1
    assert not got[x < F32(-88.3)].any()
    assert list(math_h()("sigmoid", [-np.inf, 0.0, -0.0, np.inf])) == [0, 0.5, 0.5, 1]


def test_silu():
    _, x64, got = values("silu", -80)
    assert errors(got, x64 / (1 + np.exp(-x64))).max() < 2.4
    _, x64, got = values("silu", -np.inf, -80)
    assert (np.abs(got - x64 / (1 + np.exp(-x64))) < 1e-32).all(), "tends to 0, also for the largest floats"
    assert list(math_h()("silu", [0.0, np.inf])) == [0, np.inf]


def test_tanh():
    x, x64, got = values("tanh")
    assert errors(got, np.tanh(x64)).max() < 1.9
    assert (np.diff(got) >= 0).all()
    assert (got[::-1] == -math_h()("tanh", -x[::-1])).all(), "odd"
    small = np.abs(x) < 2.0**-13
    assert (got[small] == x[small]).all()
    assert list(math_h()("tanh", [np.inf, -np.inf, 20.0])) == [1, -1, 1]


def test_log():
    _, x64, got = values("log", 2.0**-126)
    assert errors(got, np.log(x64)).max() < 1.9
    assert (np.diff(got) >= 0).all()
    assert math_h()("log", [1.0])[0] == 0
    assert np.isnan(math_h()("log", [0.0, -0.0, -1.0, -np.inf, np.inf])).all(), "outside of what it is for"


def test_cos_sin():
    """Angles are positions times frequencies of at most 1: below 2^20. Right but for the last rounding."""
    _, x64, got = values("cos_sin", -(2.0**20), 2.0**20)
    for part, want in zip(got, (np.cos(x64), np.sin(x64)), strict=True):
        assert errors(part, want).max() < 0.501
    assert (math_h()("cos_sin", [0.0]).ravel() == [1, 0]).all()
    whole = np.arange(0, 2**20, 7).astype(F32)  # the first frequency is 1
    got, x64 = math_h()("cos_sin", whole), whole.astype(np.float64)
    assert errors(got, np.stack([np.cos(x64), np.sin(x64)])).max() < 0.501
    assert (np.abs(got[0].astype(np.float64) ** 2 + got[1].astype(np.float64) ** 2 - 1) < 2.0**-23).all()


def test_round_bf16():
    """Bit for bit the nearest bf16, ties to even; every bf16, and every halfway point and its neighbours."""
    near = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    halves = (np.arange(2**16, dtype=np.uint32) << 16)[:, None] + near
    for x in (FLOATS, halves.view(F32).ravel()):
        x = x[~np.isnan(x)]
        got = math_h()("round_bf16", x)
        assert (got.view(np.uint32) == x.astype(ml_dtypes.bfloat16).astype(F32).view(np.uint32)).all()
    assert np.isposinf(math_h()("round_bf16", [3.4e38])[0])


@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu", "tanh", "log", "cos_sin", "round_bf16"])
def test_nan_stays_nan(name):
    assert np.isnan(math_h()(name, NAN)).all()
    every = FLOATS[np.isnan(FLOATS)]
    assert len(every) > 10_000 and np.isnan(math_h()(name, every)).all()
    if name != "cos_sin":  # a NaN beside them does not touch other numbers
        mixed = np.array([1.5, np.nan, 2.5, np.nan, 0.5], F32)
        assert (math_h()(name, mixed)[::2] == math_h()(name, mixed[::2])).all()

"""The compare helper goes red when it should."""

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_same(shape, dtype):
    assert_same_bits(np.ones(shape, dtype), np.ones(shape, dtype))


def test_transposed_view_is_compared_by_element():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert_same_bits(np.asfortranarray(a), a)
    assert_same_bits(a.T, np.array([[0, 3], [1, 4], [2, 5]], np.float32))


def test_nan_equals_itself():
    assert_same_bits(np.float32("nan"), np.float32("nan"))


def test_first_difference_in_hex():
    a = np.ones((2, 3), np.float32)
    b = a.copy()
    b[1, 1] = np.nextafter(np.float32(1), np.float32(2))
    b[1, 2] = 2
    with pytest.raises(AssertionError) as error:
        assert_same_bits(a, b)
    assert "2 of 6 elements differ" in str(error.value)
    assert "first at (1, 1): 0x3f800000 (1.0) against 0x3f800001 (1.0000001" in str(error.value)


def test_bfloat16_in_hex():
    with pytest.raises(AssertionError, match=r"0x3f80 \(1.*\) against 0x4000 \(2.*\)"):
        assert_same_bits(ml_dtypes.bfloat16(1), ml_dtypes.bfloat16(2))


def test_signed_zeros_differ():
    with pytest.raises(AssertionError, match=r"first at \(\): 0x00000000 .* against 0x80000000"):
        assert_same_bits(np.float32(0.0), np.float32(-0.0))


def test_shapes_differ():
    with pytest.raises(AssertionError, match=r"shapes differ: \(1,\) against \(\)"):
        assert_same_bits(np.zeros(1), np.zeros(()))


def test_dtypes_differ():
    with pytest.raises(AssertionError, match="dtypes differ: float32 against float64"):
        assert_same_bits(np.zeros(1, np.float32), np.zeros(1, np.float64))

"""Comparisons for tests: `from helpers import assert_same_bits`."""

import numpy as np


def assert_same_bits(a, b) -> None:
    """Asserts that two arrays (or what numpy makes arrays of) agree in shape, dtype and every bit.

    Unlike `==`, this tells +0 from -0 and takes a NaN as equal to itself.

    Raises:
        AssertionError: names the shapes, the dtypes, or the first differing index with both values in hex.
    """
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, f"shapes differ: {a.shape} against {b.shape}"
    assert a.dtype == b.dtype, f"dtypes differ: {a.dtype} against {b.dtype}"
    differs = (_bytes(a) != _bytes(b)).any(axis=1)
    if differs.any():
        index = tuple(int(i) for i in np.unravel_index(differs.argmax(), a.shape))
        raise AssertionError(
            f"{differs.sum()} of {a.size} elements differ ({a.dtype}, shape {a.shape}), "
            f"first at {index}: {_show(a[index])} against {_show(b[index])}"
        )


def _bytes(a: np.ndarray) -> np.ndarray:
    """[elements, bytes of one element]"""
    return np.frombuffer(a.tobytes(), np.uint8).reshape(a.size, a.dtype.itemsize)


def _show(value: np.generic) -> str:
    return f"0x{value.tobytes()[::-1].hex()} ({value})"

"""For tests of single phases: their arguments, and the bounds within which a phase agrees with `reference`.

Bounds are those of the design: GEMM outputs 2 units in the last place or 2^-14 of the row's RMS, and 99.8% equal;
attention 2^-6 of the head's RMS; router 1e-5; residual stream 2^-6 of the row's RMS. Inputs of GEMMs behind a norm
come from the NumPy copy of the norm (kernel_inputs.py), which has the twin's bits; the reference's norm differs from it
in the last place of few elements, and would move all outputs of their rows.
"""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_inputs import F32, PHASE_CONFIGS, wide

from musejax.cache import LayerCache
from musejax.config import DecodeConfig
from musejax.kernels.calls import RowState
from musejax.kernels.forward import chain
from musejax.params import BF16

log = logging.getLogger("measured")
"""What was measured: `pytest --log-cli-level=INFO`."""

CANON = DecodeConfig().policy
ROWS = 16

configs = pytest.mark.parametrize("config", PHASE_CONFIGS.values(), ids=PHASE_CONFIGS)
layers = pytest.mark.parametrize("layer", [0, 1], ids=["bf16", "nvfp4"])


# ------------------------------------------------------------------ bounds


def unit_of(x):
    """bf16's unit in the last place."""
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-126))) - 7)


def assert_gemm(got, want, name="result"):
    """bf16 values of one GEMM [t, n]: within 2 units in the last place or 2^-14 RMS(row), and 99.8% bit-equal."""
    got, want = np.asarray(got, F32), np.asarray(want, F32)
    unit = unit_of(want)
    rms = np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    error, equal = np.abs(got - want), np.mean(got == want)
    bound = np.maximum(2 * unit, 2.0**-14 * rms)
    log.info("%s: %.5f equal, worst %.3f of the bound", name, equal, (error / bound).max())
    assert (error <= bound).all(), (error / unit).max()
    assert equal >= 0.998, f"{equal:.5f} of the elements are equal"


def assert_near(got, want, bound, name="result", rounded=False):
    """Within `bound` of the RMS of the last axis; `rounded` values may part by a unit of theirs, if that is more."""
    got, want = np.asarray(got, F32), np.asarray(want, F32)
    error, rms = np.abs(got - want), np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    log.info("%s: worst %.2e of the RMS, bound %.2e", name, (error / rms).max(), bound)
    assert (error <= np.maximum(bound * rms, unit_of(want) if rounded else 0)).all(), (error / rms).max()


# ------------------------------------------------------------------ arguments


def row_state(t=ROWS, *, length=0, valid=None, parents=None, accepted=0, path=()):
    parents = chain(t) if parents is None else jnp.asarray(parents, jnp.int32)
    state = jnp.asarray([length, t if valid is None else valid, accepted], jnp.int32)
    return RowState(parents, state, jnp.asarray(np.pad(np.asarray(path, np.int32), (0, 16 - len(path)))))


def stream_of(config, t=ROWS, seed=0):
    return np.random.default_rng(seed).standard_normal((t, config.hidden_size)).astype(F32)


def empty_keys(config, slots, heads=None):
    shape = (heads or config.num_key_value_heads, slots, config.head_dim)
    return LayerCache(*(jnp.zeros(shape, BF16) for _ in range(2)))


def heads_last(x_ntc):
    """[n, t, c] -> float32 [t, n, c]."""
    return wide(x_ntc).swapaxes(0, 1)

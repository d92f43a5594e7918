"""For tests of single phases: their arguments, and the bounds within which a phase agrees with `reference`.

Bounds are those of the design: GEMM outputs 2 units in the last place or 2^-14 of the row's RMS, and 99.8% equal;
attention 2^-6 of the head's RMS; router 1e-5; residual stream 2^-6 of the row's RMS. Inputs of GEMMs behind a norm
come from the NumPy copy of the norm (kernel_inputs.py), which has the twin's bits; the reference's norm differs from it
in the last place of few elements, and would move all outputs of their rows.
"""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_inputs import F32, PHASE_CONFIGS, wide

from musejax import nvfp4
from musejax.cache import LayerCache
from musejax.config import DecodeConfig
from musejax.kernels.calls import RowState
from musejax.kernels.forward import chain
from musejax.model import experts as ref_experts
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
    """bf16 values of one GEMM [t, n]: within 2 units in the last place or 2^-14 RMS(row), and 99.8% bit-equal (all but
    two of fewer than 1,000 elements, for each of them may round to the other side)."""
    got, want = np.asarray(got, F32), np.asarray(want, F32)
    unit = unit_of(want)
    rms = np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    error, equal = np.abs(got - want), np.mean(got == want)
    bound = np.maximum(2 * unit, 2.0**-14 * rms)
    log.info("%s: %.5f equal, worst %.3f of the bound", name, equal, (error / bound).max())
    assert (error <= bound).all(), (error / unit).max()
    assert (got != want).sum() <= max(0.002 * got.size, 2), f"{equal:.5f} of the elements are equal"


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


# ------------------------------------------------------------------ experts


def of_pairs(x_et, ids_tj, per_pair=False):
    """[e, rows, n] -> [t * j, n]: each (row, slot)'s expert; rows are t, or t * j with `per_pair`."""
    ids = np.asarray(ids_tj).reshape(-1)
    rows = np.arange(len(ids)) if per_pair else np.arange(len(ids)) // ids_tj.shape[1]
    return np.asarray(x_et)[ids, rows]


@partial(jax.jit, static_argnames=("mode",))
def reference_up(h, p, mode):
    """Inner activations of every expert for every row, [e, t, f], before they are rounded or quantised."""
    leaves = {k: v for k, v in p.items() if k.startswith("gate_up") and "input" not in k}
    axes = {k: 0 if k.endswith("_global") else 1 for k in leaves}

    def one(w):
        if "gate_up_scale" not in w:
            gate, up = ref_experts._gate_up(h, w["gate_up"], CANON)
            return jax.nn.silu(gate) * up
        x, scale = ref_experts._quantised(h, mode, p["gate_up_input_scale"].max())
        gate, up = ref_experts._gate_up(x, nvfp4.grid(w["gate_up"], w["gate_up_scale"]), CANON)
        return jax.nn.silu(gate * (scale * w["gate_up_global"][0])) * (up * (scale * w["gate_up_global"][1]))

    return jax.vmap(one, in_axes=(axes,))(leaves)

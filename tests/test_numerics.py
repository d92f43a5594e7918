"""Rounding points and policies."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax.numerics import CANON, EXACT, Policy, round_bf16, storage_dtype


def test_rounding_is_to_nearest_even_and_survives_jit():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=1000).astype(np.float32) * 10.0 ** rng.integers(-30, 30, 1000),
                        np.float32([1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0, np.inf, 3.4e38])]).astype(np.float32)
    want = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same_bits(jax.jit(round_bf16)(x), want)
    # A plain pair of converts is what XLA may drop; the rounding must not be dropped.
    assert (np.asarray(jax.jit(lambda v: round_bf16(v) - v)(x[:1000])) != 0).mean() > 0.9


def test_policies():
    x = jnp.float32(1 + 2**-9)
    assert EXACT.round("norm", x) == x and CANON.round("norm", x) == 1
    assert storage_dtype(CANON, "gpu") == jnp.bfloat16
    assert storage_dtype(CANON, "cpu") == storage_dtype(EXACT, "gpu") == jnp.float32
    with pytest.raises(KeyError, match="rounding point: expected one of"):
        CANON.round("nrom", x)
    for wrong in (("canon", "float16"), ("fast", "float32"), ("exact", "bfloat16")):
        with pytest.raises(ValueError, match="policy"):
            Policy(*wrong)


@pytest.mark.parametrize("policy", [EXACT, CANON])
def test_gemm_accumulates_in_float32(policy):
    # 1 + 4096 * 2^-12: a bfloat16 accumulator would stay at 1.
    x = jnp.concatenate([jnp.ones(1), jnp.full(4096, 2.0**-12)])[None]
    got = jax.jit(lambda a: policy.einsum("tk,nk->tn", a, jnp.ones((1, 4097), jnp.bfloat16)))(x)
    assert got.dtype == jnp.float32 and float(got[0, 0]) == 2.0

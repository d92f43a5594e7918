"""A wait inside the layer kernel that does not end: reported with its place, and after the reset all is well."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import SMALL, model_of, random_cache

from musejax import ffi
from musejax.config import DecodeConfig
from musejax.kernels import forward as kf

BUDGET = 2 * 10**9


@pytest.fixture
def launch(gpu):
    """One pass on the GPU -> stream."""
    params, cache = (jax.device_put(x, gpu) for x in (model_of(SMALL).packed, random_cache(SMALL, 250, 400)))
    run = jax.jit(kf.run_pass, static_argnames=("config", "decode"))

    def go():
        with jax.default_device(gpu):
            return np.asarray(run(params, cache, jnp.arange(16, dtype=jnp.int32), kf.chain(16), 16, config=SMALL,
                                  decode=DecodeConfig()).stream)

    return go


def test_a_wait_that_takes_too_long(launch):
    """No wait may take any time: then the first one that looks twice gives up."""
    lib = ffi.library("gpu")
    first = launch()
    ffi.raise_wait_error()
    try:
        assert lib.set_spin_budget(0) == 0
        launch()
        with pytest.raises(ffi.WaitError, match=r"rank 0, SM \d+, warp \d+, layer \d, phase .*, wanted \d+, saw \d+"):
            ffi.raise_wait_error()
    finally:
        assert lib.set_spin_budget(BUDGET) == 0
    ffi.raise_wait_error()
    assert_same_bits(launch(), first)

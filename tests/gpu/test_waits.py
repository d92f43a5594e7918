"""A wait inside the layer kernel that does not end: reported with its place, and after the reset all is well."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import SMALL, model_of, random_cache

from musejax import ffi
from musejax.config import NUM_SLICES, DecodeConfig
from musejax.kernels import forward as kf
from musejax.kernels import schedule as ks

BUDGET = 2 * 10**9  # ns
PLACE = r"rank 0, SM \d+, warp \d+, layer \d, phase .*, wanted \d+, saw \d+"


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


@pytest.fixture
def unit_missing(gpu):
    """Inside the context no SM runs the last unit of the attention output, so all wait for it in vain."""
    library = ffi.library("gpu")
    sms = library.multiprocessors()[0]
    shape = ks.Shape.of(SMALL)
    number = library.layer_instances().index((*shape, SMALL.num_experts_per_tok, NUM_SLICES))

    def use(spans):
        library.set_schedule(number, sms, spans.ravel().tolist())

    @contextmanager
    def missing():
        right = ks.spans(ks.dense_schedule(shape, NUM_SLICES, sms))
        wrong = np.array(right)
        out = wrong[:, ks.GEMMS.index("out")]
        out[out[:, 1] == out[:, 1].max()] -= (0, 1)
        use(wrong)
        try:
            yield
        finally:
            use(right)

    return missing


def test_a_wait_that_takes_too_long(launch, unit_missing):
    """Reported once its budget is over, and the next launch is right."""
    lib = ffi.library("gpu")
    first = launch()
    ffi.raise_wait_error()
    try:
        assert lib.set_spin_budget(20 * 10**6) == 0
        with unit_missing():
            launch()
            with pytest.raises(ffi.WaitError, match=PLACE):
                ffi.raise_wait_error()
    finally:
        assert lib.set_spin_budget(BUDGET) == 0
    ffi.raise_wait_error()
    assert_same_bits(launch(), first)

"""Set-up of the GPU tests: both platforms in one process, the CPU library as the twin of the CUDA library.

    python -m pytest tests/gpu

Tests that ask for `gpu` are skipped, with the reason, where there is no CUDA device or no CUDA library.
"""

import importlib.util
import os
import sys
from dataclasses import dataclass, replace

# The conftest above chooses the CPU for all tests. Here JAX may take what there is, as long as nothing has started it.
if "jax" not in sys.modules:
    os.environ["JAX_PLATFORMS"] = ""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import pytest
from kernel_inputs import F32, model_of, random_cache

from musejax import ffi
from musejax.config import MINI, NANO, DecodeConfig, ModelConfig
from musejax.kernels.calls import Call


@pytest.fixture(scope="session")
def cpu():
    """The CPU device of the twin."""
    ffi.library("cpu")
    return jax.devices("cpu")[0]


@pytest.fixture(scope="session")
def gpu():
    """The CUDA device under test."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"no CUDA device: {str(error).splitlines()[0]}")
    if importlib.util.find_spec("musejax._cuda") is None:
        pytest.skip("no CUDA library: musejax was built without CUDA")
    ffi.library("gpu")
    return device


# ------------------------------------------------------------------ the same call on both


@dataclass(frozen=True)
class Twins:
    """One model's targets on both platforms.

    Attributes:
        cpu, gpu: (device, calls) of each.
    """

    cpu: tuple
    gpu: tuple

    def run(self, which: tuple, name: str, *operands, **attributes):
        """A target's results as NumPy arrays; operands are moved to the device."""
        device, call = which
        out = getattr(call, name)(*jax.device_put(operands, device), **attributes)
        for x in jax.tree.leaves(out):
            assert x.devices() == {device}, f"{name} ran on {x.devices()}, not on {device}"
        return jax.tree.map(np.asarray, out)

    def on_gpu(self, name: str, *operands, **attributes):
        return self.run(self.gpu, name, *operands, **attributes)

    def on_cpu(self, name: str, *operands, **attributes):
        return self.run(self.cpu, name, *operands, **attributes)

    def both(self, name: str, *operands, **attributes):
        """-> (results on the CPU, results on the GPU)."""
        return self.on_cpu(name, *operands, **attributes), self.on_gpu(name, *operands, **attributes)


@pytest.fixture
def twins(cpu, gpu):
    """`twins(config, decode)`: its targets on both platforms."""

    def make(config: ModelConfig, decode: DecodeConfig | None = None) -> Twins:
        decode = decode or DecodeConfig()
        return Twins((cpu, Call(config, decode, "cpu")), (gpu, Call(config, decode, gpu.platform)))

    return make


# ------------------------------------------------------------------ models and caches on both


@dataclass(frozen=True)
class ModelTwin:
    """Random packed params of one config.

    Attributes:
        cpu, gpu: the same params, on one device each.
    """

    config: ModelConfig
    cpu: dict
    gpu: dict


@pytest.fixture(scope="session")
def model_twin(cpu, gpu):
    """`model_twin(config)`: a ModelTwin with random weights."""

    def make(config: ModelConfig, seed: int = 0) -> ModelTwin:
        with jax.default_device(cpu):
            packed = jax.device_get(model_of(config, seed).packed)
        return ModelTwin(config, jax.device_put(packed, cpu), jax.device_put(packed, gpu))

    return make


def quantised_inside(config: ModelConfig) -> ModelConfig:
    """NVFP4 experts in all layers but the first and the last, as released."""
    return replace(config, nvfp4_layers=tuple(range(1, config.num_hidden_layers - 1)))


@pytest.fixture(scope="session")
def nano(model_twin) -> ModelTwin:
    return model_twin(quantised_inside(NANO))


@pytest.fixture(scope="session")
def mini(model_twin) -> ModelTwin:
    return model_twin(quantised_inside(MINI))


@pytest.fixture
def cache_twin(cpu, gpu):
    """`cache_twin(config, length, max_length)`: the same random KernelCache, on the CPU and on the GPU."""

    def make(config: ModelConfig, length: int, max_length: int, seed: int = 0):
        with jax.default_device(cpu):
            cache = jax.device_get(random_cache(config, length, max_length, seed))
        return jax.device_put(cache, cpu), jax.device_put(cache, gpu)

    return make


# ------------------------------------------------------------------ comparing where no bits are promised


@pytest.fixture(scope="session")
def compare():
    """`compare(name, cpu, gpu, bound)`: every |cpu - gpu| is within its bound (a number, or an array that broadcasts);
    prints the worst element. NaN and infinities have to be the same ones."""

    def check(name: str, cpu, gpu, bound) -> None:
        want, got = np.asarray(cpu).astype(F32), np.asarray(gpu).astype(F32)
        assert got.shape == want.shape, f"{name}: shapes {want.shape} on the CPU, {got.shape} on the GPU"
        if not got.size:
            return
        bound = np.broadcast_to(np.asarray(bound, F32), want.shape)
        finite = np.isfinite(want) & np.isfinite(got)
        same = (np.isnan(want) & np.isnan(got)) | (want == got)
        error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
        share = np.where(finite, error / bound, np.where(same, 0, np.inf))
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(share), share.shape))
        line = (f"{name}: worst element {worst}: {want[worst]!r} on the CPU, {got[worst]!r} on the GPU, "
                f"{share[worst]:.3g} of the bound {bound[worst]:.3g}; {np.mean(want == got):.5f} are equal")
        print(line)
        assert share[worst] <= 1, line

    return check

"""Which library runs where, and which implementation `auto` chooses. Most of it needs no GPU."""

import importlib.util

import jax
import numpy as np
import pytest

from musejax import ffi
from musejax.config import MINI, ConfigError, DecodeConfig

SIZES = (128, 16, 8, 64, 128, 128, 16, 2)
"""Of MINI, as `layer_instances` lists them, without the slices."""


def test_compare_sees_one_wrong_element(compare):
    x = np.linspace(-1, 1, 60, dtype=np.float32).reshape(3, 4, 5)
    compare("same", x, x, 0.5)
    for value in (x[1, 2, 3] + 0.1, np.nan, np.inf):
        wrong = x.copy()
        wrong[1, 2, 3] = value
        with pytest.raises(AssertionError, match=r"wrong: worst element \(1, 2, 3\)"):
            compare("wrong", x, wrong, np.full((4, 5), 0.05, np.float32))
    holes = np.where(x > 0, np.nan, x)
    compare("the same holes", holes, holes, 0.5)
    with pytest.raises(AssertionError, match="shapes"):
        compare("less", x, x[:2], 0.5)


def test_names_of_the_platform(gpu):
    assert ffi.library("gpu") is ffi.library("cuda") is not ffi.library("cpu")
    assert ffi.library(gpu.platform) is ffi.library("cuda")


def test_build_info_comes_from_the_gpu(gpu):
    info = ffi.build_info("cuda")
    assert info.abi == ffi.ABI and info.cuda


def test_unknown_platform():
    with pytest.raises(ValueError, match=r"expected one of \['cpu', 'cuda', 'gpu'\], got 'tpu'"):
        ffi.library("tpu")


def test_missing_cuda_library():
    if importlib.util.find_spec("musejax._cuda") is not None:
        pytest.skip("this build has a CUDA library")
    with pytest.raises(ffi.LibraryError, match=r"musejax\._cuda .* `MUSEJAX_CUDA=ON pip install \.`"):
        ffi.library("gpu")


def test_auto_takes_what_is_compiled(monkeypatch):
    """The megakernel on a GPU only for sizes, and slices a device, that the library has."""

    def choice(instances, devices=1, config=MINI):
        monkeypatch.setattr(ffi, "layer_instances", lambda: instances)
        return DecodeConfig().for_model(config, "gpu", devices).implementation

    assert choice([]) == "reference"
    assert choice([(*SIZES, 8)]) == "megakernel"
    assert choice([(*SIZES, 8)], devices=2) == "reference"
    assert choice([(*SIZES, 8), (*SIZES, 4)], devices=2) == "megakernel"
    assert choice([(256, *SIZES[1:], 8)]) == "reference"
    assert DecodeConfig().for_model(MINI, "cpu").implementation == "megakernel"
    assert DecodeConfig().for_model(MINI, "tpu").implementation == "reference"


def test_megakernel_asked_for_in_vain(monkeypatch):
    monkeypatch.setattr(ffi, "layer_instances", lambda: [(256, *SIZES[1:], 8)])
    with pytest.raises(ConfigError, match=r"compiled for given .* expected one of \[\(256, .* got \(128, .*reference"):
        DecodeConfig(implementation="megakernel").for_model(MINI, "gpu")

    def missing():
        raise ffi.LibraryError("expected the library musejax._cuda, got none: build it")

    monkeypatch.setattr(ffi, "layer_instances", missing)
    assert DecodeConfig().for_model(MINI, "gpu").implementation == "reference"
    with pytest.raises(ConfigError, match="got none: build it"):
        DecodeConfig(implementation="megakernel").for_model(MINI, "gpu")


def test_layer_instances_are_nine_sizes(gpu):
    for sizes in ffi.layer_instances():
        assert len(sizes) == 9 and all(isinstance(n, int) for n in sizes) and sizes[-1] in (1, 2, 4, 8)


def test_models_and_caches_are_the_same_on_both(cpu, gpu, nano, mini, cache_twin):
    for twin in (nano, mini):
        assert {d for x in jax.tree.leaves(twin.gpu) for d in x.devices()} == {gpu}
        for a, b in zip(jax.tree.leaves(twin.cpu), jax.tree.leaves(twin.gpu), strict=True):
            assert a.devices() == {cpu} and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        caches = cache_twin(twin.config, 20, 64)
        for a, b in zip(*map(jax.tree.leaves, caches), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

"""A small published checkpoint of random bits (NaNs and all), and ways to write others."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from musejax.config import MINI
from musejax.params import table

SMALL = replace(MINI, num_hidden_layers=3, layer_types=(), layer_rope_theta=(), num_local_experts=8)


class Published:
    """Makes published folders.

    Attributes:
        config: sizes of the checkpoint: MINI with three layers and eight experts.
        tensors: published name -> array, random bits; scales of NVFP4 experts are positive numbers.
    """

    def __init__(self, config=SMALL, seed=0):
        rng = np.random.default_rng(seed)
        self.config = config
        self.tensors = {p.hf_key: rng.integers(0, 256, p.nbytes, np.uint8).view(p.dtype).reshape(p.hf_shape)
                        for p in table(config)}
        for name, x in self.tensors.items():
            if name.endswith("_weight_scale"):
                self.tensors[name] = (x.view(np.uint8) % 0x7E + 1).view(x.dtype)
            elif name.endswith(("_weight_scale_2", "_input_scale")):
                self.tensors[name] = rng.uniform(0.01, 1, x.shape).astype(x.dtype)

    def write(self, folder: Path, tensors=None, shards=2) -> Path:
        """config.json, and safetensors files with an index (or one file, without)."""
        tensors = self.tensors if tensors is None else tensors
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config.to_hf()))
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        names = sorted(tensors)
        index = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            mine = names[i::shards]
            save_file({name: tensors[name] for name in mine}, folder / file)
            index |= dict.fromkeys(mine, file)
        write_index(folder, index)
        return folder


def write_index(folder: Path, names: dict) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": names}))


@pytest.fixture(scope="session")
def published() -> Published:
    return Published()


@pytest.fixture(scope="session")
def nvfp4() -> Published:
    """The same sizes with NVFP4 experts in layer 1 of the three."""
    return Published(replace(SMALL, nvfp4_layers=(1,)))


@pytest.fixture(scope="session")
def source(published, tmp_path_factory) -> Path:
    """The small checkpoint in two shards; not to be changed."""
    return published.write(tmp_path_factory.mktemp("published") / "small")


@pytest.fixture
def no_reads(monkeypatch):
    """Fails the test if the bytes of any tensor are touched."""
    def touched(tensor):
        raise AssertionError(f"{tensor.name} was read")

    monkeypatch.setattr("musejax.checkpoint.shards.Tensor.map", touched)


@pytest.fixture(scope="session")
def bf16():
    return np.dtype(ml_dtypes.bfloat16)

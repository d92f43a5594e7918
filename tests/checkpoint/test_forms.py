"""Table form and packed form of the same checkpoint: every way to load either, with the same bits and little memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import assert_same_bits

import musejax
from musejax import cli
from musejax.checkpoint import CheckpointError, convert, inspect, load_params
from musejax.checkpoint.container import MANIFEST
from musejax.config import MINI, ConfigError
from musejax.info import byte_counts, parameter_counts
from musejax.packing import abstract_packed, is_packed, pack_params, packed_table, unpack_params
from musejax.params import leaf_of, table, unslice_tensor
from musejax.sharding import make_mesh, param_sharding


@pytest.fixture(scope="module", params=["bf16", "nvfp4"])
def checkpoint(request, published, nvfp4, tmp_path_factory):
    """(what it is, published folder, converted folder); not to be changed."""
    what = {"bf16": published, "nvfp4": nvfp4}[request.param]
    folder = tmp_path_factory.mktemp("forms")
    source = what.write(folder / "published")
    return what, source, convert(source, folder / "converted", progress=False)


@pytest.mark.parametrize("devices", [None, 1, 2, 4, 8])
def test_every_way(checkpoint, devices):
    what, source, converted = checkpoint
    mesh = devices and make_mesh(devices)
    expected = {"table": load_params(source)[1]}
    expected["packed"] = pack_params(expected["table"], what.config)
    for path in (source, converted):
        for form, rows in (("table", table(what.config)), ("packed", packed_table(what.config))):
            config, params = load_params(path, mesh=mesh, form=form)
            assert config == what.config and is_packed(params) == (form == "packed")
            for row in rows:
                leaf = leaf_of(params, row)
                assert_same_bits(leaf, leaf_of(expected[form], row))
                if mesh:
                    assert leaf.sharding == param_sharding(row, mesh), row.name
                else:
                    assert leaf.sharding.device_set == {jax.devices()[0]}
            if form == "packed":
                abstract = abstract_packed(config, mesh or None)
                assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
                    lambda x: (x.shape, x.dtype), params)


def test_load_pack_unpack_is_the_identity(checkpoint):
    """The published tensors come back byte for byte, NVFP4 codes and scales too: nothing is quantised again."""
    what, source, converted = checkpoint
    for path in (source, converted):
        config, packed = load_params(path, form="packed")
        params = unpack_params(jax.tree.map(np.asarray, packed), config)
        for param in table(config):
            assert_same_bits(unslice_tensor(param, leaf_of(params, param)), what.tensors[param.hf_key])
        assert {p.hf_key for p in table(config)} == set(what.tensors)


def test_overlay_is_packed(published, source, tmp_path):
    key = next(name for name in published.tensors if name.endswith("layers.2.mlp.gate.weight"))
    tensors = {key: np.roll(published.tensors[key], 1)}
    overlay = type(published).write(published, tmp_path / "overlay", tensors, shards=1)
    (_, a), (_, b) = (load_params(source, overlay=overlay, form=form) for form in ("packed", "table"))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(pack_params(b, published.config)), strict=True):
        assert_same_bits(x, y)


def test_wrong_form(source):
    with pytest.raises(ConfigError, match="form: expected one of table, packed, got 'sliced'"):
        load_params(source, form="sliced")


# ------------------------------------------------------------------ sizes that do not pack


@pytest.fixture(scope="module")
def unpackable(published, tmp_path_factory):
    """(what it is, published folder, converted folder) of heads of 24 columns: 8 slices, and no whole tiles."""
    config = replace(published.config, head_dim=24)
    what = type(published)(config)
    folder = tmp_path_factory.mktemp("unpackable")
    source = what.write(folder / "published")
    return what, source, convert(source, folder / "converted", progress=False)


def test_table_form_is_kept(unpackable, capsys):
    what, source, converted = unpackable
    assert json.loads((converted / MANIFEST).read_text())["packed"] is False
    for mesh in (None, make_mesh(8)):
        config, params = load_params(converted, mesh=mesh)
        assert config == what.config
        for param in table(config):
            assert unslice_tensor(param, np.asarray(leaf_of(params, param))).tobytes() == what.tensors[
                param.hf_key].tobytes()
    for path in (source, converted):
        with pytest.raises(ConfigError, match=r"(?s)no packed form on a mesh of 1.*head_dim .*multiple of 16.* got 24"):
            load_params(path, form="packed")
    assert cli.main(["info", str(converted)]) == 0
    assert "container format 2, table form\n" in capsys.readouterr().out


def test_conversion_says_why(unpackable, tmp_path, capfd):
    convert(unpackable[1], tmp_path / "out")
    assert "have no packed form, so the table form is written:\n  head_dim " in capfd.readouterr().err


def test_sizes_that_do_not_divide_are_refused(shared, tmp_path, capsys):
    source = shared / "data/hf_tiny"
    with pytest.raises(CheckpointError, match=r"(?s)cannot be cut into 8 slices.*num_attention_heads: expected"):
        convert(source, tmp_path / "out", progress=False)
    assert cli.main(["convert", str(source), str(tmp_path / "out")]) == 2
    assert "num_attention_heads" in capsys.readouterr().err and not (tmp_path / "out").exists()
    config, params = load_params(source)
    assert leaf_of(params, table(config)[0]).shape[0] == 1  # it loads as it is, on one device


def test_table_form_of_sizes_that_pack(unpackable, published, tmp_path, monkeypatch):
    """As a conversion with other rules for packing could have left it."""
    monkeypatch.setattr("musejax.checkpoint.conversion.packing_problems", lambda config: ["none wanted"])
    path = convert(published.write(tmp_path / "src"), tmp_path / "out", progress=False)
    assert inspect(path).packed_bytes == 0
    load_params(path)
    with pytest.raises(CheckpointError, match="expected the packed form, got the table form; convert the source again"):
        load_params(path, form="packed")


# ------------------------------------------------------------------ info


def test_info(checkpoint, capsys):
    what, source, converted = checkpoint
    reports = []
    for path in (source, converted):
        assert cli.main(["info", str(path), "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    for key in ("config", "parameters", "bytes", "groups"):
        assert reports[0][key] == reports[1][key], key
    plain = replace(what.config, nvfp4_layers=())
    assert reports[1]["parameters"] == parameter_counts(plain) and reports[1]["bytes"] == byte_counts(plain)
    count = sum(row.nbytes for row in packed_table(what.config))
    assert reports[1]["container"] == {"format_number": 2, "packed": True, "packed_bytes": count}
    assert reports[0]["container"] is None
    assert cli.main(["info", str(converted)]) == 0
    out = capsys.readouterr().out
    assert f"container format 2, packed form, {count:,} bytes\n" in out and "groups, before packing" in out


# ------------------------------------------------------------------ memory

MEASURE = """
import re, sys
import jax
from musejax.checkpoint import load_params
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
load_params(sys.argv[1], form=sys.argv[3])  # loads what is loaded once
before = peak()
params = load_params(sys.argv[2], form=sys.argv[3])[1]
print(peak() - before, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


def test_memory_of_loading(published, source, tmp_path):
    """The weights are never there twice: the peak is the parameters and a few layers."""
    config = replace(MINI, num_hidden_layers=24, layer_types=(), layer_rope_theta=(), hidden_size=256,
                     moe_hidden_size=256, moe_intermediate_size=512, num_local_experts=16)
    folder = type(published)(config, seed=1).write(tmp_path / "big", shards=4)
    converted = convert(folder, tmp_path / "out", progress=False)
    small = convert(source, tmp_path / "small", progress=False)
    env = os.environ | {"PYTHONPATH": str(Path(musejax.__path__[0]).parent), "JAX_PLATFORMS": "cpu",
                        "MALLOC_ARENA_MAX": "1"}  # holes between the allocations of many threads are not meant
    for form, path, warm in (("packed", folder, source), ("table", converted, small), ("packed", converted, small)):
        out = subprocess.run([sys.executable, "-P", "-c", MEASURE, str(warm), str(path), form], env=env, text=True,
                             capture_output=True, timeout=120, check=True).stdout
        growth, total = map(int, out.split())
        print(f"{path.name} as {form}: {growth:,} bytes for {total:,}")
        assert total > 300e6 and growth < 1.3 * total, f"{path.name} as {form}: {growth:,} bytes for {total:,}"

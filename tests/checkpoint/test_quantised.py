"""NVFP4 experts in checkpoints: what loads, bit for bit, and what is refused, by name."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import safetensors
from helpers import assert_same_bits
from safetensors.numpy import load_file, save_file

from musejax.checkpoint import CheckpointError, convert, inspect, load_params
from musejax.config import ConfigError
from musejax.info import byte_counts
from musejax.params import TEXT, leaf_of, slice_tensor, table, unslice_tensor
from musejax.sharding import make_mesh, param_sharding

LAYER = TEXT + "layers.1.mlp.experts."
GATE_UP, DOWN = LAYER + "gate_up_proj", LAYER + "down_proj"
QUANT = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None,
                          "exclude_modules": ["*layers.0*"]}}


def write(published, folder, tensors=None, declaration=QUANT):
    published.write(folder, tensors)
    if declaration is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(declaration))
    return folder


def assert_load_save_identity(params, config, tensors):
    """Every leaf, put back into its published shape, has the bits of the file."""
    for param in table(config):
        leaf = np.asarray(leaf_of(params, param))
        assert_same_bits(leaf, slice_tensor(param, tensors[param.hf_key]))
        assert_same_bits(unslice_tensor(param, leaf), tensors[param.hf_key])


# ------------------------------------------------------------------ what loads


@pytest.mark.parametrize("devices", [None, 2, 8])
def test_load_and_save_is_the_identity(nvfp4, tmp_path, devices):
    mesh = devices and make_mesh(devices)
    config, params = load_params(write(nvfp4, tmp_path / "x"), mesh=mesh)
    assert config == nvfp4.config and config.nvfp4_layers == (1,)
    assert_load_save_identity(params, config, nvfp4.tensors)
    assert "gate_up_scale" in params["layers"][1] and "gate_up_scale" not in params["layers"][0]
    if mesh:
        for param in table(config):
            assert leaf_of(params, param).sharding == param_sharding(param, mesh)


@pytest.mark.parametrize("name", ["hf_tiny", "hf_mini"])
def test_overlay_on_the_bf16_folder(shared, name):
    """Tensors of the same name change dtype and shape, scales are added."""
    folder = shared / "data" / name
    config, params = load_params(folder, overlay=folder / "nvfp4")
    assert config.nvfp4_layers == tuple(range(1, config.num_hidden_layers - 1))
    tensors = load_file(folder / "model.safetensors") | load_overlay(folder / "nvfp4/model-experts.safetensors", config)
    assert_load_save_identity(params, config, tensors)


def load_overlay(file, config):
    """safetensors' own NumPy functions do not know E4M3."""
    dtypes = {p.hf_key: p.dtype for p in table(config)}
    return {name: np.frombuffer(t["data"], dtypes[name]).reshape(t["shape"])
            for name, t in safetensors.deserialize(file.read_bytes())}


def test_bf16_overlay_takes_the_scales_away(nvfp4, published, tmp_path):
    folder = write(nvfp4, tmp_path / "x")
    (tmp_path / "bf16").mkdir()
    save_file({n: published.tensors[n] for n in (GATE_UP, DOWN)}, tmp_path / "bf16/x.safetensors")
    config, params = load_params(folder, overlay=tmp_path / "bf16")
    assert config.nvfp4_layers == ()
    assert_same_bits(unslice_tensor(rows(config)[GATE_UP], np.asarray(params["layers"][1]["gate_up"])),
                     published.tensors[GATE_UP])
    (tmp_path / "half").mkdir()
    save_file({DOWN: published.tensors[DOWN]}, tmp_path / "half/x.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)down_proj: expected U8, got BF16.*missing tensor \(3\)"):
        load_params(folder, overlay=tmp_path / "half")


def rows(config):
    return {p.hf_key: p for p in table(config)}


@pytest.mark.parametrize("where", ["hf_quant_config", "quantization_config", "config_groups", "text_config", "nowhere"])
def test_declarations(nvfp4, tmp_path, where):
    folder = write(nvfp4, tmp_path / "x", declaration=QUANT if where == "hf_quant_config" else None)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    if where == "quantization_config":
        config["quantization_config"] = settings | {"group_size": 16}
    elif where == "config_groups":
        config["quantization_config"] = settings | {"config_groups": {"group_0": {"weights": {"group_size": 16}}}}
    elif where == "text_config":
        config["text_config"]["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    assert load_params(folder)[0] == nvfp4.config


def test_conversion_and_restore(nvfp4, published, tmp_path):
    folder = convert(write(nvfp4, tmp_path / "x"), tmp_path / "y", progress=False)
    for devices in (1, 4):
        config, params = load_params(folder, mesh=make_mesh(devices))
        assert config == nvfp4.config
        assert_load_save_identity(params, config, nvfp4.tensors)
    assert inspect(folder).groups == inspect(tmp_path / "x").groups
    assert load_params(folder, published.config)[0] == nvfp4.config


def test_counts(nvfp4, published, tmp_path, no_reads):
    summary = inspect(write(nvfp4, tmp_path / "x"))
    assert summary.nbytes == sum(x.nbytes for x in nvfp4.tensors.values())
    assert summary.nbytes == byte_counts(published.config)["total_nvfp4"]
    assert summary.parameters == sum(p.size for p in table(published.config))
    assert summary.groups["experts"].dtypes == ("BF16", "F32", "F8_E4M3", "U8")


def test_layers_and_sizes_are_checked(published):
    with pytest.raises(ConfigError, match="moe_hidden_size: expected a multiple of 16"):
        replace(published.config, moe_hidden_size=120, nvfp4_layers=(1,))
    with pytest.raises(ConfigError, match="nvfp4_layers: expected layers 0 to 2, got 3"):
        replace(published.config, nvfp4_layers=(3,))


# ------------------------------------------------------------------ declarations that are refused


@pytest.mark.parametrize(("change", "message"), [
    ({"quant_algo": "FP8"}, "expected quant_algo NVFP4, got 'FP8'"),
    ({"quant_algo": "MIXED_PRECISION"}, "got 'MIXED_PRECISION'"),
    ({"group_size": 32}, "expected group_size 16, got 32"),
    ({"config_groups": {"g": {"weights": {"group_size": 8}}}}, "expected group_size 16, got 8"),
])
def test_other_quantisations_are_refused_by_name(nvfp4, tmp_path, no_reads, change, message):
    folder = write(nvfp4, tmp_path / "x", declaration={"quantization": QUANT["quantization"] | change})
    with pytest.raises(CheckpointError, match=message):
        load_params(folder)
    (folder / "hf_quant_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANT["quantization"] | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_params(folder)


def test_declared_but_not_there(published, tmp_path, no_reads):
    with pytest.raises(CheckpointError, match="x declares them, but has no packed codes"):
        load_params(write(published, tmp_path / "x"))
    (tmp_path / "x/hf_quant_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object, got list"):
        load_params(tmp_path / "x")
    (tmp_path / "x/hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected an object that describes the quantisation, got None"):
        load_params(tmp_path / "x")


# ------------------------------------------------------------------ tensors that are refused


def test_everything_missing_is_named(nvfp4, tmp_path, no_reads):
    lost = [GATE_UP + "_weight_scale", GATE_UP + "_weight_scale_2", DOWN, DOWN + "_input_scale"]
    tensors = {n: x for n, x in nvfp4.tensors.items() if n not in lost}
    with pytest.raises(CheckpointError) as caught:
        load_params(write(nvfp4, tmp_path / "x", tensors))
    assert "missing tensor (4)" in str(caught.value) and "Layers 1 are taken for NVFP4" in str(caught.value)
    assert all(f"{name}: expected" in str(caught.value) for name in lost)
    assert f"{lost[0]}: expected F8_E4M3 [8, 256, 8]" in str(caught.value)


CONTRADICTIONS = {
    "scales beside BF16": (lambda t, b: t | {DOWN: b[DOWN]}, r"down_proj: expected U8, got BF16"),
    "codes without scales": (lambda t, b: b | {DOWN: t[DOWN]},
                             r"(?s)gate_up_proj: expected U8, got BF16.*missing tensor \(6\)"),
    "one scale for gate and up": (lambda t, b: t | {GATE_UP + "_weight_scale_2": np.ones(8, np.float32)},
                                  r"scale_2: expected \[8, 2\], got \[8\]"),
    "scales of 32": (lambda t, b: t | {DOWN + "_weight_scale": t[DOWN + "_weight_scale"][..., :4].copy()},
                     r"scale: expected \[8, 128, 8\], got \[8, 128, 4\]"),
    "scales as bytes": (lambda t, b: t | {DOWN + "_weight_scale": t[DOWN + "_weight_scale"].view(np.uint8)},
                        "scale: expected F8_E4M3, got U8"),
    "a layer too many": (lambda t, b: t | {DOWN.replace("1", "7") + "_input_scale": np.ones(8, np.float32)},
                         r"unexpected tensor \(1\)"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradiction(nvfp4, published, tmp_path, no_reads, name):
    spoil, message = CONTRADICTIONS[name]
    with pytest.raises(CheckpointError, match=message):
        load_params(write(nvfp4, tmp_path / "x", spoil(nvfp4.tensors, published.tensors)))


def with_byte(tensors, name, index, byte):
    x = tensors[name].view(np.uint8).copy()
    x[index] = byte
    return tensors | {name: x.view(tensors[name].dtype)}


def with_number(tensors, name, index, value):
    x = tensors[name].copy()
    x[index] = value
    return tensors | {name: x}


BAD_VALUES = {
    "NaN": (lambda t: with_byte(t, DOWN + "_weight_scale", (3, 5, 1), 0x7F), r"weight_scale\[3, 5, 1\]: .*got NaN \(1"),
    "-NaN": (lambda t: with_byte(t, GATE_UP + "_weight_scale", (0, 0, 0), 0xFF), r"weight_scale\[0, 0, 0\]: .*got NaN"),
    "negative": (lambda t: with_byte(t, DOWN + "_weight_scale", (7, 127, 7), 0x81), r"\[7, 127, 7\]: .* byte 0x81 \(1"),
    "-0": (lambda t: with_byte(t, DOWN + "_weight_scale", (7, 127, 7), 0x80), r"\[7, 127, 7\]: .* byte 0x80"),
    "0 over codes": (lambda t: with_byte(with_byte(t, DOWN + "_weight_scale", (2, 9, 4), 0), DOWN, (2, 9, 33), 0x10),
                     r"weight_scale\[2, 9, 4\]: expected codes of 0 under a scale of 0, got others \(1 blocks"),
    "global NaN": (lambda t: with_number(t, GATE_UP + "_weight_scale_2", (4, 1), np.nan), r"2\[4, 1\]: .*got nan"),
    "global negative": (lambda t: with_number(t, DOWN + "_weight_scale_2", 4, -1), r"scale_2\[4\]: .*got -1"),
    "input 0": (lambda t: with_number(t, DOWN + "_input_scale", 4, 0), r"input_scale\[4\]: .*above 0, got 0"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_end_loading_and_conversion(nvfp4, tmp_path, name):
    spoil, message = BAD_VALUES[name]
    folder = write(nvfp4, tmp_path / "x", spoil(nvfp4.tensors))
    with pytest.raises(CheckpointError, match=message):
        load_params(folder)
    with pytest.raises(CheckpointError, match=message):
        convert(folder, tmp_path / "y", progress=False)
    assert not (tmp_path / "y").exists()


def test_scale_0_over_zero_codes_is_legal(nvfp4, tmp_path):
    tensors = with_byte(nvfp4.tensors, DOWN + "_weight_scale", (2, 9, 4), 0)
    tensors = with_byte(tensors, DOWN, (2, 9, slice(32, 40)), 0x80)  # 0 and -0
    config, params = load_params(write(nvfp4, tmp_path / "x", tensors))
    assert_load_save_identity(params, config, tensors)


def test_random_parameters_are_bf16(nvfp4):
    from musejax.params import init_params

    with pytest.raises(ConfigError, match="random parameters are BF16"):
        init_params(nvfp4.config, jax.random.key(0))

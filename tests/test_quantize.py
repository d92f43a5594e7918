"""`musejax quantize`: the published NVFP4 form, with the bits of the reference, from every BF16 form."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
from helpers import assert_same_bits
from safetensors.numpy import load_file, save_file

from musejax import cli
from musejax.checkpoint import CheckpointError, load_params, quantize
from musejax.checkpoint.quantisation import PARTIAL
from musejax.config import ConfigError
from musejax.nvfp4 import dequantize
from musejax.params import TEXT
from musejax.paths import nano_path

EXPERTS = TEXT + "layers.{}.mlp.experts."
DTYPES = {"U8": np.uint8, "F8_E4M3": np.uint8, "F32": np.float32, "BF16": ml_dtypes.bfloat16}


def read(folder):
    """Tensors of all files by safetensors' own parser; E4M3 as bytes."""
    return {name: np.frombuffer(t["data"], DTYPES[t["dtype"]]).reshape(t["shape"])
            for file in sorted(folder.glob("*.safetensors")) for name, t in safetensors.deserialize(file.read_bytes())}


@pytest.fixture(scope="module")
def nano_nvfp4(tmp_path_factory):
    """-> (folder, errors)"""
    folder = tmp_path_factory.mktemp("quantised") / "nano"
    return folder, quantize(nano_path(), folder, progress=False)


def test_nano_has_the_bits_of_the_reference(nano_nvfp4, reference):
    folder, errors = nano_nvfp4
    old, new = read(nano_path()), read(folder)
    assert [e.layer for e in errors] == [1, 2, 3, 4]
    for layer in range(1, 5):
        stem = EXPERTS.format(layer)
        for name, halves in (("gate_up_proj", 2), ("down_proj", 1)):
            w = old.pop(stem + name).astype(np.float32)
            codes, scales, totals, given = (new.pop(stem + name + end) for end in (
                "", "_weight_scale", "_weight_scale_2", "_input_scale"))
            assert (given == 1).all() and given.shape == totals.shape == ((16, 2) if halves == 2 else (16,))
            for e in range(16):
                want = [reference.quantize_weight(part) for part in np.split(w[e], halves)]
                assert_same_bits(codes[e], np.concatenate([x[0] for x in want]))
                assert_same_bits(scales[e], np.concatenate([x[1] for x in want]))
                assert_same_bits(totals[e].reshape(-1), np.array([x[2] for x in want]))
    assert old.keys() == new.keys()  # everything else is as it was
    for name in old:
        assert_same_bits(new[name], old[name])


def test_errors_are_those_of_the_stored_weights(nano_nvfp4):
    folder, errors = nano_nvfp4
    old, new = read(nano_path()), read(folder)
    for error in errors:
        stem = EXPERTS.format(error.layer) + "down_proj"
        w = old[stem].astype(np.float64)
        scale = new[stem + "_weight_scale"].view(ml_dtypes.float8_e4m3fn)
        off = dequantize(new[stem], scale, new[stem + "_weight_scale_2"]) - w
        assert error.down == pytest.approx(np.sqrt(np.mean(off**2) / np.mean(w**2)), rel=1e-6)
        assert 0.08 < error.gate_up < 0.11 and 0.08 < error.down < 0.11


def test_layout_of_the_folder(nano_nvfp4):
    folder, _ = nano_nvfp4
    source = {f.name for f in nano_path().iterdir() if f.is_file()}
    assert {f.name for f in folder.iterdir()} >= (source & {"config.json", "tokenizer.json", "chat_template.jinja"})
    assert {f.name for f in folder.glob("*.safetensors")} == {n for n in source if n.endswith(".safetensors")}
    declared = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert (declared["quant_algo"], declared["group_size"]) == ("NVFP4", 16)
    assert [m for m in declared["exclude_modules"] if "experts" in m] == [
        f"model.language_model.layers.{i}.mlp.experts*" for i in (0, 5)]
    assert not folder.with_name(folder.name + PARTIAL).exists()
    config, _ = load_params(folder)
    assert config.nvfp4_layers == (1, 2, 3, 4)


def test_fixture_overlay_is_what_quantising_gives(shared, tmp_path):
    """The fixture's codes came from the reference library's weights, input scales apart."""
    folder = shared / "data/hf_tiny"
    quantize(folder, tmp_path / "x", progress=False)
    assert sorted(f.name for f in (tmp_path / "x").glob("*.safetensors*")) == ["model.safetensors"]
    made = load_params(tmp_path / "x")[1]["layers"]
    given = load_params(folder, overlay=folder / "nvfp4")[1]["layers"]
    for a, b in zip(made, given, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not name.endswith("input_scale"):
                assert_same_bits(a[name], b[name])


def test_experts_one_by_one_and_another_prefix(tmp_path, nano_nvfp4):
    """The codes are stacked, behind the prefix of the source."""
    out = {}
    for name, x in load_file_set(nano_path()).items():
        name = name.replace(TEXT, "model.")
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            out |= {f"{stem}{e}.{part}.weight": half.copy() for e in range(len(x))
                    for part, half in zip(("gate_proj", "up_proj"), np.split(x[e], 2), strict=True)}
        elif name.endswith("experts.down_proj"):
            out |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": x[e] for e in range(len(x))}
        else:
            out[name] = x
    (tmp_path / "src").mkdir()
    save_file(out, tmp_path / "src/model.safetensors")
    (tmp_path / "src/config.json").write_text((nano_path() / "config.json").read_text())
    quantize(tmp_path / "src", tmp_path / "x", progress=False)
    want = read(nano_nvfp4[0])
    made = read(tmp_path / "x")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in made  # layer 0 stays as it was
    for layer in range(1, 5):
        for end in ("gate_up_proj", "gate_up_proj_weight_scale", "down_proj", "down_proj_weight_scale_2"):
            assert_same_bits(made[f"model.layers.{layer}.mlp.experts.{end}"], want[EXPERTS.format(layer) + end])


def load_file_set(folder):
    return {n: x for file in folder.glob("*.safetensors") for n, x in load_file(file).items()}


# ------------------------------------------------------------------ refusals


def test_destination_in_the_way(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/file").touch()
    with pytest.raises(CheckpointError, match="already exists"):
        quantize(nano_path(), tmp_path / "x", progress=False)
    work = tmp_path / f"y{PARTIAL}"
    work.mkdir()
    (work / "something").touch()
    with pytest.raises(CheckpointError, match="expected nothing, or what an interrupted quantisation left"):
        quantize(nano_path(), tmp_path / "y", progress=False)
    (work / "hf_quant_config.json").touch()
    quantize(nano_path(), tmp_path / "y", progress=False)
    assert not work.exists() and not (tmp_path / "y/something").exists()


def test_source_that_is_quantised_already(nano_nvfp4, tmp_path):
    with pytest.raises(CheckpointError, match="expected BF16 experts, got NVFP4 in layers 1, 2, 3, 4"):
        quantize(nano_path().parent / nano_nvfp4[0], tmp_path / "x", progress=False)


def test_layers_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="expected layers 0 to 5, got 6"):
        quantize(nano_path(), tmp_path / "x", layers=[1, 6], progress=False)
    with pytest.raises(CheckpointError, match="expected layers to quantise, got none"):
        quantize(nano_path(), tmp_path / "x", layers=[], progress=False)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_after_a_fault(tmp_path, monkeypatch):
    tensors = load_file_set(nano_path())
    name = EXPERTS.format(2) + "down_proj"
    tensors[name] = tensors[name].copy()
    tensors[name][7, 3, 2] = np.nan
    (tmp_path / "src").mkdir()
    save_file(tensors, tmp_path / "src/model.safetensors")
    (tmp_path / "src/config.json").write_text((nano_path() / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.down_proj: expert 7: NVFP4: expected finite"):
        quantize(tmp_path / "src", tmp_path / "x", progress=False)
    assert [f.name for f in tmp_path.iterdir()] == ["src"]


# ------------------------------------------------------------------ the command


def test_command(tmp_path, capsys):
    assert cli.main(["quantize", str(nano_path()), str(tmp_path / "x"), "--layers", "0,2-3", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["layer 0", "layer 2", "layer 3"]
    assert all("relative RMS error gate_up 9." in line for line in lines)
    assert load_params(tmp_path / "x")[0].nvfp4_layers == (0, 2, 3)
    assert cli.main(["quantize", str(nano_path()), str(tmp_path / "x")]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-2", "1,,2", "0-99999999999"])
def test_layer_lists_that_are_none(text, capsys):
    assert cli.main(["quantize", "a", "b", "--layers", text]) == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(("activations", "devices"), [
    ("bf16", 1), ("nvfp4_static", 1), ("nvfp4_per_token", 1), ("nvfp4_per_token", 4)])
def test_quantised_nano_generates(nano_nvfp4, capsys, activations, devices):
    assert cli.main(["generate", str(nano_nvfp4[0]), "--activations", activations, "--devices", str(devices), "--json",
                     "--quiet", "--max-new-tokens", "24", "--prompt", "Question: What is 3 times 14?\nAnswer:"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["settings"]["activations"] == activations and result["generated_tokens"] > 3
    assert "42" in result["text"]


def test_exact_policy_takes_no_quantised_activations(nano_nvfp4, capsys):
    assert cli.main(["generate", str(nano_nvfp4[0]), "--activations", "nvfp4_static", "--policy", "exact",
                     "--prompt", "x"]) == 2
    assert "policy exact rounds nothing" in capsys.readouterr().err

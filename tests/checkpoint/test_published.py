"""Published names -> the parameter table, on what a loader meets in the wild."""

import json
import re
import warnings

import jax
import numpy as np
import pytest
from helpers import assert_same_bits
from safetensors.numpy import load_file, save_file

from musejax.checkpoint import CheckpointError, inspect, load_params, open_published, summary_of
from musejax.config import MINI, ConfigError
from musejax.params import TEXT, leaf_of, slice_tensor, table
from musejax.sharding import make_mesh, param_sharding

LAYER = TEXT + "layers.1."
GATE_UP, DOWN = LAYER + "mlp.experts.gate_up_proj", LAYER + "mlp.experts.down_proj"
RESIDUAL_GATE = LAYER + "post_attention_residual_gate.gate"


def assert_params_are(params, config, tensors):
    """Every leaf has the bits, shape and dtype that the table makes of the published tensors."""
    for param in table(config):
        assert_same_bits(leaf_of(params, param), slice_tensor(param, tensors[param.hf_key]))


def renamed(tensors, prefix, lm_head="lm_head.weight"):
    return {lm_head if n == "lm_head.weight" else prefix + n.removeprefix(TEXT): x for n, x in tensors.items()}


def unstacked(tensors):
    """Experts one by one, as some engines write them."""
    out = {}
    for name, x in tensors.items():
        stem, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            out[name] = x
        elif last == "down_proj":
            out |= {f"{stem}.{e}.down_proj.weight": x[e] for e in range(len(x))}
        else:
            for part, rows in zip(("gate_proj", "up_proj"), np.split(x, 2, axis=1), strict=True):
                out |= {f"{stem}.{e}.{part}.weight": np.ascontiguousarray(rows[e]) for e in range(len(x))}
    return out


# ------------------------------------------------------------------ what loads


@pytest.mark.parametrize("devices", [None, 1, 2, 4, 8])
def test_load_places_every_slice(published, source, devices):
    mesh = devices and make_mesh(devices)
    config, params = load_params(source, mesh=mesh)
    assert config == published.config
    assert_params_are(params, config, published.tensors)
    if mesh:
        for param in table(config):
            assert leaf_of(params, param).sharding == param_sharding(param, mesh)


@pytest.mark.parametrize("shards", [1, 5])
def test_any_number_of_files(published, tmp_path, shards):
    config, params = load_params(published.write(tmp_path, shards=shards))
    assert_params_are(params, config, published.tensors)


@pytest.mark.parametrize(("prefix", "lm_head"), [
    ("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight"),
    ("language_model.", "lm_head.weight"), ("model.", "lm_head.weight"), ("", "model.lm_head.weight"),
])
def test_prefixes(published, tmp_path, prefix, lm_head):
    config, params = load_params(published.write(tmp_path, renamed(published.tensors, prefix, lm_head)))
    assert_params_are(params, config, published.tensors)


def test_skipped_tensors(published, tmp_path):
    extra = dict.fromkeys([
        "model.vision_tower.x.weight", "model.vision_adapter.w", "model.vision_projection.w", "vision_tower.y",
        "model.audio_tower.layers.0.w", LAYER + "self_attn.rotary_emb.inv_freq", LAYER + "mlp.num_tokens_per_expert",
        LAYER + "mlp.norm_weight", TEXT + "embed_norm.weight", LAYER + "self_attn.q_scale",
    ], np.ones(3, np.float16))
    folder = published.write(tmp_path, published.tensors | extra)
    config, params = load_params(folder)
    assert_params_are(params, config, published.tensors)
    summary = inspect(folder)
    assert (summary.skipped_tensors, summary.skipped_bytes) == (10, 60)


def test_experts_one_by_one(published, tmp_path):
    config, params = load_params(published.write(tmp_path, unstacked(published.tensors)), mesh=make_mesh(4))
    assert_params_are(params, config, published.tensors)


def test_float32_gates(published, tmp_path, bf16):
    """Gates that bfloat16 holds exactly pass silently; others are rounded to nearest even, with a warning."""
    gate = np.random.default_rng(1).normal(size=published.config.hidden_size).astype(bf16)
    folder = published.write(tmp_path, published.tensors | {RESIDUAL_GATE: gate.astype(np.float32)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, params = load_params(folder)
    assert_same_bits(params["layers"][1]["attention_residual_gate"], gate)
    fine = gate.astype(np.float32) + np.float32(1e-6)
    published.write(tmp_path, published.tensors | {RESIDUAL_GATE: fine})
    with pytest.warns(UserWarning, match=f"rounded to bfloat16: {re.escape(RESIDUAL_GATE)}"):
        _, params = load_params(folder)
    assert_same_bits(params["layers"][1]["attention_residual_gate"], fine.astype(bf16))


def test_loaded_arrays_do_not_alias_the_files(published, tmp_path):
    config, params = load_params(published.write(tmp_path, shards=1))
    with open(tmp_path / "model.safetensors", "r+b") as stream:
        stream.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert_params_are(params, config, published.tensors)


@pytest.mark.parametrize("name", ["hf_mini", "hf_tiny"])
def test_reference_checkpoints(shared, name):
    folder = shared / "data" / name
    config, params = load_params(folder)
    assert_params_are(params, config, load_file(folder / "model.safetensors"))


def test_sizes_without_slices_load_on_one_device_only(shared):
    with pytest.raises(ConfigError, match="cannot be cut into 8 slices"):
        load_params(shared / "data/hf_tiny", mesh=make_mesh(2))


# ------------------------------------------------------------------ overlays


def test_overlay(published, source, tmp_path):
    """Later overlays win, and names may be spelt another way than the base's."""
    rng = np.random.default_rng(5)
    q = TEXT + "layers.0.self_attn.q_proj.weight"
    new = {n: rng.integers(0, 256, published.tensors[n].nbytes, np.uint8).view(published.tensors[n].dtype)
              .reshape(published.tensors[n].shape) for n in (q, DOWN, "lm_head.weight")}
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    save_file({q: new["lm_head.weight"][:1], "lm_head.weight": new["lm_head.weight"]}, tmp_path / "first/a.safetensors")
    save_file({"model.layers.0.self_attn.q_proj.weight": new[q]}, tmp_path / "second/a.safetensors")
    save_file(unstacked({DOWN: new[DOWN]}), tmp_path / "second/b.safetensors")
    config, params = load_params(source, overlay=[tmp_path / "first", tmp_path / "second"])
    assert_params_are(params, config, published.tensors | new)


@pytest.mark.parametrize(("tensors", "message"), [
    ({LAYER + "self_attn.q_proj.bias": np.ones(3, np.float32)}, r"(?s)overlay tensor replaces nothing.*q_proj\.bias"
     r".*An overlay may only replace tensors of the base\.$"),
    ({"vision_tower.weight": np.ones(3, np.float32)}, r"overlay: only tensors that the decoder skips, such as vision_"),
    ({RESIDUAL_GATE: np.ones(3, np.float32)}, r"gate: expected \[128\], got \[3\] in overlay/x\.safetensors"),
    ({LAYER + "mlp.experts.1.down_proj.weight": np.ones((128, 128), np.float32)}, r"(?s)missing tensor \(7\)"),
])
def test_overlay_faults(source, tmp_path, no_reads, tensors, message):
    (tmp_path / "overlay").mkdir()
    save_file(tensors, tmp_path / "overlay/x.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_params(source, overlay=tmp_path / "overlay")


def test_overlay_is_not_there(source, tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load_params(source, overlay=tmp_path / "absent")
    with pytest.raises(CheckpointError, match="none in it"):
        load_params(source, overlay=tmp_path)


# ------------------------------------------------------------------ faults


def without(*names):
    return lambda tensors: {n: x for n, x in tensors.items() if n not in names}


FAULTS = {
    "missing": (without(DOWN), r"missing tensor \(1\):\s+\S+down_proj: expected BF16 \[8, 128, 128\]"),
    "unexpected": (lambda t: t | {LAYER + "mlp.bias": np.ones(2, np.float32)},
                   r"unexpected tensor \(1\):\s+\S+layers\.1\.mlp\.bias: F32 \[2\] in "),
    "layer too many": (lambda t: t | {TEXT + "layers.3.input_layernorm.weight": np.ones(128, np.float32)},
                       r"unexpected tensor \(1\):\s+\S+layers\.3\.input"),
    "wrong shape": (lambda t: t | {DOWN: t[DOWN][:4]},
                    r"wrong shape \(1\):\s+\S+down_proj: expected \[8, 128, 128\], got \[4, 128, 128\] in "),
    "wrong dtype": (lambda t: t | {LAYER + "mlp.gate.weight": t[LAYER + "self_attn.q_proj.weight"][:8].copy()},
                    r"wrong dtype \(1\):\s+\S+mlp\.gate\.weight: expected F32, got BF16 in "),
    "wrong expert": (lambda t: unstacked(t) | {LAYER + "mlp.experts.7.up_proj.weight": np.ones((128, 64), np.float32)},
                     r"(?s)7\.up_proj\.weight: expected \[128, 128\].*7\.up_proj\.weight: expected BF16, got F32"),
    "two spellings": (lambda t: t | {"model.norm.weight": t[TEXT + "norm.weight"]},
                      r"tensor twice \(1\):\s+model\.language_model\.norm\.weight: as (model\.\S+norm\.weight| and )+"),
    "experts both ways": (lambda t: t | unstacked({DOWN: t[DOWN]}), "experts both stacked and one by one"),
    "packed experts": (lambda t: t | {DOWN: np.ones((8, 128, 64), np.uint8), DOWN + "_weight_scale_2": np.ones(8)},
                       r"(?s)wrong dtype.*missing tensor \(5\).*Layers 1 are taken for NVFP4"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(published, tmp_path, no_reads, name):
    spoil, message = FAULTS[name]
    folder = published.write(tmp_path, spoil(published.tensors))
    with pytest.raises(CheckpointError, match=message):
        load_params(folder)


def test_all_faults_at_once(published, tmp_path, no_reads):
    tensors = published.tensors
    for name in ("missing", "unexpected", "layer too many", "wrong dtype"):
        tensors = FAULTS[name][0](tensors)
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][:3]}
    with pytest.raises(CheckpointError) as caught:
        load_params(published.write(tmp_path, tensors))
    for text in ("missing tensor (1)", "unexpected tensor (2)", "wrong dtype (1)", "wrong shape (1)"):
        assert text in str(caught.value)


def test_unknown_architecture(source, tmp_path, no_reads):
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "x.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="expected MuseSparkForConditionalGeneration, got LlamaForCausalLM"):
        load_params(tmp_path)


def test_nothing_to_load(tmp_path):
    with pytest.raises(CheckpointError, match="expected a checkpoint folder, found nothing"):
        load_params(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"expected musejax\.json .* or model\.safetensors\.index\.json or"):
        load_params(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="found a file"):
        load_params(tmp_path / "file")


def test_given_config_is_used(published, source):
    with pytest.raises(CheckpointError, match=r"missing tensor \(\d+\)"):
        load_params(source, MINI)
    assert load_params(source, published.config)[0] == published.config


# ------------------------------------------------------------------ summaries


def test_inspect(published, source, no_reads):
    summary = inspect(source)
    assert (summary.form, summary.config, summary.files) == ("published", published.config, 2)
    assert summary.parameters == sum(x.size for x in published.tensors.values())
    assert summary.nbytes == sum(x.nbytes for x in published.tensors.values())
    assert summary.groups["router"].dtypes == ("F32",) and summary.groups["experts"].dtypes == ("BF16",)
    assert summary_of(published.config).groups == summary.groups


def test_open_reads_nothing(source, no_reads):
    assert len(open_published(source).sources) == len(table(open_published(source).config))


def test_default_device_is_respected(source):
    with jax.default_device(jax.devices()[3]):
        _, params = load_params(source)
    assert params["embed"].devices() == {jax.devices()[3]}

"""Drafter folders: config.json by its rules, tensors matched exactly, both spellings, every fault at once."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from safetensors.numpy import load_file, save_file

from musejax.checkpoint.errors import CheckpointError
from musejax.config import MINI, NANO, RELEASED, ConfigError
from musejax.speculation import params as dp
from musejax.speculation.config import NANO_DRAFTER, DraftConfig, default_taps

SMALL = replace(NANO_DRAFTER, num_hidden_layers=2, hidden_size=32, vocab_size=64, mask_token_id=63, bos_token_id=None,
                eos_token_id=None, pad_token_id=None, selector_rank=8, intermediate_size=48, num_attention_heads=2,
                num_key_value_heads=1, head_dim=16)
DFLASH_1 = replace(SMALL, conv_kernel_size=None, conv_group_size=None, selector_rank=None, selector_top_k=None)


def changed(config=SMALL, inner=None, **top) -> dict:
    """to_hf() with keys replaced; None takes a key out."""
    out = config.to_hf()
    for part, values in ((out, top), (out["dflash_config"], inner or {})):
        for key, value in values.items():
            part.pop(key, None) if value is None else part.__setitem__(key, value)
    return out


# ------------------------------------------------------------------ config.json


def test_nano_drafter():
    assert dp.num_parameters(NANO_DRAFTER) == 2_686_080
    assert len(dp.required(NANO_DRAFTER)) == 81  # section 1.3
    assert NANO_DRAFTER.depth == 15 and NANO_DRAFTER.candidates == 16
    NANO_DRAFTER.check_against(NANO)


@pytest.mark.parametrize("config", [
    NANO_DRAFTER, SMALL, DFLASH_1, replace(SMALL, rope_half=False, num_target_layers=None),
    replace(SMALL, final_logit_softcapping=None, input_embedding_scale=2.0)])
def test_round_trip(config, recwarn):
    assert DraftConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert not recwarn.list


def test_the_published_form_of_the_spec():
    """The sibling of section 1.2, key by key, at Muse Spark's sizes; the taps by the formula."""
    given = {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False, "hidden_size": 8192,
        "num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 24576, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048,
        "use_sliding_window": True, "max_window_layers": 5, "rms_norm_eps": 1e-5, "rope_theta": 500000,
        "max_position_embeddings": 1048576, "attention_bias": False, "tie_word_embeddings": False, "vocab_size": 202048,
        "num_target_layers": 62, "block_size": 8, "dflash_config": {
            "mask_token_id": 201818, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
            "selector_top_k": 16, "output_multiplier": 0.17677669529663687, "final_logit_softcapping": 20.0}}
    config = DraftConfig.from_hf(given)
    assert config.target_layer_ids == (1, 16, 30, 44, 59) and config.block_size == 8 and config.rope_theta == 500000.0
    assert config.input_embedding_scale == 1.0 and config.conv_groups == 512
    assert round(dp.num_parameters(config) / 1e6) == 4384  # section 1.3
    config.check_against(RELEASED)
    shapes = {p.key: p.shape for p in dp.required(config)}
    assert shapes["layers.4.mlp_conv.kernel_projection.weight"] == (2048, 8192)
    assert shapes["layers.0.attention_conv.base_kernel"] == (2, 2, 8192)


def test_default_taps():
    assert default_taps(52, 5) == (1, 13, 25, 37, 49) and default_taps(6, 3) == (1, 2, 3)
    assert default_taps(9, 3) == (1, 4, 6)  # 3.5 goes to the even 4
    with pytest.raises(ConfigError, match="at least 2"):
        default_taps(6, 1)


def test_inner_keys_win_and_the_difference_is_told():
    with pytest.warns(UserWarning, match="block_size: 16 of dflash_config is used, not 8"):
        assert DraftConfig.from_hf(changed(block_size=8)).block_size == 16
    outer = changed(inner={"block_size": None}, block_size=8)
    assert DraftConfig.from_hf(outer).block_size == 8
    with pytest.warns(UserWarning, match="unknown keys surprise, dflash_config.other"):
        DraftConfig.from_hf(changed(inner={"other": 1}, surprise=2))
    with pytest.warns(UserWarning, match="DFlash2DraftModel, which are used"):
        assert DraftConfig.from_hf(changed(architectures=["DFlashDraftModel"])) == SMALL
    assert DraftConfig.from_hf(changed(architectures=["Another"])) == SMALL  # it has the keys


@pytest.mark.parametrize("config,message", [
    (changed(is_causal=None), "is_causal: expected false"),
    (changed(is_causal=True), "is_causal: only false"),
    (changed(inner={"conv_group_size": None}), "conv_kernel_size, conv_group_size: expected both"),
    (changed(DFLASH_1, inner={"selector_rank": 8}), "selector_rank, selector_top_k: expected both"),
    (changed(DFLASH_1, inner={"conv_kernel_size": 2, "conv_group_size": 16}), "expected both beside convolution keys"),
    (changed(DFLASH_1, architectures=["DFlash2DraftModel"]), "needs convolution and selector keys"),
    (changed(DFLASH_1, architectures=["Another"]), "architectures: expected"),
    (changed(rope_theta=1e4), "rope_theta: expected one base"),
    (changed(rope_parameters={"rope_theta": 5e5, "rope_type": "yarn"}), "only 'default'"),
    (changed(use_sliding_window=False), "use_sliding_window: expected true"),
    (changed(layer_types=None, use_sliding_window=False), "full attention is not implemented"),
    (changed(layer_types=["sliding_attention", "full_attention"]), "only 'sliding_attention'"),
    (changed(layer_types=["sliding_attention"]), "layer_types: expected 2 entries"),
    (changed(inner={"output_multiplier": 0}), "output_multiplier: expected a positive number"),
    (changed(inner={"mask_token_id": 64}), "mask_token_id: expected an id below"),
    (changed(inner={"target_layer_ids": [1, 6]}), "target_layer_ids: expected layers 0 to 5"),
    (changed(inner={"target_layer_ids": [2, 2]}), "target_layer_ids: expected distinct"),
    (changed(inner={"target_layer_ids": None}, num_target_layers=None), "to derive it from"),
    (changed(inner={"conv_group_size": 5}), "conv_group_size: expected a divisor"),
    (changed(inner={"conv_kernel_size": 3}), "conv_kernel_size: only 2"),
    (changed(attention_bias=True), "attention_bias: only False"),
    (changed(model_type="llama"), "model_type: only 'qwen3'"),
    (changed(rope_is_neox_style=True, is_neox_style=False), "rope style: expected one"),
    (changed(sliding_window=True), "sliding_window: expected a positive integer"),
    (changed(dflash_config=[]), "dflash_config: expected an object"),
])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_run_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        DraftConfig.from_hf(config)


def test_all_missing_keys_are_named(tmp_path):
    with pytest.raises(ConfigError) as err:
        DraftConfig.from_hf({})
    for key in ("is_causal", "hidden_size", "block_size", "mask_token_id", "sliding_window", "rope_theta", "head_dim"):
        assert f"{key}: expected" in str(err.value)
    with pytest.raises(ConfigError, match="found no such file"):
        DraftConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        DraftConfig.from_folder(tmp_path)


def test_check_against_names_every_mismatch():
    with pytest.raises(ConfigError) as err:
        replace(SMALL, num_target_layers=9, target_layer_ids=(0, 7)).check_against(MINI)
    for text in ("vocab_size: expected 512", "hidden_size: expected 128", "num_target_layers: expected 6",
                 "expected layers 0 to 5"):
        assert text in str(err.value)


# ------------------------------------------------------------------ tensors


@pytest.fixture(scope="module")
def tensors():
    """name -> bfloat16 array, random bits."""
    rng = np.random.default_rng(0)
    return {p.key: rng.integers(0, 256, (*p.shape, 2), np.uint8).view(ml_dtypes.bfloat16)[..., 0]
            for p in dp.required(SMALL)}


def write(folder, tensors, config=SMALL, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    save_file({key: np.ascontiguousarray(x) for key, x in tensors.items()}, folder / name)
    return folder


def respelled(name):
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return "model." + (f"{name}.weight" if name.endswith("codebook") else names.get(name, name))


@pytest.mark.parametrize("spell", [str, respelled], ids=["published", "other spelling"])
def test_load(tensors, tmp_path, spell):
    folder = write(tmp_path / "drafter", {spell(key): x for key, x in tensors.items()}, name="drafter.safetensors")
    config, params = dp.load_drafter(folder)
    assert config == SMALL
    assert set(params) == {"fc", "hidden_norm", "norm", "predecessor", "successor", "selector", "layers"}
    for param in dp.required(SMALL):
        assert_same_bits(dp.leaf_of(params, param), tensors[param.key])


def test_optional_extras(tensors, tmp_path):
    rng = np.random.default_rng(1)
    extras = {"embed_tokens.weight": (64, 32), "model.lm_head.weight": (64, 32), "mask_embedding": (1, 32)}
    extras = {key: rng.normal(size=shape).astype(ml_dtypes.bfloat16) for key, shape in extras.items()}
    _, params = dp.load_drafter(write(tmp_path / "drafter", tensors | extras))
    assert_same_bits(params["embed"], extras["embed_tokens.weight"])
    assert params["mask_embedding"].shape == (32,) and params["lm_head"].shape == (64, 32)


def test_dflash1(tensors, tmp_path):
    keys = {p.key for p in dp.required(DFLASH_1)}
    folder = write(tmp_path / "drafter", {key: x for key, x in tensors.items() if key in keys}, DFLASH_1)
    config, params = dp.load_drafter(folder)
    assert config == DFLASH_1 and "predecessor" not in params and "mlp_conv" not in params["layers"][0]


def test_every_fault_at_once(tensors, tmp_path):
    bad = dict(tensors)
    del bad["norm.weight"], bad["layers.1.self_attn.q_norm.weight"]
    bad["fc.weight"] = bad["fc.weight"][:, :-1]
    bad["layers.0.input_layernorm.weight"] = bad["layers.0.input_layernorm.weight"].astype(np.float32)
    bad |= {"layers.2.extra": np.zeros(3, ml_dtypes.bfloat16), "model.hidden_norm.weight": bad["hidden_norm.weight"]}
    folder = write(tmp_path / "drafter", bad)
    (folder / dp.PICKLED_MASK).touch()
    with pytest.raises(CheckpointError) as err:
        dp.load_drafter(folder)
    for text in ("missing tensor (2)", "norm.weight: expected BF16 [32]", "layers.1.self_attn.q_norm.weight",
                 "fc.weight: expected [32, 96], got [32, 95]", "input_layernorm.weight: expected BF16, got F32",
                 "unexpected tensor (1)", "layers.2.extra", "tensor twice (1)", "mask_embedding.pt"):
        assert text in str(err.value), text


def test_any_missing_tensor_is_an_error(tensors, tmp_path):
    for key in tensors:
        with pytest.raises(CheckpointError, match="missing tensor"):
            dp.load_drafter(write(tmp_path / "drafter", {k: x for k, x in tensors.items() if k != key}))


def test_a_file_of_another_length_is_refused(tensors, tmp_path):
    folder = write(tmp_path / "drafter", tensors)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for cut, what in ((whole[:-2], "cut by 2 bytes"), (whole + b"\0" * 8, "8 bytes too long")):
        file.write_bytes(cut)
        with pytest.raises(CheckpointError, match=what):
            dp.load_drafter(folder)


def test_another_target_is_refused(tensors, tmp_path):
    folder = write(tmp_path / "drafter", tensors)
    with pytest.raises(ConfigError, match=r"drafter: the drafter does not fit the target"):
        dp.load_drafter(folder, NANO)


def test_save_and_load(tmp_path):
    params = jax.jit(lambda: dp.init_params(SMALL, jax.random.key(0)))()
    folder = dp.save_drafter(tmp_path / "made" / "drafter", params, SMALL)
    assert {f.name for f in folder.iterdir()} == {"config.json", "model.safetensors"}
    config, loaded = dp.load_drafter(folder)
    assert config == SMALL
    assert_same_bits(loaded["fc"], np.asarray(params["fc"].astype(jnp.bfloat16)))
    names = load_file(folder / "model.safetensors")
    assert set(names) == {p.key for p in dp.required(SMALL)}
    layer = loaded["layers"][1]  # section 7: convolutions at identity, no selector yet
    assert (layer["mlp_conv"][:, 0] == 1).all() and (layer["mlp_conv"][:, 1] == 0).all()
    assert (layer["attention_conv_proj"] == 0).all() and (loaded["successor"] == 0).all()
    assert 0.015 < float(loaded["predecessor"].astype(jnp.float32).std()) < 0.025
    wrong = {**params, "norm": params["norm"][:-1]}
    del wrong["fc"]
    with pytest.raises(CheckpointError, match=r"(?s)missing parameter.*fc\.weight.*norm\.weight: expected \[32\]"):
        dp.save_drafter(tmp_path / "none", wrong, SMALL)
    assert not (tmp_path / "none").exists()

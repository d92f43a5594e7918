"""ModelConfig against spec section 1: published form, derived lists, refusals."""

import dataclasses
import json
import warnings

import pytest

from musejax.config import FULL, MINI, NANO, RELEASED, SLIDING, ConfigError, DecodeConfig, ModelConfig, combine_groups
from musejax.numerics import CANON, CANON_F32_PROBS, EXACT


def hf(**text):
    config = MINI.to_hf()
    config["text_config"].update(text)
    return config


def test_released_lists():
    full = [i for i, kind in enumerate(RELEASED.layer_types) if kind == FULL]
    assert full == list(range(1, 62, 4))
    assert [i for i, theta in enumerate(RELEASED.layer_rope_theta) if theta == 0] == full
    assert set(RELEASED.layer_rope_theta) == {0.0, 500000.0}
    assert RELEASED.attention_scale == 0.6841258107984375
    assert RELEASED.window(0) == 2048 and RELEASED.window(1) is None


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 9])
def test_lists_count_from_the_last_layer(layers):
    config = dataclasses.replace(MINI, num_hidden_layers=layers, layer_types=(), layer_rope_theta=())
    assert config.layer_types[-1] == FULL and config.layer_rope_theta[-1] == 0
    assert all((kind == FULL) == ((layers - 1 - i) % 4 == 0) for i, kind in enumerate(config.layer_types))


def test_explicit_lists_are_honoured():
    types, thetas = [FULL, SLIDING] * 3, [0, 10000.0, 20000.0, 0, 0, 500000]
    config = ModelConfig.from_hf(hf(layer_types=types, layer_rope_theta=thetas))
    assert list(config.layer_types) == types and list(config.layer_rope_theta) == thetas


@pytest.mark.parametrize("config", [RELEASED, MINI, NANO])
def test_published_form_round_trip(config):
    again = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    assert again == config and hash(again) == hash(config)


def test_text_config_alone_is_accepted():
    assert ModelConfig.from_hf(MINI.to_hf()["text_config"]) == MINI


def test_towers_are_skipped_and_known_keys_do_not_warn():
    config = {**MINI.to_hf(), "vision_config": {"hidden_size": 3}, "audio_config": {"depths": [1]}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ModelConfig.from_hf(config) == MINI


def test_unknown_key_is_named():
    with pytest.warns(UserWarning, match="shiny_new_thing"):
        ModelConfig.from_hf(hf(shiny_new_thing=1))


def test_fixtures_of_the_reference_library(shared):
    assert ModelConfig.from_folder(shared / "data/hf_mini") == MINI
    tiny = ModelConfig.from_folder(shared / "data/hf_tiny")
    assert tiny.q_width == 256 and tiny.hidden_size == 128 and tiny.num_slices == 1
    assert {p.split(":")[0] for p in tiny.slice_problems()} == {
        "moe_hidden_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads"}


@pytest.mark.parametrize(("change", "message"), [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures: expected MuseSpark.*got LlamaForCausalLM"),
    ({"model_type": "llama"}, "model_type: .*got 'llama'"),
    ({"text_config": None}, "text_config: expected an object"),
    ({"text_config": 3}, "text_config: expected an object, got 3"),
    ({"architectures": 5}, "architectures: expected a list, got 5"),
    ({"architectures": [["x"]]}, "architectures: expected MuseSpark"),
    ({"model_type": 5}, "model_type: expected a text, got 5"),
])
def test_unknown_architectures_are_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**MINI.to_hf(), **change})


@pytest.mark.parametrize(("text", "message"), [
    ({"num_shared_experts": 1}, "num_shared_experts: only 0 is implemented, got 1"),
    ({"attention_bias": True}, "attention_bias"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"hidden_act": "gelu"}, "hidden_act: only 'silu' is implemented, got 'gelu'"),
    ({"mlp_layer_types": ["sparse"] * 5 + ["dense"]}, "mlp_layer_types.*'dense'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type.*'yarn'"),
    ({"num_attention_heads": 12}, "multiple of num_key_value_heads .8., got 12"),
    ({"num_experts_per_tok": 17}, "at most num_local_experts .16., got 17"),
    ({"head_dim": 63}, "even number.*63"),
    ({"hidden_size": 0}, "hidden_size: expected a positive integer, got 0"),
    ({"hidden_size": 12.5}, "hidden_size: expected a positive integer, got 12.5"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps: expected a positive number"),
    ({"layer_types": [FULL]}, "layer_types: expected 6 entries"),
    ({"layer_types": [FULL] * 5 + ["chunked"]}, r"layer_types\[5\].*'chunked'"),
    ({"layer_rope_theta": [0.5] * 6}, r"layer_rope_theta\[0\]"),
    ({"layer_rope_theta": ["x"] * 6}, r"layer_rope_theta\[0\].*'x'"),
    ({"layer_rope_theta": [None] * 6}, r"layer_rope_theta\[0\].*None"),
    ({"layer_types": 5}, "layer_types: expected a list, got 5"),
    ({"mlp_layer_types": 5}, "mlp_layer_types: expected a list, got 5"),
    ({"rope_parameters": "default"}, "rope_parameters: expected an object, got 'default'"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps: expected a positive number"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a positive number, got 'small'"),
    ({"pad_token_id": "zzz"}, "pad_token_id: expected a token id, got 'zzz'"),
    ({"eos_token_id": -1}, "eos_token_id: expected a token id, got -1"),
    ({"hidden_act": ["silu"]}, "hidden_act: only 'silu'"),
    ({"layer_types": [["a"]] * 6}, r"layer_types\[0\]"),
])
def test_refusals_say_what_was_expected(text, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(hf(**text))


def test_folder_without_config(tmp_path):
    with pytest.raises(ConfigError, match="found no such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        ModelConfig.from_folder(tmp_path)
    for text in ("[" * 100_000, "[1, 2]", "null"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json: expected (JSON|an object)"):
            ModelConfig.from_folder(tmp_path)


def test_combine_orders():
    assert combine_groups("flat") == 0 and combine_groups("ep(8)") == 8
    for wrong in ("ep", "ep(0)", "ep(-1)", "EP(8)", "ep(8) "):
        with pytest.raises(ConfigError, match="combine"):
            combine_groups(wrong)


def test_decode_config_fits_the_model():
    odd = dataclasses.replace(MINI, num_local_experts=9)
    assert DecodeConfig().for_model(odd).combine == "flat"
    assert DecodeConfig().for_model(MINI).combine == "ep(8)"
    short = dataclasses.replace(MINI, max_position_embeddings=10)
    assert DecodeConfig(prefill_chunk=64).for_model(short).prefill_chunk == 10
    with pytest.raises(ConfigError, match="multiple of 8, got 9"):
        DecodeConfig().check(odd)
    loud = dataclasses.replace(MINI, qk_scale_factor=10.0)
    with pytest.raises(ConfigError, match=r"scores reach 80\.0"):
        DecodeConfig(policy=CANON).check(loud)
    DecodeConfig(policy=CANON_F32_PROBS).check(loud)
    DecodeConfig(policy=EXACT).check(loud)


@pytest.mark.parametrize(("field", "value"), [
    ("implementation", "magic"), ("experts", "some"), ("prefill_chunk", 0), ("prefill_chunk", 10**9),
    ("policy", "canon"), ("combine", "tree")])
def test_decode_config_checks_itself(field, value):
    with pytest.raises(ConfigError, match=field):
        DecodeConfig(**{field: value})

"""Counts of the released model as published (specification, section 5.3), from its configuration alone."""

import dataclasses
import json

import pytest

from musejax import cli
from musejax.config import MINI, NANO, RELEASED
from musejax.info import byte_counts, parameter_counts
from musejax.params import table

ONE_LAYER = dataclasses.replace(MINI, num_hidden_layers=1, layer_types=(), layer_rope_theta=())
PUBLISHED_PARAMETERS = {
    "attention": 218_103_808,
    "pooler_and_unpooler": 67_108_864,
    "router": 2_097_152,
    "one_expert": 50_331_648,
    "all_experts": 12_884_901_888,
    "layer": 13_172_261_120,
    "all_layers": 816_680_189_440,
    "embedding": 1_655_177_216,
    "lm_head": 1_655_177_216,
    "total": 819_990_552_064,
    "active": 42_780_769_792,
    "active_with_lm_head": 44_435_947_008,
}
PUBLISHED_BYTES = {
    "experts_of_a_layer": 25_769_803_776,
    "rest_of_a_layer": 578_913_280,
    "layer": 26_348_717_056,
    "layer_nvfp4": 7_826_676_736,
}


def test_released_parameters():
    counts = parameter_counts(RELEASED)
    assert {name: counts[name] for name in PUBLISHED_PARAMETERS} == PUBLISHED_PARAMETERS


def test_released_bytes():
    counts = byte_counts(RELEASED)
    assert {name: counts[name] for name in PUBLISHED_BYTES} == PUBLISHED_BYTES
    assert f"{counts['total'] / 1e9:.1f}" == "1640.2"
    assert f"{counts['total_nvfp4'] / 1e9:.1f}" == "528.9"


@pytest.mark.parametrize("config", [RELEASED, NANO, MINI, ONE_LAYER])
def test_parts_add_up(config):
    n, b = parameter_counts(config), byte_counts(config)
    assert n["layer"] == sum(n[k] for k in ("attention", "pooler_and_unpooler", "router", "vectors", "all_experts"))
    assert n["total"] == n["all_layers"] + n["embedding"] + n["lm_head"] + config.hidden_size  # final norm
    assert n["total"] == sum(row.size for row in table(config))
    assert b["total"] == sum(row.nbytes for row in table(config))
    assert b["layer"] == b["experts_of_a_layer"] + b["rest_of_a_layer"]
    assert b["total_nvfp4"] <= b["total"]
    dense = dataclasses.replace(config, num_experts_per_tok=config.num_local_experts)
    assert parameter_counts(dense)["active"] == n["all_layers"]


def test_nano():
    assert parameter_counts(NANO)["total"] == 8_603_104


def test_command_prints_the_published_numbers(capsys):
    assert cli.main(["info", "released"]) == 0
    out = capsys.readouterr().out
    for count in [*PUBLISHED_PARAMETERS.values(), *PUBLISHED_BYTES.values()]:
        assert f"{count:,}" in out
    assert "1,640.2 GB" in out and "528.9 GB" in out


def test_command_json(capsys):
    assert cli.main(["info", "mini", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["form"] == "config" and report["config"]["hidden_size"] == 128
    assert report["parameters"] == parameter_counts(MINI) and report["bytes"] == byte_counts(MINI)
    assert report["groups"]["router"]["dtypes"] == ["F32"] and report["groups"]["experts"]["dtypes"] == ["BF16"]
    assert sum(group["parameters"] for group in report["groups"].values()) == report["parameters"]["total"]


def test_command_reads_headers(capsys, shared):
    assert cli.main(["info", str(shared / "data" / "hf_tiny"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["form"] == "published" and report["config"]["slices"] == 1 and report["files"] == 1
    assert report["groups"]["router"]["dtypes"] == ["F32"]
    assert sum(group["parameters"] for group in report["groups"].values()) == report["parameters"]["total"]
    assert report["skipped"]["tensors"] > 0, "the towers"
    assert cli.main(["info", str(shared / "data" / "hf_tiny")]) == 0
    assert "published checkpoint" in capsys.readouterr().out

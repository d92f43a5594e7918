"""`musejax parity`: all bits equal on what is shipped, and red for each thing broken on purpose."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax import cli, nvfp4, parity, score
from musejax.checkpoint import convert
from musejax.config import ConfigError, DecodeConfig
from musejax.ffi import library
from musejax.packing import unpack_params
from musejax.parity import Difference, checks, difference, injections, located
from musejax.paths import nano_path

SHORT = {"combine": ["ep(8)"], "tokens": 2, "devices": [1, 2]}


@pytest.fixture(scope="module")
def nano():
    """-> Bench and DecodeConfig of the shipped model, everything small; not quick."""
    bench, (decode,) = parity.prepare(nano_path(), **SHORT)
    return bench, decode


@pytest.fixture(scope="module")
def base(nano):
    bench, decode = nano
    return parity.run_decode(bench.side(decode), bench.prompt, bench.tokens, bench.seed)


def command(tmp_path, *argv):
    """-> exit code and JSON of `musejax parity` on the shipped model."""
    file = tmp_path / "parity.json"
    code = cli.main(["parity", str(nano_path()), "--quick", "--tokens", "2", "--combine", "ep(8)", "--json", str(file),
                     *argv])
    return code, json.loads(file.read_text())


# ------------------------------------------------------------------ the comparison itself


def test_difference():
    a = np.array([[1, 2], [3, 4]], np.float32)
    b = a.copy()
    assert difference({"x": a, "y": a}, {"x": a, "y": b}) is None
    b[1] = 3.5, 5
    found = difference({"x": a, "y": a}, {"x": a, "y": b})
    assert found == Difference("y", (1, 0), "0x40400000 (3.0)", "0x40600000 (3.5)", 2, 4)
    assert str(found) == "y differ in 2 of 4 values, first at [1, 0]: 0x40400000 (3.0) against 0x40600000 (3.5)"


def test_bits_and_not_numbers_are_compared():
    nan = np.array([np.nan], np.float32)
    assert difference({"x": nan}, {"x": nan.copy()}) is None
    found = difference({"x": np.zeros(1, np.float32)}, {"x": -np.zeros(1, np.float32)})
    assert (found.left, found.right) == ("0x00000000 (0.0)", "0x80000000 (-0.0)")
    for other in (np.zeros(2, np.float32), np.zeros(1, np.int32)):
        with pytest.raises(ValueError, match="on both sides"):
            difference({"x": np.zeros(1, np.float32)}, {"x": other})
    with pytest.raises(ValueError, match="the same arrays"):
        difference({"x": nan}, {"y": nan})


def test_the_layer_where_streams_part():
    found = Difference("logits", (0,), "0x0", "0x1", 1, 1)
    a = np.zeros((4, 3, 2), np.float32)  # embedding and three layers
    b = a.copy()
    b[2:, 1] = 1
    assert "; the streams part in layer 1, row 1" in str(located(found, a, b))
    b[0, 2, 1] = 1
    assert "; the streams part in the embedding, row 2" in str(located(found, a, b))
    assert str(located(found, a, a)).endswith("; all streams are equal, up to the LM head")


# ------------------------------------------------------------------ green


def test_the_shipped_model_passes(tmp_path, capsys):
    code, result = command(tmp_path, "--devices", "8")
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and result["passed"], "\n".join(lines)
    assert [row["group"] for row in result["rows"]] == ["packing"] * 3 + ["devices"] * 3 + ["score"] + ["rows"] * 3
    assert all(line.startswith("PASS  ") for line in lines[:-1]) and len(lines) == len(result["rows"]) + 1
    assert lines[-1].startswith("10 comparisons, all bits equal")
    assert all(row["passed"] and row["values"] > 10_000 and row["difference"] is None for row in result["rows"])
    assert "1 device = 8" in lines[4] and "decode_step on 8" in lines[5] and "score on 8" in lines[6]
    about = {"checkpoint": str(nano_path()), "overlay": [], "inject": None, "devices": [8], "tokens": 2, "seed": 0,
             "quick": True}
    assert about.items() <= result.items() and result["seconds"] > 0
    assert result["instruction_set"] in parity.INSTRUCTION_SETS and result["threads"] >= 1


@pytest.mark.parametrize("activations", nvfp4.ACTIVATIONS)
def test_nvfp4_experts_pass(shared, activations):
    folder, lines = shared / "data/hf_mini", []
    rows = parity.run(folder, overlay=[folder / "nvfp4"], activations=[activations], quick=True,
                      report=lambda row: lines.append(str(row)), **SHORT | {"devices": [4]})
    assert all(row.passed for row in rows), "\n".join(lines)
    assert rows[2].name == "files = loaded, not quantised again"
    assert {row.setting for row in rows if row.group == "score"} == {f"{activations}, ep(8)"}


def test_threads_and_instruction_sets(nano, base, monkeypatch):
    lib = library("cpu")
    monkeypatch.setattr(checks, "INSTRUCTION_SETS", (*checks.INSTRUCTION_SETS, "sve"))
    before = lib.isa(), lib.threads()
    rows = list(parity.check_machine(*nano, base))
    assert (lib.isa(), lib.threads()) == before
    assert [row.name for row in rows[:3]] == [f"threads: {n} = the default" for n in (1, 2, 7)]
    assert all(row.passed is not False for row in rows) and any(row.name.startswith("scalar") for row in rows)
    assert rows[-1].passed is None and str(rows[-1]).startswith("SKIP") and "this machine lacks it" in str(rows[-1])


def test_rows_at_borders(nano):
    bench, decode = nano
    assert bench.positions == [0, 15, 63, 255]
    chain, star, tree = parity.check_rows(bench, decode)
    for row in (chain, star, tree):
        assert row.passed, str(row)
        assert "of 2, 7, 8, 9, 15, 16 rows after 0, 15, 63, 255 positions" in row.name


def test_trees():
    rng = np.random.default_rng(0)
    for kind in ("chain", "star", "random"):
        parents = parity.tree_of(kind, rng)
        assert parents[0] == -1 and (parents < np.arange(16)).all()
    assert (parents[1:] == -1).any() and len(set(parents)) > 4, "several roots"
    assert parity.deepest_path(np.array([-1, 0, 0, 2, -1, 3])) == [0, 2, 3, 5]


def test_a_converted_checkpoint(nano, tmp_path):
    folder = convert(nano_path(), tmp_path / "packed", progress=False)
    bench, _ = parity.prepare(folder, **SHORT)
    for a, b in zip(jax.tree.leaves(bench.here), jax.tree.leaves(nano[0].here), strict=True):
        assert_same_bits(a, b)
    rows = list(parity.check_packing(bench))
    assert [row.passed for row in rows] == [True, True, None] and "converted" in rows[2].note


# ------------------------------------------------------------------ red


@pytest.mark.parametrize(("kind", "layer"), [("k-order", None), ("combine-order", 0), ("slice", 3), ("tie", 3)])
def test_each_injection_fails(tmp_path, capsys, kind, layer):
    devices = "2" if kind == "slice" else "1"
    code, result = command(tmp_path, "--devices", devices, "--inject", kind)
    out = capsys.readouterr().out
    assert code == 1 and not result["passed"] and result["inject"] == kind
    assert out.splitlines()[-1].endswith(f"broken on purpose: {parity.INJECTIONS[kind]}")
    failed = [row for row in result["rows"] if not row["passed"]]
    assert [row["name"] for row in failed] == (
        ["1 device = 2", "1 device = decode_step on 2", "decode = score on 2"]
        if kind == "slice" else ["decode = score on 1"])
    for row in failed:
        found = row["difference"]
        assert re.fullmatch(r"0x[0-9a-f]{4,8} \(.*\)", found["left"]) and found["left"] != found["right"]
        assert 0 < found["differing"] <= found["size"]
        if "decode_step" not in row["name"]:
            assert found["what"] == "logits" and len(found["index"]) == 2
            assert found["layer"] in (range(-1, 7) if layer is None else [layer])
            assert found["layer"] == 6 or f"the streams part in layer {found['layer']}, row {found['row']}" in out


def test_the_other_order_of_sums_is_of_the_same_values(nano):
    bench, decode = nano
    there = parity.injected("k-order", bench.config, bench.here)[1]
    run = [score.logprobs(p, bench.prompt, config=bench.config, decode=decode) for p in (bench.here, there)]
    assert (run[0] != run[1]).any()
    assert np.median(np.abs(run[0] - run[1])) < 2.0**-6
    twice = injections._other_k_order(bench.config, unpack_params(there, bench.config))
    for a, b in zip(jax.tree.leaves(twice), jax.tree.leaves(unpack_params(bench.here, bench.config)), strict=True):
        assert_same_bits(a, b)


def test_a_row_that_depends_on_others_fails(nano, monkeypatch):
    alone = checks.rows_alone

    def wrong(side, cache, guesses, parents, trace=False):
        return alone(side, cache, np.where(np.arange(len(guesses)) == 3, guesses[0], guesses), parents, trace)

    monkeypatch.setattr(checks, "rows_alone", wrong)
    row = next(parity.check_rows(replace(nano[0], quick=True), nano[1]))
    assert not row.passed and row.difference.what == "expert ids of 8 rows after 63 positions"
    assert row.difference.index[0] == 3 and (row.difference.layer, row.difference.row) == (-1, 3)


def test_numbers_that_are_none_fail(nano, base):
    values = {**base.values, "logits": np.full_like(base.values["logits"], np.nan)}
    row = next(parity.check_devices(*nano, base._replace(values=values)))
    assert row.passed is False and "are not" in str(row)


def test_changed_weights_fail(nano):
    bench, _ = nano
    packed = {**bench.here, "final_norm": -np.asarray(bench.here["final_norm"])}
    rows = list(parity.check_packing(replace(bench, here=packed)))
    assert [row.passed for row in rows] == [True, False, False]
    assert rows[2].difference.what == "model.language_model.norm.weight"


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(("argv", "expected"), [
    (["nowhere"], "nowhere: expected a checkpoint folder"),
    ([nano_path(), "--activations", "nvfp4_static"], "nvfp4_static needs NVFP4 experts"),
    ([nano_path(), "--activations", "fp8"], "fp8"),
    ([nano_path(), "--combine", "sum"], "expected 'flat' or 'ep(R)'"),
    ([nano_path(), "--combine", "ep(3)"], "multiple of 3"),
    ([nano_path(), "--tokens", "2000"], "expected at most 1024"),
    ([nano_path(), "--devices", "3"], "some of 1, 2, 4, 8"),
    ([nano_path(), "--devices", ""], "expected names"),
    ([nano_path(), "--inject", "luck"], "invalid choice"),
    ([nano_path(), "--json", "no/such/folder/x.json"], "found no such folder"),
    ([nano_path(), "--overlay", "nowhere"], "--overlay nowhere"),
])
def test_bad_input(argv, expected, capsys):
    assert cli.main(["parity", *map(str, argv)]) == 2
    out = capsys.readouterr()
    assert expected in out.err and out.out == ""


def test_too_few_devices(nano, monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *a: one)
    with pytest.raises(ConfigError, match=r"expected 8, got 1; .*--xla_force_host_platform_device_count=8"):
        parity.check_arguments(nano[0].config, None, None, (1, 8), 4)


def test_a_split_that_does_not_work_is_skipped(nano, base):
    decode = DecodeConfig(combine="ep(1)")
    bench, _ = nano
    rows = list(parity.check_score(replace(bench, devices=(2,), quick=True), decode, base))
    assert rows[0].passed is None and "Splits that work with ep(1): 1 devices" in rows[0].note


def test_the_command_makes_devices():
    code = "from musejax.commands.parity import use_cpu; use_cpu(4); import jax; print(len(jax.devices()))"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "4"

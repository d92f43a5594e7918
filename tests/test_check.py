"""`musejax check`: passes on what the reference library computed, and sees each thing broken on purpose."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from musejax import check
from musejax import params as table
from musejax.check import CheckError, Row, clear_rows, compare, judge_all_layers, judge_canon_layer, read_expected
from musejax.checkpoint import load_params
from musejax.config import MINI
from musejax.model.norms import rms
from musejax.numerics import CANON, EXACT, ROUNDING_POINTS, Policy, einsum_f32


@pytest.mark.parametrize("name", ["hf_tiny", "hf_mini"])
def test_fixtures_pass(shared, name):
    lines = []
    rows = check.run(shared / "data" / name, report=lines.append)
    assert all(r.passed for r in rows), "\n".join(lines)
    assert len(lines) == len(rows) > 15
    assert all(r.unjudged == 0 for r in rows)  # the shipped fixtures have no near ties
    json.dumps(check.to_json(rows))


@pytest.mark.parametrize("name", ["hf_tiny", "hf_mini"])
def test_fixtures_pass_with_nvfp4_experts(shared, name):
    lines = []
    folder = shared / "data" / name
    rows = check.run(folder, overlay=[folder / "nvfp4"], report=lines.append)
    assert all(r.passed for r in rows), "\n".join(lines)
    assert "NVFP4 experts" in lines[0] and "left out" in lines[0]
    assert [r.name for r in rows[:2]] == ["nvfp4: logits", "nvfp4_static: logits"]
    assert len(rows) == 2 + len(check.CHUNKS)
    assert rows[0].unjudged == 0 and rows[0].worst < 1e-4 and str(rows[1]).startswith("NOTE")
    assert rows[1].note != "0 rows within the bound"  # until the first code flips
    json.dumps(check.to_json(rows))


NVFP4_BREAKS = {
    "gate and up scales swapped": lambda p: p | {"gate_up_global": p["gate_up_global"][:, ::-1]},
    "nibbles swapped": lambda p: p | {"down": p["down"] >> 4 | p["down"] << 4},
    "one block scale": lambda p: p | {"down_scale": p["down_scale"].at[0, 0, 0, 0].multiply(1.125)},
}


@pytest.mark.parametrize("what", NVFP4_BREAKS)
def test_wrong_nvfp4_experts_fail(shared, what):
    folder = shared / "data/hf_mini"
    config, params = load_params(folder, overlay=folder / "nvfp4")
    layers = [NVFP4_BREAKS[what](p) if i == 3 else p for i, p in enumerate(params["layers"])]
    expected = read_expected(folder / "expected.npz", config)
    rows, _, _ = check.check_nvfp4(params | {"layers": layers}, config, expected)
    assert not rows[0].passed


@pytest.fixture(scope="module")
def mini(shared):
    config, params = load_params(shared / "data/hf_mini")
    return config, params, read_expected(shared / "data/hf_mini/expected.npz", config)


def first_layers(params, expected, number: int):
    """Embedding, the first layers and the head, with their golden values: quicker than all layers."""
    golden = expected["hidden_canonical"]
    streams = np.concatenate([golden[:number + 1], golden[-1:]])
    return params | {"layers": params["layers"][:number]}, {**expected, "hidden_canonical": streams}


def red(rows) -> set[str]:
    return {r.name.removeprefix("canon: ") for r in rows if not r.passed}


ERROR, UNCLEAN, ALL_UNCLEAN = "layer {}, error / RMS(row)", "layer {}, rows not clean", "all layers, rows not clean"
HEAD = "logits of the last stream"

BREAKS = {
    "window one too long": lambda c: dataclasses.replace(c, sliding_window=9),
    "window one too short": lambda c: dataclasses.replace(c, sliding_window=7),
    "multiplier": lambda c: dataclasses.replace(c, output_multiplier=0.4),
    "rotation in a NoPE layer": lambda c: dataclasses.replace(c, layer_rope_theta=(5e5,) * 6),
    "q scale": lambda c: dataclasses.replace(c, qk_scale_factor=2.4),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_wrong_config_fails(mini, what):
    config, params, expected = mini
    rows, _, _ = check.check_exact(params, BREAKS[what](config), expected)
    assert not rows[0].passed and "streams part after layer" in rows[0].note
    params, expected = first_layers(params, expected, 2)  # a sliding layer and a full one
    names = red(check.check_canon(params, BREAKS[what](config), expected))
    layer = 1 if "NoPE" in what else 0
    assert names & {ERROR.format(layer), UNCLEAN.format(layer)}  # a window leaves the first rows alone
    assert (HEAD in names) == (what == "multiplier")


WEIGHT_BREAKS = {
    "one slice of a projection": ("o_proj", lambda w: w.at[3].set(w[4])),
    "one slice of the experts": ("down", lambda w: w.at[3].set(w[4])),
    "routing bias": ("router_bias", lambda w: w[::-1]),
    "gain of the combine": ("post_expert_norm", lambda w: w * 1.5),
    "residual gate": ("ffn_residual_gate", lambda w: w * 1.01),
}


@pytest.mark.parametrize("what", WEIGHT_BREAKS)
def test_a_wrong_weight_fails_in_its_layer(mini, what):
    config, params, expected = mini
    name, change = WEIGHT_BREAKS[what]
    layers = [{**p, name: change(p[name])} if i == 1 else p for i, p in enumerate(params["layers"])]
    rows, _, _ = check.check_exact(params | {"layers": layers}, config, expected)
    assert not rows[0].passed and "part after layer 1" in rows[0].note
    params, expected = first_layers(params | {"layers": layers}, expected, 2)
    names = red(check.check_canon(params, config, expected))
    assert UNCLEAN.format(1) in names
    assert names <= {ERROR.format(1), UNCLEAN.format(1), ALL_UNCLEAN}  # of two layers, one is half of the rows


@pytest.mark.parametrize(("name", "line"), [("embed", "embedding"), ("final_norm", HEAD), ("lm_head", HEAD)])
def test_a_wrong_end_of_the_model_fails(mini, name, line):
    config, params, expected = mini
    broken, expected = first_layers(params | {name: params[name] * 1.01}, expected, 1)  # scales leave a norm alone
    assert red(check.check_canon(broken, config, expected)) == {line}


UNSEEN = {"attention_probs": "golden values keep probabilities in float32",
          "combine_partial": "golden values add experts in flat order"}


@pytest.mark.parametrize("point", ROUNDING_POINTS)
def test_a_rounding_point_left_out_fails(mini, monkeypatch, point):
    config, params, expected = mini
    params, expected = first_layers(params, expected, 1)
    rounded = Policy.round
    monkeypatch.setattr(Policy, "round", lambda self, at, x: x if at == point else rounded(self, at, x))
    names = red(check.check_canon(params, config, expected))
    if point in UNSEEN:
        assert not names
    elif point in ("embed_norm", "final_stream"):
        assert names == {"embedding" if point == "embed_norm" else HEAD}
    else:
        assert {UNCLEAN.format(0), ALL_UNCLEAN} <= names and (HEAD in names) == (point == "norm")


def test_a_near_tie_may_go_either_way_and_a_clear_choice_may_not(mini):
    config, params, expected = mini
    golden, layer = expected["hidden_canonical"], 1
    with jax.enable_x64(True):
        run = check.canon_layer(layer, golden.shape[1], config)
        routing = run(params["layers"][layer], jnp.asarray(golden[layer])).routing
    row = int(routing.margin.argmin())
    margin, last = float(routing.margin[row]), int(routing.ids[row, -1])

    def lines(lower):
        bias = params["layers"][layer]["router_bias"].at[last].add(-lower)
        broken = [{**p, "router_bias": bias} if i == layer else p for i, p in enumerate(params["layers"])]
        broken, fewer = first_layers(params | {"layers": broken}, expected, layer + 1)
        rows = check.check_canon(broken, config, fewer)
        return next(r for r in rows if r.name == f"canon: layer {layer}, error / RMS(row)")

    assert lines(0.0).note == ""
    near = lines(margin + 5e-4)  # another expert by a hair
    assert near.passed and near.note.endswith("by the other expert of a near tie")
    clear = lines(margin + 2 * check.CANON_MARGIN)
    assert not clear.passed and clear.worst > 0.5


def test_canon_judges_a_single_row_over_all_layers(mini, monkeypatch):
    config, params, expected = mini
    cut = {**expected, "input_ids": expected["input_ids"][:1], "hidden_canonical": expected["hidden_canonical"][:, :1],
           "logits_canonical": expected["logits_canonical"][:1]}
    rows = check.check_canon(params, config, cut)
    assert all(r.passed for r in rows)
    assert [str(r)[:4] for r in rows if "rows not clean" in r.name] == ["NOTE"] * 6 + ["PASS"]
    rounded = Policy.round
    monkeypatch.setattr(Policy, "round", lambda self, at, x: x if at == "qkv" else rounded(self, at, x))
    assert ALL_UNCLEAN in red(check.check_canon(params, config, cut))


def test_sums_of_the_canon_comparison_are_float64():
    def total(dot):
        return dot("td,nd->tn", jnp.asarray([[3e7, 1.0, -3e7]], jnp.float32), jnp.ones((1, 3), jnp.float32))

    x = jnp.asarray([4096.0] + [0.01] * 4095, jnp.float32)
    with jax.enable_x64(True):
        assert [float(total(dot)[0, 0]) for dot in (einsum_f32, EXACT.einsum, CANON.einsum)] == [1.0] * 3
        normed = rms(x, 1.0)
        assert normed.dtype == jnp.float32
        want = np.float32(4096) * np.float32(1 / np.sqrt(np.mean(np.square(np.asarray(x, np.float64))) + 1.0))
        assert float(normed[0]) == want
    assert float(rms(x, 1.0)[0]) != 0 and total(EXACT.einsum).dtype == jnp.float32


def test_swapped_gate_and_up_fail_in_their_layer(mini):
    config, params, expected = mini
    broken = {**params, "layers": [dict(layer) for layer in params["layers"]]}
    broken["layers"][3]["gate_up"] = broken["layers"][3]["gate_up"][:, :, ::-1]
    rows, _, _ = check.check_exact(broken, config, expected)
    assert not rows[0].passed and "part after layer 3" in rows[0].note
    failed = {r.name for r in check.check_canon(broken, config, expected) if not r.passed}
    assert failed == {"canon: layer 3, error / RMS(row)", "canon: layer 3, rows not clean"}


def test_compare_sees_one_element_and_nan():
    want = np.zeros((3, 4), np.float32)
    got = want.copy()
    got[1, 2] = 0.5
    row = compare("x", got, want, 0.4)
    assert (row.passed, row.worst, row.index) == (False, 0.5, (1, 2))
    assert compare("x", got, want, 0.4, judged=1).passed
    got[1, 2] = np.nan
    assert not compare("x", got, want, 0.4).passed
    nothing = compare("x", want + 2, want, 0.4, judged=0)
    assert nothing.passed is None and nothing.worst_unjudged == 2 and "OPEN" in str(nothing)  # neither pass nor fail


def test_order_of_the_chosen_experts_is_not_judged(mini):
    config, params, expected = mini
    swapped = {**expected, **{k: expected[k][..., ::-1] for k in ("topk_ids", "topk_weights")}}
    assert all(r.passed for r in check.check_exact(params, config, swapped)[0])
    swapped["topk_weights"] = expected["topk_weights"]
    assert not check.check_exact(params, config, swapped)[0][2].passed


def test_json_has_no_infinity():
    want = np.zeros((2, 2))
    text = json.dumps(check.to_json([compare("x", want * np.nan, want, 1.0)]), allow_nan=False)
    assert json.loads(text) == {"passed": False, "rows": [
        {"name": "x", "worst": None, "bound": 1.0, "index": [0, 0], "judged": 2, "unjudged": 0, "passed": False,
         "note": "", "worst_unjudged": 0.0}]}


def test_rows_after_a_near_tie_are_not_judged():
    margins = np.full((2, 5), 0.1)
    assert clear_rows(margins) == 5
    margins[1, 3] = 5e-5
    assert clear_rows(margins) == 3


def test_canon_layer_judges_by_row():
    want = np.ones((4, 8), np.float32)
    got = want.copy()
    got[0, 0] += 0.069  # bound for an element of 1 in a row of RMS 1: 2^-4 + 2^-7 = 0.0703
    line, share = judge_canon_layer(0, got, want)
    assert line.passed and share.passed and share.worst == 0.25
    got[0, 0] += 0.002
    line, _ = judge_canon_layer(0, got, want)
    assert not line.passed and line.index == (0,)
    got[:3, 0] = 1.001
    assert judge_canon_layer(0, got, want)[1].passed  # three of four rows unclean
    got[3, 0] = np.nan
    line, share = judge_canon_layer(0, got, want)
    assert not line.passed and line.index == (3,) and not share.passed and share.worst == 1


def test_share_over_all_layers():
    def layers(*unclean, t=20):
        shares = [Row("a layer", n / t, 0.75, (), t, 0, True) for n in unclean]
        row = judge_all_layers(shares, t)
        return row.passed, row.judged

    assert layers(15, 5, 10) == (True, 60)
    assert layers(15, 6, 10) == (False, 60)
    assert layers(1, 1, 0, t=1) == (True, 3)
    assert layers(1, 1, 1, t=1) == (False, 3)
    assert layers(1, 1, t=1) == (True, 0)  # two rows may both have a flip: nothing is judged


def test_bound_follows_the_golden_values_own_error_up_to_a_cap(mini):
    config, params, expected = mini
    decode = check.DecodeConfig(policy=check.EXACT, combine="flat")

    def bound(shift):
        return check.logit_bound(params, config, decode, {**expected, "logits_fp32": expected["logits_fp32"] + shift})

    assert bound(0) == check.LOGIT_BOUND
    assert 2.9e-3 < bound(1e-3) < 3.3e-3
    assert bound(1.0) == check.LOGIT_BOUND_CAP
    assert bound(np.nan) == check.LOGIT_BOUND


def test_line_names_what_matters():
    text = str(Row("a name", 0.5, 0.25, (1, 2), 3, 4, False, "a note"))
    for part in ("FAIL", "a name", "5.000e-01", "(1, 2)", "2.500e-01", "3 rows",
                 "4 not judged", "a note"):
        assert part in text


def test_golden_values_are_checked_first(tmp_path, shared):
    path = tmp_path / "expected.npz"
    with pytest.raises(CheckError, match="found no such file"):
        read_expected(path, MINI)
    whole = (shared / "data/hf_mini/expected.npz").read_bytes()
    flipped = whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:]
    for junk in (b"junk", b"", whole[:100_000], flipped):
        path.write_bytes(junk)
        with pytest.raises(CheckError, match="npz archive"):
            read_expected(path, MINI)
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(CheckError, match="npz archive"):
        read_expected(path, MINI)
    np.savez(path, input_ids=np.arange(3))
    with pytest.raises(CheckError, match="missing logits_fp32"):
        read_expected(path, MINI)
    arrays = dict(np.load(shared / "data/hf_mini/expected.npz"))
    np.savez(path, **{**arrays, "logits_fp32": arrays["logits_fp32"][:, :5]})
    with pytest.raises(CheckError, match=r"logits_fp32: expected numbers of shape \(24, 512\) .*shape \(24, 5\)"):
        read_expected(path, MINI)
    for key, value, message in (
            ("input_ids", arrays["input_ids"] + 500, "ids of 0 to 511"), ("input_ids", np.int64(3), "integers"),
            ("input_ids", np.array([], np.int64), "integers"), ("input_ids", np.array(["a"] * 24), "integers"),
            ("hidden_fp32", arrays["hidden_fp32"][:2], "hidden_fp32"),
            ("logits_canonical", arrays["logits_canonical"][1:], "logits_canonical"),
            ("topk_ids", np.full((6, 24, 2), "x"), "topk_ids")):
        np.savez(path, **{**arrays, key: value})
        with pytest.raises(CheckError, match=message):
            read_expected(path, MINI)


def test_command_exit_codes(tmp_path, shared, capsys):
    from musejax.cli import main

    folder = tmp_path / "broken"
    shutil.copytree(shared / "data/hf_mini", folder)
    assert main(["check", str(folder / "nothing")]) == 2
    (folder / "expected.npz").unlink()
    assert main(["check", str(folder)]) == 2
    assert "expected.npz" in capsys.readouterr().err
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["qk_scale_factor"] = 2.0
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["check", str(folder), "--expected", str(shared / "data/hf_mini/expected.npz")]) == 1
    assert "FAIL  exact: logits" in capsys.readouterr().out


def test_table_covers_the_fixture(mini):
    config, params, _ = mini
    for p in table.table(config):
        assert table.leaf_of(params, p).shape == p.shape

"""Intervals, acceptance lengths and rates, with values computed by hand."""

import pytest

from musejax.gsm8k.score import acceptance, accuracy, quantile, rates, summarise, wilson


@pytest.mark.parametrize("right, count, wanted", [
    (1253, 1319, "0.9500 [0.9368, 0.9605]"), (190, 200, "0.9500 [0.9104, 0.9726]"),
    (20, 20, "1.0000 [0.8389, 1.0000]"), (0, 20, "0.0000 [0.0000, 0.1611]")])
def test_wilson(right, count, wanted):
    p, low, high = wilson(right, count)
    assert f"{p:.4f} [{low:.4f}, {high:.4f}]" == wanted


@pytest.mark.parametrize("right, count", [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses(right, count):
    with pytest.raises(ValueError, match="expected 0 <= right <= count"):
        wilson(right, count)


def test_standard_error():
    assert accuracy(1, 2)["stderr"] == pytest.approx(0.5)  # sample deviation of (0, 1) is 0.7071, over root 2
    assert accuracy(1, 1)["stderr"] is None


def test_acceptance():
    got = acceptance([(100, 25), (300, 60), (50, 25), (1, 0)])
    assert {k: round(got[k], 3) for k in ("mean", "token_weighted", "pooled")} == {
        "mean": 3.667, "token_weighted": 4.444, "pooled": 4.091}
    assert got["after_prefill"] == pytest.approx((99 / 25 + 299 / 60 + 49 / 25) / 3)
    assert (got["requests"], got["tokens"], got["steps"]) == (3, 450, 110)
    assert acceptance([(1, 0)]) is None and acceptance([]) is None


def test_rate_is_of_all_tokens_not_a_median_of_ratios():
    delivered = [8] * 13 + [1] * 7
    assert sum(delivered) == 111
    got = rates(delivered, [10.0] * 20)
    assert got["tok_s"] == got["tok_s_window"] == pytest.approx(555) and got["tokens_per_step"] == 5.55


def test_median_and_mean():
    got = rates([1] * 20, [2.4] * 19 + [9.8])
    assert got["step_ms_median"] == 2.4 and got["step_ms_mean"] == pytest.approx(2.77)
    assert (got["step_ms_min"], got["step_ms_max"], got["step_ms_p90"]) == (2.4, 9.8, 2.4)
    assert rates([], []) is None
    assert quantile([1.0, 2.0, 3.0], 0.75) == 2.5 and quantile([1.0], 0.9) == 1.0


def item(correct, **changes):
    return {"error": None, "finish_reason": "eos", "final_empty": False, "correct": {"strict": correct},
            "completion_tokens": 5, "verify_steps": 2, "step_tokens": [2, 2], "step_ms": [None, 4.0],
            "step_experts": [6.0, 8.0], "prefill_ms": 3.0, **changes}


def test_summary_counts_failures_as_wrong():
    failed = item(False, error="x", finish_reason="error", final_empty=True, completion_tokens=0, verify_steps=0,
                  step_tokens=[], step_ms=[], step_experts=[], prefill_ms=None)
    got = summarise([item(True), item(False, finish_reason="length", final_empty=True), failed], ["strict"])
    assert (got["items"], got["errors"], got["cut_off"], got["empty"]) == (3, 1, 1, 1)
    assert (got["scores"]["strict"]["right"], got["scores"]["strict"]["count"]) == (1, 3)
    assert got["acceptance"]["requests"] == 2 and got["experts_per_layer"] == {"median": 7.0, "mean": 7.0}
    assert got["times"]["decode"]["steps"] == 2, "steps with a compilation are not timed"
    empty = summarise([], ["strict"])
    assert (empty["items"], empty["scores"], empty["acceptance"], empty["times"]["decode"]) == (0, {}, None, None)

"""The kernels and the reference say the same of a text, up to what the order of sums alone changes."""


import jax
import numpy as np
import pytest

import musejax
from musejax.config import DecodeConfig


@pytest.mark.slow
def test_kernels_agree_with_the_reference_on_text(script, repo, shared):
    texts = script.texts_of(shared / "data" / "gsm8k_test.jsonl")
    twin, noise = script.compare(repo / "checkpoints" / "nano", texts, 2000)
    # Bounds from 10,000 positions: 99.5% and 2.8e-4 for the kernels, 99.5% and 3.0e-4 for the reference against itself
    # with sums in float64. One flipped rounding can flip an expert, so no order of float32 sums comes nearer.
    assert noise.kl > 1e-5  # else the comparison compares nothing
    assert twin.top1 >= 0.99
    assert twin.kl <= 3 * noise.kl


def test_a_wrong_model_is_seen(script):
    logits = np.random.default_rng(0).standard_normal((50, 30)).astype(np.float32)
    assert script.agreement(logits, logits) == (1.0, 0.0, 0.0)
    seen = script.agreement(logits, np.roll(logits, 1, axis=1))
    assert seen.top1 < 0.5 and seen.kl > 0.1


def test_flips_are_listed_with_their_margins(script, capsys):
    want = np.array([[0.0, 1.0, 3.0], [2.0, 1.75, 0.0], [0.0, 5.0, 1.0]], np.float32)
    got = want.copy()
    assert script.flips(want, got) == []
    got[0, 0], got[1, 1] = 9.0, 2.5
    found = script.flips(want, got)
    assert found == [(0, 2.0, 2, 0), (1, 0.25, 0, 1)]
    seen = script.agreement(want, got)
    assert script.report("some GPU", "bf16", 3, seen, found, bound=2.0)
    assert not script.report("some GPU", "bf16", 3, seen, found, bound=1.0)
    said = capsys.readouterr().out
    assert "2 other tokens, 1 of them where the twin's margin exceeds 1.0" in said
    assert "position 0: margin 2.0000, token 2 on the CPU, 0 there" in said


def test_the_twin_against_itself(script, repo, shared):
    """Continuations are what the twin says: each next token is the most likely one, and no position differs."""
    cpu = jax.devices("cpu")[0]
    questions = [row["question"] for row in script.rows_of(shared / "data" / "gsm8k_test.jsonl")[:2]]
    seen, found = script.compare_devices(repo / "checkpoints" / "nano", questions, 620, "bf16", cpu)
    assert (seen.top1, seen.kl, found) == (1.0, 0.0, [])
    model = musejax.load(repo / "checkpoints" / "nano", devices=[cpu], decode=DecodeConfig(implementation="megakernel"))
    tokens = script.continuation(model, model.tokenizer.encode("Question: 1 + 1?", bos=True, parse_special=False), 40)
    assert (script.kernel_logits(model, tokens).argmax(-1)[20:-1] == tokens[21:]).all()
    with pytest.raises(SystemExit, match="expected at least 3 questions, got 2"):
        script.compare_devices(repo / "checkpoints" / "nano", questions, 1001, "bf16", cpu)

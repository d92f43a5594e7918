"""The command on the shipped model: the plain engine, resuming after a kill, seeds, stdout."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import musejax
from musejax import cli
from musejax.gsm8k.run import TIMES, top_two
from musejax.gsm8k.steps import collect, request_steps
from musejax.sampling import Sampling

PROMPT = "Question: Tom has 3 boxes of 12 pencils and gives 7 pencils away. How many pencils are left?\nAnswer:"


@pytest.fixture(scope="module")
def nano():
    return musejax.load()


@pytest.fixture
def gsm8k(shared, capsys):
    """Runs the command on the published problems -> (exit code, stdout, stderr)."""

    def call(*argv):
        code = cli.main(["gsm8k", "--data", str(shared / "data"), *map(str, argv)])
        return code, *capsys.readouterr()

    return call


def result(folder):
    """(items, summary) less what differs from run to run."""
    lines = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("times")
    return [{k: v for k, v in item.items() if k not in TIMES} for item in lines], summary


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)])
def test_plain_steps_are_those_of_the_generator(nano, sampling):
    prompt = nano.tokenizer.encode(PROMPT, bos=True, parse_special=False)
    wanted = [t.id for t in musejax.stream(nano, prompt, sampling, max_new_tokens=40)]
    stops = nano.defaults.stop_ids
    steps = list(request_steps(nano, prompt, sampling, max_new_tokens=40, stop_ids=stops))
    assert [t for s in steps for t in s.tokens] == wanted
    assert steps[0].prefill and not any(s.prefill for s in steps[1:]) and {len(s.tokens) for s in steps} == {1}
    assert all(s.seconds > 0 for s in steps) and steps[1].experts == (4,) * 6 and steps[0].experts is None
    again = request_steps(nano, prompt, sampling, max_new_tokens=40, stop_ids=stops)
    answer = collect(again, nano.tokenizer, stop_ids=stops, limit=40)
    assert answer.tokens == wanted and len(answer.steps) == len(wanted) - 1
    assert not any(s.compiled for s in answer.steps), "all was compiled by the run before"


def test_two_largest_logits(nano):
    prompt = nano.tokenizer.encode(PROMPT, bos=True, parse_special=False)
    first = next(musejax.stream(nano, prompt, max_new_tokens=1))
    (best, high), (_, low) = top_two(nano, prompt)
    assert best == first.id and high >= low


def test_no_compilation_in_the_timed_window(gsm8k):
    code, out, _ = gsm8k("--speed")
    lines = out.splitlines()
    assert code == 0 and "failed" not in out and lines[0].startswith("GSM8K test row 0, profile plain, batch 1, greedy")
    assert [line.split()[1] for line in lines if line.startswith("no-spec #")] == ["#1", "#2", "#3"]
    assert "L 1.00" in out and "D 4.0" in out


def test_samples_do_not_depend_on_order(gsm8k, tmp_path):
    options = ("--temperature", "0.9", "--max-new-tokens", "24", "--quiet")
    gsm8k("--limit", "3", "--out", tmp_path / "a", *options)
    gsm8k("--rows", "2", "--out", tmp_path / "b", *options)
    gsm8k("--rows", "2", "--out", tmp_path / "c", "--sample", "1", *options)
    (a, _), (b, _), (c, _) = (result(tmp_path / name) for name in "abc")
    assert a[2] == b[0] and b[0]["tokens_sha256"] != c[0]["tokens_sha256"]


def test_chat_and_determinism(gsm8k, tmp_path):
    code, out, err = gsm8k("--profile", "boxed-chat", "--limit", "1", "--check-determinism", "1", "--out",
                           tmp_path / "r", "--max-new-tokens", "60", "--quiet")
    assert (code, err) == (0, "") and "determinism  1 rows, 0 differences" in out
    (item,), summary = result(tmp_path / "r")
    assert item["reasoning"] and item["completion_tokens"] <= 60 and "<|" not in item["text"] + item["reasoning"]
    assert summary["acceptance"]["after_prefill"] == 1 and summary["warnings"] == []


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """A drafter of random weights: it is hardly ever right."""
    import jax

    from musejax.speculation.config import DraftConfig
    from musejax.speculation.params import init_params, save_drafter

    config = DraftConfig(
        vocab_size=2048, hidden_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=128, sliding_window=64, rms_norm_eps=1e-5, rope_theta=10000.0,
        max_position_embeddings=1024, block_size=4, mask_token_id=2047, target_layer_ids=(1, 4))
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(folder, init_params(config, jax.random.key(0)), config)
    return folder


@pytest.mark.slow
def test_with_a_drafter(gsm8k, drafter, tmp_path):
    """The text of plain decoding, with figures of the verify steps; the run without it is part of the check."""
    options = ("--limit", "2", "--max-new-tokens", "40", "--quiet", "--out")
    assert gsm8k(*options, tmp_path / "plain")[0] == 0
    code, out, _ = gsm8k(*options, tmp_path / "spec", "--drafter", drafter, "--check-determinism", "1")
    assert code == 0 and "0 differences" in out and "(width 4)" in out
    (plain, _), (spec, _) = result(tmp_path / "plain"), result(tmp_path / "spec")
    assert [i["tokens_sha256"] for i in plain] == [i["tokens_sha256"] for i in spec]
    for item in spec:
        assert item["completion_tokens"] == 1 + sum(item["step_tokens"]) and max(item["step_tokens"]) <= 4
        assert 1 <= item["accept_len"] <= 4 + 1 / item["verify_steps"] and min(item["step_experts"]) >= 4
    config = json.loads((tmp_path / "spec" / "config.json").read_text())
    assert config["verify"] == {"width": 4, "tree": {"nodes": 16, "width": None, "spine": 0, "tau": 1.0}}
    assert config["drafter"]["name"] == drafter.name


# ------------------------------------------------------------------ in a process of its own


def command(shared, *argv):
    environment = {**os.environ, "MUSEJAX_GSM8K": str(shared / "data")}
    return subprocess.Popen([sys.executable, "-P", "-m", "musejax.cli", "gsm8k", *map(str, argv)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def killed_in_time(shared, path):
    """Whether a run was killed after its first row and before its last."""
    file = path / "items.jsonl"
    process = command(shared, "--limit", "3", "--out", path, "--quiet")
    while process.poll() is None and not (file.is_file() and b"\n" in file.read_bytes()):
        time.sleep(0.002)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL and 1 <= file.read_bytes().count(b"\n") < 3


@pytest.mark.slow
def test_killed_and_resumed(gsm8k, shared, tmp_path):
    """kill -9 after the first row; the resumed run leaves the files and the report of one that was never killed."""
    code, whole, _ = gsm8k("--limit", "3", "--out", tmp_path / "whole")
    assert code == 0
    run = next(path for path in (tmp_path / f"run{i}" for i in range(3)) if killed_in_time(shared, path))
    process = command(shared, "--limit", "3", "--out", run, "--resume")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and result(run) == result(tmp_path / "whole")
    assert [line for line in out.splitlines() if not line.startswith("decode")] == [
        line for line in whole.splitlines() if not line.startswith("decode")], "a pipe gets the report and nothing else"

"""The command, with an engine that says what it is told: report, files, resuming, refusals, exit codes."""

import json
import signal

import pytest

from musejax.gsm8k import run as rows
from musejax.gsm8k.run import TIMES, row_seed
from musejax.paths import nano_path


def items(path):
    return [json.loads(line) for line in (path / "items.jsonl").read_text().splitlines()]


def without_times(path):
    """(items, summary) less what differs from run to run."""
    summary = json.loads((path / "summary.json").read_text())
    summary.pop("times")
    return [{k: v for k, v in item.items() if k not in TIMES} for item in items(path)], summary


# ------------------------------------------------------------------ a run


def test_report(run, engine, tmp_path):
    engine.replies[1:3] = ["It is that.\n#### 10", "It is $1450000."]
    code, out, err = run("--out", tmp_path / "run", "--quiet")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "GSM8K test, profile plain, 4 items (0 errors, 0 cut off, 0 empty)"
    assert [line.split()[0::len(line.split()) - 1] for line in lines[1:4]] == [
        ["strict", "2/4"], ["flexible", "3/4"], ["numeric", "3/4"]]
    assert "0.5000  [0.1500, 0.8500]   2/4" in lines[1]
    assert lines[4].startswith("acceptance length  mean of requests 1.") and lines[4].endswith("(width 1)")
    assert "median 2.00 ms/step   tok/s 500 (median step), 500 (all steps)   D 6.0 experts/layer" in lines[5]
    assert lines[6].startswith("seed 0 · greedy · checkpoint nano ") and "mesh slices=1 (cpu)" in lines[6]
    assert lines[7].startswith("warning: gsm8k_test.jsonl: expected the published problems with SHA-256 3730d312f6e3")
    assert len(lines) == 8


def test_files(run, engine, tmp_path):
    run("--out", tmp_path / "run", "--rows", "1:3")
    assert [item["id"] for item in items(tmp_path / "run")] == ["test/0001", "test/0002"]
    item = items(tmp_path / "run")[0]
    assert (item["gold"], item["text"], item["finish_reason"]) == ("-10", "It is that.\n#### -10", "eos")
    assert item["extracted"] == dict.fromkeys(("strict", "flexible", "numeric"), "-10") and item["seed"] is None
    assert item["completion_tokens"] == item["verify_steps"] + 1 == sum(item["step_tokens"]) + 1
    assert item["accept_len"] == item["completion_tokens"] / item["verify_steps"]
    assert (item["prefill_ms"], item["error"], item["reasoning"]) == (10.0, None, "")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["arguments"]["rows"] == [1, 3] and config["arguments"]["max_new_tokens"] == 512
    assert config["prompt"]["stop"] == ["Question:"] and len(config["prompt"]["row_0_sha256"]) == 64
    assert config["checkpoint"]["name"] == "nano" and config["checkpoint"]["experts"] == "bf16"
    assert config["devices"]["mesh"] == {"slices": 1} and config["versions"]["jax"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["partial"], summary["planned"], summary["scores"]["strict"]["right"]) == (False, 2, 2)


def test_stop_ends_the_answer(run, engine, tmp_path):
    """Row 20 of the table of outputs, with the stop applied."""
    engine.replies[0] = "#### 18\n\nQuestion: Tom has 7 cats.\nAnswer: 7\n#### 7"
    run("--out", tmp_path / "run", "--limit", "1")
    item = items(tmp_path / "run")[0]
    assert item["text"] == "#### 18\n\n" and item["finish_reason"] == "stop" and all(item["correct"].values())


def test_speculation_counts_tokens(run, engine, tmp_path):
    engine.width = 8
    code, out, _ = run("--out", tmp_path / "run")
    assert code == 0 and "(width 8)" in out
    for item in items(tmp_path / "run"):
        assert item["completion_tokens"] == 1 + sum(item["step_tokens"])
        assert 1 <= item["accept_len"] <= 8 + 1 / item["verify_steps"]


def test_chat(run, engine, tmp_path):
    engine.replies[0] = (" to=self<|message|>\\boxed{5}<|eom|><|start|>assistant to=user<|message|>"
                         "It is \\boxed{18}.<|eot|>more")
    engine.replies[1] = " to=self<|message|>\\boxed{-10}"
    code, out, _ = run("--out", tmp_path / "run", "--profile", "boxed-chat", "--limit", "2")
    first, second = items(tmp_path / "run")
    assert (first["text"], first["reasoning"]) == ("It is \\boxed{18}.", "\\boxed{5}")
    assert first["finish_reason"] == "eos" and first["correct"]["boxed"]
    assert second["text"] == "" and second["final_empty"] and not any(second["correct"].values())
    assert "boxed-chat, 2 items" in out and code == 0


def test_cut_off_in_reasoning(run, engine, tmp_path):
    engine.replies[0] = " to=self<|message|>" + "\\boxed{18} " * 30
    out = run("--out", tmp_path / "run", "--profile", "boxed-chat", "--limit", "1", "--max-new-tokens", "25")[1]
    item = items(tmp_path / "run")[0]
    assert (item["finish_reason"], item["final_empty"], item["completion_tokens"]) == ("length", True, 25)
    assert "1 items (0 errors, 1 cut off, 1 empty)" in out and "numeric          0.0000" in out


def test_bench_has_one_row_and_no_scores(run, engine):
    out = run("--profile", "bench")[1]
    assert "profile bench, 1 items" in out and out.splitlines()[1].startswith("acceptance length")


def test_other_scorers(run, engine):
    out = run("--scorers", "sglang-old,boxed", "--rows", "1")[1].splitlines()
    assert [line.split()[0] for line in out[1:3]] == ["sglang-old", "boxed"] and out[1].endswith("1/1")


def test_default_profile(run, engine, tmp_path):
    assert "profile plain" in run("--limit", "1")[1]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in nano_path().iterdir():
        (copy / file.name).symlink_to(file.resolve())
    assert "profile boxed-chat" in run("--limit", "1", "--checkpoint", copy)[1]


# ------------------------------------------------------------------ sampling


def test_seeds_depend_on_seed_row_and_sample_only(run, engine, tmp_path):
    run("--temperature", "0.7", "--seed", "3", "--out", tmp_path / "all")
    run("--temperature", "0.7", "--seed", "3", "--out", tmp_path / "one", "--rows", "2")
    seeds = [item["seed"] for item in items(tmp_path / "all")]
    assert len(set(seeds)) == 4 and items(tmp_path / "one")[0]["seed"] == seeds[2] == row_seed(3, 2, 0)
    assert [s.seed for s in engine.samplings] == [*seeds, seeds[2]] and engine.samplings[0].temperature == 0.7
    assert len({row_seed(*x) for x in ((3, 2, 0), (3, 2, 1), (2, 3, 0), (3, 20, 0))}) == 4
    assert row_seed(0, 0, 0) == row_seed(0, 0) < 2**32


# ------------------------------------------------------------------ failures, interrupts, resuming


def test_failed_row(run, engine, tmp_path):
    engine.replies[2] = RuntimeError("out of memory")
    code, out, err = run("--out", tmp_path / "run")
    assert code == 3 and "4 items (1 errors, 0 cut off, 0 empty)" in out and "3/4" in out
    assert "test/0002 failed: RuntimeError: out of memory" in err
    failed = items(tmp_path / "run")[2]
    assert (failed["finish_reason"], failed["error"]) == ("error", "RuntimeError: out of memory")
    engine.replies[2] = "#### 1,450,000"
    engine.requests.clear()
    code, out, _ = run("--out", tmp_path / "run", "--resume")
    assert code == 0 and "4 items (0 errors" in out and len(engine.requests) == 1, "only the failed row runs again"
    assert [item["id"] for item in items(tmp_path / "run")] == [f"test/000{i}" for i in range(4)]


def test_interrupt_and_resume(run, engine, tmp_path):
    run("--out", tmp_path / "whole", "--check-determinism", "1")
    engine.before_step = lambda row, step: signal.raise_signal(signal.SIGINT) if (row, step) == (2, 3) else None
    code, out, _ = run("--out", tmp_path / "run")
    assert code == 130 and "2 items" in out and "partial: of 4 rows" in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["partial"] is True
    assert len(items(tmp_path / "run")) == 2
    engine.before_step = lambda row, step: None
    engine.requests.clear()
    assert run("--out", tmp_path / "run", "--resume", "--check-determinism", "1")[0] == 0
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole") and len(engine.requests) == 4


def test_resume_with_more_and_fewer_rows(run, engine, tmp_path):
    run("--out", tmp_path / "run", "--limit", "2")
    assert "3 items" in run("--out", tmp_path / "run", "--resume", "--limit", "3")[1] and len(engine.requests) == 3
    assert "1 items" in run("--out", tmp_path / "run", "--resume", "--rows", "1")[1]
    assert "4 items" in run("--out", tmp_path / "run", "--resume")[1] and len(engine.requests) == 4


def test_resume_where_nothing_is(run, engine, tmp_path):
    assert run("--out", tmp_path / "run", "--resume")[0] == 0


def test_resume_keeps_the_date(run, engine, tmp_path):
    run("--out", tmp_path / "run", "--profile", "boxed-chat", "--date", "2026-09-25", "--limit", "1")
    assert run("--out", tmp_path / "run", "--profile", "boxed-chat", "--resume", "--limit", "2")[0] == 0
    assert all("2026-09-25" in text for text in engine.requests) and len(engine.requests) == 2


@pytest.mark.parametrize("change, message", [
    (["--max-new-tokens", "100"], "arguments.max_new_tokens: was 512, is 100"),
    (["--profile", "cot8"], "prompt.profile: was 'plain', is 'cot8'"),
    (["--seed", "1"], "seeds.seed: was 0, is 1"),
    (["--temperature", "1"], "arguments.temperature: was 0.0, is 1.0"),
    (["--policy", "exact"], "decode.policy: was 'canon', is 'exact'"),
    (["--devices", "2"], "devices.mesh.slices: was 1, is 2"),
])
def test_resume_of_another_run(run, engine, refused, tmp_path, change, message):
    run("--out", tmp_path / "run", "--limit", "1")
    before = (tmp_path / "run" / "config.json").read_text()
    refused(run("--out", tmp_path / "run", "--resume", *change), message)
    assert engine.loads == 1 and (tmp_path / "run" / "config.json").read_text() == before


def test_resume_with_other_data(run, engine, refused, tmp_path, problems):
    run("--out", tmp_path / "run", "--limit", "1")
    with open(problems / "gsm8k_test.jsonl", "a") as file:
        file.write('{"question": "More?", "answer": "#### 5"}\n')
    refused(run("--out", tmp_path / "run", "--resume"), "data.gsm8k_test.jsonl: was '")


# ------------------------------------------------------------------ determinism


def test_answers_that_repeat(run, engine):
    code, out, _ = run("--check-determinism", "2", "--limit", "3")
    assert code == 0 and "determinism  2 rows, 0 differences" in out and len(engine.requests) == 7


def test_answers_that_do_not_repeat(run, engine, tmp_path, monkeypatch):
    replies = iter(["It is 7", "It is 8", "It is 7"])
    steps = engine.steps

    def changing(*args, **options):
        engine.replies[0] = next(replies)
        return steps(*args, **options)

    monkeypatch.setattr("musejax.gsm8k.steps.request_steps", changing)
    monkeypatch.setattr(rows, "top_two", lambda model, tokens: [[len(tokens), 1.5], [3, 1.25]])
    code, out, _ = run("--check-determinism", "1", "--limit", "1", "--out", tmp_path / "run")
    assert code == 1 and "determinism  1 rows, 1 differences" in out
    difference = json.loads((tmp_path / "run" / "summary.json").read_text())["determinism"]["differences"][0]
    encode = engine.tokenizer.encode
    seven, eight = (encode(text, bos=False, parse_special=False) for text in ("It is 7", "It is 8"))
    at = difference["position"]
    assert seven[:at] == eight[:at] and difference["tokens"] == [seven[at], eight[at]]
    assert f"test/0000: first run and second run differ at token {at}: {seven[at]} and {eight[at]}" in out


def test_determinism_of_a_row_that_fails(run, engine):
    engine.replies[0] = RuntimeError("x")
    code, out, _ = run("--check-determinism", "2", "--limit", "2")
    assert code == 3 and "0 differences" in out and "1 errors" in out


def test_determinism_compares_with_plain_decoding(engine, tokenizer):
    """With a drafter, the third run goes without it."""
    from types import SimpleNamespace

    from musejax.sampling import Sampling

    given = []
    steps = engine.steps

    def spied(*args, drafter=None, **options):
        given.append(drafter)
        return steps(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("musejax.gsm8k.steps.request_steps", spied)
        prompter = SimpleNamespace(profile=SimpleNamespace(stop=()), tokenizer=tokenizer)
        setup = rows.Setup(model=None, prompter=prompter, sampling=Sampling(), sample=0, limit=50,
                           stop_ids=(tokenizer.end_id,), scorers=(), drafter="d")
        ids = tokenizer.encode("How many is 0?", bos=True, parse_special=False)
        pair = SimpleNamespace(index=0), SimpleNamespace(ids=ids, opening=None)
        assert rows.check_determinism(setup, [pair]) == [] and given == ["d", "d", None]


def test_first_difference():
    assert [rows.first_difference(*x) for x in (([1, 2], [1, 3]), ([1], [1, 2]), ([], [1]))] == [1, 1, 0]


# ------------------------------------------------------------------ speed


def test_speed(run, engine, tmp_path):
    engine.replies[0] = "one two three four five six seven eight nine ten " * 6
    engine.width = 2
    code, out, _ = run("--speed", "--out", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "speed.json").read_text())
    assert code == 0 and len(result["runs"]) == 3 and len(engine.requests) == 4, "the first compiles"
    first = result["runs"][0]
    assert (first["steps"], first["L_window"], first["step_ms_median"]) == (20, 2.0, 2.0)
    assert first["tok_s"] == first["tok_s_window"] == 1000 and not first["incomplete"] and first["first_token_ms"] == 10
    assert out.startswith("GSM8K test row 0, profile plain, batch 1, greedy, ")
    assert "no-spec: profile plain, median of 3 repeats: tok/s 1000.0, step 2.000 ms" in out


def test_speed_of_a_short_answer(run, engine):
    code, out, _ = run("--speed", "--rows", "1")
    assert code == 0 and "incomplete: " in out and "median of" not in out


def test_speed_with_a_compilation(run, engine, monkeypatch):
    engine.replies[0] = "one two three four five six seven eight nine ten " * 6
    monkeypatch.setattr("musejax.gsm8k.steps.compilations.now", iter(range(1000)).__next__)
    code, out, _ = run("--speed")
    assert code == 1 and "failed: something was compiled in 21 steps" in out


def test_speed_with_a_slow_step(run, engine, monkeypatch):
    from musejax.gsm8k import report, speed
    from musejax.gsm8k.steps import Answer, Taken

    fast, slow = Taken(1, 2.4, False, None), Taken(1, 9.8, False, None)
    figures = speed.window(Answer("", [], "length", fast, [slow] * 5 + [fast] * 7 + [slow] + [fast] * 12))
    assert (figures["step_ms_median"], figures["uneven"], figures["slowest"]) == (2.4, True, 7)
    line = report.speed_line({**figures, "drafter": False, "repeat": 1})
    assert "warning: mean 2.770 ms" in line and "timed step 7 with 9.800 ms" in line


# ------------------------------------------------------------------ refusals, before anything is loaded


@pytest.mark.parametrize("options, message", [
    (["--limit", "0"], "--limit: expected an integer of at least 1"),
    (["--limit", "5"], "--limit 5: expected rows of 0 to 4, since gsm8k_test.jsonl has 4"),
    (["--rows", "2:5"], "--rows 2:5: expected rows of 0 to 4"),
    (["--rows", "2:2"], "--rows: expected rows such as 0:200"),
    (["--rows", "a"], "--rows: expected rows such as 0:200"),
    (["--rows", "1", "--limit", "1"], "not allowed with argument"),
    (["--profile", "best"], "--profile: invalid choice: 'best'"),
    (["--scorers", "strict,loose"], "--scorers: expected names out of strict"),
    (["--temperature", "-1"], "--temperature: expected a finite number"),
    (["--temperature", "1e-9"], "temperature: expected 0 (greedy) or 1e-05"),
    (["--drafter", "x"], "x/config.json: expected the drafter's config.json, found no such file"),
    (["--drafter", "x", "--no-spec"], "--no-spec: expected no --drafter beside it"),
    (["--resume"], "--resume: expected --out RUNDIR beside it"),
    (["--date", "2026-09-25"], "--date: expected a profile with a chat template"),
    (["--profile", "boxed-chat", "--date", "today"], "expected an ISO date"),
    (["--checkpoint", "nowhere"], "nowhere: expected a checkpoint folder"),
    (["--overlay", "nowhere"], "--overlay nowhere: expected a folder"),
    (["--speed", "--rows", "0:2"], "--speed: expected one row"),
    (["--speed", "--temperature", "1"], "--speed: expected no --temperature beside it"),
    (["--speed", "--check-determinism", "1"], "--speed: expected no --check-determinism beside it"),
    (["--repeat", "2"], "--repeat: expected an integer of at least 3"),
])
def test_wrong_options(run, engine, refused, options, message):
    refused(run(*options), message)
    assert engine.loads == 0


def test_missing_data(run, engine, refused, problems, tmp_path):
    refused(run(data=None), "expected --data DIR, or MUSEJAX_GSM8K")
    refused(run(data=tmp_path / "x"), "expected a folder with gsm8k_test.jsonl (SHA-256 3730d312f6e34405")
    (problems / "gsm8k_train.jsonl").unlink()
    assert run()[0] == 0, "only fewshot5 needs the train file"
    refused(run("--profile", "fewshot5"), "train.jsonl: expected the GSM8K train problems with SHA-256 17f347dc51")
    (problems / "gsm8k_test.jsonl").write_text("")
    refused(run(), "has 0")


def test_out_that_cannot_be_used(run, engine, refused, tmp_path):
    run("--out", tmp_path / "run", "--limit", "1")
    refused(run("--out", tmp_path / "run", "--limit", "1"), "expected an empty folder or --resume, found 1 items")
    (tmp_path / "file").touch()
    refused(run("--out", tmp_path / "file"), "expected a folder or a new name, found a file")
    refused(run("--out", tmp_path / "file" / "run"), "file/run: Not a directory")
    assert engine.loads == 1


def test_scored_row_in_the_prompt(run, engine, refused, problems):
    (problems / "gsm8k_train.jsonl").write_text((problems / "gsm8k_test.jsonl").read_text() * 2)
    refused(run("--profile", "fewshot5"), "test/0000: expected no scored row among the worked examples")
    assert engine.loads == 0


def test_prompts_that_do_not_fit(run, engine, refused, problems):
    long = {"question": "word " * 2000 + "How many is 0?", "answer": "#### 18"}
    short = {"question": "How many is 1?", "answer": "#### -10"}
    (problems / "gsm8k_test.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (long, short)))
    refused(run("--limit", "1"), "prompts: expected fewer than 1024 tokens (max_position_embeddings), got ")
    assert "1 of 2 prompts do not fit into the context of 1024 tokens" in run()[2]


# ------------------------------------------------------------------ progress


def test_progress(run, engine, monkeypatch):
    monkeypatch.setattr("musejax.gsm8k.report.EVERY", 0.0)
    err = run()[2]
    lines = [line for line in err.splitlines() if line.startswith("gsm8k: ")]
    assert len(lines) == 4 and lines[0].startswith("gsm8k: 1/4 · strict 1.0000 · L 1.") and "s left" in lines[0]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    err = run()[2]
    assert err.count("\rgsm8k: ") == 4 and err.endswith("\n") and "500 tok/s" in err


def test_little_progress_without_a_terminal(run, engine):
    assert "gsm8k: " not in run()[2]

"""A small set of problems, and an engine that says what a test wants it to say."""

import json
from types import SimpleNamespace

import pytest

from musejax import cli
from musejax.commands import gsm8k as command
from musejax.gsm8k import steps
from musejax.gsm8k.steps import Step
from musejax.paths import nano_path
from musejax.tokenizer import Tokenizer

GOLD = ["18", "-10", "1,450,000", "7"]


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_folder(nano_path())


@pytest.fixture
def problems(tmp_path):
    """A folder with four test problems and six train problems."""
    folder = tmp_path / "problems"
    folder.mkdir()
    write(folder / "gsm8k_test.jsonl", [(f"How many is {i}?", f"It is that.\n#### {g}") for i, g in enumerate(GOLD)])
    write(folder / "gsm8k_train.jsonl",
          [(f"What are {i} and 1?", f"<<{i}+1={i + 1}>>\n#### {i + 1}") for i in range(6)])
    return folder


def write(path, pairs):
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in pairs))


class Engine:
    """Stands in for the model.

    Attributes:
        replies: what it says to row i: text, or an exception to raise.
        width: tokens a step.
        loads, requests: how often it was loaded; the prompts it got, as text.
        before_step: called before each step with (row, number of the step).
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.replies = [f"It is that.\n#### {g}" for g in GOLD]
        self.width = 1
        self.loads, self.requests, self.samplings = 0, [], []
        self.before_step = lambda row, step: None

    def load(self, args, plan):
        self.loads += 1
        return SimpleNamespace()

    def steps(self, model, prompt, sampling, *, max_new_tokens, stop_ids, drafter=None):
        text = self.tokenizer.decode(prompt)
        self.requests.append(text)
        self.samplings.append(sampling)
        row = next(i for i in range(len(self.replies)) if f"How many is {i}?" in text)
        reply = self.replies[row]
        if isinstance(reply, Exception):
            raise reply
        tokens = [*self.tokenizer.encode(reply, bos=False, parse_special=True), self.tokenizer.end_id]

        def made():
            yield Step(tokens[:1], 0.010, prefill=True)
            for number, at in enumerate(range(1, len(tokens), self.width)):
                self.before_step(row, number)
                yield Step(tokens[at:at + self.width], 0.002, (4, 8))

        return made()


@pytest.fixture
def engine(monkeypatch, tokenizer):
    engine = Engine(tokenizer)
    monkeypatch.setattr(command, "load_model", engine.load)
    monkeypatch.setattr(steps, "request_steps", engine.steps)
    monkeypatch.setattr(steps, "verify_width", lambda drafter=None: engine.width)
    monkeypatch.delenv("MUSEJAX_GSM8K", raising=False)
    return engine


@pytest.fixture
def run(capsys, problems):
    """Runs `musejax gsm8k` on the small problems -> (exit code, stdout, stderr)."""

    def call(*argv, data=problems):
        argv = [*argv, *(["--data", data] if data is not None else [])]
        code = cli.main(["gsm8k", *map(str, argv)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refused():
    """Checks that a result is exit code 2 and one message with the given text, and nothing on stdout."""

    def check(result, message):
        code, out, err = result
        assert (code, out) == (2, ""), result
        assert err.startswith("musejax: error: ") and message in err, err
        assert "Traceback" not in err

    return check

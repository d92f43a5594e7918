"""Prompts: their exact text, that no scored row is in them, and what is cut from an answer."""

import dataclasses
import datetime

import pytest

from musejax.chat import ChatTemplate
from musejax.gsm8k import data as problems
from musejax.gsm8k.profiles import PROFILES, ProfileError, Prompter, Shots, check_apart, cut, shots_of
from musejax.gsm8k.shots import COT8
from musejax.paths import nano_path

TEMPLATE = ChatTemplate.from_folder(nano_path())


@pytest.fixture
def prompter(tokenizer, problems):
    def make(name, template=TEMPLATE, date=None, **changes):
        profile = dataclasses.replace(PROFILES[name], **changes)
        return Prompter(profile, shots_of(profile, problems), tokenizer, template, date)

    return make


@pytest.fixture
def row(problems):
    from musejax.gsm8k.data import load

    return load("test", problems).rows[1]


def test_plain(prompter, row, tokenizer):
    prompt = prompter("plain").prompt(row)
    assert prompt.text == "Question: How many is 1?\nAnswer:" and prompt.opening is None
    assert prompt.ids == [tokenizer.bos_id, *tokenizer.encode(prompt.text, bos=False, parse_special=False)]


def test_fewshot5(prompter, row):
    shots = "".join(f"Question: What are {i} and 1?\nAnswer: <<{i}+1={i + 1}>>\n#### {i + 1}\n\n" for i in range(5))
    assert prompter("fewshot5").text(row) == f"{shots}Question: How many is 1?\nAnswer:"


def test_cot8(prompter, row):
    text = prompter("cot8").text(row)
    blocks = text.split("\n\n")
    assert len(blocks) == 9 and blocks[-1] == "Q: How many is 1?\nA:"
    assert blocks[0].startswith("Q: There are 15 trees") and "\nA: There are 15 trees originally." in blocks[0]
    assert " ".join(b.rpartition("The answer is ")[2] for b in blocks[:-1]) == "6. 5. 39. 8. 9. 29. 33. 8."
    assert len(COT8) == 8


def test_chat(prompter, row, tokenizer):
    prompt = prompter("boxed-chat").prompt(row)
    assert ("<|start|>user<|message|>How many is 1?\nPlease reason step by step, and put your final answer within "
            "\\boxed{}.<|eot|><|start|>assistant") in prompt.text
    assert "Reasoning strength: 16." in prompt.text and prompt.opening == "assistant"
    assert prompt.ids.count(tokenizer.bos_id) == 1
    with pytest.raises(ProfileError, match="expected a checkpoint with a chat template"):
        prompter("boxed-chat", template=None)
    with pytest.raises(ProfileError, match="--date: expected a profile with a chat template"):
        prompter("plain", date="2026-09-25")


def test_text_of_a_problem_forms_no_special_token(prompter, tokenizer):
    row = problems.Row(0, "What is <|eot|>?", "#### 1", "1")
    for name in PROFILES:
        frame = prompter(name).prompt(row._replace(question="What is it?")).ids
        assert prompter(name).prompt(row).ids.count(tokenizer.eot_id) == frame.count(tokenizer.eot_id)


def test_date(prompter, row):
    """A template that tells the date by itself is given today's, so that it stays the same in the run."""
    assert prompter("boxed-chat").date is None, "nano's template tells a date only if it is given"
    assert "Current date: 2026-09-25" in prompter("boxed-chat", date="2026-09-25").text(row)
    source = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}<|start|>assistant"
    assert prompter("boxed-chat", ChatTemplate(source)).date == datetime.date.today().isoformat()
    assert prompter("boxed-chat", ChatTemplate(source), "2026-09-25").text(row).startswith("25 Sep 2026How")


def test_profiles_are_those_of_the_specification():
    assert {n: (p.limit, p.stop, p.scorers, p.chat) for n, p in PROFILES.items()} == {
        "fewshot5": (512, ("Question:",), ("strict", "flexible", "numeric"), False),
        "boxed-chat": (4096, (), ("numeric", "boxed", "flexible"), True),
        "plain": (512, ("Question:",), ("strict", "flexible", "numeric"), False),
        "cot8": (512, ("Q:",), ("cot-strict", "flexible"), False),
        "bench": (512, (), (), True)}


# ------------------------------------------------------------------ no scored row in the prompt


def test_no_scored_row_is_a_worked_example(shared, tokenizer):
    folder = shared / "data"
    rows = problems.load("test", folder).rows
    for profile in PROFILES.values():
        shots = shots_of(profile, folder)
        check_apart(rows, shots)
        assert {q for q, _ in shots.pairs}.isdisjoint(r.question for r in rows)
        text = Prompter(profile, shots, tokenizer, TEMPLATE).text(rows[700])
        assert [r.index for r in rows if r.question in text] == [700], profile.name
    assert shots_of(PROFILES["fewshot5"], folder).ids == tuple(f"train/000{i}" for i in range(5))


def test_scored_row_among_the_examples_is_refused(row):
    with pytest.raises(ProfileError, match="test/0001: expected no scored row among the worked examples, but it is x"):
        check_apart([row], Shots(("x",), ((row.question + " ", row.answer),)))


# ------------------------------------------------------------------ from text to final text


CHAT = (" to=self<|message|>Q: #### 5 Question: \\boxed{5}<|eom|><|start|>assistant to=user<|message|>"
        "It is 7.Question: 8")


def test_stops_are_applied_after_reasoning_is_removed(prompter):
    final, reasoning = prompter("boxed-chat", stop=("Question:",)).split(CHAT, "assistant")
    assert (final, reasoning) == ("It is 7.", "Q: #### 5 Question: \\boxed{5}")


def test_reasoning_is_not_searched(prompter):
    assert prompter("boxed-chat").split(" to=self<|message|>\\boxed{5}", "assistant") == ("", "\\boxed{5}")
    text = " to=tool<|message|>5<|eom|><|start|>assistant to=user<|message|>6"
    assert prompter("boxed-chat").split(text, "assistant") == ("6", "5")


def test_special_tokens_are_dropped(prompter):
    assert prompter("plain").split("a<|eom|> b<|finetune_right_pad|>", None) == ("a b", "")
    assert prompter("boxed-chat").split("7<|begin_of_text|>", "assistant") == ("7", "")


def test_stops_are_applied_to_the_text_again(prompter):
    row_20 = "#### 18\n\nQuestion: Tom has 7 cats.\nAnswer: 7\n#### 7"
    assert prompter("plain").split(row_20, None)[0] == "#### 18\n\n"
    assert cut("abc", ()) == "abc" and cut("a Quest", ("Question:",)) == "a Quest"


# ------------------------------------------------------------------ data


@pytest.mark.parametrize("line, message", [
    ("{", "line 1: expected a JSON object"), ("[]", "expected an object with the texts"),
    ('{"question": "a", "answer": 5}', "expected an object with the texts"),
    ('{"question": "a", "answer": "18"}', "expected an answer whose last line is '#### ' and an integer, got '18'"),
    ('{"question": "a", "answer": "#### 1.5"}', "and an integer"),
])
def test_wrong_lines(tmp_path, line, message):
    (tmp_path / "gsm8k_test.jsonl").write_text(line + "\n")
    with pytest.raises(problems.DataError, match=message.replace("[", r"\[")):
        problems.load("test", tmp_path)


def test_published_files(shared):
    data = problems.load("test", shared / "data")
    assert data.expected and (data.rows[0].gold, data.rows[489].gold[0], data.rows[1113].gold[0]) == ("18", "-", "-")
    assert sum("," in r.gold for r in data.rows) == 14 and problems.row_id("test", 42) == "test/0042"


def test_where_the_data_is(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSEJAX_GSM8K", str(tmp_path))
    assert problems.locate(None) == tmp_path
    with pytest.raises(problems.DataError, match="--data nowhere: expected a folder with gsm8k_test"):
        problems.locate("nowhere")
    monkeypatch.delenv("MUSEJAX_GSM8K")
    with pytest.raises(problems.DataError, match=problems.EXPECTED["test"]):
        problems.locate(None)
    with pytest.raises(problems.DataError, match=f"train.jsonl: expected .* SHA-256 {problems.EXPECTED['train']}"):
        problems.load("train", tmp_path)
    (tmp_path / "gsm8k_train.jsonl").touch()
    with pytest.raises(problems.DataError, match="expected at least 5 problems, got 0"):
        shots_of(PROFILES["fewshot5"], tmp_path)

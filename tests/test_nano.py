"""The shipped model: its files, and that two commands' worth of code answer a problem with it."""

import json

import numpy as np
import pytest

import musejax
from musejax import params as table
from musejax.chat import split_messages
from musejax.config import NANO
from musejax.paths import nano_path
from musejax.text import STOP

MIB = 1 << 20


def test_files():
    folder = nano_path()
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 2 and all(f.stat().st_size <= 16 * MIB for f in shards)
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 18 * MIB
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {p.hf_key for p in table.table(NANO)}
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                 "chat_template.jinja", "README.md"):
        assert (folder / name).is_file(), name


@pytest.fixture(scope="module")
def nano():
    return musejax.load()


def test_sizes(nano):
    assert nano.config == NANO
    assert sum(np.prod(p.hf_shape) for p in table.table(nano.config)) == 8_603_104
    assert nano.tokenizer.size <= NANO.vocab_size
    assert nano.defaults.stop_ids == (nano.tokenizer.end_id, nano.tokenizer.eot_id)


def test_a_problem_gets_a_worked_answer(nano):
    got = musejax.generate(nano, "Question: Tom has 3 boxes of 12 pencils and gives 7 pencils away. "
                                 "How many pencils are left?\nAnswer:")
    assert got.finish_reason == STOP
    *work, last = got.text.strip().splitlines()
    assert work and last.startswith("#### ") and last.removeprefix("#### ").lstrip("-").isdigit()
    assert "<<" in got.text  # the calculator annotations it was trained on


def test_chat_separates_reasoning_from_the_answer(nano):
    prompt = nano.chat.render([{"role": "user", "content": "Ann has 5 apples and buys 4 more. How many has she now?"}])
    ids = nano.tokenizer.encode(prompt, bos=False, parse_special=True)
    got = musejax.generate(nano, ids)
    messages = split_messages(got.text)
    assert [m.recipient for m in messages] == ["self", "user"]
    assert "#### " in messages[1].text and got.tokens[-1] == nano.tokenizer.eot_id


@pytest.mark.parametrize("text", [
    "Tom has 3 apples.", "naïve ünïcode 苹果 🍎", "tabs\tand\n\nlines", "<|eot|> 1234567890"])
def test_tokenizer_round_trip(nano, text):
    ids = nano.tokenizer.encode(text, bos=True, parse_special=False)
    assert nano.tokenizer.special_ids.isdisjoint(ids[1:])
    assert nano.tokenizer.decode(ids[1:]) == text

"""Text and ids both ways, special tokens only on request, whole characters while streaming."""

import json
import sys

import pytest
import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from musejax.tokenizer import GenerationDefaults, StreamDecoder, Tokenizer, TokenizerError, read_generation_config

BACKEND = tiny_tokenizer.build()
TOKENIZER = Tokenizer(BACKEND)
ANY_TEXT = st.text(st.characters(codec="utf-8"))
ANY_IDS = st.lists(st.integers(0, TOKENIZER.size + 5))
HOSTILE_TEXT = st.lists(st.sampled_from([*tiny_tokenizer.SPECIALS, "<|", "|>", "eot", "<", "a ", "é"])).map("".join)


def streamed(ids, **options):
    decoder = StreamDecoder(TOKENIZER, **options)
    return [*map(decoder.push, ids), decoder.finish()]


def test_ids_of_special_tokens():
    ids = [BACKEND.token_to_id(s) for s in tiny_tokenizer.SPECIALS]
    t = TOKENIZER
    assert [t.bos_id, t.start_id, t.message_id, t.eom_id, t.eot_id, t.end_id] == ids
    assert t.stop_ids == (t.end_id, t.eot_id), "not <|eom|>: another message follows it"
    assert t.size == max(ids) + 1
    assert t.special_ids == set(ids)


def test_bos_once():
    plain = TOKENIZER.encode("Tom", bos=False, parse_special=False)
    assert TOKENIZER.encode("Tom", bos=True, parse_special=False) == [TOKENIZER.bos_id, *plain]
    assert TOKENIZER.encode("<|begin_of_text|>Tom", bos=True, parse_special=True) == [TOKENIZER.bos_id, *plain]


def test_a_post_processor_adds_nothing():
    from tokenizers.processors import TemplateProcessing

    backend = tiny_tokenizer.build()
    name = "<|begin_of_text|>"
    backend.post_processor = TemplateProcessing(single=f"{name} $A", special_tokens=[(name, TOKENIZER.bos_id)])
    assert Tokenizer(backend).encode("a", bos=False, parse_special=True) == [BACKEND.token_to_id("a")]


@given(HOSTILE_TEXT | ANY_TEXT)
def test_text_forms_no_special_token(text):
    ids = TOKENIZER.encode(text, bos=False, parse_special=False)
    assert TOKENIZER.special_ids.isdisjoint(ids)
    assert TOKENIZER.decode(ids) == text


def test_text_of_special_tokens_is_ordinary_text():
    """The ids that a tokenizer without special tokens gives, merges across `<|` included."""
    text = "a <|eot|> <|b|>"
    ids = TOKENIZER.encode(text, bos=False, parse_special=False)
    assert ids == tiny_tokenizer.build(specials=()).encode(text).ids
    assert any("<|" in TOKENIZER.decode([i]) for i in ids), "the test needs such a merge"


def test_special_tokens_when_asked():
    ids = TOKENIZER.encode("a<|eot|>", bos=False, parse_special=True)
    assert ids == [BACKEND.token_to_id("a"), TOKENIZER.eot_id]
    assert TOKENIZER.decode(ids) == "a<|eot|>"
    assert TOKENIZER.decode(ids, skip_special=True) == "a"


def test_unflagged_control_tokens_are_special_too():
    """Some published files forget `special`; and a vocabulary may hold the text as a word."""
    backend = tiny_tokenizer.build(specials=())
    backend.add_tokens(["<|eot|>"])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a<|eot|>b<|eot|>", bos=False, parse_special=False)
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == "a<|eot|>b<|eot|>"
    assert tokenizer.eot_id in tokenizer.encode("a<|eot|>b", bos=False, parse_special=True)


@given(ANY_TEXT)
def test_stream_of_text(text):
    pieces = streamed(TOKENIZER.encode(text, bos=False, parse_special=False))
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in p for p in pieces)


@given(ANY_IDS, st.booleans())
def test_stream_of_any_ids(ids, skip):
    """Broken bytes too: joined pieces, `decode` and the library agree."""
    joined = "".join(streamed(ids, skip_special=skip))
    assert joined == TOKENIZER.decode(ids, skip_special=skip)
    assert joined == BACKEND.decode(ids, skip_special_tokens=skip)


def test_stream_holds_back_parts_of_a_character():
    ids = TOKENIZER.encode("🎉", bos=False, parse_special=False)
    assert len(ids) > 1, "the test needs a character of several tokens"
    assert streamed(ids) == [""] * (len(ids) - 1) + ["🎉", ""]
    assert streamed(ids[:-1]) == [""] * (len(ids) - 1) + ["\N{REPLACEMENT CHARACTER}"]


def test_added_token_with_other_letters():
    """Its text is not byte-level: é would be read as the byte E9."""
    backend = tiny_tokenizer.build()
    backend.add_tokens(["é!"])
    assert Tokenizer(backend).decode([backend.token_to_id("é!")]) == "é!"


def test_lone_surrogates_are_refused():
    with pytest.raises(TokenizerError, match="expected valid Unicode"):
        TOKENIZER.encode("\udc80", bos=False, parse_special=False)


def test_folder(tmp_path):
    assert Tokenizer.find(tmp_path) is None
    tokenizer = Tokenizer.from_folder(tiny_tokenizer.write(tmp_path))
    assert tokenizer.bos_id == TOKENIZER.bos_id
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|start|>"}}))
    assert Tokenizer.find(tmp_path).bos_id == TOKENIZER.start_id


@pytest.mark.parametrize("content, message", [
    (None, "found no such file; give token ids"),
    ("{", r"tokenizer\.json: expected a file of the `tokenizers` library, got"),
])
def test_wrong_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_other_kinds_of_tokenizer_are_refused():
    backend = Backend(models.BPE())
    with pytest.raises(TokenizerError, match=r"expected a byte-level tokenizer .* got decoder None"):
        Tokenizer(backend)
    backend.decoder = decoders.Metaspace()
    with pytest.raises(TokenizerError, match="got decoder Metaspace"):
        Tokenizer(backend)


def test_no_bos_token():
    tokenizer = Tokenizer(tiny_tokenizer.build(specials=("<|eot|>",)))
    assert tokenizer.bos_id is None and tokenizer.stop_ids == (tokenizer.eot_id,)
    with pytest.raises(TokenizerError, match="expected a BOS token"):
        tokenizer.encode("a", bos=True, parse_special=False)


@pytest.mark.parametrize("generation, config, expected", [
    ({"eos_token_id": [5, 6, 5], "temperature": 1.0, "top_k": 64, "top_p": 0.9, "bos_token_id": 1, "pad_token_id": 2},
     {"text_config": {"eos_token_id": 9}}, GenerationDefaults((5, 6), 1.0, 64, 0.9, 1, 2)),
    ({"eos_token_id": 5}, {"text_config": {"bos_token_id": 3}}, GenerationDefaults((5,), bos=3)),
    (None, {"text_config": {"eos_token_id": [7, 8], "bos_token_id": 1, "pad_token_id": None}},
     GenerationDefaults((7, 8), bos=1)),
    (None, {"eos_token_id": 7}, GenerationDefaults((7,))),
    (None, None, GenerationDefaults()),
])
def test_generation_config(tmp_path, generation, config, expected):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert read_generation_config(tmp_path) == expected


@pytest.mark.parametrize("content, message", [
    ("{", "generation_config.json: expected JSON"),
    ("[]", "expected a JSON object, got list"),
    ('{"eos_token_id": ["a"]}', "eos_token_id: expected a token id or a list"),
    ('{"eos_token_id": true}', "eos_token_id: expected a token id or a list"),
    ('{"top_k": 1.5}', "top_k: expected a number, got 1.5"),
])
def test_wrong_generation_config(tmp_path, content, message):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=message):
        read_generation_config(tmp_path)


def test_no_jax():
    """Text can be handled where there is no accelerator stack; checked in a fresh process."""
    import subprocess

    code = "import sys, musejax.chat, musejax.text, musejax.tokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


@pytest.mark.parametrize("config, message", [
    ({"bos_token": {"x": 1}}, r"bos_token: expected a string or an object with a string 'content', got \{'x': 1\}"),
    ({"bos_token": 5}, "bos_token: expected a string or an object with a string 'content', got 5"),
    ([1], "expected a JSON object, got list"),
])
def test_malformed_tokenizer_config(tmp_path, config, message):
    tiny_tokenizer.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=f"tokenizer_config.json: {message}"):
        Tokenizer.from_folder(tmp_path)


def test_json_nested_too_deeply(tmp_path):
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(TokenizerError, match="expected JSON"):
        read_generation_config(tmp_path)

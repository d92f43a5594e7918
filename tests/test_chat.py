"""Rendering in the sandbox without letting a caller form special tokens; splitting generated text."""

import json
from itertools import pairwise

import pytest
import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from musejax.chat import ChatError, ChatTemplate, Message, MessageParser, opening_of, split_messages
from musejax.tokenizer import Tokenizer, TokenizerError

BOS = {"bos_token": "<|begin_of_text|>"}
TEMPLATE = ChatTemplate(tiny_tokenizer.TEMPLATE, BOS)
TOKENIZER = Tokenizer(tiny_tokenizer.build())
REPLY = " to=self<|message|>2 and 2<|eom|><|start|>assistant to=user<|message|>It is 4.<|eot|>"


def user(text):
    return [{"role": "user", "content": text}]


def test_render():
    assert TEMPLATE.render(user("What is 2+2?"), date="2026-09-25", reasoning_effort="medium") == (
        "<|begin_of_text|><|start|>system<|message|>You help. Today is 25 Sep 2026. Effort: medium.<|eot|>"
        "<|start|>user<|message|>What is 2+2?<|eot|><|start|>assistant")
    assert TEMPLATE.render(user("a"), add_generation_prompt=False).endswith("a<|eot|>")


def test_rendered_prompt_as_ids():
    ids = TOKENIZER.encode(TEMPLATE.render(user("a")), bos=False, parse_special=True)
    t = TOKENIZER
    assert ids.count(t.bos_id) == 1 and ids[0] == t.bos_id
    assert [i for i in ids if i in t.special_ids] == [
        t.bos_id, t.start_id, t.message_id, t.eot_id, t.start_id, t.message_id, t.eot_id, t.start_id]


@given(st.lists(st.sampled_from([*tiny_tokenizer.SPECIALS, "<", "|", "<|", "eot|>", "a"])).map("".join))
def test_caller_text_forms_no_special_token(text):
    """The same special tokens as for harmless text, wherever the caller's text goes."""
    def specials(content, role):
        prompt = TEMPLATE.render([{"role": role, "content": content}])
        ids = TOKENIZER.encode(prompt, bos=False, parse_special=True)
        return [i for i in ids if i in TOKENIZER.special_ids]

    assert specials(text, "user") == specials("a", "user") == specials("a", text)


def test_caller_text_stays_readable():
    assert "say < |eot|> twice" in TEMPLATE.render(user("say <|eot|> twice"))


def test_nested_caller_text_and_other_special_tokens():
    template = ChatTemplate("{{ messages | tojson }}{{ tools | tojson }}", specials=["<image>", "<|eot|>"])
    out = template.render([{"role": "user", "content": [{"type": "text", "text": "<image><|eot|>"}]}],
                          tools=[{"name": "<|start|>"}])
    assert "<image>" not in out and "<|" not in out and "< image>< |eot|>" in out


def test_template_of_the_field():
    """Block trimming, loop controls, tojson without HTML escapes, as published templates expect."""
    source = ("{% for m in messages %}\n    {% if loop.index > 1 %}\n        {% break %}\n    {% endif %}\n"
              "{{ m | tojson }}\n{% endfor %}\n{{ 'é<>&' | tojson }}")
    assert ChatTemplate(source).render(user("x") + user("y")) == '{"role": "user", "content": "x"}\n"é<>&"'


@pytest.mark.parametrize("source", [
    "{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__subclasses__() }}",
    "{{ messages.append(1) }}", "{{ strftime_now.__self__.year }}", "{{ raise_exception.__globals__['sys'] }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
])
def test_sandbox(source):
    with pytest.raises(ChatError, match="does not accept these messages"):
        ChatTemplate(source).render(user("a"))


def test_errors():
    with pytest.raises(ChatError, match="only users here"):
        ChatTemplate("{{ raise_exception('only users here') }}").render(user("a"))
    with pytest.raises(ChatError, match=r"chat_template\.jinja: line 2: expected a Jinja template"):
        ChatTemplate("\n{% if %}")
    with pytest.raises(ChatError, match="expected an ISO date such as 2026-09-25, got 'today'"):
        TEMPLATE.render(user("a"), date="today")
    assert issubclass(ChatError, TokenizerError)


def test_folder(tmp_path):
    assert ChatTemplate.find(tmp_path) is None
    with pytest.raises(ChatError, match="found none; raw mode works without one"):
        ChatTemplate.from_folder(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}",
              "added_tokens_decoder": {"7": {"content": "[PAD]"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.find(tmp_path).render(user("<s>[PAD]<|x")) == "<s>< s>[ PAD]< |x"
    config["chat_template"] = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_folder(tmp_path).render(user("a")) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.find(tmp_path).render(user("a")) == "file"


# ------------------------------------------------------------------ generated text


@pytest.mark.parametrize("text, opening, expected", [
    (REPLY, "assistant", [("self", "2 and 2"), ("user", "It is 4.")]),
    (REPLY.removesuffix("<|eot|>"), "assistant", [("self", "2 and 2"), ("user", "It is 4.")]),
    ("<|message|>thinking", "assistant", [("", "thinking")]),
    ("It is 4.<|eot|>", "assistant<|message|>", [("user", "It is 4.")]),
    ("It is 4.", "assistant to=user<|message|>", [("user", "It is 4.")]),
    (" to=calc<|message|>2+2<|eot|>", "assistant", [("calc", "2+2")]),
    (" to=user<|message|>a<|start|>assistant to=commentary<|message|>b", "assistant",
     [("user", "a"), ("commentary", "b")]),
    (" to=user<|message|>a<|eom|> lost <|message|> lost too", "assistant", [("user", "a")]),
    ("It is 4.", "assistant", [("user", "It is 4.")]),
    (" to=us", "assistant", []),
    ("", "assistant", []),
    (" to=user<|message|>2 <", "assistant", [("user", "2 <")]),
])
def test_split_messages(text, opening, expected):
    messages = split_messages(text, opening)
    assert [(m.recipient, m.text) for m in messages] == expected
    assert all(m.visible == (m.recipient in ("user", "commentary")) for m in messages)


@given(st.lists(st.integers(0, len(REPLY)), max_size=8))
def test_parser_in_any_chunking(cuts):
    bounds = [0, *sorted(cuts), len(REPLY)]
    parser, shown = MessageParser("assistant"), []
    for start, end in pairwise(bounds):
        shown.append(parser.push(REPLY[start:end]))
    shown.append(parser.finish())
    assert parser.messages == [Message("self", "2 and 2"), Message("user", "It is 4.")]
    assert "".join(shown) == "It is 4."


def test_parser_shows_text_at_once_and_separates_messages():
    parser = MessageParser(opening_of(TEMPLATE.render(user("a"))))
    assert parser.push(" to=user<|message|>It") == "It"
    assert parser.push(" is < 4<|e") == " is < 4"
    assert parser.push("om|><|start|>assistant to=commentary<|message|>!") == "\n!"


def test_opening():
    assert opening_of("<|start|>user<|message|>a<|eot|><|start|>assistant to=self") == "assistant to=self"
    assert opening_of("User: a\nAssistant:") == ""


# ------------------------------------------------------------------ malformed files


@pytest.mark.parametrize("config, message", [
    ({"bos_token": {"x": 1}}, "bos_token: expected a string or an object"),
    ({"added_tokens_decoder": [1]}, r"added_tokens_decoder: expected an object of id -> token, got \[1\]"),
    ({"added_tokens_decoder": {"7": 5}}, "added_tokens_decoder: 7: expected a string or an object"),
])
def test_malformed_tokenizer_config(tmp_path, config, message):
    tiny_tokenizer.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=f"tokenizer_config.json: {message}"):
        ChatTemplate.from_folder(tmp_path)


def test_malformed_templates(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [5, {"template": "a"}]}')
    with pytest.raises(ChatError, match="expected the checkpoint's chat template"):
        ChatTemplate.from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ChatError, match=r"chat_template\.jinja: expected UTF-8 text, got invalid start byte at byte 1"):
        ChatTemplate.from_folder(tmp_path)
    with pytest.raises(ChatError, match="expected a Jinja template, got"):
        ChatTemplate("{{ " + "(" * 5000)


@pytest.mark.parametrize("source, error", [
    ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
    ("{{ 10.0 ** 999 }}", "OverflowError"),
    ("{{ messages[0].content + 1 }}", "TypeError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ nothing.at.all }}", "'nothing' is undefined"),
])
def test_template_that_fails(source, error):
    with pytest.raises(ChatError, match=f"the template does not accept these messages.*{error}"):
        ChatTemplate(source).render(user("a"))

"""Chat: messages -> prompt text by the checkpoint's template, and generated text -> messages.

Text of a caller must not form special tokens. The release's own template rewrites `<|` to `< |`; other
templates may not, so `ChatTemplate.render` does the same rewriting itself before any template sees the text (twice
changes nothing). All special tokens of the format are spelled `<|...|>`; those of `tokenizer_config.json` that
are not get a space after their first character. A rendered prompt is then encoded with special tokens parsed and
without another BOS: `tokenizer.encode(text, bos=False, parse_special=True)`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from musejax.tokenizer import END, EOM, EOT, MESSAGE, START, TokenizerError, read_json, token_text

FILE = "chat_template.jinja"
EFFORTS = ("minimal", "low", "medium", "high", "xhigh")
"""Values of `reasoning_effort`; the template turns them into its numbers."""
VISIBLE = ("user", "commentary")
"""Recipients whose messages are for the reader; `self` (or none) is reasoning, any other is a tool call."""


class ChatError(TokenizerError):
    """There is no chat template, or it cannot render these messages; the message says what to change."""


class ChatTemplate:
    """A Jinja chat template, run in a sandbox that can neither write nor reach Python objects.

    Args:
        source: the template.
        variables: extra names it may use, such as `bos_token`.
        specials: special tokens that callers' text must not form, beyond `<|...|>`.
        origin: where it came from, for messages.

    Raises:
        ChatError: the template has a syntax error.
    """

    def __init__(self, source: str, variables: dict[str, str] | None = None, specials: Iterable[str] = (),
                 origin: str = FILE):
        # Block trimming, loop controls and the globals are what published templates are written for.
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        self._origin = origin
        self._variables = dict(variables or {})
        self._specials = tuple(s for s in specials if len(s) > 1 and not s.startswith("<|"))
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as err:
            raise ChatError(f"{origin}: line {err.lineno}: expected a Jinja template, got: {err.message}") from None
        except (ValueError, RecursionError, SyntaxError) as err:  # lone surrogates; nested too deeply
            raise ChatError(f"{origin}: expected a Jinja template, got: {err}") from None

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate:
        """Reads `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`.

        Raises:
            ChatError: neither exists, or the template is not UTF-8 or has a syntax error.
            TokenizerError: the tokens in `tokenizer_config.json` are not text.
        """
        path, config_path = Path(folder) / FILE, Path(folder) / "tokenizer_config.json"
        config = read_json(config_path)
        variables = {k: token_text(v, f"{config_path}: {k}") for k, v in config.items()
                     if k.endswith("_token") and isinstance(v, (str, dict))}
        specials = [*variables.values(), *_added_tokens(config, config_path)]
        if path.is_file():
            return cls(_read_template(path), variables, specials, str(path))
        source = config.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = [t for t in source if isinstance(t, dict)]
            source = next((t.get("template") for t in named if t.get("name") == "default"), None)
        if not isinstance(source, str):
            raise ChatError(f"{path}: expected the checkpoint's chat template (or `chat_template` in "
                            f"{config_path.name}), found none; raw mode works without one: leave out --chat")
        return cls(source, variables, specials, str(config_path))

    @classmethod
    def find(cls, folder: str | Path) -> ChatTemplate | None:
        """`from_folder`, or None if the folder has no template."""
        has = (Path(folder) / FILE).is_file() or read_json(Path(folder) / "tokenizer_config.json").get("chat_template")
        return cls.from_folder(folder) if has else None

    def render(self, messages: Sequence[dict], *, add_generation_prompt: bool = True,
               reasoning_effort: str | None = None, date: str | None = None,
               tools: list[dict] | None = None) -> str:
        """The prompt text for these messages.

        Args:
            messages: each with `role` and `content` (and whatever else the template reads).
            add_generation_prompt: open the assistant's turn at the end.
            reasoning_effort: one of EFFORTS; None leaves the template's default.
            date: ISO date the model is told, as `date` and through `strftime_now`; None is today, if the
                template asks.
            tools: function descriptions.

        Raises:
            ChatError: the template refuses the messages, or fails; or `date` is not an ISO date.
        """
        given = {"reasoning_effort": reasoning_effort, "date": date, "tools": tools}
        given = {k: self._harmless(v) for k, v in given.items() if v is not None}
        try:
            today = datetime.datetime.fromisoformat(date) if date else datetime.datetime.now()
        except ValueError:
            raise ChatError(f"date: expected an ISO date such as 2026-09-25, got {date!r}") from None
        try:
            return self._template.render(
                **self._variables, messages=self._harmless(list(messages)), strftime_now=today.strftime,
                add_generation_prompt=add_generation_prompt, **given)
        except jinja2.TemplateError as err:
            raise ChatError(f"{self._origin}: the template does not accept these messages: {err}") from None
        except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError, RecursionError) as err:
            raise ChatError(f"{self._origin}: the template does not accept these messages, it fails with "
                            f"{type(err).__name__}: {err}") from None

    def _harmless(self, value):
        """`value` with every string in it, however deep, rewritten so that it cannot form a special token."""
        if isinstance(value, str):
            value = value.replace("<|", "< |")
            for special in self._specials:
                value = value.replace(special, f"{special[0]} {special[1:]}")
            return value
        if isinstance(value, dict):
            return {key: self._harmless(item) for key, item in value.items()}
        return [self._harmless(item) for item in value] if isinstance(value, (list, tuple)) else value


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ChatError(f"{path}: expected UTF-8 text, got {err.reason} at byte {err.start}") from None


def _added_tokens(config: dict, path: Path) -> list[str]:
    """Texts of the added tokens that `tokenizer_config.json` lists."""
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise ChatError(f"{path}: added_tokens_decoder: expected an object of id -> token, got {added!r}")
    return [token_text(token, f"{path}: added_tokens_decoder: {key}") for key, token in added.items()]


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def opening_of(prompt: str) -> str:
    """What a rendered prompt has already written of the reply: the text after its last `<|start|>`."""
    return prompt.rpartition(START)[2] if START in prompt else ""


# ------------------------------------------------------------------ generated text


@dataclass
class Message:
    """One generated message.

    Attributes:
        recipient: as its header says: `self` reasoning, `user` and `commentary` for the reader, else a tool;
            "" if the header names none.
        text: the body.
    """

    recipient: str
    text: str = ""

    @property
    def visible(self) -> bool:
        return self.recipient in VISIBLE


_MARKERS = (START, MESSAGE, EOM, EOT, END)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_CUT_HEADER = re.compile(r"\s*(t|to|to=\S*)?\s*")  # generation may end inside the first header


class MessageParser:
    """Pieces of generated text -> messages, as they come.

    The text is ` to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>`: a header up
    to `<|message|>`, then a body up to the next marker.

    Attributes:
        messages: those begun so far.

    Args:
        opening: `opening_of` the prompt, such as `assistant` or `assistant to=user<|message|>`. If it already
            begins a body without naming a recipient, the reply is for the user: such a template knows no
            reasoning.
    """

    def __init__(self, opening: str = ""):
        self.messages: list[Message] = []
        self._held = ""
        self._header: str | None = ""  # None inside a body, and between messages
        self._body = False
        self.push(opening)
        self._opened = len(self._header or "")  # characters of the header that the prompt wrote
        if self._body and not self.messages[-1].recipient:
            self.messages[-1].recipient = "user"

    def push(self, piece: str) -> str:
        """Takes the next text; returns what it adds to the visible messages."""
        text = self._held + piece
        visible, start = [], 0
        for match in _MARKER.finditer(text):
            visible.append(self._text(text[start:match.start()]))
            visible.append(self._marker(match.group()))
            start = match.end()
        keep = max((n for m in _MARKERS for n in range(1, len(m)) if text.endswith(m[:n])), default=0)
        keep = min(keep, len(text) - start)
        self._held = text[len(text) - keep:]
        visible.append(self._text(text[start:len(text) - keep]))
        return "".join(visible)

    def finish(self) -> str:
        """Ends the text; returns what is still to be shown.

        Text without any header is the reply of a model that does not know the format: it is for the user.
        """
        rest, self._held = self._text(self._held), ""
        if self.messages or self._header is None:
            return rest
        reply = self._header[self._opened:]
        if _CUT_HEADER.fullmatch(reply):
            return ""
        self.messages.append(Message("user", reply))
        return reply

    def _text(self, text: str) -> str:
        if self._body:
            self.messages[-1].text += text
            return text if self.messages[-1].visible else ""
        if self._header is not None:
            self._header += text
        return ""

    def _marker(self, marker: str) -> str:
        """Changes state; returns the line break between two visible messages."""
        if marker == MESSAGE and self._header is not None:
            found = _RECIPIENT.search(self._header)
            self.messages.append(Message(found.group(1) if found else ""))
            self._header, self._body = None, True
            again = any(m.visible and m.text for m in self.messages[:-1])
            return "\n" if again and self.messages[-1].visible else ""
        if marker == START:
            self._header, self._body = "", False
        elif marker != MESSAGE:
            self._body = False
        return ""


def split_messages(text: str, opening: str = "") -> list[Message]:
    """The messages of a generated text; see `MessageParser`."""
    parser = MessageParser(opening)
    parser.push(text)
    parser.finish()
    return parser.messages

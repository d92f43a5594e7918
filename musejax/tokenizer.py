"""Text <-> token ids from a checkpoint's `tokenizer.json`, and its generation defaults.

Special tokens such as `<|eot|>` steer the model, so text of a caller must not be able to form them: `encode`
turns them into ordinary tokens unless it is asked to parse them (which only rendered chat prompts need).
Nothing here imports JAX.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tokenizers

FILE = "tokenizer.json"
BOS, START, MESSAGE = "<|begin_of_text|>", "<|start|>", "<|message|>"
EOM, EOT, END = "<|eom|>", "<|eot|>", "<|end_of_text|>"
STOPS = (END, EOT)
"""Tokens that end a generation. `<|eom|>` does not: it closes one message and another follows."""


class TokenizerError(ValueError):
    """Tokenizer files are missing or wrong, or text cannot be encoded; the message says what was expected."""


class Tokenizer:
    """A byte-level BPE tokenizer.

    Attributes:
        special_ids: tokens that steer the model instead of standing for text.
        size: ids from 0 to size - 1 have a token, added tokens included; the model's vocabulary may be larger,
            and ids from `size` on must be masked in sampling.
        bos_id, start_id, message_id, eom_id, eot_id, end_id: ids of the tokens of the chat format, None for
            tokens that this tokenizer lacks.
        stop_ids: ids of `<|end_of_text|>` and `<|eot|>`, as far as they exist.

    Args:
        backend: what does the work.
        bos: text of the token that opens a document.

    Raises:
        TokenizerError: the tokenizer is not byte-level.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos: str = BOS):
        decoder = json.loads(backend.decoder.__getstate__())["type"] if backend.decoder else None
        if decoder != "ByteLevel":
            raise TokenizerError(f"{FILE}: expected a byte-level tokenizer (decoder ByteLevel), got decoder {decoder}")
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        added = backend.get_added_tokens_decoder().items()
        self._added = {i: token.content for i, token in added}
        self.special_ids = frozenset(i for i, token in added if token.special or token.content.startswith("<|"))
        self.size = max(backend.get_vocab_size(with_added_tokens=True), max(self._added, default=-1) + 1)
        names = (bos, START, MESSAGE, EOM, EOT, END)
        ids = tuple(backend.token_to_id(name) for name in names)
        self.bos_id, self.start_id, self.message_id, self.eom_id, self.eot_id, self.end_id = ids
        self.stop_ids = tuple(i for i in (self.end_id, self.eot_id) if i is not None)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads `tokenizer.json`, and the name of the BOS token from `tokenizer_config.json` if there is one.

        Raises:
            TokenizerError: no such file, not a byte-level tokenizer, or a BOS token that is no text.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            raise TokenizerError(f"{path}: expected the checkpoint's tokenizer, found no such file; "
                                 "give token ids instead of text, or copy the file there")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as err:  # the library raises plain Exception
            raise TokenizerError(f"{path}: expected a file of the `tokenizers` library, got: {err}") from None
        config_path = Path(folder) / "tokenizer_config.json"
        bos = read_json(config_path).get("bos_token") or BOS
        return cls(backend, token_text(bos, f"{config_path}: bos_token"))

    @classmethod
    def find(cls, folder: str | Path) -> Tokenizer | None:
        """`from_folder`, or None if there is no tokenizer.json: such a checkpoint works with token ids only."""
        return cls.from_folder(folder) if (Path(folder) / FILE).is_file() else None

    def encode(self, text: str, *, bos: bool, parse_special: bool) -> list[int]:
        """Token ids of a text.

        Args:
            bos: put the BOS token first, unless the text itself begins with it.
            parse_special: let `<|eot|>` and its like become special tokens; False for text of a caller.

        Raises:
            TokenizerError: BOS is wanted but unknown, or the text is not valid Unicode.
        """
        if bos and self.bos_id is None:
            raise TokenizerError(f"{FILE}: expected a BOS token ({BOS}), found none")
        ids = self._encode(text, parse_special)
        if not parse_special and not self.special_ids.isdisjoint(ids):
            # Not flagged as special in the file, or a word of the vocabulary as well: cut in two, it cannot match.
            ids = [i for part in self._cut_specials(text) for i in self._encode(part, False)]
        return [self.bos_id, *ids] if bos and ids[:1] != [self.bos_id] else ids

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        self._backend.encode_special_tokens = not parse_special
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:  # what the library says about lone surrogates
            raise TokenizerError("text: expected valid Unicode (UTF-8), got bytes that are not") from None

    def _cut_specials(self, text: str) -> list[str]:
        specials = sorted((self._added[i] for i in self.special_ids), key=len, reverse=True)
        pattern = "|".join(f"(?<={re.escape(s[0])})(?={re.escape(s[1:])})" for s in specials if len(s) > 1)
        return re.split(pattern, text)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, maybe only part of a character; none for ids without a token."""
        if token in self._added:
            return self._added[token].encode()
        word = self._backend.id_to_token(token) if 0 <= token < self.size else None
        if word is None:
            return b""
        try:
            return bytes(_BYTE_OF[c] for c in word)
        except KeyError:
            return word.encode()

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, ids without a token nothing."""
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable letter; this is the way back."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_of_letter()


class StreamDecoder:
    """Token ids one by one -> text whose pieces, joined, are what `Tokenizer.decode` gives for all of them.

    A character whose bytes are spread over tokens comes out whole, with the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        return "" if token in self._skip else self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about generation; None where it says nothing."""

    stop_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    bos: int | None = None
    pad: int | None = None


def read_generation_config(folder: str | Path) -> GenerationDefaults:
    """Reads `generation_config.json`; token ids that it lacks come from `config.json`.

    Raises:
        TokenizerError: a file is not JSON, or an entry has the wrong type.
    """
    path = Path(folder) / "generation_config.json"
    own, config = read_json(path), read_json(Path(folder) / "config.json")
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {}), **own}

    def get(name: str, kinds: type | tuple, source: dict):
        value = source.get(name)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise TokenizerError(f"{path}: {name}: expected a number, got {value!r}")
        return value

    eos = merged.get("eos_token_id")
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in eos):
        raise TokenizerError(f"{path}: eos_token_id: expected a token id or a list of them, got {eos!r}")
    return GenerationDefaults(
        stop_ids=tuple(dict.fromkeys(eos)), temperature=get("temperature", (int, float), own),
        top_k=get("top_k", int, own), top_p=get("top_p", (int, float), own),
        bos=get("bos_token_id", int, merged), pad=get("pad_token_id", int, merged),
    )


def token_text(value, where: str) -> str:
    """Text of a token in `tokenizer_config.json`: itself, or its `content`.

    Raises:
        TokenizerError: it is neither.
    """
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TokenizerError(f"{where}: expected a string or an object with a string 'content', got {value!r}")
    return text


def read_json(path: Path) -> dict:
    """A JSON object from a file, empty if there is no such file.

    Raises:
        TokenizerError: the file is not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as err:
        raise TokenizerError(f"{path}: expected JSON, got: {err}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value

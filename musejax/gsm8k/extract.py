"""From a generated text to a number, and whether it is right: the rules of the field, each under its own name.

A scorer looks for an answer in the text (None: there is none, which is wrong) and compares it with gold. Several of the
published rules have oddities that move scores; they are kept on purpose, since a repaired rule gives other scores
under the same name. Digits are ASCII.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from typing import NamedTuple

_STRICT = re.compile(r"#### (-?[,.0-9]+)")
_NUMBERLIKE = r"-?(?:[,.$0-9]{2,}|[0-9]+)"
_FLEXIBLE = re.compile(_NUMBERLIKE)
_COT_STRICT = re.compile(r"The answer is (-?[,.0-9]+)[^\n]")
_LLAMA_STRICT = re.compile(rf"The final answer is ({_NUMBERLIKE})")
_SELF_CONSISTENCY = re.compile(r"The answer is (-?[,.0-9]*[0-9])")
_DIGITS = re.compile(r"[0-9]+")
_SGLANG_NEW = re.compile(r"-?[0-9]+\.?[0-9]*")
_BOX_ONE_LEVEL = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_SIGNED_DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_BOX = "\\boxed{"
_GROUP = r"(?<=[0-9]){}(?=[0-9]{{3}}(?![0-9]))"  # between a digit and exactly three digits
_GROUP_BLANK = re.compile(_GROUP.format("[\u00a0\u2009\u202f]"))
_GROUP_COMMA = re.compile(_GROUP.format(","))
_DECIMAL = re.compile(r"[0-9]+(?:\.[0-9]+)?")


# ------------------------------------------------------------------ extraction


def strict(text: str) -> str | None:
    """The first number after `#### `: `strict-match` of lm-eval `gsm8k`."""
    return _first(_STRICT, text)


def flexible(text: str) -> str | None:
    """The last run that looks like a number: `flexible-extract` of lm-eval. Dots alone count as one."""
    return _last(_FLEXIBLE, text)


def cot_strict(text: str) -> str | None:
    """The first number after `The answer is `, less the character that follows: `strict-match` of lm-eval `gsm8k_cot`.

    Where nothing follows, the rule eats the last digit. So the field reports it.
    """
    return _first(_COT_STRICT, text)


def llama_strict(text: str) -> str | None:
    """As `flexible`, but right after `The final answer is `: lm-eval `gsm8k_cot_llama`."""
    return _last(_LLAMA_STRICT, text, group=1)


def self_consistency(text: str) -> str | None:
    """The first number after `The answer is ` that ends in a digit: lm-eval `gsm8k_cot_self_consistency`."""
    return _first(_SELF_CONSISTENCY, text)


def sglang_old(text: str) -> str | None:
    """Commas dropped, the last run of digits if Python reads it as an integer; signs and decimals are lost."""
    found = _last(_DIGITS, text.replace(",", ""))
    if found is None or (found.startswith("0") and found.strip("0")):
        return None
    return found.lstrip("0") or "0"


def sglang_new(text: str) -> str | None:
    """Commas dropped, the last number with sign and decimals."""
    return _last(_SGLANG_NEW, text.replace(",", ""))


def boxed(text: str) -> str | None:
    """The last signed decimal in the last `\\boxed{...}`, commas and blanks dropped: DFlash."""
    content = _last(_BOX_ONE_LEVEL, text, group=1)
    return None if content is None else _last(_SIGNED_DECIMAL, re.sub(r"[,\s]", "", content))


def numeric(text: str) -> str | None:
    """The number that a reader would take: of the last box, else of the last `####` line, else the last of all."""
    box = balanced_box(text)
    if box is not None:
        text = box
    elif "####" in text:
        text = text.rpartition("####")[2].partition("\n")[0]
    text = unicodedata.normalize("NFKC", _GROUP_BLANK.sub("", text)).replace("\u2212", "-").replace("{,}", ",")
    text = _GROUP_COMMA.sub("", text.replace("\\$", "").replace("$", ""))
    found = _last_match(_DECIMAL, text)
    if found is None:
        return None
    sign, before = text[:found.start()][-1:], text[:found.start()][-2:-1]
    negative = sign == "-" and not (before.isalnum() or (before and before in ".)]}"))
    return f"-{found.group()}" if negative else found.group()


def balanced_box(text: str) -> str | None:
    """Content of the last `\\boxed{...}` whose braces are balanced, or None."""
    start = text.rfind(_BOX)
    while start >= 0:
        depth, begin = 1, start + len(_BOX)
        for i in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[begin:i]
        start = text.rfind(_BOX, 0, start)
    return None


def _first(pattern: re.Pattern, text: str) -> str | None:
    found = pattern.search(text)
    return found.group(1) if found else None


def _last(pattern: re.Pattern, text: str, group: int = 0) -> str | None:
    found = _last_match(pattern, text)
    return found.group(group) if found else None


def _last_match(pattern: re.Pattern, text: str) -> re.Match | None:
    """The last of the matches found from left to right without overlap."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


# ------------------------------------------------------------------ comparison


def normalise(text: str) -> str:
    """What lm-eval compares: without commas, `$`, all up to the last `#### `, and one dot at the end; lower case."""
    text = text.replace(",", "").replace("$", "")
    return re.sub(r"\.$", "", text.rpartition("#### ")[2]).lower()


def same_string(found: str, gold: str) -> bool:
    return normalise(found) == normalise(gold)


def same_decimal(found: str, gold: str) -> bool:
    """Equal as exact decimals."""
    return Decimal(found) == Decimal(gold.replace(",", ""))


def same_float(found: str, gold: str) -> bool:
    return float(found) == float(gold.replace(",", ""))


def _same_sglang_old(found: str, gold: str) -> bool:
    """Gold is read by the same rule, so a wrong sign is right."""
    return Decimal(found) == Decimal(sglang_old(gold) or "NaN")


class Scorer(NamedTuple):
    """A rule.

    Attributes:
        extract: text -> the answer in it, or None.
        equal: (answer, gold as the data writes it) -> whether it is right.
    """

    extract: Callable[[str], str | None]
    equal: Callable[[str, str], bool]

    def right(self, found: str | None, gold: str) -> bool:
        return found is not None and self.equal(found, gold)


SCORERS = {
    "strict": Scorer(strict, same_string),
    "flexible": Scorer(flexible, same_string),
    "numeric": Scorer(numeric, same_decimal),
    "boxed": Scorer(boxed, same_float),
    "cot-strict": Scorer(cot_strict, same_string),
    "llama-strict": Scorer(llama_strict, same_string),
    "self-consistency": Scorer(self_consistency, same_string),
    "sglang-old": Scorer(sglang_old, _same_sglang_old),
    "sglang-new": Scorer(sglang_new, same_float),
}

"""GSM8K with redrawn numbers, names and things: the training text of the nano model.

A GSM8K answer carries calculator annotations, ``48/2=<<48/2=24>>24``. They say how each number came about, so a
problem can be turned into a template whose numbers are drawn anew:

1. Every number of the question is a variable (one per distinct value), every annotation a result.
2. Every number in an annotation or in the answer's prose must have exactly one source: a question number, an earlier
   result, a percentage as a fraction, or a constant that the wording justifies (7 with "week"). A number without a
   source makes the problem fixed: it is then used as it is.
3. A number with several sources (a result that happens to equal a question number) freezes all the question numbers
   behind any of them, so whichever reading is right the text stays consistent.
4. New values are drawn for the rest, the chain of annotations is recomputed, and draws are rejected where a result
   changes sign, needs decimals the original did not need, or leaves the original's magnitude.

Candidates are screened in float64, many at a time; the text is made from exact rationals, which decide.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np

_ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
         "seventeen eighteen nineteen").split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
WORDS = {word: i for i, word in enumerate(_ONES)} | {
    ten + ("-" + _ONES[k] if k else ""): 20 + 10 * i + k for i, ten in enumerate(_TENS) for k in range(10)}
NAMES_OF_NUMBERS = {value: word for word, value in WORDS.items() if value > 2}
_WORD = rf"\b(?:(?:{'|'.join(_TENS)})(?:-(?:{'|'.join(_ONES[1:10])}))?|{'|'.join(sorted(_ONES[3:], reverse=True))})\b"
_DIGITS = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+\.\d+|\d+|(?<![\d\w])\.\d+"
NUMBER = re.compile(_DIGITS)
SPOKEN = re.compile(f"{_DIGITS}|(?i:{_WORD})")  # also three, Twelve, twenty-five; "one" and "two" say too little
ANNOTATION = re.compile(r"<<([^<>]*)>>")
EXPRESSION = re.compile(r"[-+*/(). \d,]+")
# An annotation, or a sum in the prose that has none, "$20 - 12 = 8", or only a bare one, "15 + 33 = <<48=48>>48".
_TERM, _UNIT, _SIGN = rf"(?:[$(] ?)*(?:{_DIGITS})", r" ?\)*[A-Za-z ]{0,40}", r"[-+*/x\u00d7\u2212\u2013\u00f7] ?"
_SUM = re.compile(rf"(?P<done><<[^<>]*>>)|(?P<left>{_TERM}(?:{_UNIT}{_SIGN}{_TERM})+{_UNIT})= ?[$]?"
                  rf"(?:(?P<bare><<(?P<value>{_DIGITS})=(?P=value)>>)|(?=(?P<right>{_DIGITS})))")

# Units and words that bring a number of their own: a literal of that value may be a constant beside such a word.
WORDING = {
    r"half|halv|twice|doubl|two|second|both|couple|pair|biweekly|between them|each other": ("2", "0.5"),
    r"weekend|bike|bicycle|twin": ("2",), r"third|thrice|tripl|triang|yard|trio": ("3",),
    r"quarter|fourth|squar|rectang": ("4", "0.25", "25", "0.75", "3"),
    r"fifth|nickel|weekday|school|work": ("5", "0.05"), r"sixth|hexagon": ("6",),
    r"week|dail|every day|per day|each day|a day": ("7",), r"tenth|dime|decade": ("10", "0.1"),
    r"dozen|year|annual|month|inch|foot|feet": ("12",), r"weeks": ("14",), r"ounce|pound": ("16",),
    r"month|april|june|september|november": ("30",), r"month|january|march|may|july|august|october|december": ("31",),
    r"minute|hour": ("60",), r"hour|day": ("24",), r"year|week": ("52",), r"year|day": ("365",),
    r"hundred|percent|%|cent\b|cents|meter|penn": ("100", "0.01"), r"thousand|kilo|gram|liter|meter": ("1000",),
    r"million": ("1000000",), r"hour|second": ("3600",), r"yard|feet|foot|inch": ("36", "3"), r"": ("1", "2"),
}
_PARTS = "half|halves|third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundred|thousand|million|dozen"
# A question number in one of these places is not a free quantity: clock times, ordinals, fractions, codes.
PINNED_AFTER = re.compile(r"\s*(?:/\s*\d|:\d|(?:st|nd|rd|th|s)\b|(?:[ap]\.?m\b)|o['\u2019]clock|[A-Za-z]\d)"
                          rf"|-(?:st|nd|th)\b|\s?[ap]\.m|[\s-](?:{_PARTS})|\.\d", re.I)
PINNED_BEFORE = re.compile(r"(?:\d\s*/\s*|\d:|[A-Za-z#]|[A-Za-z]-)$")


def value_of(text: str) -> Fraction:
    """The exact value of a number as written: ``1,200.50`` -> 2401/2, ``Twelve`` -> 12."""
    return Fraction(WORDS.get(text.lower()) or text.replace(",", ""))


def annotate(answer: str) -> str:
    """The answer with annotations added to (or completed at) sums that lack them, where they are exact."""

    def add(hit: re.Match) -> str:
        if hit["done"]:
            return hit[0]
        code = re.sub(r"[$ ,A-Za-z]", "", re.sub(r"\bx(?= ?[$\d])|(?<=\d)x", "*", hit["left"]))
        code = code.translate(str.maketrans("\u00d7\u2212\u2013\u00f7", "*--/"))
        right = (hit["value"] or hit["right"]).replace(",", "")
        try:
            if _evaluate(code) != value_of(right):
                return hit[0]
        except (SyntaxError, TypeError, ZeroDivisionError):  # half an expression, such as "3) + 2"
            return hit[0]
        return hit[0].removesuffix(hit["bare"] or "") + f"<<{code}={right}>>"

    return _SUM.sub(add, answer)


def _evaluate(expression: str) -> Fraction:
    """The exact value of digits, operators and parentheses."""
    return eval(NUMBER.sub(lambda hit: f"F('{hit[0].replace(',', '')}')", expression), {"F": Fraction})


def decimals(value: Fraction) -> int | None:
    """Decimal places needed to write `value`; None if no number of places up to 6 suffices."""
    return next((k for k in range(7) if (value * 10**k).denominator == 1), None)


def write_number(value: Fraction, like: str) -> str:
    """`value` in the manner of `like`: thousands commas, trailing zeros and a bare leading dot are kept."""
    if like.lower() in WORDS:
        word = NAMES_OF_NUMBERS.get(value, str(value))
        return word.capitalize() if like[0].isupper() else word
    places = decimals(value)
    if places is None:
        raise ValueError(f"expected a value with at most 6 decimals, got {value}")
    tail = like.partition(".")[2]
    if tail.endswith("0") and (places or len(tail) == 2):  # money such as 2.50 or 5.00
        places = max(places, len(tail))
    text = str(abs(int(value * 10**places))).rjust(places + 1, "0")
    whole, part = (text[:-places], "." + text[-places:]) if places else (text, "")
    if "," in like:
        whole = f"{int(whole):,}"
    if like.startswith(".") and whole == "0" and part:
        whole = ""
    return ("-" if value < 0 else "") + whole + part


class Fixed(Exception):
    """The problem's numbers cannot be redrawn; the text says why."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A question number: its value, how it may be redrawn, whether it stands before a per cent sign."""

    value: Fraction
    places: int
    percent: bool


@dataclasses.dataclass(frozen=True)
class Template:
    """A problem as text pieces and sources.

    `question` and `answer` alternate plain text and (source, original text of the number). A source is ("q", i),
    ("p", i) for i per cent as a fraction (and ("m", i), ("a", i) for one minus and one plus it), ("r", j) or
    ("c", value). `program[j]` is compiled code for result j over ``q`` and ``r``; `free` are the indices of the
    quantities that may change; `results` the original results.
    """

    question: tuple
    answer: tuple
    quantities: tuple[Quantity, ...]
    free: tuple[int, ...]
    program: tuple
    constants: tuple[Fraction, ...]
    results: tuple[Fraction, ...]


_DERIVED = {"p": lambda q: q / 100, "m": lambda q: 1 - q / 100, "a": lambda q: 1 + q / 100}
_DERIVED_CODE = {"p": "(q[{}]/c[0])", "m": "(c[1]-q[{}]/c[0])", "a": "(c[1]+q[{}]/c[0])"}


def compile_problem(question: str, answer: str) -> Template:
    """The template of one problem; raises `Fixed` where its numbers cannot be redrawn."""
    body, mark, final = answer.rpartition("\n#### ")
    if not mark or not NUMBER.fullmatch(final):
        raise Fixed("no plain final number")
    if re.search(r"[<>]", ANNOTATION.sub("", body)):
        raise Fixed("comparison in the prose")

    quantities: list[Quantity] = []
    pinned: set[int] = set()
    index: dict[Fraction, int] = {}
    question_parts: list = []
    at = 0
    for hit in SPOKEN.finditer(question):
        value, after = value_of(hit[0]), question[hit.end():]
        percent = bool(re.match(r"\s?(?:%|percent)", after))
        i = index.setdefault(value, len(quantities))
        if i == len(quantities):
            quantities.append(Quantity(value, decimals(value) or 0, percent))
        elif percent != quantities[i].percent:
            pinned.add(i)
        place = PINNED_AFTER.match(after) or PINNED_BEFORE.search(question[:hit.start()])
        if place or 1900 <= value <= 2100 or value in (0, 1):
            pinned.add(i)
        question_parts += [question[at:hit.start()], (("q", i), hit[0])]
        at = hit.end()
    question_parts.append(question[at:])

    wording = (question + " " + body).lower()
    constants = {Fraction(1)}
    for stem, values in WORDING.items():
        if re.search(stem, wording):
            constants.update(map(Fraction, values))

    results: list[Fraction] = []
    parents: list[set[int]] = []  # question numbers behind each result
    used: set[int] = set()

    def origins(source) -> set[int]:
        return parents[source[1]] if source[0] == "r" else {source[1]} if source[0] in "qpma" else set()

    def source_of(value: Fraction, factor: bool = False):
        """The source of a number with this original value; several candidates pin everything behind them."""
        found = [("q", index[value])] if value in index else []
        found += [("r", j) for j, r in enumerate(results) if r == value]
        if not found:
            found = [(kind, i) for i, n in enumerate(quantities) if n.percent
                     for kind, derive in _DERIVED.items() if derive(n.value) == value]
        if value in constants:
            found.append(("c", value))
        if not found and factor and value in (3, 4):  # shared by three people who are named, four wheels
            found.append(("c", value))
        if not found:
            raise Fixed("a number without a source")
        if len(found) > 1:
            for source in found:
                pinned.update(origins(source))
        return found[0]

    table = [Fraction(100), Fraction(1)]
    program, answer_parts, at = [], [], 0
    pending: list = []  # prose numbers are resolved after all results are known: "24 is 48/2"

    def prose(text: str, first: Fraction | None = None):
        """Adds prose; `first` is the result that must stand right after its annotation."""
        last = 0
        for hit in SPOKEN.finditer(text):
            answer_parts.append(text[last:hit.start()])
            if first is not None and hit.start() == 0 and value_of(hit[0]) == first:
                answer_parts.append((("r", len(results) - 1), hit[0]))
            else:
                pending.append(len(answer_parts))
                answer_parts.append((None, hit[0]))
            last = hit.end()
        answer_parts.append(text[last:])

    previous = None
    for note in ANNOTATION.finditer(body):
        prose(body[at:note.start()], previous)
        at = note.end()
        left, equals, right = note[1].partition("=")
        calculates = EXPRESSION.fullmatch(left) and re.search(r"[\d)]\s*[-+*/]", left)
        if not (equals and calculates and NUMBER.fullmatch(right)):
            raise Fixed("an annotation that is no plain sum")
        code, behind, last = "", set(), 0
        answer_parts.append("<<")
        for hit in NUMBER.finditer(left):
            factor = bool(re.search(r"[*/] ?$", left[:hit.start()]) or re.match(r" ?[*/]", left[hit.end():]))
            source = source_of(value_of(hit[0]), factor)
            behind |= origins(source)
            if source[0] in "qpma":
                used.add(source[1])
            if source[0] == "q" and quantities[source[1]].percent and re.search(r"/ ?$", left[:hit.start()]):
                pinned.add(source[1])  # ten per cent taken as a tenth: true of 10 only
            if source[0] == "c":
                table.append(source[1])
                term = f"c[{len(table) - 1}]"
            else:
                term = _DERIVED_CODE.get(source[0], source[0] + "[{}]").format(source[1])
            between = left[last:hit.start()]
            code += between + term
            answer_parts += [between, (source, hit[0])]
            last = hit.end()
        code += left[last:]
        if "," in code or "**" in code or "//" in code:
            raise Fixed("an annotation that is no plain sum")
        try:
            compiled = compile(code.replace(" ", ""), "annotation", "eval")
            value = eval(compiled, {"q": [n.value for n in quantities], "r": results, "c": table})
        except (SyntaxError, TypeError, ZeroDivisionError) as error:
            raise Fixed("an annotation that is no plain sum") from error
        if value != value_of(right):
            raise Fixed("a rounded or wrong annotation")
        program.append(compiled)
        results.append(value)
        parents.append(behind)
        previous = value
        answer_parts += [left[last:] + "=", (("r", len(results) - 1), right), ">>"]
    if not results:
        raise Fixed("no annotations")
    prose(body[at:], previous)
    for where in pending:
        text = answer_parts[where][1]
        source = source_of(value_of(text))
        if source[0] == "q" and source[1] not in used and source[1] not in pinned:
            raise Fixed("a question number in the prose only")
        answer_parts[where] = (source, text)
    if value_of(final) != results[-1]:
        raise Fixed("the final number is not the last result")
    answer_parts += ["\n#### ", (("r", len(results) - 1), final)]
    free = tuple(sorted(used - pinned))
    if not free:
        raise Fixed("no number is free")
    return Template(tuple(question_parts), tuple(answer_parts), tuple(quantities), free, tuple(program), tuple(table),
                    tuple(results))


def _candidates(quantity: Quantity, rng: np.random.Generator, count: int) -> np.ndarray:
    """float64 [count]: new values in units of the last place, of the original's size and roundness."""
    units = int(quantity.value * 10**quantity.places)
    if quantity.percent and quantity.places == 0 and units < 100:
        step = 5 if units % 5 == 0 else 1
        return rng.integers(1, 99 // step + 1, count) * step
    step = 1
    while units % (step * 10) == 0 and units // step >= 20:
        step *= 10
    if units % (step * 5) == 0 and units // step >= 15:
        step *= 5
    top = max(2 * units // step, 12 if step == 1 else 8)
    low = max(units // step // 3, 2 if step == 1 else 1)
    return rng.integers(low, top + 1, count) * step


def draw(template: Template, rng: np.random.Generator, count: int, tries: int = 512) -> list[list[Fraction]]:
    """Up to `count` consistent assignments of the question numbers, each a list of exact values."""
    columns = [np.full(tries, float(n.value)) for n in template.quantities]
    units = {}
    for i in template.free:
        units[i] = _candidates(template.quantities[i], rng, tries)
        columns[i] = units[i] / 10.0 ** template.quantities[i].places
    good = np.ones(tries, bool)
    for a, i in enumerate(template.free):  # two different numbers of the question stay different
        for b in range(len(columns)):
            if b != i and (b not in template.free or b in template.free[a + 1:]):
                good &= columns[i] != columns[b]
    r: list = []
    scope = {"q": columns, "r": r, "c": [float(c) for c in template.constants]}
    with np.errstate(all="ignore"):
        for code, old in zip(template.program, template.results, strict=True):
            new = np.broadcast_to(np.asarray(eval(code, scope), float), (tries,))
            scale = 10.0 ** (max(decimals(old), 2) if old.denominator > 1 else 0)
            good &= np.abs(new * scale - np.rint(new * scale)) < 1e-6
            good &= (np.sign(new) == np.sign(float(old))) & (np.abs(new) <= 20 * abs(float(old)) + 100)
            r.append(new)
    chosen = np.flatnonzero(good)[:count]
    return [[Fraction(int(units[i][k]), 10**n.places) if i in units else n.value
             for i, n in enumerate(template.quantities)] for k in chosen]


def render(template: Template, values: list[Fraction]) -> tuple[str, str]:
    """(question, answer) with these question numbers; results by exact arithmetic."""
    r: list[Fraction] = []
    for code in template.program:
        r.append(eval(code, {"q": values, "r": r, "c": template.constants}))

    def number(source) -> Fraction:
        kind, i = source
        return r[i] if kind == "r" else values[i] if kind == "q" else i if kind == "c" else _DERIVED[kind](values[i])

    def text(parts) -> str:
        return "".join(p if isinstance(p, str) else write_number(number(p[0]), p[1]) for p in parts)

    return text(template.question), text(template.answer)


def check_answer(answer: str) -> None:
    """Raises ValueError unless each annotation is right and copied after ``>>``, and the last is the final number."""
    body, _, final = answer.rpartition("\n#### ")
    result = None
    for note in ANNOTATION.finditer(body):
        left, _, right = note[1].partition("=")
        result = _evaluate(left)
        copied = NUMBER.match(body, note.end())
        if result != value_of(right):
            raise ValueError(f"expected {result} in <<{note[1]}>>")
        if copied and value_of(copied[0]) != result:
            raise ValueError(f"expected {result} after <<{note[1]}>>, got {copied[0]}")
    if result is None or value_of(final) != result:
        raise ValueError(f"expected the last result {result} as final number, got {final}")


# Names and things

_VERBS = (r"(?:'s|\u2019s|has|had|have|is|was|wants|buys|bought|went|goes|made|makes|got|gets|sold|sells|needs"
          r"|works|eats|ate|and|decided|can)\b")
_UNITS = set("hours minutes days weeks months years seconds times dollars cents miles feet inches yards pounds "
             "ounces kilometers meters centimeters kilos kilograms grams liters pints quarts gallons percent "
             "pieces points degrees kids students friends thirds fifths quarters others cups bags boxes packs "
             "pairs rows dozens ones rounds trips questions classes pages songs stories loads tons sets units "
             "members boys girls bottles parts slices packages groups sides floors rooms adults nights workers "
             "employees acres males parents siblings sisters nickels dimes calories tablespoons hands legs "
             "squares".split())


@dataclasses.dataclass(frozen=True)
class Lexicon:
    """Words that may stand for one another: `groups` of first names (by pronoun) and of countable things."""

    names: tuple[tuple[str, ...], ...]
    things: tuple[str, ...]


def find_lexicon(questions: list[str]) -> Lexicon:
    """First names and countable things found in the questions by simple rules, in a fixed order."""
    lower, follows, seen, pronouns, nouns = Counter(), Counter(), Counter(), {}, Counter()
    for question in questions:
        words = re.findall(r"[A-Za-z]+", question)
        lower.update(w for w in words if w.islower())
        follows.update(re.findall(rf"\b([A-Z][a-z]{{2,}})\b(?= ?{_VERBS})", question))
        capital = {w for w in words if re.fullmatch(r"[A-Z][a-z]{2,}", w)}
        seen.update(re.findall(r"\b[A-Z][a-z]{2,}\b", question))
        women = bool(re.search(r"\b(?:she|her)\b", question, re.I))
        men = bool(re.search(r"\b(?:he|his|him)\b", question, re.I))
        for word in capital:
            total = pronouns.setdefault(word, [0, 0])
            total[0] += women and not men
            total[1] += men and not women
        nouns.update(re.findall(r"\b\d+ ([a-z]{3,}s)\b", question))
    names = [w for w, n in follows.items() if n >= 3 and n >= 0.3 * seen[w] and lower[w.lower()] <= 0.02 * seen[w]]
    women = tuple(sorted(w for w in names if pronouns[w][0] > 4 * pronouns[w][1] + 1))
    men = tuple(sorted(w for w in names if pronouns[w][1] > 4 * pronouns[w][0] + 1))
    things = tuple(sorted(w for w, n in nouns.items() if n >= 6 and w not in _UNITS and lower[w[:-1]] >= 3))
    return Lexicon((women, men), things)


def swap_words(texts: tuple[str, ...], lexicon: Lexicon, rng: np.random.Generator, names: float,
               things: float) -> tuple[str, ...]:
    """The texts with names (with probability `names`) and things (`things`) replaced, in the same way in all texts."""
    words = set(re.findall(r"[A-Za-z]+", " ".join(texts)))

    def others(group, count):
        return [group[k] for k in rng.permutation(len(group))[:3 * count] if group[k] not in words]

    swaps: dict[str, str] = {}
    if rng.random() < names:
        for group in lexicon.names:
            present = sorted(words.intersection(group))
            if present:
                swaps.update(zip(present, others(group, len(present)), strict=False))
    if rng.random() < things:
        present = sorted(words.intersection(lexicon.things))
        for old, new in zip(present, others(lexicon.things, len(present)), strict=False):
            swaps[old] = new
            swaps[old[:-1]] = new[:-1]
    if not swaps:
        return texts
    pattern = re.compile(r"\b(?:" + "|".join(sorted(swaps, key=len, reverse=True)) + r")\b")
    return tuple(pattern.sub(lambda hit: swaps[hit[0]], text) for text in texts)


# The problem set

def load(path: str | Path, limit: int | None = None) -> list[tuple[str, str]]:
    """(question, answer) pairs of a GSM8K file."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["question"].strip(), annotate(row["answer"].strip())) for row in rows[:limit]]


def split(count: int, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers (train, validation): `held_out` rows drawn by the seed are never trained on, in any variant."""
    order = np.random.default_rng([seed, 7]).permutation(count)
    return sorted(order[held_out:].tolist()), sorted(order[:held_out].tolist())


class Problems:
    """Problems with their templates: `variants(i, rng, count)` gives `count` (question, answer) pairs of problem i."""

    def __init__(self, pairs: list[tuple[str, str]], lexicon: Lexicon, names: float = 0.5, things: float = 0.3,
                 keep: float = 0.1):
        self.pairs, self.lexicon, self.names, self.things, self.keep = pairs, lexicon, names, things, keep
        self.templates: list[Template | None] = []
        self.reasons: Counter = Counter()
        for question, answer in pairs:
            try:
                self.templates.append(compile_problem(question, answer))
            except Fixed as reason:
                self.templates.append(None)
                self.reasons[str(reason)] += 1

    def variants(self, i: int, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        template = self.templates[i]
        drawn = draw(template, rng, count) if template else []
        out = []
        for k in range(count):
            pair = self.pairs[i] if k >= len(drawn) or rng.random() < self.keep else render(template, drawn[k])
            out.append(swap_words(pair, self.lexicon, rng, self.names, self.things))
        return out

"""The rules of extraction and comparison, cell by cell, and on all published answers."""

import pytest

from musejax.gsm8k import data as problems
from musejax.gsm8k.extract import SCORERS, balanced_box, normalise
from musejax.gsm8k.options import PROFILE_NAMES, SCORER_NAMES
from musejax.gsm8k.profiles import PROFILES

# (raw output, gold, strict, flexible, numeric, marks of the three)
TABLE = [
    ("16 - 3 - 4 = 9, 9 * 2 = 18\n#### 18", "18", "18", "18", "18", "111"),
    ("#### 1,000", "1000", "1,000", "1,000", "1000", "111"),
    ("#### $18.00", "18", None, "$18.00", "18.00", "001"),
    ("#### -5", "-5", "-5", "-5", "-5", "111"),
    ("#### 18.0", "18", "18.0", "18.0", "18.0", "001"),
    ("#### 18.", "18", "18.", "18.", "18", "111"),
    ("The answer is 18.", "18", None, "18.", "18", "011"),
    ("She makes $18 every day.", "18", None, "$18", "18", "011"),
    ("The total is $18.00.", "18", None, "$18.00.", "18.00", "001"),
    ("15 - 3 = 12 apples", "12", None, "12", "12", "011"),
    ("He needs 12 boxes for 3 days.", "12", None, "3", "3", "000"),
    ("", "18", None, None, None, "000"),
    ("####", "18", None, None, None, "000"),
    ("####18", "18", None, "18", "18", "011"),
    ("#### 18 dollars", "18", "18", "18", "18", "111"),
    ("**Answer: 18**", "18", None, "18", "18", "011"),
    (r"\boxed{18}", "18", None, "18", "18", "011"),
    (r"\boxed{1,000}", "1000", None, "1,000", "1000", "011"),
    ("Hmm... let me see...", "18", None, "...", None, "000"),
    ("#### 18\n\nQuestion: Tom has 7 cats.\nAnswer: 7\n#### 7", "18", "18", "7", "7", "100"),
    ("#### 12\nNo, recheck.\n#### 18", "18", "12", "18", "18", "011"),
    ("#### 50%", "50", "50", "50", "50", "111"),
    ("#### \u22125", "-5", None, "5", "-5", "001"),
    ("#### 1 000", "1000", "1", "000", "000", "000"),
    ("#### 2125\n", "2,125", "2125", "2125", "2125", "111"),
]
NAMES = ("strict", "flexible", "numeric")


@pytest.mark.parametrize("number", range(1, 26))
def test_table(number):
    raw, gold, *wanted, marks = TABLE[number - 1]
    for name, value, mark in zip(NAMES, wanted, marks, strict=True):
        found = SCORERS[name].extract(raw)
        assert found == value, name
        assert SCORERS[name].right(found, gold) is (mark == "1"), name


def test_totals():
    totals = [sum(SCORERS[n].right(SCORERS[n].extract(raw), gold) for raw, gold, *_ in TABLE) for n in NAMES]
    assert totals == [8, 15, 19]


def test_other_rules_on_the_table():
    found = {name: {i: SCORERS[name].extract(raw) for i, (raw, *_) in enumerate(TABLE, 1)}
             for name in ("sglang-old", "sglang-new", "boxed")}
    assert {i for i, x in found["sglang-old"].items() if x == "0"} == {3, 5, 9, 24} and found["sglang-old"][4] == "5"
    assert float(found["sglang-new"][4]) == -5 and float(found["sglang-new"][24]) == 0
    assert all(float(found["sglang-new"][i]) == 18 for i in (3, 5, 6, 7, 9))
    assert {i: x for i, x in found["boxed"].items() if x is not None} == {17: "18", 18: "1000"}


@pytest.mark.parametrize("raw, found, compared", [
    ("The answer is 18.", "18", "18"),
    ("The answer is 18. So yes", "18.", "18"),
    ("The answer is 18", "1", "1"),
    ("The answer is 18\n", "1", "1"),
    ("The answer is 5", None, None),
    ("The answer is $18.", None, None),
    ("The answer is 1,000.", "1,000", "1000"),
    ("The answer is 7. The answer is 9.", "7.", "7"),
    ("the answer is 18.", None, None),
])
def test_chain_of_thought_traps(raw, found, compared):
    scorer = SCORERS["cot-strict"]
    assert scorer.extract(raw) == found
    if found is not None:
        assert normalise(found) == compared and scorer.right(found, compared)
    else:
        assert not scorer.right(found, "18")


@pytest.mark.parametrize("a, b, same", [
    ("1,000", "1000", True), ("$18", "18", True), ("18.", "18", True), ("x #### 1 #### 18", "18", True),
    ("18.0", "18", False), ("18.00", "18", False), ("018", "18", False), ("18%", "18", False), ("+18", "18", False),
])
def test_comparison_of_strings(a, b, same):
    assert (normalise(a) == normalise(b)) is same


def test_one_dot_is_removed():
    assert normalise("...") == ".." and normalise("ABC.") == "abc"


@pytest.mark.parametrize("raw, found", [
    (r"\boxed{3} and \boxed{\frac{1}{2} + 7}", "7"),
    (r"\boxed{12} then \boxed{cut", "12"),
    (r"\boxed{1{,}234{,}567}", "1234567"),
    ("#### 1\u202f234", "1234"), ("#### 1\u00a01234", "1234"), ("#### 12\u2009345\u2009678", "12345678"),
    ("#### \uff11\uff18", "18"), (r"#### \$1,234.50", "1234.50"), ("1,23", "23"), ("1,2345", "2345"),
    ("a-5", "5"), ("3-5", "5"), ("(3)-5", "5"), ("x = -5", "-5"), ("(-5)", "-5"), ("-5", "-5"), (".-5", "5"),
    ("#### 5\n6", "5"), ("#### \n6", None), ("no digits", None),
])
def test_numeric(raw, found):
    assert SCORERS["numeric"].extract(raw) == found


def test_numeric_is_exact():
    right = SCORERS["numeric"].right
    assert right("18.000", "18") and right("1450000", "1,450,000") and not right("18.0000000000000000000001", "18")


def test_boxed():
    extract, right = SCORERS["boxed"].extract, SCORERS["boxed"].right
    assert extract(r"\boxed{1} \boxed{-1, 234.5}") == "-1234.5" and extract("18") is None
    assert extract(r"\boxed{\text{about} 7}") == "7" and extract(r"\boxed{none}") is None
    assert right("18.0", "18") and right("9" * 400, "18") is False
    assert balanced_box(r"\boxed{a{b}c}") == "a{b}c" and balanced_box("none") is None


def test_rules_of_other_tools():
    assert SCORERS["llama-strict"].extract("The final answer is 3. The final answer is $4,000.") == "$4,000."
    assert SCORERS["self-consistency"].extract("The answer is 18") == "18"
    assert SCORERS["self-consistency"].extract("The answer is 1,000. And") == "1,000"
    old = SCORERS["sglang-old"]
    assert old.extract("05") is None and old.extract("none") is None and old.extract("9" * 5000) == "9" * 5000
    assert old.right(old.extract("10"), "-10"), "the published rule loses the sign on both sides"
    assert not SCORERS["sglang-new"].right("10", "-10")


def test_names_of_the_options():
    assert tuple(SCORERS) == SCORER_NAMES and tuple(PROFILES) == PROFILE_NAMES
    assert all(name in SCORERS for p in PROFILES.values() for name in p.scorers)


# ------------------------------------------------------------------ published answers


FORMS = {"strict": "{answer}", "flexible": "{answer}", "numeric": "{answer}", "boxed": "So \\boxed{{{gold}}}.",
         "cot-strict": "The answer is {gold}.", "self-consistency": "The answer is {gold}.",
         "llama-strict": "The final answer is {gold}", "sglang-old": "{answer}", "sglang-new": "{answer}"}


@pytest.mark.parametrize("split, count", [("test", 1319), ("train", 7473)])
def test_gold_is_right_for_every_scorer(shared, split, count):
    data = problems.load(split, shared / "data")
    assert data.expected and len(data.rows) == count
    assert FORMS.keys() == SCORERS.keys()
    for name, form in FORMS.items():
        scorer = SCORERS[name]
        wrong = [row.index for row in data.rows
                 if not scorer.right(scorer.extract(form.format(answer=row.answer, gold=row.gold)), row.gold)]
        assert wrong == [], name


def test_signs_and_commas(shared):
    rows = [r for split in ("test", "train") for r in problems.load(split, shared / "data").rows]
    negative, comma = [r for r in rows if "-" in r.gold], [r for r in rows if "," in r.gold]
    assert [r.index for r in negative[:2]] == [489, 1113] and (len(negative), len(comma)) == (5, 93)

    def marks(answer, gold):
        return {SCORERS[n].right(SCORERS[n].extract(f"Work.\n#### {answer}"), gold) for n in NAMES}

    for row in negative:
        assert marks(row.gold, row.gold) == {True} and marks(row.gold.removeprefix("-"), row.gold) == {False}
    for row in comma:
        assert marks(row.gold, row.gold) == marks(row.gold.replace(",", ""), row.gold) == {True}
        assert marks(f"-{row.gold}", row.gold) == {False} and marks(row.gold.split(",")[0], row.gold) == {False}

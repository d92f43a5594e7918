"""Stop strings whatever the chunking, stop ids, finish reasons."""

import pytest
import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from musejax.text import StopStrings, TextStream
from musejax.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer.build())
WORDS = st.text("abc", min_size=1, max_size=4)


def ids_of(text):
    return TOKENIZER.encode(text, bos=False, parse_special=True)


def run(ids, **options):
    stream = TextStream([(i, -0.5) for i in ids], TOKENIZER, **options)
    assert "".join(stream) == stream.text
    return stream


def first_complete(text, stops):
    """The obvious search: the shortest beginning of the text that ends with a stop string."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[:end - len(stop)], stop
    return text, None


@given(st.lists(st.text("abc", max_size=5)), st.lists(WORDS, max_size=3))
def test_stop_strings_in_any_chunking(pieces, stops):
    scanner, out = StopStrings(stops), []
    wanted, found = first_complete("".join(pieces), stops)
    for piece in pieces:
        out.append(scanner.push(piece))
        assert wanted.startswith("".join(out)), "a part of the stop string got out"
    assert scanner.found == found
    assert "".join(out) + scanner.finish() == wanted


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    scanner = StopStrings(["<end>"])
    assert [scanner.push(p) for p in ("a<", "b", "c<en", "<e", "x")] == ["a", "<b", "c", "<en", "<ex"]


def test_stop_strings_keep_quiet_after_the_end():
    scanner = StopStrings(["b"])
    assert scanner.push("abc") == "a"
    assert scanner.push("d") == scanner.finish() == ""


def test_empty_stop_string():
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])


def test_length():
    stream = run(ids_of("The answer is 4."))
    assert (stream.text, stream.finish_reason, stream.stopped_by) == ("The answer is 4.", "length", None)
    assert stream.tokens == ids_of("The answer is 4.") and stream.logprobs == [-0.5] * len(stream.tokens)


def test_stop_id():
    ids = ids_of("yes<|eom|>no<|eot|>never")
    stream = run(ids, stop_ids=TOKENIZER.stop_ids)
    assert (stream.text, stream.finish_reason, stream.stopped_by) == ("yes<|eom|>no", "stop", TOKENIZER.eot_id)
    assert stream.tokens == ids[:ids.index(TOKENIZER.eot_id) + 1]


def test_stop_string():
    ids = ids_of("one. two. three")
    stream = run(ids, stop=["two"], stop_ids=[0])
    assert (stream.text, stream.finish_reason, stream.stopped_by) == ("one. ", "stop", "two")
    assert len(stream.tokens) < len(ids)


def test_held_back_text_comes_at_the_end():
    assert run(ids_of("ab"), stop=["bc"]).text == "ab"
    stopped = run(ids_of("ab<|eot|>"), stop=["bc"], stop_ids=TOKENIZER.stop_ids)
    assert (stopped.text, stopped.stopped_by) == ("ab", TOKENIZER.eot_id)


def test_a_character_cut_by_the_end():
    ids = ids_of("a🎉")[:-1]
    stream = run(ids)
    assert stream.text == TOKENIZER.decode(ids) == "a\N{REPLACEMENT CHARACTER}"


def test_replacement_character_as_stop_string():
    """It comes into being at the flush, and is still found there."""
    stream = run(ids_of("a🎉")[:-1], stop=["\N{REPLACEMENT CHARACTER}"])
    assert (stream.text, stream.finish_reason) == ("a", "stop")


def test_interrupt():
    def source():
        for i in ids_of("ab"):
            yield i, 0.0
        raise KeyboardInterrupt

    stream, seen = TextStream(source(), TOKENIZER, stop=["bc"]), []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(stream)
    seen.append(stream.interrupt())
    assert "".join(seen) == stream.text == "ab"
    assert stream.finish_reason == "interrupt"
    assert stream.interrupt() == "" and list(stream) == []


def test_the_source_is_closed_and_not_asked_again():
    asked = []

    def source():
        try:
            for i in ids_of("a<|eot|>b"):
                asked.append(i)
                yield i, 0.0
        finally:
            asked.append("closed")

    assert "".join(TextStream(source(), TOKENIZER, stop_ids=TOKENIZER.stop_ids)) == "a"
    assert asked == [*ids_of("a<|eot|>"), "closed"]


def test_without_tokenizer():
    stream = TextStream([(5, 0.0), (17, 0.0), (9, 0.0)], None, stop_ids=[9])
    assert list(stream) == ["5", " 17"]
    assert stream.finish_reason == "stop"
    with pytest.raises(ValueError, match=r"expected a checkpoint with tokenizer\.json"):
        TextStream([], None, stop=["a"])

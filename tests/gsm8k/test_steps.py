"""From decode steps to an answer: what counts, where it is cut, what an engine must not do."""

import jax
import jax.numpy as jnp
import pytest

from musejax.gsm8k.steps import Step, StepError, collect


@pytest.fixture
def take(tokenizer):
    """Collects an answer from lists of tokens; the first is the prefill's."""

    def call(*lists, **options):
        def made():
            for i, tokens in enumerate(lists):
                yield tokens if isinstance(tokens, Step) else Step(tokens, 0.002, prefill=i == 0)

        return collect(made(), tokenizer, **{"stop_ids": (tokenizer.end_id,), "limit": 100, "width": 8} | options)

    return call


def delivered(answer):
    return [s.delivered for s in answer.steps]


def test_end_token_inside_a_step(take, tokenizer):
    """A step verifies d1 d2 END d4 d5 bonus: it adds 3."""
    a, end = 65, tokenizer.end_id
    answer = take([a], [a, a, a], [a, a, end, a, a, a])
    assert answer.finish_reason == "eos" and delivered(answer) == [3, 3]
    assert answer.tokens == [a] * 6 + [end] and len(answer.tokens) == 1 + sum(delivered(answer))


def test_end_at_once(take, tokenizer):
    answer = take([tokenizer.end_id], [65])
    assert (answer.tokens, answer.steps, answer.text) == ([tokenizer.end_id], [], "")


def test_limit_inside_a_step(take):
    answer = take([65], [65] * 4, [65] * 4, limit=7)
    assert answer.finish_reason == "length" and delivered(answer) == [4, 2] and len(answer.tokens) == 7
    answer = take([65], [65] * 4, [65] * 4, limit=5)
    assert delivered(answer) == [4] and len(answer.tokens) == 5


def test_stop_text_inside_a_step(take, tokenizer):
    """The token that completes the stop counts, as an end token does; those verified behind it don't."""
    ids = tokenizer.encode(" 7\nQuestion: and so on and on", bos=False, parse_special=False)
    answer = take(ids[:1], *(ids[i:i + 8] for i in range(1, len(ids), 8)), stop=("Question:",))
    assert answer.finish_reason == "stop" and answer.text == " 7\n"
    kept = tokenizer.decode(answer.tokens)
    assert "Question:" in kept and "Question:" not in tokenizer.decode(answer.tokens[:-1])
    assert len(answer.tokens) == 1 + sum(delivered(answer)) < len(ids)


def test_source_that_ends(take):
    assert take([65], [65]).finish_reason == "length"


def test_source_is_closed_and_not_asked_for_more(tokenizer):
    log = []

    def made():
        try:
            yield Step([65], 0.0, prefill=True)
            yield Step([tokenizer.end_id], 0.0)
            log.append("went on")
        finally:
            log.append("closed")

    collect(made(), tokenizer, stop_ids=(tokenizer.end_id,), limit=9)
    assert log == ["closed"]


@pytest.mark.parametrize("lists, message", [
    ([], "expected a prefill step, got none"),
    ([[65, 65]], "expected 1 to 1 tokens in a step, got 2"),
    ([[65], []], "expected 1 to 8 tokens in a step, got 0"),
    ([[65], [65] * 9], "expected 1 to 8 tokens in a step, got 9"),
    ([Step([65], 0.0)], "expected the prefill step first and once, got a decode step first"),
    ([[65], Step([65], 0.0, prefill=True)], "got it again"),
])
def test_steps_that_cannot_be(take, lists, message):
    with pytest.raises(StepError, match=message):
        take(*lists)


def test_after_step_ends_a_request(take):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take([65], [65], after_step=stop)


def test_max_steps(take):
    assert len(take([65], *([[65]] * 9), max_steps=4).steps) == 4


def test_times_experts_and_compilations(tokenizer):
    def made():
        yield Step([65], 0.010, prefill=True)
        jax.jit(lambda x: x * 3.25 + 1)(jnp.ones(7)).block_until_ready()
        yield Step([65], 0.002, (4, 6))
        yield Step([65], 0.003)

    answer = collect(made(), tokenizer, stop_ids=(), limit=9)
    assert [(s.ms, s.compiled, s.experts) for s in answer.steps] == [(2.0, True, 5.0), (3.0, False, None)]
    assert (answer.prefill.ms, answer.prefill.compiled) == (10.0, False)


def test_hash_is_of_int32(take):
    import hashlib

    assert take([1], [300], width=1).sha256 == hashlib.sha256(b"\1\0\0\0\x2c\1\0\0").hexdigest()

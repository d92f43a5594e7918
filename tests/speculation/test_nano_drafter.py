"""The shipped drafter on nano: it speeds up, changes nothing, and a tree never accepts less than its spine."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import musejax
from musejax.config import MINI, ConfigError
from musejax.generation import generate
from musejax.paths import nano_drafter_path
from musejax.speculation import accept as acceptance
from musejax.speculation import step as speculative
from musejax.speculation.params import load_drafter
from musejax.speculation.step import SpecParams, Speculation
from musejax.speculation.verify import verify

PROMPT = "Question: Tom has 3 boxes of 12 pencils and gives 7 away. How many are left?\nAnswer:"


@pytest.fixture(scope="module")
def plain():
    return musejax.load()


@pytest.fixture(scope="module")
def model():
    return musejax.load(drafter=nano_drafter_path())


def bits(answer):
    return answer.tokens, np.asarray(answer.logprobs, np.float32).view(np.uint32).tolist(), answer.text


def test_text_is_that_of_plain_decoding_in_fewer_steps(plain, model):
    want, got = (generate(m, PROMPT, max_new_tokens=60) for m in (plain, model))
    assert bits(got) == bits(want)
    assert want.steps == len(want.tokens) - 1
    assert got.steps < 0.4 * want.steps  # about 6 tokens a step on such text


def test_one_program_gives_the_same(model):
    want, got = (generate(model, PROMPT, max_new_tokens=60, on_device=loop) for loop in (False, True))
    assert bits(got) == bits(want) and got.steps == want.steps
    with pytest.raises(ConfigError, match="on_device: expected no stop strings"):
        generate(model, PROMPT, stop=["x"], on_device=True)


def test_stop_strings_inside_an_accepted_run(plain, model):
    want, got = (generate(m, PROMPT, max_new_tokens=60, stop=["pencils"]) for m in (plain, model))
    assert want.finish_reason == "stop" and (got.text, got.finish_reason) == (want.text, want.finish_reason)


@pytest.mark.slow
@pytest.mark.parametrize("spine", [4, 8])
def test_a_tree_accepts_at_least_its_spine(model, spine):
    """From the same state, at every step: accepted(tree) >= min(accepted(chain), spine)."""
    params = SpecParams(model.params, model.drafter)
    run = {"config": model.config, "decode": model.decode, "num_tokens": model.num_tokens}

    def accepted(params, state, shape):
        tree = speculative.guess(params, state, speculation=shape, **run)
        made = verify(params.target, state.cache, tree.tokens, tree.parents, tree.num_valid, None, taps=shape.taps,
                      **run)
        return acceptance.accept(tree, made.ids).count - 1

    drafter = model.speculation.drafter
    chain, tree = (jax.jit(partial(accepted, shape=Speculation(drafter, **shape)))
                   for shape in ({"width": 1}, {"spine": spine}))
    ids = model.tokenizer.encode(PROMPT, bos=True, parse_special=False)
    state = model.start_speculative(ids, 256)
    seen = []
    for _ in range(20):
        by_chain, by_tree = int(chain(params, state)), int(tree(params, state))
        assert by_tree >= min(by_chain, spine)
        seen.append((by_chain, by_tree))
        state, _ = model.step_speculative(state)
    assert max(x for x, _ in seen) > 2  # else nothing was compared


@pytest.mark.slow
def test_prompts_of_every_length_across_the_window(plain, model):
    """nano's window is 64: prompts that end at each offset around it, and answers that cross it."""
    ids = model.tokenizer.encode(PROMPT * 4, bos=True, parse_special=False)
    for length in (*range(56, 73), 127, 128, 129):
        want, got = [], []
        state = plain.start(ids[:length], 256)
        for _ in range(12):
            state = plain.step(state)
            want.append((int(state.token), np.asarray(state.logprob).view(np.uint32).item()))
        spec = model.start_speculative(ids[:length], 256)
        while len(got) < 12:
            spec, made = model.step_speculative(spec)
            n = int(made.count)
            logprobs = np.asarray(made.logprobs)[:n].view(np.uint32)
            got += list(zip(np.asarray(made.tokens)[:n].tolist(), logprobs.tolist(), strict=True))
        assert got[:12] == want, length


def test_a_drafter_for_another_model_is_refused(repo):
    with pytest.raises(ConfigError, match="vocab"):
        load_drafter(repo / "checkpoints" / "nano_drafter", MINI)


def test_room_at_the_end_of_the_context(model, plain):
    """The last tokens of the context come out one by one or in a run, and no more than fit."""
    limit = model.config.max_position_embeddings
    ids = (model.tokenizer.encode(PROMPT, bos=True, parse_special=False) * 40)[:limit - 6]
    want, got = (generate(m, ids, max_new_tokens=50, stop_ids=()) for m in (plain, model))
    assert len(want.tokens) == 6 and bits(got)[:2] == bits(want)[:2]
    assert jnp.isfinite(jnp.asarray(got.logprobs)).all()

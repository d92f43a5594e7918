"""The speculative step loses nothing: bits of plain decoding, whatever is guessed; and a break of any rule is seen."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

from musejax import packing
from musejax import params as table
from musejax.config import MINI, ConfigError, DecodeConfig
from musejax.decode import jit_decode_step, start
from musejax.kernels.cache import MAX_ROWS, flush
from musejax.model.forward import forward
from musejax.numerics import EXACT
from musejax.params import BF16
from musejax.sampling import Sampling
from musejax.sharding import make_mesh, replicated
from musejax.speculation import accept as acceptance
from musejax.speculation import step as speculative
from musejax.speculation.config import NANO_DRAFTER
from musejax.speculation.packing import pack_drafter, place
from musejax.speculation.params import init_params
from musejax.speculation.step import SpecParams, Speculation
from musejax.speculation.tree import Tree

CONFIG = dataclasses.replace(MINI, num_hidden_layers=4, layer_types=(), layer_rope_theta=(), sliding_window=8)
DRAFTER = dataclasses.replace(
    NANO_DRAFTER, vocab_size=CONFIG.vocab_size, num_target_layers=4, target_layer_ids=(2, 0), num_hidden_layers=1,
    sliding_window=12, mask_token_id=5)
MEGAKERNEL = DecodeConfig(implementation="megakernel")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
LENGTH = 96


@pytest.fixture(scope="module")
def target():
    """Table-form parameters, sharper than random ones so that greedy text is not one token repeated."""
    params = table.init_params(CONFIG, jax.random.key(1))
    return jax.tree.map(np.asarray, params | {"lm_head": params["lm_head"] * 8})


@pytest.fixture(scope="module")
def packed(target):
    return jax.tree.map(jnp.asarray, packing.pack_params(target, CONFIG))


@pytest.fixture(scope="module")
def published_drafter():
    """As plain JAX takes it."""
    return init_params(DRAFTER, jax.random.key(2))


@pytest.fixture(scope="module")
def drafter(published_drafter):
    """As the kernels take it."""
    return pack_drafter(jax.tree.map(lambda x: np.asarray(x).astype(BF16), published_drafter), DRAFTER)


def plain(packed, count, sampling=None):
    """`count` tokens, their log-probabilities, and the cache, one row a pass."""
    run = {"config": CONFIG, "decode": MEGAKERNEL}
    state = start(packed, PROMPT, LENGTH, sampling, **run)
    out = []
    for _ in range(count):
        state = jit_decode_step(packed, state, **run)
        out.append((int(state.token), np.float32(state.logprob)))
    return out, flush(state.cache)


def oracle(tokens, shape, wrong=()):
    """A stand-in for the drafter: guesses from the known text, in a tree of the given shape.

    Args:
        tokens: the text after the prompt, the prompt's own first token in front.
        shape: `chain`, `star` (the right token and 14 wrong ones), or `mixed` (a chain with wrong siblings).
        wrong: depths at which the right token is not among the guesses.
    """
    text = jnp.asarray(list(tokens) + [0] * 64, jnp.int32)
    index = np.arange(MAX_ROWS)
    parents = {"chain": index - 1, "star": np.where(index, 0, -1),
               "mixed": np.array([-1, 0, 0, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13])}[shape]
    depth = np.zeros(MAX_ROWS, np.int32)
    for i in index[1:]:
        depth[i] = depth[parents[i]] + 1
    ancestors = np.zeros(MAX_ROWS, np.uint32)
    for i in index:
        ancestors[i] = (1 << i) | (ancestors[parents[i]] if i else 0)
    first = np.array([i == 0 or parents[i] not in parents[:i] for i in index])  # the first child has the right token
    right = first & ~np.isin(depth, wrong)

    def guess(params, state, **_):
        at = state.cache.length - len(PROMPT)
        tokens = jnp.where(right, text[at + depth], (text[at + depth] + 1 + jnp.arange(MAX_ROWS)) % CONFIG.vocab_size)
        return Tree(tokens.at[0].set(state.token), jnp.asarray(parents, jnp.int32), jnp.asarray(depth),
                    jnp.ones(MAX_ROWS, bool), jnp.asarray(ancestors), jnp.zeros(MAX_ROWS))

    return guess


def decode(params, count, speculation, *, decode=MEGAKERNEL, sampling=None, mesh=None):
    """At least `count` tokens by steps -> ([(token, logprob)], cache, tokens of each step)."""
    run = {"config": CONFIG, "decode": decode, "speculation": speculation, "mesh": mesh}
    state = speculative.start(params, PROMPT, LENGTH, sampling, **run)
    out, counts = [], []
    step = jax.jit(partial(speculative.decode_step, **run))  # not the shared one: tests replace its parts
    while len(out) < count:
        state, made = jax.block_until_ready(step(params, state))
        counts.append(int(made.count))
        tokens, logprobs = (np.asarray(x)[:counts[-1]] for x in (made.tokens, made.logprobs))
        out += list(zip(tokens.tolist(), logprobs, strict=True))
    return out, flush(state.cache), counts


def assert_plain(got, packed, sampling=None):
    out, cache, _ = got
    want, kept = plain(packed, len(out), sampling)
    assert [token for token, _ in out] == [token for token, _ in want]
    assert_same_bits(np.array([x for _, x in out]), np.array([x for _, x in want]))
    for a, b in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(kept.layers), strict=True):
        assert_same_bits(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def text(packed):
    """The greedy text: the prompt's own token, then what follows."""
    first = int(start(packed, PROMPT, LENGTH, config=CONFIG, decode=MEGAKERNEL).token)
    return [first, *(token for token, _ in plain(packed, 70)[0])]


@pytest.mark.parametrize("shape", ["chain", "star", "mixed"])
@pytest.mark.parametrize("wrong", [(), (1,), (3,)], ids=["all right", "first wrong", "third wrong"])
def test_any_tree_gives_the_plain_text(packed, text, monkeypatch, shape, wrong):
    monkeypatch.setattr(speculative, "guess", oracle(text, shape, wrong))
    got = decode(SpecParams(packed, None), 40, Speculation())
    assert_plain(got, packed)
    deepest = {"chain": 16, "star": 2, "mixed": 9}[shape]
    assert max(got[2]) == min(deepest, min(wrong, default=99))  # what is right is accepted, whole windows of it


@pytest.mark.parametrize("speculation", [Speculation(), Speculation(DRAFTER), Speculation(DRAFTER, width=1),
                                         Speculation(DRAFTER, width=3, spine=4, tau=1.5)],
                         ids=["none", "tree", "chain", "spine"])
def test_a_drafter_changes_no_bit(packed, drafter, speculation):
    params = SpecParams(packed, None if speculation.drafter is None else drafter)
    assert_plain(decode(params, 24, speculation), packed)


def test_a_step_with_kernels_has_no_loop(packed, drafter, published_drafter):
    """Draft, tree and layers are calls; in plain JAX the tree is a loop."""
    run = {"config": CONFIG, "decode": MEGAKERNEL, "speculation": Speculation(DRAFTER)}

    def text(drafter):
        params = SpecParams(packed, drafter)
        state = speculative.start(params, PROMPT, LENGTH, **run)
        return speculative.jit_decode_step.lower(params, state, **run).as_text(dialect="hlo")

    kernels, plain = text(drafter), text(published_drafter)
    calls = [f'custom_call_target="musejax_draft{name}"' for name in ("", "_commit", "_tree")]
    assert [kernels.count(call) for call in calls] == [1, 1, 1]
    assert " while(" not in kernels and " while(" in plain


def test_a_drafter_in_plain_jax_changes_no_bit(packed, published_drafter):
    assert_plain(decode(SpecParams(packed, published_drafter), 24, Speculation(DRAFTER)), packed)


@pytest.mark.parametrize("wrong", [{"decode": DecodeConfig(implementation="reference")},
                                   {"speculation": Speculation(DRAFTER, policy=EXACT)}], ids=["reference", "exact"])
def test_a_packed_drafter_that_cannot_run(target, packed, drafter, wrong):
    run = {"config": CONFIG, "decode": MEGAKERNEL, "speculation": Speculation(DRAFTER), **wrong}
    with pytest.raises(ConfigError, match="drafter: the packed form runs with megakernel"):
        speculative.start(SpecParams(target if run["decode"] != MEGAKERNEL else packed, drafter), PROMPT, LENGTH, **run)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sampled_text_is_the_plain_one(packed, drafter, seed):
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=seed)
    assert_plain(decode(SpecParams(packed, drafter), 20, Speculation(DRAFTER), sampling=sampling), packed, sampling)


@pytest.mark.parametrize("devices", [2, 8])
def test_devices_give_the_same_text(packed, drafter, published_drafter, devices):
    mesh = make_mesh(devices)
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), packed,
                          packing.abstract_packed(CONFIG, mesh))
    for mine in (place(drafter, mesh), jax.device_put(published_drafter, replicated(mesh))):
        assert_plain(decode(SpecParams(placed, mine), 12, Speculation(DRAFTER), mesh=mesh), packed)


def test_reference_step_is_the_reference_model(target, text):
    """In plain JAX no bits are promised; with float32 arithmetic throughout the text is that of whole passes."""
    exact = DecodeConfig(implementation="reference", policy=EXACT)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), target)
    run = jax.jit(lambda tokens, n: forward(params, tokens, config=CONFIG, decode=exact)[0][n - 1])
    tokens = list(PROMPT)
    for _ in range(13):
        tokens.append(int(jnp.argmax(run(np.pad(tokens, (0, 64 - len(tokens))), len(tokens)))))
    want = tokens[len(PROMPT):]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "guess", oracle(want, "mixed", (4,)))
        out, _, counts = decode(SpecParams(params, None), 12, Speculation(), decode=exact)
    assert [token for token, _ in out][:12] == want[1:13] and max(counts) == 4


def test_loop_on_the_device_equals_the_steps(packed, drafter, text):
    run = {"config": CONFIG, "decode": MEGAKERNEL, "speculation": Speculation(DRAFTER)}
    params = SpecParams(packed, drafter)

    def loop(limit, stops=()):
        state = speculative.start(params, PROMPT, LENGTH, **run)
        _, out = speculative.jit_run_steps(params, state, jnp.int32(limit), room=64, stop_ids=stops, **run)
        return np.asarray(out.tokens)[:int(out.count)].tolist()

    assert loop(30) == text[:30]
    assert loop(1) == text[:1]
    stop = text[9]
    assert loop(30, (stop,)) == text[:text.index(stop) + 1]


def test_a_full_cache_ends_the_step(packed, text, monkeypatch):
    monkeypatch.setattr(speculative, "guess", oracle(text, "chain"))
    run = {"config": CONFIG, "decode": MEGAKERNEL, "speculation": Speculation()}
    params = SpecParams(packed, None)
    state = speculative.start(params, PROMPT, len(PROMPT) + 5, **run)
    state, made = jax.jit(partial(speculative.decode_step, **run))(params, state)
    assert int(made.count) == 5 and int(state.cache.length) == len(PROMPT) + 5
    assert np.asarray(made.tokens)[:5].tolist() == text[1:6] and int(state.token) == text[5]


# ------------------------------------------------------------------ faults that must be seen


def broken(packed, text, patch, shape="mixed", wrong=(2,)):
    """Decoding after `patch(monkeypatch)` must differ from plain decoding."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(speculative, "guess", oracle(text, shape, wrong))
        patch(monkeypatch)
        got = decode(SpecParams(packed, None), 24, Speculation())
    with pytest.raises(AssertionError):
        assert_plain(got, packed)


def test_fault_mask_off_by_one(packed, text):
    """Rows that hang under another parent than they were made for see other keys."""
    real = speculative.verify

    def patch(monkeypatch):
        def verify(params, cache, tokens, parents, *args, **kw):
            shifted = jnp.where(parents > 0, parents - 1, parents)
            return real(params, cache, tokens, shifted, *args, **kw)
        monkeypatch.setattr(speculative, "verify", verify)

    broken(packed, text, patch, wrong=())


def test_fault_stale_keys(packed, text):
    """Storing the first rows instead of the accepted path leaves a rejected sibling's keys in the cache."""
    real = speculative.accept

    def patch(monkeypatch):
        monkeypatch.setattr(speculative, "accept", lambda cache, path, count: real(cache, jnp.arange(MAX_ROWS), count))

    broken(packed, text, patch, wrong=(4,))


def test_fault_wrong_position(packed, text):
    """A cache that believes in one position more turns keys and windows by one."""
    real = speculative.accept

    def patch(monkeypatch):
        def accept(cache, path, count):
            made = real(cache, path, count)
            return made._replace(length=made.length + 1)
        monkeypatch.setattr(speculative, "accept", accept)

    broken(packed, text, patch)


def test_fault_bonus_token_lost(packed, text):
    """The last confirmed guess in place of the target's own next token."""
    real = acceptance.accept

    def patch(monkeypatch):
        def accept(tree, choices):
            made = real(tree, choices)
            guess = tree.tokens[made.path[made.count - 1]]
            return made._replace(emitted=made.emitted.at[made.count - 1].set(guess), anchor=guess)
        monkeypatch.setattr(acceptance, "accept", accept)

    broken(packed, text, patch)


def test_fault_stop_ignored(packed, drafter, text):
    run = {"config": CONFIG, "decode": MEGAKERNEL, "speculation": Speculation(DRAFTER)}
    params = SpecParams(packed, drafter)

    def tokens(patched):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if patched:
                monkeypatch.setattr(acceptance, "truncate", lambda emitted, count, stops, room: (
                    jnp.minimum(count, room), count >= room))
            state = speculative.start(params, PROMPT, LENGTH, **run)
            step = jax.jit(partial(speculative.run_steps, room=64, stop_ids=(text[9],), **run))
            _, out = step(params, state, jnp.int32(30))
            return int(out.count)

    assert tokens(patched=False) == text.index(text[9]) + 1 < tokens(patched=True)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"spine": 16}, {"spine": -1}, {"tau": 0.0}])
def test_bad_choices_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected"):
        Speculation(**wrong)

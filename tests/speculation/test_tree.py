"""Trees and accepted paths against the NumPy reference, on many random lattices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from musejax.config import ConfigError
from musejax.kernels.forward import depths
from musejax.speculation import tree as tr
from musejax.speculation.accept import accept, truncate
from musejax.speculation.draft import Lattice

SHAPES = ((15, 16, 16), (7, 16, 16), (3, 2, 16), (15, 4, 32), (1, 1, 16))
"""(drafted positions, candidates, nodes); the third and the last hold too few prefixes for all nodes."""

build = jax.jit(tr.build_tree, static_argnames=("nodes",))
jit_accept = jax.jit(accept)


def random_lattice(rng, depth, count, vocab=50, ties=True):
    """tokens [q, a], logprobs [q, a, a]; multiples of 1/8 tie often, and their sums are exact in float32."""
    tokens = np.stack([rng.permutation(vocab)[:count] for _ in range(depth)]).astype(np.int32)
    logp = -rng.integers(0, 40, (depth, count, count)) / 8 if ties else -rng.exponential(1.5, (depth, count, count))
    logp[0] = logp[0, :1]
    return tokens, logp.astype(np.float32)


def assert_same_tree(got: tr.Tree, want) -> None:
    n, valid = len(want.tok), want.valid
    assert np.array_equal(got.valid, valid) and int(got.num_valid) == valid.sum()
    assert valid[:valid.sum()].all(), "padding must come last"
    assert np.array_equal(np.asarray(got.tokens), np.where(valid, want.tok, 0))
    assert np.array_equal(got.parents, np.where(valid & (np.arange(n) > 0), want.parent, -1))
    assert np.array_equal(got.depth, np.where(valid, want.depth, 0))
    assert np.array_equal(got.depth, depths(got.parents))  # as verification derives it
    bits = np.asarray(got.ancestors)[:, None] >> np.arange(n, dtype=np.uint32) & 1
    assert np.array_equal(bits.astype(bool)[valid], want.anc[valid])
    assert np.array_equal(np.asarray(got.ancestors)[~valid], 1 << np.flatnonzero(~valid))
    assert np.allclose(got.cum[valid], want.cum[valid], atol=1e-5)
    assert got.tokens.dtype == got.parents.dtype == got.depth.dtype == jnp.int32 and got.ancestors.dtype == jnp.uint32


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(reference, shape):
    depth, count, nodes = shape
    rng = np.random.default_rng(depth)
    for trial in range(60):
        tokens, logp = random_lattice(rng, depth, count, ties=trial % 3 > 0)
        width = int(rng.integers(1, count + 3)) if trial % 2 else count  # also wider than there are candidates
        spine = int(rng.integers(0, depth + 3)) if trial % 4 == 3 else 0
        got = build(trial, tokens, logp, nodes=nodes, width=width, spine=spine)
        assert_same_tree(got, reference.build_tree(trial, tokens, logp, nodes, width=width, spine=spine))


def test_equal_scores_take_lower_parent_then_first_candidate(reference):
    tokens = np.arange(45, dtype=np.int32).reshape(15, 3)
    got = build(99, tokens, np.full((15, 3, 3), -0.5, np.float32))
    assert_same_tree(got, reference.build_tree(99, tokens, np.full((15, 3, 3), -0.5), 16))
    assert got.parents.tolist()[:8] == [-1, 0, 0, 0, 1, 1, 1, 2] and got.tokens.tolist()[:5] == [99, 0, 1, 2, 3]
    # The other tie rule, the last maximum, would not pass.
    wrong = reference.build_tree(99, tokens[:, ::-1], np.full((15, 3, 3), -0.5), 16)
    with pytest.raises(AssertionError):
        assert_same_tree(got, wrong)


def test_logprobs(reference):
    rng = np.random.default_rng(1)
    scores, rho = rng.normal(size=(5, 4, 4)), -rng.random(5)
    for tau in (0.7, 1.0, 1.5):
        got = tr.conditional_logprobs(Lattice(jnp.zeros((5, 4), jnp.int32), jnp.float32(scores), jnp.float32(rho)), tau)
        assert np.abs(got - reference.lattice_logp(scores, rho, tau)).max() < 1e-5


def test_width_one_is_the_greedy_chain_and_a_spine_holds_it(reference):
    rng = np.random.default_rng(2)
    for _ in range(20):
        tokens, logp = random_lattice(rng, 15, 16)
        walk = reference.greedy_walk(tokens, logp)
        one, chain = build(7, tokens, logp, width=1), tr.chain_tree(7, jnp.asarray(walk))
        for name in ("tokens", "parents", "depth", "valid", "ancestors"):
            assert np.array_equal(getattr(one, name), getattr(chain, name)), name
        spine = build(7, tokens, logp, spine=9)
        for name in ("tokens", "parents"):
            assert np.array_equal(getattr(spine, name)[:10], getattr(chain, name)[:10]), name
    short = build(7, tokens[:4], logp[:4], width=1)
    assert int(short.num_valid) == 5 and not short.valid[5:].any()
    assert np.array_equal(tr.chain_tree(7, jnp.asarray(walk[:4])).ancestors, short.ancestors)
    alone = tr.root_only(7)
    assert alone.tokens.tolist() == [7] + [0] * 15 and alone.parents.tolist() == [-1] * 16 and int(alone.num_valid) == 1


@pytest.mark.parametrize("tau", [0.7, 1.5])
def test_width_one_from_scores_is_a_whole_chain(tau):
    """As one program, in which XLA may fuse the comparisons with the log-probabilities."""
    run = jax.jit(lambda lattice: tr.build_tree(1, lattice.tokens, tr.conditional_logprobs(lattice, tau), width=1))
    rng = np.random.default_rng(5)
    for _ in range(20):
        scores, coverage = 3 * rng.standard_normal((15, 16, 16)), -rng.exponential(0.2, 15)
        lattice = Lattice(jnp.zeros((15, 16), jnp.int32), jnp.float32(scores), jnp.float32(coverage))
        assert run(lattice).parents.tolist() == list(range(-1, 15))


def test_children_that_cannot_be_are_left_out():
    """-inf (an id that is never chosen) and NaN scores are no nodes, also on the spine."""
    tokens, logp = random_lattice(np.random.default_rng(3), 15, 4)
    logp[:, :, 1], logp[:, :, 3] = -np.inf, np.nan
    for spine in (0, 15):
        made = build(1, tokens, logp, spine=spine)
        banned = {int(t) for row in tokens for t in row[[1, 3]]} - {int(t) for row in tokens for t in row[[0, 2]]}
        assert made.valid.all() and np.isfinite(made.cum).all() and banned.isdisjoint(made.tokens.tolist()[1:])
    none = build(1, tokens, np.full_like(logp, -np.inf), spine=3)
    assert int(none.num_valid) == 1 and none.parents.tolist() == [-1] * 16


def test_too_many_nodes():
    tokens, logp = random_lattice(np.random.default_rng(4), 3, 2)
    with pytest.raises(ConfigError, match="1 to 32"):
        tr.build_tree(0, tokens, logp, nodes=33)


# ------------------------------------------------------------------ accept


@pytest.mark.parametrize("shape", [(15, 16, 16), (4, 3, 16), (1, 3, 16), (6, 2, 32)], ids=str)
def test_accept_equals_the_reference(reference, shape):
    depth, count, nodes = shape
    rng, vocab, lengths = np.random.default_rng(depth), max(count, 5), set()
    for trial in range(150):
        tokens, logp = random_lattice(rng, depth, count, vocab)  # token 0 is a candidate like any other
        spine, width = int(rng.integers(0, depth + 1)), int(rng.integers(1, count + 1))
        want_tree = reference.build_tree(trial % vocab, tokens, logp, nodes, width=width, spine=spine)
        got_tree = build(trial % vocab, tokens, logp, nodes=nodes, width=width, spine=spine)
        choices = rng.integers(0, vocab, nodes)
        for i in range(1, nodes):
            if want_tree.valid[i] and rng.random() < 0.7:
                choices[want_tree.parent[i]] = want_tree.tok[i]
        path, a, emitted, n = reference.accept(want_tree, choices)
        got = jit_accept(got_tree, jnp.asarray(choices, jnp.int32))
        assert got.path.tolist() == path.tolist() and got.emitted.tolist() == emitted.tolist()
        assert int(got.count) == n == a + 1 and int(got.anchor) == emitted[a]
        lengths.add(n)
    assert len(lengths) > min(depth, 3)


def test_accept_on_stars_and_padding():
    star = tr.Tree(jnp.array([9, 0, 5, 7], jnp.int32), jnp.array([-1, 0, 0, 0], jnp.int32),
                   jnp.array([0, 1, 1, 1], jnp.int32), jnp.array([True, True, True, False]),
                   jnp.array([1, 3, 5, 8], jnp.uint32), jnp.zeros(4))
    for first, path, emitted in ((0, [0, 1], [0, 21]), (5, [0, 2], [5, 22]), (7, [0], [7]), (9, [0], [9])):
        got = accept(star, jnp.array([first, 21, 22, 23], jnp.int32))  # 7 stands in a padding node only
        n = len(path)
        assert int(got.count) == n and got.path.tolist() == path + [-1] * (4 - n)
        assert got.emitted.tolist() == emitted + [-1] * (4 - n) and int(got.anchor) == emitted[-1]
    for choice in (0, 3):  # padding holds token 0: it must not pass for a guess
        got = accept(tr.root_only(3), jnp.full(16, choice, jnp.int32))
        assert int(got.count) == 1 and got.emitted.tolist() == [choice] + [-1] * 15


def test_a_whole_chain_is_accepted():
    tokens = jnp.arange(1, 16, dtype=jnp.int32)
    got = accept(tr.chain_tree(0, tokens), jnp.arange(1, 17, dtype=jnp.int32))
    assert int(got.count) == 16 and got.path.tolist() == list(range(16)) and got.emitted.tolist() == list(range(1, 17))


def test_truncate_equals_the_reference(reference):
    rng = np.random.default_rng(5)
    cut = jax.jit(partial(truncate, stop_ids=(2, 0)))
    for _ in range(300):
        count = int(rng.integers(1, 17))
        emitted = np.where(np.arange(16) < count, rng.integers(0, 12, 16), -1).astype(np.int32)
        room = int(rng.integers(1, 20))
        keep, done = reference.truncate(emitted, count, {2, 0}, room)
        got = cut(emitted, count, room=room)
        assert (int(got[0]), bool(got[1])) == (keep, done)


def test_truncate_at_each_place():
    emitted = jnp.arange(10, 26, dtype=jnp.int32)
    for place in range(16):
        kept, done = truncate(emitted, 12, jnp.array([10 + place]), 100)
        assert (int(kept), bool(done)) == ((place + 1, True) if place < 12 else (12, False))
    assert [int(x) for x in truncate(emitted, 12, (11,), 1)] == [1, 1]  # no room for the stop itself
    assert [int(x) for x in truncate(emitted, 12, (), 12)] == [12, 1]
    assert [int(x) for x in truncate(emitted, 12, (), 0)] == [0, 1]
    assert [int(x) for x in truncate(jnp.full(16, -1), 3, (-1,), 9)] == [1, 1]

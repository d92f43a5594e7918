"""The target musejax_draft_tree against tree.py: the same nodes, log-probabilities to the rounding of sums.

Scores are far apart, or equal on purpose: then the rows of all predecessors are equal too, so that equal sums are sums
of equal terms in any order of additions.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from kernel_inputs import F32, math_h

from musejax.kernels import draft_calls
from musejax.sharding import make_mesh
from musejax.speculation import draft_kernels as dk
from musejax.speculation import tree as tr
from musejax.speculation.draft import Lattice

STATIC = ("nodes", "width", "spine", "tau", "mesh")
kernel = jax.jit(dk.tree, static_argnames=STATIC)
build = jax.jit(tr.build_tree, static_argnames="nodes")

SIZES = tuple(itertools.product((1, 7, 15), (1, 8, 16)))
"""(drafted positions, candidates)."""


def lattice_of(scores, coverage=None, seed=0):
    q, a = scores.shape[:2]
    tokens = np.random.default_rng(seed).integers(0, 500, (q, a))
    coverage = np.zeros(q) if coverage is None else coverage
    return Lattice(jnp.asarray(tokens, jnp.int32), jnp.asarray(scores, jnp.float32), jnp.asarray(coverage, jnp.float32))


def random_lattice(q, a, seed=0):
    rng = np.random.default_rng(seed)
    return lattice_of(3 * rng.standard_normal((q, a, a)), -rng.exponential(0.2, q), seed)


def tied_lattice(q, a, seed=0):
    """Every value stands four times in a row, and the rows of a position are equal."""
    rng = np.random.default_rng(seed)
    rows = rng.permuted(np.repeat(rng.standard_normal((q, -(-a // 4))), 4, axis=1)[:, :a], axis=1)
    return lattice_of(np.broadcast_to(rows[:, None], (q, a, a)), -rng.exponential(0.2, q), seed)


def choices(nodes=(1, 2, 16), widths=(1, 8, None), spines=(0, 4, 15)):
    taus = itertools.cycle((1.0, 0.7, 1.5, 1.0))
    for (n, width, spine), tau in zip(itertools.product(nodes, widths, spines), taus, strict=False):
        yield {"nodes": n, "width": width, "spine": spine, "tau": tau}


def plain(anchor, lattice, *, tau, **choice):
    """Not as one program, in which XLA would fuse the division by tau into further arithmetic."""
    return build(anchor, lattice.tokens, tr.conditional_logprobs(lattice, tau), **choice)


def assert_same_tree(got: tr.Tree, want: tr.Tree) -> None:
    for name in ("tokens", "parents", "depth", "valid", "ancestors"):
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), (name, a, b)
    np.testing.assert_allclose(got.cum, want.cum, rtol=1e-6, atol=1e-6)  # certain ones are near 0


def assert_plain(lattice, **choice):
    """The target's tree, after a look at whether it is tree.py's."""
    got = kernel(77, lattice, **choice)
    every = lattice.tokens.shape[1]
    assert_same_tree(got, plain(77, lattice, **{**choice, "width": choice["width"] or every}))
    return got


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("make", [random_lattice, tied_lattice])
def test_equals_plain_jax(size, make):
    for seed, choice in enumerate(choices()):
        assert_plain(make(*size, seed), **choice)


def test_equal_scores_take_lower_parent_then_first_candidate():
    for choice in choices(nodes=(16, 32)):
        got = assert_plain(lattice_of(np.zeros((15, 3, 3))), **choice)
        if choice["width"] is None and not choice["spine"]:
            assert got.parents.tolist()[:8] == [-1, 0, 0, 0, 1, 1, 1, 2]


def test_shapes():
    """A chain, a star where nothing is known after the first position, and one where there is nothing after it."""
    index = np.arange(16)
    chain = assert_plain(random_lattice(15, 16), nodes=16, width=1, spine=0, tau=1.0)
    assert chain.parents.tolist() == (index - 1).tolist() and np.array_equal(chain.ancestors, 2 ** (index + 1) - 1)
    spine = assert_plain(random_lattice(15, 16), nodes=16, width=None, spine=15, tau=1.0)
    assert np.array_equal(spine.tokens, chain.tokens)
    unknown = lattice_of(np.zeros((15, 16, 16)), np.where(np.arange(15), -50.0, 0.0))
    for lattice in (unknown, random_lattice(1, 16)):
        star = assert_plain(lattice, nodes=16, width=None, spine=0, tau=1.0)
        assert star.parents.tolist() == [-1] + [0] * 15 and star.depth.tolist() == [0] + [1] * 15
    short = assert_plain(random_lattice(3, 8), nodes=16, width=1, spine=4, tau=1.0)
    assert int(short.num_valid) == 4 and short.ancestors.tolist()[4:] == (2 ** index[4:]).tolist()


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, 1e30, -1e30], ids=str)
@pytest.mark.parametrize("where", ["an entry", "a candidate", "a row", "a position", "everywhere"])
def test_scores_that_are_no_numbers(value, where):
    for seed, choice in enumerate(choices(nodes=(16,))):
        lattice = random_lattice(7, 8, seed)
        at = {"an entry": (1, 3, 2), "a candidate": (slice(None), slice(None), 2), "a row": (0, 0),
              "a position": (2,), "everywhere": ()}[where]
        assert_plain(lattice._replace(scores=lattice.scores.at[at].set(value)), **choice)


@pytest.mark.parametrize("coverage", [np.nan, -np.inf, np.inf, -6e29, -4e29, -1e30], ids=str)
def test_coverage_that_closes(coverage):
    """-4e29 can be taken once on a path, and not twice; the others close their position."""
    for seed, choice in enumerate(choices(nodes=(16,))):
        lattice = random_lattice(7, 8, seed)
        for at in ((2,), slice(1, 4), slice(None)):
            assert_plain(lattice._replace(coverage=lattice.coverage.at[at].set(coverage)), **choice)


def test_a_spine_whose_end_is_closed():
    """Where the chain has no child, the likeliest of all is taken, and the chain goes on from there."""
    for place, choice in itertools.product(range(7), choices(nodes=(16,), spines=(4, 15))):
        lattice = tied_lattice(7, 8, place)
        assert_plain(lattice._replace(scores=lattice.scores.at[place, ::2].set(np.nan)), **choice)


@pytest.mark.parametrize("tau", [0.3, 1.0, 1.5])
def test_order_of_arithmetic(tau):
    """Bit for bit what ffi/cpu/draft.h states, for the children of the root."""
    f, lattice, tau = math_h(), random_lattice(1, 16, seed=5), F32(tau)
    x = np.asarray(lattice.scores)[0, 0] / tau
    x = x - x.max()
    total = F32(0)
    for term in f("exp", x):
        total += term
    want = x - f("log", [total])[0] + np.asarray(lattice.coverage)[0]
    got = kernel(1, lattice, nodes=17, width=None, spine=0, tau=float(tau))
    assert_same_bits(got.cum[1:], -np.sort(-want))


@pytest.mark.parametrize("devices", [2, 8])
def test_devices(devices):
    lattice, choice = random_lattice(15, 16), {"nodes": 16, "width": 8, "spine": 4, "tau": 1.5}
    for got, want in zip(kernel(7, lattice, mesh=make_mesh(devices), **choice), kernel(7, lattice, **choice),
                         strict=True):
        assert_same_bits(got, want)


# ------------------------------------------------------------------ faults that must be seen


def test_the_other_tie_rule_is_seen():
    """The last of equal candidates, as the first of the reversed ones."""
    lattice = tied_lattice(15, 8)
    flipped = Lattice(lattice.tokens[:, ::-1], lattice.scores[:, :, ::-1], lattice.coverage)
    choice = {"nodes": 16, "spine": 0, "tau": 1.0}
    with pytest.raises(AssertionError):
        assert_same_tree(kernel(77, lattice, width=None, **choice), plain(77, flipped, width=8, **choice))


@pytest.mark.parametrize("wrong", [{"width": 1}, {"spine": 3}, {"tau": 1.01}], ids=str)
def test_a_wrong_attribute_is_seen(monkeypatch, wrong):
    lattice, choice = random_lattice(15, 8, seed=2), {"nodes": 16, "width": 3, "spine": 9, "tau": 1.0}
    want, real = plain(77, lattice, **choice), draft_calls.tree
    assert_same_tree(dk.tree(77, lattice, **choice), want)
    monkeypatch.setattr(draft_calls, "tree", lambda *operands, **kw: real(*operands, **{**kw, **wrong}))
    with pytest.raises(AssertionError):
        assert_same_tree(dk.tree(77, lattice, **choice), want)

"""The CUDA kernels of a drafter on the emulator: beside draft.py, and their bits, which blocks, ranks, and the order
and speed of warps do not change. And that these tests see a wrong bit, and that a wait that cannot end is reported."""

from dataclasses import replace

import emulated_draft as ed
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_checks import assert_lattice, assert_rounded
from draft_inputs import BASE, CONFIGS, POLICY, committed, drafter_of, named, normed, reference_cache, taps_of, whole
from emulated import WaitError
from emulated_draft import How
from helpers import assert_same_bits

from musejax.bench.step import equal_slices
from musejax.params import BF16
from musejax.speculation import draft as dr
from musejax.speculation import draft_kernels as dk
from musejax.speculation import tree as dt
from musejax.speculation.draft import DraftCache, Lattice
from musejax.speculation.packing import layout

NAMES = [name for name, config in CONFIGS.items() if config.candidates <= 16]
WIDE = named("eight heads share")
ANCHOR = 7


def assert_same_draft(got, want):
    assert_same_bits(got.stream, want.stream)
    for x, y in zip(got.lattice, want.lattice, strict=True):
        assert_same_bits(x, y)


def hidden_of(drafter, stream):
    return normed(whole(stream.view(BF16)), drafter.wide["norm"], drafter.config)


# ------------------------------------------------------------------ beside draft.py


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [0, 1, 40, 330])
def test_a_draft(name, length):
    """Bounds as of the CPU kernels (test_draft_kernels.py test_whole_draft)."""
    drafter = named(name)
    cache = committed(drafter, length)
    got = ed.draft(drafter, cache, ANCHOR)
    hidden = hidden_of(drafter, got.stream)
    assert_lattice(got.lattice, drafter, hidden, ANCHOR)
    want = np.asarray(dr.draft_hidden(drafter.wide, drafter.borrowed, reference_cache(cache), ANCHOR,
                                      config=drafter.config, policy=POLICY))
    error = np.abs(hidden - want) / np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    assert error.max() < 2.0**-4 and error.mean() < 2.0**-8, (error.max(), error.mean())


@pytest.mark.parametrize("length", [47, 48, 49, 63, 64, 65, 299, 300, 301, 320])
def test_contexts_at_borders_of_pieces_and_of_the_window(length):
    """A window, and a ring, of 300 positions; pieces of 64; the block ends in a piece or begins one."""
    test_a_draft("window of 300", length)


@pytest.mark.parametrize("rows", [2, 7, 8, 9, 15, 16])
def test_rows_of_a_block(rows):
    drafter = drafter_of(replace(BASE, block_size=rows))
    cache = committed(drafter, 30)
    got = ed.draft(drafter, cache, ANCHOR)
    assert_lattice(got.lattice, drafter, hidden_of(drafter, got.stream), ANCHOR)


@pytest.mark.parametrize("limit", [1, 70, 129, 511])
def test_ids_beyond_the_tokenizer_are_no_candidates(limit):
    drafter = drafter_of(BASE)
    cache = committed(drafter, 12)
    got = ed.draft(drafter, cache, ANCHOR, num_tokens=limit)
    real = np.isfinite(got.lattice.scores[0, 0])
    assert real.sum() == min(limit, BASE.candidates)
    assert (got.lattice.tokens[:, :limit] < limit).all() and (got.lattice.tokens[:, limit:] == BASE.vocab_size).all()
    assert_lattice_of_few(got.lattice, drafter, hidden_of(drafter, got.stream), limit)


def assert_lattice_of_few(got, drafter, hidden, limit):
    unary = dr.unary_logits(drafter.borrowed, jnp.asarray(hidden), num_tokens=limit, config=drafter.config,
                            policy=POLICY)
    want = dr.lattice(drafter.wide, jnp.asarray(hidden), unary, ANCHOR, config=drafter.config, policy=POLICY)
    np.testing.assert_allclose(got.coverage, want.coverage, atol=1e-4)


def test_ties_go_to_the_lower_id():
    """An LM head of zeros: every id is as good as any other."""
    drafter = drafter_of(BASE)
    target = {**drafter.target, "lm_head": jnp.zeros_like(drafter.target["lm_head"])}
    got = ed.draft(replace(drafter, target=target), committed(drafter, 3), ANCHOR)
    assert (got.lattice.tokens == np.arange(BASE.candidates)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_commit(name):
    """Of 11 of 16 rows, where the ring begins anew. A row differs by a unit in the last place where a sum lies near the
    middle of two values."""
    drafter = named(name)
    cache, taps = committed(drafter, 17), taps_of(drafter.config, 16, seed=3)
    want = dk.commit_context(drafter.packed, cache, jnp.asarray(taps), 17, 11, config=drafter.config)
    got = ed.commit(drafter, cache, taps, 17, 11)
    slots = cache.keys.shape[2]
    kept = [p % slots for p in range(17, 28)][-slots:]
    for x, y, before in zip(got[:2], want[:2], cache[:2], strict=True):
        assert_rounded(x.view(BF16)[:, :, kept], np.asarray(y)[:, :, kept], equal=0.98)
        others = [s for s in range(slots) if s not in kept]
        assert_same_bits(x[:, :, others], np.asarray(before).view(np.uint16)[:, :, others])


@pytest.mark.parametrize("count", [0, 1, 8, 16])
def test_counts_of_a_commit(count):
    drafter = drafter_of(BASE)
    cache, taps = committed(drafter, 20), taps_of(BASE, 16, seed=4)
    whole_commit, got = (ed.commit(drafter, cache, taps, 20, n) for n in (16, count))
    slots = [p % cache.keys.shape[2] for p in range(20, 20 + count)]
    rest = [s for s in range(cache.keys.shape[2]) if s not in slots]
    for x, y, before in zip(got[:2], whole_commit[:2], cache[:2], strict=True):
        assert_same_bits(x[:, :, slots], y[:, :, slots])
        assert_same_bits(x[:, :, rest], np.asarray(before).view(np.uint16)[:, :, rest])


# ------------------------------------------------------------------ bits


HOW = {
    "one block": How(blocks=1),
    "7 blocks": How(blocks=7),
    "any order": How(seed=11),
    "rough": How(seed=5, rough=True),
    "2 ranks": How(ranks=2),
    "4 ranks of 2 blocks": How(ranks=4, blocks=2),
    "8 ranks of 1 block": How(ranks=8, blocks=1),
    "2 ranks, rough": How(ranks=2, seed=3, rough=True),
    "4 ranks, rough": How(ranks=4, blocks=2, seed=9, rough=True),
}


@pytest.mark.parametrize("how", HOW)
def test_bits_of_a_draft(how):
    """Twice, for the second launch finds what the first one left; the length differs."""
    drafter = WIDE
    for length in (0, 70):
        cache = committed(drafter, length)
        assert_same_draft(ed.draft(drafter, cache, ANCHOR, HOW[how]), ed.draft(drafter, cache, ANCHOR))


@pytest.mark.parametrize("how", HOW)
def test_bits_of_a_commit(how):
    """Commits follow one another at once, as those of a prompt do."""
    drafter, taps = WIDE, taps_of(WIDE.config, 32, seed=8)
    made = []
    for each in (HOW[how], How()):
        cache = committed(drafter, 5)
        for start in (5, 21):
            cache = ed.commit(drafter, cache, taps[start - 5:start + 11], start, 16, each)
            cache = DraftCache(*(jnp.asarray(x.view(BF16)) for x in cache[:2]), cache.length)
        made.append(cache)
    for x, y in zip(made[0][:2], made[1][:2], strict=True):
        assert_same_bits(np.asarray(x).view(np.uint16), np.asarray(y).view(np.uint16))


@pytest.mark.parametrize("name", ["dflash 1, block of 8", "K of 2048, heads of 128", "window of 300"])
def test_ranks_of_other_sizes(name):
    """57 ids a slice fill no tile; two chunks of K; no convolution."""
    drafter = named(name)
    cache = committed(drafter, 100)
    assert_same_draft(ed.draft(drafter, cache, ANCHOR, How(ranks=8, blocks=2)), ed.draft(drafter, cache, ANCHOR))


def test_a_looped_rank():
    """One rank of 8, whose exchanges come back to itself: all slices are as its own."""
    drafter = drafter_of(BASE)
    one, two = (ed.draft(drafter, committed(drafter, 9), ANCHOR, How(slices=1, blocks=n)) for n in (1, 4))
    assert_same_draft(one, two)
    assert (one.stream == one.stream[:1]).all()


@pytest.mark.parametrize("how", [How(slices=4), How(ranks=2), How(ranks=8, blocks=1), How(ranks=2, slices=2)])
def test_equal_slices_looped_and_exchanged(how):
    """What `bench step` compares: a rank's slices looped back are as those of others, if base kernels repeat."""
    plain = drafter_of(BASE)
    begin = layout(BASE)["small.attention_conv"]
    one = jax.tree.map(lambda x: x[:1] if x.dtype == jnp.uint8 else x, plain.packed)
    drafter = replace(plain, packed=equal_slices(one, BASE, 8),
                      target={name: jnp.repeat(x[:1], 8, axis=0) for name, x in plain.target.items()})
    cache = committed(plain, 9)
    cache = cache._replace(keys=jnp.repeat(cache.keys[:, :1], 8, axis=1),
                           values=jnp.repeat(cache.values[:, :1], 8, axis=1))
    assert_same_draft(ed.draft(drafter, cache, ANCHOR, how), ed.draft(drafter, cache, ANCHOR, How(slices=1)))
    taps = taps_of(BASE, 16, seed=4)
    got, want = (ed.commit(drafter, cache, taps, 9, 11, each) for each in (how, How(slices=1)))
    for x, y in zip(got[:2], want[:2], strict=True):
        assert_same_bits(x, np.repeat(y, x.shape[1], axis=1))
    for p, other in zip(drafter.packed["layers"], plain.packed["layers"], strict=True):
        p["small"] = other["small"]
    assert len({x.tobytes() for x in np.asarray(p["small"][begin:]).reshape(-1, 8, 16).swapaxes(0, 1)}) == 8
    if how.ranks * (how.slices or 8 // how.ranks) == 8:
        with pytest.raises(AssertionError, match="elements differ"):
            assert_same_draft(ed.draft(drafter, cache, ANCHOR, how), ed.draft(drafter, cache, ANCHOR, How(slices=1)))


def test_a_wrong_bit_is_seen():
    drafter = WIDE
    cache = committed(drafter, 30)
    want = ed.draft(drafter, cache, ANCHOR)
    keys = np.array(cache.keys)
    keys[0, 3, 5, 2] = -keys[0, 3, 5, 2]
    got = ed.draft(drafter, cache._replace(keys=keys), ANCHOR)
    with pytest.raises(AssertionError):
        assert_same_draft(got, want)


# ------------------------------------------------------------------ waits


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_run_is_reported(rank):
    """By the other one, which waits for it; and the next launch is right."""
    drafter = WIDE
    cache = committed(drafter, 4)
    ed.only_rank(rank)
    try:
        with pytest.raises(WaitError, match=rf"rank {rank} block \d layer 0 phase 10"):
            ed.draft(drafter, cache, ANCHOR, How(ranks=2, budget_ms=5))
        with pytest.raises(WaitError, match=rf"rank {rank} block \d layer 0 phase 12"):
            ed.commit(drafter, cache, taps_of(drafter.config, 16), 4, 3, How(ranks=2, budget_ms=5))
    finally:
        ed.only_rank(-1)
    assert_same_draft(ed.draft(drafter, cache, ANCHOR, How(ranks=2)), ed.draft(drafter, cache, ANCHOR))


# ------------------------------------------------------------------ trees


def lattice_of(q, a, seed=0):
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(1000)[:a] for _ in range(q)]).astype(np.int32)
    return Lattice(tokens, 3 * rng.standard_normal((q, a, a), np.float32), -rng.random(q, np.float32))


def assert_same_tree(lattice, nodes, **how):
    want = dt.build_tree(jnp.int32(ANCHOR), jnp.asarray(lattice.tokens),
                         dt.conditional_logprobs(Lattice(*map(jnp.asarray, lattice)), how.get("tau", 1.0)), nodes=nodes,
                         width=how.get("width"), spine=how.get("spine", 0))
    (tokens, parents, depth, ancestors), cum = ed.tree(ANCHOR, lattice, nodes, **how)
    for got, name in ((tokens, "tokens"), (parents, "parents"), (depth, "depth"), (ancestors, "ancestors")):
        np.testing.assert_array_equal(got, np.asarray(getattr(want, name)).astype(np.int32), name)
    np.testing.assert_allclose(cum, want.cum, rtol=1e-5, atol=1e-5)  # sums of up to 15 log-softmaxes, made otherwise


@pytest.mark.parametrize(("q", "a"), [(1, 1), (7, 8), (15, 16), (15, 3)])
@pytest.mark.parametrize("how", [{}, {"width": 1}, {"width": 2, "spine": 4}, {"spine": 15}, {"tau": 0.3}])
@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_a_tree(q, a, how, nodes):
    assert_same_tree(lattice_of(q, a), nodes, **how)


def test_trees_of_odd_scores():
    """Equal scores, no numbers, and candidates that are none."""
    lattice = lattice_of(15, 16, seed=2)
    equal = lattice._replace(scores=np.zeros_like(lattice.scores), coverage=np.full(15, -0.5, np.float32))
    (_, parents, _, _), _ = ed.tree(ANCHOR, equal, 16)
    assert (parents[1:] == 0).all()  # a star: each child of the root is as good as the next, and better than any other
    assert_same_tree(equal, 16)
    for bad in (np.nan, -np.inf):
        scores = lattice.scores.copy()
        scores[0, 0, 5] = scores[3, :, 2] = bad
        assert_same_tree(lattice._replace(scores=scores), 16)
    assert_same_tree(lattice._replace(scores=np.full_like(lattice.scores, -np.inf)), 16)


def test_another_tie_rule_is_seen():
    lattice = lattice_of(15, 16)
    equal = lattice._replace(scores=np.zeros_like(lattice.scores))
    turned = equal._replace(tokens=equal.tokens[:, ::-1])
    want, got = (ed.tree(ANCHOR, x, 16)[0][0] for x in (equal, turned))
    assert (want != got).any()

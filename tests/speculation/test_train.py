"""The training objective: the blocks it trains are the blocks that draft, and the losses are those of section 7."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from musejax.numerics import EXACT
from musejax.speculation import train

WIDTH = 30
ANCHORS, REAL = np.array([[6, 13, 25], [9, 12, 0]], np.int32), np.array([[True, True, True], [True, True, False]])


@pytest.fixture(scope="module")
def texts(make_case):
    """(case, two texts of 6 + 21 and 9 + 5 tokens)."""
    case, rng = make_case(block=8, window=11, top_k=24, layers=1), np.random.default_rng(5)
    tokens = rng.integers(0, 20, (2, WIDTH)).astype(np.int32)
    taps = rng.normal(size=(2, WIDTH, case.config.taps_width)).astype(np.float32)
    return case, train.Sequences(jnp.asarray(tokens), jnp.asarray(taps), jnp.array([6, 9]), jnp.array([27, 14]))


def drafted(reference, case, batch, b, at):
    """The reference's lattice for the block whose anchor stands at a position, from a cache filled with what is before.

    Returns (U [q, v], gate [q, r], cand [q, a], unary [q, a], S [q, a, a], rho [q]).
    """
    cfg = case.cfg
    cache = reference.DraftCache(cfg, cfg.window - 1)
    reference.commit_context(case.weights, cfg, cache, np.asarray(batch.taps[b, :at], np.float64), 0, at)
    anchor = int(batch.tokens[b, at])
    hidden = reference.draft_hidden(case.weights, cfg, case.embed, cache, anchor, at)
    logits = reference.draft_logits(cfg, case.head, hidden)
    gate = hidden[1:] @ case.weights["candidate_selector.hidden_projection.weight"].T
    cand, scores, rho = reference.selector_lattice(case.weights, cfg, hidden, logits, anchor)
    return logits, gate, cand, reference.top_k(logits, cfg.top_k)[1], scores, rho


def test_losses_equal_the_definition(reference, texts):
    """Summed position by position over blocks that the reference drafts: mask, labels, decay, both losses, metrics."""
    case, batch = texts
    before_code, after_code = (case.weights[f"candidate_selector.{name}_codebook"]
                               for name in ("predecessor", "successor"))
    weights, sums, hits, counted = train.decay_weights(case.config), np.zeros(4), np.zeros(4), 0
    for b, at in zip(*np.nonzero(REAL), strict=True):
        anchor, length = int(ANCHORS[b, at]), int(batch.length[b])
        logits, gate, cand, unary, *_ = drafted(reference, case, batch, b, anchor)
        straight = base_straight = True
        for k in range(min(case.config.depth, length - 1 - anchor)):
            before, label = np.asarray(batch.tokens[b, anchor + k:anchor + k + 2])
            scores = unary[k] + (before_code[before] * gate[k]) @ after_code[cand[k]].T
            sums[:2] += weights[k] * (reference.lse(logits[k]) - logits[k, label]), weights[k]
            if label in cand[k]:
                sums[2:] += weights[k] * (reference.lse(scores) - scores[list(cand[k]).index(label)]), weights[k]
            straight &= bool(cand[k][np.argmax(scores)] == label)
            base_straight &= bool(cand[k][0] == label)
            hits += straight, base_straight, label in cand[k], cand[k][0] == label
            counted += 1
    want = [sums[0] / sums[1], sums[2] / sums[3], *(1 + hits[:2] / REAL.sum()), *(hits[2:] / counted)]
    run = jax.jit(partial(train.losses_at, config=case.config, policy=EXACT))
    total, metrics = run(case.params, case.borrowed, batch, ANCHORS, REAL)
    np.testing.assert_allclose([float(x) for x in metrics], want, atol=2e-4)
    assert float(total) == pytest.approx(want[0] + want[1], abs=4e-4)


def test_what_a_block_does_not_see_changes_nothing(texts):
    """Its anchor's own taps and later ones, other blocks, and whatever follows the end of the text."""
    case, batch = texts
    run = jax.jit(lambda batch, anchors, real: train.losses_at(
        case.params, case.borrowed, batch, anchors, real, config=case.config, policy=EXACT)[0])
    anchors, real = jnp.full((2, 3), 13), jnp.array([[True, False, False], [False] * 3])
    want = run(batch, anchors, real)
    assert run(batch._replace(taps=batch.taps.at[0, 13:].set(7.0)), anchors, real) == want
    assert run(batch._replace(taps=batch.taps.at[1].set(7.0)), anchors, real) == want
    assert run(batch, anchors.at[0, 1].set(6), real) == want
    tail = batch._replace(tokens=batch.tokens.at[0, 21:].set(1))  # behind the block, which ends at 20
    assert run(tail, anchors, real) == want
    assert run(batch._replace(taps=batch.taps.at[0, 12].set(7.0)), anchors, real) != want
    assert run(batch._replace(taps=batch.taps.at[0, 13 - case.config.sliding_window].set(7.0)), anchors, real) == want


def test_gradients_reach_all_parameters(texts):
    case, batch = texts
    run = partial(train.loss, config=case.config, policy=EXACT, anchors=3, remat=True)
    grads = jax.jit(jax.grad(lambda p: run(p, case.borrowed, batch, jax.random.key(1))[0]))(case.params)
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(g).all() and np.abs(g).max() > 0, path


def test_anchors():
    draw = jax.jit(partial(train.choose_anchors, width=40, count=8))
    for seed in range(20):
        at, real = draw(jax.random.key(seed), 5, 38)
        assert real.all() and len(set(at.tolist())) == 8 and at.min() >= 5 and at.max() <= 36
    at, real = draw(jax.random.key(0), 5, 9)
    assert sorted(at[real].tolist()) == [5, 6, 7]
    assert not draw(jax.random.key(0), 9, 9)[1].any()


def test_decay_weights(make_case):
    config = make_case(block=8).config
    assert np.allclose(train.decay_weights(config), np.exp(-np.arange(7) / 4))
    assert np.allclose(train.decay_weights(config, 2.0), np.exp(-np.arange(7) / 2))


def test_emitted_lengths_and_their_pool(reference, texts):
    """Counts equal what the reference accepts of its own chain and tree, given the text."""
    case, batch = texts
    tokens = np.asarray(batch.tokens).copy()
    for at in (7, 15):  # text 0 goes on as the chain drafted after these anchors says, so that some counts are long
        _, _, cand, _, scores, _ = drafted(reference, case, batch, 0, at)
        tokens[0, at + 1:at + 5] = reference.greedy_walk(cand, scores)[:4]
        batch = batch._replace(tokens=jnp.asarray(tokens))
    run = jax.jit(partial(train.emitted_lengths, config=case.config, policy=EXACT, new=22))
    got = [np.asarray(x) for x in run(case.params, case.borrowed, batch)]
    assert got[0].shape == got[1].shape == (2, 22) and got[0][0, 1] == 5
    for b in range(2):
        prompt, length = int(batch.prompt[b]), int(batch.length[b])
        for at in range(prompt, prompt + 22):
            left = max(length - 1 - at, 0)
            if not left:
                assert got[0][b, at - prompt] == got[1][b, at - prompt] == 0
                continue
            _, _, cand, _, scores, rho = drafted(reference, case, batch, b, at)
            text = np.concatenate([tokens[b, :length], np.full(30, -1)])  # nothing matches behind its end
            trees = (reference.chain_tree(tokens[b, at], reference.greedy_walk(cand, scores)),
                     reference.build_tree(tokens[b, at], cand, reference.lattice_logp(scores, rho), 16))
            for counts, tree in zip(got, trees, strict=True):
                assert counts[b, at - prompt] == min(reference.accept(tree, text[at + tree.depth + 1])[3], left)
    assert train.pooled_length(np.array([[2, 9, 1, 3, 9, 9]]), [10], [17]) == (6, 3)  # anchors at 10, 12, 13: 2 + 1 + 3

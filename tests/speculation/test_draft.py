"""The draft pass against the NumPy reference over cached steps, and faults that this comparison must catch."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from musejax.numerics import CANON, CANON_F32_PROBS, EXACT
from musejax.speculation import draft as dr

CROPS = (1, 4, 8, 2, 7, 3)  # rows committed before each draft after the first


def features(case, rows, rng):
    """Residual streams [layers + 1, rows, d] of a target, and the taps that the reference takes of them."""
    streams = rng.normal(size=(max(case.cfg.taps) + 2, rows, case.cfg.hidden)).astype(np.float32)
    return streams, np.concatenate([streams[i + 1] for i in case.cfg.taps], -1).astype(np.float64)


def steps_of(reference, case, prompt=9, crops=CROPS, seed=7):
    """Events of a drafter, (streams, start, count, anchor), and the reference after it: (hidden, U, cand, S, rho).

    Every commit carries rows beyond its count, as a tree pass does.
    """
    cfg, rng = case.cfg, np.random.default_rng(seed)
    cache = reference.DraftCache(cfg, cfg.window - 1)
    start, out = 0, []
    for count in (prompt, *crops):
        streams, taps = features(case, max(count, cfg.block) + 1, rng)
        reference.commit_context(case.weights, cfg, cache, taps, start, count)
        anchor = int(rng.integers(cfg.vocab))
        hidden = reference.draft_hidden(case.weights, cfg, case.embed, cache, anchor, start + count)
        logits = reference.draft_logits(cfg, case.head, hidden)
        lattice = reference.selector_lattice(case.weights, cfg, hidden, logits, anchor)
        out.append(((streams, start, count, anchor), (hidden, logits, *lattice)))
        start += count
    return out


def largest_difference(case, steps, policy=EXACT, jit=False, max_length=None) -> float:
    """Between musejax and the reference over all steps; inf where candidates or their order differ."""
    config = case.config
    dtype = jnp.float32 if policy == EXACT else jnp.bfloat16
    cache = dr.init_cache(config, dtype, max_length)
    static = dict(config=config, policy=policy)

    def one(cache, streams, start, count, anchor):
        taps = dr.join_taps(streams, config)
        cache = dr.commit_context(case.params, cache, taps, start, count, **static)
        hidden = dr.draft_hidden(case.params, case.borrowed, cache, anchor, **static)
        unary = dr.unary_logits(case.borrowed, hidden, **static)
        return cache, hidden, unary, dr.lattice(case.params, hidden, unary, anchor, **static)

    run, worst = jax.jit(one) if jit else one, 0.0
    for given, (hidden, logits, cand, scores, rho) in steps:
        cache, *got, lattice = run(cache, *given)
        assert int(cache.length) == given[1] + given[2]
        for a, b in zip(got, (hidden, logits), strict=True):
            worst = max(worst, np.abs(np.asarray(a, np.float64) - b).max())
        if not np.array_equal(lattice.tokens, cand):
            return np.inf
        for a, b in ((lattice.scores, scores), (lattice.coverage, rho)):
            worst = max(worst, np.abs(np.asarray(a, np.float64) - b).max())
    return worst


@pytest.mark.parametrize("fields", [
    {}, {"window": 5, "emb_scale": 2.0, "softcap": 0.0}, {"block": 16, "window": 40, "top_k": 16},
    {"layers": 1, "taps": (3, 0), "kv_heads": 4, "conv_group": 8},
], ids=["window bites", "window below the block", "wide block", "other groups"])
def test_equals_the_reference_over_cached_steps(reference, make_case, fields):
    case = make_case(**fields)
    assert largest_difference(case, steps_of(reference, case), jit=True) < 1e-4


def test_the_slots_of_the_cache_do_not_matter(reference, make_case):
    case = make_case()
    steps = steps_of(reference, case)
    for slots in (case.cfg.window - 1, case.cfg.window):
        assert largest_difference(case, steps, max_length=slots) < 1e-4
    assert largest_difference(case, steps, max_length=case.cfg.window - 2) > 1e-2


def test_long_prompt_in_one_call_or_only_its_end(reference, make_case):
    """More rows than slots; and priming with the last window - 1 rows gives the same drafts."""
    case = make_case()
    (streams, start, count, anchor), _ = steps_of(reference, case, prompt=40, crops=())[0]
    static = dict(config=case.config, policy=EXACT)
    taps = dr.join_taps(jnp.asarray(streams), case.config)
    cache = dr.commit_context(case.params, dr.init_cache(case.config, jnp.float32), taps, start, count, **static)
    last = case.cfg.window - 1
    part = dr.commit_context(case.params, dr.init_cache(case.config, jnp.float32), taps[count - last:], count - last,
                             last, **static)
    one, two = (dr.draft_hidden(case.params, case.borrowed, c, anchor, **static) for c in (cache, part))
    assert np.abs(one - two).max() < 1e-5
    assert largest_difference(case, steps_of(reference, case, prompt=40, crops=(3,))) < 1e-4


# ------------------------------------------------------------------ faults


def _patch(monkeypatch, name, make):
    monkeypatch.setattr(dr, name, make(getattr(dr, name)))


def _normed_embeddings(original):
    def wrong(params, borrowed, anchor, config, policy):
        return dr.rms(original(params, borrowed, anchor, config, policy), config.rms_norm_eps)
    return wrong


def _crossing(original):
    def wrong(x, delta, base, policy):
        out = original(x, delta, base, policy)
        group = x.shape[1] // delta.shape[2]
        return out.at[0].add((base[1] + jnp.repeat(delta[0, 1], group)) * x[-1])
    return wrong


def _delta_of_the_row_before(original):
    def wrong(x, delta, base, policy):
        return original(x, jnp.concatenate([delta[:1], delta[:-1]]), base, policy)
    return wrong


def _late_multiplier(original):
    def wrong(params, hidden, unary, anchor, *, config, policy):
        cap = config.final_logit_softcapping
        raw = jnp.arctanh(unary / cap) * cap / config.output_multiplier
        made = original(params, hidden, raw, anchor, config=config, policy=policy)
        return made._replace(scores=cap * jnp.tanh(made.scores * config.output_multiplier / cap))
    return wrong


def _all_rows(original):
    def wrong(params, cache, taps, start, count, **static):
        return original(params, cache, taps, start, taps.shape[0], **static)._replace(length=start + count)
    return wrong


def _centred(original):
    return lambda x, weight, config: original(x, 1 + weight, config)


def _causal(original):
    def wrong(q, parts, policy):
        (*context, seen), (k, v, near) = parts
        return original(q, [(*context, seen), (k, v, near & jnp.tri(*near.shape, dtype=bool))], policy)
    return wrong


def _shifted(original):
    def wrong(borrowed, hidden, **static):
        return original(borrowed, jnp.concatenate([hidden[:1], hidden[:-1]]), **static)
    return wrong


def _higher_id_first(original):
    def wrong(logits, count):
        values, ids = original(logits[:, ::-1], count)
        return values, logits.shape[1] - 1 - ids
    return wrong


FAULTS = {
    "taps in another order": lambda c: replace(c, target_layer_ids=c.target_layer_ids[::-1]),
    "taps of the layer before": lambda c: replace(c, target_layer_ids=(2, 0, 1)),
    "rotation of neighbours": lambda c: replace(c, rope_half=False),
    "window one too wide": lambda c: replace(c, sliding_window=c.sliding_window + 1),
    "window one too narrow": lambda c: replace(c, sliding_window=c.sliding_window - 1),
    "embeddings scaled": lambda c: replace(c, input_embedding_scale=2.0),
    "norm on embeddings": ("block_input", _normed_embeddings),
    "convolution crosses the block start": ("two_taps", _crossing),
    "coefficients of the row before": ("two_taps", _delta_of_the_row_before),
    "multiplier after the bilinear term": ("lattice", _late_multiplier),
    "rows beyond the count committed": ("commit_context", _all_rows),
    "gains one too large": ("norm", _centred),
    "causal block": ("attend", _causal),
    "rows predict the next position": ("unary_logits", _shifted),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(reference, make_case, monkeypatch, fault):
    case = make_case(layers=1)
    steps = steps_of(reference, case, crops=(4, 5))
    change = FAULTS[fault]
    if callable(change):
        case.config = change(case.config)
    else:
        _patch(monkeypatch, *change)
    assert largest_difference(case, steps) > 1e-2


def test_equal_logits_rank_by_lower_id(reference, make_case, monkeypatch):
    case = make_case()
    twin = np.arange(case.cfg.vocab) % 40  # tokens 0 to 39 twice, some three times
    case.head = case.head[twin]
    case.borrowed = case.borrowed._replace(lm_head=jnp.asarray(case.head, jnp.float32)[None])
    steps = steps_of(reference, case, crops=(4,))
    assert largest_difference(case, steps) < 1e-4
    _patch(monkeypatch, "ranked", _higher_id_first)
    assert largest_difference(case, steps) == np.inf


def test_ranking_of_special_values():
    x = jnp.array([[0.0, -0.0, jnp.nan, 1.0, -jnp.inf, -0.0, 0.0]])
    values, ids = dr.ranked(x, 7)
    assert ids.tolist() == [[3, 0, 1, 5, 6, 2, 4]] and values[0, 5] == -jnp.inf
    assert dr.ranked(-x, 4)[1].tolist() == [[4, 0, 1, 5]]


# ------------------------------------------------------------------ rounding policies


@pytest.mark.parametrize("policy", [CANON, CANON_F32_PROBS], ids=["canon", "float32 probabilities"])
def test_rounded_policies_stay_close_and_round(make_case, policy):
    case = make_case()
    rng = np.random.default_rng(3)
    streams, _ = features(case, 12, rng)
    taps = dr.join_taps(jnp.asarray(streams), case.config)

    def run(policy, dtype):
        static = dict(config=case.config, policy=policy)
        cache = dr.commit_context(case.params, dr.init_cache(case.config, dtype), taps, 0, 12, **static)
        return cache, dr.draft_hidden(case.params, case.borrowed, cache, 5, **static)

    (_, want), (cache, got) = run(EXACT, jnp.float32), run(policy, jnp.bfloat16)
    assert 1e-4 < np.abs(got - want).max() < 0.25  # a unit in the last place of values about 2 is 0.016
    assert np.array_equal(got, got.astype(jnp.bfloat16).astype(jnp.float32))
    wide, _ = run(policy, jnp.float32)  # rows are rounded before they are stored: bfloat16 loses nothing
    assert np.array_equal(wide.keys, cache.keys.astype(jnp.float32))
    assert np.array_equal(wide.values, cache.values.astype(jnp.float32))


def test_every_rounding_point_is_used(make_case, monkeypatch):
    case, seen = make_case(), set()
    original = dr.at_point

    def noted(policy, point, x):
        seen.add(point)
        return original(policy, point, x)

    monkeypatch.setattr(dr, "at_point", noted)
    static = dict(config=case.config, policy=CANON)
    taps = jnp.ones((2, case.config.taps_width))
    cache = jax.eval_shape(partial(dr.commit_context, **static), case.params, dr.init_cache(case.config), taps, 0, 2)
    jax.eval_shape(partial(dr.draft, **static), case.params, case.borrowed, cache, 1)
    assert seen == set(dr.DRAFT_POINTS)
    with pytest.raises(KeyError, match="rounding point"):
        original(CANON, "elsewhere", taps)


# ------------------------------------------------------------------ variants


def test_dflash1_is_dflash2_with_neutral_additions(make_case):
    """Convolutions at identity and a successor codebook of zeros leave the plain body, and S = U."""
    case = make_case(layers=1)
    plain = replace(case.config, conv_kernel_size=None, conv_group_size=None, selector_rank=None, selector_top_k=None)
    def without_effect(name, x):
        if name in ("attention_conv", "mlp_conv"):
            return jnp.zeros_like(x).at[:, 0].set(1)
        return jnp.zeros_like(x) if name.endswith("conv_proj") else x

    layers = [{name: without_effect(name, x) for name, x in p.items()} for p in case.params["layers"]]
    neutral = {**case.params, "successor": jnp.zeros_like(case.params["successor"]), "layers": layers}
    taps = jnp.asarray(np.random.default_rng(1).normal(size=(6, plain.taps_width)), jnp.float32)
    made = []
    for config, params in ((replace(case.config, selector_top_k=16), neutral), (plain, case.params)):
        cache = dr.commit_context(params, dr.init_cache(config, jnp.float32), taps, 0, 6, config=config, policy=EXACT)
        made.append(dr.draft(params, case.borrowed, cache, 3, config=config, policy=EXACT))
    assert np.array_equal(made[0].tokens, made[1].tokens)
    for a, b in zip(made[0], made[1], strict=True):
        assert np.abs(a - b).max() < 1e-5
    assert np.array_equal(made[1].scores[:, 0], made[1].scores[:, 7])


def test_own_embedding_head_and_mask_vector_win(make_case):
    case = make_case()
    target = {"embed": case.borrowed.embed, "lm_head": case.borrowed.lm_head}
    assert dr.borrow(case.params, target).embed is target["embed"]
    own = {**case.params, "lm_head": case.borrowed.lm_head[0] + 1}
    borrowed = dr.borrow(own, target)
    assert borrowed.lm_head.shape == (1, *own["lm_head"].shape) and borrowed.embed is target["embed"]
    vector = jnp.arange(case.cfg.hidden, dtype=jnp.float32)
    x = dr.block_input({**own, "mask_embedding": vector}, borrowed, 7, case.config, EXACT)
    assert np.array_equal(x[0], case.embed[7].astype(np.float32)) and np.array_equal(x[1], vector)
    assert np.array_equal(x[1:], np.broadcast_to(vector, x[1:].shape))


def test_sliced_embedding_and_head_give_the_same(make_case):
    """The target's table form of 8 slices holds the same rows."""
    case = make_case(vocab=96, mask_id=95)
    v, d = case.embed.shape
    sliced = dr.Borrowed(case.borrowed.embed[0].reshape(v, 8, d // 8).swapaxes(0, 1),
                         case.borrowed.lm_head[0].reshape(8, v // 8, d))
    static = dict(config=case.config, policy=EXACT)
    cache = dr.init_cache(case.config, jnp.float32)
    one, two = (dr.draft(case.params, b, cache, 4, **static) for b in (case.borrowed, sliced))
    assert np.array_equal(one.tokens, two.tokens) and np.abs(one.scores - two.scores).max() < 1e-4


def test_ids_beyond_the_tokenizer_are_no_candidates(make_case):
    case = make_case()
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(case.cfg.block, case.cfg.hidden)), jnp.float32)
    static = dict(config=case.config, policy=EXACT)
    unary = dr.unary_logits(case.borrowed, hidden, num_tokens=30, **static)
    made = dr.lattice(case.params, hidden, unary, 1, **static)
    assert made.tokens.max() < 30 and np.isfinite(made.scores).all() and (made.coverage <= 0).all()


def test_greedy_chain(reference, make_case):
    case = make_case()
    for (_, _, _, anchor), (_, _, cand, scores, rho) in steps_of(reference, case):
        made = dr.Lattice(jnp.asarray(cand, jnp.int32), jnp.asarray(scores, jnp.float32), jnp.asarray(rho, jnp.float32))
        assert dr.greedy_chain(made).tolist() == reference.greedy_walk(cand, scores).tolist(), anchor
    tied = dr.Lattice(jnp.array([[5, 3], [2, 9]]), jnp.zeros((2, 2, 2)), jnp.zeros(2))
    assert dr.greedy_chain(tied).tolist() == [5, 2]


def test_a_rejected_block_leaves_the_ring_as_it_was(make_case):
    """Beyond the window, commits of one row each: the cache equals one primed from scratch (section 10, trap 12)."""
    case = make_case()
    static = dict(config=case.config, policy=EXACT)
    rng = np.random.default_rng(2)
    rows = jnp.asarray(rng.normal(size=(40, case.config.taps_width)), jnp.float32)
    commit = jax.jit(partial(dr.commit_context, **static))
    cache = commit(case.params, dr.init_cache(case.config, jnp.float32), rows[:35], 0, 35)
    for i in range(35, 40):
        noise = jnp.asarray(rng.normal(size=(15, case.config.taps_width)), jnp.float32)
        cache = commit(case.params, cache, jnp.concatenate([rows[i:i + 1], noise]), cache.length, 1)
    fresh = commit(case.params, dr.init_cache(case.config, jnp.float32), rows, 0, 40)
    assert np.abs(cache.keys - fresh.keys).max() < 1e-5 and int(cache.length) == int(fresh.length) == 40

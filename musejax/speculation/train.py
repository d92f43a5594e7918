"""Training objective of a DFlash drafter (dflash2.md section 7), and how long its guesses would be.

Target, embedding and LM head are frozen. A block is trained through the very functions that draft with it: it sees
context rows before its anchor only, in the window, and all of itself. No optimiser here; scripts/train_nano_drafter.py
has one.

Axis letters besides those of config.py: b sequences, m anchors (blocks) of a sequence.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from musejax.config import DecodeConfig, ModelConfig
from musejax.model.attention import Rows
from musejax.model.forward import embed, run_layers
from musejax.numerics import Policy, einsum_f32
from musejax.speculation import draft as dr
from musejax.speculation.accept import accept
from musejax.speculation.config import DraftConfig
from musejax.speculation.draft import Borrowed, Context
from musejax.speculation.tree import MAX_NODES, build_tree, chain_tree, conditional_logprobs

_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # published decay lengths, by block size


class Sequences(NamedTuple):
    """Prompts with responses that the target itself generated.

    Attributes:
        tokens: int32 [b, p], filled up with any id.
        taps: [b, p, u d], joined taps of the target at every position; bfloat16 loses nothing.
        prompt: int32 [b], tokens that were given.
        length: int32 [b], tokens in all; a sequence without response has length = prompt.
    """

    tokens: jax.Array
    taps: jax.Array
    prompt: jax.Array
    length: jax.Array


class Metrics(NamedTuple):
    """Of one batch, float32 scalars.

    Attributes:
        base, selector: the two losses, nats per weighted position.
        accept: 1 + length of the correct prefix of the selector's choices, each after the true token before; a mean.
        base_accept: the same of the unary logits' choices.
        recall, top1: share of true tokens among the candidates, and on their first place.
    """

    base: jax.Array
    selector: jax.Array
    accept: jax.Array
    base_accept: jax.Array
    recall: jax.Array
    top1: jax.Array


def tapped(target: dict, tokens_t, drafter: DraftConfig, *, config: ModelConfig, decode: DecodeConfig) -> jax.Array:
    """Joined taps of a whole sequence, bfloat16 [t, u d].

    Args:
        target: params in table form.
        drafter: says which layers are tapped.
        config, decode: of the target.
    """
    t = tokens_t.shape[0]
    rows = Rows(jnp.arange(t, dtype=jnp.int32), jnp.int32(t))
    trace = run_layers(target, embed(target, tokens_t, config, decode), None, rows, config, decode, trace=True)[2]
    return dr.join_taps(trace.streams, drafter).astype(jnp.bfloat16)


def decay_weights(config: DraftConfig, gamma: float | None = None) -> np.ndarray:
    """Weight of each drafted position in the losses, float32 [q]: exp(-i / gamma).

    Args:
        gamma: None takes the published value for this block size, or in between.
    """
    gamma = gamma or _GAMMA.get(config.block_size) or config.block_size * 7 / 16
    return np.exp(-np.arange(config.depth) / gamma).astype(np.float32)


def choose_anchors(key, prompt, length, width: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Response positions with a token after them, drawn without replacement -> (int32 [m], bool [m]: a real one).

    Blocks may reach past the end of the text; labels there do not count.

    Args:
        prompt, length: int32 [], of one sequence, of `width` places.
        count: static, at most width.
    """
    place = jnp.arange(width)
    usable = (place >= prompt) & (place < length - 1)
    score, anchors = lax.top_k(jnp.where(usable, jax.random.uniform(key, (width,)), -1.0), count)
    return anchors.astype(jnp.int32), score >= 0


class _Terms(NamedTuple):
    """Of one block, [q] each: losses and hits per drafted position, and which of them count."""

    base: jax.Array
    selector: jax.Array
    base_hit: jax.Array
    selector_hit: jax.Array
    in_candidates: jax.Array
    counts: jax.Array


def _block_terms(params, borrowed: Borrowed, context: Context, tokens_p, length, anchor_at, *, config: DraftConfig,
                 policy: Policy, num_tokens: int | None) -> _Terms:
    """Loss terms of the block whose anchor stands at `anchor_at` (section 7)."""
    positions = jnp.where(context.positions < anchor_at, context.positions, -1)  # the anchor's own row is not seen
    x = dr.block_input(params, borrowed, tokens_p[anchor_at], config, policy)
    hidden = dr.run_block(params, x, context._replace(positions=positions), anchor_at, config=config, policy=policy)
    unary = dr.unary_logits(borrowed, hidden, config=config, policy=policy, num_tokens=num_tokens)
    place = anchor_at + 1 + jnp.arange(config.depth)
    before, labels = (tokens_p[jnp.minimum(at, tokens_p.shape[0] - 1)] for at in (place - 1, place))
    base = jax.nn.logsumexp(unary, -1) - jnp.take_along_axis(unary, labels[:, None], -1)[:, 0]
    candidates = dr.ranked(lax.stop_gradient(unary), config.candidates)[1]
    scores = jnp.take_along_axis(unary, candidates, -1)  # [q, a]
    if config.has_selector:
        gate = dr.linear(hidden[1:], params["selector"], policy)
        gated = params["predecessor"][before].astype(jnp.float32) * gate
        scores = scores + einsum_f32("qr,qar->qa", gated, params["successor"][candidates])
    is_label = candidates == labels[:, None]
    inside = is_label.any(-1)
    selector = jax.nn.logsumexp(scores, -1) - jnp.where(is_label, scores, 0.0).sum(-1)
    chosen = jnp.take_along_axis(is_label, jnp.argmax(scores, -1)[:, None], -1)[:, 0]
    return _Terms(base, jnp.where(inside, selector, 0.0), is_label[:, 0], chosen, inside, place < length)


def losses_at(params: dict, borrowed: Borrowed, batch: Sequences, anchors_bm, real_bm, *, config: DraftConfig,
              policy: Policy, gamma: float | None = None, num_tokens: int | None = None,
              remat: bool = False) -> tuple[jax.Array, Metrics]:
    """Base loss plus selector loss (section 7) of the blocks with these anchors; differentiable in params.

    Args:
        anchors_bm: int32 [b, m], positions.
        real_bm: bool [b, m]; the others do not count.
        config, policy, gamma, num_tokens: static.
        remat: static; recompute blocks in the backward pass instead of keeping their activations.
    """
    terms_of = partial(_block_terms, config=config, policy=policy, num_tokens=num_tokens)
    terms_of = jax.checkpoint(terms_of) if remat else terms_of

    def one(tokens, taps, length, anchors, real):
        place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        context = Context(*dr.context_rows(params, taps, place, config=config, policy=policy), place)
        terms = jax.vmap(lambda at: terms_of(params, borrowed, context, tokens, length, at))(anchors)
        return terms._replace(counts=terms.counts & real[:, None])

    terms = jax.vmap(one)(batch.tokens, batch.taps, batch.length, anchors_bm, real_bm)  # [b, m, q]
    weights = jnp.asarray(decay_weights(config, gamma)) * terms.counts
    inside = weights * terms.in_candidates
    base = (weights * terms.base).sum() / (weights.sum() + 1e-6)
    selector = (inside * terms.selector).sum() / (inside.sum() + 1e-6)
    blocks, tokens = jnp.maximum(terms.counts[..., 0].sum(), 1), jnp.maximum(terms.counts.sum(), 1)

    def prefix(hit):
        return 1 + jnp.cumprod(hit & terms.counts, -1).sum() / blocks

    recall, top1 = ((hit & terms.counts).sum() / tokens for hit in (terms.in_candidates, terms.base_hit))
    return base + selector, Metrics(base, selector, prefix(terms.selector_hit), prefix(terms.base_hit), recall, top1)


def loss(params: dict, borrowed: Borrowed, batch: Sequences, key, *, anchors: int,
         **static) -> tuple[jax.Array, Metrics]:
    """`losses_at` up to `anchors` random blocks of each sequence; `key` decides which."""
    width, keys = batch.tokens.shape[1], jax.random.split(key, batch.tokens.shape[0])
    draw = partial(choose_anchors, width=width, count=anchors)
    return losses_at(params, borrowed, batch, *jax.vmap(draw)(keys, batch.prompt, batch.length), **static)


# ------------------------------------------------------------------ how long guesses would be


def emitted_lengths(params: dict, borrowed: Borrowed, sequences: Sequences, *, config: DraftConfig, policy: Policy,
                    new: int, num_tokens: int | None = None, tau: float = 1.0,
                    nodes: int = MAX_NODES) -> tuple[jax.Array, jax.Array]:
    """Tokens that a step would emit with its anchor at each response position -> (chain, tree), int32 [b, new] each.

    The target's own greedy text is its choice after every confirmed prefix, so this is what decoding would do, but for
    roundings of the target. Entry i of a sequence has its anchor at prompt + i; 0 where no token follows.

    Args:
        config, policy, new, num_tokens, nodes: static.
        tau: see `tree.conditional_logprobs`.
    """
    width = sequences.tokens.shape[1]

    def one(sequence):
        tokens, taps, prompt, length = sequence
        place = jnp.arange(width, dtype=jnp.int32)
        tokens = jnp.where(place < length, tokens, -1)
        context = Context(*dr.context_rows(params, taps, place, config=config, policy=policy), place)

        def at(anchor_at):
            anchor = tokens[jnp.minimum(anchor_at, width - 1)]
            x = dr.block_input(params, borrowed, jnp.maximum(anchor, 0), config, policy)
            seen = context._replace(positions=jnp.where(place < anchor_at, place, -1))
            hidden = dr.run_block(params, x, seen, anchor_at, config=config, policy=policy)
            unary = dr.unary_logits(borrowed, hidden, config=config, policy=policy, num_tokens=num_tokens)
            lattice = dr.lattice(params, hidden, unary, anchor, config=config, policy=policy)
            trees = (chain_tree(anchor, dr.greedy_chain(lattice), nodes),
                     build_tree(anchor, lattice.tokens, conditional_logprobs(lattice, tau), nodes=nodes))
            left = jnp.maximum(length - 1 - anchor_at, 0)

            def count(tree):
                after = anchor_at + tree.depth + 1
                choices = jnp.where(after < length, tokens[jnp.minimum(after, width - 1)], -1)
                return jnp.minimum(accept(tree, choices).count, left)

            return tuple(map(count, trees))

        return jax.vmap(at)(prompt + jnp.arange(new, dtype=jnp.int32))

    return lax.map(one, sequences)


def pooled_length(counts, prompt, length) -> tuple[int, int]:
    """(tokens emitted, passes) of decoding all sequences one after the other, each from its first response token.

    Args:
        counts: int [b, new] of `emitted_lengths`; the first response token is the prefill's and not counted.
        prompt, length: int [b].
    """
    emitted = passes = 0
    for row, start, end in zip(np.asarray(counts), np.asarray(prompt), np.asarray(length), strict=True):
        at = int(start)
        while at < min(int(end) - 1, int(start) + len(row)):
            at += int(row[at - start])
            passes += 1
        emitted += max(at - int(start), 0)
    return emitted, passes

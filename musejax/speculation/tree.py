"""From a candidate lattice to a verification tree: the likeliest prefixes, best first (dflash2.md section 4.2).

Node 0 is the anchor. Nodes come out in the order in which they were taken, so a parent stands before its children,
valid nodes stand before padding, and (but for a forced spine) no node is likelier than the one before it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from musejax.config import ConfigError
from musejax.speculation.draft import Lattice

MAX_NODES = 16
"""Rows of one verification pass (kernels/cache.py MAX_ROWS)."""

_CLOSED = -1e30
"""Score of a child that cannot be taken; what is not above half of it counts as closed, as do NaN and -inf."""


class Tree(NamedTuple):
    """A tree of guesses after the committed positions; n nodes.

    Attributes:
        tokens: int32 [n], the anchor first; 0 in padding.
        parents: int32 [n], index of the parent, lower than the node's own; -1 for the root and in padding.
        depth: int32 [n], ancestors of the node, 0 for the root and in padding; a node's position is P + depth.
        valid: bool [n], False in padding, which comes last.
        ancestors: uint32 [n], bit j is set if node j is the node itself or one of its ancestors.
        cum: float32 [n], log-probability of the path to the node; 0 for the root and in padding.
    """

    tokens: jax.Array
    parents: jax.Array
    depth: jax.Array
    valid: jax.Array
    ancestors: jax.Array
    cum: jax.Array

    @property
    def num_valid(self) -> jax.Array:
        """int32 []."""
        return self.valid.sum(dtype=jnp.int32)


def conditional_logprobs(lattice: Lattice, tau=1.0) -> jax.Array:
    """float32 [q, a, a]: log softmax of S / tau after each predecessor, plus the position's coverage.

    Args:
        tau: above 0; larger makes bushier trees, towards 0 gives the greedy chain.
    """
    return jax.nn.log_softmax(lattice.scores / tau, axis=-1) + lattice.coverage[:, None, None]


def _best_of_row(row_a, width) -> jax.Array:
    """bool [a]: the `width` largest entries, the first of equals.

    By a sort, which sees each value once: where XLA fuses comparisons with what makes the row, an entry may be rounded
    in two ways and stand before itself.
    """
    order = jnp.argsort(row_a, descending=True, stable=True)
    return jnp.zeros(row_a.shape, bool).at[order].set(jnp.arange(row_a.shape[0]) < width)


def build_tree(anchor, tokens_qa, logprobs_qaa, *, nodes: int = MAX_NODES, width=None, spine=0) -> Tree:
    """Takes the likeliest open child, nodes - 1 times.

    Ties go to the lower parent, then to the candidate that stands first. Nodes that the lattice has no child for are
    padding.

    Args:
        anchor: int32 [].
        tokens_qa: int32 [q, a], candidates of each position; q may be smaller than nodes - 1.
        logprobs_qaa: float32 [q, a, a], from `conditional_logprobs`; at position 0 row 0 is used.
        nodes: static, at most 32.
        width: children a node may have, its best ones; None allows all, 1 gives a chain.
        spine: the first so many nodes are each the best child of the one before; the rest goes best first.

    Raises:
        ConfigError: nodes outside 1 to 32.
    """
    if not 1 <= nodes <= 32:
        raise ConfigError(f"nodes: expected 1 to 32 (ancestors are bits of 32), got {nodes}")
    depths, count = tokens_qa.shape
    width = count if width is None else width
    spine = jnp.minimum(spine, depths)
    index = jnp.arange(nodes, dtype=jnp.int32)

    def children(depth, rank, cum):
        """Scores [a] of the children of a node at `depth` that is candidate `rank` there."""
        row = logprobs_qaa[jnp.minimum(depth, depths - 1), rank]
        row = jnp.where(row > _CLOSED / 2, row, _CLOSED)  # NaN and -inf too
        usable = _best_of_row(row, width) & (row > _CLOSED / 2) & (depth < depths)
        return jnp.where(usable, cum + row, _CLOSED)

    def take(n, carry):
        tree, open_na = carry
        last_only = jnp.where((index == n - 1)[:, None], open_na, _CLOSED)
        forced = (n <= spine) & (last_only.max() > _CLOSED / 2)
        view = jnp.where(forced, last_only, open_na).reshape(-1)
        best = jnp.argmax(view).astype(jnp.int32)  # the first of equals
        parent, rank, cum = best // count, best % count, view[best]
        found = cum > _CLOSED / 2
        depth = tree.depth[parent] + 1
        bit = jnp.uint32(1) << n.astype(jnp.uint32)

        def put(array, value, otherwise):
            return array.at[n].set(jnp.where(found, value, otherwise).astype(array.dtype))

        made = Tree(put(tree.tokens, tokens_qa[depth - 1, rank], 0), put(tree.parents, parent, -1),
                    put(tree.depth, depth, 0), tree.valid.at[n].set(found),
                    put(tree.ancestors, tree.ancestors[parent] | bit, bit), put(tree.cum, cum, 0.0))
        open_na = open_na.at[parent, rank].set(_CLOSED)
        return made, open_na.at[n].set(jnp.where(found, children(depth, rank, cum), _CLOSED))

    start = Tree(jnp.zeros(nodes, jnp.int32).at[0].set(anchor), jnp.full(nodes, -1, jnp.int32),
                 jnp.zeros(nodes, jnp.int32), index == 0, jnp.zeros(nodes, jnp.uint32).at[0].set(1),
                 jnp.zeros(nodes, jnp.float32))
    open_na = jnp.full((nodes, count), _CLOSED, jnp.float32).at[0].set(
        children(jnp.int32(0), jnp.int32(0), jnp.float32(0)))
    return lax.fori_loop(1, nodes, take, (start, open_na))[0]


def chain_tree(anchor, tokens_q, nodes: int = MAX_NODES) -> Tree:
    """A chain as a tree: the anchor, then up to nodes - 1 of the tokens; the rest is padding."""
    length = min(tokens_q.shape[0] + 1, nodes)
    index = jnp.arange(nodes, dtype=jnp.int32)
    valid = index < length
    tokens = jnp.zeros(nodes, jnp.int32).at[0].set(anchor).at[1:length].set(tokens_q[:length - 1])
    bits = jnp.uint32(1) << index.astype(jnp.uint32)
    return Tree(tokens, jnp.where(valid, index - 1, -1), jnp.where(valid, index, 0), valid,
                jnp.where(valid, 2 * bits - 1, bits), jnp.zeros(nodes, jnp.float32))


def root_only(anchor, nodes: int = MAX_NODES) -> Tree:
    """The anchor and nothing guessed: decoding without speculation, in the same pass."""
    return chain_tree(anchor, jnp.zeros(0, jnp.int32), nodes)

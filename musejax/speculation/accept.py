"""Which guesses the target confirmed, and what of them is kept (dflash2.md sections 5.3 and 5.5). Integers only."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from musejax.speculation.tree import Tree


class Accepted(NamedTuple):
    """Result of one verification; n nodes.

    Attributes:
        path: int32 [n], the confirmed node at depth r, -1 beyond; path[0] is the root, path[r] >= r.
        count: int32 [], confirmed nodes, the root included (1 to n): rows to commit, and tokens emitted.
        emitted: int32 [n], the confirmed guesses, then the target's own next token; -1 from `count` on.
        anchor: int32 [], the last token emitted, the root of the next step.
    """

    path: jax.Array
    count: jax.Array
    emitted: jax.Array
    anchor: jax.Array


def accept(tree: Tree, choices_n) -> Accepted:
    """The longest path from the root on which every token is what the target chose after its parent.

    Args:
        tree: siblings have distinct tokens.
        choices_n: int32 [n], the target's choice after each node, made as without speculation (greedy, or sampled with
            noise keyed by position: section 5.6). Entries of padding nodes do not matter.
    """
    n = tree.tokens.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    match = (tree.valid & (tree.tokens == choices_n[jnp.maximum(tree.parents, 0)])) | (index == 0)
    bits = jnp.where(match, jnp.uint32(1) << index.astype(jnp.uint32), 0).sum(dtype=jnp.uint32)
    on = (tree.ancestors & ~bits) == 0  # the node and all its ancestors
    count = on.sum(dtype=jnp.int32)
    path = jnp.full(n, -1, jnp.int32).at[jnp.where(on, tree.depth, n)].set(index, mode="drop")
    emitted = jnp.where(index < count, choices_n[jnp.maximum(path, 0)], -1).astype(jnp.int32)
    return Accepted(path, count, emitted, emitted[count - 1])


def truncate(emitted_n, count, stop_ids, room) -> tuple[jax.Array, jax.Array]:
    """Stop rules for the tokens of one step -> (kept int32 [], done bool []).

    Tokens up to and with the first stop id are kept, then at most `room` of them.

    Args:
        emitted_n: int32 [n], valid before count.
        stop_ids: int32 [any number], or a tuple of ids.
        room: int32 [], tokens that may still be emitted; done at once if there is none.
    """
    index = jnp.arange(emitted_n.shape[0], dtype=jnp.int32)
    stops = jnp.asarray(stop_ids, jnp.int32).reshape(-1)
    hit = (emitted_n[:, None] == stops).any(-1) & (index < count)
    kept = jnp.where(hit.any(), jnp.argmax(hit).astype(jnp.int32) + 1, count)
    room = jnp.maximum(jnp.asarray(room, jnp.int32), 0)
    done = (hit & (index < room)).any() | (kept >= room)
    return jnp.minimum(kept, room), done

"""One draft pass in plain JAX: context rows from tapped target features, the block, the candidate lattice.

All functions are pure and have fixed shapes, so they can be jitted or traced into a larger step; config and policy are
static. Section numbers are those of dflash2.md. Two kinds of numbers, by the policy (musejax/numerics.py): `exact` is
float32 throughout; a policy that rounds does so at DRAFT_POINTS, the dtypes of the table in section 3. A drafter only
decides which tokens are verified, so no bits are promised here. `draft_kernels` is the same pass through the compiled
kernels, with bits promised; this one trains drafters and runs where the kernels do not.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from musejax.cache import slot_positions
from musejax.config import ConfigError
from musejax.model.attention import project
from musejax.model.norms import rms
from musejax.model.rope import angles, rotate
from musejax.numerics import EXACT, Policy, einsum_f32, round_bf16
from musejax.speculation.config import DraftConfig

DRAFT_POINTS = {
    "taps": "tapped residual streams of the target",
    "fc": "projection of the joined taps",
    "embed": "table row times input_embedding_scale",
    "norm": "output of a norm over the width (hidden_norm, input_norm, post_norm, norm)",
    "conv": "output of a convolution; coefficients, products and their sum are float32",
    "v": "v projection",
    "qk": "q and k after projection, head norm and rotation: one rounding for all three",
    "attention_probs": "exp(score - largest), only where the policy keeps probabilities in bfloat16",
    "attention": "attention output of one head, after the division",
    "o_proj": "attention output projection",
    "swiglu": "silu(gate) * up, from float32 accumulators",
    "down": "down projection",
    "residual": "residual stream after an addition",
}
"""Where a policy that rounds does so (section 3). Unary logits, selector gate, scores and coverage stay float32."""


def at_point(policy: Policy, point: str, x: jax.Array) -> jax.Array:
    """x, rounded to bfloat16 if the policy rounds. Raises KeyError for an unknown point."""
    if point not in DRAFT_POINTS:
        raise KeyError(f"rounding point: expected one of {', '.join(DRAFT_POINTS)}, got {point!r}")
    return round_bf16(x) if policy.rounds else x


# ------------------------------------------------------------------ what is borrowed, what is kept


class Borrowed(NamedTuple):
    """Embedding and LM head in the target's table form (musejax/params.py); a drafter's own have one slice.

    Attributes:
        embed: [s, v, d/s], rows as they are in the file (the target's norm of them is not the drafter's).
        lm_head: [s, v/s, d].
    """

    embed: jax.Array
    lm_head: jax.Array


def borrow(params: dict, target: dict) -> Borrowed:
    """The drafter's own embedding and LM head where its file brought them, else the target's.

    Args:
        params: of the drafter.
        target: with `embed` and `lm_head` in table form; of packed params unpack the head first (packing.unpack_head).
    """
    own = {name: params[name][None] for name in Borrowed._fields if name in params}
    return Borrowed(**{name: own.get(name, target.get(name)) for name in Borrowed._fields})


class DraftCache(NamedTuple):
    """Context keys and values of the committed positions: a ring without position tags.

    Position x lies in slot x mod p. With `length` positions committed, slot s holds the newest position that falls on
    it, or none if that is negative, so `length` alone says what every slot holds, and setting it to 0 clears the cache.
    It holds if the last min(length, sliding_window - 1) positions were all committed; older ones are not seen.

    Attributes:
        keys: [l, p, k, c], after head norm and rotation; bfloat16, or float32 for policy `exact` and on CPUs. For the
            kernels bfloat16 [l, k, p, c] (`draft_kernels.init_cache`).
        values: of the same shape and dtype.
        length: int32 [], positions committed; also the position of the anchor.
    """

    keys: jax.Array
    values: jax.Array
    length: jax.Array


class Context(NamedTuple):
    """What a block may see before itself: keys, values [l, p, k, c], and positions int32 [p], -1 for none."""

    keys: jax.Array
    values: jax.Array
    positions: jax.Array


def init_cache(config: DraftConfig, dtype=jnp.bfloat16, max_length: int | None = None) -> DraftCache:
    """An empty cache: as many slots as the window, or max_length if that is smaller.

    Args:
        dtype: `numerics.storage_dtype(policy, platform)`; bfloat16 or float32.

    Raises:
        ConfigError: max_length is below 1.
    """
    if max_length is not None and max_length < 1:
        raise ConfigError(f"max_length: expected at least 1, got {max_length}")
    slots = min(config.sliding_window, max_length or config.sliding_window)
    shape = (config.num_hidden_layers, slots, config.num_key_value_heads, config.head_dim)
    return DraftCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))


# ------------------------------------------------------------------ parts


def norm(x_td, weight_d, config: DraftConfig) -> jax.Array:
    """rms(x) * weight over the last axis, float32, not rounded; no 1 + weight here, unlike the target's."""
    return rms(x_td, config.rms_norm_eps) * weight_d.astype(jnp.float32)


def linear(x_td, w_nd, policy: Policy) -> jax.Array:
    """x W^T -> float32 [t, n], not rounded."""
    return project(x_td, w_nd[None], policy)


def turn(x_tnc, positions_t, config: DraftConfig, policy: Policy) -> jax.Array:
    """Rotary embedding of all channels (section 2), at rounding point `qk`.

    Neighbour pairs are first brought into two halves, in queries and keys alike, which changes no product of the two.
    """
    if not config.rope_half:
        x_tnc = jnp.concatenate([x_tnc[..., ::2], x_tnc[..., 1::2]], axis=-1)
    turned = rotate(x_tnc, angles(positions_t, config.head_dim, config.rope_theta), EXACT)
    return at_point(policy, "qk", turned)


def two_taps(x_td, delta_tig, base_id, policy: Policy) -> jax.Array:
    """Grouped dynamic convolution (section 1.5a): (base + delta)[tap 0] * own row + (base + delta)[tap 1] * row before.

    Delta is the own row's in both terms; nothing stands before row 0. Float32 [t, d] at rounding point `conv`.
    """
    group = x_td.shape[1] // delta_tig.shape[2]
    coefficients = base_id.astype(jnp.float32) + jnp.repeat(delta_tig, group, axis=2)
    before = jnp.concatenate([jnp.zeros_like(x_td[:1]), x_td[:-1]])
    return at_point(policy, "conv", coefficients[:, 0] * x_td + coefficients[:, 1] * before)


def convolved(p: dict, name: str, x_td, sublayer, config: DraftConfig, policy: Policy) -> jax.Array:
    """sublayer(x) between the two sides of a convolution, whose coefficients both come from x; plain in DFlash 1."""
    if not config.has_conv:
        return sublayer(x_td)
    delta = linear(x_td, p[name + "_proj"], policy).reshape(x_td.shape[0], 2, 2, config.conv_groups)  # [t, o, i, g]
    y = sublayer(two_taps(x_td, delta[:, 0], p[name][0], policy))
    return two_taps(y, delta[:, 1], p[name][1], policy)


def keys_values(p: dict, x_td, positions_t, config: DraftConfig, policy: Policy) -> tuple[jax.Array, jax.Array]:
    """Keys and values [t, k, c] of one layer, for context rows and block rows alike."""
    shape = (x_td.shape[0], config.num_key_value_heads, config.head_dim)
    k, v = (linear(x_td, p[name], policy).reshape(shape) for name in ("k_proj", "v_proj"))
    k = turn(norm(k, p["k_norm"], config), positions_t, config, policy)
    return k, at_point(policy, "v", v)


def attend(q_tnc, parts, policy: Policy) -> jax.Array:
    """Softmax attention over several sets of keys -> float32 [t, n c], at rounding point `attention`.

    Args:
        parts: (keys [p, k, c], values [p, k, c], mask bool [t, p]) of each set. Every row sees at least one key.
    """
    t, n, c = q_tnc.shape
    q = q_tnc.reshape(t, -1, n // parts[0][0].shape[1], c)  # [t, k, group, c]
    scores = [jnp.where(mask, policy.einsum("tkhc,pkc->khtp", q, keys) * jnp.float32(c**-0.5), -jnp.inf)
              for keys, _, mask in parts]
    largest = lax.stop_gradient(jnp.max(jnp.stack([s.max(-1) for s in scores]), axis=0))[..., None]
    total, out = 0.0, 0.0
    for score, (_, values, _) in zip(scores, parts, strict=True):
        probs = jnp.exp(score - largest)
        if policy.probs == "bfloat16":
            probs = at_point(policy, "attention_probs", probs)
            out = out + policy.einsum("khtp,pkc->khtc", probs, values)
        else:
            out = out + einsum_f32("khtp,pkc->khtc", probs, values)
        total = total + probs.sum(-1, keepdims=True)
    return at_point(policy, "attention", (out / total).transpose(2, 0, 1, 3).reshape(t, n * c))


# ------------------------------------------------------------------ context (section 2)


def join_taps(streams_ltd, config: DraftConfig) -> jax.Array:
    """Features of the tapped layers side by side, [t, u d] (dtype as given).

    Args:
        streams_ltd: the target's residual stream after the embedding and after each layer, [L + 1, t, d].
    """
    return jnp.concatenate([streams_ltd[i + 1] for i in config.target_layer_ids], axis=-1)


def context_rows(params: dict, taps_tx, positions_t, *, config: DraftConfig, policy: Policy):
    """Context keys and values of every layer, [l, t, k, c] float32, from joined taps [t, u d] at absolute positions."""
    taps = at_point(policy, "taps", taps_tx.astype(jnp.float32))
    ctx = at_point(policy, "fc", linear(taps, params["fc"], policy))
    ctx = at_point(policy, "norm", norm(ctx, params["hidden_norm"], config))
    rows = [keys_values(p, ctx, positions_t, config, policy) for p in params["layers"]]
    return tuple(map(jnp.stack, zip(*rows, strict=True)))


def commit_context(params: dict, cache: DraftCache, taps_tx, start, count, *, config: DraftConfig,
                   policy: Policy) -> DraftCache:
    """Stores the first `count` rows at positions start, start + 1, ...; the length becomes start + count.

    Args:
        taps_tx: joined taps [t, u d] of consecutive positions: a prefill chunk, or the accepted path of a tree in order
            (`taps[path]`). Rows from count on leave no trace, nor do rows that later ones of this call would overwrite.
        start: int32 [], position of row 0: `cache.length`, or beyond it when a long prompt is primed with its last
            sliding_window - 1 rows only.
        count: int32 [].
    """
    slots, rows = cache.keys.shape[1], jnp.arange(taps_tx.shape[0], dtype=jnp.int32)
    start, count = jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32)
    keys, values = context_rows(params, taps_tx, start + rows, config=config, policy=policy)
    kept = (rows < count) & (rows >= count - slots)
    at = jnp.where(kept, (start + rows) % slots, slots)  # out of range is dropped; -1 would wrap

    def put(store, new):
        return store.at[:, at].set(new.astype(store.dtype), mode="drop", unique_indices=True)

    return DraftCache(put(cache.keys, keys), put(cache.values, values), start + count)


# ------------------------------------------------------------------ the block (section 3, steps 1 to 10)


def block_input(params: dict, borrowed: Borrowed, anchor, config: DraftConfig, policy: Policy) -> jax.Array:
    """Embeddings of [anchor, mask, ..., mask] -> residual stream, float32 [t, d]."""
    ids = jnp.full(config.block_size, config.mask_token_id, jnp.int32).at[0].set(anchor)
    rows = borrowed.embed[:, ids].swapaxes(0, 1).reshape(config.block_size, -1).astype(jnp.float32)
    if "mask_embedding" in params:
        rows = rows.at[1:].set(params["mask_embedding"].astype(jnp.float32))
    return at_point(policy, "embed", rows * jnp.float32(config.input_embedding_scale))


def run_block(params: dict, x_td, context: Context, start, *, config: DraftConfig, policy: Policy) -> jax.Array:
    """All layers and the final norm over one block whose anchor has position `start` -> float32 [t, d].

    A row sees context keys and block keys at distances below the window, in both directions; the block is not causal.
    """
    t, window = x_td.shape[0], config.sliding_window
    positions = jnp.asarray(start, jnp.int32) + jnp.arange(t, dtype=jnp.int32)

    def near(keys_p):
        return jnp.abs(positions[:, None] - keys_p[None]) < window

    seen = near(context.positions) & (context.positions >= 0)
    x = x_td
    for i, p in enumerate(params["layers"]):
        def attention(u, i=i, p=p):
            q = linear(u, p["q_proj"], policy).reshape(t, config.num_attention_heads, config.head_dim)
            q = turn(norm(q, p["q_norm"], config), positions, config, policy)
            k, v = keys_values(p, u, positions, config, policy)
            out = attend(q, [(context.keys[i], context.values[i], seen), (k, v, near(positions))], policy)
            return at_point(policy, "o_proj", linear(out, p["o_proj"], policy))

        def mlp(u, p=p):
            gate, up = (linear(u, p[name], policy) for name in ("gate_proj", "up_proj"))
            act = at_point(policy, "swiglu", jax.nn.silu(gate) * up)
            return at_point(policy, "down", linear(act, p["down_proj"], policy))

        for name, weight, sublayer in (("attention_conv", "input_norm", attention), ("mlp_conv", "post_norm", mlp)):
            n = at_point(policy, "norm", norm(x, p[weight], config))
            x = at_point(policy, "residual", x + convolved(p, name, n, sublayer, config, policy))
    return at_point(policy, "norm", norm(x, params["norm"], config))


def draft_hidden(params: dict, borrowed: Borrowed, cache: DraftCache, anchor, *, config: DraftConfig,
                 policy: Policy) -> jax.Array:
    """The block after the committed positions -> final-normed rows, float32 [t, d]; row 0 is the anchor's.

    Args:
        anchor: int32 [], the newest known token; its position is cache.length, and it has no row in the cache.
    """
    context = Context(cache.keys, cache.values, slot_positions(cache.keys.shape[1], cache.length))
    x = block_input(params, borrowed, anchor, config, policy)
    return run_block(params, x, context, cache.length, config=config, policy=policy)


# ------------------------------------------------------------------ candidates (section 3, steps 11 to 14)


class Lattice(NamedTuple):
    """Candidates of the drafted positions and how likely one follows another.

    Attributes:
        tokens: int32 [q, a], largest unary logit first, ties to the lower id.
        scores: float32 [q, a, a]: scores[i, b, c] is S of candidate c at position i after candidate b of the position
            before; at position 0 the anchor stands before all, and the rows are equal.
        coverage: float32 [q], log of the share of all tokens' probability that the candidates hold.
    """

    tokens: jax.Array
    scores: jax.Array
    coverage: jax.Array


def unary_logits(borrowed: Borrowed, hidden_td, *, config: DraftConfig, policy: Policy,
                 num_tokens: int | None = None) -> jax.Array:
    """U of the drafted positions (rows 1 on), float32 [q, v]: LM head, multiplier, softcap.

    Args:
        num_tokens: static; -inf for ids from here on, which the target never chooses.
    """
    u = project(hidden_td[1:], borrowed.lm_head, policy) * jnp.float32(config.output_multiplier)
    cap = config.final_logit_softcapping
    u = u if cap is None else cap * jnp.tanh(u / cap)
    if num_tokens is None or num_tokens >= u.shape[1]:
        return u
    return jnp.where(jnp.arange(u.shape[1]) < num_tokens, u, -jnp.inf)


def ranked(logits_qv, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row -> (values, ids int32); ties (+0 and -0 too) by lower id, NaN counts as -inf."""
    x = jnp.where(jnp.isnan(logits_qv), -jnp.inf, jnp.where(logits_qv == 0, 0.0, logits_qv))
    values, ids = lax.top_k(x, count)
    return values, ids.astype(jnp.int32)


def lattice(params: dict, hidden_td, unary_qv, anchor, *, config: DraftConfig, policy: Policy) -> Lattice:
    """Candidates and all pair scores, S = U + sum_r predecessor * (W h) * successor; without a selector S = U.

    Args:
        hidden_td: result of `draft_hidden`, the anchor's row included.
        unary_qv: result of `unary_logits`.
        anchor: int32 [].
    """
    depth, count = unary_qv.shape[0], config.candidates
    unary, tokens = ranked(unary_qv, count)
    coverage = jax.nn.logsumexp(unary, axis=-1) - jax.nn.logsumexp(unary_qv, axis=-1)
    scores = jnp.broadcast_to(unary[:, None], (depth, count, count))
    if config.has_selector:
        before = jnp.concatenate([jnp.full((1, count), anchor, jnp.int32), tokens[:-1]])
        gate_qr = linear(hidden_td[1:], params["selector"], policy)
        gated = params["predecessor"][before].astype(jnp.float32) * gate_qr[:, None]
        scores = scores + einsum_f32("qbr,qcr->qbc", gated, params["successor"][tokens])
    return Lattice(tokens, scores, coverage)


def draft(params: dict, borrowed: Borrowed, cache: DraftCache, anchor, *, config: DraftConfig, policy: Policy,
          num_tokens: int | None = None) -> Lattice:
    """The whole pass: block, unary logits, lattice. The cache is only read."""
    hidden = draft_hidden(params, borrowed, cache, anchor, config=config, policy=policy)
    unary = unary_logits(borrowed, hidden, config=config, policy=policy, num_tokens=num_tokens)
    return lattice(params, hidden, unary, anchor, config=config, policy=policy)


def greedy_chain(lattice: Lattice) -> jax.Array:
    """int32 [q]: the best candidate after the chosen one before, the first of equals (DFlash 2's linear chain)."""
    def pick(before, row):
        tokens, scores = row
        best = jnp.argmax(scores[before]).astype(jnp.int32)
        return best, tokens[best]

    return lax.scan(pick, jnp.int32(0), (lattice.tokens, lattice.scores))[1]

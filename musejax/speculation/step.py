"""One speculative step as one program: draft, tree, verify, accept, commit (dflash2.md section 0).

The text is that of plain decoding, bit for bit with `megakernel`: a tree only decides which tokens the target looks at.
Plain decoding is the same program with a tree of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from musejax.config import ConfigError, DecodeConfig, ModelConfig
from musejax.decode import check_tokens, uses_kernels
from musejax.kernels.cache import MAX_ROWS, KernelCache, accept, init_cache, keep_placement
from musejax.kernels.forward import chain
from musejax.numerics import CANON_F32_PROBS, Policy, storage_dtype
from musejax.packing import unpack_head
from musejax.sampling import Sampler, Sampling
from musejax.sharding import replicated
from musejax.speculation import accept as acceptance
from musejax.speculation import draft as drafting
from musejax.speculation import draft_kernels
from musejax.speculation.config import DraftConfig
from musejax.speculation.draft import Borrowed, DraftCache
from musejax.speculation.packing import is_packed
from musejax.speculation.tree import Tree, build_tree, conditional_logprobs, root_only
from musejax.speculation.verify import Verified, verify


@dataclass(frozen=True)
class Speculation:
    """How guesses are made. Hashable: a static argument of the step.

    Attributes:
        drafter: sizes of the drafter; None decodes without guesses, in the same program.
        width: children of a node, its best ones; 1 gives a chain, None allows all candidates.
        spine: the first so many nodes follow the greedy chain.
        tau: temperature of the drafter's scores; larger makes bushier trees.
        policy: rounding of the drafter; a packed drafter has `draft_kernels.POLICY` only.

    Raises:
        ConfigError: a value outside its range.
    """

    drafter: DraftConfig | None = None
    width: int | None = None
    spine: int = 0
    tau: float = 1.0
    policy: Policy = CANON_F32_PROBS

    def __post_init__(self):
        if self.width is not None and self.width < 1:
            raise ConfigError(f"width: expected at least 1, or none for all candidates, got {self.width}")
        if not 0 <= self.spine < MAX_ROWS:
            raise ConfigError(f"spine: expected 0 to {MAX_ROWS - 1}, got {self.spine}")
        if not self.tau > 0:
            raise ConfigError(f"tau: expected a number above 0, got {self.tau}")

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose stream the drafter reads, ascending."""
        return () if self.drafter is None else tuple(sorted(set(self.drafter.target_layer_ids)))


class SpecParams(NamedTuple):
    """Parameters of target and drafter.

    Attributes:
        target: packed for `megakernel`, in table form for `reference`.
        drafter: packed (speculation/packing.py) for the kernels, which a packed target goes with; in the public layout
            for plain JAX, with any target; None without one.
    """

    target: dict
    drafter: dict | None

    @property
    def packed_drafter(self) -> bool:
        return self.drafter is not None and is_packed(self.drafter)


class SpecState(NamedTuple):
    """State between two steps.

    A step in which a kernel gave up waiting on a GPU, the drafter's or the target's, leaves a cache that every further
    step is refused with (ffi.StateError): the target's launch after a drafter's that gave up does not run. Only a
    commit of the drafter, the last launch of a step, may give up unseen by the state. It is reported all the same; and
    what it leaves, rows in the drafter's rings, can make later guesses worse, but no token wrong.

    Attributes:
        cache: of the target; rows that the last step accepted are stored by the next one.
        draft: of the drafter, one row for each position before `token`, made by `draft_kernels.init_cache` for a packed
            drafter and by `draft.init_cache` for another; None without one.
        token: int32 [], the newest token, which the next step runs.
        logprob: float32 [], its log-probability.
        sampler: None is greedy.
    """

    cache: KernelCache
    draft: DraftCache | None
    token: jax.Array
    logprob: jax.Array
    sampler: Sampler | None


class Emitted(NamedTuple):
    """Tokens of one step.

    Attributes:
        tokens: int32 [16], the first `count` of them; the last one is the state's `token`.
        logprobs: float32 [16].
        count: int32 [], 1 to 16.
        stream: float32 [16, d], what each was chosen from: the residual stream of the row before it.
        distinct: int32 [L], distinct experts that the rows of this step chose in each layer (D).
    """

    tokens: jax.Array
    logprobs: jax.Array
    count: jax.Array
    stream: jax.Array
    distinct: jax.Array


def distinct_experts(expert_ids, config: ModelConfig) -> jax.Array:
    """int32 [L] from ids [L, t, k]; padding rows choose none."""
    hit = jnp.zeros((expert_ids.shape[0], config.num_local_experts), bool)
    layer = jnp.arange(expert_ids.shape[0])[:, None]
    return hit.at[layer, expert_ids.reshape(len(expert_ids), -1)].set(True, mode="drop").sum(-1, dtype=jnp.int32)


def borrowed(params: SpecParams, config: ModelConfig, decode: DecodeConfig) -> Borrowed:
    """Embedding and LM head for the drafter: its own, or the target's."""
    target = {"embed": params.target["embed"], "lm_head": params.target["lm_head"]}
    if uses_kernels(decode) and "lm_head" not in params.drafter:
        target["lm_head"] = unpack_head(config, params.target["lm_head"])
    return drafting.borrow(params.drafter, target)


def guess(params: SpecParams, state: SpecState, *, config, decode, speculation: Speculation, num_tokens,
          mesh=None) -> Tree:
    """The tree of 16 nodes that the next pass verifies; its root is `state.token`."""
    drafter = speculation.drafter
    if drafter is None:
        return root_only(state.token, MAX_ROWS)
    if params.packed_drafter:
        lattice = draft_kernels.draft(params.drafter, params.target, state.draft, state.token, config=drafter,
                                      num_tokens=num_tokens, mesh=mesh)
        return draft_kernels.tree(state.token, lattice, nodes=MAX_ROWS, width=speculation.width,
                                  spine=speculation.spine, tau=speculation.tau, mesh=mesh)
    lattice = drafting.draft(params.drafter, borrowed(params, config, decode), state.draft, state.token,
                             config=drafter, policy=speculation.policy, num_tokens=num_tokens)
    logprobs = conditional_logprobs(lattice, speculation.tau)
    return build_tree(state.token, lattice.tokens, logprobs, nodes=MAX_ROWS, width=speculation.width,
                      spine=speculation.spine)


def commit(params: SpecParams, state: SpecState, verified: Verified, path, count, speculation: Speculation,
           mesh=None) -> SpecState:
    """The rows `path[:count]` (int32 [16]) become the next positions, in both caches; token and sampler stay."""
    path = jnp.maximum(path, 0)
    draft = state.draft
    if speculation.drafter is not None:
        taps, wanted = speculation.taps, speculation.drafter.target_layer_ids
        joined = jnp.concatenate([verified.taps[taps.index(i)] for i in wanted], axis=-1)
        rows = (params.drafter, draft, joined[path], state.cache.length, count)
        if params.packed_drafter:
            draft = draft_kernels.commit_context(*rows, config=speculation.drafter, mesh=mesh)
        else:
            draft = drafting.commit_context(*rows, config=speculation.drafter, policy=speculation.policy)
    return state._replace(cache=accept(verified.cache, path, count), draft=draft)


def capacity(cache: KernelCache, config: ModelConfig) -> int:
    """Positions that fit: the slots of a full layer; rings hold any number."""
    full = [layer.keys.shape[1] for i, layer in enumerate(cache.layers) if config.window(i) is None]
    return min(full, default=config.max_position_embeddings)


def place(state: SpecState, config: ModelConfig, mesh, packed_drafter: bool) -> SpecState:
    """The state, told to stay where `start` put it."""
    if mesh is None:
        return state
    apart = {"cache": keep_placement(state.cache, config, mesh)}
    if packed_drafter:
        apart["draft"] = draft_kernels.keep_placement(state.draft, mesh)
    rest = lax.with_sharding_constraint(state._replace(**dict.fromkeys(apart, ())), replicated(mesh))
    return rest._replace(**apart)


def decode_step(params: SpecParams, state: SpecState, *, config: ModelConfig, decode: DecodeConfig,
                speculation: Speculation, num_tokens: int | None = None, mesh=None) -> tuple[SpecState, Emitted]:
    """Draft, verify, accept, commit: 1 to 16 new tokens.

    Args:
        params: of target and drafter, see SpecParams.
        state: what `start` or the step before returned; donated when jitted.
        config, decode, speculation: static.
        num_tokens: static; ids from here on are never chosen.
        mesh: static; where params and caches lie. A drafter that is not packed runs whole on every device.

    Fewer tokens come out where the cache ends; a step on a full cache is undefined, the caller counts.
    """
    tree = guess(params, state, config=config, decode=decode, speculation=speculation, num_tokens=num_tokens, mesh=mesh)
    verified = verify(params.target, state.cache, tree.tokens, tree.parents, tree.num_valid, state.sampler,
                      config=config, decode=decode, taps=speculation.taps, num_tokens=num_tokens, mesh=mesh)
    accepted = acceptance.accept(tree, verified.ids)
    count = jnp.minimum(accepted.count, jnp.maximum(capacity(state.cache, config) - state.cache.length, 1))
    count = jnp.where(verified.ids[0] < 0, 1, count)  # given up: trees may differ between devices, loops must not
    path = jnp.maximum(accepted.path, 0)
    logprobs = verified.logprobs[path]
    emitted = Emitted(accepted.emitted, logprobs, count, verified.stream[path],
                      distinct_experts(verified.expert_ids, config))
    state = commit(params, state, verified, accepted.path, count, speculation, mesh)
    state = state._replace(token=accepted.emitted[count - 1], logprob=logprobs[count - 1])
    return place(state, config, mesh, params.packed_drafter), emitted


def extend(params: SpecParams, state: SpecState, tokens_t, count, *, config: ModelConfig, decode: DecodeConfig,
           speculation: Speculation, num_tokens: int | None = None, mesh=None) -> SpecState:
    """Prompt tokens (int32 [16], the first `count`) after the cached ones; `token` is the choice after the last."""
    verified = verify(params.target, state.cache, tokens_t, chain(MAX_ROWS), count, state.sampler, config=config,
                      decode=decode, taps=speculation.taps, num_tokens=num_tokens, mesh=mesh)
    state = commit(params, state, verified, jnp.arange(MAX_ROWS), count, speculation, mesh)
    state = state._replace(token=verified.ids[count - 1], logprob=verified.logprobs[count - 1])
    return place(state, config, mesh, params.packed_drafter)


class Run(NamedTuple):
    """What `run_steps` generated.

    Attributes:
        tokens: int32 [room], the first `count` of them.
        logprobs: float32 [room].
        count: int32 [], tokens, a stop id included.
        steps: int32 [], verification passes.
    """

    tokens: jax.Array
    logprobs: jax.Array
    count: jax.Array
    steps: jax.Array


def run_steps(params: SpecParams, state: SpecState, limit, *, room: int, stop_ids: tuple[int, ...],
              config: ModelConfig, decode: DecodeConfig, speculation: Speculation, num_tokens: int | None = None,
              mesh=None) -> tuple[SpecState, Run]:
    """Steps until a stop id or `limit` tokens, without the host in between. The state's token is the first one emitted.

    Args:
        limit: int32 [], at most `room`, a static size.
    """
    step = partial(decode_step, config=config, decode=decode, speculation=speculation, num_tokens=num_tokens, mesh=mesh)
    stops = jnp.asarray(stop_ids, jnp.int32)
    index = jnp.arange(MAX_ROWS)

    def put(array, values, begin, count):
        return array.at[jnp.where(index < count, begin + index, room)].set(values, mode="drop")

    def body(carry):
        state, run, _ = carry
        state, emitted = step(params, state)
        kept, done = acceptance.truncate(emitted.tokens, emitted.count, stops, limit - run.count)
        run = Run(put(run.tokens, emitted.tokens, run.count, kept),
                  put(run.logprobs, emitted.logprobs, run.count, kept), run.count + kept, run.steps + 1)
        return state, run, done

    run = Run(jnp.zeros(room, jnp.int32).at[0].set(state.token), jnp.zeros(room, jnp.float32).at[0].set(state.logprob),
              jnp.int32(1), jnp.int32(0))
    done = (stops == state.token).any() | (limit <= 1)
    state, run, _ = lax.while_loop(lambda carry: ~carry[2], body, (state, run, done))
    return state, run


_STATIC = ("config", "decode", "speculation", "num_tokens", "mesh")
jit_decode_step = jax.jit(decode_step, static_argnames=_STATIC, donate_argnames="state")
jit_extend = jax.jit(extend, static_argnames=_STATIC, donate_argnames="state")
jit_run_steps = jax.jit(run_steps, static_argnames=(*_STATIC, "room", "stop_ids"), donate_argnames="state")


def cache_dtype(decode: DecodeConfig, platform: str):
    """dtype of the target's cache: bfloat16 for the kernels, else as the policy stores."""
    return jnp.bfloat16 if uses_kernels(decode) else storage_dtype(decode.policy, platform)


def init_draft(params: SpecParams, max_length: int, decode: DecodeConfig, speculation: Speculation, platform: str,
               mesh) -> DraftCache | None:
    """An empty cache for the drafter, where there is one.

    Raises:
        ConfigError: see `start`.
    """
    if speculation.drafter is None:
        return None
    if params.packed_drafter:
        if speculation.policy != draft_kernels.POLICY or not uses_kernels(decode):
            raise ConfigError(f"drafter: the packed form runs with megakernel and {draft_kernels.POLICY}, got "
                              f"{decode.implementation} and {speculation.policy}; give it in the public layout")
        return draft_kernels.init_cache(speculation.drafter, max_length, mesh)
    cache = drafting.init_cache(speculation.drafter, storage_dtype(speculation.policy, platform), max_length)
    return cache if mesh is None else jax.device_put(cache, replicated(mesh))


def start(params: SpecParams, tokens: Sequence[int], max_length: int, sampling: Sampling | None = None, *,
          config: ModelConfig, decode: DecodeConfig, speculation: Speculation, num_tokens: int | None = None,
          mesh=None) -> SpecState:
    """Runs a prompt, 16 rows a pass, through target and drafter and chooses the first token.

    Args:
        max_length: positions to allocate; prompt and generated tokens must fit.

    Raises:
        ConfigError: an empty prompt, an id outside the vocabulary, more tokens than max_length, or a packed drafter
            beside another form of the target or another policy than the kernels'.
    """
    ids = check_tokens(config, tokens)
    if len(ids) > max_length:
        raise ConfigError(f"prompt: expected at most {max_length} tokens (max_length), got {len(ids)}")
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    cache = init_cache(config, max_length, mesh, cache_dtype(decode, platform))
    draft = init_draft(params, max_length, decode, speculation, platform, mesh)
    state = SpecState((), (), jnp.int32(0), jnp.float32(0), Sampler.of(sampling or Sampling()))
    if mesh is not None:
        state = jax.device_put(state, replicated(mesh))
    state = state._replace(cache=cache, draft=draft)
    for begin in range(0, len(ids), MAX_ROWS):
        part = ids[begin:begin + MAX_ROWS]
        padded = jnp.asarray(np.pad(part, (0, MAX_ROWS - len(part))))
        state = jit_extend(params, state, padded, jnp.int32(len(part)), config=config, decode=decode,
                           speculation=speculation, num_tokens=num_tokens, mesh=mesh)
    return state

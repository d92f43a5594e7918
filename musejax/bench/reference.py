"""The layers of `bench layer` in plain JAX, for XLA to compile: what the kernel is compared with.

They are the reference layer (musejax/model) cut to one rank of 8: a slice's heads, and a slice's columns of every
projection and of both GEMMs of every expert. Between two GEMMs what the other ranks would send is this rank's own
slice, 8 times, as in the looped kernel, so no time goes into exchanges. The rows are nodes of a chain to verify: their
keys and values come back beside the cache, as in the kernel. The weights are those of the kernel in kind and size, not
in value.

One thing differs from the reference layer, in the baseline's favour: that one loops over the experts hit, as often as
only the device knows, which XLA can neither overlap nor replay as one CUDA graph. Here the experts hit are gathered
into a fixed number of slots, as many as the selection bias admits (53 for 49 hit on average); slots that are left
repeat the last expert hit. Every row meets every expert, as in the reference layer. NVFP4 weights become bfloat16 in
memory, unless XLA fuses that into its GEMMs; the bytes counted are those of the NVFP4 weights.

XLA compiles every layer of a program anew, which takes about 5 s each. So at most `MAX_LAYERS` of the layers of a case
run, its first ones. They are sliding layers, which beyond a context of 2048 read fewer keys and values than a full
layer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from musejax import nvfp4
from musejax.bench.cases import Case, admitted_experts
from musejax.bench.layer import random_bf16
from musejax.cache import LayerCache
from musejax.config import NUM_SLICES, DecodeConfig, ModelConfig
from musejax.model.attention import Rows, attend, project, seen_by
from musejax.model.experts import combine
from musejax.model.norms import centred_norm, gated_residual, input_scaled, rms
from musejax.model.rope import angles, rotate
from musejax.model.router import Routing
from musejax.numerics import einsum_f32

MAX_LAYERS = 2

EXPERT_LEAVES = ("gate_up", "gate_up_scale", "down", "down_scale")


@partial(jax.jit, static_argnames=("config", "admitted"))
def random_slice(key, config: ModelConfig, admitted: int) -> dict:
    """One slice of a layer with NVFP4 experts, of which the selection bias admits some.

    Returns:
        As the parameter table names them, e experts: projections bfloat16 [1, N/8, K], `router` float32 [e/8, d], codes
        uint8 [e, ..., K/2] and block scales E4M3 [e, ..., K/16] with `gate_up` [2, f/8] and `down` [m/8] rows, norm
        gains and gates of whole width, but that of `post_expert_norm`, which is a slice's.
    """
    d, m, f, e = (config.hidden_size, config.moe_hidden_size, config.moe_intermediate_size, config.num_local_experts)
    rows = {"q_proj": (config.q_width, d), "k_proj": (config.kv_width, d), "v_proj": (config.kv_width, d),
            "gate_proj": (config.q_width, d), "o_proj": (d, config.q_width), "pooler": (m, d), "unpooler": (d, m)}
    gains = {"input_norm": d, "attention_residual_gate": d, "ffn_norm": d, "expert_norm": m,
             "post_expert_norm": m // NUM_SLICES, "post_ffn_norm": d, "ffn_residual_gate": d}
    keys = iter(jax.random.split(key, 16 + len(rows) + len(gains)))

    def normal(shape, deviation):
        return jax.random.normal(next(keys), shape, jnp.float32) * deviation

    p = {name: normal((1, n // NUM_SLICES, k), d**-0.5).astype(jnp.bfloat16) for name, (n, k) in rows.items()}
    p |= {name: normal((n,), 1 / 16).astype(jnp.bfloat16) for name, n in gains.items()}
    p["router"] = normal((e // NUM_SLICES, d), d**-0.5)
    order = jax.random.permutation(next(keys), e)
    p["router_bias"] = jnp.where(order < admitted, 0.0, -100.0)
    for name, shape in (("gate_up", (e, 2, f // NUM_SLICES, m)), ("down", (e, m // NUM_SLICES, f))):
        p[name] = jax.random.bits(next(keys), (*shape[:-1], shape[-1] // 2), jnp.uint8)
        fields = jax.random.bits(next(keys), (*shape[:-1], shape[-1] // nvfp4.BLOCK), jnp.uint8) % 32 + 48
        p[f"{name}_scale"] = lax.bitcast_convert_type(fields, jnp.float8_e4m3fn)  # 2^-1 to below 2^3
        p[f"{name}_global"] = jnp.full(shape[:1] if name == "down" else shape[:2], 1 / 64, jnp.float32)
        p[f"{name}_input_scale"] = jnp.float32(1 / 64)
    return p


def looped(x: jax.Array) -> jax.Array:
    """[..., n] -> [..., 8 n]: as if every rank sent the same."""
    return jnp.tile(x, (1,) * (x.ndim - 1) + (NUM_SLICES,))


def choose(x_td, p: dict, config: ModelConfig) -> Routing:
    """As `model.router.route`, from a slice's router rows; no margins."""
    logits = einsum_f32("td,ed->te", x_td, p["router"])
    scores = looped(jax.nn.sigmoid(logits * jnp.float32(config.output_multiplier)))
    _, ids = lax.top_k(scores + p["router_bias"], config.num_experts_per_tok)
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    weights = chosen / (chosen.sum(-1, keepdims=True) + config.route_eps) * config.routed_scaling_factor
    return Routing(ids, weights, jnp.zeros(ids.shape[:1]))


def quantised(x_tk, mode: str, input_scale) -> tuple[jax.Array, jax.Array]:
    """-> (values for a GEMM, factor of its accumulators: float32 [t, 1])."""
    if mode == "bf16":
        return x_tk, jnp.ones((x_tk.shape[0], 1), jnp.float32)
    q = nvfp4.quantize_activation(x_tk, mode, input_scale)
    return q.grid, q.decode


def gathered_experts(h_tm, ids_tj, p: dict, slots: int, decode: DecodeConfig) -> jax.Array:
    """A slice's columns [t, j, m/8] of the chosen experts' outputs; at most `slots` experts may be hit."""
    policy, mode, t = decode.policy, decode.activations, h_tm.shape[0]
    hit = jnp.zeros(p["gate_up"].shape[0], bool).at[ids_tj.reshape(-1)].set(True)
    order = jnp.argsort(~hit, stable=True)
    taken = order[jnp.minimum(jnp.arange(slots), hit.sum() - 1)]
    codes_up, scale_up, codes_down, scale_down = (p[name][taken] for name in EXPERT_LEAVES)
    global_up, global_down = p["gate_up_global"][taken], p["down_global"][taken]

    x, scale = quantised(h_tm, mode, p["gate_up_input_scale"])
    gate_up = policy.einsum("tm,eufm->uetf", x, nvfp4.grid(codes_up, scale_up))
    gate, up = (gate_up[i] * (scale * global_up[:, i, None, None]) for i in range(2))
    act = jax.nn.silu(gate) * up
    if mode != "nvfp4_static":  # there float32 values are quantised
        act = policy.round("swiglu", act)
    act = looped(act)
    act, scale = quantised(act.reshape(slots * t, -1), mode, p["down_input_scale"])
    act, scale = act.reshape(slots, t, -1), scale.reshape(slots, t, 1)
    y = policy.einsum("etf,eof->eto", act, nvfp4.grid(codes_down, scale_down))
    y = policy.round("down", y * (scale * global_down[:, None, None]))
    slot_of = jnp.cumsum(hit) - 1
    return y[slot_of[ids_tj], jnp.arange(t)[:, None]]


def rank_layer(p: dict, stream_td, layer: int, stored: LayerCache, length, rows: Rows, slots: int,
               config: ModelConfig, decode: DecodeConfig) -> tuple[jax.Array, jax.Array, LayerCache]:
    """`model.layer.decoder_layer` on one rank of 8, for rows of a tree.

    Args:
        p: see `random_slice`.
        stored: the slice's heads.
        slots: experts that the selection bias admits.

    Returns:
        (stream float32 [t, d], ids int32 [t, j], keys and values of the rows).
    """
    policy, eps, t, c = decode.policy, config.rms_norm_eps, stream_td.shape[0], config.head_dim
    x = centred_norm(stream_td, p["input_norm"], eps, policy)
    q, k, v, gate = (policy.round("qkv", project(x, p[name], policy)).reshape(t, -1, c)
                     for name in ("q_proj", "k_proj", "v_proj", "gate_proj"))
    q, k = (policy.round("qk_norm", rms(a, eps)) for a in (q, k))
    if theta := config.layer_rope_theta[layer]:
        q, k = (rotate(a, angles(rows.positions, c, theta), policy) for a in (q, k))
    keys, values, mask, flight = seen_by(rows, k.swapaxes(0, 1), v.swapaxes(0, 1), stored, length,
                                         config.window(layer))
    o = policy.round("attention", attend(q, keys, values, mask, config, policy))
    o = policy.round("gated_output", rms(o, eps) * jax.nn.sigmoid(gate)).reshape(t, -1)
    a = looped(policy.round("o_proj", project(looped(o), p["o_proj"], policy)))
    stream = gated_residual(stream_td, rms(a, config.post_norm_eps), p["attention_residual_gate"], config, policy)

    x = centred_norm(stream, p["ffn_norm"], eps, policy)
    routing = choose(x, p, config)
    pooled = looped(policy.round("pooler", project(x, p["pooler"], policy)))
    h = centred_norm(pooled, p["expert_norm"], eps, policy)
    y = gathered_experts(h, routing.ids, p, slots, decode)
    m = looped(combine(y, routing, p["post_expert_norm"], config, decode))
    f = looped(policy.round("unpooler", project(m, p["unpooler"], policy)))
    f = input_scaled(f, p["post_ffn_norm"], config.post_norm_eps, policy)
    return gated_residual(stream, f, p["ffn_residual_gate"], config, policy), routing.ids, flight


def rank_layers(stream_td, kept: list[LayerCache], params: list[dict], case: Case, config: ModelConfig) -> tuple:
    """The layers of a case, each as `rank_layer` -> (stream, ids [layers, t, j], keys and values of the rows)."""
    at = jnp.arange(case.rows, dtype=jnp.int32)
    rows = Rows(case.context + at, jnp.int32(case.rows), at[:, None] >= at)
    slots, decode, out = admitted_experts(case, config), DecodeConfig(activations=case.activations), []
    for i, p, stored in zip(case.numbers, params, kept, strict=True):
        stream_td, *rest = rank_layer(p, stream_td, i, stored, jnp.int32(case.context), rows, slots, config, decode)
        out.append(rest)
    ids, flight = zip(*out, strict=True)
    return stream_td, jnp.stack(ids), flight


class ReferenceLayers:
    """The first `MAX_LAYERS` of a case's layers, of one rank of 8 on the default device, as one program that XLA has
    compiled; used as `LoopedLayers`. Its `case` says how many layers there are."""

    def __init__(self, case: Case, config: ModelConfig, seed: int = 0):
        self.case = case = replace(case, layers=min(case.layers, MAX_LAYERS))
        self.config = config
        key = jax.random.key(seed, impl="rbg")  # the default generator needs many times the memory of 8-bit codes
        keys = jax.random.split(key, case.layers + 1)
        admitted = admitted_experts(case, config)
        self.params = [random_slice(k, config, admitted) for k in keys[1:]]
        heads = config.num_key_value_heads // NUM_SLICES
        shapes = [(heads, case.slots(config, i), config.head_dim) for i in case.numbers]
        self.kept = [LayerCache(*(random_bf16(jax.random.fold_in(keys[0], 2 * n + j), shape) for j in range(2)))
                     for n, shape in enumerate(shapes)]
        stream = jax.ShapeDtypeStruct((case.rows, config.hidden_size), jnp.float32)
        self.call = jax.jit(partial(rank_layers, case=case, config=config)).lower(
            stream, self.kept, self.params).compile()

    @property
    def expert_bytes(self) -> int:
        """Of one expert of a layer."""
        return sum(self.params[0][name].nbytes for name in EXPERT_LEAVES) // self.config.num_local_experts

    @property
    def dense_bytes(self) -> int:
        """Of a layer's other GEMMs."""
        experts = ("gate_up", "down")
        return sum(w.nbytes for name, w in self.params[0].items() if w.ndim > 1 and not name.startswith(experts))

    def launch(self, stream):
        """One run -> (stream, ids [layers, rows, k])."""
        stream, ids, _ = self.call(stream, self.kept, self.params)
        return stream, ids

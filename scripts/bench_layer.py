#!/usr/bin/env python3
"""Times one decoder layer of the released model as one of 8 ranks runs it on this CPU, exchanges looped back.

    python scripts/bench_layer.py --distinct 49 --rows 16 --context 2048 --steps 9

Weights are random: one slice of eight of a layer with NVFP4 experts. Routing is drawn so that the rows hit the wanted
number of distinct experts (D). The line says machine, rank, rows, context, D, bytes read, median time with its 10th and
90th percentile, GB/s, the rate of plain threaded reads of as many bytes, measured in between, and a hash of the result.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from bench_decode import device_name

from musejax import ffi
from musejax.cache import LayerCache
from musejax.config import NUM_SLICES, RELEASED, DecodeConfig
from musejax.kernels.cache import MAX_ROWS
from musejax.kernels.calls import Call, RowState
from musejax.kernels.forward import chain

LAYER = 2  # sliding attention, NVFP4 experts


def random_weights(config, rng) -> dict:
    """One slice of a layer: dense and experts uint8, small float32."""
    at = ffi.library("cpu").layout(
        hidden=config.hidden_size, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim, moe_hidden=config.moe_hidden_size, moe_inner=config.moe_intermediate_size,
        experts=config.num_local_experts, vocab=config.vocab_size, nvfp4=True)
    dense = (rng.standard_normal(at["dense.bytes"] // 2, np.float32) / 90).astype(ml_dtypes.bfloat16).view(np.uint8)
    router = rng.standard_normal((at["dense.unpooler"] - at["dense.router"]) // 4, np.float32) / 90
    dense[at["dense.router"]:at["dense.unpooler"]] = router.view(np.uint8)
    experts = rng.integers(0, 256, (1, config.num_local_experts, at["experts.bytes"]), np.uint8)
    for name, k, tiles in (("gate_up", config.moe_hidden_size, 2 * config.moe_intermediate_size // NUM_SLICES // 16),
                           ("down", config.moe_intermediate_size, config.moe_hidden_size // NUM_SLICES // 16)):
        begin, size = at[f"experts.{name}"], k // 64 * (512 + 64)
        part = experts[0, :, begin:begin + tiles * size].reshape(-1, tiles, size)[:, :, k // 64 * 512:]
        low, high = part[..., 0::2] % 32 + 72, part[..., 1::2] % 32 + 72  # E5M3 fields of 2^-1 to 2^2
        part[..., 0::2], part[..., 1::2] = low << 4 | high >> 4, high << 4 | low >> 4
    small = rng.standard_normal(at["small.count"], np.float32) / 16
    small[at["small.gate_up_global"]:] = 1 / 64
    return {"dense": jnp.asarray(dense[None]), "experts": jnp.asarray(experts), "small": jnp.asarray(small)}


def scores_for(config, rows: int, distinct: int, rng) -> np.ndarray:
    """Router scores [8, rows, experts/8] with which the rows choose exactly `distinct` experts."""
    k = config.num_experts_per_tok
    hit = rng.permutation(config.num_local_experts)[:distinct]
    order = np.resize(hit, rows * k).reshape(rows, k)  # every hit expert comes up, k in a row are distinct
    scores = np.full((rows, config.num_local_experts), 0.01, np.float32)
    for row in range(rows):
        scores[row, order[row]] = 0.5 + rng.random(k, np.float32) / 4
    return scores.reshape(rows, NUM_SLICES, -1).swapaxes(0, 1).copy()


def layer_of_rank(config, decode, rows: int, context: int):
    """One layer as the first rank runs it: what other ranks would send is this rank's own slice, eight times."""
    call = Call(config, decode)
    state = RowState(chain(rows), jnp.array([context, rows, 0], jnp.int32), jnp.zeros(MAX_ROWS, jnp.int32))
    zero = jnp.int32(0)

    def looped(x):
        return jnp.tile(x, (NUM_SLICES, 1, 1))

    def run(p, stream, scores, stored, flight):
        cos_sin = call.angles(context + jnp.arange(rows, dtype=jnp.int32))
        q, gate, stored, flight = call.attn_in(LAYER, stream, cos_sin, state, p, stored, flight)
        o, stored, flight = call.attention(LAYER, q, gate, state, stored, flight)
        a = call.attn_out(LAYER, looped(o), p)
        stream, pooled, own_scores = call.pool(LAYER, stream, looped(a), p)
        c, ids, weights = call.experts_up(LAYER, looped(pooled), scores, state, p, zero)
        y = call.experts_down(LAYER, looped(c), ids, p, zero)
        f = call.unpool(LAYER, call.combine(LAYER, looped(y), ids, weights, p), p)
        return call.add_ffn(LAYER, stream, looped(f), p), ids, own_scores

    return jax.jit(run)


def threaded_read(data: np.ndarray, threads: int) -> float:
    """Seconds that `threads` threads need to read and add up the bytes."""
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        list(pool.map(np.sum, parts))
        return time.perf_counter() - begin


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--distinct", type=int, default=49, help="experts hit (D)")
    p.add_argument("--rows", type=int, default=16)
    p.add_argument("--context", type=int, default=2048)
    p.add_argument("--steps", type=int, default=9)
    p.add_argument("--activations", default="bf16", choices=("bf16", "nvfp4_static", "nvfp4_per_token"))
    args = p.parse_args()
    config = RELEASED
    k = config.num_experts_per_tok
    if not k <= args.distinct <= min(args.rows * k, config.num_local_experts):
        p.error(f"--distinct: expected {k} to {min(args.rows * k, config.num_local_experts)}, got {args.distinct}")
    config = type(config)(nvfp4_layers=(LAYER,))
    rng = np.random.default_rng(0)
    weights = random_weights(config, rng)
    stream = jnp.asarray(rng.standard_normal((args.rows, config.hidden_size), np.float32))
    scores = jnp.asarray(scores_for(config, args.rows, args.distinct, rng))
    heads = config.num_key_value_heads // NUM_SLICES

    def keys(slots):
        return jnp.asarray(rng.standard_normal((heads, slots, config.head_dim)), jnp.bfloat16)

    slots = config.window(LAYER)
    stored, flight = LayerCache(keys(slots), keys(slots)), LayerCache(keys(MAX_ROWS), keys(MAX_ROWS))
    run = layer_of_rank(config, DecodeConfig(activations=args.activations), args.rows, args.context)
    out, ids, _ = jax.block_until_ready(run(weights, stream, scores, stored, flight))
    distinct = np.unique(np.asarray(ids)).size
    read = weights["dense"].size + distinct * weights["experts"].shape[2]
    # As many bytes, of which the caches hold nothing: the experts' own.
    plain = np.asarray(weights["experts"]).reshape(-1)[:read // 8 * 8].view(np.uint64)
    threads = ffi.library("cpu").threads()
    times, reads = [], []
    for _ in range(args.steps):
        begin = time.perf_counter()
        jax.block_until_ready(run(weights, stream, scores, stored, flight))
        times.append(time.perf_counter() - begin)
        reads.append(threaded_read(plain, threads))
    low, median, high = np.percentile(times, (10, 50, 90))
    digest = hashlib.sha256(np.asarray(out).tobytes()).hexdigest()[:12]
    print(f"{device_name(jax.devices()[0])}; {threads} threads, {ffi.library('cpu').isa()}; released sizes, NVFP4, "
          f"one rank of 8, exchanges looped back; {args.activations}; rows {args.rows}; context {args.context}; "
          f"D {distinct}; {read / 1e6:.1f} MB; {median * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}); "
          f"{read / median / 1e9:.2f} GB/s; threaded read {read / np.median(reads) / 1e9:.2f} GB/s; result {digest}")


if __name__ == "__main__":
    main()

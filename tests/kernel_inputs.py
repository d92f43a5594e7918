"""For tests of the kernels: small models with random weights, caches with a past, and sums in the stated order.

The order of sums (ffi/common/layout.h) is written here a second time, in NumPy. Products of two bfloat16 values are
exact in float32, so a fused multiply-add of them is a plain multiplication and an addition.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

from musejax import packing
from musejax.cache import LayerCache, slots_of
from musejax.checkpoint import load_params
from musejax.config import FULL, MINI, SLIDING, DecodeConfig, ModelConfig
from musejax.kernels import cache as kc
from musejax.kernels import forward as kf
from musejax.nvfp4 import quantize_weight
from musejax.params import BF16, slice_tensor, table

F32 = np.float32

SMALL = replace(MINI, num_hidden_layers=3, layer_types=(SLIDING, SLIDING, FULL), layer_rope_theta=(5e5, 1e4, 0.0),
                sliding_window=24, num_experts_per_tok=4, nvfp4_layers=(1,))
"""For whole passes: two rings of 24 slots (one and a half blocks), two rotary bases, a BF16 and an NVFP4 layer before
the full one."""

TWO = replace(MINI, num_hidden_layers=2, layer_types=(), layer_rope_theta=(), nvfp4_layers=(1,), num_local_experts=8)
WIDE = replace(TWO, hidden_size=2048, num_attention_heads=32, moe_hidden_size=512)
"""Dense K of 2048: two chunks. NVFP4 K of 512: eight ranges."""

PHASE_CONFIGS = {
    "mini": replace(TWO, num_local_experts=16, num_experts_per_tok=4),
    "dense K 2048, expert K 512": WIDE,
    "expert K 2048 and 512": replace(TWO, moe_hidden_size=2048, moe_intermediate_size=512),
}
"""Two layers each: a sliding one with BF16 experts, a full one with NVFP4 experts."""


# ------------------------------------------------------------------ models


@dataclass(frozen=True, eq=False)
class Model:
    """Random weights of one config.

    Attributes:
        host: table form, NumPy.
        table: table form as `reference` takes it on a CPU: bfloat16 values in float32.
        packed: packed form on one device.
    """

    config: ModelConfig
    host: dict
    table: dict
    packed: dict

    def on(self, mesh, packed=None) -> dict:
        """The packed form (or a changed one) on the devices of a mesh."""
        packed = self.packed if packed is None else packed
        if mesh is None or mesh.size == 1:
            return packed
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), kf.param_specs(packed))
        return jax.device_put(packed, places)


def random_layer_leaves(config: ModelConfig, layer: int, rng) -> dict:
    """GEMM weights of deviation 1/sqrt(K), gains near 1, gates near those of `init_params`, experts in NVFP4 if so."""
    rows = {p.path[2]: p for p in table(config) if p.path[:2] == ("layers", layer)}
    e, m, f = config.num_local_experts, config.moe_hidden_size, config.moe_intermediate_size
    leaves = {}
    for name, shape in (("gate_up", (e, 2, f, m)), ("down", (e, m, f))):
        if name + "_scale" not in rows:
            continue
        w = quantize_weight(rng.standard_normal(shape, F32) / np.sqrt(F32(shape[-1])))
        for end, x in (("", w.packed), ("_scale", w.scale), ("_global", w.global_scale)):
            param = rows[name + end]
            leaves[name + end] = slice_tensor(param, np.asarray(x, param.dtype).reshape(param.hf_shape))
        # A row's largest magnitude over 2688, give or take: 4 for normed rows, less behind SwiGLU.
        typical = (4.0 if name == "gate_up" else 2.0) / 2688
        leaves[name + "_input_scale"] = typical * rng.uniform(0.5, 1, rows[name + "_input_scale"].shape).astype(F32)
    for name, param in rows.items():
        if name in leaves:
            continue
        x = rng.standard_normal(param.hf_shape, F32)
        if name == "router_bias":
            x *= 0.05
        elif name.endswith("residual_gate"):
            x = -0.3 + 0.2 * x
        elif param.group == "norms":
            x *= 0.1
        else:
            x *= (2.0 if name == "router" else 1.0) / np.sqrt(F32(param.hf_shape[-1]))
        leaves[name] = slice_tensor(param, x.astype(param.dtype))
    return {name: leaves[name] for name in rows}


def random_host_params(config: ModelConfig, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    params = {"layers": [random_layer_leaves(config, i, rng) for i in range(config.num_hidden_layers)]}
    for param in table(config)[:3]:
        x = rng.standard_normal(param.hf_shape, F32)
        x = 1 + 0.1 * x if param.path == ("final_norm",) else x / np.sqrt(F32(config.hidden_size))
        params[param.path[0]] = slice_tensor(param, x.astype(param.dtype))
    return params


def model_from(config: ModelConfig, host: dict) -> Model:
    wide = jax.tree.map(lambda x: jnp.asarray(x.astype(F32) if x.dtype == BF16 else x), host)
    return Model(config, host, wide, jax.tree.map(jnp.asarray, packing.pack_params(host, config)))


@functools.cache
def model_of(config: ModelConfig, seed: int = 0) -> Model:
    return model_from(config, random_host_params(config, seed))


def from_checkpoint(path) -> Model:
    config, params = load_params(path)
    return model_from(config, jax.tree.map(np.asarray, params))


# ------------------------------------------------------------------ caches and passes


def random_bf16(rng, shape, scale=1.0):
    return (scale * rng.standard_normal(shape, F32)).astype(BF16)


def tokens_of(config, t, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, t).astype(np.int32)


def random_cache(config: ModelConfig, length: int, max_length: int, seed: int = 0, mesh=None) -> kc.KernelCache:
    """A cache as if `length` positions were stored: rings full or not, random unit keys and values."""
    rng = np.random.default_rng(1000 + seed)

    def kept(layer):
        slots = slots_of(config, layer, max_length)
        shape = (config.num_key_value_heads, slots, config.head_dim)
        some = np.arange(slots)[None, :, None] < length
        return LayerCache(*(np.where(some, random_bf16(rng, shape), BF16.type(0)) for _ in range(2)))

    empty = kc.init_cache(config, max_length, mesh)
    layers = tuple(kept(i) for i in range(config.num_hidden_layers))
    cache = empty._replace(layers=layers, length=np.asarray(length, np.int32))
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), cache, empty)


run_pass = jax.jit(kf.run_pass, static_argnames=("config", "decode", "mesh", "taps", "trace"))
"""`jit_run_pass` that leaves its cache alive, so that many passes can start from one."""


def one_pass(model: Model, cache, tokens, parents=None, valid=None, *, decode=None, mesh=None, params=None,
             **how) -> kf.Pass:
    """A finished pass; parents None is a chain."""
    t = len(tokens)
    parents = kf.chain(t) if parents is None else jnp.asarray(parents, jnp.int32)
    out = run_pass(model.on(mesh, params), cache, jnp.asarray(tokens, jnp.int32), parents,
                   t if valid is None else valid, config=model.config, decode=decode or DecodeConfig(), mesh=mesh,
                   **how)
    return jax.block_until_ready(out)


def accepted(cache, path, count=None) -> kc.KernelCache:
    """`accept` with a path of any length, filled up with rows that must not count."""
    count, path = len(path) if count is None else count, np.asarray(path, np.int32)
    path = np.pad(path, (0, kc.MAX_ROWS - len(path)), constant_values=15)
    after = kc.accept(cache, path, count)  # placed as before, so that the next pass does not compile anew
    return jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), after, cache)


def stored_bits(cache) -> list[np.ndarray]:
    """Keys and values of every layer with accepted rows stored."""
    return [np.asarray(x) for x in jax.tree.leaves(kc.flush(cache).layers)]


def whole(x_sln) -> np.ndarray:
    """[slices, t, n/8] -> [t, n]."""
    x = np.asarray(x_sln)
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def slices(x_tn, dtype=BF16):
    """[t, n] -> [8, t, n/8]."""
    x = np.asarray(x_tn)
    return jnp.asarray(x.reshape(x.shape[0], 8, -1).swapaxes(0, 1).astype(dtype))


def wide(x) -> np.ndarray:
    """bfloat16 -> the same values in float32."""
    return np.asarray(x).astype(F32)


# ------------------------------------------------------------------ the order of sums, in NumPy


def round_bf16(x):
    return np.asarray(x, F32).astype(ml_dtypes.bfloat16).astype(F32)


def in_order(parts, axis=0):
    """Sum along an axis, one after the other from +0, in float32."""
    parts = np.moveaxis(np.asarray(parts, F32), axis, 0)
    total = np.zeros(parts.shape[1:], F32)
    for part in parts:
        total = total + part
    return total


def tree(x):
    """The last axis, of 16 values: lanes 8 apart, then 4, 2, 1."""
    for half in (8, 4, 2, 1):
        x = x[..., :half] + x[..., half:2 * half]
    return x[..., 0]


def tree_sum(x_n):
    """Leaves of 64 columns, each of up to four trees of 16."""
    width = x_n.shape[-1]
    x = np.concatenate([x_n, np.zeros((*x_n.shape[:-1], -width % 64), F32)], axis=-1)
    trees = tree(x.reshape(*x.shape[:-1], -1, 4, 16))
    return in_order(in_order(trees, -1), -1)


def rms_norm(x_n, eps, slices=8):
    squares = (x_n * x_n).reshape(*x_n.shape[:-1], slices, -1)
    mean = in_order(tree_sum(squares), -1) / F32(x_n.shape[-1])
    return x_n * (F32(1) / np.sqrt(mean + F32(eps)))[..., None]


def centred_norm(x_n, gamma_n, eps):
    """r(rms(x) r(1 + gamma))."""
    return round_bf16(rms_norm(x_n, eps) * round_bf16(F32(1) + np.asarray(gamma_n, F32)))


def k_sum(products_k, chunk, ranges):
    """Sum over K, the last axis, of products whose sums inside a range are exact: ranges of a chunk, then chunks."""
    parts = products_k.reshape(*products_k.shape[:-1], products_k.shape[-1] // chunk, ranges, chunk // ranges)
    exact = parts.sum(-1, dtype=np.float64)
    assert (exact == exact.astype(F32)).all() and ((parts != 0).sum(-1) <= 2).all()
    return in_order(in_order(exact, -1), -1)


def attention_in_order(q_gc, keys_pc, values_pc, first, position, scale, exp):
    """softmax(q k^T scale) v over positions first .. position of arrays that begin at position 0 -> [g, c], rounded."""
    begin, end = first // 16 * 16, position // 16 * 16 + 16
    at = np.arange(begin, end)
    seen = (at >= first) & (at <= position)
    clipped = np.clip(at, 0, len(keys_pc) - 1)
    keys = np.where(seen[:, None], keys_pc[clipped], F32(0))
    values = np.where(seen[:, None], values_pc[clipped], F32(0))
    products = (q_gc[:, None] * keys).reshape(len(q_gc), len(at), -1, 16)
    scores = tree(in_order(products, 2))
    weights = np.where(seen, round_bf16(exp(scores * F32(scale))), F32(0))  # [g, p]
    terms = np.concatenate([weights[..., None] * values, weights[..., None]], axis=-1)  # the last column: denominators
    blocks = in_order(terms.reshape(len(q_gc), -1, 16, terms.shape[-1]), 2)

    def level(parts, starts, size):
        """Sums of the parts that begin in one unit of `size` positions, and where these units begin."""
        units = np.unique(starts // size)
        return np.stack([in_order(parts[:, starts // size == u], 1) for u in units], axis=1), units * size

    chunks, starts = level(blocks, at[::16], 256)
    groups, starts = level(chunks, starts, 1024)
    total = in_order(groups, 1)
    return round_bf16(total[:, :-1] / total[:, -1:])


# ------------------------------------------------------------------ headers of ffi/, compiled for themselves

FFI = Path(__file__).resolve().parent.parent / "ffi"


def cxx() -> list[str]:
    """The command of the system's C++ compiler, or skips the test."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        pytest.skip("no C++ compiler: $CXX is not set, and c++, g++ and clang++ are not found")
    return compiler.split()


def compile_library(source: str, include: Path = FFI) -> ctypes.CDLL:
    """Compiles C++ that includes headers of ffi/, or skips the test."""
    compiler = cxx()
    with tempfile.TemporaryDirectory() as folder:
        path, target = Path(folder, "library.cc"), Path(folder, "library.so")
        path.write_text(source)
        subprocess.run([*compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", f"-I{include}",
                        str(path), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


_MATH = """
#include "common/math.h"
#define MAP(name, value) \\
  extern "C" void name(const float* x, float* y, int64_t n) { for (int64_t i = 0; i < n; ++i) y[i] = value; }
MAP(exp_of, musejax::Exp(x[i]))
MAP(sigmoid_of, musejax::Sigmoid(x[i]))
MAP(silu_of, musejax::Silu(x[i]))
MAP(tanh_of, musejax::Tanh(x[i]))
MAP(log_of, musejax::Log(x[i]))
MAP(round_bf16_of, musejax::RoundBf16(x[i]))
extern "C" void cos_sin_of(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) musejax::CosSin(x[i], y + i, y + n + i);
}
"""


class Math:
    """The functions of math.h on float32 arrays: `math("exp", x)`."""

    def __init__(self, library):
        self._library = library

    def __call__(self, name: str, x) -> np.ndarray:
        x = np.ascontiguousarray(x, F32)
        out = np.empty((2, *x.shape) if name == "cos_sin" else x.shape, F32)
        pointer = ctypes.POINTER(ctypes.c_float)
        function = getattr(self._library, name + "_of")
        function(x.ctypes.data_as(pointer), out.ctypes.data_as(pointer), ctypes.c_int64(x.size))
        return out


@functools.cache
def math_h() -> Math:
    """ffi/common/math.h."""
    return Math(compile_library(_MATH))

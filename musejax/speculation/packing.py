"""Public layout <-> packed form of a drafter's weights: the order in which kernels stream them. No bit is lost.

`ffi/common/draft_layout.h` defines the packed form; offsets and sizes are asked from the library (`layout`). The pytree
is

    fc            uint8 [s, fc.bytes]
    hidden_norm, norm   float32 [d]
    predecessor, successor   bfloat16 [v, r], selector   uint8 [s, selector.bytes]      DFlash 2 only
    layers[i]     dense uint8 [s, dense.bytes]     attention_conv, qkv, out, mlp_conv, gate_up, down
                  small float32 [small.count]      gains, base kernels of the convolutions
    embed         bfloat16 [s, v, d/s]             only where the drafter brings its own,
    lm_head       uint8 [s, head.bytes]            both as the target has them (musejax/packing.py)
    mask_embedding   bfloat16 [s, d/s]             only where the drafter has one

s is 8 slices. Packing and unpacking are NumPy on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from musejax.config import NUM_SLICES, SLICE_MULTIPLE, ConfigError
from musejax.kernels.cache import MAX_ROWS
from musejax.packing import CHUNK
from musejax.params import BF16, F32, U8
from musejax.sharding import AXIS, replicated, split_axis0
from musejax.speculation.config import DraftConfig
from musejax.speculation.params import assemble, leaf_of, table
from musejax.tiles import PackingError, pack_bf16, unpack_bf16

HEAD_DIMS = (16, 32, 64, 128)
"""Widths of a head that the kernels are built for."""

_QKV = ("q_proj", "k_proj", "v_proj")
_WHOLE = ("hidden_norm", "norm", "predecessor", "successor", "small")
"""Arrays that every device has whole; the others have a slice axis."""


# ------------------------------------------------------------------ which sizes pack


def packing_problems(config: DraftConfig) -> list[str]:
    """Why a drafter of these sizes has no packed form, one line a size; empty if it has.

    Such a drafter runs in plain JAX (draft.py), whole on every device.
    """
    tile = NUM_SLICES * SLICE_MULTIPLE
    multiples = [
        ("hidden_size", config.hidden_size, tile, "8 slices of whole 16-row tiles"),
        ("num_attention_heads", config.num_attention_heads, NUM_SLICES, "8 slices"),
        ("num_key_value_heads", config.num_key_value_heads, NUM_SLICES, "8 slices"),
        ("num_attention_heads * head_dim", config.q_width, tile, "K of o_proj in 8 ranges of whole tiles"),
        ("intermediate_size", config.intermediate_size, tile, "8 slices of whole 16-row tiles"),
        ("vocab_size", config.vocab_size, NUM_SLICES, "8 slices"),
    ]
    if config.has_conv:
        multiples.append(("hidden_size / conv_group_size", config.conv_groups, NUM_SLICES, "8 slices of whole groups"))
    if config.has_selector:
        multiples.append(("selector_rank", config.selector_rank, SLICE_MULTIPLE, "vectors of 16"))
    problems = [f"{name}: expected a multiple of {unit} ({why}), got {size}"
                for name, size, unit, why in multiples if size % unit]
    sums = (("hidden_size", config.hidden_size), ("num_attention_heads * head_dim", config.q_width),
            ("intermediate_size", config.intermediate_size), ("taps * hidden_size", config.taps_width))
    problems += [f"{name}: expected at most {CHUNK} or a multiple of it, in which sums over K are made, got {size}"
                 for name, size in sums if size > CHUNK and size % CHUNK]
    if config.head_dim not in HEAD_DIMS:
        problems.append(f"head_dim: expected one of {', '.join(map(str, HEAD_DIMS))}, got {config.head_dim}")
    if config.block_size > MAX_ROWS:
        problems.append(f"block_size: expected at most {MAX_ROWS}, the rows of one pass, got {config.block_size}")
    if config.candidates > config.vocab_size // NUM_SLICES:
        problems.append(f"selector_top_k: expected at most the vocabulary of a slice "
                        f"({config.vocab_size // NUM_SLICES}), got {config.candidates}")
    return problems


def check_packable(config: DraftConfig) -> None:
    """Raises ConfigError, with every size that does not fit, where `packing_problems` finds any."""
    if problems := packing_problems(config):
        raise ConfigError("a drafter of these sizes has no packed form:\n  " + "\n  ".join(problems)
                          + "\nRun it in plain JAX, which takes its parameters as they are in the file.")


def is_packed(params: Mapping) -> bool:
    """Whether a drafter's params are in packed form."""
    return "dense" in params["layers"][0]


@functools.lru_cache(maxsize=64)
def layout(config: DraftConfig) -> dict[str, int]:
    """Offsets and sizes by name, such as "dense.out" (bytes) or "small.k_norm" (values). Do not change it.

    Raises:
        ConfigError: the sizes have no packed form.
        musejax.ffi.LibraryError: the compiled library is missing or does not fit.
    """
    from musejax.ffi import library

    check_packable(config)
    return library("cpu").draft_layout(
        hidden=config.hidden_size, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim, inner=config.intermediate_size, taps=len(config.target_layer_ids),
        conv_groups=config.conv_groups, rank=config.selector_rank or 0, vocab=config.vocab_size)


# ------------------------------------------------------------------ rows of a slice


def _sliced(x: np.ndarray) -> np.ndarray:
    """[n, k] -> [s, n/s, k]."""
    return x.reshape(NUM_SLICES, -1, x.shape[-1])


def _halves(x: np.ndarray, config: DraftConfig, back: bool = False) -> np.ndarray:
    """Channels of every head along axis 0, the even ones first where the rotation pairs neighbours; or `back`."""
    if config.rope_half:
        return x
    c = config.head_dim
    order = np.concatenate([np.arange(0, c, 2), np.arange(1, c, 2)])
    return x.reshape(-1, c, *x.shape[1:])[:, np.argsort(order) if back else order].reshape(x.shape)


def _by_slice(x: np.ndarray) -> np.ndarray:
    """Kernel projection [o i g, d] -> [s, o i g/s, d]."""
    sides = x.reshape(4, NUM_SLICES, -1, x.shape[-1])
    return sides.swapaxes(0, 1).reshape(NUM_SLICES, -1, x.shape[-1])


def _from_slices(x: np.ndarray) -> np.ndarray:
    """The inverse of `_by_slice`."""
    return x.reshape(NUM_SLICES, 4, -1, x.shape[-1]).swapaxes(0, 1).reshape(-1, x.shape[-1])


def _put(out: np.ndarray, x: np.ndarray, paired: bool = False) -> None:
    """Writes [s, n, k] (or gate and up, [s, 2, n, k]) to the start of bytes [s, ...]; rows filled up with zeros."""
    n, k = x.shape[-2:]
    if padding := -n % SLICE_MULTIPLE:
        x = np.concatenate([x, np.zeros((*x.shape[:-2], padding, k), BF16)], axis=-2)
    pack_bf16(out[:, :x[0].nbytes], np.ascontiguousarray(x), min(CHUNK, k), paired)


def _get(data: np.ndarray, n: int, k: int, paired: bool = False) -> np.ndarray:
    """The inverse of `_put`: bytes [s, ...] -> [s, n, k], or [s, 2, n / 2, k]."""
    rows = -(-n // SLICE_MULTIPLE) * SLICE_MULTIPLE
    x = unpack_bf16(np.ascontiguousarray(data[:, :rows * k * 2]), rows, k, min(CHUNK, k), paired)
    return x if paired else x[:, :n]


def _small(config: DraftConfig) -> dict[str, int]:
    """Offset of every tensor in `small`."""
    names = ("input_norm", "post_norm", "q_norm", "k_norm", *_convs(config))
    return {name: layout(config)["small." + name] for name in names}


def _convs(config: DraftConfig) -> tuple[str, ...]:
    return ("attention_conv", "mlp_conv") if config.has_conv else ()


# ------------------------------------------------------------------ there and back


def _check(params: Mapping, config: DraftConfig) -> dict[tuple, np.ndarray]:
    """Leaves by path, as NumPy; optional ones only where they are."""
    leaves, wrong = {}, []
    for param in table(config):
        leaf = leaf_of(params, param)
        if leaf is not None and (leaf.dtype, leaf.shape) == (BF16, param.shape):
            leaves[param.path] = np.asarray(leaf)
        elif leaf is not None or not param.optional:
            got = "none" if leaf is None else f"{leaf.dtype} {list(leaf.shape)}"
            wrong.append(f"{'.'.join(map(str, param.path))}: expected bfloat16 {list(param.shape)}, got {got}")
    if wrong:
        raise PackingError("the drafter's parameters do not fit its config:\n  " + "\n  ".join(wrong)
                           + "\nPack parameters as `load_drafter` returns them.")
    return leaves


def pack_drafter(params: Mapping, config: DraftConfig) -> dict:
    """Public layout (params.py) -> packed form.

    Args:
        params: bfloat16 leaves of the shapes of `params.table`.

    Raises:
        PackingError: leaves that are missing or of another shape or dtype.
        ConfigError: the sizes have no packed form.
    """
    at, x = layout(config), _check(params, config)

    def packed(name, w):
        out = np.zeros((NUM_SLICES, at[name + ".bytes"]), U8)
        _put(out, w)
        return out

    tree = {"fc": packed("fc", _sliced(x["fc",])), "hidden_norm": x["hidden_norm",].astype(F32),
            "norm": x["norm",].astype(F32),
            "layers": [_pack_layer(config, {path[2]: leaf for path, leaf in x.items() if path[:2] == ("layers", i)})
                       for i in range(config.num_hidden_layers)]}
    if config.has_selector:
        tree |= {"predecessor": x["predecessor",], "successor": x["successor",],
                 "selector": packed("selector", _sliced(x["selector",]))}
    if ("lm_head",) in x:
        tree["lm_head"] = packed("head", _sliced(x["lm_head",]))
    if ("embed",) in x:
        tree["embed"] = np.ascontiguousarray(x["embed",].reshape(config.vocab_size, NUM_SLICES, -1).swapaxes(0, 1))
    if ("mask_embedding",) in x:
        tree["mask_embedding"] = x["mask_embedding",].reshape(NUM_SLICES, -1)
    return tree


def _pack_layer(config: DraftConfig, x: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    at = layout(config)
    dense, small = np.zeros((NUM_SLICES, at["dense.bytes"]), U8), np.zeros(at["small.count"], F32)

    def put(name, w, paired=False):
        _put(dense[:, at["dense." + name]:], w, paired)

    turned = [_halves(x[name], config) for name in ("q_proj", "k_proj")]
    put("qkv", np.concatenate([_sliced(w) for w in (*turned, x["v_proj"])], axis=1))
    put("out", _sliced(x["o_proj"]))
    put("gate_up", np.stack([_sliced(x["gate_proj"]), _sliced(x["up_proj"])], axis=1), paired=True)
    put("down", _sliced(x["down_proj"]))
    for name in _convs(config):
        put(name, _by_slice(x[name + "_proj"]))
    for name, start in _small(config).items():
        leaf = _halves(x[name], config) if name in ("q_norm", "k_norm") else x[name]
        small[start:start + leaf.size] = leaf.reshape(-1)
    return {"dense": dense, "small": small}


def unpack_drafter(packed: Mapping, config: DraftConfig) -> dict:
    """Packed form -> public layout: the inverse of `pack_drafter`.

    Raises:
        ConfigError: the sizes have no packed form.
    """
    at, packed = layout(config), jax.tree.map(np.asarray, packed)
    rows = {param.path: param for param in table(config)}
    leaves = {}
    for name in ("fc", "selector", "lm_head"):
        if name in packed:
            n, k = rows[name,].shape
            leaves[name,] = _get(packed[name], n // NUM_SLICES, k).reshape(n, k)
    for name in ("hidden_norm", "norm", "predecessor", "successor", "mask_embedding"):
        if name in packed:
            leaves[name,] = packed[name].reshape(-1) if name == "mask_embedding" else packed[name].astype(BF16)
    if "embed" in packed:
        leaves["embed",] = packed["embed"].swapaxes(0, 1).reshape(config.vocab_size, -1)
    for i, p in enumerate(packed["layers"]):
        def get(name, n, k, paired=False, p=p):
            return _get(p["dense"][:, at["dense." + name]:], n, k, paired)

        d, f = config.hidden_size, config.intermediate_size
        widths = (config.q_width, config.kv_width, config.kv_width)
        qkv = get("qkv", sum(widths) // NUM_SLICES, d)
        made = {}
        for name, width, end in zip(_QKV, widths, np.cumsum(widths) // NUM_SLICES, strict=True):
            w = qkv[:, end - width // NUM_SLICES:end].reshape(width, d)
            made[name] = w if name == "v_proj" else _halves(w, config, back=True)
        made["o_proj"] = get("out", d // NUM_SLICES, config.q_width).reshape(d, -1)
        gate_up = get("gate_up", 2 * f // NUM_SLICES, d, paired=True)
        made["gate_proj"], made["up_proj"] = (gate_up[:, j].reshape(f, d) for j in range(2))
        made["down_proj"] = get("down", d // NUM_SLICES, f).reshape(d, f)
        for name in _convs(config):
            made[name + "_proj"] = _from_slices(get(name, 4 * config.conv_groups // NUM_SLICES, d))
        for name, start in _small(config).items():
            shape = rows["layers", i, name].shape
            leaf = p["small"][start:start + rows["layers", i, name].size].reshape(shape).astype(BF16)
            made[name] = _halves(leaf, config, back=True) if name in ("q_norm", "k_norm") else leaf
        leaves |= {("layers", i, name): leaf for name, leaf in made.items()}
    return assemble(config, {path: leaves[path] for path in rows if path in leaves})


# ------------------------------------------------------------------ placement


def param_specs(packed: Mapping) -> dict:
    """PartitionSpec of every leaf of packed params."""
    def spec(path, _):
        return P() if path[-1].key in _WHOLE else P(AXIS)

    return jax.tree_util.tree_map_with_path(spec, packed)


def place(packed: Mapping, mesh: Mesh) -> dict:
    """Packed params on the devices of a mesh: slices over them, the rest whole on each."""
    def sharding(spec) -> NamedSharding:
        return split_axis0(mesh) if spec else replicated(mesh)

    return jax.device_put(packed, jax.tree.map(sharding, param_specs(packed), is_leaf=lambda x: isinstance(x, P)))

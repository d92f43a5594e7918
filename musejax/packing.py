"""Table form <-> packed form of the weights: the order in which kernels stream them. No bit is lost on the way.

`ffi/common/layout.h` defines the packed form; offsets and sizes are asked from the library (`layout`). The params
pytree is

    embed       bfloat16 [s, V, D/s]         as in the table form
    final_norm  bfloat16 [D]                 as in the table form
    lm_head     uint8 [s, head.bytes]
    layers[i]   dense    uint8 [s, dense.bytes]        qkvg, out, pooler, router, unpooler
                experts  uint8 [s, E, experts.bytes]   gate_up, down
                small    float32 [small.count]         gains, residual gates, selection bias, global and input scales

Axis 0 of all but `final_norm` and `small` is the slice axis. Packing is NumPy on the host. Unpacking takes NumPy or JAX
arrays, also under jit and with some of the slices only (inside a shard_map).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from musejax.config import NUM_SLICES, SLICE_MULTIPLE, ConfigError, ModelConfig
from musejax.params import BF16, F32, U8, Param, assemble, leaf_of, table
from musejax.sharding import DEVICE_COUNTS, param_sharding
from musejax.tiles import (
    U16,
    U32,
    BadScales,
    PackingError,
    bits,
    nvfp4_tile_bytes,
    pack_bf16,
    pack_nvfp4,
    unpack_bf16,
    unpack_nvfp4,
)

FORMS = ("table", "packed")
"""Forms that parameters come in: the rows of `params.table`, or those of `packed_table`."""

CHUNK = 1024
"""Columns of K that are summed together: `kChunk` of the layout, known here so that sizes can be judged without it."""

THREADS = min(os.cpu_count() or 1, 16)
"""That pack experts; more of them wait for memory."""

_QKVG = ("q_proj", "k_proj", "v_proj", "gate_proj")
_GEMMS = {"out": "o_proj", "pooler": "pooler", "unpooler": "unpooler"}

# ------------------------------------------------------------------ which sizes pack


def packing_problems(config: ModelConfig) -> list[str]:
    """Why the sizes have no packed form, one line a size; empty if they have.

    Tiles of 16 rows in each of 8 slices make hidden_size, moe_hidden_size and moe_intermediate_size multiples of 128,
    and with them ranges of K, NVFP4 tiles of 64 columns and rows of q, k, v, gate come out whole too.
    """
    tile = NUM_SLICES * SLICE_MULTIPLE
    qkvg = "q_proj, k_proj, v_proj, gate_proj"
    sizes = (  # name, what it is of which tensors, unit, whether it is cut into slices, whether it is a K
        ("hidden_size", f"N of o_proj, unpooler; K of {qkvg}, pooler, router, lm_head", tile, True, True),
        ("num_attention_heads", "N of q_proj, gate_proj", NUM_SLICES, True, False),
        ("num_key_value_heads", "N of k_proj, v_proj", NUM_SLICES, True, False),
        ("head_dim", f"N of {qkvg}", SLICE_MULTIPLE, False, False),
        ("q_width", "num_attention_heads * head_dim; K of o_proj", tile, True, True),
        ("moe_hidden_size", "N of pooler, down; K of unpooler, gate_up", tile, True, True),
        ("moe_intermediate_size", "N of gate_up; K of down", tile, True, True),
        ("num_local_experts", "N of router", NUM_SLICES, True, False),
        ("vocab_size", "N of lm_head", NUM_SLICES, True, False),
    )
    problems = []
    for name, what, unit, cut, is_k in sizes:
        size = getattr(config, name)
        expected = f"{name} ({what}): expected a multiple of {unit}"
        if size % unit and cut:
            fits = [str(d) for d in DEVICE_COUNTS if size % (unit // NUM_SLICES * d) == 0]
            problems.append(f"{expected}, got {size}; a split over 1, 2, 4 or 8 devices needs 8 slices of a multiple "
                            f"of {unit // NUM_SLICES}, this size allows {', '.join(fits) or 'none'}")
        elif size % unit:
            problems.append(f"{expected}, the rows of a tile, got {size}; it does not depend on the split")
        elif is_k and size > CHUNK and size % CHUNK:
            problems.append(f"{name} ({what}): expected a multiple of {tile} up to {CHUNK}, or of {CHUNK}, in which "
                            f"sums over K are made, got {size}; it does not depend on the split")
    return problems


def check_packable(config: ModelConfig, devices: int = 1) -> None:
    """Checks that these sizes have a packed form that so many devices can share.

    Raises:
        ConfigError: every size that does not fit, and what would.
    """
    problems = packing_problems(config)
    if devices not in DEVICE_COUNTS:
        problems.append(f"mesh: expected 1, 2, 4 or 8 devices, got {devices}")
    if problems:
        raise ConfigError(f"these sizes have no packed form on a mesh of {devices}:\n  " + "\n  ".join(problems)
                          + "\nUse the table form (implementation `reference`), or other sizes or devices.")


# ------------------------------------------------------------------ numbers, rows, trees


def layout(config: ModelConfig, layer: int) -> dict[str, int]:
    """Offsets and sizes of one layer by name, such as "dense.out" (bytes) or "small.router_bias" (values); `layout.h`.

    Do not change it: it is made once for all callers.

    Raises:
        ConfigError: the sizes have no packed form.
        musejax.ffi.LibraryError: the compiled library is missing or does not fit.
    """
    return _layout(config, layer in config.nvfp4_layers)


@functools.lru_cache(maxsize=64)
def _layout(config: ModelConfig, nvfp4: bool) -> dict[str, int]:
    from musejax.ffi import library

    check_packable(config)
    return library("cpu").layout(
        hidden=config.hidden_size, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim, moe_hidden=config.moe_hidden_size, moe_inner=config.moe_intermediate_size,
        experts=config.num_local_experts, vocab=config.vocab_size, nvfp4=nvfp4)


@dataclass(frozen=True)
class PackedParam:
    """One array of the packed pytree.

    Attributes:
        path: keys into the pytree, such as ("layers", 3, "dense").
        shape, dtype: in memory and in files.
        layout: "slices", "experts" (slices, then experts) or "whole" (a copy on every device).
    """

    path: tuple
    shape: tuple[int, ...]
    dtype: np.dtype
    layout: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def split(self) -> bool:
        """True if axis 0 is the slice axis."""
        return self.layout != "whole"

    @property
    def slices(self) -> int:
        return NUM_SLICES

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def packed_table(config: ModelConfig) -> list[PackedParam]:
    """Every array of the packed pytree: globals first, then layer by layer.

    Raises:
        ConfigError, musejax.ffi.LibraryError: see `layout`.
    """
    s, d = NUM_SLICES, config.hidden_size
    rows = [PackedParam(("embed",), (s, config.vocab_size, d // s), BF16, "slices"),
            PackedParam(("final_norm",), (d,), BF16, "whole"),
            PackedParam(("lm_head",), (s, layout(config, 0)["head.bytes"]), U8, "slices")]
    for i in range(config.num_hidden_layers):
        at = layout(config, i)
        experts = (s, config.num_local_experts, at["experts.bytes"])
        rows += [PackedParam(("layers", i, "dense"), (s, at["dense.bytes"]), U8, "slices"),
                 PackedParam(("layers", i, "experts"), experts, U8, "experts"),
                 PackedParam(("layers", i, "small"), (at["small.count"],), F32, "whole")]
    return rows


def is_packed(params: Mapping) -> bool:
    """Whether a params pytree (or one layer of it) is in packed form."""
    return "dense" in (params["layers"][0] if "layers" in params else params)


def abstract_packed(config: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> dict:
    """Packed pytree of ShapeDtypeStruct, with shardings if a mesh is given. Allocates nothing.

    Raises:
        ConfigError: the sizes have no packed form on this mesh.
    """
    check_packable(config, 1 if mesh is None else mesh.size)

    def make(row):
        sharding = None if mesh is None else param_sharding(row, mesh)
        return jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=sharding)

    return assemble(config, ((row, make(row)) for row in packed_table(config)))


@functools.lru_cache(maxsize=64)
def _rows_of(config: ModelConfig, layer: int) -> dict[str, Param]:
    """The table's rows of one layer by name."""
    return {p.path[2]: p for p in table(config) if p.path[:2] == ("layers", layer)}


# ------------------------------------------------------------------ a layer


def _small(config: ModelConfig, layer: int) -> Iterator[tuple[str, int, Param]]:
    """Name, offset and row of each tensor in `small`."""
    at, rows = layout(config, layer), _rows_of(config, layer)
    for key, offset in at.items():
        kind, _, name = key.partition(".")
        if kind == "small" and name in rows:
            yield name, offset, rows[name]


def _check_leaves(config: ModelConfig, layer: int, leaves: Mapping) -> dict[str, np.ndarray]:
    rows = _rows_of(config, layer)
    wrong = [f"{p.name}: expected {p.dtype.name} {list(p.shape)}, got "
             + (f"{leaves[name].dtype} {list(leaves[name].shape)}" if name in leaves else "none")
             for name, p in rows.items()
             if name not in leaves or (leaves[name].dtype, leaves[name].shape) != (p.dtype, p.shape)]
    if wrong:
        raise PackingError("leaves in the table form do not fit the table:\n  " + "\n  ".join(wrong)
                           + "\nPack parameters as they are loaded, before any conversion of dtypes.")
    return {name: np.asarray(leaves[name]) for name in rows}


def pack_layer(config: ModelConfig, layer: int, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One layer, table form -> packed form. NumPy; takes maps of files, and copies no tensor as a whole but qkvg.

    Args:
        leaves: name -> array of the shape and dtype of the layer's rows in `params.table`.

    Returns:
        dense uint8 [8, dense.bytes], experts uint8 [8, E, experts.bytes], small float32 [small.count].

    Raises:
        PackingError: leaves that are missing or of another shape or dtype; NVFP4 block scales that are NaN or negative,
            or 0 over codes that are not 0.
        ConfigError: the sizes have no packed form.
    """
    at, x = layout(config, layer), _check_leaves(config, layer, leaves)
    s, d, e = NUM_SLICES, config.hidden_size, config.num_local_experts
    dense = np.zeros((s, at["dense.bytes"]), U8)
    for name, w in [("qkvg", np.concatenate([x[n] for n in _QKVG], axis=1)), *((k, x[v]) for k, v in _GEMMS.items())]:
        start = at["dense." + name]
        pack_bf16(dense[:, start:start + w[0].nbytes], w, min(at["chunk"], w.shape[-1]))
    router = x["router"].reshape(s, e // s, -1, min(at["chunk"], d) // at["ranges"]).swapaxes(1, 2)
    start = at["dense.router"]
    np.copyto(dense[:, start:start + e // s * d * 4].view(F32).reshape(router.shape), router)

    experts = np.zeros((s, e, at["experts.bytes"]), U8)
    bad = BadScales(layer)
    for name in ("gate_up", "down"):
        _pack_experts(experts[:, :, at["experts." + name]:], name, x, at, bad)
    bad.raise_if_any()
    small = np.zeros(at["small.count"], U32)
    for name, start, row in _small(config, layer):
        flat = x[name].reshape(-1)
        small[start:start + row.size] = flat.view(U32) if row.dtype == F32 else flat.view(U16).astype(U32) << 16
    return {"dense": dense, "experts": experts, "small": small.view(F32)}


def _pack_experts(out: np.ndarray, name: str, x: Mapping, at: Mapping[str, int], bad: BadScales) -> None:
    """Writes one of the two matrices of every expert to the start of bytes [s, E, ...], experts in parallel."""
    w, paired = x[name], name == "gate_up"
    scale = x[name + "_scale"].view(U8) if name + "_scale" in x else None

    def pack(e):
        if scale is None:
            pack_bf16(out[:, e, :w[0, 0].nbytes], w[:, e], w.shape[-1], paired)
            return
        bad.look(name, e, scale[:, e], w[:, e])
        rows, k = w[0, 0].size // w.shape[-1], 2 * w.shape[-1]
        regions = out[:, e, :rows // at["tile"] * nvfp4_tile_bytes(k)].reshape(len(out), rows // at["tile"], -1)
        for region, codes, scales in zip(regions, w[:, e], scale[:, e], strict=True):  # small arrays stay in caches
            pack_nvfp4(region, codes, scales, at["scale_bias"], paired)

    with ThreadPoolExecutor(THREADS) as pool:  # NumPy works outside the interpreter's lock
        list(pool.map(pack, range(w.shape[1])))


def unpack_layer(config: ModelConfig, layer: int, packed: Mapping) -> dict:
    """One layer, packed form -> the very leaves of the table form. NumPy or JAX arrays, also under jit.

    Args:
        packed: dense uint8 [s, dense.bytes], experts uint8 [s, E, experts.bytes], small float32 [small.count], of all
            slices or of some.

    Returns:
        Name -> array, in the order of the table, with as many slices as `packed`.

    Raises:
        PackingError: arrays of other shapes or dtypes.
        ConfigError: the sizes have no packed form.
    """
    at, rows = layout(config, layer), _rows_of(config, layer)
    _check_packed(config, layer, packed)
    dense, experts, small = packed["dense"], packed["experts"], packed["small"]
    leaves = {}

    def gemm(name, count, k):
        start = at["dense." + name]
        return unpack_bf16(dense[:, start:start + count * k * 2], count, k, min(at["chunk"], k))

    counts = [rows[name].shape[1] for name in _QKVG]
    qkvg = gemm("qkvg", sum(counts), config.hidden_size)
    for name, count, end in zip(_QKVG, counts, np.cumsum(counts), strict=True):
        leaves[name] = qkvg[:, end - count:end]
    for name, leaf in _GEMMS.items():
        leaves[leaf] = gemm(name, *rows[leaf].shape[1:])
    _, n, k = rows["router"].shape
    router = bits(dense[:, at["dense.router"]:at["dense.router"] + n * k * 4], F32)
    router = router.reshape(len(dense), -1, n, min(at["chunk"], k) // at["ranges"]).swapaxes(1, 2)
    leaves["router"] = router.reshape(len(dense), n, k)

    for name, count, k in (("gate_up", 2 * config.moe_intermediate_size // NUM_SLICES, config.moe_hidden_size),
                           ("down", config.moe_hidden_size // NUM_SLICES, config.moe_intermediate_size)):
        start, paired = at["experts." + name], name == "gate_up"
        if layer in config.nvfp4_layers:
            data = experts[:, :, start:start + count // at["tile"] * nvfp4_tile_bytes(k)]
            leaves[name], leaves[name + "_scale"] = unpack_nvfp4(data, count, k, at["scale_bias"], paired)
        else:
            leaves[name] = unpack_bf16(experts[:, :, start:start + count * k * 2], count, k, k, paired)
    for name, start, row in _small(config, layer):
        x = small[start:start + row.size]
        if row.dtype == BF16:
            x = bits((bits(x, U32) >> 16).astype(U16), BF16)
        leaves[name] = x.reshape(row.shape)
    return {name: leaves[name] for name in rows}


def _check_packed(config: ModelConfig, layer: int, packed: Mapping) -> None:
    at = layout(config, layer)
    wanted = {"dense": (U8, ("s", at["dense.bytes"])),
              "experts": (U8, ("s", config.num_local_experts, at["experts.bytes"])),
              "small": (F32, (at["small.count"],))}
    for name, (dtype, shape) in wanted.items():
        x = packed[name]
        lead = 1 if shape[0] == "s" else 0
        if x.dtype != dtype or x.ndim != len(shape) or tuple(x.shape[lead:]) != shape[lead:]:
            raise PackingError(f"layers.{layer}.{name}: expected {dtype.name} [{', '.join(map(str, shape))}], got "
                               f"{x.dtype} {list(x.shape)}; pack with this config and this version")


# ------------------------------------------------------------------ the head, and everything


def pack_head(config: ModelConfig, lm_head: np.ndarray) -> np.ndarray:
    """bf16 [8, V/8, D] -> uint8 [8, head.bytes]; rows are filled up to whole tiles with zeros."""
    at, (s, n, k) = layout(config, 0), lm_head.shape
    padded = np.zeros((s, -(-n // at["tile"]) * at["tile"], k), BF16)
    padded[:, :n] = lm_head
    out = np.zeros((s, at["head.bytes"]), U8)
    pack_bf16(out[:, :padded[0].nbytes], padded, min(at["chunk"], k))
    return out


def unpack_head(config: ModelConfig, packed):
    """uint8 [s, head.bytes] -> bf16 [s, V/8, D]. NumPy or JAX arrays, also under jit."""
    at, n, k = layout(config, 0), config.vocab_size // NUM_SLICES, config.hidden_size
    rows = -(-n // at["tile"]) * at["tile"]
    return unpack_bf16(packed[:, :rows * k * 2], rows, k, min(at["chunk"], k))[:, :n]


def pack_params(params: Mapping, config: ModelConfig) -> dict:
    """Table form -> packed form, NumPy on the host; needs room for both.

    Raises:
        PackingError, ConfigError: see `pack_layer`.
    """
    embed, norm, head = (np.asarray(leaf_of(params, p)) for p in table(config)[:3])
    return {"embed": embed, "final_norm": norm, "lm_head": pack_head(config, head),
            "layers": [pack_layer(config, i, leaves) for i, leaves in enumerate(params["layers"])]}


def unpack_params(packed: Mapping, config: ModelConfig) -> dict:
    """Packed form -> table form, the inverse of `pack_params`. NumPy or JAX arrays, also under jit.

    Raises:
        PackingError, ConfigError: see `unpack_layer`.
    """
    return {"embed": packed["embed"], "final_norm": packed["final_norm"],
            "lm_head": unpack_head(config, packed["lm_head"]),
            "layers": [unpack_layer(config, i, layer) for i, layer in enumerate(packed["layers"])]}

"""The parameter table: every tensor's name, shape, dtype, slicing and place in the params pytree.

Loading, conversion, sharding, initialisation, `musejax info` and the tests all read this one list.

The params pytree is a plain dict `{"embed", "layers": [dict, ...], "final_norm", "lm_head"}`. A split
tensor is stored with a leading slice axis, so that a device that owns slices [a, b) owns rows [a, b) of
every array; the reshape is invertible and touches no bits:

    layout     published          in memory
    whole      any                the same (norm gains, residual gates, selection bias)
    rows       [N, K]             [s, N/s, K]
    columns    [V, D]             [s, V, D/s]        embedding: each slice holds D/s columns of each row
    gate_up    [E, 2F, M]         [s, E, 2, F/s, M]  gate rows first, then up rows, as published
    down       [E, M, F]          [s, E, M/s, F]

Layers of `config.nvfp4_layers` have their experts in NVFP4 (nvfp4.py): codes and block scales are sliced like the
matrix they stand for, with K/2 bytes and K/16 scales in place of K columns; global and input scales are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from musejax.config import ConfigError, ModelConfig
from musejax.nvfp4 import BLOCK, E4M3

TEXT = "model.language_model."
BF16, F32, U8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.uint8)


@dataclass(frozen=True)
class Param:
    """One row of the table.

    Attributes:
        path: keys into the params pytree, such as ("layers", 3, "q_proj").
        hf_key: published tensor name.
        hf_shape: published shape.
        dtype: dtype of the published tensor, and in memory.
        layout: how it is sliced; see the module docstring.
        group: for reports: attention, experts, router, pooling, norms, embedding, lm_head.
        slices: number of slices, 8 or 1.
        any_float: also accepted from files as float32 (residual gates; spec section 5.1).
        per_element: parameters of the model in one element: 2 in NVFP4 codes, 0 in their scales.
    """

    path: tuple
    hf_key: str
    hf_shape: tuple[int, ...]
    dtype: np.dtype
    layout: str
    group: str
    slices: int
    any_float: bool = False
    per_element: int = 1

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def size(self) -> int:
        return math.prod(self.hf_shape)

    @property
    def parameters(self) -> int:
        return self.size * self.per_element

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in memory."""
        s, h = self.slices, self.hf_shape
        return {
            "whole": lambda: h,
            "rows": lambda: (s, h[0] // s, *h[1:]),
            "columns": lambda: (s, h[0], h[1] // s),
            "gate_up": lambda: (s, h[0], 2, h[1] // 2 // s, h[2]),
            "down": lambda: (s, h[0], h[1] // s, h[2]),
        }[self.layout]()

    @property
    def split(self) -> bool:
        """True if axis 0 is the slice axis."""
        return self.layout != "whole"


_LAYER = (
    # name, published name, shape, dtype, layout, group
    ("input_norm", "input_layernorm.weight", "D", "bf16", "whole", "norms"),
    ("q_proj", "self_attn.q_proj.weight", "Q D", "bf16", "rows", "attention"),
    ("k_proj", "self_attn.k_proj.weight", "K D", "bf16", "rows", "attention"),
    ("v_proj", "self_attn.v_proj.weight", "K D", "bf16", "rows", "attention"),
    ("gate_proj", "self_attn.gate_proj.weight", "Q D", "bf16", "rows", "attention"),
    ("o_proj", "self_attn.o_proj.weight", "D Q", "bf16", "rows", "attention"),
    ("attention_residual_gate", "post_attention_residual_gate.gate", "D", "bf16*", "whole", "norms"),
    ("ffn_norm", "pre_feedforward_layernorm.weight", "D", "bf16", "whole", "norms"),
    ("router", "mlp.gate.weight", "E D", "f32", "rows", "router"),
    ("router_bias", "mlp.gate.e_score_correction_bias", "E", "f32", "whole", "router"),
    ("pooler", "mlp.pre_expert_proj.weight", "M D", "bf16", "rows", "pooling"),
    ("expert_norm", "mlp.pre_expert_norm.weight", "M", "bf16", "whole", "norms"),
    ("gate_up", "mlp.experts.gate_up_proj", "E 2F M", "bf16", "gate_up", "experts"),
    ("down", "mlp.experts.down_proj", "E M F", "bf16", "down", "experts"),
    ("post_expert_norm", "mlp.experts.post_expert_norm.weight", "M", "bf16", "whole", "norms"),
    ("unpooler", "mlp.post_expert_proj.weight", "D M", "bf16", "rows", "pooling"),
    ("post_ffn_norm", "post_feedforward_layernorm.weight", "D", "bf16", "whole", "norms"),
    ("ffn_residual_gate", "post_feedforward_residual_gate.gate", "D", "bf16*", "whole", "norms"),
)
_NVFP4 = {
    # row of _LAYER -> the rows in its place
    "gate_up": (
        ("gate_up", "mlp.experts.gate_up_proj", "E 2F M/2", "codes", "gate_up", "experts"),
        ("gate_up_scale", "mlp.experts.gate_up_proj_weight_scale", "E 2F M/16", "e4m3", "gate_up", "experts"),
        ("gate_up_global", "mlp.experts.gate_up_proj_weight_scale_2", "E 2", "scale", "whole", "experts"),
        ("gate_up_input_scale", "mlp.experts.gate_up_proj_input_scale", "E 2", "scale", "whole", "experts"),
    ),
    "down": (
        ("down", "mlp.experts.down_proj", "E M F/2", "codes", "down", "experts"),
        ("down_scale", "mlp.experts.down_proj_weight_scale", "E M F/16", "e4m3", "down", "experts"),
        ("down_global", "mlp.experts.down_proj_weight_scale_2", "E", "scale", "whole", "experts"),
        ("down_input_scale", "mlp.experts.down_proj_input_scale", "E", "scale", "whole", "experts"),
    ),
}
_DTYPES = {"bf16": BF16, "bf16*": BF16, "f32": F32, "codes": U8, "e4m3": E4M3, "scale": F32}
_PER_ELEMENT = {"codes": 2, "e4m3": 0, "scale": 0}
_GLOBAL = (
    ("embed", TEXT + "embed_tokens.weight", "V D", "bf16", "columns", "embedding"),
    ("final_norm", TEXT + "norm.weight", "D", "bf16", "whole", "norms"),
    ("lm_head", "lm_head.weight", "V D", "bf16", "rows", "lm_head"),
)


def table(config: ModelConfig) -> list[Param]:
    """The parameter table of a model, globals first, then layer by layer."""
    sizes = {
        "D": config.hidden_size, "V": config.vocab_size, "Q": config.q_width, "K": config.kv_width,
        "E": config.num_local_experts, "M": config.moe_hidden_size, "F": config.moe_intermediate_size,
        "2F": 2 * config.moe_intermediate_size, "2": 2,
        "M/2": config.moe_hidden_size // 2, "M/16": config.moe_hidden_size // BLOCK,
        "F/2": config.moe_intermediate_size // 2, "F/16": config.moe_intermediate_size // BLOCK,
    }

    def row(path, hf_key, shape, dtype, layout, group):
        return Param(path, hf_key, tuple(sizes[a] for a in shape.split()), _DTYPES[dtype], layout, group,
                     config.num_slices, any_float=dtype.endswith("*"), per_element=_PER_ELEMENT.get(dtype, 1))

    out = [row((name,), key, *rest) for name, key, *rest in _GLOBAL]
    for i in range(config.num_hidden_layers):
        quantised = i in config.nvfp4_layers
        rows = (r for plain in _LAYER for r in (_NVFP4.get(plain[0], (plain,)) if quantised else (plain,)))
        out += [row(("layers", i, name), f"{TEXT}layers.{i}.{key}", *rest) for name, key, *rest in rows]
    return out


def slice_tensor(param: Param, x):
    """Published shape -> in-memory shape, bits unchanged. Takes NumPy or JAX arrays."""
    s, h = param.slices, param.hf_shape
    if param.layout == "columns":
        return x.reshape(h[0], s, h[1] // s).swapaxes(0, 1)
    if param.layout == "gate_up":
        return x.reshape(h[0], 2, s, h[1] // 2 // s, h[2]).transpose(2, 0, 1, 3, 4)
    if param.layout == "down":
        return x.reshape(h[0], s, h[1] // s, h[2]).swapaxes(0, 1)
    return x.reshape(param.shape)


def unslice_tensor(param: Param, x):
    """In-memory shape -> published shape: the inverse of `slice_tensor`."""
    axes = {"columns": (1, 0, 2), "gate_up": (1, 2, 0, 3, 4), "down": (1, 0, 2, 3)}.get(param.layout)
    return (x if axes is None else x.transpose(axes)).reshape(param.hf_shape)


def build(config: ModelConfig, make: Callable[[Param], Any]) -> dict:
    """The params pytree with `make(param)` at every leaf."""
    return assemble(config, ((param, make(param)) for param in table(config)))


def assemble(config: ModelConfig, leaves: Iterable[tuple[Param, Any]]) -> dict:
    """The params pytree from (param, leaf) pairs, in any order."""
    tree: dict = {"layers": [{} for _ in range(config.num_hidden_layers)]}
    for param, leaf in leaves:
        node = tree
        for key in param.path[:-1]:
            node = node[key]
        node[param.path[-1]] = leaf
    return tree


def leaf_of(params: dict, param: Param):
    """The leaf of a params pytree that belongs to this row of the table."""
    for key in param.path:
        params = params[key]
    return params


def abstract_params(config: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> dict:
    """Pytree of ShapeDtypeStruct, with shardings if a mesh is given. Allocates nothing."""
    from musejax.sharding import param_sharding

    def make(param):
        sharding = None if mesh is None else param_sharding(param, mesh)
        return jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=sharding)

    return build(config, make)


def init_params(config: ModelConfig, key: jax.Array, dtype=None) -> dict:
    """Random parameters that start training well.

    GEMM weights are normal with deviation 1/sqrt(fan-in); gains start at 0 (centred form), the final
    gain at 1, residual gates at -0.3 (beta = 0.27), the selection bias at 0.

    Args:
        dtype: dtype of every leaf, float32 for master weights; None takes the table's.

    Raises:
        ConfigError: `config` has NVFP4 layers; quantise trained weights instead.
    """
    if config.nvfp4_layers:
        raise ConfigError("nvfp4_layers: random parameters are BF16, expected no NVFP4 layers; quantise a checkpoint")
    params = table(config)
    keys = dict(zip(params, jax.random.split(key, len(params)), strict=True))

    def make(param):
        kind = dtype or param.dtype
        if param.group == "norms" or param.path[-1] == "router_bias":
            start = 1.0 if param.path == ("final_norm",) else -0.3 if "residual_gate" in param.path[-1] else 0.0
            return jnp.full(param.shape, start, kind)
        scale = 1.0 / math.sqrt(param.hf_shape[-1])
        values = jax.random.normal(keys[param], param.hf_shape, jnp.float32) * scale
        return slice_tensor(param, values).astype(kind)

    return build(config, make)

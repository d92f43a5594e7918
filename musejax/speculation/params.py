"""Parameters of a drafter: the table of its tensors, loading and saving the public layout, and random ones.

The params pytree is a plain dict of arrays in their published shapes (dflash2.md section 1.3), all bfloat16 in a file:

    fc [d, u d]   hidden_norm [d]   norm [d]
    predecessor, successor [v, r]   selector [r, d]           DFlash 2 only
    layers: a list of dicts
        input_norm, post_norm [d]   q_norm, k_norm [c]
        q_proj [n c, d]   k_proj, v_proj [k c, d]   o_proj [d, n c]
        gate_proj, up_proj [f, d]   down_proj [d, f]
        attention_conv, mlp_conv [o, i, d]   attention_conv_proj, mlp_conv_proj [o i g, d]     DFlash 2 only
    embed, lm_head [v, d]   mask_embedding [d]                only where a file brings its own

Without `embed` and `lm_head` the drafter borrows the target's (draft.py).
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from musejax.checkpoint.errors import Faults
from musejax.checkpoint.shards import SINGLE, Tensor, open_shards
from musejax.config import ConfigError, ModelConfig
from musejax.params import BF16
from musejax.speculation.config import DraftConfig


@dataclass(frozen=True)
class DraftParam:
    """One row of the table.

    Attributes:
        path: keys into the params pytree, such as ("layers", 3, "q_proj").
        key: name in a file.
        shape: in a file and in memory.
        start: how training starts: `linear` (normal, deviation 1/sqrt(fan-in)), `ones`, `zeros`, `small` (normal,
            deviation 0.02) or `identity` (a convolution that changes nothing).
        optional: a file may lack it; the target's is used then.
    """

    path: tuple
    key: str
    shape: tuple[int, ...]
    start: str
    optional: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


_GLOBAL = (
    ("fc", "fc.weight", "D U", "linear"),
    ("hidden_norm", "hidden_norm.weight", "D", "ones"),
    ("norm", "norm.weight", "D", "ones"),
)
_SELECTOR = (
    ("predecessor", "candidate_selector.predecessor_codebook", "V R", "small"),
    ("successor", "candidate_selector.successor_codebook", "V R", "zeros"),
    ("selector", "candidate_selector.hidden_projection.weight", "R D", "linear"),
)
_LAYER = (
    ("input_norm", "input_layernorm.weight", "D", "ones"),
    ("post_norm", "post_attention_layernorm.weight", "D", "ones"),
    ("q_proj", "self_attn.q_proj.weight", "Q D", "linear"),
    ("k_proj", "self_attn.k_proj.weight", "K D", "linear"),
    ("v_proj", "self_attn.v_proj.weight", "K D", "linear"),
    ("o_proj", "self_attn.o_proj.weight", "D Q", "linear"),
    ("q_norm", "self_attn.q_norm.weight", "C", "ones"),
    ("k_norm", "self_attn.k_norm.weight", "C", "ones"),
    ("gate_proj", "mlp.gate_proj.weight", "F D", "linear"),
    ("up_proj", "mlp.up_proj.weight", "F D", "linear"),
    ("down_proj", "mlp.down_proj.weight", "D F", "linear"),
)
_CONV = (
    ("attention_conv", "attention_conv.base_kernel", "2 2 D", "identity"),
    ("attention_conv_proj", "attention_conv.kernel_projection.weight", "G D", "zeros"),
    ("mlp_conv", "mlp_conv.base_kernel", "2 2 D", "identity"),
    ("mlp_conv_proj", "mlp_conv.kernel_projection.weight", "G D", "zeros"),
)
_EXTRAS = (
    ("embed", "embed_tokens.weight", "V D", "linear"),
    ("lm_head", "lm_head.weight", "V D", "linear"),
    ("mask_embedding", "mask_embedding", "D", "linear"),
)
PICKLED_MASK = "mask_embedding.pt"

# Spellings of exporters, as (pattern, published spelling); a `model.` in front is dropped first.
_SPELLINGS = (
    (r"(candidate_selector\.(?:predecessor|successor)_codebook)\.weight", r"\1"),
    (r"encoder\.fc\.weight", "fc.weight"),
    (r"encoder\.output_norm_enc\.weight", "hidden_norm.weight"),
    (r"mask_embedding\.weight", "mask_embedding"),
)


def table(config: DraftConfig) -> list[DraftParam]:
    """Every tensor a drafter may have, globals first, then layer by layer, the optional ones last."""
    sizes = {"D": config.hidden_size, "U": config.taps_width, "V": config.vocab_size, "R": config.selector_rank,
             "Q": config.q_width, "K": config.kv_width, "C": config.head_dim, "F": config.intermediate_size,
             "2": 2, "G": 4 * config.conv_groups}

    def row(path, key, shape, start, optional=False):
        return DraftParam(path, key, tuple(sizes[a] for a in shape.split()), start, optional)

    out = [row((name,), *rest) for name, *rest in _GLOBAL + (_SELECTOR if config.has_selector else ())]
    for i in range(config.num_hidden_layers):
        rows = _LAYER + (_CONV if config.has_conv else ())
        out += [row(("layers", i, name), f"layers.{i}.{key}", *rest) for name, key, *rest in rows]
    return out + [row((name,), *rest, optional=True) for name, *rest in _EXTRAS]


def required(config: DraftConfig) -> list[DraftParam]:
    """The table without the optional rows: what a drafter's own parameters are."""
    return [param for param in table(config) if not param.optional]


def num_parameters(config: DraftConfig) -> int:
    """Parameters of the drafter itself, nothing borrowed."""
    return sum(param.size for param in required(config))


def assemble(config: DraftConfig, leaves: dict) -> dict:
    """The params pytree from leaves by path."""
    params: dict = {"layers": [{} for _ in range(config.num_hidden_layers)]}
    for path, leaf in leaves.items():
        node = params
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = leaf
    return params


def leaf_of(params: dict, param: DraftParam):
    """The leaf of a params pytree that belongs to this row, None if there is none."""
    for key in param.path[:-1]:
        params = params[key]
    return params.get(param.path[-1])


def init_params(config: DraftConfig, key: jax.Array, dtype=jnp.float32) -> dict:
    """Random parameters to train from (section 7): convolutions at identity, successor codebook 0.

    Args:
        dtype: of every leaf; float32 for master weights.
    """
    rows = required(config)

    def make(param, key):
        if param.start == "identity":
            return jnp.zeros(param.shape, dtype).at[:, 0].set(1)
        if param.start in ("ones", "zeros"):
            return jnp.full(param.shape, float(param.start == "ones"), dtype)
        scale = 0.02 if param.start == "small" else 1 / math.sqrt(param.shape[-1])
        return (jax.random.normal(key, param.shape, jnp.float32) * scale).astype(dtype)

    keys = jax.random.split(key, len(rows))
    return assemble(config, {p.path: make(p, k) for p, k in zip(rows, keys, strict=True)})


# ------------------------------------------------------------------ files


def canonical_name(name: str) -> str:
    """A tensor's name in the table's spelling; unknown names keep theirs."""
    name = name.removeprefix("model.")
    for pattern, spelling in _SPELLINGS:
        if match := re.fullmatch(pattern, name):
            return match.expand(spelling)
    return name


def load_drafter(folder: str | Path, target: ModelConfig | None = None, *, device=None) -> tuple[DraftConfig, dict]:
    """Reads a published drafter: one safetensors file (or several with an index) and config.json.

    Args:
        target: the model it is to draft for; checked against if given.
        device: device or sharding of every array; None is the default one.

    Returns:
        (config, params of bfloat16 arrays).

    Raises:
        ConfigError: config.json is not one this package can run, or not for this target.
        CheckpointError: damaged files (a wrong length included), or tensors that are missing, unexpected, or of another
            shape or dtype; all faults in one text, before any tensor is read.
    """
    folder = Path(folder)
    config = DraftConfig.from_folder(folder)
    if target is not None:
        try:
            config.check_against(target)
        except ConfigError as err:
            raise ConfigError(f"{folder}: {err}") from None
    tensors = _match(folder, config)
    leaves = {path: jax.device_put(np.array(tensor.map()).reshape(shape), device)
              for path, (tensor, shape) in tensors.items()}
    return config, assemble(config, leaves)


def _match(folder: Path, config: DraftConfig) -> dict[tuple, tuple[Tensor, tuple[int, ...]]]:
    """The tensor of each row that the files hold, with the row's shape, by path."""
    faults, found = Faults(), {}
    for tensor in open_shards(folder).tensors.values():
        name = canonical_name(tensor.name)
        if name in found:
            faults.add("tensor twice", f"{name}: as {found[name].name} and as {tensor.name}")
        found.setdefault(name, tensor)
    out = {}
    for param in table(config):
        tensor = found.pop(param.key, None)
        if tensor is None:
            if not param.optional:
                faults.add("missing tensor", f"{param.key}: expected BF16 {list(param.shape)}")
            continue
        shape = tensor.shape[1:] if param.optional and tensor.shape == (1, *param.shape) else tensor.shape
        if shape != param.shape:
            faults.add("wrong shape", f"{tensor.name}: expected {list(param.shape)}, got {list(tensor.shape)}")
        if tensor.dtype != "BF16":
            faults.add("wrong dtype", f"{tensor.name}: expected BF16, got {tensor.dtype}")
        out[param.path] = tensor, param.shape
    for tensor in found.values():
        faults.add("unexpected tensor", f"{tensor.name}: {tensor.dtype} {list(tensor.shape)}")
    if (folder / PICKLED_MASK).exists() and ("mask_embedding",) not in out:
        faults.add("pickled mask embedding", f"{PICKLED_MASK}: a pickle is never read, and drafts are poor without it; "
                                             "save it in the safetensors file as 'mask_embedding'")
    faults.raise_if_any(f"{folder}: the tensors do not fit the drafter's config ({config.num_hidden_layers} layers, "
                        f"hidden_size {config.hidden_size}, {len(config.target_layer_ids)} taps)",
                        "No tensor was read. Take config.json and the safetensors file from the same checkpoint.")
    return out


def save_drafter(folder: str | Path, params: dict, config: DraftConfig) -> Path:
    """Writes `model.safetensors` (bfloat16, table order) and `config.json`, each in one atomic step.

    Args:
        params: of any float dtype; rounded to bfloat16.

    Returns:
        The folder, made if need be.

    Raises:
        CheckpointError: params lack a tensor of the table or have one of another shape; all of them.
    """
    folder, faults, tensors = Path(folder), Faults(), {}
    for param in table(config):
        leaf = leaf_of(params, param)
        if leaf is None:
            if not param.optional:
                faults.add("missing parameter", param.key)
        elif leaf.shape != param.shape:
            faults.add("wrong shape", f"{param.key}: expected {list(param.shape)}, got {list(leaf.shape)}")
        else:
            tensors[param.key] = np.ascontiguousarray(np.asarray(leaf).astype(BF16))
    faults.raise_if_any(f"{folder}: the parameters do not fit the config", "Nothing was written.")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{SINGLE}.partial"
    save_file(tensors, draft, metadata={"format": "pt"})
    draft.chmod(0o644)  # the library lets only the owner read
    text = folder / "config.json.partial"
    text.write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    os.replace(draft, folder / SINGLE)
    os.replace(text, folder / "config.json")
    return folder

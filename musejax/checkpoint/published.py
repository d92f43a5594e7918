"""Published checkpoints (Hugging Face folders): safetensors names -> rows of the parameter table.

Accepted spellings of a decoder tensor `layers.0.mlp.gate.weight` are the prefixes of `PREFIXES`, the published
one first; `lm_head.weight` may stand at the root or behind `language_model.` or `model.`. Experts may be stacked
(`mlp.experts.gate_up_proj`) or one by one (`mlp.experts.3.gate_proj.weight`); stacked ones may be NVFP4, layer by
layer (`quantised.py`). Towers and leftovers of training are skipped. Residual gates may be float32; values that
bfloat16 cannot hold are rounded, with a warning, since every other array of the table keeps its one dtype.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from musejax.checkpoint.errors import CheckpointError, Faults
from musejax.checkpoint.quantised import SCALES, check_values, declared, nvfp4_layers
from musejax.checkpoint.shards import NUMPY_DTYPES, ShardSet, Tensor, file_dtype, holds_safetensors, open_shards
from musejax.config import ModelConfig
from musejax.params import TEXT, Param, slice_tensor, table

PREFIXES = (TEXT, "language_model.model.", "language_model.", "model.", "")
"""What may stand before `embed_tokens`, `norm` and `layers`; the first is the published one."""

_DECODER = re.compile(r"(?:embed_tokens\.|norm\.|layers\.|embed_norm\.)")
_LM_HEAD = {prefix + "lm_head.weight" for prefix in ("", "language_model.", "model.")}
_SKIPPED = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_adapter|vision_projection|audio_tower)\."
    r"|rotary_emb|num_tokens_per_expert"
    r"|\.mlp\.norm_weight$|(?:^|\.)embed_norm\.weight$|\.self_attn\.[qkv]_scale$"
)
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
REPLACES_NOTHING = "overlay tensor replaces nothing"
_STACKED = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


@dataclass(frozen=True)
class Source:
    """Where the values of one parameter come from.

    Attributes:
        param: the row of the table.
        tensors: one tensor of the published shape; or, for experts stored one by one, those of expert 0, then
            those of expert 1, ... (gate and up, or down).
    """

    param: Param
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def view(self) -> np.ndarray:
        """The values in the table's shape and dtype: a map of the file if it holds them as they are, else a copy."""
        tensor = self.tensors[0]
        if tensor.shape == self.param.hf_shape and NUMPY_DTYPES[tensor.dtype] == self.param.dtype:
            mapped = np.asarray(slice_tensor(self.param, tensor.map()))
            if mapped.flags.aligned:  # a header of odd length shifts everything behind it
                return mapped
        return self.read()

    def read(self, slices: slice = slice(None)) -> np.ndarray:
        """Values of some slices (all of an unsplit tensor), as a fresh C-order array of the table's shape and dtype."""
        if self.tensors[0].shape == self.param.hf_shape:
            view = slice_tensor(self.param, self.tensors[0].map())  # a view: only what is copied below is read
            return np.array(view[slices] if self.param.split else view, dtype=self.param.dtype, order="C", copy=True)
        count = len(range(*slices.indices(self.param.slices)))
        out = np.empty((count, *self.param.shape[1:]), self.param.dtype)
        parts = len(_STACKED[self.param.layout])
        for i, tensor in enumerate(self.tensors):
            expert, part = divmod(i, parts)
            rows = tensor.map().reshape(self.param.slices, -1, tensor.shape[1])[slices]  # [slices, rows, columns]
            out[(slice(None), expert, part) if parts > 1 else (slice(None), expert)] = rows
        return out


@dataclass(frozen=True)
class Published:
    """A published checkpoint whose headers were checked; no tensor was read.

    Attributes:
        folder: of the base checkpoint.
        config: its sizes, and which layers have NVFP4 experts.
        sources: one per row of the parameter table, in the table's order.
        skipped: tensors that the decoder does not use (towers, leftovers).
        shards: the files: the base's, then each overlay's.
    """

    folder: Path
    config: ModelConfig
    sources: tuple[Source, ...]
    skipped: tuple[Tensor, ...]
    shards: tuple[ShardSet, ...]


def open_published(folder: str | Path, config: ModelConfig | None = None,
                   overlay: Sequence[str | Path] | str | Path = ()) -> Published:
    """Opens a Hugging Face folder and compares every header with the parameter table.

    Args:
        folder: holds `config.json` and safetensors files.
        config: used instead of `config.json` if given. Which layers have NVFP4 experts is always read from the files.
        overlay: folders whose tensors replace those of the same name; a later one wins. Scales come with the NVFP4
            codes they belong to, and go with them.

    Raises:
        ConfigError: `config.json` is not one this package can run.
        CheckpointError: damaged files, or tensors that do not fit; all faults in one text.
    """
    folder = Path(folder)
    config = config or ModelConfig.from_folder(folder)
    overlay = [overlay] if isinstance(overlay, (str, Path)) else list(overlay)
    base = open_shards(folder)
    layers = []
    for path in map(Path, overlay):
        if not holds_safetensors(path):
            raise CheckpointError(f"{path}: expected an overlay folder with .safetensors files, found "
                                  f"{'none in it' if path.is_dir() else 'no such folder'}")
        layers.append(open_shards(path, any_files=True))
    faults = Faults()
    found, skipped = _by_canonical_name(base, faults)
    rows = {param.hf_key: param for param in table(config)}
    _keeps_its_word(folder, found, config, faults)
    for shards in layers:
        _keeps_its_word(shards.folder, _lay_over(found, shards, rows, faults), config, faults)
    config = replace(config, nvfp4_layers=nvfp4_layers(found, config))
    sources = _match({param.hf_key: param for param in table(config)}, found, faults)
    faults.raise_if_any(
        f"{folder}: the tensors do not fit the config ({config.num_hidden_layers} layers, hidden_size "
        f"{config.hidden_size}, {config.num_local_experts} experts)",
        f"No tensor was read. Layers {', '.join(map(str, config.nvfp4_layers))} are taken for NVFP4 (stacked experts, "
        "codes and scales), the others for BF16." if config.nvfp4_layers else
        "No tensor was read. An overlay may only replace tensors of the base." if faults.has(REPLACES_NOTHING) else
        "No tensor was read. Take config.json and safetensors files from the same checkpoint.")
    return Published(folder, config, tuple(sources), tuple(skipped), (base, *layers))


def canonical_name(name: str) -> str | None:
    """Published spelling of a tensor's name; None if the decoder skips it; unknown names stay as they are."""
    if _SKIPPED.search(name):
        return None
    if name in _LM_HEAD:
        return "lm_head.weight"
    for prefix in PREFIXES:
        if name.startswith(prefix) and _DECODER.match(name, len(prefix)):
            return TEXT + name[len(prefix):]
    return name


def _by_canonical_name(shards: ShardSet, faults: Faults) -> tuple[dict[str, Tensor], list[Tensor]]:
    found: dict[str, Tensor] = {}
    skipped = []
    for tensor in shards.tensors.values():
        name = canonical_name(tensor.name)
        if name is None:
            skipped.append(tensor)
        elif name in found:
            faults.add("tensor twice", f"{name}: as {found[name].name} and as {tensor.name}")
        else:
            found[name] = tensor
    return found, skipped


def _stem(name: str) -> str:
    """Name of the expert codes that an NVFP4 scale belongs to; other names as they are."""
    ending = next((end for end in SCALES if name.endswith(end)), None)
    return name.removesuffix(ending) if ending and ".mlp.experts." in name else name


def _owner(name: str) -> str:
    """Name of the table row a tensor belongs to: for one expert's tensor, the stacked one."""
    match = _EXPERT.fullmatch(name)
    return match[1] + ("down_proj" if match[3] == "down_proj" else "gate_up_proj") if match else name


def _keeps_its_word(folder: Path, found: dict[str, Tensor], config: ModelConfig, faults: Faults) -> None:
    """A folder that declares NVFP4 experts must have some."""
    if declared(folder, faults) and not nvfp4_layers(found, config):
        faults.add("no NVFP4 experts", f"{folder.name} declares them, but has no packed codes and none of their scales")


def _lay_over(found: dict[str, Tensor], shards: ShardSet, rows: dict[str, Param], faults: Faults) -> dict[str, Tensor]:
    """Replaces tensors of `found` by those of an overlay, which are the result."""
    new, skipped = _by_canonical_name(shards, faults)
    if not new:
        what = f"only tensors that the decoder skips, such as {skipped[0].name}" if skipped else "no tensor"
        faults.add(REPLACES_NOTHING, f"{shards.folder}: {what}")
    for name in new:
        if name not in found and _owner(_stem(name)) not in rows:
            faults.add(REPLACES_NOTHING, f"{name} {_where(new[name])}")
    stacked = {name for name in new if name == _owner(name)}
    single = {_owner(name) for name in new} - stacked
    for name in list(found):  # an overlay may store experts the other way than the base
        if (name != _owner(name) and _owner(name) in stacked) or _stem(name) in single:
            del found[name]
        elif _stem(name) != name and _stem(name) in stacked:
            del found[name]
    found.update({name: tensor for name, tensor in new.items() if name in found or _owner(_stem(name)) in rows})
    return new


def _match(rows: dict[str, Param], found: dict[str, Tensor], faults: Faults) -> list[Source]:
    """One source per row; adds what is missing, unexpected, mis-shaped or mis-typed to `faults`."""
    wanted: set[str] = set()
    sources = []
    owners = {_owner(name) for name in found if name != _owner(name)}
    for key, param in rows.items():
        if key not in owners:
            parts = {key: param.hf_shape}
        elif key in found:
            faults.add("tensor twice", f"{key}: experts both stacked and one by one")
            wanted.update(name for name in found if _owner(name) == key)
            continue
        else:
            parts = _expert_shapes(param)
        wanted.update(parts)
        tensors = [found[name] for name in parts if _fits(param, name, parts[name], found.get(name), faults)]
        if len(tensors) == len(parts):
            sources.append(Source(param, tuple(tensors)))
    for name in sorted(set(found) - wanted):
        faults.add("unexpected tensor", f"{found[name].name}: {found[name].dtype} {list(found[name].shape)} "
                                        f"{_where(found[name])}")
    return sources


def _expert_shapes(param: Param) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that make up a stacked expert parameter, expert by expert."""
    stem = param.hf_key.rpartition(".")[0]
    names = _STACKED[param.layout]
    shape = (param.hf_shape[1] // len(names), param.hf_shape[2])
    return {f"{stem}.{e}.{name}.weight": shape for e in range(param.hf_shape[0]) for name in names}


def _where(tensor: Tensor) -> str:
    return f"in {tensor.file.parent.name}/{tensor.file.name}"


def _fits(param: Param, name: str, shape: tuple[int, ...], tensor: Tensor | None, faults: Faults) -> bool:
    expected = file_dtype(param.dtype)
    if tensor is None:
        faults.add("missing tensor", f"{name}: expected {expected} {list(shape)}")
        return False
    right_type = tensor.dtype == expected or (param.any_float and tensor.dtype == "F32")
    if tensor.shape != shape:
        faults.add("wrong shape", f"{tensor.name}: expected {list(shape)}, got {list(tensor.shape)} {_where(tensor)}")
    if not right_type:
        faults.add("wrong dtype", f"{tensor.name}: expected {expected}, got {tensor.dtype} {_where(tensor)}")
    return right_type and tensor.shape == shape


def require_sound_scales(sources: Iterable[Source]) -> None:
    """Reads the scales of NVFP4 experts among `sources` (and codes under scales of 0).

    Raises:
        CheckpointError: NaN, negative or infinite scales, or codes that a scale of 0 would lose; all of them.
    """
    faults = Faults()
    tensors = {source.param.hf_key: source.tensors[0] for source in sources}
    for key in tensors:
        if key + "_weight_scale" in tensors:
            check_values(key, tensors, faults)
    faults.raise_if_any("NVFP4 scales that cannot be used", "Fetch or quantise the checkpoint again.")


def warn_of_rounding(sources: Iterable[Source]) -> list[str]:
    """Warns once if float32 residual gates hold values that bfloat16 cannot; gives their names. Reads the gates."""
    rounded = []
    for source in sources:
        tensor = source.tensors[0]
        if NUMPY_DTYPES[tensor.dtype] != source.param.dtype:
            values = np.asarray(tensor.map())
            if not np.array_equal(values, values.astype(source.param.dtype).astype(values.dtype), equal_nan=True):
                rounded.append(tensor.name)
    if rounded:
        more = f" and {len(rounded) - 3} more" if len(rounded) > 3 else ""
        warnings.warn(f"float32 residual gates rounded to bfloat16: {', '.join(rounded[:3])}{more}", stacklevel=3)
    return rounded

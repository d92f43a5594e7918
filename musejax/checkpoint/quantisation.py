"""Published BF16 checkpoint -> the same with NVFP4 experts, in the published form (spec section 6).

Files, names and all other tensors stay as they are; the experts of the chosen layers become stacked codes with their
scales, in the file their (first) BF16 tensor was in. Nothing is calibrated: input scales are written as 1.0.

The work happens in `DST.partial`, which gets its name when it is complete. Tensors are streamed, experts one by one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from musejax.checkpoint.conversion import HEADROOM, SIDE_FILES
from musejax.checkpoint.errors import CheckpointError
from musejax.checkpoint.progress import bar
from musejax.checkpoint.published import Published, Source, open_published
from musejax.checkpoint.quantised import ALGORITHM, DECLARATION
from musejax.checkpoint.shards import INDEX, Tensor, file_dtype
from musejax.config import ModelConfig
from musejax.nvfp4 import BLOCK, dequantize, quantize_weight
from musejax.params import TEXT, table

PARTIAL = ".partial"
"""Ending of the folder in which the work happens, beside the destination."""

PRODUCER = "musejax"
COPY = 16 << 20
"""Bytes of a tensor that are copied at a time."""


@dataclass(frozen=True)
class LayerError:
    """Relative RMS errors of one layer's experts: RMS(quantised - original) / RMS(original)."""

    layer: int
    gate_up: float
    down: float

    def __str__(self):
        return f"layer {self.layer}: relative RMS error gate_up {self.gate_up:.2%}, down {self.down:.2%}"


@dataclass(frozen=True)
class _Entry:
    """A tensor to write: copied from `source`, or filled by the quantiser if that is None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: Tensor | None


def default_layers(config: ModelConfig) -> tuple[int, ...]:
    """All but the first and the last, as released."""
    return tuple(range(1, config.num_hidden_layers - 1))


def quantize(src: str | Path, dst: str | Path, *, layers: Iterable[int] | None = None, progress: bool = True,
             report: Callable[[LayerError], None] = lambda error: None) -> list[LayerError]:
    """Makes a published folder with NVFP4 experts from one with BF16 experts.

    Args:
        src: Hugging Face folder.
        dst: folder to make; must not exist, or be empty.
        layers: whose experts to quantise; None takes all but the first and the last.
        progress: whether to show a progress bar on stderr.
        report: called with each layer's error when the layer is done.

    Returns:
        The errors, layer by layer.

    Raises:
        CheckpointError: faults in the source, experts that are NVFP4 already or not finite, `dst` in the way, no
            disk space. `dst` is then as it was.
        ConfigError: the source's config cannot run, no such layer, or sizes that are no multiples of the block.
    """
    src, dst = Path(src), Path(dst).resolve()
    _check_destination(dst)
    published = open_published(src)
    if published.config.nvfp4_layers:
        raise CheckpointError(f"{src}: expected BF16 experts, got NVFP4 in layers "
                              f"{', '.join(map(str, published.config.nvfp4_layers))}: quantise the BF16 checkpoint")
    chosen = default_layers(published.config) if layers is None else tuple(layers)
    if not chosen:
        raise CheckpointError(f"{src}: expected layers to quantise, got none: of {published.config.num_hidden_layers} "
                              "layers, the first and the last stay BF16 unless layers are named")
    config = replace(published.config, nvfp4_layers=chosen)
    files = _plan(published, config)
    work = dst.with_name(dst.name + PARTIAL)
    _make_empty(work, sum(e.nbytes for entries in files.values() for e in entries))
    try:
        errors = _write(published, config, files, work, progress, report)
        if dst.is_dir():
            dst.rmdir()
        os.replace(work, dst)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return errors


def _check_destination(dst: Path) -> None:
    if os.path.lexists(dst) and not (dst.is_dir() and not any(dst.iterdir())):
        raise CheckpointError(f"{dst}: already exists: choose another name or remove it")


def _declaration(config: ModelConfig) -> dict:
    """What `hf_quant_config.json` says: all linear layers but the quantised experts are excluded."""
    exclude = ["lm_head", "*embed_tokens*", "*vision*", "*audio*", "*self_attn*", "*mlp.gate*", "*mlp.pre_expert_proj",
               "*mlp.post_expert_proj"]
    exclude += [f"model.language_model.layers.{i}.mlp.experts*" for i in range(config.num_hidden_layers)
                if i not in config.nvfp4_layers]
    return {"producer": {"name": PRODUCER}, "quantization": {
        "quant_algo": ALGORITHM, "kv_cache_quant_algo": None, "group_size": BLOCK, "exclude_modules": exclude}}


def _make_empty(work: Path, needed: int) -> None:
    """Makes the folder of the work; what an interrupted run left there is replaced."""
    if os.path.lexists(work):
        ours = work.is_dir() and not work.is_symlink() and (work / DECLARATION).is_file()
        if not ours:
            raise CheckpointError(f"{work}: expected nothing, or what an interrupted quantisation left: remove it")
        shutil.rmtree(work)
    work.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work.parent).free
    if free < needed + HEADROOM:
        raise CheckpointError(f"{work.parent}: expected {needed + HEADROOM:,} bytes of free disk space, got {free:,}; "
                              "free some, or choose a destination on another disk")
    work.mkdir()


# ------------------------------------------------------------------ plan


def _plan(published: Published, config: ModelConfig) -> dict[str, list[_Entry]]:
    """File name -> its tensors in order: wide elements first, so that every tensor is aligned."""
    rows = table(config)
    replaced: dict[str, Source | None] = {}  # tensor of the source -> the stack it begins; None: it is a further part
    for source in _chosen(published, config):
        first, *rest = source.tensors
        replaced |= {first.name: source} | dict.fromkeys((t.name for t in rest), None)
    files: dict[str, list[_Entry]] = {}
    for tensor in published.shards[0].tensors.values():
        entries = files.setdefault(tensor.file.name, [])
        if tensor.name not in replaced:
            entries.append(_Entry(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, tensor))
        elif source := replaced[tensor.name]:
            key = source.param.hf_key
            entries += [_Entry(_spelt(source) + p.hf_key.removeprefix(key), file_dtype(p.dtype), p.hf_shape, p.nbytes,
                               None) for p in rows if p.hf_key == key or p.hf_key.startswith(key + "_")]
    width = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2}
    return {name: sorted(entries, key=lambda e: (-width.get(e.dtype, 1), e.name))
            for name, entries in files.items() if entries}


def _spelt(source: Source) -> str:
    """Name of a stack's codes, behind the prefix that the source checkpoint uses."""
    return source.tensors[0].name.partition("layers.")[0] + source.param.hf_key.removeprefix(TEXT)


def _chosen(published: Published, config: ModelConfig) -> list[Source]:
    return [s for s in published.sources
            if s.param.group == "experts" and s.param.path[1] in config.nvfp4_layers]


# ------------------------------------------------------------------ writing


def _write(published: Published, config: ModelConfig, files: dict[str, list[_Entry]], work: Path, progress: bool,
           report: Callable[[LayerError], None]) -> list[LayerError]:
    (work / DECLARATION).write_text(json.dumps(_declaration(config), indent=1))  # first: it marks the folder as ours
    places = {}
    for name, entries in files.items():
        places |= _lay_out(work / name, entries)
    total = sum(s.nbytes for s in _chosen(published, config))
    total += sum(e.nbytes for entries in files.values() for e in entries if e.source)
    with bar(total, f"quantise {published.folder.name}", progress) as done:
        for entries in files.values():
            for entry in entries:
                if entry.source:
                    _copy(entry, *places[entry.name], done)
        errors: dict[int, dict[str, float]] = {}
        for source in _chosen(published, config):
            _, layer, name = source.param.path
            errors.setdefault(layer, {})[name] = _quantize_stack(source, places, done)
            if len(errors[layer]) == 2:
                report(LayerError(layer, **errors[layer]))
    _write_index(published, files, work)
    for name in SIDE_FILES:
        if (published.folder / name).is_file():
            shutil.copyfile(published.folder / name, work / name)
    return [LayerError(layer, **both) for layer, both in errors.items()]


def _lay_out(file: Path, entries: list[_Entry]) -> dict[str, tuple[Path, int]]:
    """Writes header and length of a safetensors file -> tensor name -> (file, offset of its first byte)."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for e in entries:
        header[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [end, end + e.nbytes]}
        end += e.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return {e.name: (file, 8 + len(text) + header[e.name]["data_offsets"][0]) for e in entries}


def _copy(entry: _Entry, file: Path, offset: int, done: Callable) -> None:
    with open(entry.source.file, "rb") as source, open(file, "r+b") as out:
        source.seek(entry.source.offset)
        out.seek(offset)
        left = entry.nbytes
        while left:
            piece = source.read(min(COPY, left))
            if not piece:
                raise CheckpointError(f"{entry.source.file}: became shorter while it was read")
            out.write(piece)
            left -= len(piece)
            done(len(piece))


def _quantize_stack(source: Source, places: dict[str, tuple[Path, int]], done: Callable) -> float:
    """Writes codes and scales of one stack of experts, expert by expert -> relative RMS error."""
    key, count = _spelt(source), source.param.hf_shape[0]
    error = energy = 0.0
    for e in range(count):
        w = _expert(source, e)
        try:
            got = quantize_weight(w)
        except ValueError as err:
            raise CheckpointError(f"{key}: expert {e}: {err}") from None
        scales = {"_weight_scale_2": got.global_scale, "_input_scale": np.ones_like(got.global_scale)}
        for ending, array in {"": got.packed, "_weight_scale": got.scale, **scales}.items():
            file, offset = places[key + ending]
            with open(file, "r+b") as out:
                out.seek(offset + e * array.nbytes)
                out.write(np.ascontiguousarray(array).tobytes())
        error += float(np.sum(np.square(dequantize(*got) - w, dtype=np.float64)))
        energy += float(np.sum(np.square(w, dtype=np.float64)))
        done(source.nbytes // count)
    return math.sqrt(error / energy) if energy else 0.0


def _expert(source: Source, e: int) -> np.ndarray:
    """One expert's matrices in float32: gate and up [2, F, M], or down [M, F]."""
    if source.tensors[0].shape == source.param.hf_shape:
        w = np.asarray(source.tensors[0].map()[e]).astype(np.float32)
        return w.reshape(2, -1, w.shape[-1]) if source.param.layout == "gate_up" else w
    parts = len(source.tensors) // source.param.hf_shape[0]
    both = [np.asarray(t.map()).astype(np.float32) for t in source.tensors[e * parts:(e + 1) * parts]]
    return np.stack(both) if parts > 1 else both[0]


def _write_index(published: Published, files: dict[str, list[_Entry]], work: Path) -> None:
    """An index, if the source has one."""
    if (published.folder / INDEX).is_file():
        names = {e.name: name for name, entries in files.items() for e in entries}
        total = sum(e.nbytes for entries in files.values() for e in entries)
        (work / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1))

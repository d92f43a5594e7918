"""The converted form of a checkpoint: a folder of Orbax checkpoints laid out by the parameter table.

    DST/
      musejax.json          format number, config, digest of the parameter table, length of every data file
      globals/              one Orbax checkpoint: embed, final_norm, lm_head
      layer_000/ ...        one Orbax checkpoint a layer
      config.json, ...      side files of the source, as they were

Arrays have the table's in-memory shape. A storage chunk is one slice (of one expert, for experts), so 1, 2, 4 or 8
devices, and expert-parallel readers, read whole chunks. `musejax.json` is written last: without it, nothing loads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from orbax.checkpoint.experimental import v1 as ocp

from musejax.checkpoint.errors import CheckpointError, Faults
from musejax.checkpoint.progress import bar
from musejax.config import ModelConfig
from musejax.params import Param, assemble, table

MANIFEST = "musejax.json"
FORMAT = "musejax-checkpoint"
FORMAT_NUMBER = 1
"""Of the layout described above; a change that old readers would misread gets the next number."""

UNFINISHED = ".converting"
"""Ending of the folder in which a conversion works, beside its destination."""

STATE = "conversion.json"
"""In the unfinished folder: what is being converted, and which parts are complete."""


def is_converted(path: str | Path) -> bool:
    """Whether `path` is a finished folder written by `convert`."""
    return (Path(path) / MANIFEST).is_file() and not Path(path).name.endswith(UNFINISHED)


def work_folder(dst: Path) -> Path:
    """The unfinished folder that belongs to a destination."""
    return dst.with_name(dst.name + UNFINISHED)


def parts_of(config: ModelConfig) -> dict[str, list[Param]]:
    """Folder name of each Orbax checkpoint -> its rows of the parameter table."""
    parts: dict[str, list[Param]] = {}
    for param in table(config):
        name = f"layer_{param.path[1]:03d}" if param.path[0] == "layers" else "globals"
        parts.setdefault(name, []).append(param)
    return parts


def table_digest(config: ModelConfig) -> str:
    """Digest of names, in-memory shapes, dtypes and layouts: what the stored bytes depend on."""
    rows = [[p.name, p.shape, p.dtype.name, p.layout] for p in table(config)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


# ------------------------------------------------------------------ Orbax, behind two functions


def save_part(folder: Path, values: dict[str, tuple[Param, np.ndarray]]) -> None:
    """Writes one Orbax checkpoint. `folder` appears under its name when it is complete.

    Args:
        folder: absolute path, must not exist.
        values: leaf name -> (param, array of the param's shape and dtype). NumPy only, so that nothing is put on an
            accelerator; maps of files are not copied as a whole.

    Raises:
        CheckpointError: Orbax cannot write it.
    """
    def storage(keypath, _):
        param = values[keypath[-1].key][0]
        axes = {"whole": (), "gate_up": (0, 1), "down": (0, 1)}.get(param.layout, (0,))
        return ocp.options.ArrayOptions.Saving.StorageOptions(shard_axes=axes)

    context = ocp.Context()
    context.array.saving.scoped_storage_options_creator = storage
    context.array.saving.use_compression = False  # weights hardly compress, and readers would pay for it
    context.memory.deepcopy_host_arrays = False
    try:
        with context:
            ocp.save(str(folder), {name: array for name, (_, array) in values.items()})
    except (ValueError, OSError) as err:
        raise CheckpointError(f"{folder}: cannot be written: {err}\nComplete parts are kept: repair this and convert "
                              "again.") from err


def load_part(folder: Path, params: Iterable[Param], placement: Callable[[Param], Sharding]) -> list[tuple[Param, Any]]:
    """Reads one Orbax checkpoint, each device its own chunks.

    Raises:
        CheckpointError: Orbax cannot read it.
    """
    abstract = {p.path[-1]: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=placement(p)) for p in params}
    try:
        with ocp.Context():
            leaves = ocp.load(str(folder), abstract)
    except (ValueError, OSError, KeyError) as err:
        raise CheckpointError(f"{folder}: cannot be restored: {err}\nConvert the source again.") from err
    return [(p, leaves[p.path[-1]]) for p in params]


# ------------------------------------------------------------------ manifest


def file_sizes(folder: Path, parts: Iterable[str]) -> dict[str, int]:
    """Length of every file of the parts, by path relative to `folder`."""
    return {str(f.relative_to(folder)): f.stat().st_size
            for part in parts for f in sorted((folder / part).rglob("*")) if f.is_file()}


def write_json(path: Path, value: dict) -> None:
    """Writes a file that is either absent (or old) or complete, also after a power cut."""
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, path)


def write_manifest(folder: Path, config: ModelConfig, source: dict) -> None:
    """Writes `musejax.json`, which makes the folder loadable."""
    rows = table(config)
    write_json(folder / MANIFEST, {
        "format": FORMAT, "format_number": FORMAT_NUMBER, "config": config.to_hf(),
        "nvfp4_layers": list(config.nvfp4_layers),
        "table": {"digest": table_digest(config), "tensors": len(rows), "parameters": sum(p.size for p in rows),
                  "bytes": sum(p.nbytes for p in rows)},
        "source": source, "files": file_sizes(folder, parts_of(config)),
    })


def read_manifest(folder: Path) -> dict:
    """Reads and checks `musejax.json`, with the length of every file it names. Reads no tensor.

    Returns:
        The manifest, with `config` a ModelConfig.

    Raises:
        CheckpointError: another format, or files that are missing or have the wrong length.
        ConfigError: the stored config cannot run.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{path}: expected the description of a converted checkpoint, got {err}") from None
    kind = manifest.get("format") if isinstance(manifest, dict) else None
    if kind != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT!r}, got {kind!r}")
    number = manifest.get("format_number")
    if number != FORMAT_NUMBER:
        newer = isinstance(number, int) and number > FORMAT_NUMBER
        advice = "upgrade musejax, or convert the source again" if newer else "convert the source again"
        raise CheckpointError(f"{path}: expected format number {FORMAT_NUMBER}, got {number!r}: {advice}")
    absent = [key for key in ("config", "table", "files", "source") if not isinstance(manifest.get(key), dict)]
    if absent:
        raise CheckpointError(f"{path}: expected objects under {', '.join(absent)}; convert the source again")
    quantised = manifest.get("nvfp4_layers", [])  # absent in folders written before NVFP4 was known
    if not isinstance(quantised, list) or not all(isinstance(i, int) for i in quantised):
        raise CheckpointError(f"{path}: expected a list of layers under nvfp4_layers, got {quantised!r}; convert the "
                              "source again")
    manifest["config"] = replace(ModelConfig.from_hf(manifest["config"]), nvfp4_layers=tuple(quantised))
    if manifest["table"].get("digest") != table_digest(manifest["config"]):
        raise CheckpointError(f"{path}: was written with another parameter table than this version's; convert the "
                              "source again")
    faults = Faults()
    for name, size in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            faults.add("missing file", name)
        elif file.stat().st_size != size:
            faults.add("wrong file length", f"{name}: expected {size:,} bytes, got {file.stat().st_size:,}")
    faults.raise_if_any(f"{folder}: the converted checkpoint is damaged", "Convert the source again.")
    return manifest


def unfinished_reason(path: Path) -> str | None:
    """What to say about `path` if a conversion to it was begun and not finished; None otherwise."""
    path = path.resolve()
    if path.name.endswith(UNFINISHED) or (path / STATE).is_file():
        work = path
    elif path.name:
        work = work_folder(path)
    if not path.name or not work.is_dir():
        return None
    done = len(read_state(work).get("parts", {}))
    return (f"{path}: the conversion was not finished ({done} parts complete in {work.name}): run the same "
            f"'musejax convert' again, it goes on where it stopped")


def read_state(work: Path) -> dict:
    """The unfinished folder's record, with `parts` an object; empty if there is none or it cannot be read."""
    try:
        state = json.loads((work / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) and isinstance(state.get("parts"), dict) else {}


# ------------------------------------------------------------------ restore


def load_converted(folder: Path, config: ModelConfig | None, placement: Callable[[Param], Sharding],
                   progress: bool) -> tuple[ModelConfig, dict]:
    """Loads a converted folder part by part.

    Raises:
        CheckpointError: see `read_manifest`; or `config` is given and another one was converted.
    """
    stored = read_manifest(folder)["config"]
    if config is not None and replace(config, nvfp4_layers=stored.nvfp4_layers) != stored:
        raise CheckpointError(f"{folder}: was converted with another config than the one given; leave it out, or "
                              "convert the source again")
    parts = parts_of(stored)
    for param in parts["globals"]:  # an impossible mesh fails before anything is read
        placement(param)
    leaves = []
    with bar(sum(p.nbytes for ps in parts.values() for p in ps), f"load {folder.name}", progress) as done:
        for name, params in parts.items():
            leaves += load_part(folder.resolve() / name, params, placement)
            done(sum(p.nbytes for p in params))
    return stored, assemble(stored, leaves)

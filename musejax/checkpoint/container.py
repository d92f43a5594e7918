"""The converted form of a checkpoint: a folder of Orbax checkpoints.

    DST/
      musejax.json          format number, form, config, digest of the stored rows, length of every data file
      globals/              one Orbax checkpoint: embed, final_norm, lm_head
      layer_000/ ...        one Orbax checkpoint a layer
      config.json, ...      side files of the source, as they were

Arrays are those of the packed form (`packing.packed_table`), in the order in which kernels stream them; sizes that do
not pack keep the table form (`params.table`). A storage chunk is one slice (of one expert, for experts), so 1, 2, 4 or
8 devices, and expert-parallel readers, read whole chunks. `musejax.json` is written last: without it, nothing loads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Sharding
from orbax.checkpoint.experimental import v1 as ocp

from musejax.checkpoint.errors import CheckpointError, Faults
from musejax.config import ModelConfig
from musejax.packing import PackedParam, layout, packed_table
from musejax.params import Param, table

MANIFEST = "musejax.json"
FORMAT = "musejax-checkpoint"
FORMAT_NUMBER = 2
"""Of the layout described above, and of the order of bits in packed arrays (`ffi/common/layout.h`): a change that old
readers would misread gets the next number. 1 was the table form of every model."""

UNFINISHED = ".converting"
"""Ending of the folder in which a conversion works, beside its destination."""

STATE = "conversion.json"
"""In the unfinished folder: what is being converted, and which parts are complete."""

Row = Param | PackedParam
"""What describes a stored array: path, shape, dtype, layout."""


def is_converted(path: str | Path) -> bool:
    """Whether `path` is a finished folder written by `convert`."""
    return (Path(path) / MANIFEST).is_file() and not Path(path).name.endswith(UNFINISHED)


def work_folder(dst: Path) -> Path:
    """The unfinished folder that belongs to a destination."""
    return dst.with_name(dst.name + UNFINISHED)


def rows_of(config: ModelConfig, packed: bool) -> list[Row]:
    """The rows of one form."""
    return packed_table(config) if packed else table(config)


def parts_of(config: ModelConfig, packed: bool) -> dict[str, list[Row]]:
    """Folder name of each Orbax checkpoint -> its rows of one form."""
    parts: dict[str, list[Row]] = {}
    for row in rows_of(config, packed):
        parts.setdefault(part_of(row), []).append(row)
    return parts


def part_of(row: Row) -> str:
    """Folder name of the Orbax checkpoint that holds a row."""
    return f"layer_{row.path[1]:03d}" if row.path[0] == "layers" else "globals"


def table_digest(config: ModelConfig, packed: bool) -> str:
    """Digest of names, in-memory shapes, dtypes and layouts: what the stored bytes depend on."""
    rows = [[row.name, row.shape, row.dtype.name, row.layout] for row in rows_of(config, packed)]
    offsets = [layout(config, i) for i in range(config.num_hidden_layers)] if packed else []
    return hashlib.sha256(json.dumps([rows, offsets] if packed else rows).encode()).hexdigest()


# ------------------------------------------------------------------ Orbax, behind two functions


def save_part(folder: Path, values: dict[str, tuple[Row, np.ndarray]]) -> None:
    """Writes one Orbax checkpoint. `folder` appears under its name when it is complete.

    Args:
        folder: absolute path, must not exist.
        values: leaf name -> (row, array of the row's shape and dtype). NumPy only, so that nothing is put on an
            accelerator; maps of files are not copied as a whole.

    Raises:
        CheckpointError: Orbax cannot write it.
    """
    def storage(keypath, _):
        row = values[keypath[-1].key][0]
        axes = {"whole": (), "gate_up": (0, 1), "down": (0, 1), "experts": (0, 1)}.get(row.layout, (0,))
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


def load_part(folder: Path, rows: list[Row], placement: Callable[[Row], Sharding]) -> list[tuple[Row, jax.Array]]:
    """Reads one Orbax checkpoint, each device its own chunks.

    Raises:
        CheckpointError: Orbax cannot read it.
    """
    abstract = {row.path[-1]: jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=placement(row)) for row in rows}
    try:
        with ocp.Context():
            leaves = ocp.load(str(folder), abstract)
    except (ValueError, OSError, KeyError) as err:
        raise CheckpointError(f"{folder}: cannot be restored: {err}\nConvert the source again.") from err
    return [(row, leaves[row.path[-1]]) for row in rows]


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


def write_manifest(folder: Path, config: ModelConfig, packed: bool, source: dict) -> None:
    """Writes `musejax.json`, which makes the folder loadable. Its counts are those of the model, in the table form."""
    rows = table(config)
    write_json(folder / MANIFEST, {
        "format": FORMAT, "format_number": FORMAT_NUMBER, "packed": packed, "config": config.to_hf(),
        "nvfp4_layers": list(config.nvfp4_layers),
        "table": {"digest": table_digest(config, packed), "tensors": len(rows), "parameters": sum(p.size for p in rows),
                  "bytes": sum(p.nbytes for p in rows)},
        "source": source, "files": file_sizes(folder, parts_of(config, packed)),
    })


def read_manifest(folder: Path) -> dict:
    """Reads and checks `musejax.json`, with the length of every file it names. Reads no tensor.

    Returns:
        The manifest, with `config` a ModelConfig.

    Raises:
        CheckpointError: another format, or files that are missing or have the wrong length.
        ConfigError: the stored config cannot run.
        musejax.ffi.LibraryError: the packed form is stored, and the compiled library that defines it does not load.
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
    packed = manifest.get("packed")
    if not isinstance(packed, bool):
        raise CheckpointError(f"{path}: expected true or false under packed, got {packed!r}; convert the source again")
    quantised = manifest.get("nvfp4_layers")
    if not isinstance(quantised, list) or not all(isinstance(i, int) for i in quantised):
        raise CheckpointError(f"{path}: expected a list of layers under nvfp4_layers, got {quantised!r}; convert the "
                              "source again")
    manifest["config"] = replace(ModelConfig.from_hf(manifest["config"]), nvfp4_layers=tuple(quantised))
    if manifest["table"].get("digest") != table_digest(manifest["config"], packed):
        kind = "packed layout" if packed else "parameter table"
        raise CheckpointError(f"{path}: was written with another {kind} than this version's; convert the source again")
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

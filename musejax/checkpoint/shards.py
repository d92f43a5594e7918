"""Safetensors files: which tensors a folder holds and where their bytes lie.

`open_shards` reads headers only and refuses a folder with any fault, so that everything after it may trust
names, shapes and offsets. Tensor bytes are first touched by `Tensor.map`.

A safetensors file is: 8 bytes of little-endian header length N, N bytes of JSON, then the data. The JSON maps
each name to `{"dtype", "shape", "data_offsets": [begin, end]}`; offsets count from the end of the header, and the
tensors fill the rest of the file without holes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from musejax.checkpoint.errors import CheckpointError, Faults

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000
"""Bytes; the safetensors library's own limit. A longer header means a file of another kind."""

# Bits of one element, by the name in the header.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}
NUMPY_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32), "U8": np.dtype(np.uint8),
                "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}
"""Element types this package reads; tensors of other types are only listed."""


def file_dtype(dtype: np.dtype) -> str:
    """Safetensors name of an element type of NUMPY_DTYPES."""
    return next(name for name, other in NUMPY_DTYPES.items() if other == dtype)


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies.

    Attributes:
        name: as written in the file.
        dtype: safetensors name, such as "BF16".
        shape: as written in the file.
        file: path of the file.
        offset: of its first byte, from the start of the file.
        nbytes: length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def map(self) -> np.ndarray:
        """Read-only array over the file's bytes; they are read when the elements are used, and not kept."""
        dtype = NUMPY_DTYPES[self.dtype]
        if not self.nbytes:
            return np.empty(self.shape, dtype)
        return np.memmap(self.file, dtype, mode="r", offset=self.offset, shape=self.shape)


@dataclass(frozen=True)
class ShardSet:
    """The tensors of one folder, from one file or from the files of its index.

    Attributes:
        folder: the folder.
        files: paths of the files, in order.
        tensors: by name.
        fingerprint: digest of names, sizes, modification times and headers of the files.
    """

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, Tensor]
    fingerprint: str


def holds_safetensors(folder: Path) -> bool:
    """Whether there is anything here for `open_shards` to look at."""
    return folder.is_dir() and (os.path.lexists(folder / INDEX) or any(folder.glob("*.safetensors")))


def open_shards(folder: str | Path, *, any_files: bool = False) -> ShardSet:
    """Reads and checks the headers of a folder's safetensors files.

    Args:
        folder: holds `model.safetensors.index.json` and the files it names, or one `*.safetensors` file.
        any_files: without an index, take all `*.safetensors` files rather than exactly one (overlays).

    Raises:
        CheckpointError: a missing file, a file of the wrong length, a malformed header, index and headers that
            disagree, a tensor that appears twice; all of them in one text.
    """
    folder = Path(folder)
    faults = Faults()
    index = _read_index(folder, faults) if os.path.lexists(folder / INDEX) else None
    if index is None:
        files = [] if faults else _files_without_index(folder, any_files)
    else:
        files = sorted({folder / name for name in index.values()})
    tensors: dict[str, Tensor] = {}
    digest = hashlib.sha256()
    broken = set()
    for file in files:
        found = _read_header(file, faults, digest)
        if found is None:
            broken.add(file)
        for tensor in found or ():
            if tensor.name in tensors:
                faults.add("tensor twice", f"{tensor.name}: in {tensors[tensor.name].file.name} and in {file.name}")
            elif index is not None and tensor.name not in index:
                faults.add("tensor not in the index", f"{tensor.name}: in {file.name}, but not in {INDEX}")
            elif index is not None and folder / index[tensor.name] != file:
                faults.add("tensor in another file than the index says",
                           f"{tensor.name}: expected in {index[tensor.name]}, found in {file.name}")
            tensors.setdefault(tensor.name, tensor)
    for name, file in (index or {}).items():
        if name not in tensors and folder / file not in broken:
            faults.add("tensor named by the index is absent", f"{name}: expected in {file}")
    faults.raise_if_any(f"{folder}: the safetensors files are damaged or incomplete",
                        "Nothing was read. Fetch the files named above again" + _no_safetensors_hint(folder) + ".")
    return ShardSet(folder, tuple(files), tensors, digest.hexdigest())


# ------------------------------------------------------------------ index


class _Twice(Exception):
    """A key appears twice in one JSON object."""


def _object_without_duplicates(pairs: list) -> dict:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set = set()
        raise _Twice(next(k for k, _ in pairs if k in seen or seen.add(k)))
    return out


def _parse_json(data: bytes) -> dict:
    """Raises ValueError if this is not a JSON object, _Twice if a key repeats."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object_without_duplicates)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _read_index(folder: Path, faults: Faults) -> dict[str, str] | None:
    """Tensor name -> file name, or None with the reason in `faults`."""
    try:
        index = _parse_json((folder / INDEX).read_bytes())
    except _Twice as twice:
        faults.add("tensor twice", f"{twice}: two entries in {INDEX}")
        return None
    except (OSError, ValueError) as err:
        faults.add("unreadable index", f"{INDEX}: {err}")
        return None
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        faults.add("unreadable index", f"{INDEX}: expected a non-empty object 'weight_map' of tensor -> file")
        return None
    # A path with folders in it could lead anywhere on the disk.
    odd = [n for n, f in names.items() if not isinstance(f, str) or Path(f).name != f or not f.endswith(".safetensors")]
    for name in odd:
        faults.add("unreadable index", f"{name}: expected the name of a .safetensors file, got {names[name]!r}")
    if odd:
        return None
    if (folder / SINGLE).exists() and SINGLE not in names.values():
        faults.add("two checkpoints in one folder", f"{SINGLE} and {INDEX}, which does not name it: remove one of them")
    return names


def _files_without_index(folder: Path, any_files: bool) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / SINGLE) in files and not any_files:
        return [folder / SINGLE]
    if len(files) == 1 or (files and any_files):
        return files
    if files:
        raise CheckpointError(f"{folder}: expected {INDEX} beside {len(files)} .safetensors files "
                              f"({files[0].name}, ...), found none; fetch the index too")
    raise CheckpointError(f"{folder}: expected {INDEX} or {SINGLE}, found neither{pickle_hint(folder)}")


def _no_safetensors_hint(folder: Path) -> str:
    """`pickle_hint` where an index is all that there is of safetensors."""
    return "" if any(folder.glob("*.safetensors")) else pickle_hint(folder)


def pickle_hint(folder: Path) -> str:
    """An addition to an error text if the folder holds pickled weights; empty otherwise."""
    found = sorted(f.name for end in ("bin", "pt", "pth", "pkl", "ckpt") for f in folder.glob(f"*.{end}"))
    return f"; {found[0]} is a pickle, which is never read: save the model as safetensors" if found else ""


# ------------------------------------------------------------------ header


def _read_header(file: Path, faults: Faults, digest) -> list[Tensor] | None:
    """The tensors of one file, or None with the reason in `faults`. Adds the file to `digest`."""
    try:
        with open(file, "rb") as stream:
            stat = os.fstat(stream.fileno())
            size = stat.st_size
            length = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))[0]
            if length > min(MAX_HEADER, max(size - 8, 0)):
                faults.add("unreadable header", f"{file.name}: expected a safetensors file, got {size:,} bytes that do "
                                                "not begin with the length of a header inside the file")
                return None
            header = stream.read(length)
    except FileNotFoundError:
        faults.add("missing file", file.name)
        return None
    except OSError as err:
        faults.add("unreadable file", f"{file.name}: {err.strerror or err}")
        return None
    digest.update(f"{file.name} {size} {stat.st_mtime_ns} {length}\n".encode())
    digest.update(header)
    try:
        entries = _parse_json(header)
    except _Twice as twice:
        faults.add("tensor twice", f"{twice}: two entries in the header of {file.name}")
        return None
    except ValueError as err:
        faults.add("unreadable header", f"{file.name}: {err}")
        return None
    entries.pop("__metadata__", None)
    return _check_header(file, entries, 8 + length, size, faults)


def _check_header(file: Path, entries: dict, start: int, size: int, faults: Faults) -> list[Tensor] | None:
    """Tensors of a parsed header whose data begins at byte `start` of a file of `size` bytes."""
    tensors, sound = [], True
    for name, entry in entries.items():
        problem = _entry_problem(entry)
        if problem:
            faults.add("unreadable header", f"{file.name}: {name}: {problem}")
            sound = False
        else:
            begin, end = entry["data_offsets"]
            tensors.append(Tensor(name, entry["dtype"], tuple(entry["shape"]), file, start + begin, end - begin))
    if not sound:
        return None
    end = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a hole before it"
            faults.add("unreadable header", f"{file.name}: {tensor.name}: expected to begin at byte {end:,}, got "
                                            f"{tensor.offset:,}: it {what}")
            return None
        end += tensor.nbytes
    if end != size:
        what = f"cut by {end - size:,} bytes" if size < end else f"{size - end:,} bytes too long"
        faults.add("wrong file length", f"{file.name}: expected {end:,} bytes (from its header), got {size:,}: {what}")
        return None
    return tensors


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry_problem(entry) -> str | None:
    """Why one header entry is malformed, or None."""
    if not isinstance(entry, dict):
        return f"expected an object, got {type(entry).__name__}"
    bits = _BITS.get(entry.get("dtype")) if isinstance(entry.get("dtype"), str) else None
    if bits is None:
        return f"expected a known dtype, got {entry.get('dtype')!r}"
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        return f"expected a shape of non-negative integers, got {shape!r}"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        return f"expected data_offsets [begin, end], got {offsets!r}"
    total = math.prod(shape) * bits
    if total >= 1 << 63 or total % 8:
        return f"expected a shape of whole bytes that fits a file, got {entry['dtype']} {shape}"
    if offsets[1] - offsets[0] != total // 8:
        return f"expected {total // 8:,} bytes ({entry['dtype']} {shape}), got data_offsets {offsets}"
    return None

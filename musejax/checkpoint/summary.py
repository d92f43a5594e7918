"""What a checkpoint holds, from headers only (`musejax info`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from musejax.checkpoint.container import is_converted, read_manifest
from musejax.checkpoint.load import require_checkpoint
from musejax.checkpoint.published import open_published
from musejax.checkpoint.shards import file_dtype
from musejax.config import ModelConfig
from musejax.packing import packed_table
from musejax.params import Param, table


@dataclass(frozen=True)
class Group:
    """One group of parameters (`Param.group`).

    Attributes:
        tensors: rows of the parameter table.
        parameters: of the model; scales count none, packed codes two a byte.
        nbytes: as stored.
        dtypes: names of the stored dtypes, such as ("BF16",).
    """

    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """Contents of a checkpoint, or of a config.

    Attributes:
        form: "published", "converted", or "config" (sizes only, no weights).
        config: the sizes.
        groups: by name, in the order of the parameter table. Those of a converted checkpoint are of the table form,
            whatever form it stores.
        files: number of data files.
        skipped_tensors: tensors of the files that the decoder does not use.
        skipped_bytes: their length.
        format_number: of a converted checkpoint; 0 otherwise.
        packed_bytes: of the arrays of a converted checkpoint in packed form; 0 otherwise.
    """

    form: str
    config: ModelConfig
    groups: dict[str, Group]
    files: int = 0
    skipped_tensors: int = 0
    skipped_bytes: int = 0
    format_number: int = 0
    packed_bytes: int = 0

    @property
    def parameters(self) -> int:
        return sum(g.parameters for g in self.groups.values())

    @property
    def nbytes(self) -> int:
        return sum(g.nbytes for g in self.groups.values())


def inspect(path: str | Path) -> Summary:
    """Summary of a checkpoint folder; checks its headers on the way, reads no tensor.

    Raises:
        CheckpointError, ConfigError, musejax.ffi.LibraryError: as `load_params`.
    """
    path = Path(path)
    require_checkpoint(path)
    if is_converted(path):
        manifest = read_manifest(path)
        config = manifest["config"]
        packed = sum(row.nbytes for row in packed_table(config)) if manifest["packed"] else 0
        return Summary("converted", config, _table_groups(config), len(manifest["files"]),
                       format_number=manifest["format_number"], packed_bytes=packed)
    published = open_published(path)
    groups = _groups((s.param, s.nbytes, s.tensors[0].dtype) for s in published.sources)
    return Summary("published", published.config, groups, sum(len(s.files) for s in published.shards),
                   len(published.skipped), sum(t.nbytes for t in published.skipped))


def summary_of(config: ModelConfig) -> Summary:
    """Summary of the parameters that a config implies."""
    return Summary("config", config, _table_groups(config))


def _table_groups(config: ModelConfig) -> dict[str, Group]:
    return _groups((param, param.nbytes, file_dtype(param.dtype)) for param in table(config))


def _groups(rows: Iterable[tuple[Param, int, str]]) -> dict[str, Group]:
    sums: dict[str, list] = {}
    for param, nbytes, dtype in rows:
        group = sums.setdefault(param.group, [0, 0, 0, set()])
        group[0] += 1
        group[1] += param.parameters
        group[2] += nbytes
        group[3].add(dtype)
    return {name: Group(tensors, size, nbytes, tuple(sorted(dtypes)))
            for name, (tensors, size, nbytes, dtypes) in sums.items()}

"""Checkpoint -> params pytree in table form or packed form, each array placed on its devices as it is read.

Published checkpoints have the table form and are packed on the host, converted ones have the packed form (where sizes
allow) and are unpacked on the devices; either a layer at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from musejax.checkpoint.container import (
    MANIFEST,
    Row,
    is_converted,
    load_part,
    part_of,
    parts_of,
    read_manifest,
    unfinished_reason,
)
from musejax.checkpoint.errors import CheckpointError
from musejax.checkpoint.progress import bar
from musejax.checkpoint.published import (
    Published,
    Source,
    open_published,
    require_sound_scales,
    warn_of_rounding,
)
from musejax.checkpoint.shards import INDEX, SINGLE, holds_safetensors, pickle_hint
from musejax.config import ConfigError, ModelConfig
from musejax.packing import FORMS, check_packable, pack_head, pack_layer, packed_table, unpack_head, unpack_layer
from musejax.params import Param, assemble, table
from musejax.sharding import param_sharding, split_axis0


def load_params(path: str | Path, config: ModelConfig | None = None, *, mesh: Mesh | None = None,
                overlay: Sequence[str | Path] | str | Path = (), progress: bool = False,
                form: str = "table") -> tuple[ModelConfig, dict]:
    """Loads a checkpoint, published or converted.

    The headers of all files are checked before the first tensor is read. Host memory for published checkpoints: one
    tensor at a time, or one layer if it is packed.

    Args:
        path: Hugging Face folder, or folder written by `convert`.
        config: sizes to expect instead of the checkpoint's own; a converted checkpoint must have been made with it.
            Its `nvfp4_layers` do not matter: the files know.
        mesh: devices; None places everything on the default device.
        overlay: folders whose tensors replace those of the same name (published checkpoints only).
        progress: whether to show a progress bar on stderr.
        form: of the parameters: "table" (`params.table`) or "packed" (`packing.packed_table`).

    Returns:
        The config, and the pytree of `form`, each leaf with `param_sharding(row, mesh)`.

    Raises:
        CheckpointError: nothing to load here, an unfinished conversion, or faults in the files.
        ConfigError: the config cannot run, or not on this mesh, or has no packed form.
        musejax.ffi.LibraryError: the packed form is wanted or stored, and the compiled library does not load.
    """
    path = Path(path)
    if form not in FORMS:
        raise ConfigError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")
    require_checkpoint(path)
    if is_converted(path):
        if overlay:
            raise CheckpointError(f"{path}: an overlay cannot be laid over a converted checkpoint: convert the "
                                  "published one with the overlay")
        return _load_converted(path, config, mesh, progress, form)
    published = open_published(path, config, overlay)
    load = _load_packed if form == "packed" else _load_table
    return published.config, assemble(published.config, load(published, mesh, progress))


def placement(row: Row, mesh: Mesh | None) -> Sharding:
    """Sharding of one array of either form; without a mesh, the default device."""
    if mesh is not None:
        return param_sharding(row, mesh)
    device = jax.config.jax_default_device
    return SingleDeviceSharding(device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0])


# ------------------------------------------------------------------ published


def _load_table(published: Published, mesh: Mesh | None, progress: bool) -> list[tuple[Param, jax.Array]]:
    placements = {source.param.path: placement(source.param, mesh) for source in published.sources}
    warn_of_rounding(published.sources)
    leaves = []
    with bar(sum(s.nbytes for s in published.sources), f"load {published.folder.name}", progress) as done:
        for source in published.sources:
            if source.param.per_element == 2:  # packed codes: their scales are checked just before they are read
                require_sound_scales(s for s in published.sources if s.param.path[:-1] == source.param.path[:-1]
                                     and s.param.hf_key.startswith(source.param.hf_key))
            leaves.append((source.param, _place(source, placements[source.param.path])))
            done(source.nbytes)
    return leaves


def _load_packed(published: Published, mesh: Mesh | None, progress: bool) -> list[tuple[Row, jax.Array]]:
    config = published.config
    check_packable(config, 1 if mesh is None else mesh.size)
    warn_of_rounding(published.sources)
    leaves = []
    with bar(sum(s.nbytes for s in published.sources), f"load {published.folder.name}", progress) as done:
        parts = sources_of_parts(published)
        for name, rows in parts_of(config, packed=True).items():
            require_sound_scales(parts[name])
            values = pack_part(config, parts[name])
            unchanged = {s.param.path: s for s in parts[name] if s.param.path in (("embed",), ("final_norm",))}
            for row in rows:
                array, sharding = values.pop(row.path[-1]), placement(row, mesh)
                source = unchanged.get(row.path)  # a map of the file: to be copied
                leaves.append((row, _place(source, sharding) if source else _put(array, sharding)))
            done(sum(s.nbytes for s in parts[name]))
    return leaves


def sources_of_parts(published: Published) -> dict[str, list[Source]]:
    """Sources by the name of their part, such as "layer_003"."""
    parts: dict[str, list[Source]] = {}
    for source in published.sources:
        parts.setdefault(part_of(source.param), []).append(source)
    return parts


def pack_part(config: ModelConfig, sources: Sequence[Source]) -> dict[str, np.ndarray]:
    """The arrays of one part in packed form by leaf name; those that are not packed may be maps of files.

    Raises:
        PackingError, ConfigError: see `packing.pack_layer`.
    """
    values = {source.param.path[-1]: source.view() for source in sources}
    root, *rest = sources[0].param.path
    if root == "layers":
        return pack_layer(config, rest[0], values)
    return values | {"lm_head": pack_head(config, values["lm_head"])}


def _place(source: Source, sharding: Sharding) -> jax.Array:
    """Reads each device's slices and puts them there. Waits, so that host copies do not pile up."""
    def piece(index):
        return source.read(index[0] if source.param.split else slice(None))

    return jax.block_until_ready(jax.make_array_from_callback(source.param.shape, sharding, piece))


def _put(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Puts each device's slices there; on a CPU this may be the array itself."""
    return jax.block_until_ready(jax.make_array_from_callback(array.shape, sharding, lambda index: array[index]))


# ------------------------------------------------------------------ converted


def _load_converted(folder: Path, config: ModelConfig | None, mesh: Mesh | None, progress: bool,
                    form: str) -> tuple[ModelConfig, dict]:
    """Loads a converted folder part by part.

    Raises:
        CheckpointError: see `read_manifest`; `config` is given and another one was converted.
        ConfigError: the packed form is wanted and there is none, or not on this mesh.
    """
    manifest = read_manifest(folder)
    stored, packed = manifest["config"], manifest["packed"]
    if config is not None and replace(config, nvfp4_layers=stored.nvfp4_layers) != stored:
        raise CheckpointError(f"{folder}: was converted with another config than the one given; leave it out, or "
                              "convert the source again")
    if packed or form == "packed":
        check_packable(stored, 1 if mesh is None else mesh.size)
    if form == "packed" and not packed:
        raise CheckpointError(f"{folder}: expected the packed form, got the table form; convert the source again")
    parts, params = parts_of(stored, packed), parts_of(stored, packed=False)
    for row in parts["globals"]:  # an impossible mesh fails before anything is read
        placement(row, mesh)
    leaves = []
    with bar(sum(row.nbytes for rows in parts.values() for row in rows), f"load {folder.name}", progress) as done:
        for name, rows in parts.items():
            loaded = load_part(folder.resolve() / name, rows, lambda row: placement(row, mesh))
            if packed and form == "table":
                loaded = _unpack_part(stored, params[name], {row.path[-1]: x for row, x in loaded}, mesh)
            leaves += loaded
            done(sum(row.nbytes for row in rows))
    return stored, assemble(stored, leaves)


def _unpack_part(config: ModelConfig, params: list[Param], packed: dict[str, jax.Array],
                 mesh: Mesh | None) -> list[tuple[Param, jax.Array]]:
    """One part in table form, each device its own slices. Waits, so that layers in both forms do not pile up."""
    root, *rest = params[0].path
    if root == "layers":
        kind = rest[0] in config.nvfp4_layers  # layers of a kind share a program
        first = next(i for i in range(config.num_hidden_layers) if (i in config.nvfp4_layers) == kind)
        leaves = _unpacker(config, first, mesh)(packed)
    else:
        leaves = packed | {"lm_head": _unpacker(config, None, mesh)(packed["lm_head"])}
    return jax.block_until_ready([(p, leaves[p.path[-1]]) for p in params])


@functools.lru_cache(maxsize=16)
def _unpacker(config: ModelConfig, layer: int | None, mesh: Mesh | None) -> Callable:
    """The compiled `unpack_layer` of a layer, or `unpack_head` for None; every device works on its own slices."""
    unpack = functools.partial(*((unpack_head, config) if layer is None else (unpack_layer, config, layer)))
    if mesh is None:
        return jax.jit(unpack)

    def places(rows):
        if layer is None:
            return split_axis0(mesh)
        return {row.path[2]: param_sharding(row, mesh) for row in rows if row.path[:2] == ("layers", layer)}

    given, made = places(packed_table(config)), places(table(config))
    specs = jax.tree.map(lambda place: place.spec, (given, made))
    mapped = jax.shard_map(unpack, mesh=mesh, in_specs=(specs[0],), out_specs=specs[1])
    return jax.jit(mapped, out_shardings=made)


# ------------------------------------------------------------------ what is there


def require_checkpoint(path: Path) -> None:
    """Raises CheckpointError, saying what was looked for, if there is no checkpoint at `path`."""
    if is_converted(path):
        return
    if not holds_safetensors(path) and (reason := unfinished_reason(path)):
        raise CheckpointError(reason)
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a checkpoint folder, found {'a file' if path.exists() else 'nothing'}")
    if not holds_safetensors(path):
        raise CheckpointError(f"{path}: expected {MANIFEST} (converted) or {INDEX} or {SINGLE} (published), found none "
                              f"of them{pickle_hint(path)}")

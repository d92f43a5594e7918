"""Checkpoint -> params pytree, each array placed on its devices as it is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from musejax.checkpoint.container import MANIFEST, is_converted, load_converted, unfinished_reason
from musejax.checkpoint.errors import CheckpointError
from musejax.checkpoint.progress import bar
from musejax.checkpoint.published import Source, open_published, require_sound_scales, warn_of_rounding
from musejax.checkpoint.shards import INDEX, SINGLE, holds_safetensors, pickle_hint
from musejax.config import ModelConfig
from musejax.params import Param, assemble
from musejax.sharding import param_sharding


def load_params(path: str | Path, config: ModelConfig | None = None, *, mesh: Mesh | None = None,
                overlay: Sequence[str | Path] | str | Path = (), progress: bool = False) -> tuple[ModelConfig, dict]:
    """Loads a checkpoint, published or converted.

    The headers of all files are checked before the first tensor is read. Host memory: one tensor at a time for
    published checkpoints.

    Args:
        path: Hugging Face folder, or folder written by `convert`.
        config: sizes to expect instead of the checkpoint's own; a converted checkpoint must have been made with it.
            Its `nvfp4_layers` do not matter: the files know.
        mesh: devices; None places everything on the default device.
        overlay: folders whose tensors replace those of the same name (published checkpoints only).
        progress: whether to show a progress bar on stderr.

    Returns:
        The config, and the pytree of `params.build`, each leaf with `param_sharding(param, mesh)`.

    Raises:
        CheckpointError: nothing to load here, an unfinished conversion, or faults in the files.
        ConfigError: the config cannot run, or not on this mesh.
    """
    path = Path(path)
    require_checkpoint(path)
    if is_converted(path):
        if overlay:
            raise CheckpointError(f"{path}: an overlay cannot be laid over a converted checkpoint: convert the "
                                  "published one with the overlay")
        return load_converted(path, config, lambda param: placement(param, mesh), progress)
    published = open_published(path, config, overlay)
    placements = {source.param.path: placement(source.param, mesh) for source in published.sources}
    warn_of_rounding(published.sources)
    leaves = []
    with bar(sum(s.nbytes for s in published.sources), f"load {path.name}", progress) as done:
        for source in published.sources:
            if source.param.per_element == 2:  # packed codes: their scales are checked just before they are read
                require_sound_scales(s for s in published.sources if s.param.path[:-1] == source.param.path[:-1]
                                     and s.param.hf_key.startswith(source.param.hf_key))
            leaves.append((source.param, _place(source, placements[source.param.path])))
            done(source.nbytes)
    return published.config, assemble(published.config, leaves)


def placement(param: Param, mesh: Mesh | None) -> Sharding:
    """Sharding of one parameter; without a mesh, the default device."""
    if mesh is not None:
        return param_sharding(param, mesh)
    device = jax.config.jax_default_device
    return SingleDeviceSharding(device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0])


def _place(source: Source, sharding: Sharding) -> jax.Array:
    """Reads each device's slices and puts them there. Waits, so that host copies do not pile up."""
    def piece(index):
        return source.read(index[0] if source.param.split else slice(None))

    return jax.block_until_ready(jax.make_array_from_callback(source.param.shape, sharding, piece))


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

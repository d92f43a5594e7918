"""Meshes and placements: which device owns which slices.

Split parameters carry a leading slice axis (8 slices); a mesh of 1, 2, 4 or 8 devices owns 8, 4, 2 or 1
consecutive slices each. Key/value caches are split over heads, so a slice's heads stay with its weights.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from musejax.config import NUM_SLICES, ConfigError, ModelConfig
from musejax.params import Param

AXIS = "slices"
"""Name of the one mesh axis."""

DEVICE_COUNTS = tuple(d for d in range(1, NUM_SLICES + 1) if NUM_SLICES % d == 0)


def make_mesh(devices: int | list | None = None, platform: str | None = None) -> Mesh:
    """Mesh over the first `devices` local devices (or a given list); None takes one device.

    Raises:
        ConfigError: a count that does not divide 8, more devices than there are, or devices of other processes.
    """
    if not isinstance(devices, (list, tuple)):
        count = 1 if devices is None else devices
        here = jax.devices(platform) if platform else jax.devices()
        if count not in DEVICE_COUNTS:
            raise ConfigError(f"devices: expected one of {', '.join(map(str, DEVICE_COUNTS))}, got {count}")
        if count > len(here):
            raise ConfigError(f"devices: expected at most {len(here)} (those JAX sees here), got {count}")
        devices = here[:count]
    if len(devices) not in DEVICE_COUNTS:
        raise ConfigError(f"devices: expected one of {', '.join(map(str, DEVICE_COUNTS))}, got {len(devices)}")
    if others := [d for d in devices if d.process_index != jax.process_index()]:
        raise ConfigError(f"devices: expected devices of this process, got {others[0]} of process "
                          f"{others[0].process_index}: a model over several processes is not supported")
    return Mesh(np.asarray(devices), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def param_sharding(param: Param, mesh: Mesh) -> NamedSharding:
    """Placement of one parameter: slices over the mesh, or a copy on every device.

    Raises:
        ConfigError: the tensor has one slice only (sizes that do not divide by 8) and the mesh several devices.
    """
    if param.split and param.slices % mesh.size:
        raise ConfigError(f"{param.name} {param.hf_shape}: cannot be cut into 8 slices, so it runs on one device, "
                          f"got a mesh of {mesh.size}")
    return split_axis0(mesh) if param.split else replicated(mesh)


def cache_sharding(config: ModelConfig, mesh: Mesh) -> NamedSharding:
    """Placement of one layer's keys or values [k, p, c]: heads over the mesh."""
    if config.num_slices % mesh.size:
        raise ConfigError(f"devices: sizes that do not divide into 8 slices run on one device, got {mesh.size}")
    return split_axis0(mesh)


def split_axis0(mesh: Mesh) -> NamedSharding:
    """Axis 0 (slices or heads) over the mesh. On one device this is the same as replicated, and is spelled
    so: two spellings of one placement would compile everything twice."""
    return NamedSharding(mesh, P(AXIS) if mesh.size > 1 else P())


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())

"""Meshes: which device counts there are, and who owns which slices."""

import dataclasses

import jax
import pytest

from musejax import params as table
from musejax.config import MINI, ConfigError
from musejax.sharding import DEVICE_COUNTS, cache_sharding, make_mesh, param_sharding


def test_counts():
    assert DEVICE_COUNTS == (1, 2, 4, 8)
    for count in DEVICE_COUNTS:
        assert make_mesh(count).size == count
    assert make_mesh(jax.devices()[:2]).size == 2


@pytest.mark.parametrize("count", [0, 3, 16])
def test_other_counts_are_refused(count):
    with pytest.raises(ConfigError, match=f"devices: expected .*got {count}"):
        make_mesh(count)


def test_more_devices_than_there_are(monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *a: one)
    with pytest.raises(ConfigError, match=r"expected at most 1 .*got 8"):
        make_mesh(8)


def test_devices_of_another_process():
    class Far:
        process_index = 1

        def __repr__(self):
            return "Far(id=9)"

    with pytest.raises(ConfigError, match=r"expected devices of this process, got Far\(id=9\) of process 1"):
        make_mesh([jax.devices()[0], Far()])


@pytest.mark.parametrize("count", DEVICE_COUNTS)
def test_a_device_owns_consecutive_slices(count):
    mesh = make_mesh(count)
    p = next(p for p in table.table(MINI) if p.path[-1] == "q_proj")
    owned = param_sharding(p, mesh).devices_indices_map(p.shape)
    for rank, device in enumerate(mesh.devices.flat):
        start, stop, _ = owned[device][0].indices(8)
        assert (start, stop) == (rank * 8 // count, (rank + 1) * 8 // count)


def test_sizes_without_slices_run_on_one_device():
    odd = dataclasses.replace(MINI, moe_hidden_size=96)
    p = next(p for p in table.table(odd) if p.path[-1] == "q_proj")
    param_sharding(p, make_mesh(1))
    with pytest.raises(ConfigError, match=r"q_proj .*cannot be cut into 8 slices.*mesh of 2"):
        param_sharding(p, make_mesh(2))
    with pytest.raises(ConfigError, match="one device, got 2"):
        cache_sharding(odd, make_mesh(2))

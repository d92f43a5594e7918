"""Shared set-up: eight CPU devices, the installed package, the data beside the checkout."""

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


def _set_xla_flags() -> None:
    """Must come before JAX's first use. Flags already there win, so a run can be varied from outside."""
    flags = os.environ.get("XLA_FLAGS", "")
    for flag in (
        "--xla_force_host_platform_device_count=8",
        # A collective that hangs ends the process after this time instead of the CI run.
        "--xla_cpu_collective_call_terminate_timeout_seconds=120",
    ):
        if flag.split("=")[0] not in flags:
            flags = f"{flags} {flag}"
    os.environ["XLA_FLAGS"] = flags.strip()


def _prefer_installed_package() -> None:
    """`python -m pytest` puts the checkout first in sys.path, where musejax/ has no compiled library."""
    try:
        metadata.distribution("musejax")
    except metadata.PackageNotFoundError:
        return
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != REPO]


# Eight CPU devices wherever the tests run; JAX_PLATFORMS=cuda runs single-device files on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_set_xla_flags()
_prefer_installed_package()


def pytest_report_header() -> str:
    import musejax

    return f"musejax: {', '.join(musejax.__path__)}"


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout."""
    return REPO


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the larger test data: $MUSEJAX_SHARED, else `shared` beside the checkout; or skips."""
    path = Path(os.environ.get("MUSEJAX_SHARED") or REPO.parent / "shared")
    if not (path / "data").is_dir():
        pytest.skip(f"no test data: {path}/data is missing (set MUSEJAX_SHARED)")
    return path


@pytest.fixture(scope="session")
def reference(shared):
    """The executable specification, spec/reference_numpy.py."""
    spec = importlib.util.spec_from_file_location("reference_numpy", shared / "spec/reference_numpy.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module

"""One version, one card list, one tested package; the small checkpoint travels along."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import musejax.ffi
from musejax import paths


def nano_files(repo: Path) -> list[str]:
    nano = repo / "checkpoints" / "nano"
    assert (nano / "config.json").is_file()
    return sorted(str(file.relative_to(nano)) for file in nano.rglob("*") if file.is_file())


def is_editable() -> bool:
    origin = json.loads(metadata.distribution("musejax").read_text("direct_url.json") or "{}")
    return origin.get("dir_info", {}).get("editable", False)


def test_the_installed_package_is_tested(repo):
    """Not the checkout's musejax/, which has no compiled library."""
    if is_editable():
        pytest.skip("editable install")
    installed = metadata.distribution("musejax").locate_file("musejax/paths.py")
    assert Path(paths.__file__).resolve() == Path(installed).resolve()


def test_one_version(repo):
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    assert metadata.version("musejax") == project["version"], "the installed package is of another checkout"
    assert musejax.ffi.library().version() == project["version"]


def test_version_is_written_once(repo):
    version = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["version"]
    again = [
        file.name
        for file in [repo / "CMakeLists.txt", *(repo / "ffi").rglob("*"), *(repo / "musejax").rglob("*.py")]
        if file.is_file() and version in file.read_text()
    ]
    assert again == []


def test_card_list_is_written_once(repo):
    files = [repo / "CMakeLists.txt", repo / "pyproject.toml", *(repo / "ffi").rglob("*.cmake")]
    assigned = [line for file in files for line in file.read_text().splitlines() if "100a" in line]
    assert assigned == ["set(MUSEJAX_RELEASE_ARCHS 90a 100a 103a)"]


def test_cuda_library_is_for_release_cards(repo):
    archs = musejax.ffi.build_info().cuda_archs
    release = re.search(r"RELEASE_ARCHS (.*)\)", (repo / "CMakeLists.txt").read_text())[1].split()
    assert set(archs) <= set(release) or "MUSEJAX_CUDA_ARCHS" in os.environ


def test_nano_is_in_the_installed_package(repo):
    expected = nano_files(repo)
    if is_editable():
        pytest.skip("editable install reads the checkout")
    root = "musejax/checkpoints/nano/"
    got = sorted(str(f).removeprefix(root) for f in metadata.files("musejax") if str(f).startswith(root))
    assert got == expected
    assert paths.nano_path() == Path(paths.__file__).resolve().parent / "checkpoints" / "nano"


def test_sdist_has_all_that_a_build_needs(repo, tmp_path):
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=repo, stdout=subprocess.DEVNULL)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    needed = {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "musejax/ffi.py"}
    needed |= {str(f.relative_to(repo)) for f in (repo / "ffi").rglob("*") if f.is_file()}
    assert needed <= names
    assert not [name for name in names if name.startswith(("build/", ".git/")) or name.endswith(".so")]
    assert {f"checkpoints/nano/{file}" for file in nano_files(repo)} <= names


def test_nano_path_prefers_the_installed_copy(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "musejax")
    installed = tmp_path / "musejax" / "checkpoints" / "nano"
    checkout = tmp_path / "checkpoints" / "nano"
    with pytest.raises(FileNotFoundError, match=r"expected config\.json .* got neither"):
        paths.nano_path()
    for place in (checkout, installed):
        place.mkdir(parents=True)
        (place / "config.json").touch()
        assert paths.nano_path() == place


LOG = """
[1/3] Building CUDA object CMakeFiles/musejax_cuda.dir/ffi/layer/instance_nano.cu.o
ptxas info    : Function properties for _Z5layerv
    0 bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Function properties for _Z5layerv
    0 bytes stack frame, {stores} bytes spill stores, 0 bytes spill loads
[2/3] Building CUDA object CMakeFiles/musejax_cuda.dir/ffi/other.cu.o
ptxas info    : Function properties for _Z5otherv
    8 bytes stack frame, 8888 bytes spill stores, 8 bytes spill loads
"""


@pytest.mark.parametrize(
    ("log", "kernel", "complaint"),
    [
        (LOG.format(stores=0), True, None),
        (LOG.format(stores=120), True, None),
        (LOG.format(stores=124), True, "instance_nano.cu: 248 bytes of spill stores on 2 card(s), expected at most"),
        ("", True, "no ptxas report"),
        ("", False, None),
    ],
)
def test_spill_check(repo, tmp_path, log, kernel, complaint):
    """The layer kernel may spill so much and no more, other kernels what they like, and a log that says nothing is no
    proof."""
    (tmp_path / "ffi" / "layer").mkdir(parents=True)
    if kernel:
        (tmp_path / "ffi" / "layer" / "instance_nano.cu").touch()
    (tmp_path / "log").write_text(log)
    done = subprocess.run(
        [sys.executable, repo / ".ci" / "check_spills.py", "log"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert done.returncode == (complaint is not None), done.stderr
    assert (complaint or "") in done.stderr

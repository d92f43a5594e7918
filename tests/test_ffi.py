"""The FFI chain: build info through jit, and every reason to refuse a library."""

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from musejax import ffi


@pytest.fixture
def place(monkeypatch):
    """`place(module)` puts a module, or None for a missing one, where `ffi.library` finds the CPU library."""

    def put(module):
        monkeypatch.setattr(ffi, "_loaded", {})
        monkeypatch.setitem(sys.modules, "musejax._cpu", module)

    return put


def fake(version=None, abi=ffi.ABI, targets=None):
    return SimpleNamespace(
        version=lambda: version or metadata.version("musejax"),
        abi=lambda: abi,
        targets=lambda: targets or {},
        __file__="/somewhere/_cpu.so",
    )


def test_build_info_round_trip():
    info = ffi.build_info()
    assert info.version == metadata.version("musejax")
    assert info.abi == ffi.ABI
    assert info.ffi_api >= (0, 3)
    assert any(character.isdigit() for character in info.compiler)
    assert info.cuda == bool(info.cuda_archs)


def test_library_says_the_same_as_its_handler():
    module, info = ffi.library(), ffi.build_info()
    assert (module.version(), module.abi()) == (info.version, info.abi)


def test_registered_once():
    assert ffi.library() is ffi.library("cpu")


def test_handler_runs_on_every_cpu_device():
    """Inside shard_map each of the eight fake devices calls the handler for itself."""
    ffi.library()
    devices = jax.devices("cpu")
    assert len(devices) == 8
    mesh = jax.make_mesh((8,), ("x",), devices=devices)

    def call():
        return jax.ffi.ffi_call("musejax_build_info", jax.ShapeDtypeStruct((512,), jnp.uint8))()

    spec = jax.sharding.PartitionSpec("x")
    text = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))()
    rows = jax.device_get(text).reshape(8, 512)
    assert (rows == rows[0]).all() and rows[0].any()


def test_handler_checks_its_shapes():
    ffi.library()
    call = jax.ffi.ffi_call("musejax_build_info", jax.ShapeDtypeStruct((2, 3), jnp.uint8))
    # The class of an FFI error depends on timing; its text does not.
    with pytest.raises((RuntimeError, ValueError), match=r"expected \[512\], got \[2,3\] \(argument out\)"):
        jax.block_until_ready(jax.jit(call)())


def test_missing_library(place, monkeypatch, tmp_path):
    monkeypatch.setattr(ffi, "__file__", str(tmp_path / "ffi.py"))
    place(None)
    with pytest.raises(ffi.LibraryError, match=r"the library musejax\._cpu .* got none .*`pip install \.`"):
        ffi.library()


def test_library_of_another_python(place, monkeypatch, tmp_path):
    (tmp_path / "_cpu.cpython-399-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(ffi, "__file__", str(tmp_path / "ffi.py"))
    place(None)
    with pytest.raises(ffi.LibraryError, match=r"one for another Python \(_cpu\.cpython-399-.*pip install"):
        ffi.library()


def test_library_that_does_not_load(place, monkeypatch):
    place(None)

    def broken(name):
        raise ImportError("undefined symbol: x")

    monkeypatch.setattr(ffi.importlib, "import_module", broken)
    with pytest.raises(ffi.LibraryError, match=r"got a library that does not load \(undefined symbol: x\)"):
        ffi.library()


@pytest.mark.parametrize(
    ("version", "age"), [("0.0.9", "too old"), ("0.0.10rc1", "too old"), ("99.0", "too new")]
)
def test_other_version(place, version, age):
    place(fake(version=version))
    with pytest.raises(ffi.LibraryError, match=rf"got {version}, which is {age} \(/somewhere.*pip install"):
        ffi.library()


@pytest.mark.parametrize(("abi", "age"), [(ffi.ABI - 1, "too old"), (ffi.ABI + 1, "too new")])
def test_other_abi(place, abi, age):
    place(fake(abi=abi))
    with pytest.raises(ffi.LibraryError, match=rf"with ABI {ffi.ABI}, got ABI {abi}, which is {age}"):
        ffi.library()


def test_refused_by_jaxlib(place):
    place(fake(targets={"musejax_test_refused": object()}))
    with pytest.raises(ffi.LibraryError, match=r"expected jaxlib to accept the target musejax_test_refused"):
        ffi.library()


def test_nothing_is_kept_of_a_refused_library(place):
    place(fake(version="0.0.1"))
    with pytest.raises(ffi.LibraryError):
        ffi.library()
    place(fake())
    assert ffi.library().abi() == ffi.ABI


def test_cuda_library_that_was_not_built(monkeypatch):
    monkeypatch.setattr(ffi, "_loaded", {})
    monkeypatch.setitem(sys.modules, "musejax._cuda", None)
    with pytest.raises(ffi.LibraryError, match=r"musejax\._cuda .*MUSEJAX_CUDA=ON pip install \."):
        ffi.library("cuda")


def test_unknown_platform():
    with pytest.raises(ValueError, match=r"expected one of .*'cpu'.*, got 'tpu' \(argument platform\)"):
        ffi.library("tpu")


def test_import_needs_no_library_and_starts_no_backend():
    code = """
import sys
sys.modules["musejax._cpu"] = None
import musejax, musejax.ffi, jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def test_cuda_build_info():
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("no GPU here, or not asked for: JAX_PLATFORMS=cuda pytest tests/test_ffi.py")
    assert ffi.build_info("cuda").cuda


def test_connect_draft(monkeypatch):
    """Sizes in the order in which the module takes them; refusals as errors of this module."""
    model = {name: i for i, name in enumerate((
        "hidden", "heads", "kv_heads", "head_dim", "inner", "taps", "conv_groups", "rank", "vocab", "candidates",
        "window"))}
    given = []
    monkeypatch.setattr(ffi, "library", lambda platform: SimpleNamespace(connect_draft=lambda *x: given.append(x)))
    ffi.connect_draft(model, 16, 128, (3, 1))
    assert given == [(*range(10), 128, [3, 1])]
    with pytest.raises(ffi.LibraryError, match="connect_draft: expected at most 16 layers, got 17"):
        ffi.connect_draft(model, 17, 128, (3, 1))
    for error in (RuntimeError, ValueError):
        def refuse(*_, error=error):
            raise error("connect_draft: expected GPUs that write each other's memory, got two that do not")
        monkeypatch.setattr(ffi, "library", lambda platform, refuse=refuse: SimpleNamespace(connect_draft=refuse))
        with pytest.raises(ffi.LibraryError, match="expected GPUs that write"):
            ffi.connect_draft(model, 5, 128, (0, 1))

"""Loads the compiled libraries and registers their FFI handlers, on first use.

One library a platform (`musejax._cpu`, `musejax._cuda`), the same target names in both, so callers of
`jax.ffi.ffi_call` never ask where they run. Importing this module loads no library and starts no JAX
backend: the plain JAX path needs neither.
"""

import importlib
import os
import re
import sys
import threading
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from musejax.kernels.schedule import Shape, dense_schedule, spans, unit_counts, validate

ABI = 7
"""The ABI number this code needs; `ffi/common/version.h` holds the library's and says when to raise it."""

MAX_DRAFT_LAYERS, MAX_DRAFT_CANDIDATES, MAX_DRAFT_VOCABULARY = 16, 16, 2**19
"""What the CUDA library's drafter kernels take (ffi/draft/draft.cu Refusal): layers of a launch, candidates, of which a
warp keeps so many, and ids, whose best a block ranks in shared memory."""

_MODULES = {"cpu": "musejax._cpu", "cuda": "musejax._cuda"}
_ALIASES = {"gpu": "cuda"}  # what JAX calls the platform of an NVIDIA GPU
_BUILD_INFO_BYTES = 512  # kBuildInfoBytes in ffi/common/build_info.h; the handler refuses another size

_loaded: dict[str, ModuleType] = {}
_lock = threading.Lock()


class LibraryError(RuntimeError):
    """The compiled library is missing, or does not fit this Python code or this jaxlib."""


class WaitError(RuntimeError):
    """A wait inside a kernel did not end in time. What the pass returned means nothing, caches included: start anew
    from the prompt. A further pass with such a cache is refused (`StateError`)."""


class StateError(WaitError):
    """A pass was given the cache of a pass that gave up waiting, and did not run; what it returned means nothing, too.
    Start anew from the prompt."""


_GAVE_UP = "the state of a pass that gave up"  # in ffi/common/pass_state.h


def raise_wait_error() -> None:
    """Raises what the CUDA kernels of this process have reported since the last call, and makes them ready again.

    Results of a launch are valid only if this returns after they have come to the host: a launch cannot raise, and a
    CUDA graph replays it without asking Python.

    Raises:
        WaitError: rank, SM, warp, layer, phase, the tag that was wanted and the one that was there.
        StateError: a pass was refused for the state that it was given.
    """
    module = _loaded.get("cuda")
    if module is None or not (text := module.layer_error()):
        return
    if code := module.reset_after_error():
        text += f"; the kernels cannot run again in this process (CUDA error {code})"
    raise (StateError if _GAVE_UP in text else WaitError)(text)


@dataclass(frozen=True)
class BuildInfo:
    """How a library was built, as its own handler reports it."""

    version: str
    abi: int
    ffi_api: tuple[int, int]  # of the headers; a jaxlib with an older API refuses the library
    compiler: str
    cuda_archs: tuple[str, ...]  # of the CUDA library built along; empty without one

    @property
    def cuda(self) -> bool:
        """Whether a CUDA library was built along."""
        return bool(self.cuda_archs)


def library(platform: str = "cpu") -> ModuleType:
    """The library of `platform` ("cpu", "cuda", or "gpu" as JAX calls that), checked, with all its targets registered.

    The first call starts JAX's backends; call `jax.distributed.initialize` before, if at all.

    Raises:
        LibraryError: the library is missing, too old or too new, made for another Python, or refused
            by jaxlib, or MUSEJAX_THREADS or MUSEJAX_ISA ask for what it has not. The text says what was expected, what
            came and what to do.
        ValueError: unknown platform.
    """
    platform = _ALIASES.get(platform, platform)
    if platform not in _MODULES:
        raise ValueError(f"expected one of {[*_MODULES, *_ALIASES]}, got {platform!r} (argument platform)")
    with _lock:
        if platform not in _loaded:
            module = _import(platform)
            _check(module, platform)
            _choose(module)
            _register(module, platform)
            _schedule(module)
            _loaded[platform] = module
        return _loaded[platform]


def build_info(platform: str = "cpu") -> BuildInfo:
    """Asks the handler `musejax_build_info` on a device of `platform`, through `jax.jit`.

    Raises:
        LibraryError: as `library`.
        RuntimeError: no device of `platform`.
    """
    library(platform)
    call = jax.ffi.ffi_call("musejax_build_info", jax.ShapeDtypeStruct((_BUILD_INFO_BYTES,), jnp.uint8))
    with jax.default_device(jax.local_devices(backend=platform)[0]):
        text = np.asarray(jax.jit(call)()).tobytes().rstrip(b"\0").decode()
    fields = dict(line.split("=", 1) for line in text.splitlines())
    major, minor = fields["ffi_api"].split(".")
    return BuildInfo(
        version=fields["version"],
        abi=int(fields["abi"]),
        ffi_api=(int(major), int(minor)),
        compiler=fields["compiler"],
        cuda_archs=tuple(arch for arch in fields["cuda_archs"].split(",") if arch),
    )


def layer_instances() -> list[tuple[int, ...]]:
    """The sizes for which the CUDA library has the target `musejax_layers`, compiled for each of them: (hidden, heads,
    kv_heads, head_dim, moe_hidden, moe_inner, experts, top_k, slices), `slices` being those of one device.

    Raises:
        LibraryError: as `library`.
    """
    return [tuple(sizes) for sizes in library("cuda").layer_instances()]


def connect(sizes: tuple[int, ...], slots: int, devices: tuple[int, ...]) -> None:
    """Makes GPUs of this process ready to run the layers of one model together: memory of each in which the kernels of
    the others write. Before their first launch; further calls with the same arguments cost nothing.

    Args:
        sizes: as `layer_instances` lists them.
        slots: of the longest cache of a layer.
        devices: ordinals, in the order of the slices that they hold.

    Raises:
        LibraryError: the library has no kernel of such sizes, or the GPUs cannot write each other's memory.
    """
    module = library("cuda")
    instances = layer_instances()
    if sizes not in instances:
        raise LibraryError(f"connect: expected sizes among {instances}, got {sizes}")
    try:
        module.connect(instances.index(sizes), slots, list(devices))
    except (RuntimeError, ValueError) as error:
        raise LibraryError(str(error)) from error


def connect_draft(model: dict, layers: int, slots: int, devices: tuple[int, ...]) -> None:
    """`connect` for the passes of one drafter.

    Args:
        model: as `kernels.draft_calls.draft_attribute` returns it.
        layers: of the drafter.
        slots: of its cache.
        devices: ordinals, in the order of the slices that they hold.

    Raises:
        LibraryError: the drafter has more layers than a launch takes, the library has no kernel of such sizes, or the
            GPUs cannot write each other's memory.
    """
    if layers > MAX_DRAFT_LAYERS:
        raise LibraryError(f"connect_draft: expected at most {MAX_DRAFT_LAYERS} layers, got {layers}")
    names = ("hidden", "heads", "kv_heads", "head_dim", "inner", "taps", "conv_groups", "rank", "vocab", "candidates")
    sizes = [model[name] for name in names]
    try:
        library("cuda").connect_draft(*sizes, slots, list(devices))
    except (RuntimeError, ValueError) as error:
        raise LibraryError(str(error)) from error


def _import(platform: str) -> ModuleType:
    name = _MODULES[platform]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        came = _what_is_there(name, error)
        raise LibraryError(f"{_expected(name)}, got {came}: {_remedy(platform)}") from error


def _check(module: ModuleType, platform: str) -> None:
    """Refuses a library whose version or ABI number is not ours: it is left from another build."""
    wanted, version = _installed_version() or module.version(), module.version()
    if version != wanted:
        age = "too old" if _release(version) < _release(wanted) else "too new"
        came = f"{version}, which is {age}"
    elif module.abi() != ABI:
        age = "too old" if module.abi() < ABI else "too new"
        came = f"ABI {module.abi()}, which is {age}"
    else:
        return
    where = getattr(module, "__file__", None) or "memory"
    raise LibraryError(f"{_expected(_MODULES[platform])}, got {came} ({where}): {_remedy(platform)}")


def _choose(module: ModuleType) -> None:
    """Threads and instruction set of the CPU library, as the environment asks for; neither changes a result's bits."""
    if not hasattr(module, "set_threads"):
        return
    threads = os.environ.get("MUSEJAX_THREADS", "0")
    if not threads.isdecimal() or int(threads) > 1024:
        raise LibraryError("MUSEJAX_THREADS: expected a number of threads up to 1024, 0 for one per core, "
                           f"got {threads!r}")
    module.set_threads(int(threads))
    isa = os.environ.get("MUSEJAX_ISA", "")
    if not module.set_isa(isa):
        raise LibraryError("MUSEJAX_ISA: expected avx512, avx2 or scalar, as far as this machine has them, "
                           f"got {isa!r}")


def _register(module: ModuleType, platform: str) -> None:
    # Until a backend exists JAX only queues registrations, and errors in them come up later and
    # elsewhere. So start the backends first.
    jax.local_devices()
    for target, capsule in module.targets().items():
        try:
            jax.ffi.register_ffi_target(target, capsule, platform={"cpu": "cpu", "cuda": "CUDA"}[platform])
        except Exception as error:
            raise LibraryError(
                f"expected jaxlib to accept the target {target} of {_MODULES[platform]}, got a refusal "
                f"by jaxlib {metadata.version('jaxlib')} ({error}): {_remedy(platform)}, "
                "or install the newer jaxlib that the library was built with"
            ) from error


def _schedule(module: ModuleType) -> None:
    """Which SM of the GPUs here runs which dense units, for every model that the CUDA library is compiled for."""
    if not hasattr(module, "set_schedule"):
        return
    for sms in sorted(set(module.multiprocessors())):
        for instance, (*sizes, _, slices) in enumerate(module.layer_instances()):
            shape = Shape(*sizes)
            schedule = dense_schedule(shape, slices, sms)
            validate(schedule, unit_counts(shape, slices), sms)
            module.set_schedule(instance, sms, spans(schedule).ravel().tolist())


def _installed_version() -> str | None:
    """None in a checkout that nobody installed; a library built into it is then known by its ABI number alone."""
    try:
        return metadata.version("musejax")
    except metadata.PackageNotFoundError:
        return None


def _expected(name: str) -> str:
    version = _installed_version() or "(not installed)"
    return f"expected the library {name} of musejax {version} with ABI {ABI}"


def _what_is_there(name: str, error: ImportError) -> str:
    """In words: what an import that failed found in its place."""
    if not isinstance(error, ModuleNotFoundError):
        return f"a library that does not load ({error})"
    folder = Path(__file__).parent
    stem = name.rpartition(".")[2]
    others = sorted(file.name for file in folder.glob(f"{stem}.*so"))
    if others:
        this = sys.implementation.cache_tag
        return f"one for another Python ({', '.join(others)} in {folder}; this is {this})"
    return f"none in {folder}"


def _remedy(platform: str) -> str:
    command = "pip install ." if platform == "cpu" else "MUSEJAX_CUDA=ON pip install ."
    return (
        f"run `{command}` in the checkout, with the Python that is to import it, "
        "and start that Python where the checkout's folder musejax/ does not hide the installed one"
    )


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers, to tell older from newer: "0.10.2rc1" -> (0, 10, 2)."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)

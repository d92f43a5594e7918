"""What a run was: the content of `config.json`, and whether a run may go on with the items of another."""

from __future__ import annotations

import hashlib
import platform
import re
from importlib import metadata
from pathlib import Path

from musejax.gsm8k.runfolder import RunError

FREE = frozenset({"limit", "rows", "out", "resume", "quiet", "check_determinism", "no_spec",
                  "checkpoint", "data", "overlay", "drafter"})
"""Arguments in which a resumed run may differ. The last four are paths: what lies there is compared instead."""
EDGE = 1 << 16
"""Bytes at either end of a weight file that go into a checkpoint's identity."""
_INDEXES = ("model.safetensors.index.json", "musejax.json")


def identity(folder: Path) -> dict:
    """What tells one checkpoint from another without reading it all.

    Returns:
        name: of the folder; index_sha256: of its index file, None without one; sample_sha256: of name, size and both
        ends of every weight file.
    """
    folder = folder.resolve()
    index = next((folder / name for name in _INDEXES if (folder / name).is_file()), None)
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and _holds_weights(p.relative_to(folder))):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()} {size}\n".encode())
        with open(file, "rb") as data:
            digest.update(data.read(EDGE))
            data.seek(max(0, size - EDGE))
            digest.update(data.read(EDGE))
    index_sha256 = None if index is None else hashlib.sha256(index.read_bytes()).hexdigest()
    return {"name": folder.name, "index_sha256": index_sha256, "sample_sha256": digest.hexdigest()}


def _holds_weights(path: Path) -> bool:
    """Whether a file belongs to the weights: safetensors, or below the folders of a converted checkpoint."""
    return path.suffix == ".safetensors" or len(path.parts) > 1


def quantisation(folder: Path) -> str:
    """Scheme of the experts, from headers: `bf16`, or `nvfp4` with the number of layers."""
    from musejax.checkpoint import inspect

    layers = len(inspect(folder).config.nvfp4_layers)
    return f"nvfp4 in {layers} layers" if layers else "bf16"


def versions(implementation: str, device_platform: str) -> dict:
    """Of the package, JAX, CUDA, the driver and the kernel library; None for what is not there or not used."""
    import jax

    def release(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    client = getattr(jax.devices()[0].client, "platform_version", "")
    cuda = re.search(r"cuda (\d+)", client) if device_platform == "gpu" else None
    kernels = None
    if implementation == "megakernel":
        from musejax import ffi

        info = ffi.build_info("cuda" if device_platform == "gpu" else "cpu")
        kernels = f"{info.version}, ABI {info.abi}, {info.compiler}"
    return {"musejax": release("musejax"), "jax": jax.__version__, "jaxlib": release("jaxlib"),
            "python": platform.python_version(), "cuda": cuda.group(1) if cuda else None, "driver": _driver(),
            "kernel_library": kernels}


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found.group() if found else None


def devices(mesh) -> dict:
    """Names and number of the devices, and the mesh."""
    all_of = list(mesh.devices.flat)
    return {"platform": all_of[0].platform, "names": sorted({d.device_kind for d in all_of}), "count": len(all_of),
            "processor": _processor() if all_of[0].platform == "cpu" else None,
            "mesh": dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))}


def _processor() -> str:
    """Model name of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    return found.group(1) if found else platform.processor()


def differences(old: dict, new: dict) -> list[str]:
    """One line for each setting in which two configurations differ, those that may left out."""
    a, b = _flat(_compared(old)), _flat(_compared(new))
    missing = "(not there)"
    return [f"{name}: was {a.get(name, missing)!r}, is {b.get(name, missing)!r}"
            for name in sorted(a.keys() | b.keys()) if a.get(name, missing) != b.get(name, missing)]


def check_same(old: dict, new: dict, folder: Path) -> None:
    """Raises RunError, with all differences, if a run may not go on with the items of another."""
    found = differences(old, new)
    if found:
        raise RunError(f"--resume {folder}: expected the configuration of the items there, got another one:\n  "
                       + "\n  ".join(found) + "\ntake the same, or name a new folder with --out")


def date_of(config: dict | None) -> str | None:
    """The date that the prompts of a run were given."""
    prompt = (config or {}).get("prompt")
    return prompt.get("date") if isinstance(prompt, dict) else None


def _compared(config: dict) -> dict:
    arguments = config.get("arguments")
    kept = {k: v for k, v in arguments.items() if k not in FREE} if isinstance(arguments, dict) else arguments
    return {**config, "arguments": kept}


def _flat(value, name: str = "") -> dict:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{name}.{key}" if name else key).items()}

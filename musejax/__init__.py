"""Muse Spark Open in JAX.

    model = musejax.load("checkpoints/nano")
    print(musejax.generate(model, "A prompt").text)

Public names are imported on first use, so that `import musejax` starts no JAX backend.
"""

import importlib

_PUBLIC = {
    "load": "musejax.loading",
    "Model": "musejax.loading",
    "generate": "musejax.generation",
    "stream": "musejax.generation",
    "Generation": "musejax.generation",
    "decode_step": "musejax.decode",
    "DecodeState": "musejax.decode",
    "Sampling": "musejax.sampling",
    "ModelConfig": "musejax.config",
    "DecodeConfig": "musejax.config",
    "MuseSpark": "musejax.model.module",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name):
    if name == "__version__":
        from importlib.metadata import version

        return version("musejax")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'musejax' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)

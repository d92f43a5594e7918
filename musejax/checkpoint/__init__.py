"""Checkpoints: published safetensors folders, and the converted form that restores onto several devices.

Data flows `shards` (files) -> `published` (names) -> `load`, or -> `conversion` -> `container` -> `load`.
"""

from musejax.checkpoint.container import is_converted
from musejax.checkpoint.conversion import convert
from musejax.checkpoint.errors import CheckpointError
from musejax.checkpoint.load import load_params
from musejax.checkpoint.published import open_published
from musejax.checkpoint.quantisation import quantize
from musejax.checkpoint.summary import Group, Summary, inspect, summary_of

__all__ = ["CheckpointError", "Group", "Summary", "convert", "inspect", "is_converted", "load_params",
           "open_published", "quantize", "summary_of"]

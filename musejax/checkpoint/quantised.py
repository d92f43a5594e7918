"""NVFP4 experts in published checkpoints: what the folder declares, which layers have them, whether scales are sound.

A layer has NVFP4 experts if its tensors say so; declared patterns of excluded modules are not interpreted, since the
tensors know better. The declaration (`hf_quant_config.json`, or `quantization_config` in `config.json`) must be of
a format this package runs, and must not contradict the tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from musejax.checkpoint.errors import Faults
from musejax.checkpoint.shards import Tensor
from musejax.config import ModelConfig
from musejax.nvfp4 import BLOCK
from musejax.params import TEXT

DECLARATION = "hf_quant_config.json"
ALGORITHM = "NVFP4"
SCALES = ("_weight_scale", "_weight_scale_2", "_input_scale")
"""Endings of the tensors that stand beside the codes of `gate_up_proj` and `down_proj`."""

_EXPERTS = re.compile(re.escape(TEXT) + r"layers\.(\d+)\.mlp\.experts\.(?:gate_up_proj|down_proj)(_\w+)?")


# ------------------------------------------------------------------ declaration


def declared(folder: Path, faults: Faults) -> bool:
    """Whether a folder declares NVFP4; another algorithm, block size or an unreadable file goes to `faults`."""
    found = False
    for name, settings in _declarations(folder, faults):
        found = True
        algorithm = settings.get("quant_algo")
        if algorithm != ALGORITHM:
            faults.add("unknown quantisation", f"{name}: expected quant_algo {ALGORITHM}, got {algorithm!r}")
            continue
        for size in _group_sizes(settings):
            if size != BLOCK:
                faults.add("unknown quantisation", f"{name}: expected group_size {BLOCK}, got {size!r}")
    return found


def _declarations(folder: Path, faults: Faults) -> Iterable[tuple[str, dict]]:
    """(file, settings) of each place that declares a quantisation."""
    for name in (DECLARATION, "config.json"):
        if not (folder / name).is_file():
            continue
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError(f"expected an object, got {type(content).__name__}")
        except (OSError, ValueError) as err:
            faults.add("unreadable file", f"{folder.name}/{name}: {err}")
            continue
        text = content.get("text_config")
        settings = content.get("quantization") if name == DECLARATION else content.get("quantization_config") or (
            text.get("quantization_config") if isinstance(text, dict) else None)
        if isinstance(settings, dict):
            yield f"{folder.name}/{name}", settings
        elif settings is not None or name == DECLARATION:
            faults.add("unknown quantisation", f"{folder.name}/{name}: expected an object that describes the "
                                               f"quantisation, got {settings!r}")


def _group_sizes(settings: dict) -> list:
    """Every block size that is stated: once for all, or in groups."""
    sizes = [settings["group_size"]] if "group_size" in settings else []
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and "group_size" in weights:
            sizes.append(weights["group_size"])
    return sizes


# ------------------------------------------------------------------ tensors


def nvfp4_layers(found: Mapping[str, Tensor], config: ModelConfig) -> tuple[int, ...]:
    """Layers with any sign of NVFP4 experts: a scale, or packed codes. What such a layer lacks is then missing.

    Args:
        found: tensors by published name.
    """
    layers = set()
    for name, tensor in found.items():
        match = _EXPERTS.fullmatch(name)
        if match and (match[2] in SCALES if match[2] else tensor.dtype == "U8"):
            layers.add(int(match[1]))
    return tuple(i for i in sorted(layers) if i < config.num_hidden_layers)


def check_values(key: str, tensors: Mapping[str, Tensor], faults: Faults) -> None:
    """Adds to `faults` what is wrong with the scales of one NVFP4 matrix stack. Reads them expert by expert.

    Args:
        key: name of the codes, such as `...mlp.experts.down_proj`.
        tensors: codes and scales by published name.
    """
    codes, scales = tensors[key].map(), tensors[key + "_weight_scale"].map()
    for e in range(len(scales)):
        _check_blocks(f"{key}_weight_scale", e, scales[e].view(np.uint8), codes[e], faults)
    total = np.asarray(tensors[key + "_weight_scale_2"].map())
    for index in np.argwhere(~(np.isfinite(total) & (total >= 0)))[:1]:
        faults.add("bad global scale", f"{key}_weight_scale_2{index.tolist()}: expected a finite number of at least 0, "
                                       f"got {total[tuple(index)]}")
    given = np.asarray(tensors[key + "_input_scale"].map())
    for index in np.argwhere(~(np.isfinite(given) & (given > 0)))[:1]:
        faults.add("bad input scale", f"{key}_input_scale{index.tolist()}: expected a finite number above 0, got "
                                      f"{given[tuple(index)]}")


def _check_blocks(name: str, expert: int, bits_nb: np.ndarray, codes_nk: np.ndarray, faults: Faults) -> None:
    """One expert's block scales: none is NaN or has a sign; a scale of 0 stands only over codes of 0."""
    def first(mask):
        return [expert, *map(int, np.argwhere(mask)[0])]

    if (bits_nb.max(initial=0)) >= 0x7F:  # 0x7F is NaN, and everything above it has the sign bit
        nan = bits_nb & 0x7F == 0x7F
        if nan.any():
            faults.add("bad block scale", f"{name}{first(nan)}: expected a number, got NaN ({nan.sum()} in this "
                                          "expert)")
        negative = (bits_nb >= 0x80) & ~nan
        if negative.any():
            faults.add("bad block scale", f"{name}{first(negative)}: expected no sign, got byte "
                                          f"{bits_nb[negative][0]:#04x} ({negative.sum()} in this expert)")
    zero = bits_nb == 0
    if zero.any():
        rows, blocks = np.nonzero(zero)
        packed = codes_nk.reshape(*bits_nb.shape, BLOCK // 2)[rows, blocks]
        lost = ((packed & 0x77) != 0).any(axis=1)  # the sign bit of a zero code does no harm
        if lost.any():
            at = [expert, int(rows[lost][0]), int(blocks[lost][0])]
            faults.add("bad block scale", f"{name}{at}: expected codes of 0 under a scale of 0, got others "
                                          f"({lost.sum()} blocks of this expert)")

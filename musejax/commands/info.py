"""`musejax info`: configuration, parameter and byte counts, dtypes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from musejax.commands import UsageError, checkpoint_folder, note


def run(args: Namespace) -> int:
    """Prints tables, or one JSON object.

    Raises:
        UsageError, ConfigError, CheckpointError: what was expected and found.
    """
    report = gather(args.checkpoint)
    print(json.dumps(report) if args.json else as_text(report))
    return 0


def gather(name: str | None) -> dict:
    """The report as plain data.

    Args:
        name: of a preset, or a checkpoint folder (`./mini` if it is called like a preset); None is the shipped nano.

    Raises:
        UsageError, ConfigError, CheckpointError: what was expected and found.
    """
    import jax

    from musejax.checkpoint import inspect, summary_of
    from musejax.checkpoint.container import is_converted, unfinished_reason
    from musejax.config import PRESETS
    from musejax.info import byte_counts, config_summary, parameter_counts

    if name in PRESETS:
        if Path(name).exists():
            note(f"{name} is taken as the named configuration; the folder is ./{name}")
        title, summary = f"configuration {name}", summary_of(PRESETS[name])
    elif name is not None and not Path(name).exists() and not unfinished_reason(Path(name)):
        raise UsageError(f"{name}: expected a checkpoint folder or one of {', '.join(PRESETS)}, found neither")
    else:
        path = checkpoint_folder(name)
        if is_converted(path):  # the library that knows the packed form starts the backends, and a GPU would take long
            jax.config.update("jax_platforms", "cpu")
        summary = inspect(path)
        title = f"{summary.form} checkpoint {path}"
    return {
        "name": title,
        "form": summary.form,
        "config": config_summary(summary.config),
        "parameters": parameter_counts(summary.config),
        "bytes": byte_counts(summary.config),
        "groups": {group: {"dtypes": list(g.dtypes), "tensors": g.tensors, "parameters": g.parameters,
                           "bytes": g.nbytes} for group, g in summary.groups.items()},
        "files": summary.files,
        "skipped": {"tensors": summary.skipped_tensors, "bytes": summary.skipped_bytes},
        "container": {"format_number": summary.format_number, "packed": summary.packed_bytes > 0,
                      "packed_bytes": summary.packed_bytes} if summary.form == "converted" else None,
    }


PARAMETERS = {
    "attention": "attention (q, k, v, gate, o)",
    "pooler_and_unpooler": "pooler and unpooler",
    "router": "router",
    "vectors": "vectors (gains, gates, selection bias)",
    "one_expert": "one expert",
    "all_experts": "all {num_local_experts} experts of a layer",
    "layer": "one layer",
    "all_layers": "all {num_hidden_layers} layers",
    "embedding": "embedding",
    "lm_head": "lm_head",
    "total": "total",
    "active": "active, all layers ({num_experts_per_tok} experts)",
    "active_with_lm_head": "active, with lm_head",
}
BYTES = {
    "experts_of_a_layer": "experts of a layer",
    "rest_of_a_layer": "rest of a layer",
    "layer": "one layer",
    "total": "total",
    "layer_nvfp4": "one layer, experts in NVFP4",
    "total_nvfp4": "total, experts in NVFP4 but in the first and last layer",
}


def as_text(report: dict) -> str:
    """The report as tables."""
    config = report["config"]
    lines = [report["name"], "", "config"]
    lines += [f"  {key:<28} {value}" for key, value in config.items()]
    lines += ["", "parameters"]
    lines += [_line(label.format(**config), report["parameters"][key]) for key, label in PARAMETERS.items()]
    lines += ["", "bytes (router in float32, the rest in bfloat16 where nothing else is said)"]
    lines += [_line(label, report["bytes"][key], _units(report["bytes"][key])) for key, label in BYTES.items()
              if key in report["bytes"]]
    container = report["container"]
    stored = ("would be stored" if report["form"] == "config" else
              "before packing" if container and container["packed"] else "as stored")
    lines += ["", f"groups, {stored:<38} {'parameters':>23} {'bytes':>23}  tensors  dtypes"]
    lines += [f"  {name:<44} {g['parameters']:>25,} {g['bytes']:>23,} {g['tensors']:>8}  {', '.join(g['dtypes'])}"
              for name, g in report["groups"].items()]
    if report["form"] != "config":
        skipped = report["skipped"]
        lines += ["", f"{report['files']} data files; {skipped['tensors']} tensors ({skipped['bytes']:,} bytes) "
                      "that the decoder does not use"]
    if container:
        form = f"packed form, {container['packed_bytes']:,} bytes" if container["packed"] else "table form"
        lines += [f"container format {container['format_number']}, {form}"]
    return "\n".join(lines)


def _line(label: str, count: int, more: str = "") -> str:
    return f"  {label:<58} {count:>23,}{more}"


def _units(count: int) -> str:
    """A byte count again, in decimal units."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if count >= 10 * size:
            return f"  {count / size:,.1f} {unit}"
    return ""
